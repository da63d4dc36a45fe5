"""slo-controller-config at admission: every bound, from both sides."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apis.core import Node
from cluster.webhook.configmap import ConfigMapAdmission, strategy_problems
from tests.cluster.admission import convert


def refused(member: str, strategy: dict[str, Any], bandwidth: str = "0") -> list[str]:
    return [field for field, _ in strategy_problems(member, strategy, bandwidth)]


@pytest.mark.parametrize(
    ("member", "field", "least", "most"),
    [
        ("colocation", "resourceDiffThreshold", None, 1.0),
        ("colocation", "midStaticCPUReservedPercent", 0, 100),
        ("colocation", "midStaticMemoryReservedPercent", 0, 100),
        ("threshold", "cpuEvictTimeWindowSeconds", 1, None),
        ("threshold", "allocatableEvictPriorityThreshold", 0, 7999),
        ("cpu_burst", "cpuBurstPercent", 1, 10000),
        ("cpu_burst", "cfsQuotaBurstPercent", 100, None),
        ("cpu_burst", "cfsQuotaBurstPeriodSeconds", -1, None),
        ("cpu_burst", "sharePoolThresholdPercent", 0, 100),
        ("cpu_normalization", "defaultRatio", 1.0, 5.0),
        ("system", "minFreeKbytesFactor", 1, None),
        ("system", "watermarkScaleFactor", 1, 400),
        ("system", "memcgReapBackGround", 0, 1),
        ("system", "pageCacheLimitEnabled", 0, 1),
    ],
)
def test_a_value_lies_between_its_bounds(member: str, field: str, least: Any, most: Any) -> None:
    step = 0.01 if isinstance(least or most, float) else 1
    for bound, outside in ((least, -step), (most, step)):
        if bound is not None:
            assert refused(member, {field: bound}) == []
            assert refused(member, {field: bound + outside}) == [field]
    # What has no bound there may be anything.
    assert least is not None or refused(member, {field: -1e9}) == []
    assert most is not None or refused(member, {field: 10**9}) == []


@pytest.mark.parametrize("name", ["lsrClass", "lsClass", "beClass", "systemClass", "cgroupRoot"])
@pytest.mark.parametrize("field", ["minLimitPercent", "lowLimitPercent", "throttlingPercent"])
def test_memory_of_every_class_is_a_percentage(name: str, field: str) -> None:
    for value, problems in ((0, 0), (100, 0), (-1, 1), (101, 1)):
        got = refused("resource_qos", {name: {"memoryQOS": {field: value}}})
        assert got == [f"{name}.memoryQOS.{field}"] * problems


@pytest.mark.parametrize(
    ("cache", "fits"),
    [
        ({}, True),
        ({"catRangeStartPercent": 99}, True),
        ({"catRangeStartPercent": 100}, False),
        ({"catRangeEndPercent": 1}, True),
        ({"catRangeEndPercent": 0}, False),
        ({"catRangeStartPercent": 30, "catRangeEndPercent": 31}, True),
        ({"catRangeStartPercent": 30, "catRangeEndPercent": 30}, False),
    ],
)
def test_a_cache_range_is_not_empty(cache: dict[str, int], fits: bool) -> None:
    got = refused("resource_qos", {"beClass": {"resctrlQOS": cache}})
    assert got == ([] if fits else ["beClass.resctrlQOS.catRangeStartPercent"])


@pytest.mark.parametrize(
    ("lower", "upper", "defaulted"),
    [
        ("memoryEvictLowerPercent", "memoryEvictThresholdPercent", True),
        ("cpuEvictLowerPercent", "cpuEvictThresholdPercent", True),
        (
            "memoryAllocatableEvictLowerPercent",
            "memoryAllocatableEvictThresholdPercent",
            False,
        ),
        ("cpuEvictBESatisfactionLowerPercent", "cpuEvictBESatisfactionUpperPercent", False),
        ("cpuAllocatableEvictLowerPercent", "cpuAllocatableEvictThresholdPercent", False),
    ],
)
def test_a_pair_is_in_order_and_complete(lower: str, upper: str, defaulted: bool) -> None:
    alone = [] if defaulted else [lower]
    assert refused("threshold", {lower: 10, upper: 11}) == []
    assert refused("threshold", {lower: 10, upper: 10}) == [lower]
    assert refused("threshold", {lower: 10}) == alone
    assert refused("threshold", {upper: 10}) == alone
    assert refused("threshold", {}) == []


@pytest.mark.parametrize(
    ("ratios", "fits"),
    [({"cpu": 0}, True), ({"cpu": 1000}, True), ({"cpu": -0.01}, False), ({"x": 1000.5}, False)],
)
def test_amplification_ratios_lie_in_bounds(ratios: dict[str, float], fits: bool) -> None:
    got = refused("resource_amplification", {"resourceAmplificationRatio": ratios})
    assert (got == []) is fits


def test_ratios_of_cpu_models_lie_in_bounds() -> None:
    models = {"good": {"baseRatio": 1.0, "turboEnabledRatio": 5.0}, "bad": {"baseRatio": 0.99}}
    assert refused("cpu_normalization", {"ratioModel": models}) == ["ratioModel[bad].baseRatio"]


def network(**classes: Any) -> dict[str, Any]:
    return {name: {"networkQOS": {"egressRequest": rate}} for name, rate in classes.items()}


@pytest.mark.parametrize(
    ("rates", "bandwidth", "problems"),
    [
        ({"lsrClass": 40, "lsClass": 30, "beClass": 30}, "0", []),
        ({"lsrClass": 40, "lsClass": 30, "beClass": 31}, "0", ["egressRequest"]),
        ({"lsrClass": "50M", "lsClass": "30M", "beClass": "20M"}, "100M", []),
        ({"lsrClass": "50M", "lsClass": "30M", "beClass": "21M"}, "100M", ["egressRequest"]),
        ({"lsClass": "50M", "beClass": 50}, "100M", []),
        ({"lsClass": "51M", "beClass": 50}, "100M", ["egressRequest"]),
        ({"lsClass": "51M", "beClass": 50}, "0", []),
        ({"lsClass": "fast"}, "0", ["lsClass.networkQOS.egressRequest"]),
        ({"beClass": 101}, "0", ["beClass.networkQOS.egressRequest"]),
        ({"beClass": -1}, "0", ["beClass.networkQOS.egressRequest"]),
    ],
)
def test_requests_of_the_network_fit_the_link(
    rates: dict[str, Any], bandwidth: str, problems: list[str]
) -> None:
    assert refused("resource_qos", network(**rates), bandwidth) == problems


def test_a_refusal_has_the_members_that_tools_look_for() -> None:
    """A node matches two entries, of which no node that was made for one matches the other."""
    entries = [
        {"name": name, "nodeSelector": {"matchLabels": {name: "1"}}, "enable": True}
        for name in ("a", "b")
    ]
    node = convert({"metadata": {"name": "n", "labels": {"a": "1", "b": "1"}}}, Node)
    judge = ConfigMapAdmission(
        namespace="ns", name="config", nodes=lambda: [node], names_required=False
    )
    text = json.dumps({"enable": True, "nodeConfigs": entries})
    refusal = judge.problem({"colocation-config": text}, ["colocation-config"])
    assert refusal is not None
    assert refusal.startswith("___") and refusal.endswith("___")
    assert json.loads(refusal.strip("_")) == {
        "reason": "ExistNodeConfict",
        "message": {
            "config": "colocation-config",
            "strategies": ["a", "b"],
            "exampleNodes": ["n"],
        },
    }
