"""Files with one mistake each, the field that has it, and words of the message."""

from __future__ import annotations

from typing import Any

from tests.cluster.scheduler.configuration.files import GROUP_VERSION, Tree, args, enabled, file


def plugins(**members: Any) -> Tree:
    return file(profiles=[{"plugins": members}])


def configured(plugin: str, **members: Any) -> Tree:
    return file(profiles=[{"pluginConfig": [args(plugin, **members)]}])


def spread(**members: Any) -> Tree:
    constraint = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    return configured(
        "PodTopologySpread", defaultingType="List", defaultConstraints=[constraint | members]
    )


def required(*requirements: Tree, kind: str = "matchExpressions") -> Tree:
    terms = {"nodeSelectorTerms": [{kind: list(requirements)}]}
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return configured("NodeAffinity", addedAffinity=affinity)


def ratio(*points: tuple[int, int]) -> Tree:
    shape = [{"utilization": utilization, "score": score} for utilization, score in points]
    return configured(
        "NodeResourcesFit",
        scoringStrategy={
            "type": "RequestedToCapacityRatio",
            "requestedToCapacityRatio": {"shape": shape},
        },
    )


def extender(**members: Any) -> Tree:
    return file(extenders=[{"urlPrefix": "http://127.0.0.1:8080/x", **members}])


ARGS = "profiles[0].pluginConfig[0].args"
TERM = f"{ARGS}.addedAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
SHAPE = f"{ARGS}.scoringStrategy.requestedToCapacityRatio.shape"
LEASE = {"leaseDuration": "15s", "renewDeadline": "10s", "retryPeriod": "2s"}

