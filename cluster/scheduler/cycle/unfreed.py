"""Why no eviction makes room for a pod: kube-scheduler's text, with counts of nodes by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.victim_columns import Costs, MayLeave
from cluster.scheduler.cycle.victims import MayBeVictim, may_go
from cluster.scheduler.plugins.contract import Filter, Mask
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_NO_VICTIMS: Final = "No preemption victims found for incoming pod"
_NOT_HELPFUL: Final = "Preemption is not helpful for scheduling"

_MOST_EXPLAINED: Final = 16
"""Nodes on which a trial shows what holds them back without their victims; others are counted with
what holds them back now. Chosen: 16 trials of 20 pods each take 10 ms, and a text needs no more."""


def not_helpful(tables: Tables) -> NotFound:
    """Return the answer where evictions help on no node."""
    nodes = tables.nodes.count
    return NotFound(_none(nodes, {_NOT_HELPFUL: nodes}))


def no_node(
    checks: RowChecks,
    pod: PendingPod[PodShape],
    resolvable: int,
    costs: Costs,
    by_hand: NDArray[np.intp],
    evaluation: Evaluation,
    may_be_victim: MayBeVictim,
) -> NotFound:
    """Return why a search found no node. resolvable: how many nodes it looked at. costs, by_hand:
    the nodes whose victims follow from amounts, and the rows of all others."""
    nodes = checks.tables.nodes.count
    reasons = Counter(costs.short)
    reasons[_NOT_HELPFUL] += nodes - resolvable
    reasons[_NO_VICTIMS] += costs.without + int(np.count_nonzero(costs.count == 0))
    reasons += _why(checks, pod, by_hand, evaluation, may_be_victim)
    return NotFound(_none(nodes, reasons))


def _why(
    checks: RowChecks,
    pod: PendingPod[PodShape],
    rows: NDArray[np.intp],
    evaluation: Evaluation,
    may_be_victim: MayBeVictim,
) -> Counter[str]:
    """Return what holds nodes back without all pods that may be victims, counted by text."""
    tables = checks.tables
    counts: Counter[str] = Counter()
    with_victims = MayLeave(tables, pod, rows, may_be_victim).any
    counts[_NO_VICTIMS] = int(np.count_nonzero(~with_victims))
    rows = rows[with_victims]
    for row in rows[:_MOST_EXPLAINED].tolist():
        with Trial(tables) as trial:
            for booking in tuple(tables.on(row).values()):
                if may_go(pod, booking, may_be_victim):
                    trial.remove(booking.uid)
            counts.update(_first_reasons(checks, pod, row))
    masks = ((plugin, mask[rows[_MOST_EXPLAINED:]]) for plugin, mask in evaluation.masks)
    counts.update(_first_texts(pod.shape, masks))
    return counts


def _first_reasons(checks: RowChecks, pod: PendingPod[PodShape], row: int) -> list[str]:
    masks = ((each, np.array([bits])) for each, bits in checks.masks(pod.shape, row))
    texts = list(_first_texts(pod.shape, masks))
    if not texts:
        refused = checks.allocation(pod.shape, row)
        texts = [] if isinstance(refused, Allocation) else [refused[1].text]
    return texts or [_NO_VICTIMS]


def _first_texts(pod: PodShape, masks: Iterable[tuple[Filter, Mask]]) -> Counter[str]:
    """Return the reasons of the first filter that holds each node back, with counts of nodes."""
    counts: Counter[str] = Counter()
    passes: NDArray[np.bool_] | bool = True
    for plugin, mask in masks:
        for number, reason in enumerate(plugin.reasons(pod)):
            counts[reason.text] += int(np.count_nonzero(passes & (mask >> number & 1 == 1)))
        passes = passes & (mask == 0)
    return +counts


def _none(nodes: int, reasons: Mapping[str, int]) -> str:
    """Return kube-scheduler's text for nodes that preemption does not free."""
    parts = sorted(f"{count} {reason}" for reason, count in reasons.items() if count)
    return f"preemption: 0/{nodes} nodes are available: {', '.join(parts)}."
