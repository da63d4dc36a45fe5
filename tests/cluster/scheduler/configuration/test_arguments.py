"""Plugin arguments: defaults as in the reference, and what a file changes of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.decode import enc_hook
from apis.quantity import Quantity
from cluster.scheduler.configuration.plugin_arguments import ARGUMENTS, Arguments
from cluster.scheduler.configuration.reading import default_configuration
from cluster.scheduler.configuration.strict import Seconds
from tests.cluster.scheduler.configuration.files import args, chart_file, file, load

CPU_AND_MEMORY = [{"name": "cpu", "weight": 1}, {"name": "memory", "weight": 1}]
LEAST = {"type": "LeastAllocated", "resources": CPU_AND_MEMORY}
NO_LIMIT = {"cpu": 1844674407370955161, "memory": 1844674407370955161}

DEFAULTS: dict[str, dict[str, Any]] = {
    "NodeResourcesFit": {
        "ignoredResources": [],
        "ignoredResourceGroups": [],
        "scoringStrategy": {**LEAST, "requestedToCapacityRatio": None},
    },
    "NodeResourcesBalancedAllocation": {"resources": CPU_AND_MEMORY},
    "PodTopologySpread": {"defaultConstraints": [], "defaultingType": "System"},
    "InterPodAffinity": {
        "hardPodAffinityWeight": 1,
        "ignorePreferredTermsOfExistingPods": False,
    },
    "NodeAffinity": {"addedAffinity": None},
    "VolumeBinding": {"bindTimeoutSeconds": 600, "shape": []},
    "DefaultPreemption": {
        "minCandidateNodesPercentage": 10,
        "minCandidateNodesAbsolute": 100,
        "compat": [],
    },
    "DynamicResources": {"filterTimeout": 10, "bindingTimeout": 600},
    "LoadAwareScheduling": {
        "filterExpiredNodeMetrics": True,
        "nodeMetricExpirationSeconds": 180,
        "enableScheduleWhenNodeMetricsExpired": False,
        "resourceWeights": {"cpu": 1, "memory": 1},
        "dominantResourceWeight": 0,
        "usageThresholds": {"cpu": 65, "memory": 95},
        "prodUsageThresholds": {},
        "prodUsageIncludeSys": False,
        "scoreAccordingProdUsage": False,
        "estimator": "defaultEstimator",
        "estimatedScalingFactors": {"cpu": 85, "memory": 70},
        "estimatedSecondsAfterPodScheduled": None,
        "estimatedSecondsAfterInitialized": None,
        "allowCustomizeEstimation": False,
        "aggregated": None,
        "supportedResources": [],
        "compat": [],
    },
    "NodeNUMAResource": {
        "defaultCPUBindPolicy": "FullPCPUs",
        "scoringStrategy": LEAST,
        "numaScoringStrategy": LEAST,
        "compat": [],
    },
    "DeviceShare": {
        "allocator": "",
        "scoringStrategy": {
            "type": "LeastAllocated",
            "resources": [
                {"name": f"koordinator.sh/{name}", "weight": 1}
                for name in ("gpu-memory-ratio", "gpu-memory", "rdma", "fpga")
            ],
        },
        "disableDeviceNUMATopologyAlignment": False,
        "gpuSharedResourceTemplatesConfig": {
            "configMapNamespace": "koordinator-system",
            "configMapName": "gpu-shared-resource-templates",
            "matchedResources": ["huawei.com/npu-core"],
        },
        "gpuShareUnsupportedModels": [],
    },
    "Reservation": {
        "enablePreemption": False,
        "minCandidateNodesPercentage": 10,
        "minCandidateNodesAbsolute": 100,
        "controllerWorkers": 1,
        "gcDurationSeconds": 86400,
        "gcIntervalSeconds": 60,
        "disableGarbageCollection": False,
        "resyncIntervalSeconds": 60,
        "preAllocationConfig": {
            "enableClusterMode": False,
            "clusterLabelKey": "pod.koordinator.sh/is-pre-allocatable",
            "clusterPriorityAnnotationKey": "pod.koordinator.sh/pre-allocatable-priority",
            "preferNoPreAllocatedPods": False,
        },
        "ignoredResources": [],
        "ignoredResourceGroups": [],
        "reservationSelectorIndex": {"enabled": False, "keyPrefixes": [], "keys": []},
        "compat": [],
    },
    "Coscheduling": {
        "defaultTimeout": 600,
        "controllerWorkers": 1,
        "skipCheckScheduleCycle": False,
        "enablePreemption": False,
        "awareNetworkTopology": False,
        "defaultMatchPolicy": "once-satisfied",
    },
    "ElasticQuota": {
        "delayEvictTime": 120,
        "revokePodInterval": 1,
        "defaultQuotaGroupMax": {name: str(amount) for name, amount in NO_LIMIT.items()},
        "systemQuotaGroupMax": {name: str(amount) for name, amount in NO_LIMIT.items()},
        "quotaGroupNamespace": "koordinator-system",
        "monitorAllQuotas": False,
        "enableCheckParentQuota": False,
        "enableRuntimeQuota": True,
        "enableMinQuotaScale": True,
        "disableDefaultQuotaPreemption": True,
        "enableQueueHint": False,
        "quotaSnapshotUpdateInterval": 120,
        "hookPlugins": [],
    },
    "NodeResourcesFitPlus": {"resources": {}},
    "ScarceResourceAvoidance": {"resources": []},
    "SchedulingHint": {"maxHintNodes": 100},
}


def plain(arguments: Arguments, plugin: str) -> Any:
    value = getattr(arguments, ARGUMENTS[plugin].member)
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_encode))


def _encode(value: Any) -> Any:
    return float(value) if isinstance(value, float) else enc_hook(value)


def given(plugin: str, **members: Any) -> Arguments:
    profile = {"pluginConfig": [args(plugin, **members)]}
    return load(file(profiles=[profile])).profiles[0].arguments


@pytest.mark.parametrize("plugin", ARGUMENTS)
def test_defaults(plugin: str) -> None:
    expected = DEFAULTS[plugin]
    assert plain(default_configuration().profiles[0].arguments, plugin) == expected
    assert plain(given(plugin), plugin) == expected


@pytest.mark.parametrize("plugin", ARGUMENTS)
def test_null_counts_as_absent(plugin: str) -> None:
    nothing = dict.fromkeys(DEFAULTS[plugin])
    assert plain(given(plugin, **nothing), plugin) == DEFAULTS[plugin]


def test_the_charts_arguments() -> None:
    found = load(chart_file()).profiles[0].arguments
    assert [each.name for each in found.node_resources_fit.scoring_strategy.resources] == [
        "cpu",
        "memory",
        "kubernetes.io/batch-cpu",
        "kubernetes.io/batch-memory",
    ]
    assert not found.load_aware_scheduling.filter_expired_node_metrics
    assert found.load_aware_scheduling.node_metric_expiration_seconds == 300
    assert found.coscheduling.enable_preemption and found.coscheduling.aware_network_topology
    assert found.device_share.gpu_share_unsupported_models[0].vendor == "huawei"


@pytest.mark.parametrize(
    ("plugin", "members", "expected"),
    [
        # defaults that depend on other arguments
        (
            "LoadAwareScheduling",
            {"dominantResourceWeight": 1},
            {"dominantResourceWeight": 1, "resourceWeights": {}},
        ),
        ("LoadAwareScheduling", {"usageThresholds": {"cpu": 0}}, {"usageThresholds": {"cpu": 0}}),
        (
            "LoadAwareScheduling",
            {"estimatedScalingFactors": {"cpu": 50}},
            {"estimatedScalingFactors": {"cpu": 50, "memory": 70}},
        ),
        ("LoadAwareScheduling", {"estimator": ""}, {"estimator": "defaultEstimator"}),
        (
            "LoadAwareScheduling",
            {
                "aggregated": {
                    "usageThresholds": {"cpu": 60},
                    "usageAggregationType": "p95",
                    "usageAggregatedDuration": "10m",
                }
            },
            {
                "aggregated": {
                    "usageThresholds": {"cpu": 60},
                    "usageAggregationType": "p95",
                    "usageAggregatedDuration": 600,
                    "scoreAggregationType": "",
                    "scoreAggregatedDuration": None,
                }
            },
        ),
        # a weight of 0 is the default, and so are resources that are not named
        (
            "NodeResourcesFit",
            {"scoringStrategy": {"type": "MostAllocated", "resources": [{"name": "cpu"}]}},
            {
                "scoringStrategy": {
                    "type": "MostAllocated",
                    "resources": [{"name": "cpu", "weight": 1}],
                    "requestedToCapacityRatio": None,
                }
            },
        ),
        (
            "NodeResourcesBalancedAllocation",
            {"resources": [{"name": "cpu", "weight": 0}, {"name": "a.io/x"}]},
            {"resources": [{"name": "cpu", "weight": 1}, {"name": "a.io/x", "weight": 1}]},
        ),
        (
            "NodeNUMAResource",
            {
                "defaultCPUBindPolicy": "",
                "scoringStrategy": {
                    "type": "MostAllocated",
                    "resources": [{"name": "cpu", "weight": 0}],
                },
                "numaScoringStrategy": {"type": "MostAllocated"},
            },
            {
                "defaultCPUBindPolicy": "",
                "scoringStrategy": {
                    "type": "MostAllocated",
                    "resources": [{"name": "cpu", "weight": 1}],
                },
                "numaScoringStrategy": {"type": "MostAllocated", "resources": CPU_AND_MEMORY},
            },
        ),
        (
            "NodeNUMAResource",
            {"compat": ["LSEPodsShareCores"]},
            {"compat": ["LSEPodsShareCores"]},
        ),
        ("Reservation", {"gcDurationSeconds": 0}, {"gcDurationSeconds": 86400}),
        (
            "ElasticQuota",
            {"quotaGroupNamespace": ""},
            {"quotaGroupNamespace": "koordinator-system"},
        ),
        ("ElasticQuota", {"delayEvictTime": "1m30s"}, {"delayEvictTime": 90}),
        (
            "NodeResourcesFitPlus",
            {"resources": {"nvidia.com/gpu": {"type": "MostAllocated", "weight": 2}}},
            {"resources": {"nvidia.com/gpu": {"type": "MostAllocated", "weight": 2}}},
        ),
        (
            "Reservation",
            {"ignoredResources": ["example.com/gpu"], "ignoredResourceGroups": ["example.com"]},
            {"ignoredResources": ["example.com/gpu"], "ignoredResourceGroups": ["example.com"]},
        ),
    ],
)
def test_arguments_of_a_file(
    plugin: str, members: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert plain(given(plugin, **members), plugin) == DEFAULTS[plugin] | expected


def test_limits_of_quotas_are_quantities() -> None:
    found = given("ElasticQuota", defaultQuotaGroupMax={"cpu": "500m", "memory": "1Gi"})
    assert found.elastic_quota.default_quota_group_max == {
        "cpu": Quantity.of_milli(500),
        "memory": Quantity.of(2**30),
    }


def test_a_capacity_ratio() -> None:
    shape = [{"utilization": 0, "score": 0}, {"utilization": 100, "score": 10}]
    found = given(
        "NodeResourcesFit",
        scoringStrategy={
            "type": "RequestedToCapacityRatio",
            "requestedToCapacityRatio": {"shape": shape},
        },
    )
    ratio = found.node_resources_fit.scoring_strategy.requested_to_capacity_ratio
    assert ratio is not None
    assert [(each.utilization, each.score) for each in ratio.shape] == [(0, 0), (100, 10)]


def test_default_spread_constraints() -> None:
    system = given("PodTopologySpread").pod_topology_spread.constraints
    assert [(each.topology_key, each.max_skew, each.when_unsatisfiable) for each in system] == [
        ("kubernetes.io/hostname", 3, "ScheduleAnyway"),
        ("topology.kubernetes.io/zone", 5, "ScheduleAnyway"),
    ]
    constraint = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
    listed = given(
        "PodTopologySpread", defaultingType="List", defaultConstraints=[constraint]
    ).pod_topology_spread.constraints
    assert [(each.topology_key, each.max_skew, each.when_unsatisfiable) for each in listed] == [
        ("rack", 2, "DoNotSchedule")
    ]
    assert given("PodTopologySpread", defaultingType="List").pod_topology_spread.constraints == ()


def test_added_affinity() -> None:
    terms = [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}]
    found = given(
        "NodeAffinity",
        addedAffinity={
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        },
    ).node_affinity.added_affinity
    assert found is not None and found.required is not None
    assert found.required.node_selector_terms[0].match_expressions[0].values == ("a",)


def test_resources_that_extenders_manage_are_ignored_in_every_profile() -> None:
    extender = {
        "urlPrefix": "http://extender/x",
        "filterVerb": "filter",
        "managedResources": [
            {"name": "a.io/x", "ignoredByScheduler": True},
            {"name": "a.io/y"},
        ],
    }
    found = load(
        file(
            extenders=[extender],
            profiles=[
                {"schedulerName": "a"},
                {
                    "schedulerName": "b",
                    "pluginConfig": [args("NodeResourcesFit", ignoredResources=["b.io/z"])],
                },
            ],
        )
    )
    ignored = [each.arguments.node_resources_fit.ignored_resources for each in found.profiles]
    assert ignored == [("a.io/x",), ("b.io/z", "a.io/x")]
    assert found.extenders[0].http_timeout == Seconds(5)


def test_what_has_no_effect_is_said() -> None:
    found = load(
        file(
            parallelism=8,
            percentageOfNodesToScore=50,
            clientConnection={"contentType": "application/json"},
            profiles=[
                {
                    "pluginConfig": [
                        args("Coscheduling", skipCheckScheduleCycle=True),
                        args("Reservation", reservationSelectorIndex={"enabled": True}),
                    ]
                }
            ],
        )
    )
    assert [notice.split(" has no effect")[0] for notice in found.notices] == [
        "parallelism",
        "percentageOfNodesToScore",
        "clientConnection.contentType",
        "profiles[0].pluginConfig[0].args.skipCheckScheduleCycle",
        "profiles[0].pluginConfig[1].args.reservationSelectorIndex",
    ]
    assert found.parallelism == 8 and found.percentage_of_nodes_to_score == 50


def test_zeros_of_the_process_are_defaults() -> None:
    found = load(
        file(
            clientConnection={"qps": 0, "burst": 0, "contentType": ""},
            leaderElection={"leaseDuration": "0s", "resourceName": ""},
        )
    )
    assert (found.client_connection.qps, found.client_connection.burst) == (50, 100)
    assert found.leader_election == default_configuration().leader_election
