"""LoadAwareScheduling: what nodes really use decides, not only what pods request.

Filter: usage = reported usage + estimates of the pods that the report lacks + the estimate of the
pod. A node is held back if round(100 * usage / allocatable) is above the threshold of a resource.
Pods of class koord-prod are compared with the usage of such pods alone where thresholds for them
exist. Pods of DaemonSets pass always. Score: for each weighted resource (cap - used) * 100 // cap,
0 where used > cap; the weighted mean, with the smallest of them as one more part of its own weight,
which is the smallest of all followed resources that the node has, also of those without a weight.
A pod that may use a Reservation of a node is part of what the Reservation counts with there.

Example: allocatable 32,000 m, usage 18,000, estimates 1,000, pod 3,400: 22,400 is 70 %, above 65.
docs/facts/scheduler.md, "Load".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from apis.qos import PriorityClass
from cluster.scheduler.plugins.contract import (
    MAX_SCORE,
    AppliesByShape,
    Mask,
    OfRowAlone,
    Reason,
    Restored,
    ScoredAsIs,
    Scores,
    only,
    percent_of,
    zeros,
)
from cluster.scheduler.tables.amounts import LARGEST_AMOUNT, Vector
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.load import LoadTable
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.reservations.asked import asked_of
from cluster.scheduler.tables.reservations.pre_allocation import demand_of
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables


@dataclass(frozen=True, slots=True)
class LoadAwareScheduling(ScoredAsIs, AppliesByShape, OfRowAlone):
    """hold_back_expired: whether a node whose report is too old is held back at all.
    pass_expired: whether such a node takes pods as if it had no report. dominant_weight: weight of
    the fullest resource in the score. score_by_prod: whether pods of class koord-prod are scored by
    the usage of such pods alone. restored: what Reservations give back to a pod; None in a profile
    that does not look at them."""

    load: LoadTable
    hold_back_expired: bool = True
    pass_expired: bool = False
    dominant_weight: int = 0
    score_by_prod: bool = False
    restored: Restored | None = None
    name: str = "LoadAwareScheduling"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return True

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        """Return "expired", then for each resource: above its threshold, plain and aggregated."""
        reasons = [Reason("node(s) nodeMetric expired")]
        for name in self.load.resources:
            reasons.append(Reason(f"node(s) {name} usage exceed threshold"))
            reasons.append(Reason(f"node(s) {name} aggregated usage exceed threshold"))
        return tuple(reasons)

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        load = self.load
        if pod.owner_kind == "DaemonSet":
            return np.zeros_like(tables.nodes.pods[rows])
        load.reach(len(tables.nodes))
        limits = load.limits[rows]
        used = load.base[rows] + load.delta[rows]
        aggregated = load.aggregated[rows]
        is_prod = pod.priority_class is PriorityClass.PROD
        by_prod = load.by_prod[rows] & is_prod
        if by_prod.any():
            limits = np.where(by_prod[:, None], load.prod_limits[rows], limits)
            of_prod = load.prod_usage[rows] + load.prod_delta[rows]
            used = np.where(by_prod[:, None], of_prod, used)
            aggregated = aggregated & ~by_prod
        if self._gives(pod):
            used = used - self._given(pod, tables, rows, load.by_prod & is_prod)
        allocatable = load.allocatable[rows]
        looked_at = (limits > 0) & (allocatable > 0)
        percent = _rounded_percent(used + load.estimate(pod), allocatable)
        above = looked_at & (percent > limits)
        limited = limits.any(axis=1)
        looks = limited & load.reported[rows]
        held = np.zeros_like(looks)
        if self.hold_back_expired:
            expired = load.expired[rows]
            held = limited & expired & (not self.pass_expired)
            looks = looks & ~expired
        mask = held.astype(np.int64)
        shifts = 1 + 2 * np.arange(len(load.resources)) + aggregated[:, None]
        mask |= ((above & looks[:, None]).astype(np.int64) << shifts).sum(axis=1)
        return mask

    def filter_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        """Return the mask that `filter` gives one row."""
        load = self.load
        if pod.owner_kind == "DaemonSet":
            return 0
        load.reach(len(tables.nodes))
        by_prod = pod.priority_class is PriorityClass.PROD and load.by_prod.item(row)
        limits = (load.prod_limits if by_prod else load.limits)[row].tolist()
        if not any(limits):
            return 0
        if self.hold_back_expired and load.expired.item(row):
            return int(not self.pass_expired)
        if not load.reported.item(row):
            return 0
        base, delta = (load.prod_usage, load.prod_delta) if by_prod else (load.base, load.delta)
        own = load.estimate(pod)
        if self._gives(pod):
            own = own - self._given_on(pod, tables, row, prod=by_prod)
        mask, aggregated = 0, load.aggregated.item(row) and not by_prod
        for number, limit in enumerate(limits):
            some = load.allocatable.item(row, number)
            if limit > 0 and some > 0:
                used = base.item(row, number) + delta.item(row, number) + own.item(number)
                percent = (200 * min(used, LARGEST_AMOUNT) + some) // (2 * some)
                mask |= (percent > limit) << (1 + 2 * number + aggregated)
        return mask

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        load = self.load
        load.reach(len(tables.nodes))
        by_prod = self.score_by_prod and pod.priority_class is PriorityClass.PROD
        # A report that is too old says less than the estimates of the node's pods.
        known = load.reported[rows] & ~load.expired[rows]
        if by_prod:
            used = load.prod_usage[rows] + load.prod_delta[rows]
        else:
            used = load.score_base[rows] + load.delta[rows]
        used = np.where(known[:, None], used, load.estimated[rows])
        if self._gives(pod):
            prod = load.reported & ~load.expired & by_prod
            used = used - self._given(pod, tables, rows, prod)
        used = used + load.estimate(pod)
        weights = np.array([load.settings.weights.get(name, 0) for name in load.resources])
        cap = load.allocatable[rows]
        has = cap > 0
        parts = percent_of(np.maximum(cap - used, 0), cap)
        total = (parts * (has * weights)).sum(axis=1)
        whole = int(weights.sum())
        if self.dominant_weight:
            total += self.dominant_weight * np.where(has, parts, MAX_SCORE).min(axis=1)
            whole += self.dominant_weight
        scores: Scores = total // max(whole, 1)
        return scores

    def score_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        """Return what `score` gives one row."""
        load = self.load
        load.reach(len(tables.nodes))
        known = load.reported.item(row) and not load.expired.item(row)
        by_prod = self.score_by_prod and pod.priority_class is PriorityClass.PROD and known
        columns: tuple[Scores, ...] = (load.estimated,)
        if by_prod:
            columns = load.prod_usage, load.prod_delta
        elif known:
            columns = load.score_base, load.delta
        own = load.estimate(pod)
        if self._gives(pod):
            own = own - self._given_on(pod, tables, row, prod=by_prod)
        total, whole, least = 0, self.dominant_weight, MAX_SCORE
        for number, name in enumerate(load.resources):
            weight = load.settings.weights.get(name, 0)
            whole += weight
            cap = load.allocatable.item(row, number)
            if cap > 0:
                amount = own.item(number)
                for column in columns:
                    amount += column.item(row, number)
                part = max(cap - amount, 0) * MAX_SCORE // cap
                total += part * weight
                least = min(least, part)
        total += self.dominant_weight * least if self.dominant_weight else 0
        return total // max(whole, 1)

    def _gives(self, pod: PodShape) -> bool:
        """Return whether a node may count with less where the pod is placed."""
        load = self.load
        return load.has_reservations or (
            load.settings.reservations and pod.derived(demand_of) is not None
        )

    def _given(self, pod: PodShape, tables: Tables, rows: Rows, prod: NDArray[np.bool_]) -> Vector:
        """Return what Reservations count with less where the pod is placed, [row, resource].

        The pod uses one of those that it matches: the one that gives most counts, for each
        resource. To a pod that ignores Reservations all of them are free. A Reservation that takes
        pods over counts with what its estimate exceeds theirs by. prod: by row of the tables,
        whether only what counts as load of class koord-prod is given.
        """
        load, reservations = self.load, tables.reservations
        given = zeros((len(tables.nodes), len(load.resources)))
        if self.restored is None:
            return given[rows]
        for row, pods in self.restored.taken_over(pod, tables, rows).items():
            given[row] = self._of_taken(pod, pods, prod=bool(prod.item(row)))
        slots = self.restored.slots(pod, tables, rows)
        on, amounts = [], []
        for slot, row in zip(slots.tolist(), reservations.row[slots].tolist(), strict=True):
            share = load.reserved(row, reservations.facts(slot).uid)
            if share is not None:
                on.append(row)
                amounts.append(share.prod_delta if prod.item(row) else share.delta)
        if on and pod.derived(asked_of).ignores:
            np.add.at(given, on, amounts)
        elif on:
            np.maximum.at(given, on, np.minimum(amounts, load.estimate(pod)))
        return given[rows]

    def _given_on(self, pod: PodShape, tables: Tables, row: int, *, prod: bool) -> Vector:
        """Return what `_given` gives one row."""
        load = self.load
        given = zeros(len(load.resources))
        if self.restored is None:
            return given
        for pods in self.restored.taken_over(pod, tables, only(row)).values():
            given = self._of_taken(pod, pods, prod=prod)
        ignores, own = pod.derived(asked_of).ignores, load.estimate(pod)
        for slot in self.restored.slots(pod, tables, only(row)).tolist():
            share = load.reserved(row, tables.reservations.facts(slot).uid)
            if share is not None:
                amount = share.prod_delta if prod else share.delta
                given = given + amount if ignores else np.maximum(given, np.minimum(amount, own))
        return given

    def _of_taken(self, pod: PodShape, pods: Iterable[Booking], *, prod: bool) -> Vector:
        """Return what of a Reservation's estimate the pods count with that it takes over."""
        load = self.load
        theirs = zeros(len(load.resources))
        for each in pods:
            if not prod or each.shape.priority_class is PriorityClass.PROD:
                theirs += load.estimate(each.shape)
        return np.minimum(theirs, load.estimate(pod))


def _rounded_percent(used: Scores, allocatable: Scores) -> Scores:
    """Return round(100 * used / allocatable), halves upwards, where something is allocatable.

    A sum of absurd limits counts as LARGEST_AMOUNT: 200 times more would not fit 64 bits.
    """
    some = np.maximum(allocatable, 1)
    used = np.minimum(used, LARGEST_AMOUNT)
    percent: Scores = (200 * used + some) // (2 * some)
    return percent
