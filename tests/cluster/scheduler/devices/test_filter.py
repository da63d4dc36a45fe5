"""Which nodes DeviceShare passes, and why it holds the others back."""

from __future__ import annotations

from typing import Any

import pytest

from apis.keys import (
    ANNOTATION_GPU_PARTITIONS,
    LABEL_GPU_ISOLATION_PROVIDER,
    LABEL_GPU_MODEL,
    LABEL_GPU_PARTITION_POLICY,
    LABEL_GPU_VENDOR,
)
from cluster.scheduler.exact.devices.allocate import allocate
from cluster.scheduler.exact.devices.candidates import Scoring
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.device_share import DeviceShareFilter, DeviceShareScore
from cluster.scheduler.plugins.devices.settings import Settings
from cluster.scheduler.tables.booking import NO_ALLOCATION
from cluster.scheduler.tables.devices.request import DeviceRequest, device_request
from tests.cluster.scheduler.devices.clusters import (
    a_cluster,
    eight,
    hold,
    reasons,
    texts,
)
from tests.cluster.scheduler.devices.making import (
    HINT,
    SHAPES,
    a_booking,
    a_device,
    a_device_object,
    a_gpu,
    a_nic,
    a_shape,
    full,
    parsed_allocation,
)
from tests.cluster.scheduler.making import make_node, make_pod


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


def test_all_models_that_cannot_be_shared_count() -> None:
    tables, devices = a_cluster(n1=eight(), n2=eight())
    arguments = Settings(unshareable=tuple(("nvidia", f"M{number}") for number in range(100)))
    for node, model in (("n1", "M0"), ("n2", "M99")):
        labels = {LABEL_GPU_VENDOR: "nvidia", LABEL_GPU_MODEL: model}
        tables.upsert_node(make_node(node, labels=labels))
    assert texts(a_shape({"gpu": 50}), tables, devices, arguments) == [
        ['model "M0" of vendor "nvidia" does not support GPU Share'],
        ["model does not support GPU Share"],
    ]


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


_PAIRS = (
    '{"2":[{"minors":[0,1],"ringBusBandwidth":"100Gi","allocationScore":9},'
    '{"minors":[2,3],"ringBusBandwidth":"300Gi","allocationScore":1}]}'
)


@pytest.mark.parametrize(
    ("broken", "held", "wanted", "passes"),
    [
        pytest.param((), {}, {}, True, id="the best pair"),
        pytest.param((0,), {}, {}, True, id="a broken GPU of the best pair"),
        pytest.param((0, 3), {}, {}, False, id="a broken GPU of each pair"),
        pytest.param((0,), {2: "500Mi"}, {}, False, id="a pod has a part of the other pair"),
        pytest.param((), {}, {"allocatePolicy": "Restricted"}, True, id="the best pair alone"),
        pytest.param((0,), {}, {"allocatePolicy": "Restricted"}, False, id="the best is broken"),
        pytest.param((), {}, {"ringBusBandwidth": "300Gi"}, True, id="fast enough"),
        pytest.param((), {}, {"ringBusBandwidth": "301Gi"}, False, id="too slow"),
        pytest.param((2,), {}, {"ringBusBandwidth": "101Gi"}, False, id="the slow pair is left"),
    ],
)
def test_a_pair_of_linked_gpus(
    broken: tuple[int, ...], held: dict[int, str], wanted: dict[str, str], passes: bool
) -> None:
    tables, devices = a_cluster(n1=[])
    gpus = [a_gpu(minor, health=minor not in broken) for minor in range(4)]
    honor = {LABEL_GPU_PARTITION_POLICY: "Honor"}
    annotations = {ANNOTATION_GPU_PARTITIONS: _PAIRS}
    devices.set_device(a_device_object("n1", gpus, labels=honor, annotations=annotations))
    for minor, memory in held.items():
        entry = {"minor": minor, "resources": {full("gpu-memory"): memory}}
        shape = a_shape({"gpu-memory": memory})
        allocated = parsed_allocation({"gpu": [entry]})
        tables.place(a_booking(f"on-{minor}", shape, "n1", allocated))
    shape = a_shape({"gpu": 200}, partition=wanted) if wanted else a_shape({"gpu": 200})
    assert texts(shape, tables, devices) == [
        [] if passes else ["Insufficient Partitioned GPU Devices"]
    ]
    outcome = DeviceShareAllocator(devices).choose(shape, 0)
    assert isinstance(outcome, Failure) is not passes


