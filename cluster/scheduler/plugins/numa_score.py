"""NodeNUMAResource's score: the share of the node that stays free, or is in use.

Without a NUMA policy, over the whole node with real requests; allocated CPUs count amplified. With
a policy, over the NUMA nodes that the pod would get. The formulas are LeastAllocated and
MostAllocated; docs/scheduler.md, "NodeNUMAResource".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apis.keys import CPU
from cluster.scheduler.plugins.contract import Scores, as_is
from cluster.scheduler.plugins.numa_asked import (
    DEFAULT_SETTINGS,
    UNBOUND,
    Asked,
    Settings,
    amplified,
    asked_of,
    at_positions,
    numbers_of,
    with_bound_cpus,
)
from cluster.scheduler.plugins.numa_room import chosen_sets, groups, needs, scores_of_sets
from cluster.scheduler.plugins.resource_scores import capacity_and_use
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.numa import NumaTable
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables


@dataclass(frozen=True, slots=True)
class NodeNUMAResourceScore:
    """The plugin's Score. It ranks nodes for every pod that requests something."""

    table: NumaTable
    settings: Settings = DEFAULT_SETTINGS
    name: str = "NodeNUMAResource"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return bool(pod.requests)

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        return 0

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        numbers = numbers_of(tables, rows)
        asked, contradictions = asked_of(self.table, self.settings, pod, numbers)
        scores = self._whole_node(pod, tables, asked)
        scores[contradictions != 0] = 0
        at = np.flatnonzero((asked.policy > 0) & (self.table.slots[numbers] > 0))
        if len(at):
            scores[at] = self._numa_scores(at_positions(asked, at))
        return scores

    def normalize(self, raw: Scores) -> Scores:
        return as_is(raw)

    def _whole_node(self, pod: PodShape, tables: Tables, asked: Asked) -> Scores:
        scoring = self.settings.scoring
        total = np.zeros(len(asked.rows), dtype=np.int64)
        weights = np.zeros_like(total)
        for name, weight in scoring.weights.items():
            request = pod.requests.get(name, 0)
            if "/" in name and not request:
                continue
            most, used = capacity_and_use(pod, tables, asked.rows, name, with_defaults=False)
            if name == CPU and request > 0:
                ratio = self.table.cpu_ratio[asked.rows]
                bound = asked.binding != UNBOUND
                own = np.where(bound, amplified(np.int64(request), ratio), request)
                used = with_bound_cpus(self.table, used - request, asked.rows) + own
            has = most > 0
            most = np.where(has, most, 1)
            if scoring.most_allocated:
                share = np.minimum(used, most) * 100 // most
            else:
                share = np.maximum(0, most - used) * 100 // most
            total += np.where(has, weight * share, 0)
            weights += np.where(has, weight, 0)
        return total // np.maximum(weights, 1)

    def _numa_scores(self, asked: Asked) -> Scores:
        table, settings = self.table, self.settings
        scores = np.zeros(len(asked.rows), dtype=np.int64)
        found = needs(table, asked)
        for group in groups(table, asked, found):
            sets = chosen_sets(table, asked, group, settings.numa_scoring)
            given = scores_of_sets(table, asked, group.at, sets, settings.scoring)
            scores[group.at] = np.where(sets > 0, given, 0)
        return scores
