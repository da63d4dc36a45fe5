"""CPUs, NUMA nodes and devices inside reservations, with a profile's plugins."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_RESERVE_POD,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    LABEL_NUMA_TOPOLOGY_POLICY,
    LABEL_QOS_CLASS,
    LABEL_RESERVATION_IGNORED,
)
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.exact.devices.allocate import Devices
from cluster.scheduler.profiles import Plugins, make_plugins
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.reservations.facts import AllocatePolicy
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import enabled, file
from tests.cluster.scheduler.devices.making import a_device_object, a_gpu, full, parsed_allocation
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, make_topology
from tests.cluster.scheduler.reservations.making import make_facts, put, use

_PLUGINS = ("Reservation", "NodeNUMAResource", "DeviceShare")


class _Cluster:
    """Nodes with 16 CPUs and 8 GPUs on two NUMA nodes each, and a profile with all plugins."""

    def __init__(self, *names: str, policy: str = "", ratio: str = "") -> None:
        plugins = {point: enabled(*_PLUGINS) for point in ("filter", "score", "reserve")}
        profile = {"schedulerName": "koord-scheduler", "plugins": plugins}
        self.tables = Tables()
        text = json.dumps(file(profiles=[profile]))
        self.made: Plugins = make_plugins(read_configuration(text, obj="test"), self.tables)
        for name in names or ("n",):
            labels = {LABEL_NUMA_TOPOLOGY_POLICY: policy} if policy else {}
            annotations = {}
            if ratio:
                key = ANNOTATION_RESOURCE_AMPLIFICATION_RATIO
                annotations[key] = json.dumps({"cpu": float(ratio)})
            amounts = {full("gpu"): "800", "cpu": str(round(16 * float(ratio or "1")))}
            node = make_node(name, labels=labels, annotations=annotations, allocatable=amounts)
            row = self.tables.upsert_node(node)
            topology = make_topology(name, cpus=SMALL.cpus(), zones=SMALL_ZONES)
            facts, errors = parse_numa_facts(node, topology)
            assert not errors
            self.made.numa.set_node(row, facts)
            gpus = [a_gpu(minor, at=(minor // 4, "ABCD"[minor // 2])) for minor in range(8)]
            assert not self.made.devices.set_device(a_device_object(name, gpus))
        self.scheduling = Scheduling(self.tables, self.made.profiles, seed=1)
        self.shapes = Shapes()

    def pod(
        self, cpu: int, gpus: int = 0, *, app: str = "x", qos: str = "LSR", **labels: str
    ) -> PodShape:
        requests = {"cpu": str(cpu), "memory": f"{cpu}Gi"}
        if gpus:
            requests[full("gpu")] = str(100 * gpus)
        reserve = {ANNOTATION_RESERVE_POD: "true"} if app == "reserve" else {}
        every = {"app": app, LABEL_QOS_CLASS: qos, **labels}
        return self.shapes.of(
            make_pod("p", requests=requests, limits=requests, labels=every, annotations=reserve)
        )

    def ignoring(self, cpu: int, gpus: int = 0) -> PodShape:
        return self.pod(cpu, gpus, **{LABEL_RESERVATION_IGNORED: "true"})

    def schedule(self, name: str, shape: PodShape) -> Placed | Unplaced:
        return self.scheduling.schedule(
            key=f"default/{name}",
            uid=f"uid-{name}",
            shape=shape,
            profile="koord-scheduler",
            now=1.0,
        )

    def placed(self, name: str, shape: PodShape) -> Booking:
        outcome = self.schedule(name, shape)
        assert isinstance(outcome, Placed), (name, outcome.diagnosis.message)
        return outcome.booking

    def reserve(self, name: str, cpu: int, gpus: int = 0, **more: Any) -> Booking:
        """Schedule a reserve pod, and make its reservation available for the app "a"."""
        booking = self.placed(name, self.pod(cpu, gpus, app="reserve"))
        amounts = {"cpu": str(cpu), "memory": f"{cpu}Gi"}
        if gpus:
            amounts[full("gpu")] = str(100 * gpus)
        self.tables.reservations.upsert(make_facts(name, amounts, **more))
        return booking


def _whole_gpus(*minors: int) -> Devices:
    whole = {full("gpu-core"): "100", full("gpu-memory-ratio"): "100"}
    return parsed_allocation({"gpu": [{"minor": n, "resources": whole} for n in minors]})


def _minors(booking: Booking) -> set[int]:
    return {each.minor for each in booking.allocation.devices.get("gpu", ())}


@pytest.mark.parametrize("policy", ["", "SingleNUMANode"])
def test_the_cpus_and_devices_of_a_reservation_go_to_its_pods(policy: str) -> None:
    cluster = _Cluster(policy=policy)
    reserved = cluster.reserve("r", 4, 2)
    for number in range(3):
        cluster.placed(f"s{number}", cluster.pod(4, 2))
    assert isinstance(cluster.schedule("s", cluster.pod(2, 1)), Unplaced)
    taken = []
    for number in range(2):
        owner = cluster.placed(f"o{number}", cluster.pod(2, 1, app="a"))
        assert owner.allocation.reservation == "uid-r"
        taken.append(owner)
    assert (
        CpuSet.of_mask(taken[0].allocation.cpus.mask | taken[1].allocation.cpus.mask)
        == reserved.allocation.cpus
    )
    assert _minors(taken[0]) | _minors(taken[1]) == _minors(reserved)
    assert isinstance(cluster.schedule("late", cluster.pod(2, 1, app="a")), Unplaced)
    # What an owner leaves is the reservation's again, and not everybody's.
    cluster.tables.remove("uid-o0")
    assert isinstance(cluster.schedule("s", cluster.pod(2, 1)), Unplaced)
    assert _minors(cluster.placed("late", cluster.pod(2, 1, app="a"))) == _minors(taken[0])


def test_a_restricted_reservation_gives_nothing_beside_itself_and_an_aligned_one_does() -> None:
    for policy, name in ((AllocatePolicy.RESTRICTED, ""), (AllocatePolicy.ALIGNED, "uid-r")):
        cluster = _Cluster()
        reserved = cluster.reserve("r", 4, 2, policy=policy)
        owner = cluster.placed("o", cluster.pod(6, 3, app="a"))
        assert owner.allocation.reservation == name
        if name:
            assert reserved.allocation.cpus.mask & ~owner.allocation.cpus.mask == 0
            assert _minors(reserved) < _minors(owner)
        else:
            assert not reserved.allocation.cpus.mask & owner.allocation.cpus.mask
            assert not _minors(reserved) & _minors(owner)


@pytest.mark.parametrize("allocate", list(AllocatePolicy))
@pytest.mark.parametrize("policy", ["SingleNUMANode", "Restricted", "BestEffort"])
def test_an_owner_is_aligned_to_the_numa_node_of_the_devices_that_are_reserved_for_it(
    policy: str, allocate: AllocatePolicy
) -> None:
    """The reservation has a GPU of NUMA node 1, and no CPUs: NUMA node 0 has just as many."""
    cluster = _Cluster(policy=policy)
    devices = _whole_gpus(5)
    amounts = {full("gpu"): "100"}
    facts = make_facts("r", amounts, policy=allocate)
    put(cluster.tables, cluster.shapes, facts, "n", amounts, allocation=Allocation(devices=devices))
    owner = cluster.placed("o", cluster.pod(2, 1, app="a"))
    assert owner.allocation.reservation == "uid-r"
    assert _minors(owner) == {5}
    assert [numa for numa, _ in owner.allocation.numa] == [1]
    for number in range(7):
        assert not _minors(cluster.placed(f"s{number}", cluster.pod(1, 1))) & {5}
    assert isinstance(cluster.schedule("late", cluster.pod(1, 1)), Unplaced)


def test_an_owner_that_needs_more_gpus_takes_the_reserved_one_among_them() -> None:
    """GPUs 2 and 3 are closer to each other; GPU 0 would stay reserved and unused beside them."""
    cluster = _Cluster()
    amounts = {full("gpu"): "100"}
    facts = make_facts("r", amounts, policy=AllocatePolicy.ALIGNED)
    allocation = Allocation(devices=_whole_gpus(0))
    put(cluster.tables, cluster.shapes, facts, "n", amounts, allocation=allocation)
    use(cluster.tables, cluster.pod(1, 1), "s", "n", devices=_whole_gpus(1))
    owner = cluster.placed("o", cluster.pod(1, 2, app="a"))
    assert owner.allocation.reservation == "uid-r"
    assert _minors(owner) == {0, 2}


@pytest.mark.parametrize("policy", ["", "SingleNUMANode", "Restricted", "BestEffort"])
def test_reserved_cpus_are_taken_first_where_another_numa_node_has_as_many(policy: str) -> None:
    cluster = _Cluster(policy=policy)
    numa = ((1, {"cpu": 4000, "memory": 4 << 30}),) if policy else ()
    put(
        cluster.tables,
        cluster.shapes,
        make_facts("r", {"cpu": "4", "memory": "4Gi"}, policy=AllocatePolicy.ALIGNED),
        "n",
        {"cpu": "4", "memory": "4Gi"},
        allocation=Allocation(cpus=CpuSet.parse("10-13"), numa=numa),
    )
    owner = cluster.placed("o", cluster.pod(3, app="a"))
    assert owner.allocation.reservation == "uid-r"
    assert str(owner.allocation.cpus) == "10-12"
    # What the reservation lacks comes from the node.
    wide = cluster.placed("w", cluster.pod(6, app="a"))
    assert wide.allocation.reservation == "uid-r"
    assert len(wide.allocation.cpus) == 6
    assert not wide.allocation.cpus.mask & owner.allocation.cpus.mask


def test_only_the_reservation_with_free_cpus_and_devices_is_taken() -> None:
    """Amounts alone would do for both; the first one's devices are not what the pod needs."""
    cluster = _Cluster()
    cluster.reserve("cpus", 4, order=1)
    reserved = cluster.reserve("gpus", 4, 1, order=2)
    for number in range(2):
        cluster.placed(f"s{number}", cluster.pod(4, 3 + number))
    owner = cluster.placed("o", cluster.pod(4, 1, app="a"))
    assert owner.allocation.reservation == "uid-gpus"
    assert owner.allocation.cpus == reserved.allocation.cpus
    assert _minors(owner) == _minors(reserved)