def test_a_vendors_plugin_that_takes_one_device_for_a_pod() -> None:
    tables, devices = a_cluster(n1=eight())
    devices.set_device(a_device_object("n1", eight(), labels={LABEL_GPU_VENDOR: "cambricon"}))
    adapted = Settings(adaption=True)
    assert texts(a_shape({"gpu": 200}), tables, devices) == [[]]
    assert texts(a_shape({"gpu": 100}), tables, devices, adapted) == [[]]
    found = texts(a_shape({"gpu": 200}), tables, devices, adapted)
    assert found == [["node(s) Unsupported number of GPU requests"]]
    for vendor in ("huawei", ""):
        labels = {LABEL_GPU_VENDOR: vendor}
        devices.set_device(a_device_object("n1", eight(), labels=labels))
        assert texts(a_shape({"gpu": 200}), tables, devices, adapted) == [[]]


def eight_at() -> list[dict[str, Any]]:
    """Return eight GPUs on the switches A and B of NUMA node 0."""
    return [a_gpu(minor, at=(0, "AB"[minor // 4])) for minor in range(8)]


def _function(kind: str) -> dict[str, Any]:
    """Return a hint that wants a virtual function of this kind."""
    return {"rdma": {"vfSelector": {"matchLabels": {"type": kind}}}}


def _within(type_: str, scope: str) -> dict[str, Any]:
    """Return a hint that wants the devices of a type within one part of the node."""
    return {type_: {"requiredTopologyScope": scope}}


SPREAD = "Insufficient Topology Scoped {} Devices"
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
        (NICS, [], {"rdma": 1}, {"hint": _function("fast")}, []),
        (
            NICS,
            [],
            {"rdma": 1},
            {"hint": _function("slow")},
            ["Insufficient rdma VirtualFunctions"],
        ),
        # The ratio of the whole memory is free, but not the bytes.
        (
            [a_gpu(0)],
            [({"gpu-memory": "500Mi"}, {})],
            {"gpu-memory": "80Gi"},
            {},
            ["Insufficient gpu devices"],
        ),
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
        # Devices close together: as many as the largest part of the node has, and whether it has
        # parts at all.
        (eight_at(), [], {"gpu": 400}, {"hint": _within("gpu", "PCIe")}, []),
        (eight_at(), [], {"gpu": 500}, {"hint": _within("gpu", "PCIe")}, [SPREAD.format("GPU")]),
        (eight_at(), [], {"gpu": 800}, {"hint": _within("gpu", "NUMANode")}, []),
        (
            [a_gpu(0, at=(0, "A")), a_gpu(1, at=(1, "B")), a_gpu(2, at=(1, "C"))],
            [],
            {"gpu": 300},
            {"hint": _within("gpu", "NUMANode")},
            [SPREAD.format("GPU")],
        ),
        (
            [a_gpu(0, at=(0, "A")), a_gpu(1, at=(1, "B")), a_gpu(2, at=(1, "C"))],
            [],
            {"gpu": 200},
            {"hint": _within("gpu", "NUMANode")},
            [],
        ),
        (
            [a_gpu(0, at=(0, "A")), a_gpu(1, at=(1, "B")), a_gpu(2, at=(1, "C"))],
            [],
            {"gpu": 300},
            {"hint": _within("gpu", "Node")},
            [],
        ),
        (eight_at(), [], {"gpu": 100}, {"hint": _within("gpu", "Device")}, []),
        (eight_at(), [], {"gpu": 200}, {"hint": _within("gpu", "Device")}, [SPREAD.format("GPU")]),
        (
            [a_gpu(0), a_gpu(1)],
            [],
            {"gpu": 200},
            {"hint": _within("gpu", "NUMANode")},
            ["node(s) missing GPU Device Topology Tree"],
        ),
        (
            eight_at(),
            [],
            {"gpu.shared": 2, "gpu-memory-ratio": 80},
            {"hint": _within("gpu", "PCIe")},
            ["node(s) Unsupported Multi-Shared GPU"],
        ),
        (NICS, [], {"rdma": 300}, {"hint": _within("rdma", "PCIe")}, [SPREAD.format("rdma")]),
        (NICS, [({"rdma": 100}, {})], {"rdma": 200}, {"hint": _within("rdma", "PCIe")}, []),
        (
            [a_nic(0, at=(0, "A")), a_nic(1)],
            [],
            {"rdma": 200},
            {"hint": _within("rdma", "PCIe")},
            ["node(s) missing rdma Device Topology Tree"],
        ),
        # Three types: one switch has to have all of them.
        (
            [
                *(a_gpu(number, at=(0, "AB"[number])) for number in range(2)),
                a_nic(0, at=(0, "A")),
                a_device("fpga", 0, {"fpga": "100"}, at=(0, "B")),
            ],
            [],
            {"gpu": 100, "rdma": 1, "fpga": 1},
            {"joint": {"deviceTypes": ["gpu", "rdma", "fpga"], "requiredScope": "SamePCIe"}},
            [APART],
        ),
        (
            [
                *(a_gpu(number, at=(0, "AB"[number])) for number in range(2)),
                *(a_nic(number, at=(0, "AB"[number])) for number in range(2)),
                a_device("fpga", 0, {"fpga": "100"}, at=(0, "B")),
            ],
            [],
            {"gpu": 100, "rdma": 1, "fpga": 1},
            {"joint": {"deviceTypes": ["gpu", "rdma", "fpga"], "requiredScope": "SamePCIe"}},
            [],
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


def test_each_node_lacks_devices_or_their_virtual_functions() -> None:
    def nic(*functions: str) -> list[dict[str, Any]]:
        return [a_nic(0, functions=functions)]

    tables, devices = a_cluster(n1=nic("0.0"), n2=nic("0.0"), n3=nic("0.0"), n4=nic())
    for node, how in (("n2", _FUNCTIONS), ("n3", _AS_COUNT)):
        shape = a_shape({"rdma": 1}, hint=how) if node == "n2" else a_shape({"rdma": 100})
        found = DeviceShareAllocator(devices).choose(shape, tables.nodes.row(node) or 0)
        assert not isinstance(found, Failure), found
        tables.place(a_booking(f"on-{node}", shape, node, found))
    assert texts(a_shape({"rdma": 1}, hint=_FUNCTION), tables, devices) == [
        [],
        ["Insufficient rdma VirtualFunctions"],
        ["Insufficient rdma devices"],
        ["Insufficient rdma VirtualFunctions"],
    ]


@pytest.mark.parametrize(
    ("requests", "most", "score"),
    [
        ({"gpu-memory": "40Gi"}, False, (100 + 50 + 50) // 3),
        ({"gpu-memory": "40Gi"}, True, (0 + 50 + 50) // 3),
        ({"gpu": 25}, False, 75),
        ({"gpu": 25}, True, 25),
        ({"gpu": 100}, False, 0),
        ({"gpu": 200}, False, 0),
        ({"gpu": 200}, True, 0),
    ],
)
def test_scores_count_both_units_of_gpu_memory(
    requests: dict[str, Any], most: bool, score: int
) -> None:
    """More than a node has scores nothing."""
    tables, devices = a_cluster(n1=[a_gpu(0)], n2=None)
    weights = {full(name): 1 for name in ("gpu-core", "gpu-memory", "gpu-memory-ratio")}
    plugin = DeviceShareScore(devices, Settings(scoring=Scoring(most=most, weights=weights)))
    assert plugin.score(a_shape(requests), tables, slice(0, 2)).tolist() == [score, 0]
