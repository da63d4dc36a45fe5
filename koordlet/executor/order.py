"""Finds the order in which values of one resource are written along the cgroup tree. Pure.

A parent's limit caps its children. Growing values must go to parents first and shrinking values to
children first. Otherwise the kernel refuses (v1 quota and cpuset), or a child exceeds its parent
for a moment. Both at once, such as a cpuset that moves to other CPUs, take two passes: top-down
every group gets the join of its old and new value, then bottom-up its new value. So no child
exceeds its parent between two writes, unless it did before or its new value does.

Where the kernel enforces the rule, the new values are first adapted to it. A group that koordlet
does not manage keeps its value, so its managed parents must contain that value, and its managed
children must stay within it.

Facts: docs/facts/kernel.md, "What a write does".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from linux.cgroup_paths import parent_of

TOP: Final = -1
"""No limit: greater than every number. As a bit mask all bits, so also greater than every set."""


class Lattice(Enum):
    """How two values compare. Values are ints: numbers, or bit masks for CPU sets."""

    NUMBERS = "numbers"
    SETS = "sets"

    def le(self, one: int, other: int) -> bool:
        if self is Lattice.SETS:
            return one & ~other == 0
        return other == TOP or (one != TOP and one <= other)

    def join(self, one: int, other: int) -> int:
        if self is Lattice.SETS:
            return one | other
        return TOP if TOP in (one, other) else max(one, other)

    def meet(self, one: int, other: int) -> int:
        if self is Lattice.SETS:
            return one & other
        if one == TOP:
            return other
        return one if other == TOP else min(one, other)


@dataclass(frozen=True, slots=True)
class Node:
    """A group's observed and desired value; `wanted` None: it keeps its value."""

    found: int
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One write. `final` is False for the widening step before a narrower value."""

    cgroup: str
    value: int
    final: bool


@dataclass(slots=True)
class Order:
    """The steps in order, and how the kernel's rules changed the desired values.

    finals: the value that each managed group ends with. notes: why it is not the desired one.
    blocked: group -> the group that allows no part of its desired value; it keeps its value.
    """

    steps: list[Step] = field(default_factory=list)
    finals: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)


def depth(cgroup: str) -> int:
    return cgroup.count("/")


def ancestors(cgroup: str) -> Iterable[str]:
    """Yield the directories above, nearest first, the hierarchy's root ("") last."""
    while cgroup:
        cgroup = parent_of(cgroup)
        yield cgroup


def order(nodes: Mapping[str, Node], lattice: Lattice, *, enforced: bool) -> Order:
    """Return the writes that bring `nodes` to their desired values.

    enforced: the kernel refuses a child above its parent. Then `nodes` must also hold the unmanaged
    groups that matter: the nearest limiting ancestors, and the descendants of groups that shrink.
    """
    result = Order()
    frozen = {cgroup for cgroup, node in nodes.items() if node.wanted is None}
    by_depth = sorted(nodes, key=lambda cgroup: (depth(cgroup), cgroup))
    if enforced:
        while True:
            finals, notes, blocked = _bounded(nodes, by_depth, frozen, lattice)
            result.blocked |= blocked
            if not blocked:
                break
            frozen |= blocked.keys()
        result.notes = notes
    else:
        finals = {cgroup: _wish(node) for cgroup, node in nodes.items()}
    managed = [cgroup for cgroup in by_depth if cgroup not in frozen]
    result.finals = {cgroup: finals[cgroup] for cgroup in managed}
    current = {cgroup: nodes[cgroup].found for cgroup in managed}
    for cgroup in managed:
        wide = lattice.join(current[cgroup], finals[cgroup])
        if wide != current[cgroup]:
            result.steps.append(Step(cgroup, wide, wide == finals[cgroup]))
            current[cgroup] = wide
    for cgroup in reversed(managed):
        if current[cgroup] != finals[cgroup]:
            result.steps.append(Step(cgroup, finals[cgroup], True))
    return result


def _wish(node: Node) -> int:
    return node.found if node.wanted is None else node.wanted


def _bounded(
    nodes: Mapping[str, Node], by_depth: list[str], frozen: set[str], lattice: Lattice
) -> tuple[dict[str, int], dict[str, str], dict[str, str]]:
    """Return (final values, notes, groups that are now blocked) under the kernel's rule."""
    finals = {
        cgroup: node.found if cgroup in frozen else _wish(node) for cgroup, node in nodes.items()
    }
    notes: dict[str, str] = {}
    for cgroup in reversed(by_depth):
        need = finals[cgroup]
        if cgroup not in frozen or need == TOP:
            continue  # the kernel accepts an unlimited child below any parent
        for above in ancestors(cgroup):
            if above in finals and above not in frozen and not lattice.le(need, finals[above]):
                finals[above] = lattice.join(need, finals[above])
                notes[above] = f"kept around {cgroup}, which is not managed here"
    blocked: dict[str, str] = {}
    for cgroup in by_depth:
        if cgroup in frozen:
            continue
        if lattice is Lattice.NUMBERS and finals[cgroup] == TOP:
            continue
        bound = next(
            (
                above
                for above in ancestors(cgroup)
                if above in finals and not (lattice is Lattice.NUMBERS and finals[above] == TOP)
            ),
            None,
        )
        if bound is None or lattice.le(finals[cgroup], finals[bound]):
            continue
        inside = lattice.meet(finals[cgroup], finals[bound])
        if lattice is Lattice.SETS and inside == 0:
            blocked[cgroup] = bound or "the root group"
        else:
            finals[cgroup] = inside
            notes[cgroup] = f"bounded by {bound or 'the root group'}"
    return finals, notes, blocked
