"""DeviceShare over all nodes: masks, scores, the allocation of the chosen node, what is written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from apis.device import parse_device_allocated
from apis.keys import (
    ANNOTATION_CAMBRICON_LOCK,
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_GPU_MINORS,
    ANNOTATION_GPU_PARTITIONS,
    ANNOTATION_HAMI_LOCK,
    LABEL_GPU_ISOLATION_PROVIDER,
    LABEL_GPU_MODEL,
    LABEL_GPU_PARTITION_POLICY,
    LABEL_GPU_VENDOR,
    LABEL_HAMI_VGPU_NODE,
)
from cluster.scheduler.configuration.arguments import ResourceSpec
from cluster.scheduler.configuration.koordinator_arguments import (
    AllocationStrategy,
    DeviceShareArgs,
    GPUShareUnsupportedModel,
    ScoringStrategy,
)
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.scheduling import Placed, Scheduling, Unplaced
from cluster.scheduler.exact.devices.allocate import allocate
from cluster.scheduler.exact.devices.candidates import Scoring
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.exact.devices.records import (
    adapted_record,
    device_allocated,
    lock_holder,
    lock_value,
    resized_allocatable,
)
from cluster.scheduler.plugins.contract import Reason, Refusal
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.device_share import DeviceShareFilter, DeviceShareScore
from cluster.scheduler.plugins.devices.settings import Settings, settings_of
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.tables.booking import NO_ALLOCATION, Allocation
from cluster.scheduler.tables.devices.request import DeviceRequest, device_request
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.devices.making import (
    HINT,
    SHAPES,
    a_booking,
    a_device_object,
    a_gpu,
    a_nic,
    a_shape,
    full,
    minors,
    parsed_allocation,
)
from tests.cluster.scheduler.making import make_node, make_pod

ALL = slice(0, None)


def a_cluster(**nodes: list[dict[str, Any]] | None) -> tuple[Tables, DeviceTable]:
    """Return a cluster of these nodes; None stands for a node without a Device."""
    tables = Tables()
    devices = DeviceTable(tables.nodes)
    tables.add_part(devices)
    for name, of_node in nodes.items():
        tables.upsert_node(make_node(name))
        if of_node is not None:
            devices.set_device(a_device_object(name, of_node))
    return tables, devices


def reasons(
    shape: PodShape,
    tables: Tables,
    devices: DeviceTable,
    arguments: Settings = Settings(),  # noqa: B008 - frozen
) -> list[list[Reason]]:
    """Return what holds each row back."""
    plugin = DeviceShareFilter(devices, arguments)
    if not plugin.applies(shape, tables):
        return [[] for _ in range(len(tables.nodes))]
    known = plugin.reasons(shape)
    assert len(known) <= 62
    mask = plugin.filter(shape, tables, slice(0, len(tables.nodes)))
    each = [
        int(plugin.filter(shape, tables, np.array([row], dtype=np.intp))[0])
        for row in range(len(tables.nodes))
    ]
    assert mask.tolist() == each  # one row alone gives what it gives among all
    return [[known[bit] for bit in range(len(known)) if value >> bit & 1] for value in each]


def texts(*args: Any) -> list[list[str]]:
    return [sorted({reason.text for reason in found}) for found in reasons(*args)]


def eight(*, at: bool = False) -> list[dict[str, Any]]:
    return [a_gpu(minor, at=(minor // 4, "ABCD"[minor // 2]) if at else None) for minor in range(8)]


def hold(tables: Tables, node: str, *gpus: int) -> None:
    """Give whole GPUs of a node to a pod."""
    resources = {full("gpu-core"): "100", full("gpu-memory-ratio"): "100"}
    allocated = {"gpu": [{"minor": minor, "resources": resources} for minor in gpus]}
    shape = a_shape({"gpu": 100 * len(gpus)})
    tables.place(a_booking(f"on-{node}-{gpus}", shape, node, parsed_allocation(allocated)))


# --- filter --------------------------------------------------------------------------------------


def test_nodes_pass_that_have_enough_devices() -> None:
    tables, devices = a_cluster(n1=eight(), n2=eight()[:2], n3=[], n4=None, n5=[a_nic(0)])
    hold(tables, "n1", 0, 1, 2)
    short = ["Insufficient gpu devices"]
    assert texts(a_shape({"cpu": 1}), tables, devices) == [[]] * 5
    assert texts(a_shape({"gpu": 100}), tables, devices) == [[], [], short, short, short]
    assert texts(a_shape({"gpu": 500}), tables, devices) == [[], short, short, short, short]
    assert texts(a_shape({"gpu": 600}), tables, devices) == [short] * 5
    assert [
        [reason.resolvable for reason in of_node]
        for of_node in reasons(a_shape({"gpu": 600}), tables, devices)
    ] == [[True], [True], [False], [False], [False]]


def test_a_node_without_a_device_object_takes_what_kubelet_counts() -> None:
    tables, devices = a_cluster(n1=None)
    counted = a_shape({"nvidia.com/gpu": 1})
    assert texts(counted, tables, devices) == [[]]
    allocator = DeviceShareAllocator(devices)
    assert allocator.allocate(counted, tables, 0, NO_ALLOCATION) is NO_ALLOCATION
    assert texts(a_shape({"gpu": 100}), tables, devices) == [["Insufficient gpu devices"]]
    both = a_shape({"nvidia.com/gpu": 1, "rdma": 1})
    neither = ["Insufficient gpu devices", "Insufficient rdma devices"]
    assert texts(both, tables, devices) == [neither]


def test_devices_of_pods_without_an_annotation_are_not_given_again() -> None:
    tables, devices = a_cluster(n1=eight())
    tables.place(a_booking("other", a_shape({"nvidia.com/gpu": 3}), "n1", {}))
    assert texts(a_shape({"nvidia.com/gpu": 5}), tables, devices) == [[]]
    assert texts(a_shape({"nvidia.com/gpu": 6}), tables, devices) == [["Insufficient gpu devices"]]


def test_a_device_that_an_unknown_pod_may_have_is_not_counted_on_for_a_switch() -> None:
    gpus = [a_gpu(0, at=(0, "A")), a_gpu(1, at=(0, "B"))]
    tables, devices = a_cluster(n1=[*gpus, a_nic(0, at=(0, "A")), a_nic(1, at=(0, "B"))])
    shape = a_shape({"gpu": 100, "rdma": 100}, joint=JOINT)
    assert texts(shape, tables, devices) == [[]]
    tables.place(a_booking("other", a_shape({"rdma": 100}), "n1", {}))
    assert texts(shape, tables, devices) == [[APART]]


def test_the_isolation_provider_holds_back_single_nodes_and_not_the_pod() -> None:
    tables, devices = a_cluster(n1=eight(), n2=eight(), n3=eight())
    for name, provider in (("n2", "HAMi-core"), ("n3", "other")):
        tables.upsert_node(make_node(name, labels={LABEL_GPU_ISOLATION_PROVIDER: provider}))
    wrong = ["GPUIsolationProviderHAMICore not found on the node"]
    shared = a_shape({"gpu": 50}, labels={LABEL_GPU_ISOLATION_PROVIDER: "HAMi-core"})
    assert texts(shared, tables, devices) == [wrong, [], wrong]
    whole = a_shape({"gpu": 100}, labels={LABEL_GPU_ISOLATION_PROVIDER: "HAMi-core"})
    assert texts(whole, tables, devices) == [[], [], []]
    unknown = a_shape({"gpu": 50}, labels={LABEL_GPU_ISOLATION_PROVIDER: "nowhere"})
    assert texts(unknown, tables, devices) == [wrong] * 3


def test_models_that_cannot_be_shared() -> None:
    tables, devices = a_cluster(n1=eight(), n2=eight())
    labels = {LABEL_GPU_VENDOR: "nvidia", LABEL_GPU_MODEL: "T4"}
    tables.upsert_node(make_node("n1", labels=labels))
    arguments = Settings(unshareable=(("huawei", "X"), ("nvidia", "T4")))
    found = texts(a_shape({"gpu": 50}), tables, devices, arguments)
    assert found == [['model "T4" of vendor "nvidia" does not support GPU Share'], []]
    assert texts(a_shape({"gpu": 100}), tables, devices, arguments) == [[], []]


def test_a_request_that_no_node_can_meet_refuses_the_pod() -> None:
    tables, devices = a_cluster(n1=eight())
    bad = a_shape({"gpu-core": 50})
    with pytest.raises(Refusal, match=r"invalid resource device requests: \[koord") as refusal:
        DeviceShareFilter(devices).applies(bad, tables)
    assert (refusal.value.plugin, refusal.value.resolvable) == ("DeviceShare", False)
    assert not DeviceShareScore(devices).applies(bad, tables)
    pod = make_pod("p", requests={full("gpu"): "100"}, annotations={HINT: '{"gpu":{"selector":1}}'})
    with pytest.raises(Refusal, match="device-allocate-hint"):
        DeviceShareFilter(devices).applies(SHAPES.of(pod), tables)


def test_partitions_of_models_and_of_devices() -> None:
    tables, devices = a_cluster(n1=eight(), n2=eight(), n3=eight(), n4=eight())
    h100 = {LABEL_GPU_MODEL: "H100"}
    tables.upsert_node(make_node("n1", labels={**h100, LABEL_GPU_PARTITION_POLICY: "Honor"}))
    tables.upsert_node(make_node("n2", labels=h100))
    own = '{"2":[{"minors":[1,2],"allocationScore":1}]}'
    honor = {LABEL_GPU_PARTITION_POLICY: "Honor"}
    devices.set_device(
        a_device_object("n3", eight(), labels=honor, annotations={ANNOTATION_GPU_PARTITIONS: own})
    )
    devices.set_device(
        a_device_object("n4", eight(), labels=honor, annotations={ANNOTATION_GPU_PARTITIONS: "?"})
    )
    for name in ("n1", "n2", "n3", "n4"):
        hold(tables, name, 0, 2, 4, 6)
    none, table = ["Insufficient Partitioned GPU Devices"], ["node(s) missing GPU Partition Table"]
    assert texts(a_shape({"gpu": 200}), tables, devices) == [none, [], none, table]
    tables.remove("on-n3-(0, 2, 4, 6)")
    assert texts(a_shape({"gpu": 200}), tables, devices) == [none, [], [], table]
    demanded = a_shape({"gpu": 200}, partition={"allocatePolicy": "Restricted"})
    assert texts(demanded, tables, devices) == [none, none, [], table]
    size = ["node(s) Unsupported number of GPU requests"]
    assert texts(a_shape({"gpu": 300}), tables, devices)[2] == size


def test_a_vendors_plugin_that_takes_one_device_for_a_pod() -> None:
    tables, devices = a_cluster(n1=eight())
    devices.set_device(a_device_object("n1", eight(), labels={LABEL_GPU_VENDOR: "cambricon"}))
    adapted = Settings(adaption=True)
    assert texts(a_shape({"gpu": 200}), tables, devices) == [[]]
    assert texts(a_shape({"gpu": 100}), tables, devices, adapted) == [[]]
    found = texts(a_shape({"gpu": 200}), tables, devices, adapted)
    assert found == [["node(s) Unsupported number of GPU requests"]]


def eight_at() -> list[dict[str, Any]]:
    """Return eight GPUs on the switches A and B of NUMA node 0."""
    return [a_gpu(minor, at=(0, "AB"[minor // 4])) for minor in range(8)]


_FUNCTION: dict[str, Any] = {"rdma": {"vfSelector": {}}}
_AS_COUNT: dict[str, Any] = {"rdma": {"allocateStrategy": "RequestsAsCount"}}
_FUNCTIONS: dict[str, Any] = {"rdma": {"allocateStrategy": "RequestsAsCount", "vfSelector": {}}}
_ODD: dict[str, Any] = {"rdma": {"selector": {"matchLabels": {"odd": "1"}}}}
JOINT = {"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}
APART = "node(s) Device Joint-Allocate rules violation"
PCIE_ALONE = {"hint": {"rdma": {"exclusivePolicy": "PCIeLevel"}}}
NICS = [
    a_nic(n, at=(0, "AB"[n // 2]), functions=[f"{n}.0"], labels={"odd": str(n % 2)})
    for n in range(4)
]


@pytest.mark.parametrize(
    ("machine", "held", "requests", "extra", "expected"),
    [
        # The one free function of each of four devices is in use.
        (NICS, [({"rdma": 4}, {"hint": _AS_COUNT})], {"rdma": 1}, {"hint": _FUNCTION}, []),
        (
            NICS,
            [({"rdma": 4}, {"hint": _FUNCTIONS})],
            {"rdma": 1},
            {"hint": _FUNCTION},
            ["Insufficient rdma VirtualFunctions"],
        ),
        # Less than 1 % of the memory is in use, and the ratio of 100 % does not fit.
        (
            [a_gpu(0)],
            [({"gpu-memory": "500Mi"}, {})],
            {"nvidia.com/gpu": 1},
            {},
            ["Insufficient gpu devices"],
        ),
        ([a_gpu(0)], [({"gpu-memory": "500Mi"}, {})], {"gpu": 99}, {}, []),
        # One device of each switch is in use.
        (
            NICS,
            [({"rdma": 200}, {"hint": _ODD})],
            {"rdma": 1},
            PCIE_ALONE,
            ["Insufficient rdma devices"],
        ),
        (NICS, [({"rdma": 100}, {})], {"rdma": 1}, PCIE_ALONE, []),
        # A pod has a switch for itself; the other one remains.
        (NICS, [({"rdma": 1}, PCIE_ALONE)], {"rdma": 200}, {}, []),
        (NICS, [({"rdma": 1}, PCIE_ALONE)], {"rdma": 300}, {}, ["Insufficient rdma devices"]),
        # One GPU cannot have two NICs on its switch.
        (
            [a_gpu(0, at=(0, "A")), a_nic(0, at=(0, "A")), a_nic(1, at=(0, "B"))],
            [],
            {"gpu": 100, "rdma": 200},
            {"joint": JOINT},
            [APART],
        ),
        (
            [a_gpu(0, at=(0, "A")), a_nic(0, at=(0, "A")), a_nic(1, at=(0, "A"))],
            [],
            {"gpu": 100, "rdma": 200},
            {"joint": JOINT},
            [],
        ),
        # A switch without a name is not the same switch.
        (
            [a_gpu(0, at=(0, "")), a_nic(0, at=(0, ""))],
            [],
            {"gpu": 100, "rdma": 1},
            {"joint": JOINT},
            [APART],
        ),
        # A GPU on each switch, a NIC on one: the second GPU has none.
        (
            [a_gpu(0, at=(0, "A")), a_gpu(1, at=(0, "B")), a_nic(0, at=(0, "A"))],
            [],
            {"gpu": 200, "rdma": 1},
            {"joint": JOINT},
            [APART],
        ),
        # Three NICs for two switches: tried on the node.
        ([*eight_at(), *NICS], [], {"gpu": 800, "rdma": 300}, {"joint": JOINT}, []),
        ([*eight_at(), *NICS], [], {"gpu": 400, "rdma": 300}, {"joint": JOINT}, [APART]),
        (
            [*eight_at(), *NICS[:3]],
            [({"rdma": 100}, {})],
            {"gpu": 800, "rdma": 300},
            {"joint": JOINT},
            ["Insufficient rdma devices"],
        ),
    ],
)
def test_what_columns_decide(
    machine: list[dict[str, Any]],
    held: list[tuple[dict[str, Any], dict[str, Any]]],
    requests: dict[str, Any],
    extra: dict[str, Any],
    expected: list[str],
) -> None:
    tables, devices = a_cluster(n1=machine)
    for number, (amounts, how) in enumerate(held):
        shape = a_shape(amounts, **how)
        found = DeviceShareAllocator(devices).choose(shape, 0)
        assert not isinstance(found, Failure), found
        tables.place(a_booking(f"held-{number}", shape, "n1", found))
    shape = a_shape(requests, **extra)
    assert texts(shape, tables, devices) == [expected]
    request, view = shape.derived(device_request), devices.view(0)
    assert isinstance(request, DeviceRequest) and view is not None
    assert isinstance(allocate(view, request), Failure) is bool(expected)


AMOUNTS = st.sampled_from(
    [
        {"gpu": 100},
        {"gpu": 200},
        {"gpu": 40},
        {"gpu-memory": "9Gi"},
        {"gpu.shared": 2, "gpu-memory-ratio": 80},
        {"nvidia.com/gpu": 4},
        {"gpu": 100, "rdma": 1},
        {"gpu": 200, "rdma": 100},
        {"rdma": 200},
        {"rdma": 1},
    ]
)
HINTS = st.fixed_dictionaries(
    {},
    optional={
        "gpu": st.fixed_dictionaries(
            {},
            optional={
                "requiredTopologyScope": st.sampled_from(["Device", "PCIe", "NUMANode", "Node"]),
                "selector": st.just({"matchLabels": {"good": "1"}}),
            },
        ),
        "rdma": st.fixed_dictionaries(
            {},
            optional={
                "allocateStrategy": st.sampled_from(["ApplyForAll", "RequestsAsCount"]),
                "requiredTopologyScope": st.sampled_from(["PCIe", "NUMANode"]),
                "vfSelector": st.just({}),
                "exclusivePolicy": st.sampled_from(["DeviceLevel", "PCIeLevel"]),
            },
        ),
    },
)
EXTRA = st.fixed_dictionaries(
    {"hint": HINTS},
    optional={
        "joint": st.sampled_from(
            [
                {"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"},
                {"deviceTypes": ["rdma", "gpu"]},
            ]
        ),
        "partition": st.sampled_from([{}, {"allocatePolicy": "Restricted"}]),
    },
)


@st.composite
def machines(draw: st.DrawFn) -> dict[str, Any]:
    place = st.one_of(st.none(), st.tuples(st.integers(0, 1), st.sampled_from("AB")))
    topology = draw(st.booleans())

    def device(minor: int, gpu: bool) -> dict[str, Any]:
        at = draw(place) if topology else None
        if topology and at is None and draw(st.booleans()):
            at = (0, "A")
        at = None if at is None else (at[0], f"{at[0]}{at[1]}")
        labels = {"good": "1"} if draw(st.booleans()) else {}
        health = draw(st.integers(0, 5)) > 0
        if gpu:
            memory = draw(st.sampled_from(["80Gi", "16Gi"]))
            return a_gpu(minor, at=at, labels=labels, health=health, memory=memory)
        functions = [f"{minor}.0"] if draw(st.booleans()) else []
        return a_nic(minor, at=at, labels=labels, health=health, functions=functions)

    gpus = draw(st.sets(st.integers(0, 9), max_size=8))
    nics = draw(st.integers(0, 4))
    return {
        "devices": [
            *(device(minor, True) for minor in sorted(gpus)),
            *(device(minor, False) for minor in range(nics)),
        ],
        "labels": draw(
            st.sampled_from([{}, {LABEL_GPU_MODEL: "H20", LABEL_GPU_PARTITION_POLICY: "Honor"}])
        ),
        "silent": draw(st.integers(0, 9)),
        "held": draw(st.lists(st.tuples(AMOUNTS, EXTRA), max_size=4)),
    }


@given(st.lists(machines(), min_size=1, max_size=3), AMOUNTS, EXTRA)
def test_the_mask_says_what_the_allocation_finds(
    cluster: list[dict[str, Any]], requests: dict[str, Any], extra: dict[str, Any]
) -> None:
    """Columns decide without allocating; they must agree with the allocation, node by node."""
    tables, devices = a_cluster()
    for number, machine in enumerate(cluster):
        name = f"n{number}"
        tables.upsert_node(make_node(name, labels=machine["labels"]))
        devices.set_device(a_device_object(name, machine["devices"]))
        for pod, (held, how) in enumerate(machine["held"]):
            shape = a_shape(held, **how)
            found = DeviceShareAllocator(devices).choose(shape, number)
            if machine["silent"] == pod:
                found = {}  # bound by another scheduler
            if not isinstance(found, Failure):
                tables.place(a_booking(f"{name}-{pod}", shape, name, found))
    shape = a_shape(requests, **extra)
    request = shape.derived(device_request)
    assert isinstance(request, DeviceRequest)
    for row, held_back in enumerate(reasons(shape, tables, devices)):
        view = devices.view(row)
        assert view is not None
        outcome = allocate(view, request)
        if isinstance(outcome, Failure):
            assert held_back, outcome
        else:
            assert not held_back, (held_back, outcome)


# --- score ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "most", "expected"),
    [
        # 8 GPUs of 80 GiB, two in use: ratio and memory both (800 - (200 + 100)) / 800.
        ({"gpu": 100}, False, 62),
        ({"gpu": 100}, True, 37),
        # All four of the pod's GPUs count: (800 - (200 + 400)) / 800.
        ({"gpu": 400}, False, 25),
        ({"gpu-memory": "80Gi"}, False, 62),
        ({"gpu": 700}, False, 0),
        ({"rdma": 100}, False, 0),
    ],
)
def test_scores_by_what_is_left(requests: Any, most: bool, expected: int) -> None:
    tables, devices = a_cluster(n1=eight(), n2=None)
    hold(tables, "n1", 0, 1)
    plugin = DeviceShareScore(devices, Settings(scoring=Scoring(most=most)))
    shape = a_shape(requests)
    assert plugin.score(shape, tables, slice(0, 2)).tolist() == [expected, 0]
    assert plugin.score(shape, tables, np.array([0])).tolist() == [expected]


def test_the_largest_sum_over_types_becomes_100() -> None:
    tables, devices = a_cluster(n1=[*eight(), a_nic(0)], n2=[*eight(), a_nic(0), a_nic(1)])
    plugin = DeviceShareScore(devices)
    raw = plugin.score(a_shape({"gpu": 100, "rdma": 100}), tables, slice(0, 2))
    assert raw.tolist() == [87 + 0, 87 + 50]
    assert plugin.normalize(raw).tolist() == [87 * 100 // 137, 100]


def test_scores_look_at_selected_devices_only() -> None:
    gpus = [a_gpu(0, labels={"good": "1"}), a_gpu(1), a_gpu(2), a_gpu(3)]
    tables, devices = a_cluster(n1=gpus)
    hint = {"gpu": {"selector": {"matchLabels": {"good": "1"}}}}
    shape = a_shape({"gpu": 50}, hint=hint)
    assert DeviceShareScore(devices).score(shape, tables, slice(0, 1)).tolist() == [50]


# --- a whole decision ----------------------------------------------------------------------------


def a_scheduling(tables: Tables, devices: DeviceTable, **arguments: Any) -> Scheduling:
    settings = Settings(**arguments)
    profile = Profile(
        "koord-scheduler",
        filters=(DeviceShareFilter(devices, settings),),
        scores=((DeviceShareScore(devices, settings), 1),),
        allocators=(DeviceShareAllocator(devices, settings),),
    )
    return Scheduling(tables, {"koord-scheduler": profile}, seed=1)


def schedule(scheduling: Scheduling, name: str, shape: PodShape) -> Placed | Unplaced:
    return scheduling.schedule(
        key=f"default/{name}", uid=name, shape=shape, profile="koord-scheduler", now=1.5e9
    )


def test_pods_fill_all_gpus_and_no_more() -> None:
    tables, devices = a_cluster(n1=eight(), n2=eight(at=True), n3=None)
    scheduling = a_scheduling(tables, devices)
    given_out: list[tuple[str, int]] = []
    for number in range(8):
        placed = schedule(scheduling, f"p{number}", a_shape({"gpu": 200}))
        assert isinstance(placed, Placed)
        text = placed.recorded.annotations[ANNOTATION_DEVICE_ALLOCATED]
        assert text is not None
        allocated = parse_device_allocated(text, obj="Pod")
        assert allocated == placed.booking.allocation.devices
        given_out += [(placed.booking.node, gpu.minor) for gpu in allocated["gpu"]]
    assert len(set(given_out)) == 16
    refused = schedule(scheduling, "p8", a_shape({"gpu": 200}))
    assert isinstance(refused, Unplaced)
    tables.remove("p3")
    assert isinstance(schedule(scheduling, "p9", a_shape({"gpu": 200})), Placed)


def test_an_owner_takes_what_its_reservation_holds_first() -> None:
    tables, devices = a_cluster(n1=eight())
    resources = {full("gpu-core"): "100", full("gpu-memory-ratio"): "100"}
    held = parsed_allocation({"gpu": [{"minor": 5, "resources": resources}]})
    tables.place(a_booking("r", a_shape({"gpu": 100}), "n1", held))
    allocator = DeviceShareAllocator(devices)
    shape = a_shape({"gpu": 100})
    owned = allocator.allocate(shape, tables, 0, Allocation(reservation="r"))
    assert isinstance(owned, Allocation) and minors(owned.devices) == [5]
    stranger = allocator.allocate(shape, tables, 0, NO_ALLOCATION)
    assert isinstance(stranger, Allocation) and minors(stranger.devices) == [0]


def test_devices_come_from_the_pods_numa_nodes() -> None:
    tables, devices = a_cluster(n1=eight(at=True))
    shape = a_shape({"gpu": 100})
    on_one = Allocation(numa=((1, {"cpu": 4000}),))
    aligned = DeviceShareAllocator(devices).allocate(shape, tables, 0, on_one)
    assert isinstance(aligned, Allocation) and minors(aligned.devices) == [4]
    assert aligned.numa == on_one.numa
    free = DeviceShareAllocator(devices, Settings(align=False))
    anywhere = free.allocate(shape, tables, 0, on_one)
    assert isinstance(anywhere, Allocation) and minors(anywhere.devices) == [0]


# --- what is written -----------------------------------------------------------------------------


def test_the_allocation_is_written_as_readers_expect_it() -> None:
    shape = a_shape({"gpu": 50, "rdma": 1}, hint={"rdma": {"vfSelector": {}}})
    _, devices = a_cluster(n1=[a_gpu(0), a_nic(0, functions=["0000:1f:00.2"])])
    found = DeviceShareAllocator(devices).choose(shape, 0)
    assert not isinstance(found, Failure)
    assert json.loads(device_allocated(found)) == {
        "gpu": [
            {
                "minor": 0,
                "id": "GPU-0",
                "resources": {
                    "koordinator.sh/gpu-core": "50",
                    "koordinator.sh/gpu-memory": "40Gi",
                    "koordinator.sh/gpu-memory-ratio": "50",
                },
            }
        ],
        "rdma": [
            {
                "minor": 0,
                "id": "mlx-0",
                "resources": {"koordinator.sh/rdma": "1"},
                "extension": {"vfs": [{"minor": -1, "busID": "0000:1f:00.2"}]},
            }
        ],
    }


def _allocated(*gpus: int, template: str = "", ratio: int = 100) -> Any:
    entry: dict[str, Any] = {
        "resources": {
            full("gpu-core"): str(ratio),
            full("gpu-memory"): "20Gi",
            full("gpu-memory-ratio"): str(ratio),
        }
    }
    if template:
        entry["extension"] = {"gpuSharedResourceTemplate": template}
    return parsed_allocation(
        {"gpu": [{"minor": minor, "id": f"GPU-{minor}", **entry} for minor in gpus]}
    )


NOW_NS = 1_700_000_000_123_456_789


@pytest.mark.parametrize(
    ("vendor", "model", "devices", "written", "lock"),
    [
        ("nvidia", "H100", _allocated(0, 1), {ANNOTATION_GPU_MINORS: "0,1"}, ""),
        (
            "huawei",
            "Ascend-910B",
            _allocated(0, 1),
            {"predicate-time": str(NOW_NS), "huawei.com/npu-core": "0,1"},
            "",
        ),
        (
            "huawei",
            "Ascend-310P",
            _allocated(3, template="vir02"),
            {"huawei.com/npu-core": "3-vir02"},
            "",
        ),
        (
            "huawei",
            "Ascend-310P3-300I-DUO",
            _allocated(0, 1),
            {"huawei.com/Ascend310P": "Ascend310P-0,Ascend310P-1"},
            "",
        ),
        (
            "cambricon",
            "MLU370",
            _allocated(2, ratio=25),
            {"CAMBRICON_DSMLU_ASSIGHED": "false", "CAMBRICON_DSMLU_PROFILE": "2_25_80"},
            ANNOTATION_CAMBRICON_LOCK,
        ),
        (
            "metax",
            "C500",
            _allocated(0, ratio=40),
            {
                "metax-tech.com/gpu-devices-allocated": (
                    '[[{"compute":40,"uuid":"GPU-0","vRam":20480}]]'
                )
            },
            ANNOTATION_HAMI_LOCK,
        ),
    ],
)
def test_annotations_of_vendors(
    vendor: str, model: str, devices: Any, written: dict[str, str], lock: str
) -> None:
    record = adapted_record(
        devices, node="n1", vendor=vendor, model=model, isolation="HAMi-core", now_ns=NOW_NS
    )
    assert written.items() <= record.annotations.items()
    assert record.annotations["scheduling.koordinator.sh/bind-timestamp"] == str(NOW_NS)
    assert ANNOTATION_DEVICE_ALLOCATED in record.annotations
    assert record.labels == {LABEL_HAMI_VGPU_NODE: "n1"}
    assert record.lock == lock


def test_without_a_gpu_only_the_time_of_binding_is_added() -> None:
    rdma = parsed_allocation({"rdma": [{"minor": 0, "resources": {full("rdma"): "1"}}]})
    record = adapted_record(rdma, node="n1", vendor="x", model="", isolation="", now_ns=5)
    assert set(record.annotations) == {
        ANNOTATION_DEVICE_ALLOCATED,
        "scheduling.koordinator.sh/bind-timestamp",
    }
    assert not record.labels and not record.lock


def test_the_gate_decides_about_vendors_annotations() -> None:
    for adaption in (False, True):
        tables, devices = a_cluster(n1=[])
        device = a_device_object("n1", eight(), labels={LABEL_GPU_VENDOR: "huawei"})
        devices.set_device(device)
        scheduling = a_scheduling(tables, devices, adaption=adaption)
        placed = schedule(scheduling, "p", a_shape({"gpu": 100}))
        assert isinstance(placed, Placed)
        assert ("huawei.com/npu-core" in placed.recorded.annotations) is adaption
        assert (ANNOTATION_GPU_MINORS in placed.recorded.annotations) is adaption


@pytest.mark.parametrize(
    ("text", "later", "holder"),
    [
        (lock_value("ns", "web", now_s=1e9), 1e9 + 299, ("ns", "web")),
        (lock_value("ns", "web", now_s=1e9), 1e9 + 301, None),
        ("yesterday,ns,web", 1e9, None),
        ("", 1e9, None),
        ("a,b,c,d", 1e9, None),
    ],
)
def test_locks_of_nodes(text: str, later: float, holder: tuple[str, str] | None) -> None:
    assert lock_holder(text, now_s=later) == holder


def test_a_reservations_amounts_grow_by_what_its_devices_add_up_to() -> None:
    assert json.loads(resized_allocatable(_allocated(0, 1))) == {
        "resources": {
            full("gpu-core"): "200",
            full("gpu-memory"): "40Gi",
            full("gpu-memory-ratio"): "200",
        }
    }


def test_an_allocation_survives_its_annotation() -> None:
    text = device_allocated(_allocated(0, 3, template="vir01"))
    assert parse_device_allocated(text, obj="Pod") == _allocated(0, 3, template="vir01")
    assert msgspec.json.decode(text)["gpu"][0]["minor"] == 0


# --- beside other plugins ------------------------------------------------------------------------


class _Reserved(Restoring):
    """Two reservations on the first node that every pod may use."""

    def rows(self, pod: PodShape, tables: Tables) -> NDArray[np.int64]:
        return np.array([0])

    def on(self, pod: PodShape, tables: Tables, row: int) -> tuple[str, ...]:
        return ("unknown", "r")


def test_what_is_reserved_for_a_pod_does_not_hold_its_node_back() -> None:
    tables, devices = a_cluster(n1=eight()[:1], n2=eight()[:1], n3=[])
    resources = {full("gpu-core"): "100", full("gpu-memory-ratio"): "100"}
    held = parsed_allocation({"gpu": [{"minor": 0, "resources": resources}]})
    for uid, node in (("r", "n1"), ("s", "n2")):
        tables.place(a_booking(uid, a_shape({"gpu": 100}), node, held))
    rows = slice(0, 3)
    shape = a_shape({"gpu": 100})
    alone = DeviceShareFilter(devices).filter(shape, tables, rows)
    assert (alone != 0).tolist() == [True, True, True]
    beside = DeviceShareFilter(devices, restored=_Reserved()).filter(shape, tables, rows)
    assert (beside != 0).tolist() == [False, True, True]
    two = DeviceShareFilter(devices, restored=_Reserved())
    assert two.filter(a_shape({"gpu": 200}), tables, rows).all()


def test_hints_for_the_numa_policy() -> None:
    tables, devices = a_cluster(n1=eight(at=True), n2=eight(), n3=None)
    provider = DeviceShareAllocator(devices)
    shape = a_shape({"gpu": 400})
    sets = (0b01, 0b10, 0b11, 0b100, 0b101)
    hints = [provider.hints(shape, tables, row, sets) for row in range(3)]
    assert hints[0] is not None and set(hints[0]) == {0b01, 0b10, 0b11, 0b101}
    assert [mask for mask, hint in hints[0].items() if hint.preferred] == [0b01, 0b10, 0b101]
    assert hints[1:] == [None, None]
    assert provider.hints(a_shape({"cpu": 1}), tables, 0, sets) is None
    free = DeviceShareAllocator(devices, Settings(align=False))
    assert free.hints(shape, tables, 0, sets) is None


def test_templates_come_from_the_table() -> None:
    tables, devices = a_cluster(n1=[])
    npu = a_gpu(0, memory="21Gi", resources={"huawei.com/npu-core": "8"})
    labels = {LABEL_GPU_VENDOR: "huawei", LABEL_GPU_MODEL: "Ascend-310P"}
    devices.set_device(a_device_object("n1", [npu], labels=labels))
    shape = a_shape({"huawei.com/npu-core": 2, "gpu-memory-ratio": 25})
    assert texts(shape, tables, devices) == [["no matched GPU shared resource template"]]
    version = tables.nodes.version
    amounts = {"huawei.com/npu-core": 2, full("gpu-memory-ratio"): 25}
    devices.set_templates({"huawei-Ascend-310P": {"vir02": amounts}})
    assert tables.nodes.version > version
    assert texts(shape, tables, devices) == [[]]
    found = DeviceShareAllocator(devices).choose(shape, 0)
    assert '"gpuSharedResourceTemplate":"vir02"' in device_allocated(found)  # type: ignore[arg-type]


def test_arguments_become_settings() -> None:
    arguments = DeviceShareArgs(
        scoring_strategy=ScoringStrategy(
            type=AllocationStrategy.MOST_ALLOCATED, resources=(ResourceSpec(name="r", weight=3),)
        ),
        disable_device_numa_topology_alignment=True,
        gpu_share_unsupported_models=(GPUShareUnsupportedModel(vendor="v", model="m"),),
    )
    assert settings_of(arguments, adaption=True) == Settings(
        scoring=Scoring({"r": 3}, most=True),
        unshareable=(("v", "m"),),
        align=False,
        adaption=True,
    )
    assert settings_of(DeviceShareArgs()) == Settings()


def test_devices_that_a_pod_claims_by_itself_are_taken_away() -> None:
    tables, devices = a_cluster(n1=None)
    claimed = {ANNOTATION_DEVICE_ALLOCATED: '{"gpu":[{"minor":0}]}'}
    allocator = DeviceShareAllocator(devices)
    for requests in ({"cpu": "1"}, {"nvidia.com/gpu": "1"}):
        shape = SHAPES.of(make_pod("p", requests=requests, annotations=claimed))
        assert allocator.applies(shape, tables)
        assert allocator.allocate(shape, tables, 0, NO_ALLOCATION) is NO_ALLOCATION
        recorded = allocator.record(a_booking("p", shape, "n1", {}), tables)
        assert recorded.annotations == {ANNOTATION_DEVICE_ALLOCATED: None}
    assert not allocator.applies(a_shape({"cpu": 1}), tables)


def test_the_lock_of_a_node_is_named_for_vendors_that_need_it() -> None:
    for vendor, lock in (("metax", ANNOTATION_HAMI_LOCK), ("nvidia", "")):
        tables, devices = a_cluster(n1=[])
        devices.set_device(a_device_object("n1", eight(), labels={LABEL_GPU_VENDOR: vendor}))
        allocator = DeviceShareAllocator(devices, Settings(adaption=True))
        shape = a_shape({"gpu": 100})
        found = allocator.choose(shape, 0)
        assert not isinstance(found, Failure)
        booking = a_booking("p", shape, "n1", found)
        assert allocator.node_lock(booking, tables) == lock
        assert allocator.node_lock(a_booking("p", shape, "n1", {}), tables) == ""
        assert DeviceShareAllocator(devices).node_lock(booking, tables) == ""
