"""slo-controller-config: what loads, what is kept, and what a node gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from apis.decode import to_plain
from apis.effective_nodeslo import decode_nodeslo
from apis.keys import (
    ANNOTATION_COLOCATION_STRATEGY,
    ANNOTATION_NETWORK_BANDWIDTH,
    LABEL_CPU_RECLAIM_RATIO,
)
from apis.node_strategy import conform_node_slo, node_colocation, node_slo_spec, ratio_percent
from apis.slo_config import (
    ColocationStrategy,
    MetricAggregatePolicy,
    SLOConfig,
    load_slo_config,
)

OBJ = "ConfigMap koordinator-system/slo-controller-config"
DB = {"matchLabels": {"pool": "db"}}


def load(old: SLOConfig | None = None, **keys: Any) -> tuple[SLOConfig, list[str]]:
    data = {
        key.replace("_", "-"): value if isinstance(value, str) else json.dumps(value)
        for key, value in keys.items()
    }
    config, problems = load_slo_config(data, old=old or SLOConfig(), obj=OBJ)
    return config, [problem.message for problem in problems]


def spec(
    config: SLOConfig,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Any:
    result = node_slo_spec(config, name="n1", labels=labels or {}, annotations=annotations or {})
    return result.spec


def test_without_a_config_map_a_node_gets_the_manager_defaults() -> None:
    assert spec(SLOConfig()) == {
        "resourceUsedThresholdWithBE": {
            "enable": False,
            "cpuSuppressThresholdPercent": 65,
            "cpuSuppressPolicy": "cpuset",
            "memoryEvictThresholdPercent": 70,
            "cpuEvictPolicy": "evictByRealLimit",
        },
        "resourceQOSStrategy": {},
        "cpuBurstStrategy": {
            "policy": "none",
            "cpuBurstPercent": 1000,
            "cfsQuotaBurstPercent": 300,
            "cfsQuotaBurstPeriodSeconds": -1,
            "sharePoolThresholdPercent": 50,
        },
        "systemStrategy": {"totalNetworkBandwidth": "0"},
        "extensions": {"Object": {}},
    }


def test_the_worked_example_of_the_merge() -> None:
    config, problems = load(
        resource_threshold_config={
            "clusterStrategy": {
                "enable": True,
                "memoryEvictThresholdPercent": 80,
                "memoryEvictLowerPercent": 75,
            },
            "nodeStrategies": [
                {
                    "name": "a",
                    "nodeSelector": DB,
                    "memoryEvictThresholdPercent": 60,
                    "enable": False,
                }
            ],
        }
    )
    assert problems == []
    assert spec(config, {"pool": "db"})["resourceUsedThresholdWithBE"] == {
        "enable": False,
        "cpuSuppressThresholdPercent": 65,
        "cpuSuppressPolicy": "cpuset",
        "memoryEvictThresholdPercent": 60,
        "memoryEvictLowerPercent": 75,
        "cpuEvictPolicy": "evictByRealLimit",
    }


def test_the_first_matching_entry_wins_and_is_named() -> None:
    config, _ = load(
        cpu_burst_config={
            "clusterStrategy": {"policy": "auto"},
            "nodeStrategies": [
                {"name": "none", "policy": "cpuBurstOnly"},
                {"name": "first", "nodeSelector": DB, "policy": "none"},
                {"name": "second", "nodeSelector": {}, "policy": "cfsQuotaBurstOnly"},
            ],
        }
    )
    got = node_slo_spec(config, name="n1", labels={"pool": "db"}, annotations={})
    assert got.spec["cpuBurstStrategy"]["policy"] == "none"
    assert got.entries == {"cpu-burst-config": "first"}
    other = node_slo_spec(config, name="n2", labels={}, annotations={})
    assert other.entries == {"cpu-burst-config": "second"}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "",
        "[]",
        '{"clusterStrategy":[]}',
        '{"clusterStrategy":{"cpuBurstPercent":"many"}}',
        '{"clusterStrategy":{"policy":"sometimes"}}',
        '{"nodeStrategies":{}}',
    ],
)
def test_a_key_that_cannot_be_used_keeps_its_last_good_value(text: str) -> None:
    good, _ = load(cpu_burst_config={"clusterStrategy": {"policy": "auto"}})
    config, problems = load(
        good,
        cpu_burst_config=text,
        resource_threshold_config={"clusterStrategy": {"enable": True}},
    )
    assert len(problems) == 1
    assert "cpu-burst-config" in problems[0]
    assert spec(config)["cpuBurstStrategy"]["policy"] == "auto"
    assert spec(config)["resourceUsedThresholdWithBE"]["enable"] is True


def test_an_entry_that_cannot_be_used_takes_the_clusters_strategy() -> None:
    config, problems = load(
        resource_threshold_config={
            "clusterStrategy": {"enable": True},
            "nodeStrategies": [
                {"name": "bad", "nodeSelector": DB, "cpuSuppressThresholdPercent": 300},
                {"name": "good", "nodeSelector": {}, "enable": False},
            ],
        }
    )
    assert len(problems) == 1
    assert "nodeStrategies[0]" in problems[0]
    assert "cpuSuppressThresholdPercent" in problems[0]
    assert spec(config, {"pool": "db"})["resourceUsedThresholdWithBE"]["enable"] is True
    assert spec(config)["resourceUsedThresholdWithBE"]["enable"] is False


def test_an_entry_with_a_broken_selector_matches_nothing() -> None:
    broken = {"matchExpressions": [{"key": "pool", "operator": "Within", "values": ["db"]}]}
    config, problems = load(
        system_config={
            "nodeStrategies": [{"name": "x", "nodeSelector": broken, "minFreeKbytesFactor": 1}]
        }
    )
    assert "is not an operator" in problems[0]
    assert "minFreeKbytesFactor" not in spec(config, {"pool": "db"})["systemStrategy"]


def test_without_a_config_map_a_node_has_the_default_colocation_strategy() -> None:
    strategy = node_colocation(SLOConfig(), name="n1", labels={}, annotations={}).strategy
    assert to_plain(strategy) == {}  # no field differs from the defaults, which are:
    assert strategy == ColocationStrategy(
        enable=False,
        metric_aggregate_duration_seconds=300,
        metric_report_interval_seconds=60,
        metric_aggregate_policy=MetricAggregatePolicy(("5m", "10m", "30m")),
        metric_memory_collect_policy="usageWithoutPageCache",
        cpu_reclaim_threshold_percent=60,
        cpu_calculate_policy="usage",
        memory_reclaim_threshold_percent=65,
        memory_calculate_policy="usage",
        degrade_time_minutes=15,
        update_time_threshold_seconds=300,
        resource_diff_threshold=0.1,
        mid_reclaim_mode="",
        mid_cpu_threshold_percent=100,
        mid_memory_threshold_percent=100,
        mid_unallocated_percent=0,
        mid_static_cpu_reserved_percent=0,
        mid_static_memory_reserved_percent=0,
        batch_cpu_threshold_percent=None,
        batch_memory_threshold_percent=None,
    )


@pytest.mark.parametrize("field", ["batchCPUThresholdPercent", "cpuReclaimThresholdPercent"])
def test_a_percentage_that_no_int32_holds_leaves_the_old_strategy(field: str) -> None:
    for good in (0, 2**31 - 1):
        config, problems = load(colocation_config={field: good})
        assert (config.colocation.cluster[field], problems) == (good, [])
    for bad in (-1, 2**31):
        kept, problems = load(config, colocation_config={field: bad})
        assert (kept.colocation, len(problems)) == (config.colocation, 1)


def test_a_removed_key_returns_to_its_default() -> None:
    good, _ = load(cpu_burst_config={"clusterStrategy": {"policy": "auto"}})
    config, problems = load(good)
    assert problems == []
    assert spec(config)["cpuBurstStrategy"]["policy"] == "none"


def test_letter_case_of_members_does_not_matter_and_unknown_ones_are_named() -> None:
    config, problems = load(
        resource_qos_config={
            "ClusterStrategy": {
                "BEClass": {"CPUQoS": {"Enable": True, "groupidentity": -1}},
                "other": 1,
            },
            "nodestrategys": [],
        },
        colocation_config={
            "Enable": True,
            "enabled": False,
            "NodeConfigs": [
                {
                    "Name": "db",
                    "NODESELECTOR": {"matchlabels": {"pool": "db"}, "matchNames": {}},
                    "cpuReclaimThresholdPercent": 40,
                    "cpuReclaimThreshold": 40,
                }
            ],
        },
    )
    where = "ConfigMap koordinator-system/slo-controller-config data"
    assert problems == [
        f"{where}[colocation-config]: unknown members: enabled (did you mean enable?)",
        f"{where}[colocation-config].nodeConfigs[0].nodeSelector: "
        "unknown members: matchNames (did you mean matchLabels?)",
        f"{where}[colocation-config].nodeConfigs[0]: unknown members: cpuReclaimThreshold "
        "(did you mean cpuReclaimThresholdPercent or memoryReclaimThresholdPercent?)",
        f"{where}[resource-qos-config]: unknown members: nodestrategys "
        "(did you mean nodeStrategies?)",
        f"{where}[resource-qos-config].clusterStrategy: unknown members: other",
    ]
    strategy, entry = config.colocation.of({"pool": "db"})
    assert (entry, strategy["enable"], strategy["cpuReclaimThresholdPercent"]) == ("db", True, 40)
    assert spec(config)["resourceQOSStrategy"] == {
        "beClass": {"cpuQOS": {"enable": True, "groupIdentity": -1}}
    }


def test_an_empty_choice_is_none_and_is_never_sent_to_a_node() -> None:
    config, problems = load(
        cpu_burst_config={
            "clusterStrategy": {"policy": "auto"},
            "nodeStrategies": [{"name": "db", "nodeSelector": DB, "policy": ""}],
        },
        resource_threshold_config={"clusterStrategy": {"cpuSuppressPolicy": ""}},
        host_application_config={"applications": [{"name": "nginx", "qos": "", "priority": ""}]},
    )
    assert problems == []
    got = spec(config, {"pool": "db"})
    assert got["cpuBurstStrategy"]["policy"] == "auto"
    assert got["resourceUsedThresholdWithBE"]["cpuSuppressPolicy"] == "cpuset"
    assert got["hostApplications"] == [{"name": "nginx"}]


def test_bandwidth_is_inherited_by_entries_and_replaced_by_the_nodes_annotation() -> None:
    config, _ = load(
        system_config={
            "clusterStrategy": {"totalNetworkBandwidth": "1000M"},
            "nodeStrategies": [{"name": "db", "nodeSelector": DB, "watermarkScaleFactor": 150}],
        }
    )
    assert spec(config, {"pool": "db"})["systemStrategy"] == {
        "totalNetworkBandwidth": "1G",
        "watermarkScaleFactor": 150,
    }
    with_annotation = spec(config, annotations={ANNOTATION_NETWORK_BANDWIDTH: "2000M"})
    assert with_annotation["systemStrategy"]["totalNetworkBandwidth"] == "2G"
    bad = node_slo_spec(
        config, name="n1", labels={}, annotations={ANNOTATION_NETWORK_BANDWIDTH: "fast"}
    )
    assert bad.spec["systemStrategy"]["totalNetworkBandwidth"] == "1G"
    assert "Node n1" in bad.problems[0]


def test_host_applications_of_an_entry_replace_the_clusters() -> None:
    nginx = {"name": "nginx", "qos": "LS", "cgroupPath": {"base": "CgroupRoot"}}
    config, _ = load(
        host_application_config={
            "applications": [nginx],
            "nodeConfigs": [{"name": "edge", "nodeSelector": DB, "applications": []}],
        }
    )
    assert spec(config)["hostApplications"] == [nginx]
    # An empty list is stored as absent; writing it would be a difference forever.
    assert "hostApplications" not in spec(config, {"pool": "db"})


def test_the_api_servers_defaults_are_no_difference() -> None:
    config, _ = load(
        resource_qos_config={"clusterStrategy": {"lsClass": {"networkQOS": {"enable": True}}}}
    )
    computed = spec(config)
    stored = json.loads(json.dumps(computed))
    stored["resourceQOSStrategy"]["lsClass"]["networkQOS"]["ingressLimit"] = 100
    assert conform_node_slo(stored) == computed


def test_every_computed_spec_is_one_that_nodes_accept() -> None:
    config, _ = load(
        resource_qos_config={
            "clusterStrategy": {
                "lsrClass": {"cpuQOS": {"enable": True, "groupIdentity": 2}},
                "beClass": {
                    "resctrlQOS": {"enable": True, "catRangeEndPercent": 30},
                    "blkioQOS": {"enable": True, "blocks": [{"name": "/dev/sdb"}]},
                },
            }
        }
    )
    decoded = decode_nodeslo({"spec": spec(config)}, obj="NodeSLO n1")
    assert decoded.resource_qos_strategy.be_class.blkio_qos.blocks[0].name == "/dev/sdb"


# --- colocation --------------------------------------------------------------------------------


def colocation(
    config: SLOConfig,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Any:
    return node_colocation(config, name="n1", labels=labels or {}, annotations=annotations or {})


def test_an_entry_can_switch_co_location_off_but_not_on() -> None:
    entry = {"name": "db", "nodeSelector": DB, "enable": False}
    config, _ = load(colocation_config={"enable": True, "nodeConfigs": [entry]})
    assert colocation(config).enabled is True
    assert colocation(config, {"pool": "db"}).enabled is False
    off, _ = load(colocation_config={"enable": False, "nodeConfigs": [{**entry, "enable": True}]})
    assert colocation(off, {"pool": "db"}).enabled is False
    assert colocation(off, {"pool": "db"}).strategy.enable is True


def test_annotation_then_labels_win_over_the_config_map() -> None:
    config, _ = load(colocation_config={"enable": True, "cpuReclaimThresholdPercent": 70})
    annotation = {
        ANNOTATION_COLOCATION_STRATEGY: '{"cpuReclaimThresholdPercent":50,"degradeTimeMinutes":5}'
    }
    got = colocation(config, annotations=annotation)
    assert got.strategy.cpu_reclaim_threshold_percent == 50
    assert got.strategy.degrade_time_minutes == 5
    got = colocation(config, {LABEL_CPU_RECLAIM_RATIO: "0.8"}, annotations=annotation)
    assert got.strategy.cpu_reclaim_threshold_percent == 80


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"degradeTimeMinutes":0}',
        '{"degradeTimeMinutes":5,"metricAggregatePolicy":{"durations":["soon"]}}',
    ],
)
def test_an_unusable_annotation_is_reported_and_ignored(text: str) -> None:
    config, _ = load(colocation_config={"enable": True})
    got = colocation(config, annotations={ANNOTATION_COLOCATION_STRATEGY: text})
    assert got.strategy.degrade_time_minutes == 15
    assert "Node n1" in got.problems[0]


def test_an_empty_text_is_the_default_and_an_invalid_one_keeps_the_old() -> None:
    good, _ = load(colocation_config={"enable": True, "degradeTimeMinutes": 7})
    empty, problems = load(good, colocation_config="")
    assert problems == []
    assert colocation(empty).enabled is False
    kept, problems = load(good, colocation_config={"enable": True, "degradeTimeMinutes": 0})
    assert "degradeTimeMinutes" in problems[0]
    assert colocation(kept).strategy.degrade_time_minutes == 7


@pytest.mark.parametrize(
    ("text", "percent"), [("0.29", 29), ("0.57", 57), ("1.15", 115), ("0", 0), ("0.999", 99)]
)
def test_ratios_are_exact_decimals(text: str, percent: int) -> None:
    assert ratio_percent(text) == percent


@pytest.mark.parametrize("text", ["NaN", "Inf", "-0.1", "x", "", "1e9"])
def test_what_is_no_ratio_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ratio"):
        ratio_percent(text)
