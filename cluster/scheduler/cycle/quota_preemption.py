"""ElasticQuota's preemption: victims are less important pods of the same quota, and of no other.

A pod that its quota refused needs no particular node to be freed. Where some node takes it as it
is, the least important pods of the quota go, wherever they are, as few as suffice; else one node is
freed for the pod and for its quota together. A pod that its quota admits and that no node takes has
one node freed, as by DefaultPreemption. No I/O and no clock. docs/facts/scheduler.md,
"Preemption by quotas".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from apis.keys import DEFAULT_QUOTA
from cluster.scheduler.cycle.evaluation import Evaluator
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.preemption import Preemption
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.cycle.victims import Candidate, by_trial, default_victims, put_back
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.quotas.elastic_quota import ELASTIC_QUOTA, ElasticQuotaAdmission
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.occupants import importance
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.quotas.tree import QuotaNode
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_MOST_ALLOCATIONS: Final = 16
"""Nodes that pass all filters and refuse the exact allocation, until one is freed instead: half of
them the best ones, the others drawn. Chosen: 16 allocations take 5 ms."""
_MOST_TRIED: Final = 100
"""Nodes that are tried one by one, drawn if there are more; the least number of
DefaultPreemption."""
_VICTIMS_END: Final = "preemption: not eligible due to terminating pods of the same quota."
_NO_VICTIMS: Final = "preemption: no pods of lower priority in the same quota make room."


class QuotaPreemption:
    """The search for the pods of one profile. A PostFilter."""

    name: Final = ELASTIC_QUOTA

    def __init__(
        self,
        on_nodes: Preemption,
        evaluator: Evaluator,
        tables: Tables,
        nominator: Nominator[PodShape],
        budgets: DisruptionBudgets,
        admission: ElasticQuotaAdmission,
        *,
        default_quota: bool,
    ) -> None:
        """on_nodes: finds a node to free. default_quota: pods of koordinator-default-quota may
        preempt each other."""
        self._on_nodes = on_nodes
        self._evaluator = evaluator
        self._tables = tables
        self._nominator = nominator
        self._budgets = budgets
        self._admission = admission
        self._default_quota = default_quota
        self._checks = RowChecks(evaluator.profile, tables, nominator)

    def post_filter(
        self,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        *,
        being_evicted: Callable[[Booking], bool],
        salt: int,
    ) -> Candidate | NotFound:
        """Return the node for a pod, with the victims of its quota. See PostFilter."""
        quota = self._admission.quotas.of(pod.shape).quota
        if quota is None or (quota.name == DEFAULT_QUOTA and not self._default_quota):
            return NotFound("")
        reason = self._on_nodes.why_not(pod, being_evicted)
        if reason is not None:
            return reason
        if not diagnosis.refusal:
            return self._on_nodes.find(
                pod,
                diagnosis.resolvable,
                salt=salt,
                may_be_victim=lambda shape: self._may_be_victim(shape, quota),
            )
        refusal = self._admission.refusal(pod.shape)
        if ELASTIC_QUOTA not in diagnosis.plugins or refusal is None or not refusal.resolvable:
            return NotFound("")
        potential = [
            booking
            for booking in self._admission.quotas.pods(quota)
            if booking.shape.priority < pod.priority and default_victims(booking.shape)
        ]
        if self._nominator.node_of(pod.uid) and any(map(being_evicted, potential)):
            return NotFound(_VICTIMS_END, waits=True)
        found = self._anywhere(pod, potential, salt) or self._on_one_node(
            pod, potential, quota, salt
        )
        return found or NotFound(_NO_VICTIMS)

    def _may_be_victim(self, shape: PodShape, quota: QuotaNode) -> bool:
        return default_victims(shape) and self._admission.quotas.of(shape).quota is quota

    def _admits(self, pod: PendingPod[PodShape]) -> bool:
        return self._admission.refusal(pod.shape) is None

    def _anywhere(
        self, pod: PendingPod[PodShape], potential: Sequence[Booking], salt: int
    ) -> Candidate | None:
        """Return a node that takes the pod as it is, with victims wherever they are."""
        row = self._feasible(pod, salt)
        if row is None:
            return None
        chosen: list[Booking] = []
        with Trial(self._tables) as trial:
            for booking in sorted(potential, key=importance, reverse=True):
                trial.remove(booking.uid)
                chosen.append(booking)
                if self._admits(pod):
                    break
            else:
                return None
            chosen.reverse()
            victims, violations = put_back(
                self._tables, trial, chosen, self._budgets, lambda: self._admits(pod)
            )
        return Candidate(row, victims, violations)

    def _feasible(self, pod: PendingPod[PodShape], salt: int) -> int | None:
        try:
            evaluation = self._evaluator.evaluate_nodes(pod.shape)
        except Refusal:
            return None
        tried: list[int] = []
        while len(tried) < _MOST_ALLOCATIONS:
            pick = evaluation.best if len(tried) < _MOST_ALLOCATIONS // 2 else evaluation.drawn
            row = pick(salt, without=tried)
            if row is None or self._checks.fits(pod, row):
                return row
            tried.append(row)
        return None

    def _on_one_node(
        self, pod: PendingPod[PodShape], potential: Sequence[Booking], quota: QuotaNode, salt: int
    ) -> Candidate | None:
        """Return the cheapest node that takes the pod without victims of its quota there."""
        order, drawn = self._tables.nodes.order, np.uint64(salt)
        rows = {self._tables.nodes.row(booking.node) for booking in potential}
        known = (row for row in rows if row is not None)
        found = []
        for row in sorted(known, key=lambda row: int(order[row] ^ drawn))[:_MOST_TRIED]:
            candidate = by_trial(
                self._checks,
                pod,
                row,
                lambda shape: self._may_be_victim(shape, quota),
                self._budgets,
                still_fits=lambda pod, row: self._admits(pod),
            )
            if candidate is not None:
                found.append(candidate)
        return min(found, key=lambda each: (each.cost, order[each.row]), default=None)
