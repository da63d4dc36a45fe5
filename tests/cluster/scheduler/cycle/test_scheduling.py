"""From a pod to a booking, or to the reasons why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from apis.cpuset import CpuSet
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.plugins.contract import Reason, Recorded, Refusal
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable, TaintToleration
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.plugins.resources.resource_scores import LeastAllocated
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod

_PROFILE = Profile(
    "koord-scheduler",
    filters=(NodeUnschedulable(), TaintToleration(), NodeResourcesFit()),
    scores=((LeastAllocated(), 1),),
)


@pytest.fixture
def tables() -> Tables:
    return Tables()


def _schedule(
    tables: Tables, shape: PodShape, *, profile: Profile = _PROFILE, uid: str = "u"
) -> Placed | Unplaced:
    scheduling = Scheduling(tables, {"koord-scheduler": profile}, seed=1)
    return scheduling.schedule(
        key="default/a", uid=uid, shape=shape, profile="koord-scheduler", now=5.0
    )


def test_the_emptiest_node_is_booked(tables: Tables) -> None:
    for name, cpu in (("small", "2"), ("large", "32"), ("middle", "8")):
        tables.upsert_node(make_node(name, allocatable={"cpu": cpu}))
    shape = Shapes().of(make_pod("a", requests={"cpu": "1"}))
    placed = _schedule(tables, shape)
    assert isinstance(placed, Placed)
    assert placed.booking.node == "large"
    assert tables.bookings == {"u": placed.booking}
    row = tables.nodes.row("large")
    assert tables.nodes.requested[row, 0] == 1000


def test_each_node_counts_with_the_first_plugin_that_holds_it_back(tables: Tables) -> None:
    taint = [{"key": "a", "effect": "NoSchedule"}]
    tables.upsert_node(make_node("off", unschedulable=True, taints=taint))
    tables.upsert_node(make_node("tainted", taints=taint, allocatable={"cpu": "1"}))
    tables.upsert_node(make_node("both", allocatable={"cpu": "1", "memory": "1Mi"}))
    tables.upsert_node(make_node("full", allocatable={"cpu": "4", "pods": "1"}))
    shapes = Shapes()
    tables.place(
        Booking(
            key="default/x",
            uid="x",
            shape=shapes.of(make_pod("x", requests={"cpu": "3"})),
            node="full",
        )
    )
    outcome = _schedule(tables, shapes.of(make_pod("a", requests={"cpu": "2", "memory": "1Gi"})))
    assert isinstance(outcome, Unplaced)
    diagnosis = outcome.diagnosis
    assert diagnosis.message == (
        "0/4 nodes are available: 1 Insufficient memory, 1 Too many pods, "
        "1 node(s) had untolerated taint(s), 1 node(s) were unschedulable, 2 Insufficient cpu."
    )
    assert diagnosis.plugins == {"NodeUnschedulable", "TaintToleration", "NodeResourcesFit"}
    # Only on "full" could evictions help: "both" never has 2 CPUs.
    assert [tables.nodes.name(row) for row in diagnosis.resolvable] == ["full"]


def test_without_nodes_the_message_says_so(tables: Tables) -> None:
    outcome = _schedule(tables, Shapes().of(make_pod("a")))
    assert isinstance(outcome, Unplaced)
    assert outcome.diagnosis.message == "no nodes available to schedule pods."


@dataclass(frozen=True)
class _OddNodesOnly:
    """Gives CPU 0 on nodes whose row is odd."""

    name: str = "Odd"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return True

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        if row % 2 == 0:
            return Reason("node(s) are even")
        return replace(allocation, cpus=CpuSet.parse("0"))

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        return Recorded({"cpus": str(booking.allocation.cpus)}, {})


def test_a_node_that_cannot_give_the_exact_allocation_yields_to_the_next_best(
    tables: Tables,
) -> None:
    profile = replace(_PROFILE, allocators=(_OddNodesOnly(),))
    tables.upsert_node(make_node("even", allocatable={"cpu": "64"}))
    shape = Shapes().of(make_pod("a", requests={"cpu": "1"}))
    outcome = _schedule(tables, shape, profile=profile)
    assert isinstance(outcome, Unplaced)
    assert outcome.diagnosis.message == "0/1 nodes are available: 1 node(s) are even."
    assert outcome.diagnosis.plugins == {"Odd"}
    tables.upsert_node(make_node("odd", allocatable={"cpu": "2"}))
    placed = _schedule(tables, shape, profile=profile)
    assert isinstance(placed, Placed)
    assert placed.booking.node == "odd"
    assert placed.recorded.annotations == {"cpus": "0"}


@dataclass(frozen=True)
class _Closed:
    name: str = "ElasticQuota"

    def check(self, pod: PodShape, tables: Tables) -> None:
        raise Refusal(self.name, "quota q is used up")


def test_a_refused_pod_costs_no_look_at_nodes_and_names_its_plugin(tables: Tables) -> None:
    tables.upsert_node(make_node("n"))
    profile = replace(_PROFILE, admissions=(_Closed(),))
    outcome = _schedule(tables, Shapes().of(make_pod("a")), profile=profile)
    assert isinstance(outcome, Unplaced)
    assert outcome.diagnosis.message == "0/1 nodes are available: quota q is used up."
    assert outcome.diagnosis.plugins == {"ElasticQuota"}
    assert not tables.bookings


def test_with_equal_inputs_placements_are_equal_and_spread_over_equal_nodes() -> None:
    runs = []
    for _ in range(2):
        tables = Tables()
        for number in range(30):
            tables.upsert_node(make_node(f"n{number}"))
        scheduling = Scheduling(tables, {"koord-scheduler": _PROFILE}, seed=7)
        shape = Shapes().of(make_pod("a", requests={"cpu": "1"}))
        chosen = []
        for number in range(30):
            outcome = scheduling.schedule(
                key="default/a", uid=str(number), shape=shape, profile="koord-scheduler", now=0.0
            )
            assert isinstance(outcome, Placed)
            chosen.append(outcome.booking.node)
        runs.append(chosen)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 30
