"""What a pod may take of a node with reservations, and through which one it goes."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.keys import (
    ANNOTATION_RESERVATION_AFFINITY,
    ANNOTATION_RESERVATION_ALLOCATED,
    LABEL_OPERATING_MODE,
    LABEL_RESERVATION_IGNORED,
)
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.gang_plans import GangPlans
from cluster.scheduler.cycle.permit import Wanted
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.plugins.contract import Filter, Reason
from cluster.scheduler.plugins.nodes.node_ports import NodePorts
from cluster.scheduler.plugins.nodes.taints import NodeUnschedulable
from cluster.scheduler.plugins.reservations.explaining import explained
from cluster.scheduler.plugins.reservations.reservation import Reservation
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.plugins.reservations.room import scores_in
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.plugins.resources.resource_scores import LeastAllocated
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.reservations.facts import AllocatePolicy, ReservationFacts
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.reservations.making import container, make_facts, put, use
from tests.cluster.scheduler.reservations.oracle import OneNode, Reserved, score

_RESTORING = Restoring()
_PLUGIN = Reservation()
_PROFILE = Profile(
    "koord-scheduler",
    admissions=(_PLUGIN,),
    filters=(
        NodeUnschedulable(),
        NodePorts(_RESTORING),
        NodeResourcesFit(restored=_RESTORING),
        _PLUGIN,
    ),
    scores=((LeastAllocated(), 1),),
    set_scores=((_PLUGIN, 5000),),
    allocators=(_PLUGIN,),
    explainers=(_PLUGIN,),
)
_ANY: dict[str, Any] = {"requiredDuringSchedulingIgnoredDuringExecution": None}
"""An affinity that every reservation satisfies."""


class _Cluster:
    """Nodes of 32 CPUs, and a scheduler of one profile."""

    def __init__(self, *names: str, **allocatable: str) -> None:
        self.tables = Tables()
        self.shapes = Shapes()
        for name in names or ("n",):
            self.tables.upsert_node(make_node(name, allocatable={"cpu": "32", **allocatable}))
        self.scheduling = Scheduling(self.tables, {"koord-scheduler": _PROFILE}, seed=1)

    def pod(
        self,
        cpu: str = "",
        *,
        app: str = "a",
        affinity: dict[str, Any] | None = None,
        ignores: bool = False,
        requests: dict[str, str] | None = None,
        ports: tuple[int, ...] = (),
    ) -> PodShape:
        labels = {"app": app}
        if ignores:
            labels[LABEL_RESERVATION_IGNORED] = "true"
        annotations = {}
        if affinity is not None:
            annotations[ANNOTATION_RESERVATION_AFFINITY] = json.dumps(affinity)
        wanted = requests if requests is not None else ({"cpu": cpu} if cpu else {})
        return self.shapes.of(
            make_pod(
                "p", labels=labels, annotations=annotations, containers=[container(wanted, ports)]
            )
        )

    def reserve(
        self, facts: ReservationFacts, node: str = "n", requests: dict[str, str] | None = None
    ) -> None:
        put(self.tables, self.shapes, facts, node, requests or {"cpu": "8"})

    def schedule(self, shape: PodShape, name: str = "p") -> Placed | Unplaced:
        return self.scheduling.schedule(
            key=f"default/{name}",
            uid=f"uid-{name}",
            shape=shape,
            profile="koord-scheduler",
            now=1.0,
        )

    def placed(self, shape: PodShape, name: str = "p") -> tuple[str, str]:
        """Return the node and the name of the reservation, "" for none."""
        outcome = self.schedule(shape, name)
        assert isinstance(outcome, Placed), outcome
        facts = self.tables.reservations.get(outcome.booking.allocation.reservation)
        recorded = outcome.recorded.annotations.get(ANNOTATION_RESERVATION_ALLOCATED)
        if facts is None:
            assert recorded is None
            return outcome.booking.node, ""
        assert json.loads(recorded or "") == {"name": facts.name, "uid": facts.uid}
        return outcome.booking.node, facts.name

    def message(self, shape: PodShape) -> str:
        outcome = self.schedule(shape)
        assert isinstance(outcome, Unplaced), outcome
        return outcome.diagnosis.message


def _example() -> _Cluster:
    """The worked example: 32 cores; Restricted reserves 8, of which 4 are used; others have 16."""
    cluster = _Cluster()
    cluster.reserve(make_facts("r1"))
    use(cluster.tables, cluster.pod("4"), "owner", "n", "r1")
    use(cluster.tables, cluster.pod("16", app="x"), "other", "n")
    return cluster


@pytest.mark.parametrize(
    ("cpu", "reservation"),
    [("4", "r1"), ("5", ""), ("6", ""), ("8", "")],
)
def test_an_owner_takes_what_is_left_of_its_reservation_or_else_the_nodes_room(
    cpu: str, reservation: str
) -> None:
    cluster = _example()
    assert cluster.placed(cluster.pod(cpu)) == ("n", reservation)


def test_what_neither_the_reservation_nor_the_node_has_is_refused() -> None:
    cluster = _example()
    assert cluster.message(cluster.pod("9")).startswith(
        "0/1 nodes are available: 1 Insufficient cpu by node."
    )


def test_a_stranger_sees_the_reservation_in_full() -> None:
    cluster = _example()
    assert "1 Insufficient cpu" in cluster.message(cluster.pod("9", app="x"))
    assert cluster.placed(cluster.pod("8", app="x")) == ("n", "")


def test_an_aligned_reservation_is_filled_up_from_the_node() -> None:
    cluster = _Cluster()
    cluster.reserve(make_facts("r", policy=AllocatePolicy.ALIGNED))
    use(cluster.tables, cluster.pod("20", app="x"), "other", "n")
    assert "1 Insufficient cpu" in cluster.message(cluster.pod("13"))
    assert cluster.placed(cluster.pod("12")) == ("n", "r")


def test_a_pod_that_demands_a_reservation_gets_no_room_beside_it() -> None:
    cluster = _example()
    demanding = cluster.pod("5", affinity=_ANY)
    assert "1 Reservation(s) Insufficient cpu." in cluster.message(demanding)
    assert cluster.placed(cluster.pod("4", affinity=_ANY)) == ("n", "r1")


def test_a_pod_that_demands_a_reservation_needs_one_that_matches() -> None:
    cluster = _Cluster("n", "m")
    cluster.reserve(make_facts("r"))
    message = cluster.message(cluster.pod("1", affinity={"name": "other"}))
    assert "2 node(s) no reservations match reservation affinity" in message
    assert cluster.placed(cluster.pod("1", affinity={"name": "r"})) == ("n", "r")


def test_a_pod_without_requests_uses_a_reservation_only_if_it_demands_one() -> None:
    cluster = _Cluster()
    cluster.reserve(make_facts("r"))
    assert cluster.placed(cluster.pod()) == ("n", "")
    assert cluster.placed(cluster.pod(affinity=_ANY), "q") == ("n", "r")


def test_restricted_options_leave_other_resources_to_the_node() -> None:
    cluster = _Cluster()
    everything = {"cpu": "8", "memory": "8Gi"}
    facts = make_facts("r", everything, restricted=frozenset({"cpu"}))
    cluster.reserve(facts, requests=everything)
    large = {"cpu": "8", "memory": "16Gi"}
    assert cluster.placed(cluster.pod(requests=large, affinity=_ANY)) == ("n", "r")
    cluster.tables.remove("uid-p")
    cluster.tables.reservations.upsert(make_facts("r", everything))
    assert "Reservation(s) Insufficient memory" in cluster.message(
        cluster.pod(requests=large, affinity=_ANY)
    )
    # Names of nothing that is reserved are not options.
    cluster.tables.reservations.upsert(make_facts("r", everything, restricted=frozenset({"x"})))
    assert "Reservation(s) Insufficient memory" in cluster.message(
        cluster.pod(requests=large, affinity=_ANY)
    )


def test_a_reservation_of_pods_limits_how_many_use_it() -> None:
    cluster = _Cluster()
    cluster.reserve(make_facts("r", {"cpu": "8", "pods": "1"}))
    assert cluster.placed(cluster.pod("1", affinity=_ANY)) == ("n", "r")
    second = cluster.schedule(cluster.pod("2", affinity=_ANY), "q")
    assert isinstance(second, Unplaced)
    assert "1 Reservation(s) Too many pods" in second.diagnosis.message


def test_what_is_reserved_inside_a_reservation_is_not_for_its_pods() -> None:
    cluster = _Cluster()
    cluster.reserve(make_facts("r", reserved={"cpu": "2"}))
    assert "Reservation(s) Insufficient cpu" in cluster.message(cluster.pod("7", affinity=_ANY))
    assert cluster.placed(cluster.pod("6", affinity=_ANY)) == ("n", "r")


def test_the_first_pod_has_a_reservation_to_itself_where_that_is_said() -> None:
    cluster = _Cluster()
    cluster.reserve(make_facts("r", once=True))
    assert cluster.placed(cluster.pod("1")) == ("n", "r")
    assert cluster.placed(cluster.pod("1"), "q") == ("n", "")
    cluster.tables.remove("uid-p")
    assert cluster.placed(cluster.pod("1"), "s") == ("n", "r")


def test_a_node_full_of_reservations_takes_their_pods_and_no_others() -> None:
    cluster = _Cluster(pods="2")
    for name in ("r0", "r1"):
        cluster.reserve(make_facts(name))
    assert "Too many pods" in cluster.message(cluster.pod("1", app="x"))
    assert {cluster.placed(cluster.pod("5"), f"p{n}") for n in range(2)} == {
        ("n", "r0"),
        ("n", "r1"),
    }
    assert "Too many pods" in cluster.message(cluster.pod("1"))


def test_a_pod_that_ignores_reservations_takes_what_is_not_in_use() -> None:
    cluster = _example()
    # 32 - 16 of the other - 4 of the owner.
    assert cluster.message(cluster.pod("13", ignores=True, app="x"))
    assert cluster.placed(cluster.pod("12", ignores=True, app="x"), "greedy") == ("n", "")
    # Now the room that was reserved is gone.
    assert "1 Insufficient cpu" in cluster.message(cluster.pod("1"))


def test_a_pod_named_by_a_reservation_uses_it_and_its_replicas_do_not() -> None:
    cluster = _Cluster("n", "m")
    facts = make_facts("r", owners=({"object": {"name": "chosen", "namespace": "default"}},))
    cluster.reserve(facts, node="m")
    shape = cluster.pod("1")
    assert cluster.placed(shape, "replica")[1] == ""
    assert cluster.placed(shape, "chosen") == ("m", "r")
    assert cluster.tables.bookings["uid-chosen"].shape is shape


def _short(cluster: _Cluster, app: str, *names: str) -> Diagnosis | None:
    """Return why a gang of pods with these names, each of 8 CPUs, is refused beforehand."""
    shape = cluster.shapes.of(
        make_pod("p", labels={"app": app}, requests={"cpu": "8"}, schedulerName="koord-scheduler")
    )
    pods = tuple(
        PendingPod(f"default/{name}", f"uid-{name}", 0, shape, 0.0, "default/g") for name in names
    )
    scheduling = cluster.scheduling
    plans = GangPlans(
        cluster.tables,
        scheduling.checks,
        scheduling.evaluate,
        None,
        admit=scheduling.admit,
        examine=scheduling.examine,
        node_of=scheduling.nominator.node_of,
    )
    found = plans.node_for(pods[0], [Wanted("default/g", len(pods), pods)])
    return found if isinstance(found, Diagnosis) else None


def test_room_that_is_reserved_counts_for_a_gang() -> None:
    cluster = _Cluster()
    for number in range(4):
        cluster.reserve(make_facts(f"r{number}"))
    assert _short(cluster, "a", "w0", "w1", "w2", "w3") is None
    short = _short(cluster, "x", "w0", "w1", "w2", "w3")
    assert short is not None and "room for 0 at most" in short.message
    # A member that a reservation names has room that the others do not have.
    named = make_facts("r0", owners=({"object": {"name": "chosen"}},))
    cluster.tables.reservations.upsert(named)
    assert _short(cluster, "x", "chosen") is None
    assert _short(cluster, "x", "other") is not None
    cluster.tables.reservations.delete("uid-r0")
    assert _short(cluster, "x", "chosen") is not None


def test_the_message_says_what_became_of_every_reservation_for_the_pod() -> None:
    cluster = _Cluster("n", "m", cpu="64")
    cluster.reserve(make_facts("away", labels={"zone": "z2"}), "m")
    cluster.reserve(make_facts("closed", unschedulable=True, labels={"zone": "z1"}))
    cluster.reserve(make_facts("tainted", taints=(("kept", "NoSchedule"),)))
    cluster.reserve(make_facts("small", labels={"zone": "z1"}))
    cluster.reserve(make_facts("used", once=True, labels={"zone": "z1"}))
    use(cluster.tables, cluster.pod("1"), "o", "n", "used")
    cluster.tables.reservations.upsert(make_facts("coming", available=False, labels={"zone": "z1"}))
    cluster.reserve(make_facts("others", owners=()))
    message = cluster.message(cluster.pod("9", affinity={"reservationSelector": {"zone": "z1"}}))
    assert (
        "0/6 reservations are available: 1 Reservation(s) didn't match affinity rules, "
        "1 Reservation(s) had untolerated taint {kept: }, 1 Reservation(s) is not available, "
        "1 Reservation(s) is unschedulable, 1 Reservation(s) is used by another pod, "
        "6 Reservation(s) matched owner total."
    ) in message
    assert "1 Reservation(s) Insufficient cpu" in message
    message = cluster.message(cluster.pod("9", affinity={"name": "small"}))
    assert (
        "0/6 reservations are available: "
        "1 Reservation(s) exactly matches the requested reservation name, "
        "5 Reservation(s) didn't match the requested reservation name, "
        "6 Reservation(s) matched owner total."
    ) in message
    cluster.tables.upsert_node(make_node("n", unschedulable=True, allocatable={"cpu": "64"}))
    message = cluster.message(cluster.pod("9", affinity={"name": "small"}))
    assert "1 Reservation(s) for node reason that node(s) were unschedulable" in message
    # Pods that no reservation is for read nothing about them.
    assert "reservations" not in cluster.message(cluster.pod("999", app="x"))


# --- choice --------------------------------------------------------------------------------------


def test_the_score_of_a_reservation_is_how_full_it_becomes() -> None:
    """The worked example: 8 cores and 16 GiB, 4 and 4 used, a pod with 2 and 4: 75 and 50."""
    cluster = _Cluster()
    everything = {"cpu": "8", "memory": "16Gi"}
    cluster.reserve(make_facts("r", everything), requests=everything)
    use(cluster.tables, cluster.pod(requests={"cpu": "4", "memory": "4Gi"}), "o", "n", "r")
    pod = cluster.pod(requests={"cpu": "2", "memory": "4Gi"})
    slots = cluster.tables.reservations.usable(pod, slice(0, 1))
    assert scores_in(pod, cluster.tables, slots).tolist() == [62]


def _order(cluster: _Cluster, *facts: tuple[ReservationFacts, str]) -> list[tuple[str, str]]:
    for each, node in facts:
        cluster.reserve(each, node)
    return [cluster.placed(cluster.pod("1"), f"p{n}") for n in range(len(facts))]


def test_the_lowest_order_goes_first_then_the_fullest_reservation() -> None:
    cluster = _Cluster("n", "m")
    chosen = _order(
        cluster,
        (make_facts("small", {"cpu": "2"}, once=True), "m"),
        (make_facts("large", once=True), "n"),
        (make_facts("third", once=True, order=3), "n"),
        (make_facts("second", once=True, order=2), "m"),
        (make_facts("before", once=True, order=-1), "n"),
    )
    assert [name for _, name in chosen] == ["before", "second", "third", "small", "large"]


def test_a_node_with_a_reservation_is_preferred_however_large_the_reservation_is() -> None:
    cluster = _Cluster("n", "m", "z")
    cluster.reserve(make_facts("huge", {"cpu": "32"}), "m", {"cpu": "32"})
    assert cluster.placed(cluster.pod("100m")) == ("m", "huge")


def test_nodes_with_fuller_reservations_stay_ahead_beside_an_ordered_one() -> None:
    cluster = _Cluster("a", "b", "c", "d")
    cluster.reserve(make_facts("fuller", {"cpu": "2"}), "a", {"cpu": "2"})
    cluster.reserve(make_facts("emptier"), "b")
    cluster.reserve(make_facts("ordered", order=7), "c")
    feasible = np.arange(4, dtype=np.intp)
    scores = _PLUGIN.score_set(cluster.pod("1"), cluster.tables, feasible)
    assert scores.tolist() == [98, 23, 100, 0]


# --- ports ---------------------------------------------------------------------------------------


def test_ports_of_a_reservation_are_free_for_the_pod_that_goes_through_it() -> None:
    cluster = _Cluster()
    put(cluster.tables, cluster.shapes, make_facts("r"), "n", {"cpu": "8"}, ports=(80,))
    assert "free ports" in cluster.message(cluster.pod("1", app="x", ports=(80,)))
    assert cluster.placed(cluster.pod("1", ports=(80,))) == ("n", "r")
    # The port is the first pod's now; what else is reserved stays usable.
    assert "free ports" in cluster.message(cluster.pod("1", ports=(80,)))
    assert cluster.placed(cluster.pod("1"), "q") == ("n", "r")


def test_a_reserved_port_is_not_taken_through_another_reservation() -> None:
    cluster = _Cluster()
    cluster.reserve(make_facts("without", {"cpu": "2"}))
    put(cluster.tables, cluster.shapes, make_facts("with"), "n", {"cpu": "8"}, ports=(80,))
    assert cluster.placed(cluster.pod("1", ports=(80,))) == ("n", "with")


@pytest.mark.parametrize(
    ("labels", "reserved"),
    [
        ({}, "8"),
        ({LABEL_RESERVATION_IGNORED: "true"}, "32"),
        ({LABEL_OPERATING_MODE: "Reservation"}, "8"),
    ],
)
def test_an_annotation_written_by_others_is_removed(labels: dict[str, str], reserved: str) -> None:
    cluster = _Cluster()
    cluster.reserve(make_facts("r1", {"cpu": reserved}), requests={"cpu": reserved})
    annotations = {ANNOTATION_RESERVATION_ALLOCATED: '{"name":"r1","uid":"uid-r1"}'}
    if labels:
        # It means nothing on a pod that uses no reservation.
        annotations[ANNOTATION_RESERVATION_AFFINITY] = '{"name":"another"}'
    pod = cluster.shapes.of(
        make_pod("p", labels=labels, annotations=annotations, requests={"cpu": "4"})
    )
    outcome = cluster.schedule(pod)
    assert isinstance(outcome, Placed)
    assert outcome.recorded.annotations == {ANNOTATION_RESERVATION_ALLOCATED: None}


def test_an_annotation_that_cannot_be_read_is_named() -> None:
    cluster = _Cluster()
    pod = cluster.shapes.of(
        make_pod("p", annotations={ANNOTATION_RESERVATION_AFFINITY: '{"name": 7}'})
    )
    assert f'metadata.annotations["{ANNOTATION_RESERVATION_AFFINITY}"].name' in cluster.message(pod)


# --- beside the oracle ---------------------------------------------------------------------------

_CPU = st.sampled_from([0, 1000, 2000, 3000, 5000])
_GIB = st.sampled_from([0, 1 << 30, 3 << 30])
_AMOUNTS = st.fixed_dictionaries({}, optional={"cpu": _CPU, "memory": _GIB})
_RESERVED = st.tuples(
    st.fixed_dictionaries({"cpu": _CPU}, optional={"memory": _GIB, "pods": st.integers(0, 2)}),
    st.sampled_from(list(AllocatePolicy)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, frozenset({"cpu"}), frozenset({"memory"}), frozenset({"x"})]),
    st.sampled_from([{}, {"cpu": 1000}]),
    st.lists(_AMOUNTS, max_size=2),
    st.sampled_from(["a", "b"]),
)


def _texts(amounts: dict[str, int]) -> dict[str, str]:
    return {n: f"{a}m" if n == "cpu" else str(a) for n, a in amounts.items()}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(_RESERVED, max_size=3),
    st.lists(_AMOUNTS, max_size=2),
    _AMOUNTS,
    st.booleans(),
    st.integers(1, 6),
)
def test_the_verdict_and_the_choice_equal_the_oracles(
    reserved: list[Any],
    others: list[dict[str, int]],
    pod: dict[str, int],
    required: bool,
    pods: int,
) -> None:
    cluster = _Cluster(cpu="8", memory="6Gi", pods=str(pods))
    expected = []
    for number, (amounts, policy, once, available, options, inner, owners, app) in enumerate(
        reserved
    ):
        facts = make_facts(
            f"r{number}",
            _texts(amounts),
            owners=({"labelSelector": {"matchLabels": {"app": app}}},),
            policy=policy,
            once=once,
            available=available,
            restricted=options,
            reserved=_texts(inner),
        )
        cluster.reserve(facts, requests=_texts({n: a for n, a in amounts.items() if n != "pods"}))
        for index, owner in enumerate(owners):
            shape = cluster.pod(requests=_texts(owner))
            use(cluster.tables, shape, f"o{number}-{index}", "n", f"r{number}")
        expected.append(Reserved(facts, tuple(owners), matched=app == "a"))
    for number, other in enumerate(others):
        use(cluster.tables, cluster.pod(requests=_texts(other)), f"x{number}", "n")
    node = OneNode({"cpu": 8000, "memory": 6 << 30}, pods, tuple(others), tuple(expected))
    before = _state(cluster)
    shape = cluster.pod(requests=_texts(pod), affinity=_ANY if required else None)
    outcome = cluster.schedule(shape)
    assert isinstance(outcome, Placed) is node.passes(pod, required=required)
    if not isinstance(outcome, Placed):
        return
    # Masks of a list of rows equal those of all rows.
    one = np.array([0], dtype=np.intp)
    cluster.tables.remove("uid-p")
    assert _PLUGIN.filter(shape, cluster.tables, one) == _PLUGIN.filter(
        shape, cluster.tables, slice(0, 1)
    )
    assert _state(cluster) == before
    fitting = [each for each in expected if node.fits_in(pod, each, required=required)]
    best = min(fitting, key=lambda each: (-score(pod, each), each.facts.name), default=None)
    name = best.facts.uid if best is not None else ""
    assert outcome.booking.allocation.reservation == name
    # Pods alone, without what is reserved and not in use, never exceed the node.
    if node.free("cpu") >= 0 and node.free("memory") >= 0:
        cluster.tables.place(outcome.booking)
        assert (cluster.tables.nodes.requested[0, :2] <= [8000, 6 << 30]).all()


def _state(cluster: _Cluster) -> tuple[Any, ...]:
    nodes, table = cluster.tables.nodes, cluster.tables.reservations
    columns = (nodes.requested[0], nodes.scored[0], nodes.pods[:1], table.own, table.used)
    return (*(column.tolist() for column in columns), table.owners.tolist())


class _Holds:
    """A filter whose mask is given."""

    def __init__(self, name: str, *texts: str) -> None:
        self.name = name
        self._reasons = tuple(map(Reason, texts))

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return self._reasons


def test_of_open_reservations_the_first_reason_of_their_node_is_counted() -> None:
    nodes = ("n0", "n1", "n2", "n3")
    cluster = _Cluster(*nodes, cpu="64")
    for number, node in enumerate(nodes):
        cluster.reserve(make_facts(f"r{number}", once=True), node)
    use(cluster.tables, cluster.pod("1"), "o", "n3", "r3")
    masks = [
        (_Holds("A", "is old", "is hot"), [0b11, 0, 0, 0b1]),
        (_Holds("Reservation", "is ours"), [0, 0, 0b1, 0]),
        (_Holds("B", "is full"), [0b1, 0b1, 0b1, 0b1]),
    ]
    text = explained(
        cluster.pod("9"),
        cluster.tables,
        [(cast(Filter, plugin), np.array(mask)) for plugin, mask in masks],
        name="Reservation",
    )
    assert text == (
        "0/4 reservations are available: 1 Reservation(s) for node reason that is full, "
        "1 Reservation(s) for node reason that is hot, "
        "1 Reservation(s) for node reason that is old, "
        "1 Reservation(s) is used by another pod, 4 Reservation(s) matched owner total."
    )
    assert explained(cluster.pod("1", app="x"), cluster.tables, [], name="Reservation") == ""
