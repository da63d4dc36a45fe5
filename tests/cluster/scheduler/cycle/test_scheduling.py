"""From a pod to a booking, or to the reasons why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from apis.cpuset import CpuSet
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.node_search import Arguments
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.plugins.contract import Reason, Recorded, Refusal
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable, TaintToleration
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.plugins.resources.resource_scores import LeastAllocated
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.pending import PendingPod
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


def _preempting(tables: Tables, **given: Any) -> Scheduling:
    profiles = dict.fromkeys(("koord-scheduler", "another"), _PROFILE)
    return Scheduling(
        tables, profiles, seed=1, preemption={"koord-scheduler": Arguments()}, **given
    )


def _pending(priority: int, *, gang: str = "", **spec: Any) -> PendingPod[PodShape]:
    spec = {"schedulerName": "koord-scheduler", **spec}
    shape = Shapes().of(make_pod("a", requests={"cpu": "9"}, priority=priority, **spec))
    return PendingPod("default/a", "a", priority, shape, 0.0, gang)


@pytest.mark.parametrize(
    ("pod", "may"),
    [
        (_pending(6), True),
        (_pending(5), False),
        (_pending(6, preemptionPolicy="Never"), False),
        (_pending(6, schedulerName="another"), False),
        # Room is made for the gang as a whole.
        (_pending(6, gang="default/g"), False),
    ],
)
def test_a_pod_may_preempt_where_less_important_ones_are_placed(
    tables: Tables, pod: PendingPod[PodShape], may: bool
) -> None:
    scheduling = _preempting(tables, gang_preemption=("koord-scheduler",))
    tables.upsert_node(make_node("n"))
    assert not scheduling.may_preempt(pod)
    tables.place(Booking("default/x", "x", Shapes().of(make_pod("x", priority=5)), "n"))
    assert scheduling.may_preempt(pod) is may


def test_a_node_that_is_to_be_avoided_comes_last(tables: Tables) -> None:
    for name, cpu in (("large", "32"), ("small", "8")):
        tables.upsert_node(make_node(name, allocatable={"cpu": cpu}))
    scheduling = Scheduling(tables, {"koord-scheduler": _PROFILE}, seed=1)
    chosen = {}
    for avoid, cpu in (("", "1"), ("large", "1"), ("small", "1"), ("large", "9")):
        outcome = scheduling.schedule(
            key="default/a",
            uid="a",
            shape=Shapes().of(make_pod("a", requests={"cpu": cpu})),
            profile="koord-scheduler",
            now=0.0,
            avoid=avoid,
        )
        assert isinstance(outcome, Placed)
        chosen[avoid, cpu] = outcome.booking.node
        tables.remove("a")
    assert chosen == {
        ("", "1"): "large",
        ("large", "1"): "small",
        ("small", "1"): "large",
        ("large", "9"): "large",
    }


@dataclass(frozen=True)
class _Says:
    sentence: str

    def explain(self, pod: PodShape, tables: Tables, masks: Any) -> str:
        return self.sentence


def test_what_plugins_explain_follows_the_reasons(tables: Tables) -> None:
    tables.upsert_node(make_node("n"))
    profile = replace(_PROFILE, explainers=(_Says("It is odd."), _Says(""), _Says("So it is.")))
    outcome = _schedule(tables, Shapes().of(make_pod("a", requests={"cpu": "99"})), profile=profile)
    assert isinstance(outcome, Unplaced)
    assert outcome.diagnosis.remarks == ("It is odd.", "So it is.")
    assert outcome.diagnosis.text == (
        "0/1 nodes are available: 1 Insufficient cpu. It is odd. So it is."
        " One change away: 1 of 1 nodes lack only 83 of cpu."
    )


def test_the_nodes_that_pass_are_found_without_a_booking(tables: Tables) -> None:
    for name, cpu in (("b", "16"), ("a", "16"), ("full", "4")):
        tables.upsert_node(make_node(name, allocatable={"cpu": cpu}))
    scheduling = Scheduling(tables, {"koord-scheduler": _PROFILE}, seed=1)
    assert scheduling.feasible_nodes(_pending(0)) == ("b", "a")
    assert not tables.bookings
    refusing = replace(_PROFILE, admissions=(_Closed(),))
    assert (
        Scheduling(tables, {"koord-scheduler": refusing}, seed=1).feasible_nodes(_pending(0)) == ()
    )


@dataclass(frozen=True)
class _Records:
    name: str
    recorded: Recorded | None

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return self.recorded is not None

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        return allocation

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        assert self.recorded is not None
        return self.recorded


def test_what_all_allocators_record_is_written_and_a_later_one_wins(tables: Tables) -> None:
    tables.upsert_node(make_node("n"))
    allocators = (
        _Records("a", Recorded({"x": "1", "y": "1"}, {"l": "1"}, "lock")),
        _Records("none", None),
        _Records("b", Recorded({"y": "2"}, {"m": "2"})),
    )
    shape = Shapes().of(make_pod("a"))
    placed = _schedule(tables, shape, profile=replace(_PROFILE, allocators=allocators))
    assert isinstance(placed, Placed)
    assert placed.recorded == Recorded({"x": "1", "y": "2"}, {"l": "1", "m": "2"}, "lock")
    assert placed.booking == Booking("default/a", "u", shape, "n", start=5.0)


def test_victims_are_known_before_the_first_search(tables: Tables) -> None:
    scheduling = _preempting(tables)
    tables.upsert_node(make_node("n"))
    tables.place(Booking("default/x", "x", Shapes().of(make_pod("x")), "n"))
    scheduling.prepare()
    assert [each.uid for each in tables.occupants.bookings[0]] == ["x"]
