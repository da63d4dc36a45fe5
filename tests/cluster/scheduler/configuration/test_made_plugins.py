"""From a configuration to plugins: which are made, in which order, and with which arguments."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from apis.numa import CPUBindPolicy
from apis.scheduling_pod import TopologySpreadConstraint
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.evaluation import Profile
from cluster.scheduler.cycle.node_search import Arguments
from cluster.scheduler.exact.numa import Scoring
from cluster.scheduler.manifests import config_map
from cluster.scheduler.plugins.between_pods.pod_affinity import InterPodAffinity
from cluster.scheduler.plugins.between_pods.topology_spread import PodTopologySpread
from cluster.scheduler.plugins.nodes.scheduling_hint import SchedulingHintNodes
from cluster.scheduler.plugins.numa.asked import Settings as NumaSettings
from cluster.scheduler.plugins.numa.node_numa_resource import NodeNUMAResource
from cluster.scheduler.plugins.reservations.pre_allocation import PreAllocating, Settings
from cluster.scheduler.plugins.reservations.reservation import Reservation
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.plugins.resources.fit import NodeResourcesFit
from cluster.scheduler.plugins.resources.fit_plus import (
    NodeResourcesFitPlus,
    ScarceResourceAvoidance,
    Strategy,
)
from cluster.scheduler.plugins.resources.resource_scores import (
    BalancedAllocation,
    LeastAllocated,
    MostAllocated,
    RequestedToCapacityRatio,
)
from cluster.scheduler.plugins.unsupported import Unsupported
from cluster.scheduler.profiles import Plugins, make_plugins
from cluster.scheduler.tables.load import LoadSettings
from cluster.scheduler.tables.tables import Tables

_HEAD = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
_CUSTOM = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: one
  plugins:
    multiPoint:
      enabled:
      - name: NodeNUMAResource
      - name: DeviceShare
      - name: Reservation
      - name: LoadAwareScheduling
      - name: NodeResourcesFitPlus
      - name: ScarceResourceAvoidance
      - name: SchedulingHint
  pluginConfig:
  - name: LoadAwareScheduling
    args:
      filterExpiredNodeMetrics: false
      nodeMetricExpirationSeconds: 77
      enableScheduleWhenNodeMetricsExpired: true
      resourceWeights: {cpu: 2}
      dominantResourceWeight: 3
      usageThresholds: {cpu: 61}
      prodUsageThresholds: {cpu: 62}
      prodUsageIncludeSys: true
      scoreAccordingProdUsage: true
      estimatedScalingFactors: {cpu: 63, memory: 64}
      estimatedSecondsAfterPodScheduled: 5
      estimatedSecondsAfterInitialized: 6
      allowCustomizeEstimation: true
      supportedResources: [cpu]
      aggregated:
        usageThresholds: {cpu: 65}
        usageAggregationType: p95
        usageAggregatedDuration: 10m
        scoreAggregationType: p50
        scoreAggregatedDuration: 5m
  - name: NodeResourcesFit
    args:
      ignoredResources: [example.com/a]
      ignoredResourceGroups: [example.org]
      scoringStrategy:
        type: RequestedToCapacityRatio
        resources: [{name: cpu, weight: 2}]
        requestedToCapacityRatio:
          shape: [{utilization: 0, score: 1}, {utilization: 100, score: 9}]
  - name: NodeResourcesBalancedAllocation
    args: {resources: [{name: cpu, weight: 1}, {name: example.com/b, weight: 1}]}
  - name: PodTopologySpread
    args:
      defaultingType: List
      defaultConstraints:
      - {maxSkew: 2, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}
  - name: InterPodAffinity
    args: {hardPodAffinityWeight: 7, ignorePreferredTermsOfExistingPods: true}
  - name: NodeNUMAResource
    args:
      defaultCPUBindPolicy: SpreadByPCPUs
      scoringStrategy: {type: MostAllocated, resources: [{name: cpu, weight: 4}]}
      numaScoringStrategy: {type: LeastAllocated, resources: [{name: memory, weight: 5}]}
      compat: [LSEPodsShareCores]
  - name: Reservation
    args:
      ignoredResources: [example.com/c]
      ignoredResourceGroups: [example.net]
      preAllocationConfig:
        enableClusterMode: true
        clusterLabelKey: l
        clusterPriorityAnnotationKey: p
        preferNoPreAllocatedPods: true
  - name: NodeResourcesFitPlus
    args:
      resources: {cpu: {type: MostAllocated, weight: 2}, memory: {type: LeastAllocated, weight: 3}}
  - name: ScarceResourceAvoidance
    args: {resources: [example.com/gpu]}
  - name: SchedulingHint
    args: {maxHintNodes: 7}
  - name: VolumeBinding
    args: {bindTimeoutSeconds: 33}
"""
"""No argument has its default."""


