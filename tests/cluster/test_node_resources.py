"""The formulas of a node's extended resources, on the examples of docs/facts/manager.md."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.decode import dec_hook
from apis.device import Device
from apis.errors import InputError
from apis.slo_config import CPUNormalizationStrategy, ResourceAmplificationStrategy
from apis.topology import NodeResourceTopology
from cluster.manager.amounts import Amount, truncate
from cluster.manager.batch import amplified, batch_resources, batch_zone_resources
from cluster.manager.devices import gpu_labels, gpu_resources, rdma_resources
from cluster.manager.mid import mid_resources
from cluster.manager.normalization import (
    amplification,
    amplification_text,
    annotated_amplification,
    normalization_enabled,
    normalization_percent,
)
from cluster.ratios import ratio_text
from tests.cluster import nodes

GI = 1024**3


def example() -> Any:
    """The node of docs/facts/manager.md, "Batch resources": pods a (LS), b (LSE), c (not reported),
    d (batch), and a reported prod pod that the API server does not list.
    """
    return nodes.inputs(
        nodes.node(
            allocatable=("15500m", "62Gi"),
            annotations={"node.koordinator.sh/reservation": '{"resources":{"cpu":"1"}}'},
        ),
        nodes.report(
            system=("800m", "1536Mi"),
            pods={"a": ("2", "5Gi"), "b": ("1", "3Gi"), "d": ("3", "7Gi")},
            dangling=[("koord-prod", "500m", "1Gi"), ("koord-batch", "9", "9Gi")],
            hosts=[("koord-prod", "200m", "512Mi"), ("koord-batch", "4", "4Gi")],
        ),
        [
            nodes.pod("a", ("4", "8Gi"), qos="LS"),
            nodes.pod("b", ("4", "4Gi"), qos="LSE"),
            nodes.pod("c", ("1", "2Gi"), phase="Pending"),
            nodes.pod("d", ("8", "8Gi"), qos="BE", priority=5500),
            nodes.pod("done", ("8", "8Gi"), phase="Succeeded"),
        ],
    )


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, (1100, 30709016167)),
        ({"memoryCalculatePolicy": "request"}, (1100, 27487790695)),
        # C, which has no metric yet, counts with its request: 9500m and 15Gi instead of 8500m
        # and 13Gi, so that a burst of pod starts hands nothing out twice.
        (
            {"cpuCalculatePolicy": "maxUsageRequest", "memoryCalculatePolicy": "maxUsageRequest"},
            (0, 28561532519 - 2 * GI),
        ),
        ({"batchCPUThresholdPercent": 5, "batchMemoryThresholdPercent": 30}, (800, 20615843020)),
        ({"cpuCalculatePolicy": "request"}, (1100, 30709016167)),
    ],
)
def test_batch_resources_of_the_worked_example(
    policy: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert batch_resources(example(), nodes.strategy(**policy)).amount == Amount(*expected)


def test_batch_resources_of_a_large_node_whose_reservation_exceeds_the_system_use() -> None:
    """Of 64 cores: 25600m of margin, 2000m reserved, 12000m used. Memory: the system uses more
    than is reserved, and 35 % of the bytes are rounded down."""
    given_inputs = nodes.inputs(
        nodes.node(capacity=("64", "256Gi"), allocatable=("62", "256Gi")),
        nodes.report(system=("1500m", "6Gi"), pods={"prod": ("12", "40Gi")}),
        [nodes.pod("prod", ("20", "60Gi"))],
    )
    got = batch_resources(given_inputs, nodes.strategy()).amount
    assert got == Amount(24400, 129278515610)


def test_the_explanation_names_every_term_and_adds_up() -> None:
    result = batch_resources(example(), nodes.strategy())
    explained = result.explanations["kubernetes.io/batch-cpu"]
    terms = {term.name: term.value for term in explained.terms}
    assert terms == {"capacity": 16000, "margin": 6400, "system_used": 1000, "hp_used": 7500}
    assert explained.result == 16000 - 6400 - 1000 - 7500
    assert explained.terms[-1].at == "2026-01-01T00:00:00Z"


def test_a_node_webhook_that_amplifies_allocatable_does_not_hide_the_kubelet_reservation() -> None:
    of = nodes.node(
        allocatable=("31", "124Gi"),
        annotations={"node.koordinator.sh/raw-allocatable": '{"cpu":"15500m","memory":"62Gi"}'},
    )
    assert nodes.inputs(of).reserved == Amount(500, 2 * GI)


def test_the_measured_use_of_an_ended_pod_still_counts() -> None:
    ended = nodes.pod("done", ("8", "8Gi"), phase="Succeeded")
    metric = nodes.report(pods={"done": ("2", "1Gi")})
    got = batch_resources(nodes.inputs(nodes.node(), metric, [ended]), nodes.strategy())
    assert got.amount.cpu == 16000 - 6400 - 2000


def test_zones_share_system_use_and_get_the_pods_that_are_bound_to_them() -> None:
    bound = '{"numaNodeResources":[{"node":1,"resources":{"cpu":"2"}}]}'
    given_inputs = nodes.inputs(
        nodes.node(capacity=("16", "64Gi")),
        nodes.report(system=("1", "0"), pods={"p": ("2", "0"), "q": ("1", "0")}),
        [
            nodes.pod(
                "p", ("2", "0"), annotations={"scheduling.koordinator.sh/resource-status": bound}
            ),
            nodes.pod("q", ("1", "0")),
        ],
    )
    zones = {0: Amount(8000, 0), 1: Amount(8000, 0)}
    got = batch_zone_resources(given_inputs, zones, nodes.strategy())
    assert {zone: amount.cpu for zone, amount in got.items()} == {0: 3800, 1: 1800}


@pytest.mark.parametrize(
    ("batch", "ratio", "expected"), [(1000, 120, 1200), (1001, 133, 1332), (7, 100, 7), (7, 90, 7)]
)
def test_amplified_batch_cpu_rounds_up_to_whole_milli_cores(
    batch: int, ratio: int, expected: int
) -> None:
    assert amplified(batch, ratio) == expected


def test_mid_resources_of_the_worked_example() -> None:
    # unallocated 6 cpu / 48Gi: capacity 16 / 64Gi less 1 / 1Gi system, less 9 / 15Gi requested.
    given_inputs = nodes.inputs(
        nodes.node(),
        nodes.report(system=("1", "1Gi"), total=("6", "20Gi"), reclaimable=("3", "10Gi")),
        [nodes.pod("prod", ("9", "15Gi")), nodes.pod("batch", ("5", "5Gi"), priority=5000)],
    )
    rules = nodes.strategy(
        midUnallocatedPercent=20, midCPUThresholdPercent=45, midMemoryThresholdPercent=50
    )
    assert mid_resources(given_inputs, rules).amount == Amount(4200, 21045339750)


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(None, (5799, 12357013095)), (50, (7299, 32758107751))],
)
def test_mid_resources_are_what_prod_does_not_need_and_a_share_of_the_unallocated(
    percent: int | None, expected: tuple[int, int]
) -> None:
    # 3 cores and 38Gi of 16 and 64Gi are unallocated; more is unused than can be reclaimed.
    given_inputs = nodes.inputs(
        nodes.node(),
        nodes.report(total=("5", "20Gi"), reclaimable=("5799m", "12357013095")),
        [nodes.pod("prod", ("13", "26Gi"))],
    )
    rules = nodes.strategy(**({} if percent is None else {"midUnallocatedPercent": percent}))
    assert mid_resources(given_inputs, rules).amount == Amount(*expected)


def test_static_mid_resources_are_a_share_of_the_capacity() -> None:
    rules = nodes.strategy(
        midReclaimMode="static",
        midStaticCPUReservedPercent=25,
        midStaticMemoryReservedPercent=25,
        midMemoryThresholdPercent=20,
    )
    got = mid_resources(nodes.inputs(nodes.node()), rules).amount
    assert got == Amount(4000, truncate(64 * GI * 20, 100))


def test_mid_without_prediction_offers_only_the_unallocated_share() -> None:
    given_inputs = nodes.inputs(nodes.node(), nodes.report(total=("6", "20Gi")), [])
    assert mid_resources(given_inputs, nodes.strategy()).amount == Amount(0, 0)


MODEL = {
    "ratioModel": {
        "X": {"baseRatio": 1.0, "hyperThreadEnabledRatio": 0.9, "hyperThreadTurboEnabledRatio": 1.2}
    }
}


def topology(**info: Any) -> NodeResourceTopology:
    return msgspec.convert(
        {"metadata": {"annotations": {"node.koordinator.sh/cpu-basic-info": json.dumps(info)}}},
        NodeResourceTopology,
        dec_hook=dec_hook,
    )


def normalization(**members: Any) -> CPUNormalizationStrategy:
    return msgspec.convert({"enable": True, **MODEL, **members}, CPUNormalizationStrategy)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"cpuModel": "X", "hyperThreadEnabled": True, "turboEnabled": True}, "1.20"),
        ({"cpuModel": "X"}, "1.00"),
        ({"cpuModel": "X", "turboEnabled": True}, "1.50"),
        ({"cpuModel": "unknown"}, "1.50"),
    ],
)
def test_the_normalization_ratio_follows_the_cpu_model(info: dict[str, Any], text: str) -> None:
    got = normalization_percent(nodes.node(), topology(**info), normalization(defaultRatio=1.5))
    assert ratio_text(got) == text


def test_a_ratio_outside_its_range_is_an_error_that_names_the_model() -> None:
    info = topology(cpuModel="X", hyperThreadEnabled=True)
    with pytest.raises(InputError, match=r"ratioModel\['X'\].*expected 1.0..5.0"):
        normalization_percent(nodes.node(), info, normalization())


@pytest.mark.parametrize(
    ("label", "enabled"),
    [
        *((text, True) for text in ("1", "t", "T", "true", "TRUE", "True")),
        *((text, False) for text in ("0", "f", "F", "false", "FALSE", "False")),
    ],
)
def test_the_label_is_read_as_go_reads_booleans(label: str, enabled: bool) -> None:
    of = nodes.node(labels={"node.koordinator.sh/cpu-normalization-enabled": label})
    for strategy in (CPUNormalizationStrategy(True), CPUNormalizationStrategy(False)):
        assert normalization_enabled(of, strategy) is enabled


def test_the_nodes_label_switches_normalization_off() -> None:
    off = nodes.node(labels={"node.koordinator.sh/cpu-normalization-enabled": "f"})
    assert normalization_percent(off, None, normalization()) == 100
    bad = nodes.node(labels={"node.koordinator.sh/cpu-normalization-enabled": "no"})
    with pytest.raises(InputError, match="expected true or false"):
        normalization_percent(bad, None, normalization())


@pytest.mark.parametrize(
    ("ratios", "normalized", "expected"),
    [
        ({"memory": 1.5, "cpu": 1.5}, 120, '{"cpu":1.80,"memory":1.50}'),
        # The product is rounded, as a text with two decimals is, not its factors.
        ({"cpu": 1.25}, 115, '{"cpu":1.44}'),
        ({"cpu": 1.255}, 150, '{"cpu":1.88}'),
        ({"cpu": 1.0}, 100, '{"cpu":1.00}'),
        ({"cpu": 1.0}, None, '{"cpu":1.00}'),
        ({"memory": 1.0}, 100, '{"memory":1.00}'),
        # Normalisation alone amplifies cpu.
        ({}, 120, '{"cpu":1.20}'),
        ({"memory": 2}, 101, '{"cpu":1.01,"memory":2.00}'),
        ({}, 100, "{}"),
        ({}, None, "{}"),
        # A cpu ratio below 1 is multiplied first.
        ({"cpu": 0.8}, 150, '{"cpu":1.20}'),
        ({"cpu": 0.5}, 200, '{"cpu":1.00}'),
        ({"cpu": 1000}, 100, '{"cpu":1000.00}'),
    ],
)
def test_amplification_multiplies_cpu_by_the_normalization(
    ratios: dict[str, float], normalized: int | None, expected: str
) -> None:
    found = amplification(normalized, ResourceAmplificationStrategy(True, ratios))
    assert (amplification_text(found.percents), found.problems) == (expected, ())


@pytest.mark.parametrize(
    ("ratios", "normalized", "expected", "problem"),
    [
        (
            {"cpu": 0.5, "memory": 1.5},
            100,
            {"cpu": 100, "memory": 150},
            "[cpu] = '0.5': a ratio",
        ),
        (
            {"cpu": 0.5, "memory": 1.5},
            150,
            {"cpu": 100, "memory": 150},
            "[cpu] = '0.5': a ratio",
        ),
        (
            {"cpu": 1.2, "memory": 0.5},
            100,
            {"cpu": 120, "memory": 100},
            "[memory] = '0.5': a ratio",
        ),
        ({"memory": -3}, 150, {"cpu": 150, "memory": 100}, "[memory] = '-3': a ratio below 1"),
        # Not positive counts as 1, then the normalisation multiplies it.
        ({"cpu": 0}, 150, {"cpu": 150}, "[cpu] = '0': a ratio below 1"),
        ({"cpu": -2}, 100, {"cpu": 100}, "[cpu] = '-2': a ratio below 1"),
        # Too large: what the node carries stays in force.
        ({"cpu": 1e300, "memory": 1.5}, 100, {"cpu": 130, "memory": 150}, "expected at most 1000"),
        ({"cpu": 500}, 300, {"cpu": 130}, "expected at most 1000"),
        ({"example.com/gpu": 1000.01}, 100, {}, "expected at most 1000; the last ratio stays"),
    ],
)
def test_a_bad_ratio_is_named_and_affects_no_other_resource(
    ratios: dict[str, float], normalized: int, expected: dict[str, int], problem: str
) -> None:
    rules = ResourceAmplificationStrategy(True, ratios)
    found = amplification(normalized, rules, {"cpu": 130, "memory": 110})
    assert found.percents == expected
    assert len(found.problems) == 1 and problem in found.problems[0]
    start = "resource-amplification-config: resourceAmplificationRatio["
    assert found.problems[0].startswith(start)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("", {}),
        ("nonsense", {}),
        ('{"cpu":"1.2"}', {}),
        ('{"cpu":1.20,"memory":0.9,"x":1001,"y":1}', {"cpu": 120, "y": 100}),
    ],
)
def test_ratios_that_a_node_carries_are_read_where_they_can_be(
    text: str | None, expected: dict[str, int]
) -> None:
    key = "node.koordinator.sh/resource-amplification-ratio"
    of = nodes.node(annotations={} if text is None else {key: text})
    assert annotated_amplification(of) == expected


def device(*infos: dict[str, Any], **labels: str) -> Device:
    return msgspec.convert(
        {"metadata": {"name": "n1", "labels": labels}, "spec": {"devices": list(infos)}},
        Device,
        dec_hook=dec_hook,
    )


def gpu(*, health: bool = True) -> dict[str, Any]:
    return {
        "type": "gpu",
        "health": health,
        "resources": {
            "koordinator.sh/gpu-core": "100",
            "koordinator.sh/gpu-memory-ratio": "100",
            "koordinator.sh/gpu-memory": "16Gi",
            "example.com/other": "1",
        },
    }


def test_gpu_resources_sum_the_healthy_gpus() -> None:
    got = gpu_resources(device(gpu(), gpu(), gpu(health=False)), share_counts=True)
    assert {name: str(amount) for name, amount in got.items()} == {
        "koordinator.sh/gpu-core": "200",
        "koordinator.sh/gpu-memory-ratio": "200",
        "koordinator.sh/gpu-memory": "32Gi",
        "koordinator.sh/gpu": "200",
        "koordinator.sh/gpu.shared": "200",
    }
    assert gpu_resources(device(gpu(health=False)), share_counts=True) == {}
    assert gpu_resources(None, share_counts=True) == {}


def test_rdma_counts_a_hundred_for_each_healthy_device() -> None:
    healthy = {"type": "rdma", "health": True}
    got = rdma_resources(device(healthy, healthy, {"type": "rdma"}))
    assert str(got["koordinator.sh/rdma"]) == "200"


def test_gpu_labels_stand_under_their_new_and_older_names() -> None:
    got = gpu_labels(device(**{"kubernetes.io/gpu-model": "A100"}))
    assert got == {"node.koordinator.sh/gpu-model": "A100", "kubernetes.io/gpu-model": "A100"}


@settings(max_examples=60)
@given(used=st.integers(0, 20000), request=st.integers(0, 20000), reclaim=st.integers(0, 120))
def test_batch_is_never_negative_and_falls_with_use(used: int, request: int, reclaim: int) -> None:
    def batch(use: int) -> int:
        given_inputs = nodes.inputs(
            nodes.node(),
            nodes.report(pods={"p": (f"{use}m", "1Gi")}),
            [nodes.pod("p", (f"{request}m", "1Gi"))],
        )
        rules = nodes.strategy(cpuReclaimThresholdPercent=reclaim)
        return batch_resources(given_inputs, rules).amount.cpu

    assert batch(used) >= batch(used + 100) >= 0
