"""The answers of /apis/v1 as a whole: each member by upstream's name, and no other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apis.cpuset import CpuSet
from apis.decode import decode_object
from apis.device import Device
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESERVE_POD,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    LABEL_CPU_BIND_POLICY,
    LABEL_NUMA_ALLOCATE_STRATEGY,
    LABEL_NUMA_TOPOLOGY_POLICY,
)
from apis.quota import PodGroup
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.manifests import config_map
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving import dumps
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.gangs import Step
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.reservations.facts import AllocatePolicy
from cluster.scheduler.tables.shapes import PodShape, Shapes
from kube.cache import Change, Event
from kube.connection import Connection
from kube.kept_client import KeptClient
from tests.cluster.scheduler.devices.making import a_gpu
from tests.cluster.scheduler.load.making import NOW, LoadNode, make_metric
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, make_topology
from tests.cluster.scheduler.quotas.making import Bed
from tests.cluster.scheduler.reservations.making import make_facts

GI = 1 << 30
BIG = {"namespace": "team", "name": "big", "uid": "uid-big"}
BIG_HAS = {
    "cpuset": "8-11",
    "numaNodeResources": [{"node": 1, "resources": {"cpu": "4", "memory": "4Gi"}}],
}


@pytest.fixture
def process() -> SchedulerProcess:
    """A scheduler with node n1: 16 CPUs in two NUMA nodes, and a pod with four of them."""
    nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
    text = config_map()["data"]["koord-scheduler-config"]
    made = SchedulerProcess(nowhere, read_configuration(text, obj="shipped"), seed=1)
    node = make_node(
        "n1",
        unschedulable=True,
        labels={
            LABEL_CPU_BIND_POLICY: "FullPCPUsOnly",
            LABEL_NUMA_TOPOLOGY_POLICY: "SingleNUMANode",
            LABEL_NUMA_ALLOCATE_STRATEGY: "MostAllocated",
        },
        annotations={
            ANNOTATION_NODE_RESERVATION: json.dumps({"reservedCPUs": "0-1"}),
            ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: json.dumps({"cpu": 1.5}),
        },
        allocatable={
            "hugepages-2Mi": "8Mi",
            "ephemeral-storage": "10Gi",
            "example.com/memory": "4Gi",
            "example.com/n": "5",
        },
    )
    row = made.tables.upsert_node(node)
    topology = make_topology("n1", cpus=SMALL.cpus(), zones=SMALL_ZONES)
    facts, errors = parse_numa_facts(node, topology)
    assert not errors
    made.plugins.numa.set_node(row, facts)
    pod = make_pod("big", requests={"cpu": "4", "memory": "4Gi"}, priority=9000)
    allocation = Allocation(cpus=CpuSet.parse("8-11"), numa=((1, {"cpu": 4000, "memory": 4 * GI}),))
    made.tables.place(Booking("team/big", "uid-big", Shapes().of(pod), "n1", allocation=allocation))
    return made


def _row(process: SchedulerProcess, node: str = "n1") -> int:
    row = process.tables.nodes.row(node)
    assert row is not None
    return row


def test_a_node_with_amounts_in_the_units_of_their_resources(process: SchedulerProcess) -> None:
    requests = {
        "cpu": "500m",
        "ephemeral-storage": "1Gi",
        "example.com/gone": "3",
        "example.com/memory": "1Gi",
        "example.com/n": "2",
        "hugepages-2Mi": "4Mi",
    }
    # Other nodes have such devices; the last one of this node is gone.
    process.tables.upsert_node(make_node("n2", allocatable={"example.com/gone": "8"}))
    odd = Shapes().of(make_pod("odd", requests=requests))
    process.tables.place(Booking("default/odd", "uid-odd", odd, "n1"))
    assert dumps.node(process, _row(process)) == {
        "name": "n1",
        "unschedulable": True,
        "allocatable": {
            "cpu": "16",
            "ephemeral-storage": "10Gi",
            "example.com/memory": "4Gi",
            "example.com/n": "5",
            "hugepages-2Mi": "8Mi",
            "memory": "64Gi",
        },
        "allowedPodNumber": 110,
        "requested": {
            "cpu": "4500m",
            "ephemeral-storage": "1Gi",
            "example.com/gone": "3",
            "example.com/memory": "1Gi",
            "example.com/n": "2",
            "hugepages-2Mi": "4Mi",
            "memory": "4Gi",
        },
        # The pod without a request for memory counts with 200 MiB.
        "nonZeroRequested": {"cpu": "4500m", "memory": "4296Mi"},
        "remaining": {
            "cpu": "11500m",
            "ephemeral-storage": "9Gi",
            "example.com/gone": "-3",
            "example.com/memory": "3Gi",
            "example.com/n": "3",
            "hugepages-2Mi": "4Mi",
            "memory": "60Gi",
        },
        "pods": [
            {
                "namespace": "default",
                "name": "odd",
                "uid": "uid-odd",
                "priority": 0,
                "requests": requests,
            },
            BIG | {"priority": 9000, "requests": {"cpu": "4", "memory": "4Gi"}} | BIG_HAS,
        ],
    }


def test_cpus_and_numa_nodes(process: SchedulerProcess) -> None:
    """Zone 0 has 6 CPUs that are not reserved; amounts of CPU are amplified by 1.5."""
    shape = Shapes().of(make_pod("shared", requests={"cpu": "1"}))
    process.tables.place(Booking("default/shared", "uid-shared", shape, "n1"))
    assert dumps.numa(process, _row(process)) == {
        "name": "n1",
        "reservedCPUs": "0-1",
        "maxRefCount": 1,
        "policy": "FullPCPUsOnly",
        "numaTopologyPolicy": "SingleNUMANode",
        "numaAllocateStrategy": "MostAllocated",
        "amplificationRatios": {"cpu": 1.5},
        "numaNodeResources": [
            {"node": 0, "resources": {"cpu": "9", "memory": "32Gi"}},
            {"node": 1, "resources": {"cpu": "12", "memory": "32Gi"}},
        ],
        "remainingNUMANodeResources": [
            {"node": 0, "resources": {"cpu": "9", "memory": "32Gi"}},
            {"node": 1, "resources": {"cpu": "6", "memory": "28Gi"}},
        ],
        "allocatedNUMANodeResources": [
            {"node": 0, "resources": {"cpu": "0", "memory": "0"}},
            {"node": 1, "resources": {"cpu": "6", "memory": "4Gi"}},
        ],
        "availableCPUs": "2-7,12-15",
        "allocatedCPUs": "8-11",
        "allocatedPods": [BIG | BIG_HAS],
        "cpuTopology": {
            "numCPUs": 16,
            "numCores": 8,
            "numNodes": 2,
            "numSockets": 2,
            "cpuDetails": [
                {"cores": f"{first}-{first + 1}", "node": first // 8, "socket": first // 8}
                for first in range(0, 16, 2)
            ],
        },
    }


def test_a_node_of_which_no_topology_is_known(process: SchedulerProcess) -> None:
    process.tables.upsert_node(make_node("n2"))
    tree = dumps.numa(process, _row(process, "n2"))
    assert "cpuTopology" not in tree
    assert tree["amplificationRatios"] == {"cpu": 1}
    assert tree["allocatedPods"] == tree["numaNodeResources"] == []


def test_the_load_of_a_node_and_the_pods_that_its_report_lacks() -> None:
    node = LoadNode()
    node.load.set_report(node.row, make_metric("4", "8Gi", pods={"old": ("1", "koord-prod")}))
    node.place("old", start=NOW - 5000, requests={"cpu": "2", "memory": "4Gi"})
    node.place("new", start=NOW, requests={"cpu": "4", "memory": "8Gi"})
    batch = {"kubernetes.io/batch-cpu": "3000", "kubernetes.io/batch-memory": "1Gi"}
    node.place("batch", start=NOW, priority=5500, requests=batch)
    node.place("unstarted", start=0.0, requests={"cpu": "1"})

    def pod(name: str, started: str | None) -> dict[str, Any]:
        return {
            "timestamp": started,
            "pod": {"namespace": "default", "name": name, "uid": name},
        }

    # 85 % of CPU and 70 % of memory; 200 MiB where no memory is requested.
    new, unstarted, of_batch, old = 3400, 850, 2550, 1700
    memory = {"new": round(0.7 * 8 * GI), "batch": round(0.7 * GI), "unstarted": 200 << 20}
    assert dumps.load(node.load, node.row) == {
        "pods": [
            pod("batch", "2027-01-15T08:00:00Z"),
            pod("new", "2027-01-15T08:00:00Z"),
            pod("old", "2027-01-15T06:36:40Z"),
            pod("unstarted", None),
        ],
        "nodeDeltaPods": ["default/batch", "default/new", "default/unstarted"],
        "prodDeltaPods": ["default/new", "default/unstarted"],
        "nodeEstimatedPods": ["default/batch", "default/new", "default/old", "default/unstarted"],
        "usage": {"cpu": "4", "memory": "8Gi"},
        "prodUsage": {"cpu": "1", "memory": "0"},
        "nodeDelta": {
            "cpu": f"{new + unstarted + of_batch}m",
            "memory": str(sum(memory.values())),
        },
        "prodDelta": {
            "cpu": f"{new + unstarted}m",
            "memory": str(memory["new"] + memory["unstarted"]),
        },
        "nodeEstimated": {
            "cpu": f"{new + unstarted + of_batch + old}m",
            "memory": str(sum(memory.values()) + round(0.7 * 4 * GI)),
        },
        "reported": True,
        "expired": False,
    }
    # The table grows when a node is first reported or used.
    assert dumps.load(node.load, 10_000) == {
        "pods": [],
        "nodeDeltaPods": [],
        "prodDeltaPods": [],
        "nodeEstimatedPods": [],
    }


def test_devices_in_sum_and_each(process: SchedulerProcess) -> None:
    process.tables.upsert_node(make_node("n2"))
    device = {"metadata": {"name": "n2"}, "spec": {"devices": [a_gpu(0), a_gpu(1)]}}
    process.plugins.devices.set_device(decode_object(json.dumps(device).encode(), Device, obj="n2"))
    core, memory = "koordinator.sh/gpu-core", "koordinator.sh/gpu-memory"

    def amounts(gpus: int) -> dict[str, str]:
        return {
            core: str(100 * gpus),
            memory: f"{80 * gpus}Gi" if gpus else "0",
            f"{memory}-ratio": str(100 * gpus),
        }

    assert dumps.devices(process, _row(process, "n2")) == {
        "allocateSet": {},
        "deviceTotal": {"gpu": amounts(2)},
        "deviceTotalDetail": {"gpu": {"0": amounts(1), "1": amounts(1)}},
        "deviceFree": {"gpu": amounts(2)},
        "deviceFreeDetail": {"gpu": {"0": amounts(1), "1": amounts(1)}},
        "deviceUsed": {"gpu": amounts(0)},
        "deviceUsedDetail": {"gpu": {"0": amounts(0), "1": amounts(0)}},
    }


def test_a_gang_of_a_pod_group_with_a_member_at_each_step(process: SchedulerProcess) -> None:
    plain = {
        "metadata": {
            "name": "train",
            "namespace": "default",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": {
                "gang.scheduling.koordinator.sh/groups": '["default/train", "default/other"]',
                "gang.scheduling.koordinator.sh/total-number": "7",
                "gang.scheduling.koordinator.sh/mode": "NonStrict",
                "gang.scheduling.koordinator.sh/match-policy": "waiting-and-running",
            },
        },
        "spec": {"minMember": 5, "scheduleTimeoutSeconds": 90},
    }
    core = process
    group = decode_object(plain, PodGroup, obj="PodGroup default/train")
    core.pod_groups.put(group)
    core.gangs.pod_group_event(Event(Change.ADDED, None, group))
    label = {"pod-group.scheduling.sigs.k8s.io": "train"}
    for step in Step:
        pod = make_pod(step.value, labels=label, schedulerName="koord-scheduler")
        process.source.pod_event(Event(Change.ADDED, None, pod))
        core.gang_table.move(pod.metadata.uid, step)
    core.gang_table.join("uid-unknown", "default/train", Step.BOUND)
    gang = core.gang_table.get("default/train")
    assert gang is not None
    gang.once_satisfied = True

    def keys(*names: str) -> list[str]:
        return sorted(f"default/{name}" for name in names)

    assert dumps.gang(core, gang) == {
        "name": "default/train",
        "createTime": "2026-01-01T00:00:00Z",
        "gangGroup": ["default/other", "default/train"],
        "gangGroupInfo": {
            "gangGroupId": "default/other,default/train",
            "onceResourceSatisfied": True,
        },
        "gangFrom": "GangFromPodGroupCrd",
        "hasGangInit": True,
        "onceResourceSatisfied": True,
        "children": [*keys("pending", "tried", "waiting", "binding", "bound"), "uid-unknown"],
        "pendingChildren": keys("pending", "tried"),
        "waitingForBindChildren": keys("waiting", "binding"),
        "boundChildren": [*keys("bound"), "uid-unknown"],
        "waitTime": "1m30s",
        "mode": "NonStrict",
        "gangMatchPolicy": "waiting-and-running",
        "minRequiredNumber": 5,
        "totalChildrenNum": 7,
    }


def test_a_gang_that_nothing_defines_has_no_numbers(process: SchedulerProcess) -> None:
    gang = process.gang_table.join("uid-a", "default/train", Step.PENDING)
    tree = dumps.gang(process, gang)
    assert (tree["hasGangInit"], tree["createTime"]) == (False, None)
    assert (tree["gangGroup"], tree["gangFrom"]) == (["default/train"], "GangFromPodAnnotation")
    assert not tree.keys() & {"waitTime", "mode", "gangMatchPolicy", "minRequiredNumber"}


def test_quotas_with_all_their_amounts() -> None:
    bed = Bed("10")
    most = {"cpu": "8", "memory": "16Gi"}
    bed.quota("top", {"cpu": "4"}, most, labels={"is-parent": "true"})
    least, most = {"cpu": "2"}, {"cpu": "6", "memory": "8Gi"}
    bed.quota("a", least, most, parent="top", lends=False, weight={"cpu": "3"})
    bed.place("p", "a", "3")
    bed.want("q", "a", "5")
    firm = bed.shape("a", "1", labels={"quota.scheduling.koordinator.sh/preemptible": "false"})
    bed.table.place(Booking("default/firm", "firm", firm, "n0"))
    without_pods = {
        "name": "a",
        "parentName": "top",
        "isParent": False,
        "runtimeVersion": bed.table.version,
        "tree": "",
        "allowLentResource": False,
        "max": {"cpu": "6", "memory": "8Gi"},
        "min": {"cpu": "2"},
        "autoScaleMin": {"cpu": "2"},
        "sharedWeight": {"cpu": "3", "memory": "0"},
        "runtime": {"cpu": "6", "memory": "0"},
        "used": {"cpu": "4"},
        "request": {"cpu": "9"},
        "childRequest": {"cpu": "9"},
        "nonPreemptibleUsed": {"cpu": "1"},
        "nonPreemptibleRequest": {"cpu": "1"},
        "selfUsed": {"cpu": "4"},
        "selfRequest": {"cpu": "9"},
        "selfNonPreemptibleUsed": {"cpu": "1"},
        "selfNonPreemptibleRequest": {"cpu": "1"},
        "allocated": {},
        "guaranteed": {},
    }
    assert dumps.quota(bed.table, "a", pods=False) == without_pods
    pods = {name: {"uid": name.removeprefix("default/"), "node": "n0"}
            for name in ("default/firm", "default/p")}  # fmt: skip
    assert dumps.quota(bed.table, "a", pods=True) == without_pods | {"podCache": pods}
    # What a child requests beyond its maximum does not reach its parent.
    assert dumps.quota(bed.table, "top", pods=True) == without_pods | {
        "name": "top",
        "parentName": "koordinator-root-quota",
        "isParent": True,
        "allowLentResource": True,
        "max": {"cpu": "8", "memory": "16Gi"},
        "min": {"cpu": "4"},
        "autoScaleMin": {"cpu": "4"},
        "sharedWeight": {"cpu": "8", "memory": "16Gi"},
        "request": {"cpu": "6"},
        "childRequest": {"cpu": "6"},
        "selfUsed": {},
        "selfRequest": {},
        "selfNonPreemptibleUsed": {},
        "selfNonPreemptibleRequest": {},
        "podCache": {},
    }
    assert dumps.quota(bed.table, "absent", pods=True) is None


@pytest.mark.parametrize(
    ("annotations", "key", "kind", "namespace"),
    [
        ({ANNOTATION_RESERVE_POD: "true"}, "/r", "Reservation", ""),
        ({}, "team/operating", "Pod", "team"),
    ],
)
def test_a_reservation_of_either_kind_with_the_pods_that_use_it(
    process: SchedulerProcess, annotations: dict[str, str], key: str, kind: str, namespace: str
) -> None:
    tables = process.tables
    tables.upsert_node(make_node("n2"))
    amounts = {"cpu": "4", "memory": "8Gi"}
    tables.reservations.upsert(
        make_facts("r", amounts, policy=AllocatePolicy.ALIGNED, once=True, reserved={"cpu": "500m"})
    )

    def shape(requests: dict[str, str], *ports: dict[str, Any], **more: Any) -> PodShape:
        container = {"name": "c", "resources": {"requests": requests}, "ports": list(ports)}
        return Shapes().of(make_pod("any", containers=[container], **more))

    web = {"containerPort": 80, "hostPort": 8080, "hostIP": "10.0.0.1"}
    dns = {"containerPort": 53, "hostPort": 53, "protocol": "UDP"}
    inner = {"containerPort": 9000}
    held = shape(amounts, web, inner, dns, annotations=annotations)
    tables.place(Booking(key, "uid-r", held, "n2"))
    allocation = Allocation(reservation="uid-r")
    for name, port in (("v", dns), ("u", inner)):
        user = shape({"cpu": "1", "memory": "2Gi"}, port)
        tables.place(Booking(f"default/{name}", name, user, "n2", allocation=allocation))
    (item,) = dumps.reservations(process, _row(process, "n2"))["items"]
    assert item == {
        "name": "r",
        "namespace": namespace,
        "uid": "uid-r",
        "kind": kind,
        "available": True,
        "allocateOnce": True,
        "allocatePolicy": "Aligned",
        "owners": [{"labelSelector": {"matchLabels": {"app": "a"}}}],
        "allocatable": amounts,
        "reserved": {"cpu": "500m"},
        "allocated": {"cpu": "2", "memory": "4Gi"},
        "allocatablePorts": [
            {"hostIP": "0.0.0.0", "protocol": "UDP", "hostPort": 53},
            {"hostIP": "10.0.0.1", "protocol": "TCP", "hostPort": 8080},
        ],
        "allocatedPorts": [{"hostIP": "0.0.0.0", "protocol": "UDP", "hostPort": 53}],
        "availableResource": {"cpu": "2", "memory": "4Gi"},
        "allocatedResource": {"cpu": "2", "memory": "4Gi"},
        "assignedPods": [
            {"namespace": "default", "name": name, "uid": name} for name in ("u", "v")
        ],
    }
    shown = dumps.node(process, _row(process, "n2"))["pods"]
    assert {pod["name"]: pod.get("reservation") for pod in shown if pod["uid"] in "uv"} == {
        "u": "uid-r",
        "v": "uid-r",
    }
