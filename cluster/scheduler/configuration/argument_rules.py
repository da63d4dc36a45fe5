"""Rules for plugin arguments besides their types, and the defaults that depend on others.

Each function takes the arguments of one plugin as they were read, notes what cannot be used, and
returns them complete. Bounds are kube-scheduler's and upstream's; where upstream refuses a value
only when it starts the plugin, or never and then misbehaves, it is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from apis.meta import label_key_problem, label_value_problem
from apis.scheduling_pod import NodeSelectorTerm
from cluster.scheduler.configuration.arguments import (
    CPU_AND_MEMORY,
    DefaultingType,
    DefaultPreemptionArgs,
    FitStrategy,
    NodeAffinityArgs,
    NodeResourcesBalancedAllocationArgs,
    NodeResourcesFitArgs,
    PodTopologySpreadArgs,
    ResourceSpec,
    UtilizationShapePoint,
    VolumeBindingArgs,
)
from cluster.scheduler.configuration.koordinator_arguments import (
    DEFAULT_DEVICE_RESOURCES,
    DEFAULT_ESTIMATOR,
    DEFAULT_RESOURCE_WEIGHTS,
    DEFAULT_SCALING_FACTORS,
    DEFAULT_USAGE_THRESHOLDS,
    NO_LIMIT,
    DeviceShareArgs,
    ElasticQuotaArgs,
    LoadAwareSchedulingArgs,
    NodeNUMAResourceArgs,
    NodeResourcesFitPlusArgs,
    PreAllocationConfig,
    ReservationArgs,
    ScarceResourceAvoidanceArgs,
    ScoringStrategy,
)
from cluster.scheduler.configuration.strict import Problems

# --- kube-scheduler's ----------------------------------------------------------------------------


def complete_fit(args: NodeResourcesFitArgs, problems: Problems) -> NodeResourcesFitArgs:
    """Complete and check NodeResourcesFit: weights, ignored names, the shape."""
    _check_ignored(args.ignored_resources, args.ignored_resource_groups, problems)
    strategy = args.scoring_strategy
    at = problems.below("scoringStrategy")
    resources = _weighted(strategy.resources, CPU_AND_MEMORY, at.below("resources"))
    ratio = strategy.requested_to_capacity_ratio
    if strategy.type is FitStrategy.REQUESTED_TO_CAPACITY_RATIO:
        place = at.below("requestedToCapacityRatio", "shape")
        _check_shape(ratio.shape if ratio else (), place)
    elif ratio is not None:
        at.add(
            ("requestedToCapacityRatio",),
            ratio,
            f"cannot be combined with type {strategy.type.value}",
            "it belongs to type RequestedToCapacityRatio",
        )
    return replace(args, scoring_strategy=replace(strategy, resources=resources))


def complete_balanced(
    args: NodeResourcesBalancedAllocationArgs, problems: Problems
) -> NodeResourcesBalancedAllocationArgs:
    """Complete and check NodeResourcesBalancedAllocation: weights of 1."""
    at = problems.below("resources")
    resources = _weighted(args.resources, CPU_AND_MEMORY, at)
    for index, each in enumerate(resources):
        if each.weight != 1:
            at.add((index, "weight"), each.weight, "the weight of a balanced resource must be 1")
    return replace(args, resources=resources)


def check_spread(args: PodTopologySpreadArgs, problems: Problems) -> PodTopologySpreadArgs:
    """Check PodTopologySpread: constraints only with List, and each once."""
    if args.default_constraints and args.defaulting_type is DefaultingType.SYSTEM:
        problems.add(
            ("defaultingType",),
            args.defaulting_type.value,
            "System cannot be combined with defaultConstraints",
            "write defaultingType: List",
        )
    seen: set[tuple[str, str]] = set()
    at = problems.below("defaultConstraints")
    for index, each in enumerate(args.default_constraints):
        problem = label_key_problem(each.topology_key)
        if problem:
            at.add((index, "topologyKey"), each.topology_key, problem)
        key = (each.topology_key, each.when_unsatisfiable.value)
        if key in seen:
            at.add((index,), " ".join(key), "topologyKey and whenUnsatisfiable stand twice")
        seen.add(key)
    return args


def check_node_affinity(args: NodeAffinityArgs, problems: Problems) -> NodeAffinityArgs:
    """Check NodeAffinity: terms as in a pod, and at least one required term."""
    affinity = args.added_affinity
    if affinity is None:
        return args
    at = problems.below("addedAffinity")
    if affinity.required is not None:
        terms = at.below("requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
        if not affinity.required.node_selector_terms:
            terms.add((), (), "at least one term is needed: without any no node matches")
        for index, term in enumerate(affinity.required.node_selector_terms):
            _check_term(term, terms.below(index))
    preferred = at.below("preferredDuringSchedulingIgnoredDuringExecution")
    for index, weighted in enumerate(affinity.preferred):
        if not 1 <= weighted.weight <= 100:
            preferred.add((index, "weight"), weighted.weight, "expected a whole number, 1 to 100")
        _check_term(weighted.preference, preferred.below(index, "preference"))
    return args


_VALUES_OF: Final[Mapping[str, tuple[int, int | None]]] = {
    "In": (1, None),
    "NotIn": (1, None),
    "Exists": (0, 0),
    "DoesNotExist": (0, 0),
    "Gt": (1, 1),
    "Lt": (1, 1),
}
"""Operator of a requirement -> the fewest and the most values that it takes."""


def _check_term(term: NodeSelectorTerm, problems: Problems) -> None:
    for index, each in enumerate(term.match_expressions):
        at = problems.below("matchExpressions", index)
        problem = label_key_problem(each.key)
        if problem:
            at.add(("key",), each.key, problem)
        if each.operator not in _VALUES_OF:
            at.add(("operator",), each.operator, f"expected one of {', '.join(_VALUES_OF)}")
            continue
        fewest, most = _VALUES_OF[each.operator]
        count = len(each.values)
        if count < fewest or (most is not None and count > most):
            wanted = "no values" if most == 0 else "one value" if most else "at least one value"
            at.add(("values",), list(each.values), f"{each.operator} takes {wanted}")
        elif most == 1:
            try:
                int(each.values[0])
            except ValueError:
                at.add(("values",), list(each.values), f"{each.operator} compares whole numbers")
        else:
            for place, value in enumerate(each.values):
                problem = label_value_problem(value)
                if problem:
                    at.add(("values", place), value, problem)
    for index, each in enumerate(term.match_fields):
        at = problems.below("matchFields", index)
        if each.key != "metadata.name":
            at.add(("key",), each.key, "expected metadata.name, the only field that can be matched")
        if each.operator not in ("In", "NotIn"):
            at.add(("operator",), each.operator, "expected one of In, NotIn")
        if len(each.values) != 1:
            at.add(("values",), list(each.values), "expected one name")


def check_volume_binding(args: VolumeBindingArgs, problems: Problems) -> VolumeBindingArgs:
    """Check VolumeBinding: no shape."""
    if args.shape:
        problems.add(
            ("shape",),
            args.shape,
            "scoring by storage capacity is an alpha feature of kube-scheduler and left out here",
            "remove the field",
        )
    return args


def check_preemption(args: DefaultPreemptionArgs, problems: Problems) -> DefaultPreemptionArgs:
    """Check DefaultPreemption: at least one node is tried."""
    _check_candidates(args, problems)
    return args


# --- Koordinator's -------------------------------------------------------------------------------


def complete_load_aware(
    args: LoadAwareSchedulingArgs, problems: Problems
) -> LoadAwareSchedulingArgs:
    """Complete and check LoadAwareScheduling: maps, a factor for each weight, the estimator."""
    weights = args.resource_weights
    if not weights and not args.dominant_resource_weight:
        weights = DEFAULT_RESOURCE_WEIGHTS
    factors = {**DEFAULT_SCALING_FACTORS, **args.estimated_scaling_factors}
    for name in weights:
        if name not in factors:
            problems.add(
                ("estimatedScalingFactors",),
                dict(args.estimated_scaling_factors),
                f"no factor for {name}, which resourceWeights names",
            )
    estimator = args.estimator or DEFAULT_ESTIMATOR
    if estimator != DEFAULT_ESTIMATOR:
        problems.add(
            ("estimator",), estimator, f"unknown estimator; {DEFAULT_ESTIMATOR} is the only one"
        )
    maps = {
        "resourceWeights": args.resource_weights,
        "usageThresholds": args.usage_thresholds,
        "prodUsageThresholds": args.prod_usage_thresholds,
        "estimatedScalingFactors": args.estimated_scaling_factors,
    }
    for field, values in maps.items():
        _check_names(values, problems.below(field))
    if args.aggregated is not None:
        _check_names(
            args.aggregated.usage_thresholds, problems.below("aggregated", "usageThresholds")
        )
    _check_names(args.supported_resources, problems.below("supportedResources"))
    return replace(
        args,
        resource_weights=dict(weights),
        usage_thresholds=dict(args.usage_thresholds or DEFAULT_USAGE_THRESHOLDS),
        estimated_scaling_factors=factors,
        estimator=estimator,
    )


def complete_numa(args: NodeNUMAResourceArgs, problems: Problems) -> NodeNUMAResourceArgs:
    """Complete and check NodeNUMAResource: the resources of its strategies."""
    return replace(
        args,
        scoring_strategy=_strategy(
            args.scoring_strategy, CPU_AND_MEMORY, problems.below("scoringStrategy")
        ),
        numa_scoring_strategy=_strategy(
            args.numa_scoring_strategy, CPU_AND_MEMORY, problems.below("numaScoringStrategy")
        ),
    )


def complete_device_share(args: DeviceShareArgs, problems: Problems) -> DeviceShareArgs:
    """Complete and check DeviceShare: the resources of its strategy and templates."""
    at = problems.below("scoringStrategy")
    templates = args.gpu_shared_resource_templates_config
    _check_names(
        templates.matched_resources,
        problems.below("gpuSharedResourceTemplatesConfig", "matchedResources"),
    )
    return replace(
        args, scoring_strategy=_strategy(args.scoring_strategy, DEFAULT_DEVICE_RESOURCES, at)
    )


def complete_reservation(args: ReservationArgs, problems: Problems) -> ReservationArgs:
    """Complete and check Reservation: times, keys, ignored names, at least one candidate."""
    _check_candidates(args, problems)
    _check_ignored(
        args.ignored_resources, args.ignored_resource_groups, problems, extended_only=True
    )
    defaults = ReservationArgs()
    config = args.pre_allocation_config
    keys = PreAllocationConfig()
    config = replace(
        config,
        cluster_label_key=config.cluster_label_key or keys.cluster_label_key,
        cluster_priority_annotation_key=config.cluster_priority_annotation_key
        or keys.cluster_priority_annotation_key,
    )
    at = problems.below("preAllocationConfig")
    for field, key in (
        ("clusterLabelKey", config.cluster_label_key),
        ("clusterPriorityAnnotationKey", config.cluster_priority_annotation_key),
    ):
        problem = label_key_problem(key)
        if problem:
            at.add((field,), key, problem)
    return replace(
        args,
        pre_allocation_config=config,
        gc_duration_seconds=args.gc_duration_seconds or defaults.gc_duration_seconds,
        gc_interval_seconds=args.gc_interval_seconds or defaults.gc_interval_seconds,
        resync_interval_seconds=args.resync_interval_seconds or defaults.resync_interval_seconds,
    )


def complete_elastic_quota(args: ElasticQuotaArgs, problems: Problems) -> ElasticQuotaArgs:
    """Complete and check ElasticQuota: no negative limit, no hook."""
    for field, amounts in (
        ("defaultQuotaGroupMax", args.default_quota_group_max),
        ("systemQuotaGroupMax", args.system_quota_group_max),
    ):
        at = problems.below(field)
        _check_names(amounts, at)
        for name, amount in amounts.items():
            if amount.nano < 0:
                at.add((name,), str(amount), "must not be negative")
    if args.hook_plugins:
        names = [each.key or each.factory_key for each in args.hook_plugins]
        problems.add(
            ("hookPlugins",),
            names,
            "hooks are Go code that is compiled into upstream's scheduler, and none is known here",
            "remove the field",
        )
    return replace(
        args,
        default_quota_group_max=dict(args.default_quota_group_max or NO_LIMIT),
        system_quota_group_max=dict(args.system_quota_group_max or NO_LIMIT),
        quota_group_namespace=args.quota_group_namespace
        or ElasticQuotaArgs().quota_group_namespace,
    )


def check_fit_plus(args: NodeResourcesFitPlusArgs, problems: Problems) -> NodeResourcesFitPlusArgs:
    """Check NodeResourcesFitPlus: resource names."""
    _check_names(args.resources, problems.below("resources"))
    return args


def check_scarce(
    args: ScarceResourceAvoidanceArgs, problems: Problems
) -> ScarceResourceAvoidanceArgs:
    """Check ScarceResourceAvoidance: resource names."""
    _check_names(args.resources, problems.below("resources"))
    return args


# --- parts that several have ---------------------------------------------------------------------


def _strategy(
    strategy: ScoringStrategy, defaults: tuple[ResourceSpec, ...], problems: Problems
) -> ScoringStrategy:
    resources = _weighted(strategy.resources, defaults, problems.below("resources"))
    return replace(strategy, resources=resources)


def _weighted(
    resources: tuple[ResourceSpec, ...], defaults: tuple[ResourceSpec, ...], problems: Problems
) -> tuple[ResourceSpec, ...]:
    """Return the resources with their weights, or the default ones where none are given."""
    seen: set[str] = set()
    for index, each in enumerate(resources):
        problem = label_key_problem(each.name)
        if problem is None and each.name in seen:
            problem = "stands twice"
        if problem:
            problems.add((index, "name"), each.name, problem)
        seen.add(each.name)
    return tuple(replace(each, weight=each.weight or 1) for each in resources) or defaults


def _check_shape(shape: tuple[UtilizationShapePoint, ...], problems: Problems) -> None:
    if not shape:
        problems.add((), "(absent)", "at least one point is needed")
    for index in range(1, len(shape)):
        if shape[index - 1].utilization >= shape[index].utilization:
            problems.add(
                (index, "utilization"),
                shape[index].utilization,
                "must be greater than that of the point before",
            )


def _check_candidates(args: DefaultPreemptionArgs | ReservationArgs, problems: Problems) -> None:
    if not args.min_candidate_nodes_percentage and not args.min_candidate_nodes_absolute:
        problems.add(
            ("minCandidateNodesPercentage",),
            0,
            "must not be 0 when minCandidateNodesAbsolute is 0: no node would be tried",
        )


def _check_ignored(
    resources: tuple[str, ...],
    groups: tuple[str, ...],
    problems: Problems,
    *,
    extended_only: bool = False,
) -> None:
    """extended_only: names without a prefix, and those of kubernetes.io, cannot be ignored."""
    at = problems.below("ignoredResources")
    for index, name in enumerate(resources):
        problem = label_key_problem(name)
        if problem is None and extended_only and not is_extended_resource(name):
            problem = "not an extended resource such as example.com/gpu: others are always checked"
        if problem:
            at.add((index,), name, problem)
    at = problems.below("ignoredResourceGroups")
    for index, group in enumerate(groups):
        problem = None
        if "/" in group:
            problem = "a group is the prefix before the / of a resource name"
        elif extended_only and not is_extended_resource(f"{group}/x"):
            problem = "not the prefix of extended resources such as example.com"
        elif label_key_problem(group):
            problem = label_key_problem(group)
        if problem:
            at.add((index,), group, problem)


def is_extended_resource(name: str) -> bool:
    """Return whether `name` is that of an extended resource: example.com/gpu.

    Prefixes that end in kubernetes.io are Kubernetes' own; requests.* is a quota's.
    """
    prefix, slash, _ = name.partition("/")
    if not slash or label_key_problem(name) or name.startswith("requests."):
        return False
    return not prefix.endswith("kubernetes.io")


def _check_names(names: Iterable[str], problems: Problems) -> None:
    """Check resource names: the keys of a map, or a list of them."""
    for index, name in enumerate(names):
        problem = label_key_problem(name)
        if problem:
            problems.add((name if isinstance(names, Mapping) else index,), name, problem)
