"""Victims inside and beside reservations."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from apis.keys import ANNOTATION_RESERVATION_AFFINITY
from cluster.scheduler.cycle.evaluation import Evaluator, Profile
from cluster.scheduler.cycle.nomination import Nominator
from cluster.scheduler.cycle.preemption import Preemption
from cluster.scheduler.cycle.victims import Candidate
from cluster.scheduler.plugins.reservations.reservation import Reservation
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.tables.disruption_budgets import DisruptionBudgets
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.reservations.facts import AllocatePolicy
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.bed import CONFIGURATION, ReservationBed
from tests.cluster.scheduler.reservations.making import make_facts, put, use

_PLUGIN = Reservation()
_PROFILE = Profile(
    "koord-scheduler",
    admissions=(_PLUGIN,),
    filters=(NodeResourcesFit(restored=Restoring()), _PLUGIN),
    allocators=(_PLUGIN,),
)
_ANY: dict[str, Any] = {}
_GANGS_PREEMPT = CONFIGURATION.replace(
    "postFilter: {enabled: [{name: Reservation}]}",
    'postFilter: {enabled: [{name: Coscheduling}], disabled: [{name: "*"}]}',
).replace(
    "- schedulerName: other",
    """  pluginConfig:
  - name: Coscheduling
    args: {enablePreemption: true}
- schedulerName: other""",
)


class _Bed:
    """One node of 16 CPUs; a reservation of 8 for the app "a" with a pod of 4 inside; the rest is
    taken by a pod of 8."""

    def __init__(self, policy: AllocatePolicy, *, inside: int = 0, beside: int = 0) -> None:
        """inside, beside: priorities of the two pods."""
        self.tables = Tables()
        self.tables.upsert_node(make_node("n"))
        self.shapes = Shapes()
        put(self.tables, self.shapes, make_facts("r", policy=policy), "n", {"cpu": "8"})
        use(self.tables, self.pod("4", inside), "inside", "n", "r")
        use(self.tables, self.pod("8", beside, app="x"), "beside", "n")

    def pod(
        self, cpu: str, priority: int, *, app: str = "a", affinity: dict[str, Any] | None = None
    ) -> PodShape:
        annotations = {}
        if affinity is not None:
            annotations[ANNOTATION_RESERVATION_AFFINITY] = json.dumps(affinity)
        return self.shapes.of(
            make_pod(
                "p",
                requests={"cpu": cpu},
                labels={"app": app},
                annotations=annotations,
                priority=priority,
            )
        )

    def victims(self, shape: PodShape) -> set[str] | str:
        """Return the UIDs of the victims for a pod that no node takes, or why there are none."""
        evaluator = Evaluator(_PROFILE, self.tables)
        preemption = Preemption(evaluator, self.tables, Nominator(), DisruptionBudgets())
        evaluation = evaluator.evaluate(shape)
        assert not len(evaluation.feasible)
        before = self.tables.nodes.requested.copy()
        resolvable = diagnose(shape, self.tables, evaluation.masks).resolvable
        pending = PendingPod("default/p", "uid-p", shape.priority, shape, 0.0)
        found = preemption.find(pending, resolvable, salt=1)
        assert np.array_equal(before, self.tables.nodes.requested)
        if isinstance(found, Candidate):
            return {victim.uid for victim in found.victims}
        return found.remark


def test_a_pod_of_a_restricted_reservation_evicts_pods_inside_it_alone() -> None:
    bed = _Bed(AllocatePolicy.RESTRICTED)
    assert bed.victims(bed.pod("6", 5, affinity=_ANY)) == {"uid-inside"}
    # The one beside would free room of the node, which is not what the pod lacks.
    important = _Bed(AllocatePolicy.RESTRICTED, inside=9)
    remark = important.victims(important.pod("6", 5, affinity=_ANY))
    assert remark == "preemption: 0/1 nodes are available: 1 Reservation(s) Insufficient cpu."


def test_a_pod_of_an_aligned_reservation_fills_it_up_with_room_of_evicted_pods() -> None:
    bed = _Bed(AllocatePolicy.ALIGNED, inside=9)
    assert bed.victims(bed.pod("12", 5)) == {"uid-beside"}
    assert isinstance(bed.victims(bed.pod("13", 5)), str)


def test_a_stranger_gains_nothing_by_evicting_a_pod_inside_a_reservation() -> None:
    bed = _Bed(AllocatePolicy.RESTRICTED, beside=9)
    assert isinstance(bed.victims(bed.pod("2", 5, app="x")), str)
    other = _Bed(AllocatePolicy.RESTRICTED)
    assert other.victims(other.pod("2", 5, app="x")) == {"uid-beside"}


@pytest.mark.parametrize(
    "owner",
    [
        {"object": {"namespace": "default", "name": "g0"}},
        {"labelSelector": {"matchLabels": {"who": "g0"}}},
    ],
    ids=["by name", "by label"],
)
def test_a_member_of_a_gang_needs_no_eviction_where_room_is_reserved_for_it(
    owner: dict[str, Any],
) -> None:
    bed = ReservationBed(_GANGS_PREEMPT)
    amounts = {"cpu": "4", "memory": "64Gi", "pods": "10"}
    bed.show(
        bed.core.nodes, "ADDED", {"metadata": {"name": "m"}, "status": {"allocatable": amounts}}
    )
    bed.reservation("r", "2", kind="ADDED", owners=[owner])
    bed.pod("low0", "2", kind="ADDED", node="n", priority=3)
    bed.pod("low1", "2", kind="ADDED", node="m", priority=2)
    bed.pod("low2", "2", kind="ADDED", node="m", priority=1)
    gang = {f"gang.scheduling.koordinator.sh/{key}": value
            for key, value in (("name", "g"), ("min-available", "2"))}  # fmt: skip
    for name in ("g0", "g1"):
        metadata = {"labels": {"who": name}, "annotations": gang}
        bed.pod(name, "2", kind="ADDED", priority=10, metadata=metadata)
    assert bed.placed() == {}
    assert bed.evicted() == ["low2"]
    assert bed.nominated == {"g0": "n", "g1": "m"}
