"""Which change would let a pod run: how many nodes fail in one constraint alone, and by how much.

Each node gets the set of constraints that hold it back, over all filters instead of the first one
alone. Nodes with the smallest such sets are the nearest; the constraint that keeps most of them is
the one to relax first. Counts are exact. The work is a few passes over the masks that the refusal
left, about 0.3 ms at 5,000 nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.core import Taint
from apis.keys import CPU, EPHEMERAL_STORAGE, MEMORY
from apis.taints import tolerated
from cluster.scheduler.plugins.contract import Filter, Mask, Reason
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

Rows = NDArray[np.intp]

_MOST_CONSTRAINTS: Final = 62
"""Bits of a number by which the constraints of a node are compared; constraints beyond these count
as one. Pods meet a dozen at most."""
_MOST_CHANGES: Final = 3
"""Changes that are kept, the most helpful ones. Chosen: a reader tries one; the message has two."""
_IN_MESSAGE: Final = 2
"""Changes in a pod's condition and event, which hold 1,024 bytes in all."""
_MOST_NAMES: Final = 3
"""Example nodes of a change. Chosen: enough to look at one."""
_LONGEST_LISTED: Final = 3
"""Constraints that are named when a node fails in several; further ones are counted. Chosen: each
has some 40 characters, and a condition's text is read in one line. Twice the value doubles the
line."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What holds nodes back: a plugin and the text of its reason."""

    plugin: str
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """What would have to be different, and how many nodes that would free.

    constraints: all that hold these nodes back. nodes: how many nodes have exactly these. examples:
    names of some. text: a clause such as "2 of 3000 nodes lack only 1Gi of memory".
    """

    constraints: tuple[Constraint, ...]
    nodes: int
    examples: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """The nearest nodes.

    constraints: how many each of them fails in. changes: the one that frees most nodes first.
    but_for: the plugin that refused the pod before any node was looked at, or ""; the one change
    then says how many nodes would take the pod without it.
    """

    constraints: int
    changes: tuple[Change, ...]
    but_for: str = ""

    @property
    def sentence(self) -> str:
        """Return what a condition says, such as "One change away: 2 of 9 nodes lack only ...".

        It has no comma followed by a blank: tools split kube-scheduler's message at these.
        """
        if not self.changes:
            return ""
        shown = "; ".join(change.text for change in self.changes[:_IN_MESSAGE])
        if self.but_for:
            return f"{shown}."
        away = "One change" if self.constraints == 1 else f"{self.constraints} changes"
        return f"{away} away: {shown}.".replace(", ", " and ")


NONE: Final = Counterfactuals(0, ())


def but_for(plugin: str, message: str, tables: Tables, feasible: Rows) -> Counterfactuals:
    """Return how many nodes would take a pod that a plugin refused before looking at nodes.

    feasible: rows that pass all filters.
    """
    count = len(feasible)
    whether = f"{count} of {tables.nodes.count} nodes would" if count else "no node would"
    text = f"Without {plugin} {whether} take the pod"
    change = Change((Constraint(plugin, message),), count, _names(tables, feasible), text)
    return Counterfactuals(1, (change,), but_for=plugin)


