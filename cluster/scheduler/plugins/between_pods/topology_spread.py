"""PodTopologySpread: pods of a kind are spread evenly over the values of a node label.

Filter, for each DoNotSchedule constraint: count(domain) + self - least <= maxSkew, where count is
of matching pods on eligible nodes of the domain, self is 1 if the pod matches its own selector, and
least is the smallest count of all domains (0 if there are fewer domains than minDomains).

Score, for each ScheduleAnyway constraint: count(domain) * ln(domains + 2) + maxSkew - 1, summed and
rounded; 100 * (largest + smallest - s) // largest. A pod without constraints that belongs to a
workload gets the defaults of the cluster. docs/facts/scheduler.md, "Pod topology spread".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from apis.meta import matches
from apis.scheduling_pod import TopologySpreadConstraint
from cluster.scheduler.configuration.arguments import SYSTEM_CONSTRAINTS
from cluster.scheduler.plugins.between_pods.pod_selection import (
    sees_reserve_pods,
    selector_key,
    spread_selector,
)
from cluster.scheduler.plugins.contract import (
    MAX_SCORE,
    NO_LIMIT,
    AppliesByShape,
    Leaving,
    Mask,
    Reason,
    Scores,
    zeros,
)
from cluster.scheduler.plugins.nodes.node_affinity import NodeAffinity
from cluster.scheduler.plugins.nodes.taints import TaintToleration
from cluster.scheduler.tables.labels import ABSENT
from cluster.scheduler.tables.matching import Counter
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_HOSTNAME: Final = "kubernetes.io/hostname"
_MISMATCH: Final = "node(s) didn't match pod topology spread constraints"
_REASONS: Final = (
    Reason(_MISMATCH),
    Reason(f"{_MISMATCH} (missing required label)", resolvable=False),
)


@dataclass(frozen=True, slots=True)
class _Domains:
    """What a constraint counts. ids: the domain of each row, ABSENT for none. eligible: rows whose
    pods are counted. counts: matching pods of each domain. compared: those of the domains that
    decide which count is the smallest; none where it is 0 for lack of domains. most: how many
    matching pods a domain may have that takes the pod."""

    ids: NDArray[np.int32]
    eligible: NDArray[np.bool_]
    counter: Counter
    counts: NDArray[np.int64]
    compared: NDArray[np.int64]
    most: int

    def over(self) -> NDArray[np.int64]:
        """Return how many pods too many each domain has."""
        return self.counts - self.most

    def rise(self, pods: int) -> int:
        """Return by how much that many pods more raise the smallest count at most.

        If it becomes m, any k domains together have at least k * m pods.
        """
        if not len(self.compared):
            return 0
        ascending = np.sort(self.compared)
        least = (np.cumsum(ascending) + pods) // np.arange(1, len(ascending) + 1)
        return int(least.min() - ascending[0])


@dataclass(frozen=True, slots=True)
class PodTopologySpread(AppliesByShape):
    """defaults: constraints of pods that have none, by the selector of their workload.
    system_defaults: whether these are the built-in ones, which do not leave out nodes without a
    key."""

    defaults: tuple[TopologySpreadConstraint, ...] = SYSTEM_CONSTRAINTS
    system_defaults: bool = True
    name: str = "PodTopologySpread"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return bool(self.constraints(pod, "DoNotSchedule"))

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _REASONS

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        counts = sum(c.version for _, c in self.counted(pod, tables, "DoNotSchedule"))
        # All only grow, so their combination does not repeat.
        version = (tables.nodes.membership << 32) + counts
        return 2 * version + sees_reserve_pods(pod, tables)

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        mask = zeros(len(tables.nodes))
        for domains in self._domains(pod, tables):
            ids = domains.ids
            skewed = domains.over() > 0
            mask[(mask == 0) & (ids != ABSENT) & skewed[ids]] = 1
            mask[(mask == 0) & (ids == ABSENT)] = 2
        return mask[rows]

    def headroom(self, pod: PodShape, tables: Tables, rows: Rows, pods: int) -> NDArray[np.int64]:
        """Return what each domain may have more if all other domains are filled first."""
        headroom = np.full(len(tables.nodes), NO_LIMIT)
        for domains in self._domains(pod, tables):
            ids = domains.ids
            headroom[ids == ABSENT] = 0
            before_last = (domains.rise(pods) - domains.over())[ids]
            headroom[before_last < 0] = 0
            if domains.counter.weigh(pod):
                limited = np.maximum(before_last + 1, 0)
                headroom = np.where(domains.eligible, np.minimum(headroom, limited), headroom)
        return headroom[rows]

    def may_open(
        self, pod: PodShape, tables: Tables, rows: NDArray[np.intp], leaving: Leaving
    ) -> NDArray[np.bool_]:
        """Return where fewer pods in the domain could be enough.

        The smallest count of all domains is taken as it is; pods that leave may only lower it.
        """
        result = np.ones(len(rows), dtype=np.bool_)
        for domains in self._domains(pod, tables):
            ids = domains.ids[rows]
            left = leaving.weigh(domains.counter.weigh)
            result &= (ids != ABSENT) & (domains.over()[ids] <= left)
        return result

    def _domains(self, pod: PodShape, tables: Tables) -> Iterator[_Domains]:
        """Yield what each DoNotSchedule constraint counts."""
        length = len(tables.nodes)
        with_keys = _has_keys(self.constraints(pod, "DoNotSchedule"), tables)
        for constraint, counter in self.counted(pod, tables, "DoNotSchedule"):
            labels = tables.nodes.labels.column(constraint.topology_key)
            ids = labels.ids[:length]
            eligible = with_keys & _included(pod, constraint, tables)
            counts = counter.by_domain(labels, eligible)
            present = np.bincount(ids[eligible], minlength=labels.values) > 0
            compared = counts[present]
            if constraint.min_domains is not None and len(compared) < constraint.min_domains:
                compared = compared[:0]
            least = int(compared.min()) if len(compared) else 0
            most = constraint.max_skew + least - counter.weigh(pod)
            yield _Domains(ids, eligible, counter, counts, compared, most)

    def constraints(self, pod: PodShape, when: str) -> tuple[TopologySpreadConstraint, ...]:
        """Return the constraints of this kind: the pod's own, or the defaults."""
        own = pod.spread
        if not own and pod.spread_by is not None:
            own = self.defaults
        return tuple(c for c in own if c.when_unsatisfiable == when)

    def counted(self, pod: PodShape, tables: Tables, when: str) -> Counted:
        """Return the constraints of this kind with their counters, kept with the shape."""
        kept = pod.derived(_kept_counters).setdefault(tables, {})
        reserve_pods = sees_reserve_pods(pod, tables)
        key = (when, id(self.defaults), reserve_pods)
        found = kept.get(key)
        if found is None:
            found = tuple(
                _with_counter(pod, c, tables, reserve_pods) for c in self.constraints(pod, when)
            )
            kept[key] = found
        return found


