"""Patches of a Node: only keys of the manager, and only changes above the threshold."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from apis.core import Node
from apis.decode import dec_hook
from apis.device import Device
from apis.explanation import parse_explanation
from apis.node_strategy import NodeColocation
from apis.nodemetric import NodeMetric
from apis.quantity import parse_quantity
from apis.slo_config import CPUNormalizationStrategy, ResourceAmplificationStrategy
from apis.topology import NodeResourceTopology
from cluster.manager.amounts import Amount
from cluster.manager.node_offer import (
    PLUGINS,
    NodeView,
    Wanted,
    decide,
    freshness,
    third_party,
)
from cluster.manager.node_patches import differs, metadata_patch, status_patch, zones_patch
from tests.cluster import nodes

NOW = datetime(2026, 1, 1, 0, 5, tzinfo=UTC)
BATCH, MEMORY = "kubernetes.io/batch-cpu", "kubernetes.io/batch-memory"


def node(offered: dict[str, str] | None = None, **metadata: Any) -> Node:
    amounts = {"cpu": "16", "memory": "64Gi", **(offered or {})}
    found: Node = msgspec.convert(
        {
            "metadata": {"name": "n1", **metadata},
            "status": {"capacity": amounts, "allocatable": amounts},
        },
        Node,
        dec_hook=dec_hook,
    )
    return found


def view(
    of: Node,
    *,
    enabled: bool = True,
    reported: bool = True,
    normalization: CPUNormalizationStrategy | None = None,
    amplification: ResourceAmplificationStrategy | None = None,
) -> NodeView:
    status = nodes.report(system=("1", "1Gi"), at="2026-01-01T00:00:00Z")
    return NodeView(
        inputs=nodes.inputs(of, status if reported else None),
        metric=NodeMetric(status=status) if reported else None,
        topology=None,
        device=None,
        colocation=NodeColocation(nodes.strategy(), None, enabled),
        normalization=normalization or CPUNormalizationStrategy(),
        amplification=amplification or ResourceAmplificationStrategy(),
    )


def wanted(of: NodeView, now: datetime = NOW) -> Wanted:
    return decide(of, plugins=frozenset(PLUGINS), gpu_shares=False, now=now)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("1000", "1100", False),
        ("1000", "1101", True),
        ("1000", "899", True),
        ("0", "1", True),
        ("0", "0", False),
        (None, "0", True),
        ("0", None, True),
        (None, None, False),
    ],
)
def test_a_change_counts_above_the_threshold(
    old: str | None, new: str | None, expected: bool
) -> None:
    quantities = [None if text is None else parse_quantity(text) for text in (old, new)]
    assert differs(quantities[0], quantities[1], 0.1) is expected


def test_only_own_keys_are_patched_and_equal_ones_left_out() -> None:
    result = wanted(view(node()))
    patch = status_patch(node(), result, threshold=0.1, refresh="")
    assert patch["status"]["allocatable"][BATCH] == "8600"
    assert set(patch["status"]) == {"capacity", "allocatable"}
    assert "cpu" not in patch["status"]["allocatable"]
    offered = {name: str(amount) for name, amount in result.resources.items() if amount is not None}
    same = node(offered)
    assert status_patch(same, result, threshold=0.1, refresh="due") == {}
    near = node({**offered, BATCH: "8500"})
    assert status_patch(near, result, threshold=0.1, refresh="") == {}
    due = status_patch(near, result, threshold=0.1, refresh="due")
    assert due["status"]["allocatable"] == {BATCH: "8600"}


def test_devices_are_counted_and_any_change_of_them_is_written() -> None:
    """One of twenty devices is less than the threshold."""
    devices = [{"type": "rdma", "health": True, "minor": each} for each in range(19)]
    device = msgspec.convert({"spec": {"devices": devices}}, Device, dec_hook=dec_hook)
    resource = "koordinator.sh/rdma"
    before = wanted(view(node())).resources
    offered = {name: str(amount) for name, amount in before.items() if amount is not None}
    carrying = node({**offered, resource: "2000"})
    result = wanted(dataclasses.replace(view(carrying), device=device))
    patch = status_patch(carrying, result, threshold=0.1, refresh="")
    assert patch["status"] == {
        "capacity": {resource: "1900"},
        "allocatable": {resource: "1900"},
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enabled": False}, "co-location is off"),
        ({"reported": False}, "has no NodeMetric"),
    ],
)
def test_the_explanation_of_withdrawn_resources_names_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    offering = node({BATCH: "8600", MEMORY: "30Gi"})
    result = wanted(view(offering, **changes))
    patch = status_patch(offering, result, threshold=0.1, refresh="")
    assert patch["status"]["allocatable"] == {BATCH: None, MEMORY: None}
    text = patch["metadata"]["annotations"]["node.koordinator.sh/resource-explanation"]
    assert reason in json.loads(text)["resources"][BATCH]["note"]


def test_a_report_becomes_stale_after_the_degrade_time() -> None:
    metric = NodeMetric(status=nodes.report(at="2026-01-01T00:00:00Z"))
    strategy = nodes.strategy(degradeTimeMinutes=15)
    problem, left = freshness(metric, strategy, NOW)
    assert (problem, left) == (None, 600.0)
    problem, left = freshness(metric, strategy, NOW + timedelta(minutes=10, seconds=1))
    assert left is None
    assert "is stale" in str(problem)
    for odd in ("soon", "2026-13-01T00:00:00Z", "9999-12-31T23:59:59-01:00"):
        metric = NodeMetric(status=nodes.report(at=odd))
        assert "no readable updateTime" in str(freshness(metric, strategy, NOW)[0])


@pytest.mark.parametrize(
    ("seconds", "left"), [(0, 900.0), (899, 1.0), (900, 0.0), (900.5, None), (-60, 960.0)]
)
def test_a_report_is_fresh_up_to_the_very_end_of_its_time(
    seconds: float, left: float | None
) -> None:
    metric = NodeMetric(status=nodes.report(at="2026-01-01T00:00:00Z"))
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    assert freshness(metric, nodes.strategy(), at)[1] == left


@pytest.mark.parametrize(("normalization", "cpu"), [(100, "3k"), (120, "3600"), (90, "3k")])
def test_zones_are_amplified_as_their_node_is(normalization: int, cpu: str) -> None:
    topology = msgspec.convert(
        {"metadata": {"name": "n1"}, "zones": [zone("node-0", cpu="8")]},
        NodeResourceTopology,
        dec_hook=dec_hook,
    )
    result = Wanted(zones={0: Amount(3000, 5)}, normalization=normalization)
    (patched,) = zones_patch(topology, result, threshold=0.1)["zones"]
    amounts = {each["name"]: each["allocatable"] for each in patched["resources"]}
    assert amounts == {"cpu": "8", BATCH: cpu, MEMORY: "5"}


def test_what_is_withdrawn_is_explained_as_nothing_with_the_reason() -> None:
    result = wanted(view(node(), reported=False))
    assert [result.resources[name] for name in (BATCH, MEMORY)] == [None, None]
    origin = json.loads(str(result.along["node.koordinator.sh/originExtendedAllocatable"]))
    assert origin == {"resources": {BATCH: "0", MEMORY: "0"}}
    key = "node.koordinator.sh/resource-explanation"
    found = parse_explanation(str(result.along[key]), obj="Node n1").resources
    assert set(found) == {
        *(BATCH, MEMORY, "kubernetes.io/mid-cpu", "kubernetes.io/mid-memory"),
    }
    for each in found.values():
        assert (each.formula, each.result) == ("withdrawn", 0)
        assert each.note == "the node has no NodeMetric"
    assert result.zones == {} and result.stale_in is None


def test_ratios_stand_in_annotations_and_vanish_with_co_location() -> None:
    rules = ResourceAmplificationStrategy(True, {"memory": 1.5})
    result = wanted(view(node(), amplification=rules))
    assert metadata_patch(node(), result)["metadata"]["annotations"] == {
        "node.koordinator.sh/cpu-normalization-ratio": "1.00",
        "node.koordinator.sh/resource-amplification-ratio": '{"memory":1.50}',
    }
    carrying = node(
        annotations={"node.koordinator.sh/resource-amplification-ratio": '{"memory":1.50}'}
    )
    off = wanted(view(carrying, enabled=False))
    assert metadata_patch(carrying, off)["metadata"]["annotations"] == {
        "node.koordinator.sh/resource-amplification-ratio": None
    }


def test_an_error_leaves_the_last_ratio_in_force() -> None:
    carrying = node(
        annotations={
            "node.koordinator.sh/cpu-normalization-ratio": "1.20",
            "node.koordinator.sh/resource-amplification-ratio": '{"cpu":1.80}',
        }
    )
    broken = ResourceAmplificationStrategy(True, {"cpu": 5000})
    result = wanted(
        view(carrying, normalization=CPUNormalizationStrategy(True), amplification=broken)
    )
    assert metadata_patch(carrying, result) == {}
    assert len(result.problems) == 2
    # The batch amount is still multiplied by the ratio that stands.
    assert str(result.resources[BATCH]) == "10320"


@pytest.mark.parametrize(
    ("carried", "written", "batch"),
    [
        # A difference of a hundredth is the rounding of another manager's version.
        (None, "1.20", "10320"),
        ("1.20", None, "10320"),
        ("1.19", None, "10234"),
        ("1.21", None, "10406"),
        ("1.18", "1.20", "10320"),
        ("1.22", "1.20", "10320"),
        ("nonsense", "1.20", "10320"),
        ("-1", "1.20", "10320"),
    ],
)
def test_a_ratio_is_rewritten_when_it_differs(
    carried: str | None, written: str | None, batch: str
) -> None:
    key = "node.koordinator.sh/cpu-normalization-ratio"
    carrying = node(annotations={} if carried is None else {key: carried})
    info = {"node.koordinator.sh/cpu-basic-info": '{"cpuModel":"x"}'}
    topology = msgspec.convert(
        {"metadata": {"annotations": info}}, NodeResourceTopology, dec_hook=dec_hook
    )
    strategy = CPUNormalizationStrategy(True, default_ratio=1.2)
    seen = dataclasses.replace(view(carrying, normalization=strategy), topology=topology)
    result = wanted(seen)
    assert result.problems == []
    assert result.annotations.get(key) == written
    # What is offered goes by the ratio that the node carries then.
    assert str(result.resources[BATCH]) == batch


def test_third_parties_are_subtracted_and_the_origin_kept() -> None:
    text = json.dumps(
        {
            "allocations": [
                {"name": "yarn", "priority": "koord-batch", "resources": {BATCH: "2k"}},
                {"name": "x", "priority": "koord-mid", "resources": {BATCH: "1k"}},
            ]
        }
    )
    taking = node(annotations={"node.koordinator.sh/thirdPartyAllocations": text})
    result = wanted(view(taking))
    assert str(result.resources[BATCH]) == "6600"
    origin = result.along["node.koordinator.sh/originExtendedAllocatable"]
    assert json.loads(str(origin))["resources"][BATCH] == "8600"
    broken = node(annotations={"node.koordinator.sh/thirdPartyAllocations": "{"})
    taken, problem = third_party(broken)
    assert taken == {}
    assert "thirdPartyAllocations" in str(problem)


def test_negative_third_party_allocations_are_ignored() -> None:
    entry = {"priority": "koord-batch", "resources": {BATCH: "-2k", MEMORY: "1Gi"}}
    text = json.dumps({"allocations": [entry]})
    taking = node(annotations={"node.koordinator.sh/thirdPartyAllocations": text})
    result = wanted(view(taking))
    assert str(result.resources[BATCH]) == "8600"
    assert "negative" in result.problems[0]


GPU = {
    "koordinator.sh/gpu": "100",
    "koordinator.sh/gpu-core": "100",
    "koordinator.sh/rdma": "100",
    "huawei.com/npu-core": "8",
}


@pytest.mark.parametrize(
    ("enabled", "device", "readable", "left"),
    [
        (True, None, True, set()),
        (True, None, False, set(GPU)),
        (False, None, True, set(GPU)),
        (True, {}, True, set()),
        (False, {}, True, set()),
    ],
    ids=[
        "no device",
        "a device that cannot be read",
        "a device plugin's, co-location off",
        "a device without healthy parts",
        "the same, co-location off",
    ],
)
def test_device_resources_go_with_the_device_only(
    enabled: bool, device: dict[str, Any] | None, readable: bool, left: set[str]
) -> None:
    offering = node(GPU)
    seen = dataclasses.replace(
        view(offering, enabled=enabled),
        device=None if device is None else Device(),
        device_readable=readable,
    )
    patch = status_patch(offering, wanted(seen), threshold=0.1, refresh="")
    removed = {k for k, v in patch.get("status", {}).get("allocatable", {}).items() if v is None}
    assert set(GPU) - removed == left


def zone(name: str, **amounts: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "Node",
        "resources": [
            {"name": key, "capacity": value, "allocatable": value, "available": value}
            for key, value in amounts.items()
        ],
    }


def test_zones_are_known_by_their_number_and_keep_what_others_wrote() -> None:
    topology = msgspec.convert(
        {
            "metadata": {"name": "n1", "resourceVersion": "7"},
            # As text node-10 sorts before node-2.
            "zones": [zone("node-10", cpu="8"), zone("node-2", cpu="4")],
        },
        NodeResourceTopology,
        dec_hook=dec_hook,
    )
    result = Wanted(zones={10: Amount(3000, 5), 2: Amount(1000, 6)})
    patch = zones_patch(topology, result, threshold=0.1)
    assert patch["metadata"] == {"resourceVersion": "7"}
    found = {
        one["name"]: {each["name"]: each["allocatable"] for each in one["resources"]}
        for one in patch["zones"]
    }
    assert found == {
        "node-10": {"cpu": "8", BATCH: "3k", MEMORY: "5"},
        "node-2": {"cpu": "4", BATCH: "1k", MEMORY: "6"},
    }
    assert zones_patch(topology, Wanted(zones=None), threshold=0.1) == {}
    assert zones_patch(topology, Wanted(zones={}), threshold=0.1) == {}


def test_the_explanation_says_what_was_done_to_the_result() -> None:
    entry = {"name": "yarn", "priority": "koord-batch", "resources": {BATCH: "2k"}}
    annotations = {
        "node.koordinator.sh/thirdPartyAllocations": json.dumps({"allocations": [entry]}),
        "node.koordinator.sh/cpu-normalization-ratio": "1.20",
    }
    # The ratio cannot be calculated, so the one that stands counts.
    seen = view(node(annotations=annotations), normalization=CPUNormalizationStrategy(True))
    result = wanted(seen)
    assert str(result.resources[BATCH]) == "8320"
    text = str(result.along["node.koordinator.sh/resource-explanation"])
    found = parse_explanation(text, obj="Node n1").resources
    assert found[BATCH].result == 8600
    assert found[BATCH].note == (
        "offered 8320: result x 1.20 CPU normalization, - 2k third-party allocations"
    )
    assert not found[MEMORY].note