def _made(text: str) -> Plugins:
    return make_plugins(read_configuration(text, obj="test"), Tables())


def _profile(*enabled: str, points: dict[str, Any] | None = None, **arguments: Any) -> str:
    """Return a configuration. enabled: at all points. points: of the plugins. arguments: by the
    plugin's name."""
    profile = {
        "schedulerName": "one",
        "plugins": {
            "multiPoint": {"enabled": [{"name": name} for name in enabled]},
            **(points or {}),
        },
        "pluginConfig": [{"name": name, "args": given} for name, given in arguments.items()],
    }
    return _HEAD + yaml.safe_dump({"profiles": [profile]})


def _order(profile: Profile) -> dict[str, list[Any]]:
    return {
        "admissions": [each.name for each in profile.admissions],
        "filters": [each.name for each in profile.filters],
        "scores": [(each.name, weight) for each, weight in profile.scores],
        "set_scores": [(each.name, weight) for each, weight in profile.set_scores],
        "allocators": [each.name for each in profile.allocators],
        "preferences": [each.name for each in profile.preferences],
        "explainers": [type(each).__name__ for each in profile.explainers],
    }


def test_the_plugins_of_the_chart_are_made_in_the_order_in_which_they_are_asked() -> None:
    made = _made(config_map()["data"]["koord-scheduler-config"])
    assert _order(made.profiles["koord-scheduler"]) == {
        "admissions": [
            "Unsupported",
            "NodeAffinity",
            "SchedulingHint",
            "NodeNUMAResource",
            "Reservation",
            "Reservation",
            "ElasticQuota",
        ],
        "filters": [
            "NodeAffinity",
            "SchedulingHint",
            "NodeUnschedulable",
            "TaintToleration",
            "NodeAffinity",
            "NodePorts",
            "NodeResourcesFit",
            "VolumeRestrictions",
            "NodeVolumeLimits",
            "VolumeBinding",
            "VolumeZone",
            "PodTopologySpread",
            "InterPodAffinity",
            "NodeDeclaredFeatures",
            "Reservation",
            "LoadAwareScheduling",
            "NodeNUMAResource",
            "DeviceShare",
            "Reservation",
        ],
        "scores": [
            ("TaintToleration", 3),
            ("NodeAffinity", 2),
            ("NodeResourcesFit", 1),
            ("NodeResourcesBalancedAllocation", 1),
            ("ImageLocality", 1),
            ("LoadAwareScheduling", 1),
            ("NodeNUMAResource", 1),
            ("DeviceShare", 1),
            ("Reservation", 5000),
        ],
        "set_scores": [
            ("PodTopologySpread", 2),
            ("InterPodAffinity", 2),
            ("Reservation", 5000),
            ("Coscheduling", 1),
        ],
        "allocators": [
            "Reservation",
            "VolumeBinding",
            "NodeNUMAResource",
            "DeviceShare",
            "Reservation",
        ],
        "preferences": ["SchedulingHint"],
        "explainers": ["Reservation"],
    }
    assert made.gang_preemption == {"koord-scheduler"}
    assert made.quota_preemption == {"koord-scheduler": False}
    assert made.gangs["koord-scheduler"].wait_s == 600.0
    assert made.gangs["koord-scheduler"].gathers
    assert made.templates is not None
    assert not made.expired_load_passes
    assert not made.pod_level_alone