@dataclass(frozen=True, slots=True)
class PodTopologySpreadScore(AppliesByShape):
    """The score of `spread`'s constraints."""

    spread: PodTopologySpread
    name: str = "PodTopologySpread"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return bool(self.spread.constraints(pod, "ScheduleAnyway"))

    def score_set(self, pod: PodShape, tables: Tables, feasible: NDArray[np.intp]) -> Scores:
        count, length = len(feasible), len(tables.nodes)
        if not count:
            return zeros(0)
        # Feasible rows ascend. Without an index nothing is copied.
        rows: slice | NDArray[np.intp] = slice(0, length) if count == length else feasible
        with_keys: NDArray[np.bool_] | None = None
        scored: NDArray[np.bool_] | None = None
        """The rows that have every key; None for all of them."""
        if pod.spread or not self.spread.system_defaults:
            with_keys = _has_keys(self.spread.constraints(pod, "ScheduleAnyway"), tables)
            scored = with_keys[rows]
            if not scored.any():
                return zeros(count)
            if scored.all():
                scored = None
        total = np.zeros(count, dtype=np.float64)
        for constraint, counter in self.spread.counted(pod, tables, "ScheduleAnyway"):
            labels = tables.nodes.labels.column(constraint.topology_key)
            ids = labels.ids[:length][rows]
            compared = ids if scored is None else ids[scored]
            if constraint.topology_key == _HOSTNAME:
                part = _part(counter.column(length)[rows], len(compared), constraint)
                total += np.where(ids != ABSENT, part, 0.0)
                continue
            eligible = _included(pod, constraint, tables)
            if with_keys is not None:
                eligible &= with_keys
            domains = int(np.count_nonzero(np.bincount(compared)))
            by_domain = _part(counter.by_domain(labels, eligible), domains, constraint)
            by_domain[ABSENT] = 0.0
            total += by_domain[ids]
        raw = np.floor(total + 0.5).astype(np.int64)
        of_scored = raw if scored is None else raw[scored]
        smallest, largest = int(of_scored.min()), int(of_scored.max())
        if largest == 0:
            result = np.full(count, MAX_SCORE)
        else:
            result = MAX_SCORE * (largest + smallest - raw) // largest
        return result if scored is None else np.where(scored, result, 0)


def _part(
    counts: NDArray[np.int64], domains: int, constraint: TopologySpreadConstraint
) -> NDArray[np.float64]:
    """Return what a constraint adds for so many pods in a domain, of so many domains."""
    part: NDArray[np.float64] = counts * np.log(domains + 2) + (constraint.max_skew - 1)
    return part


Counted = tuple[tuple[TopologySpreadConstraint, Counter], ...]


def _kept_counters(pod: PodShape) -> WeakKeyDictionary[Tables, dict[object, Counted]]:
    return WeakKeyDictionary()


def _with_counter(
    pod: PodShape, constraint: TopologySpreadConstraint, tables: Tables, reserve_pods: bool
) -> tuple[TopologySpreadConstraint, Counter]:
    """Return a constraint with the counter of the pods that it counts."""
    selector = spread_selector(pod, constraint) if pod.spread else pod.spread_by
    namespace = pod.namespace
    counter = tables.matches.counter(
        ("spread", namespace, selector_key(selector)),
        lambda other: int(other.namespace == namespace and matches(selector, other.labels)),
        with_terminating=False,
        with_reserve_pods=reserve_pods,
    )
    return constraint, counter


def _has_keys(
    constraints: tuple[TopologySpreadConstraint, ...], tables: Tables
) -> NDArray[np.bool_]:
    length = len(tables.nodes)
    result = tables.nodes.alive[:length].copy()
    for constraint in constraints:
        result &= tables.nodes.labels.column(constraint.topology_key).ids[:length] != ABSENT
    return result


def _included(
    pod: PodShape, constraint: TopologySpreadConstraint, tables: Tables
) -> NDArray[np.bool_]:
    """Return the nodes that count for a constraint by its nodeAffinityPolicy and taints policy."""
    every = slice(0, len(tables.nodes))
    result = tables.nodes.alive[every].copy()
    affinity = NodeAffinity()
    if constraint.node_affinity_policy == "Honor" and affinity.applies(pod, tables):
        result &= affinity.filter(pod, tables, every) == 0
    taints = TaintToleration()
    if constraint.node_taints_policy == "Honor" and taints.applies(pod, tables):
        result &= taints.filter(pod, tables, every) == 0
    return result
