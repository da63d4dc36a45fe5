"""The NodeResourceTopology: pools, annotations and zones, and what stays of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.errors import InputError
from apis.keys import LABEL_QOS_CLASS
from apis.qos import KubeQoS
from apis.topology import parse_node_cpu_facts
from hooks.facts import NodeMeta
from hooks.subject import Pod, make_pod
from koordlet.qos.strategies.cpu_owners import packed
from koordlet.reporters.cpu_pools import pools
from koordlet.reporters.topology import Facts, merged, new_object, topology
from koordlet.sources.kubelet_settings import KubeletSettings
from linux.cpus import Cpu
from linux.numa_memory import CpuKind, NumaMemory

GIB = 2**30
KEY = "node.koordinator.sh/"
PAGES = {"2Mi": 0, "1Gi": 0}


def machine(
    sockets: int = 2, cores: int = 4, threads: int = 2, *, first_node: int = 0
) -> tuple[Cpu, ...]:
    """Return CPUs numbered as Linux does: the second threads come after all first ones."""
    total = sockets * cores
    return tuple(
        Cpu(
            cpu=thread * total + core,
            core=core,
            socket=core // cores,
            node=first_node + core // cores,
            l3=core // cores,
        )
        for core in range(total)
        for thread in range(threads)
    )


def pod(uid: str, *, qos: str = "", cpus: str = "", phase: str = "Running") -> Pod:
    annotations = {}
    if cpus:
        annotations["scheduling.koordinator.sh/resource-status"] = json.dumps({"cpuset": cpus})
    return make_pod(
        namespace="ns",
        name=f"name-{uid}",
        uid=uid,
        labels={LABEL_QOS_CLASS: qos} if qos else {},
        annotations=annotations,
        kube_qos=KubeQoS.GUARANTEED,
        phase=phase,
    )


def facts(**changes: Any) -> Facts:
    made = Facts(
        cpus=machine(),
        memory={0: NumaMemory(32 * GIB, PAGES), 1: NumaMemory(32 * GIB, PAGES)},
        kind=CpuKind("Xeon", "GenuineIntel", True, False, "fff"),
        kubelet=KubeletSettings(),
        exclusive={},
        pods=(),
        node=NodeMeta("n1"),
    )
    return msgspec.structs.replace(made, **changes)


def written(**changes: Any) -> dict[str, Any]:
    found = topology(facts(**changes)).annotations
    return {key.rpartition("/")[2]: json.loads(text) for key, text in found.items()}


def node(**named: str) -> NodeMeta:
    return NodeMeta("n1", annotations={f"{KEY}{k.replace('_', '-')}": v for k, v in named.items()})


def shown(cpusets: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    return [(each["socket"], each["node"], each["cpuset"]) for each in cpusets]


def test_all_annotations_of_a_quiet_node() -> None:
    found = written()
    detail = found.pop("cpu-topology")["detail"]
    assert detail[:2] == [
        {"id": 0, "core": 0, "socket": 0, "node": 0},
        {"id": 1, "core": 1, "socket": 0, "node": 0},
    ]
    assert [each["id"] for each in detail] == list(range(16))
    pool = [
        {"socket": 0, "node": 0, "cpuset": "0-3,8-11"},
        {"socket": 1, "node": 1, "cpuset": "4-7,12-15"},
    ]
    assert found == {
        "cpu-basic-info": {
            "cpuModel": "Xeon",
            "hyperThreadEnabled": True,
            "catL3CbmMask": "fff",
            "vendorID": "GenuineIntel",
        },
        "cpu-shared-pools": pool,
        "be-cpu-shared-pools": pool,
        "cpu-manager-policy": {"policy": "none"},
        "pod-cpu-allocs": None,
        "reservation": {},
        "system-qos-resource": None,
    }


def test_our_own_reader_understands_what_is_written() -> None:
    wanted = topology(
        facts(
            kubelet=KubeletSettings("static", {"full-pcpus-only": "true"}, CpuSet.parse("0,8")),
            node=node(system_qos_resource='{"cpuset":"7"}'),
        )
    )
    read = parse_node_cpu_facts(wanted.annotations, obj="n1")
    assert [str(pool.cpus) for pool in read.shared_pools] == ["0-3,8-11", "4-6,12-15"]
    assert (read.cpu_manager_policy.policy, str(read.cpu_manager_policy.reserved_cpus)) == (
        "static",
        "0,8",
    )
    assert read.system_qos is not None
    assert read.system_qos.cpuset_exclusive


@pytest.mark.parametrize(
    ("pods", "ls", "be"),
    [
        ((pod("a", qos="LSR", cpus="0,8"),), "1-3,9-11", "0-3,8-11"),
        ((pod("a", qos="LSE", cpus="0,8"),), "1-3,9-11", "1-3,9-11"),
        ((pod("a", qos="LSE", cpus="0,8", phase="Succeeded"),), "0-3,8-11", "0-3,8-11"),
        ((pod("a", qos="LSE", cpus="0,8", phase="Failed"),), "0-3,8-11", "0-3,8-11"),
        ((pod("a", qos="LSE", cpus="zero"),), "0-3,8-11", "0-3,8-11"),
        ((pod("a", qos="LSR", cpus="0-3,8-11"),), None, "0-3,8-11"),
    ],
)
def test_allocated_cpus_leave_the_pools(pods: tuple[Pod, ...], ls: str | None, be: str) -> None:
    found = written(pods=pods)
    second = (1, 1, "4-7,12-15")
    assert shown(found["cpu-shared-pools"]) == ([(0, 0, ls)] if ls else []) + [second]
    assert shown(found["be-cpu-shared-pools"]) == [(0, 0, be), second]


def test_kubelets_exclusive_cpus_leave_the_pools_of_pods_that_koordlet_does_not_manage() -> None:
    given = {
        "kube": CpuSet.parse("1,9"),
        "ls": CpuSet.parse("2"),
        "lsr": CpuSet.parse("3"),
        "unknown": CpuSet.parse("10"),
        "empty": CpuSet(),
    }
    pods = (pod("kube"), pod("ls", qos="LS"), pod("lsr", qos="LSR", cpus="4"), pod("empty"))
    static = KubeletSettings("static")
    found = written(pods=pods, exclusive=given, kubelet=static)
    assert found["pod-cpu-allocs"] == [
        {
            "namespace": "ns",
            "name": "name-kube",
            "uid": "kube",
            "cpuset": "1,9",
            "managedByKubelet": True,
        },
        {"uid": "unknown", "cpuset": "10", "managedByKubelet": True},
    ]
    assert shown(found["cpu-shared-pools"]) == [(0, 0, "0,2-3,8,11"), (1, 1, "5-7,12-15")]
    assert shown(found["be-cpu-shared-pools"]) == [(0, 0, "0,2-3,8,11"), (1, 1, "4-7,12-15")]
    # Without the static policy an old state file means nothing.
    found = written(pods=pods[:1], exclusive=given)
    assert (found["pod-cpu-allocs"], shown(found["cpu-shared-pools"])[0][2]) == (None, "0-3,8-11")


@pytest.mark.parametrize(
    ("settings", "shown_policy"),
    [
        (None, {}),
        (KubeletSettings(), {"policy": "none"}),
        (KubeletSettings(reserved_cpus=CpuSet([0])), {"policy": "none"}),
        (KubeletSettings("static"), {"policy": "static"}),
        (
            KubeletSettings("static", {"a": "b"}, CpuSet([0, 8])),
            {"policy": "static", "options": {"a": "b"}, "reservedCPUs": "0,8"},
        ),
        (
            KubeletSettings("static", reserved_milli_cpu=1100),
            {"policy": "static", "reservedCPUs": "0,8"},
        ),
    ],
)
def test_kubelets_cpu_manager(settings: KubeletSettings | None, shown_policy: object) -> None:
    found = written(kubelet=settings)
    assert found["cpu-manager-policy"] == shown_policy
    assert shown(found["cpu-shared-pools"])[0][2] == "0-3,8-11"


@pytest.mark.parametrize(
    ("text", "reservation", "pool"),
    [
        ('{"reservedCPUs":"8,0"}', {"reservedCPUs": "0,8"}, "1-3,9-11"),
        (
            '{"resources":{"cpu":"1500m","memory":"1Gi"},"applyPolicy":"ReservedCPUsOnly"}',
            {
                "resources": {"cpu": "1500m", "memory": "1Gi"},
                "reservedCPUs": "0,8",
                "applyPolicy": "ReservedCPUsOnly",
            },
            "1-3,9-11",
        ),
        ('{"resources":{"memory":"1Gi"}}', {"resources": {"memory": "1Gi"}}, "0-3,8-11"),
        ('{"reservedCPUs":"x"}', {}, "0-3,8-11"),
    ],
)
def test_the_nodes_reservation(text: str, reservation: object, pool: str) -> None:
    found = written(node=node(reservation=text))
    assert found["reservation"] == reservation
    for key in ("cpu-shared-pools", "be-cpu-shared-pools"):
        assert shown(found[key])[0] == (0, 0, pool)


def test_a_bad_reservation_is_named_and_a_bad_system_class_raises() -> None:
    wanted = topology(facts(node=node(reservation='{"reservedCPUs":"x"}')))
    (problem,) = wanted.problems
    assert "Node n1" in problem
    assert "reservedCPUs" in problem
    with pytest.raises(InputError, match="system-qos-resource"):
        topology(facts(node=node(system_qos_resource='{"cpuset":"x"}')))


@pytest.mark.parametrize(
    ("text", "pool"),
    [
        ('{"cpuset":"0,8"}', "1-3,9-11"),
        ('{"cpuset":"0,8","cpusetExclusive":true}', "1-3,9-11"),
        ('{"cpuset":"0,8","cpusetExclusive":false}', "0-3,8-11"),
    ],
)
def test_cpus_of_the_system_class(text: str, pool: str) -> None:
    found = written(node=node(system_qos_resource=text))
    assert found["system-qos-resource"]["cpuset"] == "0,8"
    assert shown(found["cpu-shared-pools"])[0] == (0, 0, pool)


def test_a_pool_whose_cpus_are_all_set_apart_is_empty_but_there() -> None:
    found = written(node=node(reservation='{"reservedCPUs":"0-3,8-11"}'))
    assert shown(found["cpu-shared-pools"]) == [(0, 0, ""), (1, 1, "4-7,12-15")]


@pytest.mark.parametrize(
    ("policy", "scope", "expected"),
    [
        ("single-numa-node", "container", "SingleNUMANodeContainerLevel"),
        ("single-numa-node", "pod", "SingleNUMANodePodLevel"),
        ("restricted", "container", "RestrictedContainerLevel"),
        ("restricted", "pod", "RestrictedPodLevel"),
        ("best-effort", "container", "BestEffortContainerLevel"),
        ("best-effort", "pod", "BestEffortPodLevel"),
        ("none", "pod", "None"),
        ("new-one", "pod", "None"),
    ],
)
def test_topology_policies(policy: str, scope: str, expected: str) -> None:
    settings = KubeletSettings(topology_policy=policy, topology_scope=scope)
    assert topology(facts(kubelet=settings)).policies == (expected,)


@pytest.mark.parametrize(
    ("count", "cpus"),
    [
        (0, ""),
        (1, "0"),
        (2, "0,8"),
        (3, "0-1,8"),
        (8, "0-3,8-11"),
        (9, "0-4,8-11"),
        (10, "0-4,8-12"),
        (99, "0-15"),
    ],
)
def test_cpus_are_packed_by_socket_core_and_thread(count: int, cpus: str) -> None:
    assert str(packed(machine(), count)) == cpus


# --- zones ---------------------------------------------------------------------------------------


def zones(**changes: Any) -> dict[str, dict[str, tuple[str, str, str]]]:
    return {
        name: {
            each.name: (str(each.capacity), str(each.allocatable), str(each.available))
            for each in resources
        }
        for name, resources in topology(facts(**changes)).zones
    }


def test_zones_of_a_machine() -> None:
    resources = {
        "cpu": ("8", "8", "8"),
        "hugepages-1Gi": ("0", "0", "0"),
        "hugepages-2Mi": ("0", "0", "0"),
        "memory": ("32Gi", "32Gi", "32Gi"),
    }
    assert zones() == {"node-0": resources, "node-1": resources}


def test_what_the_node_keeps_is_taken_from_the_zones_in_equal_parts() -> None:
    reduced = NodeMeta(
        "n1",
        labels={f"{KEY}enable-numa-reservation": "true"},
        capacity={"cpu": 16000, "memory": 64 * GIB},
        allocatable={"cpu": 15500, "memory": 61 * GIB},
    )
    found = zones(node=reduced)["node-1"]
    assert found["cpu"] == ("8", "7750m", "7750m")
    assert found["memory"] == ("32Gi", "31232Mi", "31232Mi")
    assert topology(facts(node=reduced)).labels == {f"{KEY}enable-numa-reservation": "true"}


def test_an_amplified_node_keeps_as_much_as_it_would_otherwise() -> None:
    amplified = NodeMeta(
        "n1",
        labels={f"{KEY}enable-numa-reservation": "true"},
        annotations={f"{KEY}raw-allocatable": '{"cpu":"15500m"}'},
        capacity={"cpu": 16000},
        allocatable={"cpu": 23250},
    )
    assert zones(node=amplified)["node-1"]["cpu"] == ("8", "7750m", "7750m")


def test_a_bad_raw_allocatable_is_named_and_the_offered_amounts_stand_in() -> None:
    bad = NodeMeta(
        "n1",
        labels={f"{KEY}enable-numa-reservation": "true"},
        annotations={f"{KEY}raw-allocatable": '{"cpu":"many"}'},
        capacity={"cpu": 16000},
        allocatable={"cpu": 15500},
    )
    assert zones(node=bad)["node-1"]["cpu"] == ("8", "7750m", "7750m")
    (problem,) = topology(facts(node=bad)).problems
    assert "raw-allocatable" in problem and "many" in problem


def test_huge_pages_are_reported_with_their_gate_and_leave_the_memory() -> None:
    memory = {0: NumaMemory(32 * GIB, {"2Mi": GIB, "1Gi": 4 * GIB})}
    with_gate = zones(cpus=machine(1), memory=memory, huge_pages=True)["node-0"]
    assert with_gate["hugepages-2Mi"][1] == "1Gi"
    assert with_gate["hugepages-1Gi"][1] == "4Gi"
    assert with_gate["memory"][1] == "27Gi"
    assert zones(cpus=machine(1), memory=memory)["node-0"]["memory"][1] == "32Gi"


def test_sparse_memory_only_and_empty_numa_nodes() -> None:
    """Numbers may have gaps, a node may have memory alone, and a device's node has neither."""
    memory = {
        2: NumaMemory(32 * GIB, PAGES),
        10: NumaMemory(64 * GIB, PAGES),
        11: NumaMemory(0, PAGES),
    }
    reduced = NodeMeta(
        "n1",
        labels={f"{KEY}enable-numa-reservation": "true"},
        capacity={"cpu": 8000, "memory": 96 * GIB},
        allocatable={"cpu": 7000, "memory": 94 * GIB},
    )
    found = zones(cpus=machine(1, first_node=2), memory=memory, node=reduced)
    assert list(found) == ["node-2", "node-10"]
    assert found["node-2"]["cpu"] == ("8", "7", "7")
    assert found["node-10"]["cpu"] == ("0", "0", "0")
    assert found["node-10"]["memory"] == ("64Gi", "63Gi", "63Gi")


