"""Parsing of a NodeMetric: missing use is not idleness, and amounts are bounded."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.decode import dec_hook
from apis.nodemetric import NodeMetricStatus
from apis.qos import PriorityClass
from cluster.manager.amounts import Amount
from cluster.manager.node_report import NodeReport, PodUse, priority_of, read_report

GI = 1024**3
CAPACITY = Amount(16000, 64 * GI)


def usage(cpu: str | None = None, memory: str | None = None) -> dict[str, Any]:
    amounts = {"cpu": cpu, "memory": memory}
    return {"resources": {name: text for name, text in amounts.items() if text is not None}}


def status(**members: Any) -> NodeMetricStatus:
    found: NodeMetricStatus = msgspec.convert(members, NodeMetricStatus, dec_hook=dec_hook)
    return found


def read(capacity: Amount = CAPACITY, **members: Any) -> NodeReport:
    return read_report(status(**members), capacity=capacity, node="n1")


def pod(name: str, cpu: str, memory: str, namespace: str = "a", **more: str) -> dict[str, Any]:
    return {"name": name, "namespace": namespace, "podUsage": usage(cpu, memory), **more}


def test_a_report_is_read_as_it_stands() -> None:
    got = read(
        updateTime="2026-01-01T00:00:00Z",
        nodeMetric={"nodeUsage": usage("4", "8Gi"), "systemUsage": usage("500m", "1Gi")},
        podsMetric=[
            pod("p", "1", "2Gi", priority="koord-prod"),
            pod("p", "2", "3Gi", "b", priority="koord-batch"),
            pod("q", "3", "4Gi", priority="of another system"),
        ],
        hostApplicationMetric=[{"name": "h", "priority": "koord-mid", "usage": usage("1", "5")}],
        prodReclaimableMetric={"resource": usage("7", "9Gi")},
    )
    assert got == NodeReport(
        at="2026-01-01T00:00:00Z",
        node=Amount(4000, 8 * GI),
        system=Amount(500, GI),
        pods=(
            PodUse(("a", "p"), PriorityClass.PROD, Amount(1000, 2 * GI)),
            PodUse(("b", "p"), PriorityClass.BATCH, Amount(2000, 3 * GI)),
            PodUse(("a", "q"), PriorityClass.NONE, Amount(3000, 4 * GI)),
        ),
        hosts=((PriorityClass.MID, Amount(1000, 5)),),
        reclaimable=Amount(7000, 9 * GI),
        unmeasured="",
        problems=(),
    )


@pytest.mark.parametrize(
    ("info", "missing"),
    [
        (None, "cpu and memory"),
        ({}, "cpu and memory"),
        ({"nodeUsage": usage()}, "cpu and memory"),
        ({"nodeUsage": usage("1")}, "memory"),
        ({"nodeUsage": usage(None, "1Gi")}, "cpu"),
        ({"systemUsage": usage("1")}, "memory"),
        ({"nodeUsage": {"resources": {"example.com/x": "1"}}}, "cpu and memory"),
        ({"nodeUsage": usage("1"), "systemUsage": usage(None, "1Gi")}, None),
        ({"systemUsage": usage("0", "0")}, None),
        ({"nodeUsage": usage("0", "0")}, None),
    ],
)
def test_a_report_without_the_nodes_use_says_what_is_missing(
    info: dict[str, Any] | None, missing: str | None
) -> None:
    # What pods use says nothing of the rest of the node.
    got = read(nodeMetric=info, podsMetric=[pod("p", "1", "1Gi")]).unmeasured
    expected = f"NodeMetric n1 reports no use of {missing}: " if missing else ""
    assert got.startswith(expected) and bool(got) == bool(missing)


@pytest.mark.parametrize(
    ("info", "system"),
    [
        ({"nodeUsage": usage("8", "10Gi")}, Amount(4000, 3 * GI)),
        ({"nodeUsage": usage("8", "10Gi"), "systemUsage": usage("1")}, Amount(1000, 3 * GI)),
        ({"nodeUsage": usage("8", "10Gi"), "systemUsage": usage(None, "1Gi")}, Amount(4000, GI)),
        ({"nodeUsage": usage("8", "10Gi"), "systemUsage": usage("0", "0")}, Amount(0, 0)),
        # Pods that were measured a moment later use more than the node did.
        ({"nodeUsage": usage("3", "2Gi")}, Amount(0, 0)),
    ],
)
def test_system_use_that_is_not_reported_is_what_the_pods_leave(
    info: dict[str, Any], system: Amount
) -> None:
    got = read(
        nodeMetric=info,
        podsMetric=[pod("p", "1", "2Gi"), pod("q", "2", "4Gi", priority="koord-batch")],
        hostApplicationMetric=[{"name": "h", "usage": usage("1", "1Gi")}],
    )
    assert got.system == system


@pytest.mark.parametrize("memory", [None, "1Gi"])
def test_the_whole_nodes_use_is_known_where_both_parts_are(memory: str | None) -> None:
    got = read(nodeMetric={"nodeUsage": usage("1", memory), "systemUsage": usage("1", "1")})
    assert got.node == (Amount(1000, GI) if memory else None)


BOUNDED = (
    # text of cpu, of memory, what counts, what is said
    ("-1", "1Gi", Amount(0, GI), "[cpu] = '-1': is negative; it counts as 0"),
    ("-1m", "0", Amount(0, 0), "[cpu] = '-1m': is negative; it counts as 0"),
    ("1", "-4Ki", Amount(1000, 0), "[memory] = '-4Ki': is negative; it counts as 0"),
    ("32", "128Gi", Amount(32000, 128 * GI), ""),
    ("32001m", "0", Amount(16000, 0), "[cpu] = '32001m': is far above the node's capacity"),
    ("0", "137438953473", Amount(0, 64 * GI), "[memory] = '137438953473': is far above the"),
    ("9E", "1", Amount(16000, 1), "[cpu] = '9E': is far above the node's capacity; it counts as"),
)


@pytest.mark.parametrize(("cpu", "memory", "counts", "said"), BOUNDED)
@pytest.mark.parametrize("where", ["nodeUsage", "systemUsage", "pod", "host", "reclaimable"])
def test_amounts_that_no_node_can_have_are_bounded_and_named(
    where: str, cpu: str, memory: str, counts: Amount, said: str
) -> None:
    odd, plain = usage(cpu, memory), usage("1", "1")
    names = ("nodeUsage", "systemUsage")
    got = read(
        nodeMetric={name: odd if where == name else plain for name in names},
        podsMetric=[{**pod("p", "1", "1"), "podUsage": odd if where == "pod" else plain}],
        hostApplicationMetric=[{"name": "h", "usage": odd if where == "host" else plain}],
        prodReclaimableMetric={"resource": odd if where == "reclaimable" else plain},
    )
    field, read_as = {
        "nodeUsage": ("nodeMetric.nodeUsage", got.node),
        "systemUsage": ("nodeMetric.systemUsage", got.system),
        "pod": ("podsMetric[a/p].podUsage", got.pods[0].used),
        "host": ("hostApplicationMetric[h].usage", got.hosts[0][1]),
        "reclaimable": ("prodReclaimableMetric.resource", got.reclaimable),
    }[where]
    assert read_as == counts
    texts = [str(error) for error in got.problems]
    assert len(texts) == bool(said)
    assert all(text.startswith(f"NodeMetric n1: status.{field}{said}") for text in texts)


def test_a_node_without_capacity_bounds_nothing_from_above() -> None:
    got = read(Amount(0, 0), nodeMetric={"nodeUsage": usage("4", "-1")})
    assert got.node == Amount(4000, 0)
    assert len(got.problems) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((each.value, each) for each in PriorityClass),
        ("", PriorityClass.NONE),
        ("koord-PROD", PriorityClass.NONE),
        ("prod", PriorityClass.NONE),
    ],
)
def test_priorities_of_reports(text: str, expected: PriorityClass) -> None:
    assert priority_of(text) is expected