def test_kube_scheduler_s_own_plugins_look_at_no_reservations_quotas_or_gangs() -> None:
    made = _made(_HEAD)
    profile = made.profiles["default-scheduler"]
    order = _order(profile)
    assert order["admissions"] == ["Unsupported", "NodeAffinity"]
    assert order["allocators"] == ["VolumeBinding"]
    assert order["preferences"] == order["explainers"] == []
    assert profile.admissions[0] == Unsupported(reservations=False)
    fit = next(each for each in profile.filters if isinstance(each, NodeResourcesFit))
    assert fit == NodeResourcesFit(ignored=frozenset(), ignored_groups=frozenset(), restored=None)
    assert (made.loads, made.quotas, made.templates) == ((), None, None)
    assert not (made.reservations or made.gangs or made.gang_preemption or made.quota_admissions)
    assert made.preemption == {"default-scheduler": Arguments(10, 100)}


def test_arguments_reach_the_plugins() -> None:
    made = _made(_CUSTOM)
    profile = made.profiles["one"]
    plugins: dict[str, Any] = {
        type(each).__name__: each
        for each in (
            *profile.admissions,
            *(score for score, _ in profile.scores),
            *profile.filters,
        )
    }
    pre_allocating = PreAllocating(
        Settings(cluster=True, label="l", priority="p", prefer_free=True)
    )
    restored = Restoring(pre_allocating)
    expected = {
        "Unsupported": Unsupported(reservations=True),
        "NodeResourcesFit": NodeResourcesFit(
            ignored=frozenset({"example.com/a"}),
            ignored_groups=frozenset({"example.org"}),
            restored=restored,
        ),
        "RequestedToCapacityRatio": RequestedToCapacityRatio(((0, 1), (100, 9)), (("cpu", 2),)),
        "BalancedAllocation": BalancedAllocation(("cpu", "example.com/b")),
        "PodTopologySpread": PodTopologySpread(
            defaults=(
                TopologySpreadConstraint(
                    max_skew=2, topology_key="zone", when_unsatisfiable="ScheduleAnyway"
                ),
            ),
            system_defaults=False,
        ),
        "InterPodAffinity": InterPodAffinity(hard_weight=7, ignore_existing=True),
        "Reservation": Reservation(
            ignored=frozenset({"example.com/c"}), ignored_groups=frozenset({"example.net"})
        ),
        "PreAllocating": pre_allocating,
        "NodeResourcesFitPlus": NodeResourcesFitPlus(
            (("cpu", Strategy(True, 2)), ("memory", Strategy(False, 3)))
        ),
        "ScarceResourceAvoidance": ScarceResourceAvoidance(frozenset({"example.com/gpu"})),
        "SchedulingHintNodes": SchedulingHintNodes(7),
    }
    assert {name: plugins[name] for name in expected} == expected
    numa = plugins["NodeNUMAResource"]
    assert numa.settings == NumaSettings(
        default_bind_policy=CPUBindPolicy.SPREAD_BY_PCPUS,
        scoring=Scoring(most_allocated=True, weights={"cpu": 4}),
        numa_scoring=Scoring(most_allocated=False, weights={"memory": 5}),
        wider_restricted=False,
        lse_shares_cores=True,
        follows_hints=True,
    )
    assert numa.restored == plugins["NodePorts"].restored == restored
    # The exact devices of a NUMA node are looked at beside its CPUs.
    assert [each.name for each in numa.others] == ["DeviceShare"]
    load = plugins["LoadAwareScheduling"]
    assert (load.hold_back_expired, load.pass_expired) == (False, True)
    assert (load.dominant_weight, load.score_by_prod) == (3, True)
    assert load.restored == restored
    assert load.load is made.loads[0]
    # The reservation is chosen by what the other allocators can give through it.
    others = profile.allocators[0].others  # type: ignore[attr-defined]
    assert [each.name for each in others] == ["VolumeBinding", "NodeNUMAResource", "DeviceShare"]
    assert made.volume_timeouts == {"one": 33.0}
    assert made.expired_load_passes


