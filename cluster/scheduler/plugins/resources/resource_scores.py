"""Scores by how full a node would be: NodeResourcesFit's strategies and BalancedAllocation.

With cap = allocatable and req = requested + the pod's request (cpu and memory with the defaults of
containers that request none), for every weighted resource that the node has (an extended resource
only if the pod requests it):

- LeastAllocated: sum of w * ((cap - req) * 100 // cap), 0 where req > cap, // sum of w.
- MostAllocated: sum of w * (min(req, cap) * 100 // cap) // sum of w.
- RequestedToCapacityRatio: a function of u = req * 100 // cap (100 where req > cap) given by points
  (utilization 0..100, score 0..10), between which it is linear; the weighted mean of what is not 0,
  rounded.
- BalancedAllocation: 75 + (with - without) // 2, where each of the two is int((1 - std) * 100) of
  the fractions min(1, req / cap), of real requests with the pod and without it. So a pod that
  makes a node more even is drawn to it (kube-scheduler 1.36; observed on its log).

Source: kube-scheduler; docs/facts/scheduler.md, "Resource scores".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.keys import CPU, MEMORY
from cluster.scheduler.plugins.contract import (
    MAX_SCORE,
    AppliesByShape,
    OfRowAlone,
    ScoredAsIs,
    Scores,
    only,
    percent_of,
)
from cluster.scheduler.tables.amounts import CPU_COLUMN, MEMORY_COLUMN
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

Weights = tuple[tuple[str, int], ...]
"""Resource name -> weight, in the order of the configuration."""

_DEFAULT_WEIGHTS: Weights = ((CPU, 1), (MEMORY, 1))


def capacity_and_use(
    pod: PodShape, tables: Tables, rows: Rows, resource: str, *, with_defaults: bool
) -> tuple[Scores, Scores]:
    """Return (cap, req) of one resource for each of `rows`."""
    nodes = tables.nodes
    column = nodes.resources.find(resource)
    if column is None:
        nothing = np.zeros_like(nodes.pods[rows])
        return nothing, nothing
    cap = nodes.allocatable[rows, column]
    if with_defaults and column in (CPU_COLUMN, MEMORY_COLUMN):
        return cap, nodes.scored[rows, column] + pod.scored_pending[resource]
    return cap, nodes.requested[rows, column] + pod.requests.get(resource, 0)


def capacities_and_uses(
    pod: PodShape, tables: Tables, rows: Rows, resources: Sequence[str], *, with_defaults: bool
) -> tuple[Scores, Scores]:
    """Return (cap, req), each by row and by position in `resources`, which all have columns."""
    nodes = tables.nodes
    columns = [nodes.resources.column(resource) for resource in resources]
    cap = nodes.allocatable[rows][:, columns]
    req = nodes.requested[rows][:, columns]
    own = [pod.requests.get(resource, 0) for resource in resources]
    for position, column in enumerate(columns) if with_defaults else ():
        if column in (CPU_COLUMN, MEMORY_COLUMN):
            req[:, position] = nodes.scored[rows, column]
            own[position] = pod.scored_pending[resources[position]]
    req += np.array(own, dtype=np.int64)
    return cap, req


def capacities_and_uses_of(
    pod: PodShape, tables: Tables, row: int, resources: Sequence[str], *, with_defaults: bool
) -> list[tuple[int, int]]:
    """Return (cap, req) of each of `resources`, as `capacities_and_uses`, for one row."""
    nodes = tables.nodes
    found = []
    for resource in resources:
        column = nodes.resources.column(resource)
        if with_defaults and column in (CPU_COLUMN, MEMORY_COLUMN):
            use = nodes.scored.item(row, column) + pod.scored_pending[resource]
        else:
            use = nodes.requested.item(row, column) + pod.requests.get(resource, 0)
        found.append((nodes.allocatable.item(row, column), use))
    return found


def looked_at(pod: PodShape, tables: Tables, weights: Iterable[tuple[str, int]]) -> Weights:
    """Return the resources that count, with their weights."""
    return tuple([(name, weight) for name, weight in weights if _counts(pod, tables, name)])


def _counts(pod: PodShape, tables: Tables, resource: str) -> bool:
    """Return whether a resource counts: nodes have it, and the pod requests an extended one."""
    if tables.nodes.resources.find(resource) is None:
        return False
    return "/" not in resource or bool(pod.requests.get(resource))


def weighted_mean(parts: Scores, present: NDArray[np.bool_], weights: Weights) -> Scores:
    """Return sum of w * part // sum of w over the resources that are present, for each row; 0
    where none is. parts, present: by row and by position in `weights`."""
    counted = present * np.array([weight for _, weight in weights], dtype=np.int64)
    mean: Scores = (parts * counted).sum(axis=1) // np.maximum(counted.sum(axis=1), 1)
    return mean


def weighted_mean_of(parts: Iterable[tuple[int, int]], weights: Weights) -> int:
    """Return `weighted_mean` of one row. parts: (cap, part) by position in `weights`."""
    total = whole = 0
    for (cap, part), (_, weight) in zip(parts, weights, strict=True):
        if cap > 0:
            total += weight * part
            whole += weight
    return total // max(whole, 1)


@dataclass(frozen=True, slots=True)
class _Weighted(ScoredAsIs, AppliesByShape, OfRowAlone):
    weights: Weights = _DEFAULT_WEIGHTS
    name: str = "NodeResourcesFit"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return True

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        weights = looked_at(pod, tables, self.weights)
        resources = [resource for resource, _ in weights]
        cap, req = capacities_and_uses(pod, tables, rows, resources, with_defaults=True)
        return weighted_mean(self.part(req, cap), cap > 0, weights)

    def score_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        """Return what `score` gives one row."""
        weights = looked_at(pod, tables, self.weights)
        resources = [resource for resource, _ in weights]
        found = capacities_and_uses_of(pod, tables, row, resources, with_defaults=True)
        return weighted_mean_of(
            [(cap, self.part_of(req, max(cap, 1))) for cap, req in found], weights
        )

    def part(self, req: Scores, cap: Scores) -> Scores:
        raise NotImplementedError

    def part_of(self, req: int, cap: int) -> int:
        """Return `part` of one row."""
        raise NotImplementedError


class LeastAllocated(_Weighted):
    """Prefers nodes that stay empty."""

    __slots__ = ()

    def part(self, req: Scores, cap: Scores) -> Scores:
        """Return 0..100 of one resource."""
        return percent_of(np.maximum(cap - req, 0), cap)

    def part_of(self, req: int, cap: int) -> int:
        return max(cap - req, 0) * MAX_SCORE // cap


class MostAllocated(_Weighted):
    """Prefers nodes that become full."""

    __slots__ = ()

    def part(self, req: Scores, cap: Scores) -> Scores:
        """Return 0..100 of one resource."""
        return percent_of(np.minimum(req, cap), cap)

    def part_of(self, req: int, cap: int) -> int:
        return min(req, cap) * MAX_SCORE // cap


@dataclass(frozen=True, slots=True)
class RequestedToCapacityRatio(ScoredAsIs, AppliesByShape, OfRowAlone):
    """Prefers nodes by a function of how full they would be. points: (utilization, score 0..10) by
    ascending utilization."""

    points: tuple[tuple[int, int], ...]
    weights: Weights = _DEFAULT_WEIGHTS
    name: str = "NodeResourcesFit"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return True

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        by_percent = np.array([self.at(percent) for percent in range(101)])
        total = np.zeros_like(tables.nodes.pods[rows])
        weights = np.zeros_like(total)
        for resource, weight in self.weights:
            if "/" in resource and not pod.requests.get(resource):
                continue
            cap, req = capacity_and_use(pod, tables, rows, resource, with_defaults=True)
            percent = percent_of(np.minimum(req, cap), cap)
            part = np.where(cap > 0, by_percent[percent], 0)
            total += weight * part
            weights += np.where(part > 0, weight, 0)
        some_weight = np.maximum(weights, 1)
        rounded: Scores = (2 * total + some_weight) // (2 * some_weight)
        return rounded

    def at(self, percent: int) -> int:
        """Return 0..100 for a utilization, by integer steps that truncate towards zero."""
        largest = [(utilization, 10 * score) for utilization, score in self.points]
        before = largest[0]
        for point in largest:
            if percent <= point[0]:
                rise, run = point[1] - before[1], point[0] - before[0]
                if run == 0:
                    return point[1]
                return before[1] + int(rise * (percent - before[0]) / run)
            before = point
        return before[1]


@dataclass(frozen=True, slots=True)
class BalancedAllocation(ScoredAsIs, AppliesByShape, OfRowAlone):
    """Prefers nodes whose resources would be used evenly. resources: at least one."""

    resources: tuple[str, ...] = (CPU, MEMORY)
    name: str = "NodeResourcesBalancedAllocation"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return any(pod.requests.get(resource) for resource in self.resources)

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        resources = [name for name in self.resources if _counts(pod, tables, name)]
        cap, req = capacities_and_uses(pod, tables, rows, resources, with_defaults=False)
        amounts = [pod.requests.get(resource, 0) for resource in resources]
        own = np.array(amounts, dtype=np.int64)
        present = cap > 0
        some = np.maximum(cap, 1)
        # With and without the pod, side by side: (2, rows, resources).
        uses = np.minimum(1.0, np.stack((req, req - own)) / some)
        evenness = ((1 - _deviation(uses * present, present)) * MAX_SCORE).astype(np.int64)
        score: Scores = _UNCHANGED + (evenness[0] - evenness[1]) // 2
        return score

    def score_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        """Return what `score` gives one row."""
        resources = [name for name in self.resources if _counts(pod, tables, name)]
        if len(resources) != _TWO:
            return int(self.score(pod, tables, only(row)).item())
        found = capacities_and_uses_of(pod, tables, row, resources, with_defaults=False)
        (cap, req), (other_cap, other_req) = found
        if cap <= 0 or other_cap <= 0:
            return _UNCHANGED
        own, other_own = (pod.requests.get(name, 0) for name in resources)
        after = _evenness(req, cap, other_req, other_cap)
        before = _evenness(req - own, cap, other_req - other_own, other_cap)
        return _UNCHANGED + (after - before) // 2


def _evenness(req: int, cap: int, other_req: int, other_cap: int) -> int:
    """Return how evenly two resources of a node would be used, 0..100."""
    # Floats before the division, as NumPy has them.
    use = min(1.0, float(req) / float(cap))
    other_use = min(1.0, float(other_req) / float(other_cap))
    return int((1 - abs(use - other_use) / 2) * MAX_SCORE)


_TWO: Final = 2
"""With so many resources, the deviation is half of their difference."""
_UNCHANGED: Final = 75
"""kube-scheduler's score of a node that a pod leaves as even as it was."""


def _deviation(fractions: NDArray[np.float64], present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the deviation between the fractions that are present, along the last axis: half the
    difference of two, the population's standard deviation of more, 0 of one."""
    if fractions.shape[-1] == _TWO:
        both = present[:, 0] & present[:, 1]
        return np.abs(fractions[..., 0] - fractions[..., 1]) / 2 * both
    at_least_one = np.maximum(present.sum(axis=-1), 1)
    mean = fractions.sum(axis=-1) / at_least_one
    squares = ((fractions - mean[..., None]) ** 2 * present).sum(axis=-1)
    deviation: NDArray[np.float64] = np.sqrt(squares / at_least_one)
    return deviation