def test_a_pod_that_ignores_reservations_gets_their_unused_cpus_and_devices() -> None:
    cluster = _Cluster()
    cluster.reserve("r0", 8, 4)
    cluster.reserve("r1", 8, 4)
    owner = cluster.placed("o", cluster.pod(4, 2, app="a"))
    assert isinstance(cluster.schedule("s", cluster.pod(12, 6)), Unplaced)
    greedy = cluster.placed("s", cluster.ignoring(12, 6))
    assert greedy.allocation.reservation == ""
    assert not greedy.allocation.cpus.mask & owner.allocation.cpus.mask
    assert not _minors(greedy) & _minors(owner)


def test_amplified_cpu_that_is_reserved_is_there_for_the_pods_of_the_reservation() -> None:
    cluster = _Cluster(ratio="1.5")
    cluster.reserve("r", 8)
    cluster.placed("s", cluster.pod(12, qos="LS"))
    assert isinstance(cluster.schedule("t", cluster.pod(2, qos="LS")), Unplaced)
    owner = cluster.placed("o", cluster.pod(8, app="a"))
    assert owner.allocation.reservation == "uid-r"
    # 24 amplified: 12 of the other pod, 12 for the 8 CPUs of the reservation.
    assert isinstance(cluster.schedule("u", cluster.pod(1, app="a")), Unplaced)


