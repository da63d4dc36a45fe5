"""Devices close together: the smallest part of the machine that can serve the request.

The machine is a tree: the node, its NUMA nodes, their PCIe switches. The deepest subtree with
enough devices wins; among equals the one whose chain up to the node has the most subtrees in use,
so that empty switches and NUMA nodes stay empty.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import Final

from cluster.scheduler.exact.devices.candidates import Candidate, by_score
from cluster.scheduler.tables.devices.node import DeviceState
from cluster.scheduler.tables.devices.request import Scope

_LEVELS: Final = (Scope.NODE, Scope.NUMA_NODE, Scope.PCIE)


def has_tree(states: Sequence[DeviceState]) -> bool:
    """Return whether every device says where it is attached."""
    return all(state.unit.has_topology for state in states)


def subtree_of(state: DeviceState, level: Scope) -> tuple[Hashable, ...]:
    """Return which subtree of the level a device belongs to."""
    unit = state.unit
    chain: tuple[Hashable, ...] = (unit.numa, unit.pcie)
    return chain[: max(0, level - Scope.NODE)]


def choose_close(
    found: Sequence[Candidate],
    states: Sequence[DeviceState],
    count: int,
    *,
    scope: Scope = Scope.NONE,
    shared: bool = False,
    preferred: Set[int] = frozenset(),
) -> tuple[Candidate, ...] | None:
    """Return `count` candidates, or None if no subtree within `scope` has as many.

    states: all devices of the type, which say what is in use. scope: NONE, NODE, NUMA_NODE or PCIE.
    shared: the pod takes a part of each; higher scores are preferred then. preferred: minors of
    which as many as possible are taken, before the depth of the subtree counts.
    """
    used = {
        (level, subtree_of(state, level)) for state in states if state.used for level in _LEVELS
    }
    ranked = [
        (
            min(count, sum(one.minor in preferred for one in members)),
            level,
            _in_use(members[0].state, level, used),
            max(one.score for one in members) if shared else 0,
            members,
        )
        for level in reversed(_LEVELS)
        if level >= scope
        for members in _subtrees(found, level)
        if len(members) >= count
    ]
    if not ranked:
        return None
    # The first of equals: the lowest NUMA node, then the lowest PCIe id.
    best = max(ranked, key=lambda each: each[:4])[-1]
    by_rank = sorted(best, key=by_score) if shared else best
    return tuple(sorted(by_rank, key=lambda one: one.minor not in preferred)[:count])


def _subtrees(found: Sequence[Candidate], level: Scope) -> list[list[Candidate]]:
    """Return the candidates of each subtree of the level, subtrees and minors ascending."""
    subtrees: dict[tuple[Hashable, ...], list[Candidate]] = {}
    for one in sorted(found, key=lambda one: (one.state.unit.numa, one.state.unit.pcie, one.minor)):
        subtrees.setdefault(subtree_of(one.state, level), []).append(one)
    return [sorted(members, key=lambda one: one.minor) for members in subtrees.values()]


def _in_use(state: DeviceState, level: Scope, used: Set[tuple[Scope, tuple[Hashable, ...]]]) -> int:
    return sum((above, subtree_of(state, above)) in used for above in _LEVELS if above <= level)