# --- the object ----------------------------------------------------------------------------------


def as_json(tree: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(tree))


def test_a_new_object_is_owned_by_its_node() -> None:
    made = as_json(merged(new_object("n1", "uid-1"), topology(facts())))
    assert made["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "Koordinator"}
    (owner,) = made["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "v1",
        "kind": "Node",
        "name": "n1",
        "uid": "uid-1",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    assert made["topologyPolicies"] == ["None"]
    assert [zone["name"] for zone in made["zones"]] == ["node-0", "node-1"]


def test_merging_twice_changes_nothing() -> None:
    once = as_json(merged(new_object("n1", "u"), topology(facts())))
    assert as_json(merged(once, topology(facts()))) == once


def test_what_others_wrote_stays_and_zones_that_are_gone_go() -> None:
    stored = as_json(merged(new_object("n1", "u"), topology(facts())))
    stored["metadata"]["annotations"]["example.com/a"] = "b"
    stored["metadata"]["labels"]["team"] = "x"
    batch = {
        "name": "kubernetes.io/batch-cpu",
        "capacity": "1",
        "allocatable": "1",
        "available": "1",
    }
    stored["zones"][0]["resources"].insert(0, batch)
    stored["zones"][0]["costs"] = [{"name": "node-0", "value": 10}]
    stored["zones"].append({"name": "node-7", "type": "Node", "resources": []})
    again = as_json(merged(stored, topology(facts())))
    del stored["zones"][2]
    assert again == stored


def test_capacity_and_allocatable_stay_apart_in_the_object() -> None:
    reduced = NodeMeta(
        "n1",
        labels={f"{KEY}enable-numa-reservation": "true"},
        capacity={"cpu": 16000},
        allocatable={"cpu": 15500},
    )
    stored = as_json(merged(new_object("n1", "u"), topology(facts())))
    again = as_json(merged(stored, topology(facts(node=reduced))))
    (cpu,) = [each for each in again["zones"][0]["resources"] if each["name"] == "cpu"]
    assert cpu == {"name": "cpu", "capacity": "8", "allocatable": "7750m", "available": "7750m"}


def test_an_annotation_that_says_the_same_in_other_words_stays() -> None:
    stored = as_json(merged(new_object("n1", "u"), topology(facts())))
    key = f"{KEY}cpu-shared-pools"
    stored["metadata"]["annotations"][key] = json.dumps(
        json.loads(stored["metadata"]["annotations"][key]), indent=2
    )
    assert as_json(merged(stored, topology(facts()))) == stored


_CPUS = st.sets(st.integers(0, 20)).map(CpuSet)
_POD = st.builds(
    pod,
    st.uuids().map(str),
    qos=st.sampled_from(["", "LSE", "LSR", "LS", "BE", "SYSTEM"]),
    cpus=_CPUS.map(str),
    phase=st.sampled_from(["Running", "Pending", "Succeeded"]),
)


@given(st.lists(_POD, max_size=8), _CPUS, st.dictionaries(st.uuids().map(str), _CPUS, max_size=4))
def test_pools_hold_only_cpus_of_the_machine_without_another_owner(
    pods: list[Pod], set_apart: CpuSet, exclusive: dict[str, CpuSet]
) -> None:
    cpus = machine()
    found = pools(cpus, pods, exclusive=exclusive, set_apart=set_apart)
    everything = CpuSet(cpu.cpu for cpu in cpus)
    given_away = CpuSet.union(exclusive.values())
    for each in (found.ls, found.be):
        pool = CpuSet.union(part.cpus for part in each)
        assert pool <= everything
        assert not pool & set_apart
        assert not pool & given_away
        assert sum(len(part.cpus) for part in each) == len(pool)
    assert CpuSet.union(p.cpus for p in found.ls) <= CpuSet.union(p.cpus for p in found.be)