# --- any life ------------------------------------------------------------------------------------

_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("reserve"),
            st.tuples(st.integers(1, 8), st.integers(0, 3), st.sampled_from(list(AllocatePolicy))),
        ),
        st.tuples(st.just("owner"), st.tuples(st.integers(1, 8), st.integers(0, 3))),
        st.tuples(st.just("stranger"), st.tuples(st.integers(1, 8), st.integers(0, 3))),
        st.tuples(st.just("ignoring"), st.tuples(st.integers(1, 8), st.integers(0, 3))),
        st.tuples(st.just("remove"), st.integers(0, 11)),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(_STEPS, st.sampled_from(["", "SingleNUMANode", "BestEffort"]))
def test_over_any_life_no_cpu_or_device_is_given_twice(
    steps: list[tuple[str, Any]], policy: str
) -> None:
    cluster = _Cluster("n", "m", policy=policy)
    empty = _state(cluster)
    bookings: dict[str, Booking] = {}
    reserved: dict[str, Booking] = {}
    for number, (kind, what) in enumerate(steps):
        name = f"{kind}{number}"
        if kind == "remove":
            uids = sorted(bookings | reserved)
            if what < len(uids):
                bookings.pop(uids[what], None)
                if reserved.pop(uids[what], None) is not None:
                    cluster.tables.reservations.delete(uids[what])
                cluster.tables.remove(uids[what])
            continue
        if kind == "reserve":
            cpu, gpus, allocate = what
            outcome = cluster.schedule(name, cluster.pod(cpu, gpus, app="reserve"))
            if isinstance(outcome, Placed):
                cluster.tables.remove(outcome.booking.uid)
                reserved[outcome.booking.uid] = cluster.reserve(name, cpu, gpus, policy=allocate)
            _check(bookings, reserved, strangers_apart=False)
            continue
        shape = cluster.ignoring(*what)
        if kind != "ignoring":
            shape = cluster.pod(*what, app="a" if kind == "owner" else "x")
        outcome = cluster.schedule(name, shape)
        if not isinstance(outcome, Placed):
            continue
        booking = bookings[outcome.booking.uid] = outcome.booking
        uid = booking.allocation.reservation
        assert (kind == "owner") or not uid
        facts = cluster.tables.reservations.get(uid)
        if facts is not None and facts.policy is AllocatePolicy.RESTRICTED:
            held = reserved[uid]
            assert not booking.allocation.cpus.mask & ~held.allocation.cpus.mask
            if _minors(held):
                assert _minors(booking) <= _minors(held)
        _check(bookings, reserved, strangers_apart=kind == "stranger")
    for uid in [*bookings, *reserved]:
        cluster.tables.remove(uid)
        cluster.tables.reservations.delete(uid)
    assert _state(cluster) == empty


