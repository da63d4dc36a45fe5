"""The three reports whole: every field that koordlet writes, of a machine where each one is set.

The other tests of this folder vary one field at a time. Here a field that is missing, misspelt or
new is a difference of the whole object, whatever it is called.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from apis.cpuset import CpuSet
from apis.decode import encode
from apis.keys import LABEL_QOS_CLASS
from apis.qos import KubeQoS, QoSClass
from apis.quantity import parse_quantity
from hooks.facts import NodeMeta
from hooks.subject import HostAppSubject, make_pod
from koordlet.measurement.accelerators.nvml import Answer, GpuUsage
from koordlet.measurement.accelerators.nvml import Gpu as NvmlGpu
from koordlet.measurement.accelerators.xpu import PeerLink, Xpu, XpuStatus, XpuTopology
from koordlet.measurement.series import Metric, Series
from koordlet.reporters.device import KeptDevice
from koordlet.reporters.device_spec import device_content
from koordlet.reporters.node_metric import Gpu, Policy, amounts, node_metric_status
from koordlet.reporters.topology import Facts, KeptTopology, topology
from koordlet.sources.kubelet_settings import KubeletSettings
from linux.numa_memory import CpuKind, NumaMemory
from linux.pci import Place
from linux.rdma import RdmaFunction
from tests.koordlet.measured import Measured
from tests.koordlet.reporters.test_topology import machine, pod

GIB = 2**30
OWNER = {
    "apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid-1",
    "controller": True, "blockOwnerDeletion": True,
}  # fmt: skip
PLACE = Place(1, "pci0000:3a")
AT_PCI = {"socketID": -1, "nodeID": 1, "pcieID": "pci0000:3a"}


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


# --- NodeResourceTopology ------------------------------------------------------------------------

# 2 sockets and NUMA nodes of 4 cores with two threads: CPUs i and i + 8. Kubelet's static policy
# gave 3 and 11 to pod `db`; the scheduler 1 and 9 to an LSE pod and 2 to an LSR pod; the Node
# reserves 1500m, which are the CPUs 0 and 8, and the system class has 7 and 15.
_TOPOLOGY_FACTS = Facts(
    cpus=machine(),
    memory={
        0: NumaMemory(32 * GIB, {"2Mi": GIB, "1Gi": 0}),
        1: NumaMemory(32 * GIB, {"2Mi": 0, "1Gi": 2 * GIB}),
    },
    kind=CpuKind("Xeon", "GenuineIntel", hyper_threads=True, turbo=True, cat_mask="fff"),
    kubelet=KubeletSettings(
        "static",
        {"full-pcpus-only": "true"},
        CpuSet.parse("0"),
        topology_policy="restricted",
        topology_scope="pod",
    ),
    exclusive={"db": CpuSet.parse("3,11")},
    pods=(pod("db"), pod("lse", qos="LSE", cpus="1,9"), pod("lsr", qos="LSR", cpus="2")),
    node=NodeMeta(
        "n1",
        labels={"node.koordinator.sh/enable-numa-reservation": "true"},
        annotations={
            "node.koordinator.sh/reservation": (
                '{"resources":{"cpu":"1500m","memory":"1Gi"},"applyPolicy":"Default"}'
            ),
            "node.koordinator.sh/system-qos-resource": '{"cpuset":"15,7"}',
        },
        capacity={"cpu": 16000, "memory": 64 * GIB},
        allocatable={"cpu": 15500, "memory": 61 * GIB},
    ),
    huge_pages=True,
)


def _zone(name: str, memory: tuple[str, str], two_mib: str, one_gib: str) -> dict[str, Any]:
    def resource(name: str, capacity: str, allocatable: str) -> dict[str, str]:
        return {
            "name": name, "capacity": capacity, "allocatable": allocatable,
            "available": allocatable,
        }  # fmt: skip

    return {
        "name": name,
        "type": "Node",
        "resources": [
            resource("cpu", "8", "7750m"),
            resource("hugepages-1Gi", one_gib, one_gib),
            resource("hugepages-2Mi", two_mib, two_mib),
            resource("memory", *memory),
        ],
    }


def whole_topology() -> dict[str, Any]:
    kept = KeptTopology(topology(_TOPOLOGY_FACTS))
    made: dict[str, Any] = _plain(kept.merge(kept.create("n1", "uid-1")))
    return made


def test_a_whole_node_resource_topology() -> None:
    made = whole_topology()
    annotations = {
        key: json.loads(text) for key, text in made["metadata"].pop("annotations").items()
    }
    detail = annotations["node.koordinator.sh/cpu-topology"].pop("detail")
    assert detail == [
        {"id": cpu, "core": cpu % 8, "socket": cpu % 8 // 4, "node": cpu % 8 // 4}
        for cpu in range(16)
    ]
    assert annotations == {
        "node.koordinator.sh/cpu-basic-info": {
            "cpuModel": "Xeon", "hyperThreadEnabled": True, "turboEnabled": True,
            "catL3CbmMask": "fff", "vendorID": "GenuineIntel",
        },
        "node.koordinator.sh/cpu-topology": {},
        "node.koordinator.sh/cpu-shared-pools": [
            {"socket": 0, "node": 0, "cpuset": "10"},
            {"socket": 1, "node": 1, "cpuset": "4-6,12-14"},
        ],
        "node.koordinator.sh/be-cpu-shared-pools": [
            {"socket": 0, "node": 0, "cpuset": "2,10"},
            {"socket": 1, "node": 1, "cpuset": "4-6,12-14"},
        ],
        "kubelet.koordinator.sh/cpu-manager-policy": {
            "policy": "static", "options": {"full-pcpus-only": "true"}, "reservedCPUs": "0",
        },
        "node.koordinator.sh/pod-cpu-allocs": [
            {
                "namespace": "ns", "name": "name-db", "uid": "db", "cpuset": "3,11",
                "managedByKubelet": True,
            }
        ],
        "node.koordinator.sh/reservation": {
            "resources": {"cpu": "1500m", "memory": "1Gi"}, "reservedCPUs": "0,8",
            "applyPolicy": "Default",
        },
        "node.koordinator.sh/system-qos-resource": {"cpuset": "7,15", "cpusetExclusive": True},
    }  # fmt: skip
    # Of the node's memory 3 GiB are not allocatable: 1.5 GiB of each NUMA node.
    assert made == {
        "metadata": {
            "name": "n1",
            "labels": {
                "app.kubernetes.io/managed-by": "Koordinator",
                "node.koordinator.sh/enable-numa-reservation": "true",
            },
            "ownerReferences": [OWNER],
        },
        "topologyPolicies": ["RestrictedPodLevel"],
        "zones": [
            _zone("node-0", ("31Gi", "30208Mi"), "1Gi", "0"),
            _zone("node-1", ("30Gi", "29184Mi"), "0", "2Gi"),
        ],
    }


# --- Device --------------------------------------------------------------------------------------


def whole_device() -> dict[str, Any]:
    """Of two GPUs, one of them lost, and two RDMA functions."""
    gpus = (
        NvmlGpu("GPU-0", 0, "NVIDIA H100 80GB HBM3", 80 << 30, "0000:3b:00.0"),
        NvmlGpu("GPU-1", 1, "NVIDIA H100 80GB HBM3", 80 << 30, "0000:3c:00.0", "Xid79", "lost"),
    )
    functions = (
        RdmaFunction("0000:3d:00.0", "mlx5_1", 1, True, PLACE, ("0000:3d:00.2",)),
        RdmaFunction("0000:3e:00.0", "mlx5_0", 0, False, PLACE, ()),
    )
    places = {each.bus_id: PLACE for each in gpus}
    answer = Answer("570.86.10", tuple(GpuUsage(each, ()) for each in gpus), ())
    kept = KeptDevice(device_content(answer, (), functions, places), "2026-01-01T12:00:00Z")
    made: dict[str, Any] = _plain(kept.merge(kept.create("n1", "uid-1")))
    return made


def test_a_whole_device_of_gpus_and_rdma_functions() -> None:
    def gpu(minor: int, bus: str, *, health: bool) -> dict[str, Any]:
        return {
            "type": "gpu", "id": f"GPU-{minor}", "minor": minor, "health": health,
            "resources": {
                "koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "80Gi",
                "koordinator.sh/gpu-memory-ratio": "100",
            },
            "topology": {**AT_PCI, "busID": bus},
        }  # fmt: skip

    def rdma(minor: int, address: str, *, health: bool) -> dict[str, Any]:
        return {
            "type": "rdma", "id": address, "minor": minor, "health": health,
            "resources": {"koordinator.sh/rdma": "100"},
            "topology": {**AT_PCI, "busID": address},
        }  # fmt: skip

    lost = {
        "type": "Healthy", "status": "False", "reason": "Xid79", "message": "lost",
        "lastTransitionTime": "2026-01-01T12:00:00Z",
    }  # fmt: skip
    assert whole_device() == {
        "metadata": {
            "name": "n1",
            "ownerReferences": [OWNER],
            "labels": {
                "node.koordinator.sh/gpu-vendor": "nvidia",
                "node.koordinator.sh/gpu-model": "H100-80GB-HBM3",
                "node.koordinator.sh/gpu-driver-version": "570.86.10",
            },
        },
        "spec": {
            "devices": [
                gpu(0, "0000:3b:00.0", health=True),
                {**gpu(1, "0000:3c:00.0", health=False), "conditions": [lost]},
                rdma(0, "0000:3e:00.0", health=False),
                {
                    **rdma(1, "0000:3d:00.0", health=True),
                    "vfGroups": [{"vfs": [{"minor": -1, "busID": "0000:3d:00.2"}]}],
                },
            ]
        },
    }


def test_a_whole_device_of_accelerators_in_files() -> None:
    devices = [
        Xpu(
            "huawei",
            "Ascend-910B",
            f"u-{minor}",
            minor,
            {"gpu-memory": parse_quantity("64Gi"), "huawei.com/npu-core": parse_quantity("20")},
            XpuTopology(1, "pci0000:3a", f"0000:4{minor}:00.0", (PeerLink((other,), "HCCS"),)),
            XpuStatus(True, "", ""),
        )
        for minor, other in ((0, 1), (1, 0))
    ]
    kept = KeptDevice(device_content(None, devices, (), {}), "2026-01-01T12:00:00Z")
    made = _plain(kept.merge(kept.create("n1", "uid-1")))
    partitions = json.loads(
        made["metadata"]["annotations"].pop("scheduling.koordinator.sh/gpu-partitions")
    )
    assert partitions == {"2": [{"minors": [0, 1], "gpuLinkType": "HCCS", "allocationScore": 1}]}
    healthy = {
        "type": "Healthy", "status": "True", "reason": "DeviceHealthy",
        "message": "device is healthy", "lastTransitionTime": "2026-01-01T12:00:00Z",
    }  # fmt: skip
    assert made == {
        "metadata": {
            "name": "n1",
            "ownerReferences": [OWNER],
            "annotations": {},
            "labels": {
                "node.koordinator.sh/gpu-vendor": "huawei",
                "node.koordinator.sh/gpu-model": "Ascend-910B",
                "node.koordinator.sh/gpu-partition-policy": "Prefer",
            },
        },
        "spec": {
            "devices": [
                {
                    "type": "gpu", "id": f"u-{minor}", "minor": minor, "health": True,
                    "resources": {
                        "koordinator.sh/gpu-memory-ratio": "100",
                        "koordinator.sh/gpu-memory": "64Gi",
                        "huawei.com/npu-core": "20",
                    },
                    "topology": {**AT_PCI, "busID": f"0000:4{minor}:00.0"},
                    "conditions": [healthy],
                }
                for minor in (0, 1)
            ]
        },
    }  # fmt: skip


# --- NodeMetric ----------------------------------------------------------------------------------


def whole_node_metric() -> dict[str, Any]:
    """The status of a node of two NUMA nodes with a GPU, whose load was 1 to 7 cores in the last
    7 seconds."""
    measured = Measured(now=10_000.0)
    measured.values(Series(Metric.NODE_CPU), [float(value) for value in range(1, 8)])
    measured.values(Series(Metric.NODE_MEMORY), [value * GIB for value in range(1, 8)])
    measured.values(Series(Metric.SYSTEM_CPU), [value / 8 for value in range(1, 8)])
    measured.constant(Series(Metric.SYSTEM_MEMORY), GIB, over_s=6)
    for numa, cores in (("0", 3.0), ("1", 1.0)):
        measured.constant(Series(Metric.NODE_NUMA_CPU, numa), cores)
        measured.constant(Series(Metric.NODE_NUMA_MEMORY, numa), 2 * GIB)
        measured.constant(Series(Metric.SYSTEM_NUMA_CPU, numa), cores / 8)
        measured.constant(Series(Metric.SYSTEM_NUMA_MEMORY, numa), GIB / 2)
    measured.constant(Series(Metric.NODE_GPU_CORE, "GPU-0", "0"), 60)
    measured.constant(Series(Metric.NODE_GPU_MEMORY, "GPU-0", "0"), 20 * GIB)
    for uid, cores in (("uid-web", 2.0), ("uid-train", 1.5)):
        measured.constant(Series(Metric.POD_CPU, uid), cores)
        measured.constant(Series(Metric.POD_MEMORY, uid), cores * GIB)
    measured.constant(Series(Metric.POD_GPU_CORE, "uid-train", "GPU-0/0"), 50)
    measured.constant(Series(Metric.POD_GPU_MEMORY, "uid-train", "GPU-0/0"), 10 * GIB)
    measured.constant(Series(Metric.HOST_APP_CPU, "nginx"), 0.25)
    measured.constant(Series(Metric.HOST_APP_MEMORY, "nginx"), 2**20)
    pods = [
        make_pod(
            namespace=namespace, name=name, uid=f"uid-{name}", labels={LABEL_QOS_CLASS: qos},
            annotations={}, kube_qos=KubeQoS.BURSTABLE, priority=priority,
        )
        for namespace, name, qos, priority in (
            ("shop", "web", "LS", 9500), ("jobs", "train", "BE", 5500),
        )
    ]  # fmt: skip
    status = node_metric_status(
        measured,
        pods,
        (HostAppSubject("nginx", QoSClass.LS, "nginx", "koord-prod"),),
        Policy(windows=("10s", "30m0s")),
        wall_s=1_700_000_000.9,
        gpus={"GPU-0": Gpu(0, 80 * GIB)},
        reclaimable=amounts(5799, 12357013095),
        peak=amounts(6201, 13412790681),
    )
    made: dict[str, Any] = msgspec.json.decode(encode(status))
    return made


def test_a_whole_node_metric() -> None:
    def use(cpu: str, memory: str) -> dict[str, Any]:
        return {"resources": {"cpu": cpu, "memory": memory}}

    def gpu(core: str, memory: str, ratio: str) -> dict[str, Any]:
        return {
            "type": "gpu", "id": "GPU-0", "minor": 0, "health": True,
            "resources": {
                "koordinator.sh/gpu-core": core, "koordinator.sh/gpu-memory": memory,
                "koordinator.sh/gpu-memory-ratio": ratio,
            },
        }  # fmt: skip

    names = ("avg", "p50", "p90", "p95", "p99")
    too_short = {"usage": {name: {} for name in names}, "duration": "30m0s"}
    # The percentile p of seven samples is the element int(7 p) - 1 of their order, at least 0.
    percentiles = dict(zip(names, (4, 3, 6, 6, 6), strict=True))
    of_node = {name: use(f"{each}", f"{each}Gi") for name, each in percentiles.items()}
    of_system = {name: use(f"{each * 125}m", "1Gi") for name, each in percentiles.items()}
    expected = {
        "updateTime": "2023-11-14T22:13:20Z",
        "nodeMetric": {
            "nodeUsage": {**use("4", "4Gi"), "devices": [gpu("60", "20Gi", "25")]},
            "aggregatedNodeUsages": [
                {
                    "usage": of_node,
                    "duration": "10s",
                },
                too_short,
            ],
            "systemUsage": use("500m", "1Gi"),
            "aggregatedSystemUsages": [
                {
                    "usage": of_system,
                    "duration": "10s",
                },
                too_short,
            ],
            "numaUsages": [
                {
                    "numaNodeID": 0, "nodeUsage": use("3", "2Gi"),
                    "systemUsage": use("375m", "512Mi"),
                },
                {
                    "numaNodeID": 1, "nodeUsage": use("1", "2Gi"),
                    "systemUsage": use("125m", "512Mi"),
                },
            ],
        },
        "podsMetric": [
            {
                "name": "train", "namespace": "jobs",
                "podUsage": {**use("1500m", "1536Mi"), "devices": [gpu("50", "10Gi", "12")]},
                "priority": "koord-batch", "qos": "BE", "extensions": {},
            },
            {
                "name": "web", "namespace": "shop", "podUsage": use("2", "2Gi"),
                "priority": "koord-prod", "qos": "LS", "extensions": {},
            },
        ],
        "hostApplicationMetric": [
            {
                "name": "nginx", "usage": use("250m", "1Mi"), "priority": "koord-prod",
                "qos": "LS",
            }
        ],
        "prodReclaimableMetric": {"resource": use("5799m", "12357013095")},
        "prodPeakMetric": {"resource": use("6201m", "13412790681")},
    }  # fmt: skip
    assert whole_node_metric() == expected