def nearest(
    pod: PodShape,
    tables: Tables,
    masks: Iterable[tuple[Filter, Mask]],
    *,
    refused_rows: Mapping[int, tuple[str, Reason]] = MappingProxyType({}),
) -> Counterfactuals:
    """Return the nodes that fail in the fewest constraints, by what they fail in.

    masks, refused_rows: as `diagnosis.diagnose` takes them.
    """
    nodes = tables.nodes
    length = len(nodes)
    alive = nodes.alive[:length]
    constraints: list[Constraint] = []
    numbers: dict[Constraint, int] = {}
    codes = np.zeros(length, dtype=np.int64)

    def bit_of(constraint: Constraint) -> int:
        number = numbers.get(constraint)
        if number is None:
            number = numbers[constraint] = min(len(constraints), _MOST_CONSTRAINTS - 1)
            if len(constraints) < _MOST_CONSTRAINTS:
                constraints.append(constraint)
        return 1 << number

    for plugin, mask in masks:
        if not mask.any():
            continue
        bits: dict[Constraint, int] = {}
        for number, reason in enumerate(plugin.reasons(pod)):
            constraint = Constraint(plugin.name, reason.text)
            bits[constraint] = bits.get(constraint, 0) | 1 << number
        for constraint, held_by in bits.items():
            held = (mask & held_by) != 0
            if held.any():
                codes[held] |= bit_of(constraint)
    for row, (name, reason) in refused_rows.items():
        codes[row] |= bit_of(Constraint(name, reason.text))
    held_codes = codes[alive & (codes != 0)]
    if not len(held_codes):
        return NONE
    found, counts = np.unique(held_codes, return_counts=True)
    sizes = [int(code).bit_count() for code in found]
    fewest = min(sizes)
    changes: list[Change] = []
    for code, count, size in zip(found, counts, sizes, strict=True):
        if size != fewest:
            continue
        named = tuple(each for n, each in enumerate(constraints) if int(code) >> n & 1)
        if fewest == 1:
            rows = np.flatnonzero(alive & (codes == code))
            changes += _single(pod, tables, named[0], rows)
        else:
            changes.append(_several(tables, named, int(count), codes, int(code)))
    changes.sort(key=lambda change: (-change.nodes, change.text))
    return Counterfactuals(fewest, tuple(changes[:_MOST_CHANGES]))


def _several(
    tables: Tables, named: tuple[Constraint, ...], count: int, codes: NDArray[np.int64], code: int
) -> Change:
    texts = [each.reason for each in named[:_LONGEST_LISTED]]
    if len(named) > _LONGEST_LISTED:
        texts.append(f"{len(named) - _LONGEST_LISTED} more")
    clause = f"{count} of {tables.nodes.count} nodes have only: {' and '.join(texts)}"
    first = np.flatnonzero(tables.nodes.alive[: len(codes)] & (codes == code))[:_MOST_NAMES]
    return Change(named, count, _names(tables, first), clause)


def _names(tables: Tables, rows: Rows) -> tuple[str, ...]:
    return tuple(tables.nodes.name(int(row)) for row in rows[:_MOST_NAMES])


# --- one constraint alone ------------------------------------------------------------------------


def _single(pod: PodShape, tables: Tables, constraint: Constraint, rows: Rows) -> Iterable[Change]:
    """Yield what would free the rows that fail in this constraint alone."""
    split = _SPLITS.get(constraint.plugin)
    parts: Sequence[tuple[Rows, str]] = split(pod, tables, constraint, rows) if split else ()
    if not parts:
        parts = ((rows, f"pass all but {constraint.plugin} ({constraint.reason})"),)
    for part, text in parts:
        clause = f"{len(part)} of {tables.nodes.count} nodes {text}"
        yield Change((constraint,), len(part), _names(tables, part), clause)


Split = Callable[[PodShape, Tables, Constraint, Rows], Sequence[tuple[Rows, str]]]
"""Divides rows that one constraint alone holds back by what would have to change, with a clause for
each part that continues "17 of 3000 nodes"."""

_LACKS: Final = "Insufficient "


