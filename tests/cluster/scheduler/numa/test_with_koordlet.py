"""What the scheduler records is put into force by koordlet's hooks, and read back as it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.annotations import parse_resource_status
from apis.cpuset import CpuSet
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_BE_CPU_SHARED_POOLS,
    ANNOTATION_CPU_SHARED_POOLS,
    ANNOTATION_RESOURCE_STATUS,
    LABEL_NUMA_TOPOLOGY_POLICY,
    LABEL_QOS_CLASS,
)
from apis.qos import KubeQoS
from cluster.scheduler.cycle.scheduling import Placed, Scheduling
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.numa.record import recorded_allocation, resource_status
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from hooks.policies.cpuset_allocator import POLICY
from linux.resources import UNLIMITED, Resource
from tests.cluster.scheduler.configuration.files import chart_file, load
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, NumaCluster, make_topology
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


def test_pods_of_a_whole_profile_get_cores_of_their_own() -> None:
    """Through the whole decision: 20 LSE pods of 2 CPUs on two machines of 16; 16 fit."""
    tables = Tables()
    plugins = make_plugins(load(chart_file()), tables)
    for name in ("n1", "n2"):
        row = tables.upsert_node(make_node(name))
        made = make_topology(name, cpus=SMALL.cpus(), zones=SMALL_ZONES)
        plugins.numa.set_node(row, parse_numa_facts(make_node(name), made)[0])
    profile = next(iter(plugins.profiles))
    scheduling = Scheduling(tables, plugins.profiles, seed=1)
    shapes = Shapes()
    cores: set[tuple[str, int]] = set()
    placed = 0
    for number in range(20):
        pod = make_pod(
            f"p{number}",
            requests={"cpu": "2"},
            limits={"cpu": "2"},
            labels={LABEL_QOS_CLASS: "LSE"},
        )
        result = scheduling.schedule(
            key=f"default/p{number}",
            uid=f"u{number}",
            shape=shapes.of(pod),
            profile=profile,
            now=0.0,
        )
        if not isinstance(result, Placed):
            continue
        placed += 1
        text = result.recorded.annotations[ANNOTATION_RESOURCE_STATUS]
        assert text is not None
        cpus = parse_resource_status(text, obj="Pod").cpus
        mine = {(result.booking.node, cpu // 2) for cpu in cpus}
        assert len(mine) == 1 and not mine & cores
        cores |= mine
    assert placed == 16


@pytest.mark.parametrize(
    ("name", "amount", "text"),
    [
        ("cpu", 1500, "1500m"),
        ("memory", 2**30, "1Gi"),
        ("hugepages-2Mi", 2**21, "2Mi"),
        ("kubernetes.io/batch-memory", 2**30, "1Gi"),
        ("koordinator.sh/gpu-memory", 2**20, "1Mi"),
        ("kubernetes.io/batch-cpu", 2048, "2048"),
    ],
)
def test_amounts_are_recorded_in_the_notation_of_their_resource(
    name: str, amount: int, text: str
) -> None:
    status = json.loads(resource_status(CpuSet.parse("0"), ((0, {name: amount}),)))
    assert status["numaNodeResources"] == [{"node": 0, "resources": {name: text}}]
