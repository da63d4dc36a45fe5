"""NodeNUMAResource's score: the share of the node that stays free, or is in use.

Without a NUMA policy, over the whole node with real requests; allocated CPUs count amplified. With
a policy, over the set of NUMA nodes that it takes for the pod; over the node if the pod needs
nothing of them. The formulas are LeastAllocated and MostAllocated; docs/scheduler.md,
"NodeNUMAResource".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from apis.keys import CPU
from cluster.scheduler.exact.numa import Scoring
from cluster.scheduler.plugins.contract import Scores, only, percent_of, zeros
from cluster.scheduler.plugins.numa.asked import (
    UNBOUND,
    Asked,
    Settings,
    amplified,
    asked_of,
    asks_anything,
    at_positions,
    numbers_of,
    own_policy,
    with_bound_cpus,
)
from cluster.scheduler.plugins.numa.room import (
    Need,
    anything_needed,
    chosen_sets,
    groups,
    needs,
    scores_of_sets,
)
from cluster.scheduler.plugins.resources.resource_scores import (
    capacities_and_uses,
    capacities_and_uses_of,
    looked_at,
    weighted_mean,
    weighted_mean_of,
)
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.numa.demand import pod_specs
from cluster.scheduler.tables.numa.facts import NO_RATIO
from cluster.scheduler.tables.numa.table import NumaTable
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables


def node_scores(
    table: NumaTable, settings: Settings, pod: PodShape, tables: Tables, rows: Rows
) -> Scores:
    """Return the score, 0..100, of each of `rows`; 0 where pod and node contradict each other."""
    numbers = numbers_of(tables, rows)
    if not asks_anything(table, settings, pod):
        return _whole_node(table, settings.scoring, pod, tables, numbers, None)
    asked, contradictions = asked_of(table, settings, pod, numbers)
    bound = asked.binding != UNBOUND
    scores = _whole_node(table, settings.scoring, pod, tables, numbers, bound)
    scores[contradictions != 0] = 0
    at = np.flatnonzero((asked.policy > 0) & (table.slots[numbers] > 0))
    if len(at):
        aligned = at_positions(asked, at)
        found = needs(table, aligned)
        some = anything_needed(aligned, found)
        scores[at[some]] = _numa_scores(table, settings, aligned, found)[some]
    return scores


def node_score(
    table: NumaTable, settings: Settings, pod: PodShape, tables: Tables, row: int
) -> int:
    """Return what `node_scores` gives one row."""
    table.follow()
    asks = (
        table.policy.item(row)
        or table.bind_policy.item(row)
        or own_policy(settings, pod)[0]
        or pod.derived(pod_specs).numa.numa_topology_policy
    )
    if asks or table.cpu_ratio.item(row) != NO_RATIO:
        return int(node_scores(table, settings, pod, tables, only(row)).item())
    weights = looked_at(pod, tables, settings.scoring.weights.items())
    resources = [resource for resource, _ in weights]
    parts = []
    for most, used in capacities_and_uses_of(pod, tables, row, resources, with_defaults=False):
        some = max(most, 1)
        counted = min(used, some) if settings.scoring.most_allocated else max(0, some - used)
        parts.append((most, counted * 100 // some))
    return weighted_mean_of(parts, weights)


def _whole_node(
    table: NumaTable,
    scoring: Scoring,
    pod: PodShape,
    tables: Tables,
    rows: NDArray[np.intp],
    bound: NDArray[np.bool_] | None,
) -> Scores:
    """bound: by row, whether the pod gets CPUs of its own there; None: nowhere."""
    weights = looked_at(pod, tables, scoring.weights.items())
    resources = [resource for resource, _ in weights]
    most, used = capacities_and_uses(pod, tables, rows, resources, with_defaults=False)
    request = pod.requests.get(CPU, 0)
    if CPU in resources:
        ratio = table.cpu_ratio[rows]
        if (ratio != NO_RATIO).any():
            own = np.full(len(rows), request)
            if bound is not None:
                own = np.where(bound, amplified(own, ratio), own)
            cpu = resources.index(CPU)
            used[:, cpu] = with_bound_cpus(table, used[:, cpu] - request, rows) + own
    part = np.minimum(used, most) if scoring.most_allocated else np.maximum(most - used, 0)
    return weighted_mean(percent_of(part, most), most > 0, weights)


def _numa_scores(
    table: NumaTable, settings: Settings, asked: Asked, found: Sequence[Need]
) -> Scores:
    scores = zeros(len(asked.rows))
    for group in groups(table, asked, found):
        sets = chosen_sets(table, asked, group, settings.numa_scoring)
        scores[group.at] = scores_of_sets(table, asked, group.at, sets, settings.scoring)
    return scores
