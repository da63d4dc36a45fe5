"""GPU environment, HAMi-core and RDMA devices."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from apis.keys import ANNOTATION_DEVICE_ALLOCATED, LABEL_GPU_ISOLATION_PROVIDER
from hooks.compat import GPU_MINOR_NUMBERS, GPU_WITHOUT_DEVICE_NODES
from hooks.facts import KernelFacts
from hooks.policies import gpu_env, rdma_device
from hooks.policy import OffBecause
from linux.resources import DeviceNode, Mount
from tests.hooks.making import a_container, a_pod, decide, engine, node, only_fault, values

MEMORY = {"koordinator.sh/gpu-memory-ratio": "50", "koordinator.sh/gpu-memory": "8Gi"}
SHARE = MEMORY | {"koordinator.sh/gpu-core": "40"}
WHOLE = {"koordinator.sh/gpu-memory-ratio": "100", "koordinator.sh/gpu-memory": "16Gi"}
HAMI = {LABEL_GPU_ISOLATION_PROVIDER: "HAMi-core"}
LIBRARY = "/usr/local/vgpu/libvgpu.so"


def _gpus(*gpus: dict[str, Any], labels: dict[str, str] | None = None) -> Any:
    return a_pod("LS", labels=labels, annotations={ANNOTATION_DEVICE_ALLOCATED: {"gpu": gpus}})


def _bind(origin: str, destination: str) -> Mount:
    return Mount(destination=destination, type="bind", source=origin, options=("rbind",))


@pytest.mark.parametrize(
    ("gpus", "visible", "by_minor"),
    [
        ([{"minor": 0}, {"minor": 3}], "0,3", "0,3"),
        ([{"minor": 3}, {"minor": 0}], "3,0", "3,0"),
        ([{"minor": 0, "id": "GPU-a1"}, {"minor": 3, "id": "GPU-b2"}], "GPU-a1,GPU-b2", "0,3"),
        ([{"minor": 0, "id": "MIG-a1"}], "MIG-a1", "0"),
        ([{"minor": 0, "id": "GPU-a1"}, {"minor": 3}], "0,3", "0,3"),
        ([{"minor": 1, "id": "0000:3b:00.0"}], "1", "1"),
        ([{"minor": 1, "id": "GPU-a1,all"}], "1", "1"),
    ],
)
def test_gpus_are_named_by_uuid_where_all_have_one(gpus: Any, visible: str, by_minor: str) -> None:
    container = a_container(_gpus(*gpus))
    assert values(decide(container, node(), gpu_env.POLICY)) == {
        "env:NVIDIA_VISIBLE_DEVICES": visible
    }
    compatible = node(compat={GPU_MINOR_NUMBERS})
    assert values(decide(container, compatible, gpu_env.POLICY)) == {
        "env:NVIDIA_VISIBLE_DEVICES": by_minor
    }


@pytest.mark.parametrize("allocated", [None, {}, {"gpu": []}, {"rdma": [{"minor": 0}]}, "null"])
def test_a_pod_without_gpus_gets_nothing(allocated: Any) -> None:
    annotations = {} if allocated is None else {ANNOTATION_DEVICE_ALLOCATED: allocated}
    container = a_container(a_pod("LS", labels=HAMI, annotations=annotations))
    assert values(decide(container, node(), gpu_env.POLICY)) == {}


def _nvidia(name: str, major: int, minor: int) -> DeviceNode:
    return DeviceNode(f"/dev/{name}", "c", major, minor, 0o666)


GPU_KERNEL = KernelFacts(
    gpus={minor: _nvidia(f"nvidia{minor}", 195, minor) for minor in (0, 1, 3)},
    gpu_control=(_nvidia("nvidiactl", 195, 255), _nvidia("nvidia-uvm", 511, 0)),
)


@pytest.mark.parametrize(
    ("gpus", "given"),
    [
        ([{"minor": 3}, {"minor": 0, "id": "GPU-a1"}], ["nvidia3", "nvidia0"]),
        ([{"minor": 1}, {"minor": 1}], ["nvidia1"]),  # two shares of one device
        ([{"minor": 1}, {"minor": 7}], ["nvidia1"]),
        ([{"minor": 7}], []),  # another vendor's, or no driver here
    ],
)
def test_a_container_gets_the_nodes_of_its_gpus_and_no_others(gpus: Any, given: list[str]) -> None:
    container = a_container(_gpus(*gpus))
    decision = decide(container, node(kernel=GPU_KERNEL), gpu_env.POLICY)
    control = ["nvidiactl", "nvidia-uvm"] if given else []
    paths = [f"/dev/{name}" for name in (*given, *control)]
    devices = [o.value for (kind, _), o in decision.outcomes.items() if kind == "device"]
    assert [device.path for device in devices if isinstance(device, DeviceNode)] == paths
    environment = {"env:NVIDIA_VISIBLE_DEVICES"}
    assert set(values(decision)) == environment | {f"device:{path}" for path in paths}
    compatible = node(kernel=GPU_KERNEL, compat={GPU_WITHOUT_DEVICE_NODES})
    assert set(values(decide(container, compatible, gpu_env.POLICY))) == environment


def test_hami_core_sets_limits_library_and_locks() -> None:
    container = a_container(_gpus({"minor": 0, "resources": SHARE}, labels=HAMI))
    assert values(decide(container, node(), gpu_env.POLICY)) == {
        "env:NVIDIA_VISIBLE_DEVICES": "0",
        "env:CUDA_DEVICE_MEMORY_LIMIT": "8589934592",
        "env:CUDA_DEVICE_SM_LIMIT": "40",
        "env:LD_PRELOAD": LIBRARY,
        f"mount:{LIBRARY}": _bind(LIBRARY, LIBRARY),
        "mount:/tmp/vgpulock": _bind("/tmp/vgpulock", "/tmp/vgpulock"),
    }


def test_hami_core_without_a_core_share_limits_memory_only() -> None:
    container = a_container(_gpus({"minor": 0, "resources": MEMORY}, labels=HAMI))
    decided = values(decide(container, node(), gpu_env.POLICY))
    assert "env:CUDA_DEVICE_MEMORY_LIMIT" in decided and "env:CUDA_DEVICE_SM_LIMIT" not in decided


@pytest.mark.parametrize(
    ("labels", "resources"),
    [(HAMI, WHOLE), ({}, SHARE), ({LABEL_GPU_ISOLATION_PROVIDER: "hami-core"}, SHARE)],
)
def test_no_isolation_for_whole_devices_and_without_the_label(
    labels: dict[str, str], resources: Any
) -> None:
    container = a_container(_gpus({"minor": 0, "resources": resources}, labels=labels))
    assert list(values(decide(container, node(), gpu_env.POLICY))) == ["env:NVIDIA_VISIBLE_DEVICES"]


def test_of_unequal_shares_the_smallest_holds() -> None:
    smaller = SHARE | {"koordinator.sh/gpu-memory": "2Gi", "koordinator.sh/gpu-core": "10"}
    gpus = ({"minor": 0, "resources": SHARE}, {"minor": 1, "resources": smaller})
    decided = values(decide(a_container(_gpus(*gpus, labels=HAMI)), node(), gpu_env.POLICY))
    assert decided["env:CUDA_DEVICE_MEMORY_LIMIT"] == str(2 << 30)
    assert decided["env:CUDA_DEVICE_SM_LIMIT"] == "10"


@pytest.mark.parametrize("first_is_whole", [True, False])
def test_one_shared_device_is_enough_for_isolation(first_is_whole: bool) -> None:
    """Upstream looks at the first device alone: a shared one behind a whole one is open."""
    gpus = ({"minor": 0, "resources": WHOLE}, {"minor": 1, "resources": SHARE})
    container = a_container(_gpus(*(gpus if first_is_whole else gpus[::-1]), labels=HAMI))
    decided = values(decide(container, node(), gpu_env.POLICY))
    assert decided["env:CUDA_DEVICE_MEMORY_LIMIT"] == str(8 << 30)
    assert decided["env:LD_PRELOAD"] == LIBRARY


def test_the_vgpu_monitor_gets_a_directory_of_the_container() -> None:
    container = a_container(_gpus({"minor": 0, "resources": SHARE}, labels=HAMI))
    decided = values(decide(container, node(gates={"HamiCoreVGPUMonitor": True}), gpu_env.POLICY))
    own = "/usr/local/vgpu/containers/uid-web_main"
    assert decided["env:CUDA_DEVICE_MEMORY_SHARED_CACHE"] == "/usr/local/vgpu/uid-web_main.cache"
    assert decided[f"host_directory:{own}"] == 0o777
    assert decided["mount:/usr/local/vgpu"] == _bind(own, "/usr/local/vgpu")


@pytest.mark.parametrize(
    ("uid", "name", "field"),
    [
        ("../../etc", "main", "metadata.uid"),
        ("a/b", "main", "metadata.uid"),
        ("u1", "../main", "spec.containers[].name"),
        ("u1", "", "spec.containers[].name"),
        ("u1", "x" * 200, "spec.containers[].name"),
    ],
)
def test_names_that_are_no_file_names_make_no_directory(uid: str, name: str, field: str) -> None:
    pod = replace(_gpus({"minor": 0, "resources": SHARE}, labels=HAMI), uid=uid)
    inputs = node(gates={"HamiCoreVGPUMonitor": True})
    decision = decide(a_container(pod, name), inputs, gpu_env.POLICY)
    assert list(values(decision)) == ["env:NVIDIA_VISIBLE_DEVICES"]
    assert field in only_fault(decision)


@pytest.mark.parametrize(
    ("resources", "named"),
    [
        ({}, "gpu[0].resources.koordinator.sh/gpu-memory-ratio"),
        ({"koordinator.sh/gpu-memory-ratio": "0"}, "gpu-memory-ratio"),
        ({"koordinator.sh/gpu-memory-ratio": "50"}, "gpu[0].resources.koordinator.sh/gpu-memory"),
        (SHARE | {"koordinator.sh/gpu-memory": "-1"}, "koordinator.sh/gpu-memory"),
    ],
)
def test_hami_core_without_its_amounts_is_an_error_and_claims_nothing(
    resources: Any, named: str
) -> None:
    container = a_container(_gpus({"minor": 0, "resources": resources}, labels=HAMI))
    decision = decide(container, node(), gpu_env.POLICY)
    assert list(values(decision)) == ["env:NVIDIA_VISIBLE_DEVICES"]
    message = only_fault(decision)
    assert "Pod default/web" in message and named in message


@pytest.mark.parametrize("library", ["", "libvgpu.so", "/lib.so", "/a/../b.so", "/a//b", "/a/b/"])
def test_a_bad_library_path_switches_the_policy_off(library: str) -> None:
    state = engine(node(hami_core_library=library), gpu_env.POLICY).state("GPUEnvInject")
    assert state is not None and state.off is not None
    assert state.off.because is OffBecause.BAD_INPUT
    assert "hami-core-library-directory-path" in state.off.detail


# --- RDMA --------------------------------------------------------------------------------------


def _verbs(number: int) -> DeviceNode:
    return DeviceNode(f"/dev/infiniband/uverbs{number}", "c", 231, 192 + number, 0o666)


CM = DeviceNode("/dev/infiniband/rdma_cm", "c", 10, 58, 0o666)
RDMA_KERNEL = KernelFacts(
    rdma={"0000:09:00.0": _verbs(0), "0000:09:00.3": _verbs(1), "0000:0a:00.0": _verbs(300)},
    rdma_cm=CM,
)


def _rdma(*devices: dict[str, Any]) -> Any:
    annotations = {ANNOTATION_DEVICE_ALLOCATED: {"rdma": devices}}
    return a_container(a_pod("LS", annotations=annotations))


@pytest.mark.parametrize(
    ("devices", "numbers"),
    [
        ([{"minor": 0, "id": "0000:09:00.0"}], [0]),
        ([{"minor": 0, "id": "0000:09:00.0"}, {"minor": 1, "id": "0000:0A:00.0"}], [0, 300]),
        (
            [
                {
                    "minor": 0,
                    "id": "0000:09:00.0",
                    "extension": {"vfs": [{"minor": 1, "busID": "0000:09:00.3"}]},
                }
            ],
            [1],
        ),
        ([{"minor": 0, "id": "0000:09:00.0", "extension": {}}], [0]),
    ],
)
def test_each_allocated_function_gets_its_verbs_device(devices: Any, numbers: list[int]) -> None:
    decision = decide(_rdma(*devices), node(kernel=RDMA_KERNEL), rdma_device.POLICY)
    expected = [CM, *map(_verbs, numbers)]
    assert list(values(decision).values()) == expected
    assert [key for _, key in decision.outcomes] == [device.path for device in expected]


def test_an_unknown_address_costs_that_device_only() -> None:
    container = _rdma({"id": "0000:ff:00.0"}, {"id": "0000:09:00.0"})
    decision = decide(container, node(kernel=RDMA_KERNEL), rdma_device.POLICY)
    assert list(values(decision).values()) == [CM, _verbs(0)]
    message = only_fault(decision)
    assert "rdma[0].id" in message and "0000:ff:00.0" in message


def test_many_unknown_addresses_are_one_message() -> None:
    container = _rdma(*({"id": f"0000:f{number}:00.0"} for number in range(9)))
    message = only_fault(decide(container, node(kernel=RDMA_KERNEL), rdma_device.POLICY))
    assert "0000:f0:00.0" in message and "and 8 more" in message


def test_nothing_but_unknown_addresses_gives_no_connection_manager_either() -> None:
    vfs = {"vfs": [{"minor": 0, "busID": ""}]}
    container = _rdma({"id": "0000:09:00.0", "extension": vfs})
    decision = decide(container, node(kernel=RDMA_KERNEL), rdma_device.POLICY)
    assert values(decision) == {}
    assert "extension.vfs[0].busID" in only_fault(decision)


def test_without_a_connection_manager_the_verbs_device_is_still_given() -> None:
    kernel = replace(RDMA_KERNEL, rdma_cm=None)
    decision = decide(_rdma({"id": "0000:09:00.0"}), node(kernel=kernel), rdma_device.POLICY)
    assert list(values(decision).values()) == [_verbs(0)]


def test_a_node_without_rdma_is_degraded_and_a_pod_with_allocated_devices_reported() -> None:
    state = engine(node(), rdma_device.POLICY).state("RDMADeviceInject")
    assert state is not None and state.active
    assert "no RDMA device" in rdma_device.POLICY.degraded(state.rule)
    whole = engine(node(kernel=RDMA_KERNEL), rdma_device.POLICY).state("RDMADeviceInject")
    assert whole is not None and rdma_device.POLICY.degraded(whole.rule) == ""
    decision = decide(_rdma({"id": "0000:09:00.0"}), node(), rdma_device.POLICY)
    assert values(decision) == {} and "0000:09:00.0" in only_fault(decision)
    assert decide(a_container(a_pod("LS")), node(), rdma_device.POLICY).faults == ()


@pytest.mark.parametrize(
    ("policy", "annotation", "named"),
    [
        (policy, annotation, named)
        for policy in (gpu_env.POLICY, rdma_device.POLICY)
        for annotation, named in (
            ("{", "not valid JSON"),
            ([], "device-allocated"),
            ({"gpu": {}}, "gpu"),
            ({"gpu": [{"minor": -1}]}, "minor"),
            ({"gpu": [{"minor": "0"}]}, "minor"),
            ({"rdma": [{"id": 7}]}, "id"),
            ({"gpu": [{"resources": {"koordinator.sh/gpu-core": "x"}}]}, "gpu-core"),
        )
    ],
)
def test_a_bad_annotation_is_named(policy: Any, annotation: Any, named: str) -> None:
    pod = a_pod("LS", annotations={ANNOTATION_DEVICE_ALLOCATED: annotation})
    decision = decide(a_container(pod), node(kernel=RDMA_KERNEL), policy)
    assert decision.outcomes == {}
    message = only_fault(decision)
    assert "Pod default/web" in message and ANNOTATION_DEVICE_ALLOCATED in message
    assert named in message
