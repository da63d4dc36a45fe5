"""Which pods batch and mid resources subtract, by priority and namespace, and the ceilings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.core import Pod
from apis.decode import dec_hook
from apis.nodemetric import NodeMetric, NodeMetricStatus
from cluster.manager.amounts import Amount, total, truncate
from cluster.manager.batch import batch_resources, batch_zone_resources
from cluster.manager.mid import mid_resources
from cluster.manager.node_inputs import NodeInputs, pod_facts
from tests.cluster import nodes

MI, GI = 1024**2, 1024**3
ALL = {"cpuReclaimThresholdPercent": 100, "memoryReclaimThresholdPercent": 100}
"""No margin, so that what is left is the capacity less what counts."""


def pod(
    name: str,
    cpu: str = "1",
    memory: str = "1Gi",
    *,
    namespace: str = "default",
    priority: int | None = None,
    labels: dict[str, str] | None = None,
    phase: str = "Running",
) -> Pod:
    found: Pod = msgspec.convert(
        {
            "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
            "spec": {
                "nodeName": "n1",
                "priority": priority,
                "containers": [
                    {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": memory}}}
                ],
            },
            "status": {"phase": phase},
        },
        Pod,
        dec_hook=dec_hook,
    )
    return found


def measured(*pods: tuple[str, str, str, str], **more: Any) -> NodeMetricStatus:
    """pods: (namespace, name, cpu, memory)."""
    plain = {
        "nodeMetric": {"nodeUsage": nodes.usage("0", "0"), "systemUsage": nodes.usage("0", "0")},
        "podsMetric": [
            {"namespace": namespace, "name": name, "podUsage": nodes.usage(cpu, memory)}
            for namespace, name, cpu, memory in pods
        ],
        **more,
    }
    return msgspec.convert({"status": plain}, NodeMetric, dec_hook=dec_hook).status


def inputs(metric: NodeMetricStatus, *pods: Pod, capacity: tuple[str, str] = ("16", "64Gi")) -> Any:
    facts = tuple(found for one in pods if (found := pod_facts(one)) is not None)
    return NodeInputs(node=nodes.node(capacity=capacity), metric=metric, pods=facts)


BANDS = (
    # priority, counts against batch, its request counts against mid's unallocated
    (None, True, True),
    (0, True, True),
    (-1, True, True),
    (2999, True, True),
    (3000, False, False),
    (3999, False, False),
    (4000, True, True),
    (4999, True, True),
    (5000, False, False),
    (5999, False, False),
    (6000, True, True),
    (6999, True, True),
    (7000, True, False),
    (7999, True, False),
    (8000, True, True),
    (8999, True, True),
    (9000, True, True),
    (9999, True, True),
    (10000, True, True),
    (2_000_001_000, True, True),
)


@pytest.mark.parametrize(("priority", "batch", "mid"), BANDS)
def test_the_edges_of_the_priority_bands(priority: int | None, batch: bool, mid: bool) -> None:
    one = inputs(measured(("default", "p", "2", "2Gi")), pod("p", "3", "4Gi", priority=priority))
    left = batch_resources(one, nodes.strategy(**ALL)).amount
    used = Amount(2000, 2 * GI) if batch else Amount()
    assert left == Amount(16000, 64 * GI) - used
    offered = mid_resources(one, nodes.strategy(midUnallocatedPercent=100)).amount
    requested = Amount(3000, 4 * GI) if mid else Amount()
    assert offered == Amount(16000, 64 * GI) - requested


@pytest.mark.parametrize(
    ("labels", "batch"),
    [
        ({"koordinator.sh/priority-class": "koord-batch"}, False),
        ({"koordinator.sh/priority-class": "koord-free"}, False),
        ({"koordinator.sh/priority-class": "koord-mid"}, True),
        ({"koordinator.sh/qosClass": "BE"}, False),
        ({"koordinator.sh/qosClass": "LS"}, True),
        ({"koordinator.sh/qosClass": "SYSTEM"}, True),
    ],
)
def test_labels_decide_before_the_default(labels: dict[str, str], batch: bool) -> None:
    one = inputs(measured(), pod("p", "3", "4Gi", labels=labels))
    left = batch_resources(one, nodes.strategy(**ALL)).amount
    assert left == Amount(16000, 64 * GI) - (Amount(3000, 4 * GI) if batch else Amount())


@pytest.mark.parametrize(
    ("phase", "counts"),
    [
        ("Pending", True),
        ("Running", True),
        ("Succeeded", False),
        ("Failed", False),
        ("Unknown", False),
        ("", False),
    ],
)
def test_pods_that_have_ended_request_nothing(phase: str, counts: bool) -> None:
    one = inputs(measured(), pod("p", "3", "4Gi", priority=9000, phase=phase))
    expected = Amount(16000, 64 * GI) - (Amount(3000, 4 * GI) if counts else Amount())
    assert batch_resources(one, nodes.strategy(**ALL)).amount == expected
    assert mid_resources(one, nodes.strategy(midUnallocatedPercent=100)).amount == expected


def test_a_pod_is_measured_under_its_own_namespace() -> None:
    metric = measured(("b", "p", "7", "7Gi"), ("a", "other", "2", "2Gi"))
    mine = pod("p", "1", "1Gi", namespace="a", priority=9000)
    # a/p has no figure yet: its request counts, and what b/p and a/other use beside it.
    left = batch_resources(inputs(metric, mine), nodes.strategy(**ALL)).amount
    assert left == Amount(16000 - 1000 - 7000 - 2000, (64 - 1 - 7 - 2) * GI)
    both = inputs(metric, mine, pod("p", "4", "4Gi", namespace="b", priority=9000))
    assert batch_resources(both, nodes.strategy(**ALL)).amount == left
    larger = nodes.strategy(**ALL, cpuCalculatePolicy="maxUsageRequest")
    one = inputs(metric, pod("p", "4", "4Gi", namespace="c", priority=9000))
    assert batch_resources(one, larger).amount.cpu == 16000 - 4000 - 7000 - 2000


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        # min(reclaimable, unused) + share of unallocated, at most the ceiling
        ({}, Amount(3000, 10 * GI)),
        ({"midCPUThresholdPercent": 10}, Amount(1600, 10 * GI)),
        ({"midMemoryThresholdPercent": 10}, Amount(3000, truncate(64 * GI, 10))),
        ({"midCPUThresholdPercent": 0, "midMemoryThresholdPercent": 0}, Amount(0, 0)),
        ({"midUnallocatedPercent": 100}, Amount(3000 + 10500, (10 + 50) * GI)),
        (
            {"midUnallocatedPercent": 100, "midCPUThresholdPercent": 50},
            Amount(8000, (10 + 50) * GI),
        ),
        (
            {"midUnallocatedPercent": 33, "midMemoryThresholdPercent": 20},
            Amount(3000 + 3465, truncate(64 * GI * 20, 100)),
        ),
    ],
)
def test_the_ceiling_of_mid(members: dict[str, Any], expected: Amount) -> None:
    metric = measured(
        nodeMetric={"nodeUsage": nodes.usage("6", "20Gi"), "systemUsage": nodes.usage("1", "4Gi")},
        prodReclaimableMetric={"resource": nodes.usage("3", "10Gi")},
    )
    one = inputs(metric, pod("p", "4500m", "10Gi", priority=9000))
    assert mid_resources(one, nodes.strategy(**members)).amount == expected


@pytest.mark.parametrize(
    ("reclaimable", "used", "expected"),
    [
        (("3", "10Gi"), ("6", "20Gi"), Amount(3000, 10 * GI)),
        # No more than what is unused.
        (("12", "60Gi"), ("6", "20Gi"), Amount(10000, 44 * GI)),
        # A node that is measured above its capacity has nothing unused.
        (("3", "10Gi"), ("17", "65Gi"), Amount(0, 0)),
        (("0", "1"), ("6", "20Gi"), Amount(0, 1)),
    ],
)
def test_mid_gives_what_is_reclaimable_and_unused(
    reclaimable: tuple[str, str], used: tuple[str, str], expected: Amount
) -> None:
    metric = measured(
        nodeMetric={"nodeUsage": nodes.usage(*used), "systemUsage": nodes.usage("0", "0")},
        prodReclaimableMetric={"resource": nodes.usage(*reclaimable)},
    )
    assert mid_resources(inputs(metric), nodes.strategy()).amount == expected


ODD = ("15987m", "67415896064")  # 67415896064 bytes are 65837789 KiB, which is not a whole MiB


@pytest.mark.parametrize(
    ("used", "system"),
    [(("1", "1"), ("1m", "4095")), (("333m", "1000000007"), ("7m", "12345679"))],
)
def test_amounts_that_are_no_whole_mebibytes_are_kept_to_the_byte(
    used: tuple[str, str], system: tuple[str, str]
) -> None:
    info = {"nodeUsage": nodes.usage("2", "2Gi"), "systemUsage": nodes.usage(*system)}
    metric = measured(("default", "p", *used), nodeMetric=info)
    one = inputs(metric, pod("p", priority=9000), capacity=ODD)
    rules = nodes.strategy(cpuReclaimThresholdPercent=61, memoryReclaimThresholdPercent=67)

    def milli(text: str) -> int:
        return int(text.removesuffix("m")) * (1 if text.endswith("m") else 1000)

    cpu = 15987 - truncate(15987 * 39, 100) - milli(used[0]) - milli(system[0])
    memory = 67415896064 - truncate(67415896064 * 33, 100) - int(used[1]) - int(system[1])
    assert batch_resources(one, rules).amount == Amount(cpu, memory)


@pytest.mark.parametrize(("parts", "each"), [(1, 1001), (2, 501), (3, 334), (4, 251)])
def test_what_zones_share_is_rounded_up(parts: int, each: int) -> None:
    assert Amount(1001, 1001).split(parts) == Amount(each, each)


def test_zones_with_odd_numbers_and_pods_bound_to_several() -> None:
    bound = '{"numaNodeResources":[{"node":0},{"node":2},{"node":9}]}'
    facts = pod_facts(
        nodes.pod("p", ("3", "3"), annotations={"scheduling.koordinator.sh/resource-status": bound})
    )
    assert facts is not None and facts.numa_nodes == (0, 2, 9)
    info = {"nodeUsage": nodes.usage("9", "9"), "systemUsage": nodes.usage("1", "10")}
    metric = measured(("default", "p", "3", "5"), ("gone", "p", "2", "2"), nodeMetric=info)
    one = NodeInputs(node=nodes.node(), metric=metric, pods=(facts,))
    zones = {0: Amount(5000, 100), 1: Amount(6000, 100), 2: Amount(7000, 100)}
    got = batch_zone_resources(one, zones, nodes.strategy(**ALL))
    # A third of the system's 1000 and of the other pod's 2000 each, half of the pod's own 3000.
    assert got == {
        0: Amount(5000 - 334 - 667 - 1500, 100 - 4 - 1 - 3),
        1: Amount(6000 - 334 - 667, 100 - 4 - 1),
        2: Amount(7000 - 334 - 667 - 1500, 100 - 4 - 1 - 3),
    }
    assert batch_zone_resources(one, {}, nodes.strategy()) == {}


def test_which_pods_count_in_which_sum() -> None:
    assert total([]) == Amount(0, 0)
    assert total([Amount(1, 2), Amount(3, 4)]) == Amount(4, 6)
    assert (truncate(7, 2), truncate(-7, 2), truncate(0, 5)) == (3, -3, 0)