def test_arguments_about_load_are_those_of_its_table() -> None:
    (load,) = _made(_CUSTOM).loads
    assert load.settings == LoadSettings(
        factors={"cpu": 63, "memory": 64},
        weights={"cpu": 2},
        thresholds={"cpu": 61},
        prod_thresholds={"cpu": 62},
        aggregated_thresholds={"cpu": 65},
        filter_window=("p95", 600),
        score_window=("p50", 300),
        supported=("cpu",),
        expires_after=77.0,
        prod_includes_system=True,
        seconds_after_scheduled=5.0,
        seconds_after_initialized=6.0,
        customized=True,
        reservations=True,
    )


@pytest.mark.parametrize(
    ("aggregated", "filter_window", "score_window"),
    [
        ({"usageAggregationType": "avg"}, ("avg", 0), None),
        ({"scoreAggregationType": "p99"}, None, ("p99", 0)),
    ],
)
def test_a_window_of_load_has_the_longest_duration_that_is_reported_where_none_is_named(
    aggregated: dict[str, str], filter_window: Any, score_window: Any
) -> None:
    text = _profile("LoadAwareScheduling", LoadAwareScheduling={"aggregated": aggregated})
    (load,) = _made(text).loads
    assert load.settings.filter_window == filter_window
    assert load.settings.score_window == score_window


def test_profiles_with_equal_arguments_share_a_table_of_load() -> None:
    tree = yaml.safe_load(_profile("LoadAwareScheduling"))
    (profile,) = tree["profiles"]
    args = {"nodeMetricExpirationSeconds": 7}
    other = {"pluginConfig": [{"name": "LoadAwareScheduling", "args": args}]}
    tree["profiles"] += [{**profile, "schedulerName": "two"}]
    tree["profiles"] += [{**profile, "schedulerName": "three", **other}]
    made = _made(yaml.safe_dump(tree))
    assert [load.settings.expires_after for load in made.loads] == [180.0, 7.0]


@pytest.mark.parametrize(
    ("strategy", "score"),
    [
        ("LeastAllocated", LeastAllocated((("cpu", 3),))),
        ("MostAllocated", MostAllocated((("cpu", 3),))),
    ],
)
def test_the_strategy_of_fit_is_its_score(strategy: str, score: Any) -> None:
    given = {"type": strategy, "resources": [{"name": "cpu", "weight": 3}]}
    made = _made(_profile(NodeResourcesFit={"scoringStrategy": given}))
    assert (score, 1) in made.profiles["one"].scores


_DEFAULT = {"name": "DefaultPreemption"}
_ALL_OFF = [{"name": "*"}]
_TRIES = {"minCandidateNodesPercentage": 20, "minCandidateNodesAbsolute": 30}


@pytest.mark.parametrize(
    ("enabled", "arguments", "expected"),
    [
        ([], {}, None),
        ([_DEFAULT], {"DefaultPreemption": _TRIES}, Arguments(20, 30)),
        (
            [_DEFAULT],
            {"DefaultPreemption": {**_TRIES, "compat": ["EvictsProtectedPods"]}},
            Arguments(20, 30, protects=False),
        ),
        # Reservation and Coscheduling preempt where they are told to.
        ([{"name": "Reservation"}], {}, None),
        (
            [{"name": "Reservation"}],
            {"Reservation": {**_TRIES, "enablePreemption": True}},
            Arguments(20, 30, reservations=True),
        ),
        (
            [_DEFAULT, {"name": "Reservation"}],
            {"Reservation": {"enablePreemption": True}, "DefaultPreemption": _TRIES},
            Arguments(20, 30, reservations=True),
        ),
        ([], {"Reservation": {"enablePreemption": True}}, None),
        ([{"name": "Coscheduling"}], {}, None),
        (
            [{"name": "Coscheduling"}],
            {"Coscheduling": {"enablePreemption": True}, "Reservation": _TRIES},
            Arguments(20, 30),
        ),
        ([], {"Coscheduling": {"enablePreemption": True}}, None),
    ],
)
def test_who_preempts_and_how_many_nodes_are_tried(
    enabled: list[dict[str, str]], arguments: dict[str, Any], expected: Arguments | None
) -> None:
    points = {"postFilter": {"enabled": enabled, "disabled": _ALL_OFF}}
    made = _made(_profile(points=points, **arguments))
    assert made.preemption == ({} if expected is None else {"one": expected})
    for_gangs = {"name": "Coscheduling"} in enabled and "Coscheduling" in arguments
    assert made.gang_preemption == (frozenset({"one"}) if for_gangs else frozenset())