def _check(
    bookings: dict[str, Booking], reserved: dict[str, Booking], *, strangers_apart: bool
) -> None:
    """No CPU or GPU is with two pods; a stranger that was just placed has none that is reserved."""
    for node in ("n", "m"):
        cpus = 0
        minors: set[int] = set()
        for booking in bookings.values():
            if booking.node == node:
                assert not cpus & booking.allocation.cpus.mask
                cpus |= booking.allocation.cpus.mask
                assert not minors & _minors(booking)
                minors |= _minors(booking)
    if strangers_apart:
        stranger = list(bookings.values())[-1]
        for held in reserved.values():
            if held.node == stranger.node:
                assert not stranger.allocation.cpus.mask & held.allocation.cpus.mask
                assert not _minors(stranger) & _minors(held)


def _state(cluster: _Cluster) -> tuple[Any, ...]:
    nodes, numa, devices = cluster.tables.nodes, cluster.made.numa, cluster.made.devices
    length = len(nodes)
    columns = (
        nodes.requested[:length],
        nodes.scored[:length],
        nodes.pods[:length],
        numa.bound[:length],
        numa.free_cpus[:length],
        *(numa.free[name][:length] for name in ("cpu", "memory")),
        devices.columns["gpu"].free,
        devices.columns["gpu"].holders,
    )
    return tuple(np.asarray(column).tolist() for column in columns)
