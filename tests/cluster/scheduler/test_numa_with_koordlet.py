"""What the scheduler records is put into force by koordlet's hooks, and read back as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_BE_CPU_SHARED_POOLS,
    ANNOTATION_CPU_SHARED_POOLS,
    ANNOTATION_RESOURCE_STATUS,
    LABEL_NUMA_TOPOLOGY_POLICY,
)
from apis.qos import KubeQoS
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.numa_record import recorded_allocation, resource_status
from hooks.policies.cpuset_allocator import POLICY
from linux.resources import UNLIMITED, Resource
from tests.cluster.scheduler.numa_making import SMALL, SMALL_ZONES, NumaCluster, make_topology
from tests.hooks.making import a_container, a_pod, decide, node, topology, values

POOLS = topology(
    {
        ANNOTATION_CPU_SHARED_POOLS: [
            {"socket": 0, "node": 0, "cpuset": "0-7"},
            {"socket": 1, "node": 1, "cpuset": "8-15"},
        ],
        ANNOTATION_BE_CPU_SHARED_POOLS: [
            {"socket": 0, "node": 0, "cpuset": "0-7"},
            {"socket": 1, "node": 1, "cpuset": "8-15"},
        ],
    }
)


@pytest.mark.parametrize(
    ("qos", "requests", "numa_policy", "cpus"),
    [
        ("LSR", {"cpu": "4", "memory": "1Gi"}, "", "0-3"),
        ("LSE", {"cpu": "10"}, "", "0-9"),
        ("LSR", {"cpu": "4", "memory": "1Gi"}, "SingleNUMANode", "0-3"),
        ("LS", {"cpu": "4", "memory": "1Gi"}, "SingleNUMANode", "0-7"),
        ("LS", {"cpu": "10"}, "BestEffort", "0-15"),
    ],
)
def test_a_container_runs_on_the_cpus_that_were_allocated(
    qos: str, requests: dict[str, str], numa_policy: str, cpus: str
) -> None:
    cluster = NumaCluster()
    labels = {LABEL_NUMA_TOPOLOGY_POLICY: numa_policy} if numa_policy else {}
    made = make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES)
    cluster.add_node("n", made, labels=labels)
    shape = cluster.shape(requests, qos=qos)
    given_part = cluster.allocate(shape, "n")
    assert isinstance(given_part, Allocation)
    booking = cluster.place(shape, "n", cpus=str(given_part.cpus), numa=given_part.numa)
    recorded = cluster.plugin.record(booking, cluster.tables).annotations
    status = recorded[ANNOTATION_RESOURCE_STATUS]
    assert status is not None

    pod = a_pod(qos, KubeQoS.GUARANTEED, annotations={ANNOTATION_RESOURCE_STATUS: status})
    decision = decide(a_container(pod), node(topology=POOLS), POLICY)
    assert values(decision)[Resource.CPUSET_CPUS.value] == CpuSet.parse(cpus)
    if given_part.cpus:
        assert values(decision)[Resource.CPU_CFS_QUOTA.value] == UNLIMITED

    read = recorded_allocation({ANNOTATION_RESOURCE_STATUS: status}, obj="Pod default/p")
    assert read == (given_part.cpus, given_part.numa)


amounts = st.dictionaries(
    st.sampled_from(["cpu", "memory", "hugepages-2Mi", "kubernetes.io/batch-cpu"]),
    st.integers(0, 2**52),
)


@given(
    st.sets(st.integers(0, 511)),
    st.dictionaries(st.integers(0, 1023), amounts, max_size=8),
)
def test_a_record_reads_back_as_it_was(cpus: set[int], numa: dict[int, dict[str, int]]) -> None:
    by_id = tuple(sorted(numa.items()))
    text = resource_status(CpuSet(cpus), by_id)
    read = recorded_allocation({ANNOTATION_RESOURCE_STATUS: text}, obj="Pod default/p")
    assert read == (CpuSet(cpus), by_id)


@pytest.mark.parametrize(
    ("text", "cpus", "numa"),
    [
        ("{}", "", ()),
        ('{"cpuset":"0-1","numaNodeResources":null}', "0-1", ()),
        (
            '{"numaNodeResources":[{"node":1,"resources":{"cpu":"1500m"}},'
            '{"node":1,"resources":{"cpu":"1","memory":"-1Gi"}}]}',
            "",
            ((1, {"cpu": 2500, "memory": 0}),),
        ),
        (
            '{"numaNodeResources":[{"node":0,"resources":{"memory":"9E"}}]}',
            "",
            ((0, {"memory": 2**52}),),
        ),
    ],
)
def test_records_of_others(text: str, cpus: str, numa: object) -> None:
    read = recorded_allocation({ANNOTATION_RESOURCE_STATUS: text}, obj="Pod default/p")
    assert read == (CpuSet.parse(cpus), numa)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"cpuset":"0-99999"}', "cpuset"),
        ('{"numaNodeResources":[{"node":-1}]}', "node"),
        ('{"numaNodeResources":[{"node":0,"resources":{"cpu":"x"}}]}', "resources.cpu"),
        ("[" * 100_000, "resource-status"),
    ],
)
def test_a_bad_record_is_named(text: str, field: str) -> None:
    with pytest.raises(InputError, match=field):
        recorded_allocation({ANNOTATION_RESOURCE_STATUS: text}, obj="Pod default/p")