def test_without_arguments_as_many_nodes_are_tried_as_by_kube_scheduler() -> None:
    assert Arguments().most_tried(5000) == 500
    assert Arguments().most_tried(900) == 100


def test_upstream_s_behaviour_is_had_by_compat() -> None:
    numa = ["OnlyPodLevelSingleNUMANode", "RestrictedAcceptsWiderSets"]
    text = _profile(
        *("NodeNUMAResource", "LoadAwareScheduling", "DeviceShare", "Reservation"),
        NodeNUMAResource={"compat": numa},
        LoadAwareScheduling={"compat": ["ReservationsAreNoLoad"]},
        Reservation={"compat": ["PodsWithoutAffinityPassTaints"]},
        DeviceShare={"disableDeviceNUMATopologyAlignment": True},
    )
    tables = Tables()
    made = make_plugins(read_configuration(text, obj="test"), tables)
    assert made.pod_level_alone
    assert not made.loads[0].settings.reservations
    assert not tables.reservations.taints_for_all
    (plugin,) = (
        each for each in made.profiles["one"].filters if isinstance(each, NodeNUMAResource)
    )
    assert plugin.settings.wider_restricted
    assert not plugin.settings.lse_shares_cores
    assert not plugin.settings.follows_hints
    assert plugin.others == ()
    tables = Tables()
    made = make_plugins(read_configuration(_profile("Reservation"), obj="test"), tables)
    assert tables.reservations.taints_for_all
    assert set(made.reservations) == {"one"}


@pytest.mark.parametrize("given", [True, False])
def test_quotas_are_checked_and_preempt_as_their_arguments_say(given: bool) -> None:
    arguments = {
        "enableRuntimeQuota": given,
        "enableCheckParentQuota": not given,
        "disableDefaultQuotaPreemption": given,
    }
    made = _made(_profile("ElasticQuota", ElasticQuota=arguments))
    admission = made.quota_admissions["one"]
    assert made.profiles["one"].admissions[-1] is admission
    assert (admission.runtime, admission.parents) == (given, not given)
    assert admission.quotas is made.quotas
    assert made.quota_preemption == {"one": not given}
    assert made.quota_arguments is not None
    # At one of the two points alone, pods of a quota do not preempt each other.
    for point in ("preFilter", "postFilter"):
        made = _made(_profile(points={point: {"enabled": [{"name": "ElasticQuota"}]}}))
        assert made.quota_preemption == {}
        assert (made.quotas is not None) is (point == "preFilter")


def test_a_profile_has_what_it_enables_beside_others_that_have_more() -> None:
    names = ("ElasticQuota", "Reservation", "Coscheduling", "SchedulingHint")
    tree = yaml.safe_load(_profile(*names))
    (profile,) = tree["profiles"]
    tree["profiles"].append({**profile, "schedulerName": "plain", "plugins": {}})
    made = _made(yaml.safe_dump(tree))
    assert _order(made.profiles["plain"]) == _order(_made(_HEAD).profiles["default-scheduler"])
    for found in (made.quota_admissions, made.quota_preemption, made.reservations, made.gangs):
        assert set(found) == {"one"}
    assert set(made.preemption) == set(made.volume_timeouts) == {"one", "plain"}
