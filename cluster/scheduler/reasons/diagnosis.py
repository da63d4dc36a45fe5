"""Why no node takes a pod: exact counts for each reason over all nodes.

A node counts with the first plugin, in the profile's order, that holds it back, and with every
reason of that plugin, as kube-scheduler's messages have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.plugins.contract import Filter, Mask, Reason, Refusal
from cluster.scheduler.reasons.counterfactuals import NONE, Counterfactuals
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

NO_NODES: Final = "no nodes available to schedule pods"

_NO_COUNTS: Final[Mapping[str, int]] = MappingProxyType({})
_NO_ROWS: Final = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class Diagnosis:
    """Why a pod has no node.

    nodes: count of all nodes. counts: nodes by the text of a reason. plugins: names of those that
    hold nodes back or refuse the pod. refusal: message of the plugin that refused the pod before
    any node was looked at, or "". resolvable: rows where evicting pods could help. remarks: what
    later steps, such as preemption, add to the message. counterfactuals: the nearest nodes.
    """

    nodes: int
    counts: Mapping[str, int] = field(default_factory=lambda: _NO_COUNTS)
    plugins: frozenset[str] = frozenset()
    refusal: str = ""
    resolvable: NDArray[np.intp] = field(default_factory=lambda: _NO_ROWS)
    remarks: tuple[str, ...] = ()
    counterfactuals: Counterfactuals = NONE

    @property
    def text(self) -> str:
        """The text of the pod's condition and event: `message`, then the nearest nodes."""
        return " ".join(filter(None, (self.message, self.counterfactuals.sentence)))

    @property
    def message(self) -> str:
        """What kube-scheduler would say, in its form."""
        text = f"0/{self.nodes} nodes are available: " if self.nodes else NO_NODES
        if self.refusal:
            text = f"0/{self.nodes} nodes are available: {self.refusal}"
        elif self.counts:
            text += ", ".join(sorted(f"{count} {reason}" for reason, count in self.counts.items()))
        parts = [text if text.endswith(".") else f"{text}.", *self.remarks]
        return " ".join(parts)


def refused(refusal: Refusal, tables: Tables) -> Diagnosis:
    """Return the diagnosis of a pod that a plugin refused before any node was looked at."""
    return Diagnosis(
        nodes=tables.nodes.count,
        plugins=frozenset({refusal.plugin}),
        refusal=str(refusal),
        resolvable=np.flatnonzero(tables.nodes.alive) if refusal.resolvable else _NO_ROWS,
    )


def diagnose(
    pod: PodShape,
    tables: Tables,
    masks: Iterable[tuple[Filter, Mask]],
    *,
    refused_rows: Mapping[int, tuple[str, Reason]] = MappingProxyType({}),
) -> Diagnosis:
    """Return why no node takes the pod.

    masks: every filter's mask by row, in the filters' order. refused_rows: nodes that passed all
    filters but could not give the exact allocation: row -> (plugin, why).
    """
    nodes = tables.nodes
    counts: Counter[str] = Counter()
    plugins: set[str] = set()
    open_rows = nodes.alive[: len(nodes)].copy()
    resolvable = np.zeros(len(nodes), dtype=np.bool_)
    for plugin, mask in masks:
        held = open_rows & (mask != 0)
        if not held.any():
            continue
        plugins.add(plugin.name)
        open_rows &= ~held
        bits = mask[held]
        never = np.zeros(len(bits), dtype=np.bool_)
        for number, reason in enumerate(plugin.reasons(pod)):
            with_reason = (bits >> number) & 1 == 1
            count = int(np.count_nonzero(with_reason))
            if count:
                counts[reason.text] += count
                if not reason.resolvable:
                    never |= with_reason
        resolvable[held] = ~never
    for row, (name, reason) in refused_rows.items():
        counts[reason.text] += 1
        plugins.add(name)
        resolvable[row] = reason.resolvable
    return Diagnosis(
        nodes=nodes.count,
        counts=dict(counts),
        plugins=frozenset(plugins),
        resolvable=np.flatnonzero(resolvable),
    )
