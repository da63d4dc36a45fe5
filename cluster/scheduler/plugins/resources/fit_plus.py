"""NodeResourcesFitPlus and ScarceResourceAvoidance.

FitPlus scores each resource that the pod requests by a strategy of its own: Most is
min(req, cap) * 100 // cap, Least (cap - req) * 100 // cap and 0 where req > cap; the weighted mean,
100 if the pod requests none of the configured ones. Overhead counts as in the filter.

ScarceResourceAvoidance keeps pods away from nodes with scarce resources that they do not request:
with D the resources that a node has and the pod does not request, and I the scarce ones of them,
(|D| - |I|) * 100 // |D|, 100 if either is empty. docs/facts/scheduler.md, "Resource scores".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.scheduler.plugins.contract import (
    MAX_SCORE,
    AppliesByShape,
    OfRowAlone,
    ScoredAsIs,
    Scores,
    percent_of,
)
from cluster.scheduler.plugins.resources.resource_scores import capacity_and_use
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a resource is scored: fuller nodes (`most`) or emptier ones first."""

    most: bool
    weight: int


@dataclass(frozen=True, slots=True)
class NodeResourcesFitPlus(ScoredAsIs, AppliesByShape, OfRowAlone):
    resources: tuple[tuple[str, Strategy], ...] = ()
    name: str = "NodeResourcesFitPlus"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return any(pod.requests.get(resource) for resource, _ in self.resources)

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        total = np.zeros_like(tables.nodes.pods[rows])
        weights = 0
        for resource, strategy in self.resources:
            if not pod.requests.get(resource):
                continue
            cap, req = capacity_and_use(pod, tables, rows, resource, with_defaults=True)
            part = np.minimum(req, cap) if strategy.most else np.maximum(cap - req, 0)
            total += strategy.weight * percent_of(part, cap)
            weights += strategy.weight
        return total // max(weights, 1)


@dataclass(frozen=True, slots=True)
class ScarceResourceAvoidance(ScoredAsIs, AppliesByShape, OfRowAlone):
    scarce: frozenset[str] = frozenset()
    name: str = "ScarceResourceAvoidance"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return any(not pod.requests.get(resource) for resource in self.scarce)

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        nodes = tables.nodes
        has = nodes.allocatable[rows] > 0
        names = [nodes.resources.name(column) for column in range(has.shape[1])]
        unasked = np.array([not pod.requests.get(name) for name in names], dtype=np.bool_)
        scarce = np.array([name in self.scarce for name in names], dtype=np.bool_)
        all_of_it = np.count_nonzero(has & unasked, axis=1)
        avoided = np.count_nonzero(has & unasked & scarce, axis=1)
        return np.where(avoided > 0, percent_of(all_of_it - avoided, all_of_it), MAX_SCORE)
