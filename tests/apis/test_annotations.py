"""Annotations that a node reads: typed values, or errors that name pod, key and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis import annotations as a
from apis.cpuset import CpuSet
from apis.device import parse_device_allocated
from apis.errors import InputError, InputErrors
from apis.quantity import parse_quantity
from apis.topology import (
    CPUManagerPolicy,
    NodeReservation,
    parse_cpu_manager_policy,
    parse_cpu_shared_pools,
    parse_node_cpu_facts,
    parse_node_reservation,
    parse_pod_cpu_allocs,
    parse_system_qos_resource,
)

POD = "Pod default/web"


def test_resource_status_gives_cpus_and_numa_shares() -> None:
    got = a.parse_resource_status(
        '{"cpuset":"8,0-2,3","numaNodeResources":[{"node":0,"resources":'
        '{"cpu":"4","kubernetes.io/batch-cpu":"2k"}}]}',
        obj=POD,
    )
    assert got.cpus == CpuSet({0, 1, 2, 3, 8})
    assert got.numa_node_resources[0].resources["kubernetes.io/batch-cpu"].value() == 2000
    assert a.parse_resource_status("{}", obj=POD).cpus == CpuSet()


@pytest.mark.parametrize(
    ("parse", "text", "field"),
    [
        (a.parse_resource_status, '{"cpuset":"3-1"}', 'resource-status"].cpuset'),
        (a.parse_resource_status, '{"cpuset":"0-99999"}', 'resource-status"].cpuset'),
        (a.parse_resource_status, '{"cpuset":"0;rm"}', 'resource-status"].cpuset'),
        (a.parse_cpu_qos, '{"groupIdentity":3}', 'cpuQOS"].groupIdentity'),
        (a.parse_cpu_qos, "{", 'cpuQOS"]'),
        (a.parse_memory_qos, '{"policy":"never"}', 'memoryQOS"].policy'),
        (a.parse_memory_qos, '{"wmarkRatio":101}', 'memoryQOS"].wmarkRatio'),
        (a.parse_cpu_burst, '{"policy":"Auto"}', 'cpuBurst"].policy'),
        (a.parse_blkio_qos, '{"blocks":[{"name":"x","type":"disk"}]}', "blocks[0].type"),
        (a.parse_network_qos, '{"egressLimit":"-1"}', 'networkQOS"].egressLimit'),
        (a.parse_resctrl, '{"llc":{"schemata":{"range":[30]}}}', "llc.schemata.range"),
        (a.parse_resctrl, '{"mb":{"schemata":{"percent":200}}}', "mb.schemata.percent"),
        (a.parse_oom_score_adj, "1001", 'oom-score-adj"]'),
        (a.parse_oom_score_adj, "1e3", 'oom-score-adj"]'),
        (a.parse_oom_score_adj_spec, "[5]", 'oom-score-adj-spec"]'),
        (a.parse_eviction_policy, '{"a":1}', 'eviction-policy"]'),
        (a.parse_eviction_priority, "2147483648", 'eviction-priority"]'),
        (
            a.parse_extended_resource_spec,
            '{"containers":{"c":{"limits":{"x":"1z"}}}}',
            "containers.c.limits.x",
        ),
        (a.parse_cpu_normalization_ratio, "0", 'cpu-normalization-ratio"]'),
        (a.parse_cpu_normalization_ratio, "nan", 'cpu-normalization-ratio"]'),
        (parse_device_allocated, '{"gpu":[{"minor":-1}]}', "gpu[0].minor"),
        (parse_cpu_shared_pools, '[{"cpuset":"x"}]', "[0].cpuset"),
        (parse_system_qos_resource, '{"cpuset":7}', 'system-qos-resource"].cpuset'),
    ],
)
def test_a_bad_value_is_named(parse: Callable[..., Any], text: str, field: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, obj=POD)
    assert caught.value.obj == POD
    assert caught.value.field.endswith(field)
    assert len(str(caught.value)) < 600


def test_a_text_beyond_all_annotations_of_an_object_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        a.parse_cpu_qos(" " * (256 * 1024) + "{}", obj=POD)
    assert caught.value.problem == "longer than 262144 bytes"
    assert len(str(caught.value)) < 600


def test_without_their_annotations_a_node_reserves_nothing_and_has_no_policy() -> None:
    assert parse_node_reservation("null", obj=POD) == NodeReservation()
    assert parse_cpu_manager_policy("null", obj=POD) == CPUManagerPolicy()
    resources = {"cpu": parse_quantity("1"), "memory": parse_quantity("1Gi")}
    amounts = parse_node_reservation('{"resources":{"cpu":"1","memory":"1Gi"}}', obj=POD).amounts()
    assert amounts == resources


def test_the_same_error_names_the_pod_that_has_it() -> None:
    for name in ("Pod a/b", "Pod c/d"):
        with pytest.raises(InputError, match=name):
            a.parse_cpu_qos('{"schedIdle":2}', obj=name)


def test_pod_settings_keep_what_they_do_not_say() -> None:
    cpu = a.parse_cpu_qos('{"groupIdentity":-1}', obj=POD)
    assert (cpu.group_identity, cpu.enable, cpu.core_expeller) == (-1, None, None)
    memory = a.parse_memory_qos('{"policy":"","minLimitPercent":100}', obj=POD)
    assert (memory.policy, memory.min_limit_percent) == (a.PodMemoryQOSPolicy.DEFAULT, 100)
    limits = a.parse_network_qos('{"ingressLimit":"10M","egressLimit":"0"}', obj=POD)
    assert (limits.ingress_limit_bits, limits.egress_limit_bits) == (10_000_000, None)
    scores = a.parse_oom_score_adj_spec('{"main":-500,"sidecar":2000,"gone":null}', obj=POD)
    assert (scores["main"], set(scores)) == (-500, {"main", "sidecar"})
    refused = scores["sidecar"]
    assert isinstance(refused, InputError) and refused.field.endswith(
        'oom-score-adj-spec"].sidecar'
    )
    assert a.parse_oom_score_adj("-500", obj=POD) == -500


def test_device_allocations_keep_their_order_and_their_vfs() -> None:
    got = parse_device_allocated(
        '{"gpu":[{"minor":3},{"minor":0,"id":"GPU-1"}],"rdma":[{"minor":0,"id":"0000:09:00.0",'
        '"extension":{"vfs":[{"minor":1,"busID":"0000:09:00.3"}]}}]}',
        obj=POD,
    )
    assert [device.minor for device in got["gpu"]] == [3, 0]
    extension = got["rdma"][0].extension
    assert extension is not None
    assert extension.vfs[0].bus_id == "0000:09:00.3"
    assert parse_device_allocated("null", obj=POD) == {}


def test_topology_annotations_parse_together_and_name_all_bad_ones() -> None:
    facts = parse_node_cpu_facts(
        {
            "node.koordinator.sh/cpu-shared-pools": '[{"socket":0,"node":0,"cpuset":"0-3,4"}]',
            "node.koordinator.sh/be-cpu-shared-pools": "null",
            "kubelet.koordinator.sh/cpu-manager-policy": '{"policy":"static","reservedCPUs":"1,0"}',
            "node.koordinator.sh/system-qos-resource": '{"cpuset":"7"}',
        },
        obj="NodeResourceTopology n1",
    )
    assert [(pool.node, str(pool.cpus)) for pool in facts.shared_pools] == [(0, "0-4")]
    assert facts.be_shared_pools == ()
    assert facts.cpu_manager_policy.policy == "static"
    assert str(facts.cpu_manager_policy.reserved_cpus) == "0-1"
    assert facts.system_qos is not None
    assert facts.system_qos.cpuset_exclusive is True
    assert parse_node_cpu_facts({}, obj="n").system_qos is None
    with pytest.raises(InputErrors) as caught:
        parse_node_cpu_facts(
            {
                "node.koordinator.sh/cpu-shared-pools": "{}",
                "kubelet.koordinator.sh/cpu-manager-policy": "[]",
            },
            obj="NodeResourceTopology n1",
        )
    assert len(caught.value.errors) == 2


def test_reserved_cpus_replace_the_reserved_amount() -> None:
    got = parse_node_reservation(
        '{"resources":{"cpu":"1","memory":"1Gi"},"reservedCPUs":"0-5"}', obj="Node n1"
    )
    assert {name: str(amount) for name, amount in got.amounts().items()} == {
        "cpu": "6",
        "memory": "1Gi",
    }
    assert parse_pod_cpu_allocs("null", obj="n") == ()
    assert parse_cpu_manager_policy("{}", obj="n").policy == ""


@pytest.mark.parametrize(
    ("value", "expected"), [("", 0), ("5500", 5500), ("0x10", 16), ("010", 8), ("-1", -1)]
)
def test_the_sub_priority_reads_as_upstream_reads_it(value: str, expected: int) -> None:
    assert a.parse_sub_priority({"koordinator.sh/priority": value}, obj=POD) == expected
    with pytest.raises(InputError):
        a.parse_sub_priority({"koordinator.sh/priority": "2147483648"}, obj=POD)
    for edge in (-(2**31), 2**31 - 1):
        assert a.parse_sub_priority({"koordinator.sh/priority": str(edge)}, obj=POD) == edge
    with pytest.raises(InputError, match="32-bit"):
        a.parse_sub_priority({"koordinator.sh/priority": str(-(2**31) - 1)}, obj=POD)


def test_core_scheduling_labels() -> None:
    key = "koordinator.sh/core-sched-policy"
    assert a.core_sched_policy({key: "exclusive"}) is a.CoreSchedPolicy.EXCLUSIVE
    assert a.core_sched_policy({key: "what"}) is a.CoreSchedPolicy.DEFAULT
    assert a.core_sched_group_id({}) == ""


@settings(max_examples=100)
@given(st.frozensets(st.integers(0, 300)))
def test_cpu_lists_read_back(cpus: frozenset[int]) -> None:
    assert set(CpuSet.parse(str(CpuSet(cpus)))) == cpus


PARSERS = [
    getattr(a, name)
    for name in sorted(dir(a))
    if name.startswith("parse_") and name != "parse_sub_priority"
]


@settings(max_examples=100)
@given(st.sampled_from(PARSERS), st.text(max_size=30) | st.from_regex(r"\{.{0,30}\}"))
def test_any_text_parses_or_raises_an_input_error(parse: Callable[..., Any], text: str) -> None:
    try:
        parse(text, obj=POD)
    except InputError as error:
        assert error.obj == POD