def _by_amount(
    pod: PodShape, tables: Tables, constraint: Constraint, rows: Rows
) -> Sequence[tuple[Rows, str]]:
    """Say how much of a resource is missing on the nearest node, and on how many nodes no more."""
    nodes = tables.nodes
    if not constraint.reason.startswith(_LACKS):
        return ((rows, "lack only room for one more pod"),)
    name = constraint.reason.removeprefix(_LACKS)
    request = pod.requests.get(name, 0)
    column = nodes.resources.find(name)
    if column is None:
        return ((rows, f"lack only {amount_text(name, request)} of {name}"),)
    free = np.maximum(nodes.allocatable[rows, column] - nodes.requested[rows, column], 0)
    missing = request - free
    if missing.min() <= 0:
        # What counts there besides the pods on the node, such as nominated ones, is not in the
        # columns.
        return ((rows, f"lack only {name}"),)
    text, most = _rounded_up(name, int(missing.min()))
    near = missing <= most
    count = int(np.count_nonzero(near))
    # The nearest nodes come first among the examples.
    ordered = rows[np.argsort(missing, kind="stable")]
    if count == len(rows):
        return ((ordered, f"lack only {text} of {name}"),)
    return ((ordered, f"lack only {name} ({count} of them {text} or less)"),)


def _by_taint(
    pod: PodShape, tables: Tables, constraint: Constraint, rows: Rows
) -> Sequence[tuple[Rows, str]]:
    """Name the taints that the pod would have to tolerate."""
    sets = tables.nodes.taint_set[rows]
    parts: dict[str, list[Rows]] = {}
    for number in np.unique(sets):
        missing = [
            _taint_text(taint)
            for taint in tables.nodes.taints(int(number))
            if taint.effect in ("NoSchedule", "NoExecute") and not tolerated(taint, pod.tolerations)
        ]
        noun = "taint" if len(missing) == 1 else "taints"
        text = f"pass all but the {noun} {' and '.join(sorted(missing))}"
        parts.setdefault(text, []).append(rows[sets == number])
    return [(np.sort(np.concatenate(each)), text) for text, each in parts.items()]


def _taint_text(taint: Taint) -> str:
    value = f"={taint.value}" if taint.value else ""
    return f"{taint.key}{value}:{taint.effect}"


def _by_label(
    pod: PodShape, tables: Tables, constraint: Constraint, rows: Rows
) -> Sequence[tuple[Rows, str]]:
    """Name the label of the nodeSelector that is missing, where only one is."""
    own = pod.affinity.node_affinity if pod.affinity else None
    if not pod.node_selector or (own is not None and own.required is not None):
        return ()
    missing = {
        f"{key}={value}": tables.nodes.labels.column(key).ids[rows]
        != (tables.nodes.labels.column(key).known(value) or -1)
        for key, value in pod.node_selector.items()
    }
    total = np.sum(list(missing.values()), axis=0)
    parts = [
        (rows[lacks & (total == 1)], f"pass all but nodeSelector {label}")
        for label, lacks in missing.items()
    ]
    parts.append((rows[total > 1], "pass all but several labels of nodeSelector"))
    return [part for part in parts if len(part[0])]


_SPLITS: Final[Mapping[str, Split]] = MappingProxyType(
    {
        "NodeResourcesFit": _by_amount,
        "TaintToleration": _by_taint,
        "NodeAffinity": _by_label,
        "NodeUnschedulable": lambda pod, tables, constraint, rows: (
            (rows, "pass all but being cordoned (spec.unschedulable)"),
        ),
    }
)


# --- amounts -------------------------------------------------------------------------------------

_BINARY: Final = (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))
_LARGEST_NUMBER: Final = 10
"""From ten units on an amount is rounded to whole ones: a reader compares sizes, not bytes."""


def amount_text(name: str, amount: int) -> str:
    """Return an amount of a resource, rounded up, as manifests have it: 500m, 2, 1Gi."""
    return _rounded_up(name, amount)[0]


def _rounded_up(name: str, amount: int) -> tuple[str, int]:
    """Return the text of an amount and what the text stands for, which is not less."""
    if name == CPU:
        text = f"{amount // 1000}" if amount % 1000 == 0 else f"{amount}m"
        return text, amount
    if name in (MEMORY, EPHEMERAL_STORAGE) or name.endswith("memory"):
        for suffix, unit in _BINARY:
            if amount % unit == 0 or amount >= _LARGEST_NUMBER * unit:
                whole = -(-amount // unit)
                return f"{whole}{suffix}", whole * unit
    return str(amount), amount