BAD: list[tuple[Tree, str, str]] = [
    # the frame
    ({"kind": "KubeSchedulerConfiguration"}, "apiVersion", f"expected {GROUP_VERSION}"),
    (
        {"apiVersion": "kubescheduler.config.k8s.io/v1beta3", "kind": "KubeSchedulerConfiguration"},
        "apiVersion",
        "nothing else of the file was read",
    ),
    ({"apiVersion": GROUP_VERSION, "kind": "Policy"}, "kind", "KubeSchedulerConfiguration"),
    (file(parallelism=0), "parallelism", "1 or more|1 to"),
    (file(parallelism="16"), "parallelism", "a whole number.*got text"),
    (file(parallelism=2**31), "parallelism", "2^31-1".replace("^", r"\^")),
    (file(parallelism=1.5), "parallelism", "whole number"),
    (file(percentageOfNodesToScore=101), "percentageOfNodesToScore", "0 to 100"),
    (file(percentageOfNodesToScore=-1), "percentageOfNodesToScore", "0 to 100"),
    (file(podInitialBackoffSeconds=0), "podInitialBackoffSeconds", "1 or more"),
    (file(podInitialBackoffSeconds=-1), "podInitialBackoffSeconds", "0 to"),
    (file(podInitialBackoffSeconds=20), "podMaxBackoffSeconds", "which is 20"),
    (file(podMaxBackoffSeconds=2**63), "podMaxBackoffSeconds", "whole number"),
    (file(healthzBindAddress="0.0.0.0:1"), "healthzBindAddress", "unknown field"),
    (file(profile=[]), "profile", "did you mean profiles"),
    (file(profiles={}), "profiles", "expected a list"),
    (file(profiles=["a"]), "profiles[0]", "expected an object"),
    (file(profiles=[None]), "profiles[0]", "expected an object"),
    (file(extenders=[7]), "extenders[0]", "expected an object"),
    (file(clientConnection={"qps": "fast"}), "clientConnection.qps", "a number"),
    (file(clientConnection={"burst": -1}), "clientConnection.burst", "0 to"),
    (file(clientConnection={"kubeConfig": "/a"}), "clientConnection.kubeConfig", "kubeconfig"),
    (file(leaderElection={"leaderElect": "yes"}), "leaderElection.leaderElect", "true or false"),
    (
        file(leaderElection={"resourceLock": "endpoints"}),
        "leaderElection.resourceLock",
        "expected leases",
    ),
    (
        file(leaderElection={"leaseDuration": 15}),
        "leaderElection.leaseDuration",
        "a duration such as",
    ),
    (file(leaderElection={"retryPeriod": "-1s"}), "leaderElection.retryPeriod", "not be negative"),
    (file(leaderElection={"retryPeriod": "soon"}), "leaderElection.retryPeriod", "not a duration"),
    (
        file(leaderElection=LEASE | {"leaseDuration": "10s"}),
        "leaderElection.leaseDuration",
        "greater than renewDeadline, which is 10s",
    ),
    (
        file(leaderElection=LEASE | {"retryPeriod": "9s"}),
        "leaderElection.renewDeadline",
        "1.2 times retryPeriod",
    ),
    # profiles
    (file(profiles=[{"schedulerName": 7}]), "profiles[0].schedulerName", "expected text"),
    (file(profiles=[{"name": "a"}]), "profiles[0].name", "unknown field"),
    (
        file(profiles=[{"schedulerName": "a"}, {"schedulerName": "a"}]),
        "profiles[1].schedulerName",
        r"profiles\[0\] has the same name",
    ),
    (
        file(profiles=[{"schedulerName": "a"}, {}]),
        "profiles[1].schedulerName",
        "several profiles",
    ),
    (
        file(profiles=[{"percentageOfNodesToScore": 200}]),
        "profiles[0].percentageOfNodesToScore",
        "0 to 100",
    ),
    (file(profiles=[{"plugins": []}]), "profiles[0].plugins", "expected an object"),
    (plugins(filters={}), "profiles[0].plugins.filters", "did you mean"),
    (plugins(filter=[]), "profiles[0].plugins.filter", "expected an object"),
    (plugins(filter={"enable": []}), "profiles[0].plugins.filter.enable", "enabled"),
    (plugins(filter={"enabled": 3}), "profiles[0].plugins.filter.enabled", "a list"),
    (plugins(filter={"enabled": {}}), "profiles[0].plugins.filter.enabled", "a list"),
    (plugins(filter={"enabled": ["NodeName"]}), "profiles[0].plugins.filter.enabled[0]", "object"),
    (plugins(filter={"enabled": [None]}), "profiles[0].plugins.filter.enabled[0]", "object"),
    (plugins(filter={"enabled": [{}]}), "profiles[0].plugins.filter.enabled[0]", "name is missing"),
    (
        plugins(
            score={"enabled": [{"name": "ImageLocality"}, {"name": "DeviceShare", "weight": -1}]}
        ),
        "profiles[0].plugins.score.enabled[1].weight",
        "0 to",
    ),
    (
        plugins(score=enabled("ImageLocality:2147483648")),
        "profiles[0].plugins.score.enabled[0].weight",
        r"2\^31-1",
    ),
    (
        plugins(score={"enabled": [{"name": "ImageLocality", "weight": "5"}]}),
        "profiles[0].plugins.score.enabled[0].weight",
        "got text",
    ),
    (
        plugins(filter=enabled("LoadAware")),
        "profiles[0].plugins.filter.enabled[0].name",
        "unknown plugin.*LoadAwareScheduling",
    ),
    (
        plugins(filter=enabled("Zzz")),
        "profiles[0].plugins.filter.enabled[0].name",
        "known plugins: SchedulingGates, .*SchedulingHint",
    ),
    (plugins(filter=enabled("*")), "profiles[0].plugins.filter.enabled[0].name", "unknown plugin"),
    (
        plugins(filter=enabled(disabled=("NodNam",))),
        "profiles[0].plugins.filter.disabled[0].name",
        "did you mean NodeName",
    ),
    (
        plugins(filter=enabled("EBSLimits")),
        "profiles[0].plugins.filter.enabled[0].name",
        "removed from kube-scheduler",
    ),
    (
        plugins(queueSort=enabled("Coscheduling", disabled=("*",))),
        "profiles[0].plugins.queueSort.enabled[0].name",
        "does not extend queueSort.*plugins of queueSort: PrioritySort",
    ),
    (
        plugins(filter=enabled("NodeName", "NodeName")),
        "profiles[0].plugins.filter.enabled[1].name",
        "stands twice",
    ),
    (
        plugins(multiPoint=enabled("DeviceShare", "DeviceShare")),
        "profiles[0].plugins.multiPoint.enabled[1].name",
        "stands twice",
    ),
    (
        plugins(queueSort=enabled(disabled=("*",))),
        "profiles[0].plugins.queueSort",
        "enable PrioritySort",
    ),
    (plugins(bind=enabled(disabled=("*",))), "profiles[0].plugins.bind", "enable DefaultBinder"),
    (
        plugins(placementScore=enabled("NodeName")),
        "profiles[0].plugins.placementScore.enabled[0].name",
        "does not extend placementScore",
    ),
    # pluginConfig
    (file(profiles=[{"pluginConfig": {}}]), "profiles[0].pluginConfig", "a list"),
    (file(profiles=[{"pluginConfig": [{}]}]), "profiles[0].pluginConfig[0]", "name is missing"),
    (
        file(profiles=[{"pluginConfig": [{"name": "NodeName", "arg": {}}]}]),
        "profiles[0].pluginConfig[0].arg",
        "did you mean args",
    ),
    (
        file(profiles=[{"pluginConfig": [{"name": "DeviceShare", "args": "x"}]}]),
        ARGS,
        "an object",
    ),
    (
        file(profiles=[{"pluginConfig": [args("DeviceShare"), args("DeviceShare")]}]),
        "profiles[0].pluginConfig[1].name",
        "stands twice",
    ),
    (configured("Sample"), "profiles[0].pluginConfig[0].name", "unknown plugin"),
    (configured("NodeLabel"), "profiles[0].pluginConfig[0].name", "was removed"),
    (configured("NodeName", a=1), ARGS, "takes no arguments"),
    (configured("DeviceShare", kind="ReservationArgs"), f"{ARGS}.kind", "DeviceShareArgs"),
    (configured("DeviceShare", apiVersion="v1"), f"{ARGS}.apiVersion", GROUP_VERSION),
    (configured("DeviceShare", apiVersion=[]), f"{ARGS}.apiVersion", GROUP_VERSION),
    # kube-scheduler's plugins
    (
        configured("NodeResourcesFit", scoringStrategy={"resources": []}),
        f"{ARGS}.scoringStrategy",
        "type is missing",
    ),
    (
        configured("NodeResourcesFit", scoringStrategy={"type": "Least"}),
        f"{ARGS}.scoringStrategy.type",
        "LeastAllocated, MostAllocated, RequestedToCapacityRatio",
    ),
    (
        configured(
            "NodeResourcesFit",
            scoringStrategy={
                "type": "MostAllocated",
                "resources": [{"name": "cpu", "weight": 101}],
            },
        ),
        f"{ARGS}.scoringStrategy.resources[0].weight",
        "0 to 100",
    ),
    (
        configured(
            "NodeResourcesFit",
            scoringStrategy={
                "type": "MostAllocated",
                "resources": [{"name": "cpu"}, {"name": "cpu"}],
            },
        ),
        f"{ARGS}.scoringStrategy.resources[1].name",
        "stands twice",
    ),
    (
        configured(
            "NodeResourcesFit",
            scoringStrategy={"type": "MostAllocated", "requestedToCapacityRatio": {"shape": []}},
        ),
        f"{ARGS}.scoringStrategy.requestedToCapacityRatio",
        "cannot be combined with type MostAllocated",
    ),
    (ratio(), SHAPE, "at least one point"),
    (ratio((50, 1), (50, 2)), f"{SHAPE}[1].utilization", "greater than that of the point before"),
    (ratio((0, 11)), f"{SHAPE}[0].score", "0 to 10"),
    (ratio((101, 1)), f"{SHAPE}[0].utilization", "0 to 100"),
    (
        configured("NodeResourcesFit", ignoredResources=["a b"]),
        f"{ARGS}.ignoredResources[0]",
        "letters, digits",
    ),
    (
        configured("NodeResourcesFit", ignoredResourceGroups=["example.com/x"]),
        f"{ARGS}.ignoredResourceGroups[0]",
        "before the /",
    ),
    (
        configured("NodeResourcesBalancedAllocation", resources=[{"name": "cpu", "weight": 2}]),
        f"{ARGS}.resources[0].weight",
        "must be 1",
    ),
    (
        configured("PodTopologySpread", defaultingType="Zone"),
        f"{ARGS}.defaultingType",
        "System, List",
    ),
    (
        configured(
            "PodTopologySpread",
            defaultConstraints=[
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
        ),
        f"{ARGS}.defaultingType",
        "System cannot be combined.*write defaultingType: List",
    ),
    (spread(maxSkew=0), f"{ARGS}.defaultConstraints[0].maxSkew", "1 to"),
    (spread(topologyKey=""), f"{ARGS}.defaultConstraints[0].topologyKey", "label key"),
    (
        spread(whenUnsatisfiable="Never"),
        f"{ARGS}.defaultConstraints[0].whenUnsatisfiable",
        "DoNotSchedule, ScheduleAnyway",
    ),
    (spread(labelSelector={}), f"{ARGS}.defaultConstraints[0].labelSelector", "unknown field"),
    (
        configured(
            "PodTopologySpread",
            defaultingType="List",
            defaultConstraints=[
                {"maxSkew": skew, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
                for skew in (1, 2)
            ],
        ),
        f"{ARGS}.defaultConstraints[1]",
        "stand twice",
    ),
    (
        configured("InterPodAffinity", hardPodAffinityWeight=101),
        f"{ARGS}.hardPodAffinityWeight",
        "0 to 100",
    ),
    (
        configured(
            "NodeAffinity", addedAffinity={"requiredDuringSchedulingIgnoredDuringExecution": {}}
        ),
        TERM.removesuffix("[0]"),
        "at least one term",
    ),
    (
        required({"key": "a", "operator": "Equals", "values": ["b"]}),
        f"{TERM}.matchExpressions[0].operator",
        "In, NotIn",
    ),
    (
        required({"key": "a", "operator": "In"}),
        f"{TERM}.matchExpressions[0].values",
        "at least one value",
    ),
    (
        required({"key": "a", "operator": "Exists", "values": ["x"]}),
        f"{TERM}.matchExpressions[0].values",
        "no values",
    ),
    (
        required({"key": "a", "operator": "Gt", "values": ["many"]}),
        f"{TERM}.matchExpressions[0].values",
        "whole numbers",
    ),
    (
        required({"key": "a b", "operator": "Exists"}),
        f"{TERM}.matchExpressions[0].key",
        "label key",
    ),
    (
        required({"key": "a", "operator": "In", "value": ["x"], "values": ["x"]}),
        f"{TERM}.matchExpressions[0].value",
        "did you mean values",
    ),
    (
        required({"key": "spec.x", "operator": "In", "values": ["x"]}, kind="matchFields"),
        f"{TERM}.matchFields[0].key",
        "metadata.name",
    ),
    (
        configured(
            "NodeAffinity",
            addedAffinity={
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 0, "preference": {}}]
            },
        ),
        f"{ARGS}.addedAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].weight",
        "1 to 100",
    ),
    (
        configured("VolumeBinding", bindTimeoutSeconds=-1),
        f"{ARGS}.bindTimeoutSeconds",
        "0 to",
    ),
    (
        configured("VolumeBinding", shape=[{"utilization": 0, "score": 0}]),
        f"{ARGS}.shape",
        "alpha feature",
    ),
    (
        configured("DefaultPreemption", minCandidateNodesPercentage=0, minCandidateNodesAbsolute=0),
        f"{ARGS}.minCandidateNodesPercentage",
        "no node would be tried",
    ),
    (configured("DynamicResources", filterTimeout="x"), f"{ARGS}.filterTimeout", "duration"),
    # Koordinator's plugins
    (
        configured("LoadAwareScheduling", nodeMetricExpirationSeconds=0),
        f"{ARGS}.nodeMetricExpirationSeconds",
        "1 to",
    ),
    (
        configured("LoadAwareScheduling", usageThresholds={"cpu": 101}),
        f"{ARGS}.usageThresholds.cpu",
        "0 to 100",
    ),
    (
        configured("LoadAwareScheduling", prodUsageThresholds={"cpu": -1}),
        f"{ARGS}.prodUsageThresholds.cpu",
        "0 to 100",
    ),
    (
        configured("LoadAwareScheduling", usageThresholds={"c p u": 1}),
        f'{ARGS}.usageThresholds["c p u"]',
        "letters",
    ),
    (
        configured("LoadAwareScheduling", resourceWeights={"cpu": 0}),
        f"{ARGS}.resourceWeights.cpu",
        "1 to 100",
    ),
    (
        configured("LoadAwareScheduling", resourceWeights={"example.com/gpu": 1}),
        f"{ARGS}.estimatedScalingFactors",
        "no factor for example.com/gpu",
    ),
    (
        configured("LoadAwareScheduling", estimatedScalingFactors={"cpu": 101}),
        f"{ARGS}.estimatedScalingFactors.cpu",
        "1 to 100",
    ),
    (configured("LoadAwareScheduling", estimator="mine"), f"{ARGS}.estimator", "defaultEstimator"),
    (
        configured("LoadAwareScheduling", dominantResourceWeight=101),
        f"{ARGS}.dominantResourceWeight",
        "0 to 100",
    ),
    (
        configured("LoadAwareScheduling", aggregated={"usageAggregationType": "p42"}),
        f"{ARGS}.aggregated.usageAggregationType",
        "avg, p50, p90, p95, p99",
    ),
    (
        configured("LoadAwareScheduling", aggregated={"scoreAggregatedDuration": "-5m"}),
        f"{ARGS}.aggregated.scoreAggregatedDuration",
        "not be negative",
    ),
    (
        configured("LoadAwareScheduling", estimatedSecondsAfterInitialized=-1),
        f"{ARGS}.estimatedSecondsAfterInitialized",
        "0 to",
    ),
    (
        configured("DefaultPreemption", compat=["Everything"]),
        f"{ARGS}.compat[0]",
        "EvictsProtectedPods",
    ),
    (
        configured("LoadAwareScheduling", compat=["Everything"]),
        f"{ARGS}.compat[0]",
        "ReservationsAreNoLoad",
    ),
    (
        configured("Reservation", compat=["PodsWithoutAffinityPassTaints", "Everything"]),
        f"{ARGS}.compat[1]",
        "PendingReservationsNeverExpire",
    ),
    (
        configured("NodeNUMAResource", compat=["Everything"]),
        f"{ARGS}.compat[0]",
        "RestrictedAcceptsWiderSets",
    ),
    (
        configured("NodeNUMAResource", defaultCPUBindPolicy="ConstrainedBurst"),
        f"{ARGS}.defaultCPUBindPolicy",
        "FullPCPUs, SpreadByPCPUs",
    ),
    (
        configured("NodeNUMAResource", numaScoringStrategy={"type": "BalancedAllocation"}),
        f"{ARGS}.numaScoringStrategy.type",
        "LeastAllocated, MostAllocated",
    ),
    (
        configured(
            "DeviceShare",
            scoringStrategy={"type": "LeastAllocated", "resources": [{"name": "a", "weight": -1}]},
        ),
        f"{ARGS}.scoringStrategy.resources[0].weight",
        "0 to 100",
    ),
    (
        configured("DeviceShare", gpuShareUnsupportedModels=[{"vendor": "huawei"}]),
        f"{ARGS}.gpuShareUnsupportedModels[0]",
        "model is missing",
    ),
    (
        configured("Reservation", ignoredResources=["cpu"]),
        f"{ARGS}.ignoredResources[0]",
        "not an extended resource",
    ),
    (
        configured("Reservation", ignoredResourceGroups=["kubernetes.io"]),
        f"{ARGS}.ignoredResourceGroups[0]",
        "not the prefix of extended resources",
    ),
    (
        configured("Reservation", minCandidateNodesAbsolute=-1),
        f"{ARGS}.minCandidateNodesAbsolute",
        "0 to",
    ),
    (configured("Reservation", gcDurationSeconds=-1), f"{ARGS}.gcDurationSeconds", "0 to"),
    (
        configured("Reservation", preAllocationConfig={"clusterLabelKey": "a/b/c"}),
        f"{ARGS}.preAllocationConfig.clusterLabelKey",
        "label key",
    ),
    (
        configured("ElasticQuota", defaultQuotaGroupMax={"cpu": -1}),
        f"{ARGS}.defaultQuotaGroupMax.cpu",
        "must not be negative",
    ),
    (
        configured("ElasticQuota", systemQuotaGroupMax={"cpu": "many"}),
        f"{ARGS}.systemQuotaGroupMax.cpu",
        "quantity",
    ),
    (
        configured("ElasticQuota", hookPlugins=[{"key": "mine", "factoryKey": "x"}]),
        f"{ARGS}.hookPlugins",
        "compiled into upstream",
    ),
    (configured("ElasticQuota", delayEvictTime="-1s"), f"{ARGS}.delayEvictTime", "negative"),
    (configured("Coscheduling", defaultTimeout=600), f"{ARGS}.defaultTimeout", "duration"),
    (configured("Coscheduling", controllerWorkers=0), f"{ARGS}.controllerWorkers", "1 to"),
    (
        configured("Coscheduling", defaultMatchPolicy="always"),
        f"{ARGS}.defaultMatchPolicy",
        "once-satisfied, waiting-and-running, only-waiting",
    ),
    (
        configured("NodeResourcesFitPlus", resources={"cpu": {"type": "LeastAllocated"}}),
        f"{ARGS}.resources.cpu",
        "weight is missing",
    ),
    (
        configured("ScarceResourceAvoidance", resources=["a b"]),
        f"{ARGS}.resources[0]",
        "letters",
    ),
    (configured("SchedulingHint", maxHintNodes=0), f"{ARGS}.maxHintNodes", "1 to"),
    # extenders
    (file(extenders=[{}]), "extenders[0]", "urlPrefix is missing"),
    (extender(urlPrefix="localhost:80"), "extenders[0].urlPrefix", "expected a URL"),
    (extender(urlPrefix="http://[::1"), "extenders[0].urlPrefix", "expected a URL"),
    (
        extender(urlPrefix="https://user:secret@host/x"),
        "extenders[0].urlPrefix",
        "must have no user or password",
    ),
    (extender(prioritizeVerb="rank"), "extenders[0].weight", "at least 1"),
    (extender(weight=-1), "extenders[0].weight", "0 to"),
    (extender(httpTimeout=5), "extenders[0].httpTimeout", "duration"),
    (
        extender(managedResources=[{"name": "cpu"}]),
        "extenders[0].managedResources[0].name",
        "extended resource",
    ),
    (
        extender(managedResources=[{"name": "a.io/x"}, {"name": "a.io/x"}]),
        "extenders[0].managedResources[1].name",
        "by an extender already",
    ),
    (
        extender(tlsConfig={"insecure": True, "caFile": "/ca"}),
        "extenders[0].tlsConfig.insecure",
        "cannot be combined",
    ),
    (extender(tlsConfig={"certFile": "/c"}), "extenders[0].tlsConfig.certFile", "needed together"),
    (extender(tlsConfig={"caData": "!"}), "extenders[0].tlsConfig.caData", "base64"),
    (
        file(extenders=[{"urlPrefix": f"http://h{n}/", "bindVerb": "bind"} for n in (0, 1)]),
        "extenders[1].bindVerb",
        r"extenders\[0\] binds already",
    ),
]
