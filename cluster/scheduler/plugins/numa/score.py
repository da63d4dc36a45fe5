"""NodeNUMAResource's score: the share of the node that stays free, or is in use.

Without a NUMA policy, over the whole node with real requests; allocated CPUs count amplified. With
a policy, over the NUMA nodes that the pod would get. The formulas are LeastAllocated and
MostAllocated; docs/scheduler.md, "NodeNUMAResource".
"""

from __future__ import annotations

import numpy as np

from apis.keys import CPU
from cluster.scheduler.exact.numa import Scoring
from cluster.scheduler.plugins.contract import Scores
from cluster.scheduler.plugins.numa.asked import (
    UNBOUND,
    Asked,
    Settings,
    amplified,
    asked_of,
    at_positions,
    numbers_of,
    with_bound_cpus,
)
from cluster.scheduler.plugins.numa.room import chosen_sets, groups, needs, scores_of_sets
from cluster.scheduler.plugins.resources.resource_scores import capacity_and_use
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.numa.table import NumaTable
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables


def node_scores(
    table: NumaTable, settings: Settings, pod: PodShape, tables: Tables, rows: Rows
) -> Scores:
    """Return the score, 0..100, of each of `rows`; 0 where pod and node contradict each other."""
    numbers = numbers_of(tables, rows)
    asked, contradictions = asked_of(table, settings, pod, numbers)
    scores = _whole_node(table, settings.scoring, pod, tables, asked)
    scores[contradictions != 0] = 0
    at = np.flatnonzero((asked.policy > 0) & (table.slots[numbers] > 0))
    if len(at):
        scores[at] = _numa_scores(table, settings, at_positions(asked, at))
    return scores


def _whole_node(
    table: NumaTable, scoring: Scoring, pod: PodShape, tables: Tables, asked: Asked
) -> Scores:
    total = np.zeros(len(asked.rows), dtype=np.int64)
    weights = np.zeros_like(total)
    for name, weight in scoring.weights.items():
        request = pod.requests.get(name, 0)
        if "/" in name and not request:
            continue
        most, used = capacity_and_use(pod, tables, asked.rows, name, with_defaults=False)
        if name == CPU and request > 0:
            ratio = table.cpu_ratio[asked.rows]
            bound = asked.binding != UNBOUND
            own = np.where(bound, amplified(np.int64(request), ratio), request)
            used = with_bound_cpus(table, used - request, asked.rows) + own
        has = most > 0
        most = np.where(has, most, 1)
        if scoring.most_allocated:
            share = np.minimum(used, most) * 100 // most
        else:
            share = np.maximum(0, most - used) * 100 // most
        total += np.where(has, weight * share, 0)
        weights += np.where(has, weight, 0)
    return total // np.maximum(weights, 1)


def _numa_scores(table: NumaTable, settings: Settings, asked: Asked) -> Scores:
    scores = np.zeros(len(asked.rows), dtype=np.int64)
    found = needs(table, asked)
    for group in groups(table, asked, found):
        sets = chosen_sets(table, asked, group, settings.numa_scoring)
        given = scores_of_sets(table, asked, group.at, sets, settings.scoring)
        scores[group.at] = np.where(sets > 0, given, 0)
    return scores
