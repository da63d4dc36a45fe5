"""NodeSLO: sparse objects over defaults, and every unusable field named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.effective_nodeslo import decode_nodeslo, default_nodeslo, overlay
from apis.errors import InputErrors
from apis.nodeslo import (
    CPUQOS,
    CgroupBase,
    CPUBurstPolicy,
    CPUEvictPolicy,
    CPUSuppressPolicy,
    MemoryQOS,
    ResctrlQOS,
    bandwidth_bits,
)
from apis.qos import QoSClass
from apis.quantity import parse_quantity


def test_without_an_object_the_default_table_holds() -> None:
    spec = default_nodeslo()
    threshold = spec.resource_used_threshold_with_be
    assert threshold.enable is False
    assert threshold.cpu_suppress_threshold_percent == 65
    assert threshold.cpu_suppress_policy is CPUSuppressPolicy.CPUSET
    assert threshold.memory_evict_threshold_percent == 70
    assert threshold.memory_evict_lower_percent is None
    assert threshold.cpu_evict_policy is CPUEvictPolicy.BY_REAL_LIMIT
    burst = spec.cpu_burst_strategy
    assert (burst.policy, burst.cpu_burst_percent, burst.cfs_quota_burst_percent) == (
        CPUBurstPolicy.NONE,
        1000,
        300,
    )
    assert (burst.cfs_quota_burst_period_seconds, burst.share_pool_threshold_percent) == (-1, 50)
    assert spec.system_strategy.min_free_kbytes_factor is None
    assert spec.system_strategy.total_network_bandwidth == parse_quantity(0)


ON = {"enable": True}


@pytest.mark.parametrize(
    ("member", "qos", "expected"),
    [
        ("lsrClass", QoSClass.LSE, (2, True, 95, 20, -25, 100)),
        ("lsrClass", QoSClass.LSR, (2, True, 95, 20, -25, 100)),
        ("lsClass", QoSClass.LS, (2, True, 95, 20, -25, 100)),
        ("beClass", QoSClass.BE, (-1, False, 95, 20, 50, 30)),
        ("systemClass", QoSClass.SYSTEM, (0, False, 0, 50, 0, 100)),
    ],
)
def test_a_block_that_is_on_takes_its_classes_defaults(
    member: str, qos: QoSClass, expected: tuple[Any, ...]
) -> None:
    block = {"cpuQOS": ON, "memoryQOS": ON, "resctrlQOS": ON}
    spec = decode_nodeslo({"resourceQOSStrategy": {member: block}}, obj="NodeSLO n1")
    got = spec.resource_qos_strategy.of(qos)
    assert got is not None
    assert (
        got.cpu_qos.group_identity,
        got.cpu_qos.core_expeller,
        got.memory_qos.wmark_ratio,
        got.memory_qos.wmark_scale_permill,
        got.memory_qos.wmark_min_adj,
        got.resctrl_qos.cat_range_end_percent,
    ) == expected


def test_a_block_that_is_off_becomes_the_values_that_undo_it() -> None:
    block = {
        "cpuQOS": {"enable": False, "groupIdentity": 2},
        "memoryQOS": {"wmarkRatio": 80, "pageCacheEnable": True},
        "resctrlQOS": {"enable": False, "catRangeEndPercent": 10},
        "networkQOS": {"egressLimit": 20},
    }
    spec = decode_nodeslo({"resourceQOSStrategy": {"beClass": block}}, obj="NodeSLO n1")
    got = spec.resource_qos_strategy.be_class
    assert (got.cpu_qos, got.memory_qos, got.resctrl_qos) == (CPUQOS(), MemoryQOS(), ResctrlQOS())
    # Network and block I/O are judged by their consumers.
    assert got.network_qos.egress_limit == 20
    system = decode_nodeslo(
        {"resourceQOSStrategy": {"systemClass": {"cpuQOS": {"groupIdentity": 1}}}}, obj="n"
    )
    assert system.resource_qos_strategy.system_class.cpu_qos.group_identity == 1


def test_null_and_absent_mean_default_and_zero_and_false_do_not() -> None:
    spec = decode_nodeslo(
        b'{"spec":{"resourceUsedThresholdWithBE":{"enable":null,"cpuSuppressThresholdPercent":0},'
        b'"cpuBurstStrategy":null,"unknown":{"x":1}}}',
        obj="NodeSLO n1",
    )
    assert spec.resource_used_threshold_with_be.enable is False
    assert spec.resource_used_threshold_with_be.cpu_suppress_threshold_percent == 0
    assert spec.cpu_burst_strategy.cpu_burst_percent == 1000


def test_an_empty_choice_is_the_default_as_upstream_reads_it() -> None:
    empty = {
        "resourceUsedThresholdWithBE": {"cpuSuppressPolicy": "", "cpuEvictPolicy": ""},
        "resourceQOSStrategy": {"policies": {"cpuPolicy": "", "netQOSPolicy": ""}},
        "cpuBurstStrategy": {"policy": ""},
    }
    assert decode_nodeslo(empty, obj="NodeSLO n1") == default_nodeslo()
    place = {"base": "", "relativePath": "yarn"}
    spec = decode_nodeslo({"hostApplications": [{"cgroupPath": place}]}, obj="NodeSLO n1")
    path = spec.host_applications[0].cgroup_path
    assert path is not None and path.base is CgroupBase.CGROUP_ROOT


def test_every_unusable_field_is_named_at_once() -> None:
    bad = {
        "resourceUsedThresholdWithBE": {
            "cpuSuppressThresholdPercent": 101,
            "cpuSuppressPolicy": "cpusets",
        },
        "systemStrategy": {"totalNetworkBandwidth": "1x"},
        "hostApplications": [
            {"name": "fine"},
            {"name": 3, "cgroupPath": {"relativePath": "../../etc"}},
        ],
        "resourceQOSStrategy": {"lsClass": {"networkQOS": {"egressLimit": 300}}},
    }
    with pytest.raises(InputErrors) as caught:
        decode_nodeslo(json.dumps({"spec": bad}), obj="NodeSLO n1")
    named = {error.field: error.problem for error in caught.value.errors}
    assert set(named) == {
        "spec.resourceUsedThresholdWithBE.cpuSuppressThresholdPercent",
        "spec.resourceUsedThresholdWithBE.cpuSuppressPolicy",
        "spec.systemStrategy.totalNetworkBandwidth",
        "spec.hostApplications[1].name",
        "spec.hostApplications[1].cgroupPath.relativePath",
        "spec.resourceQOSStrategy.lsClass.networkQOS.egressLimit",
    }
    assert all(error.obj == "NodeSLO n1" for error in caught.value.errors)


@pytest.mark.parametrize(
    "text",
    [b"", b"[", b"[]", b'"x"', b'{"spec":[]}', b"\xff", b"[" * 100_000, b'{"a":' * 3000],
)
def test_what_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(InputErrors):
        decode_nodeslo(text, obj="NodeSLO n1")


@pytest.mark.parametrize(
    "path", ["..", "a/../b", "a/./b", "a\0b", "a\nb", "x" * 3000, f"a/{'y' * 300}"]
)
def test_a_host_applications_path_cannot_leave_its_base(path: str) -> None:
    application = {"name": "a", "cgroupPath": {"base": "CgroupRoot", "parentDir": path}}
    with pytest.raises(InputErrors, match="parentDir"):
        decode_nodeslo({"hostApplications": [application]}, obj="NodeSLO n1")


def test_rates_are_percents_or_bits() -> None:
    assert bandwidth_bits(30, total_bits=1000) == 300
    assert bandwidth_bits("50M", total_bits=1) == 50_000_000
    for wrong in (101, -1, "x", "-1"):
        with pytest.raises(ValueError, match=r"bandwidth|quantity"):
            bandwidth_bits(wrong, total_bits=1)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=10,
)


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "spec",
                "hostApplications",
                "systemStrategy",
                "resourceQOSStrategy",
                "cpuBurstStrategy",
            ]
        ),
        PLAIN,
    )
)
def test_any_json_decodes_or_raises_input_errors(plain: dict[str, Any]) -> None:
    try:
        decode_nodeslo(plain, obj="NodeSLO n1")
    except InputErrors as error:
        assert error.errors


@settings(max_examples=60)
@given(st.dictionaries(st.text(max_size=3), PLAIN), st.dictionaries(st.text(max_size=3), PLAIN))
def test_overlaying_twice_is_overlaying_once(below: dict[str, Any], above: dict[str, Any]) -> None:
    once = overlay(below, above)
    assert overlay(once, above) == once
