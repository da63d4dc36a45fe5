"""NodeNUMAResource: worked examples of filter, score, allocation and record."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_CPU_MANAGER_POLICY,
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_NUMA_TOPOLOGY_SPEC,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    ANNOTATION_RESOURCE_SPEC,
    ANNOTATION_RESOURCE_STATUS,
    LABEL_CPU_BIND_POLICY,
    LABEL_NUMA_ALLOCATE_STRATEGY,
    LABEL_NUMA_TOPOLOGY_POLICY,
    LABEL_QOS_CLASS,
)
from apis.numa import CPUBindPolicy, NUMAAllocateStrategy, NUMATopologyPolicy
from cluster.scheduler.exact.numa import (
    Hint,
    Hints,
    NumaDemand,
    Placement,
    Scoring,
    affinities,
    allocate,
)
from cluster.scheduler.exact.unfit import Unfit
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.numa.asked import Settings
from cluster.scheduler.plugins.numa.node_numa_resource import NodeNUMAResource
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.numa.demand import CpuDemand
from cluster.scheduler.tables.numa.state import NumaState, Status, narrowed
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.configuration.files import args, file, load
from tests.cluster.scheduler.making import make_pod
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, NumaCluster, make_topology

GI = 1024**3


def small_cluster(
    *,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    settings: Settings | None = None,
    zones: Any = SMALL_ZONES,
    of_topology: dict[str, str] | None = None,
) -> NumaCluster:
    """Return a cluster of one node `n` with 16 CPUs and 64 GiB in two NUMA nodes."""
    cluster = NumaCluster(settings)
    topology = make_topology("n", cpus=SMALL.cpus(), zones=zones, annotations=of_topology)
    cluster.add_node("n", topology, labels=labels, annotations=annotations)
    return cluster


def cpus_of(given: Allocation | str) -> str:
    assert isinstance(given, Allocation), given
    return str(given.cpus)


# --- which pods are bound ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qos", "spec", "cpus"),
    [
        ("LSE", None, "0-3"),
        ("LSR", None, "0-3"),
        ("LS", None, ""),
        ("", None, ""),
        ("LSR", {"preferredCPUBindPolicy": "SpreadByPCPUs"}, "0,2,4,6"),
        ("LSR", {"preferredCPUBindPolicy": "Default"}, "0-3"),
        ("LSR", {"preferredCPUBindPolicy": ""}, "0-3"),
        ("LSR", {"preferredCPUBindPolicy": "ConstrainedBurst"}, ""),
        ("LSR", {"requiredCPUBindPolicy": "SpreadByPCPUs"}, "0,2,4,6"),
        (
            "LSR",
            {"requiredCPUBindPolicy": "FullPCPUs", "preferredCPUBindPolicy": "SpreadByPCPUs"},
            "0-3",
        ),
    ],
)
def test_which_pods_get_cpus(qos: str, spec: dict[str, str] | None, cpus: str) -> None:
    cluster = small_cluster()
    shape = cluster.shape({"cpu": "4", "memory": "1Gi"}, qos=qos, spec=spec)
    assert cpus_of(cluster.allocate(shape, "n")) == cpus


def test_a_pod_of_another_priority_is_not_bound() -> None:
    cluster = small_cluster()
    pod = make_pod("p", requests={"cpu": "4"}, labels={LABEL_QOS_CLASS: "LSR"}, priority=7000)
    assert cpus_of(cluster.allocate(Shapes().of(pod), "n")) == ""


@pytest.mark.parametrize(
    ("policy", "of_others"),
    [
        (NUMATopologyPolicy.NONE, Placement()),
        (NUMATopologyPolicy.BEST_EFFORT, Unfit("node(s) missing NUMA resources")),
    ],
)
def test_no_cpus_are_bound_on_a_node_whose_topology_is_not_known(
    policy: NUMATopologyPolicy, of_others: Placement | Unfit
) -> None:
    scoring = Scoring(most_allocated=False, weights={"cpu": 1})
    demand = NumaDemand({"cpu": 4000}, CpuDemand(4, CPUBindPolicy.FULL_PCPUS), policy)
    state = NumaState(
        topology=None,
        free=0,
        managed=0,
        held={},
        alone=0,
        strategy=NUMAAllocateStrategy.UNSET,
        cpu_ratio=100,
        numa={},
        bindable={},
    )
    assert allocate(state, demand, scoring) == Unfit("node(s) invalid CPU Topology")
    assert allocate(state, replace(demand, cpus=None), scoring) == of_others


def test_part_of_a_cpu_cannot_be_bound() -> None:
    cluster = small_cluster()
    with pytest.raises(Refusal, match="the requested CPUs must be integer"):
        cluster.plugin.applies(cluster.shape({"cpu": "1500m"}, qos="LSR"), cluster.tables)


@pytest.mark.parametrize(
    ("key", "text", "named"),
    [
        (ANNOTATION_RESOURCE_SPEC, "{", "not valid JSON"),
        (ANNOTATION_RESOURCE_SPEC, '{"requiredCPUBindPolicy":"Half"}', "requiredCPUBindPolicy"),
        (ANNOTATION_RESOURCE_SPEC, '{"preferredCPUBindPolicy":7}', "preferredCPUBindPolicy"),
        (ANNOTATION_RESOURCE_SPEC, '[["deep"]]', "resource-spec"),
        (ANNOTATION_NUMA_TOPOLOGY_SPEC, '{"numaTopologyPolicy":"Best"}', "numaTopologyPolicy"),
        (ANNOTATION_RESOURCE_SPEC, '"' + "x" * 1_000_000 + '"', "longer than"),
        (ANNOTATION_NUMA_TOPOLOGY_SPEC, "[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_annotation_refuses_its_pod_and_names_the_field(
    key: str, text: str, named: str
) -> None:
    cluster = small_cluster()
    shape = Shapes().of(make_pod("p", requests={"cpu": "4"}, annotations={key: text}))
    with pytest.raises(Refusal, match=named):
        cluster.plugin.applies(shape, cluster.tables)


def test_a_node_policy_binds_every_pod_that_requests_cpu() -> None:
    cluster = small_cluster(labels={LABEL_CPU_BIND_POLICY: "FullPCPUsOnly"})
    assert cpus_of(cluster.allocate(cluster.shape({"cpu": "2"}), "n")) == "0-1"
    assert cluster.reasons(cluster.shape({"cpu": "3"})) == {
        "n": ("node(s) requested cpus not multiple cpus per core",)
    }
    assert cluster.reasons(cluster.shape({"cpu": "500m"})) == {
        "n": ("the requested CPUs must be integer",)
    }
    assert cluster.reasons(cluster.shape({"memory": "1Gi"})) == {"n": ()}
    spread = cluster.shape({"cpu": "2"}, qos="LSR", spec={"requiredCPUBindPolicy": "SpreadByPCPUs"})
    assert cluster.reasons(spread) == {
        "n": ("node(s) cpu bind policy conflicts with pod's required cpu bind policy",)
    }


def test_a_node_policy_may_spread_every_pod_that_requests_cpu() -> None:
    cluster = small_cluster(labels={LABEL_CPU_BIND_POLICY: "SpreadByPCPUs"})
    assert cpus_of(cluster.allocate(cluster.shape({"cpu": "3"}), "n")) == "0,2,4"
    assert cluster.reasons(cluster.shape({"cpu": "17"}))["n"]
    none = cluster.shape({"cpu": "0", "memory": "1Gi"})
    assert cluster.reasons(none) == {"n": ()}
    assert cpus_of(cluster.allocate(none, "n")) == ""
    full = cluster.shape({"cpu": "2"}, qos="LSR", spec={"requiredCPUBindPolicy": "FullPCPUs"})
    assert cluster.reasons(full) == {
        "n": ("node(s) cpu bind policy conflicts with pod's required cpu bind policy",)
    }
    preferred = cluster.shape({"cpu": "2"}, qos="LSR", spec={"preferredCPUBindPolicy": "FullPCPUs"})
    assert cluster.reasons(preferred) == {"n": ()}
    assert cpus_of(cluster.allocate(preferred, "n")) == "0,2"


def test_kubelets_option_counts_before_the_label() -> None:
    kubelet = json.dumps({"policy": "static", "options": {"full-pcpus-only": "true"}})
    cluster = small_cluster(
        labels={LABEL_CPU_BIND_POLICY: "SpreadByPCPUs"},
        of_topology={ANNOTATION_CPU_MANAGER_POLICY: kubelet},
    )
    assert cpus_of(cluster.allocate(cluster.shape({"cpu": "2"}), "n")) == "0-1"


def test_kubelets_option_distributes_over_numa_nodes() -> None:
    kubelet = json.dumps({"policy": "static", "options": {"distribute-cpus-across-numa": "true"}})
    cluster = small_cluster(of_topology={ANNOTATION_CPU_MANAGER_POLICY: kubelet})
    shape = cluster.shape({"cpu": "12"}, qos="LSR")
    assert cpus_of(cluster.allocate(shape, "n")) == "0-5,8-13"


# --- free CPUs -----------------------------------------------------------------------------------


def test_too_few_free_cpus() -> None:
    cluster = small_cluster()
    lsr = cluster.shape({"cpu": "4"}, qos="LSR")
    cluster.place(lsr, "n", cpus="0-12")
    assert cluster.reasons(lsr) == {"n": ("not enough cpus available to satisfy request",)}
    assert cluster.allocate(lsr, "n") == "not enough cpus available to satisfy request"
    required = cluster.shape({"cpu": "2"}, qos="LSR", spec={"requiredCPUBindPolicy": "FullPCPUs"})
    assert cluster.reasons(required) == {"n": ()}
    assert cpus_of(cluster.allocate(required, "n")) == "14-15"


def test_a_node_without_cpu_topology() -> None:
    cluster = NumaCluster()
    cluster.add_node("n", None)
    lsr = cluster.shape({"cpu": "4"}, qos="LSR")
    assert cluster.reasons(lsr) == {"n": ("node(s) invalid CPU Topology",)}
    assert cluster.reasons(cluster.shape({"cpu": "4"}, qos="LS")) == {"n": ()}


def test_reserved_cpus_are_left_alone() -> None:
    cluster = small_cluster(
        annotations={ANNOTATION_NODE_RESERVATION: json.dumps({"reservedCPUs": "0-1"})},
        of_topology={
            ANNOTATION_CPU_MANAGER_POLICY: json.dumps({"policy": "static", "reservedCPUs": "2-3"})
        },
    )
    state = cluster.table.state(0)
    assert str(CpuSet.of_mask(state.free)) == "4-15"
    assert state.numa[0].free == {"cpu": 4000, "memory": 32 * GI}


def test_two_lse_pods_never_share_a_core() -> None:
    cluster = small_cluster()
    one = cluster.shape({"cpu": "1"}, qos="LSE")
    for cpu in (0, 2, 4, 6, 8, 10, 12):
        cluster.place(one, "n", cpus=str(cpu))
    assert cpus_of(cluster.allocate(one, "n")) in ("14", "15")
    two = cluster.shape({"cpu": "3"}, qos="LSE")
    assert cluster.reasons(two) == {"n": ("not enough cpus available to satisfy request",)}
    assert cluster.reasons(cluster.shape({"cpu": "9"}, qos="LSR")) == {"n": ()}
    settings = Settings(lse_shares_cores=True)
    cluster.plugin = replace(cluster.plugin, settings=settings)
    assert cluster.reasons(two) == {"n": ()}
    assert isinstance(cluster.allocate(two, "n"), Allocation)


def test_the_arguments_of_a_profile_reach_the_plugin() -> None:
    strategy = {"type": "MostAllocated", "resources": [{"name": "memory", "weight": 3}]}
    arguments = args(
        "NodeNUMAResource",
        defaultCPUBindPolicy="SpreadByPCPUs",
        numaScoringStrategy=strategy,
        compat=["RestrictedAcceptsWiderSets", "LSEPodsShareCores"],
    )
    plugins = {"multiPoint": {"enabled": [{"name": "NodeNUMAResource"}]}}
    tree = file(profiles=[{"pluginConfig": [arguments], "plugins": plugins}])
    (profile,) = make_plugins(load(tree), Tables()).profiles.values()
    (plugin,) = [each for each in profile.filters if isinstance(each, NodeNUMAResource)]
    assert plugin.settings == Settings(
        default_bind_policy=CPUBindPolicy.SPREAD_BY_PCPUS,
        numa_scoring=Scoring(True, {"memory": 3}),
        wider_restricted=True,
        lse_shares_cores=True,
    )


# --- NUMA policies -------------------------------------------------------------------------------


def test_the_worked_example_of_two_numa_nodes() -> None:
    """NUMA 0 has 4 CPUs and 40 GiB left, NUMA 1 has 10 and 20 GiB; a pod of 8 CPUs and 30 GiB."""
    cluster = NumaCluster(Settings(wider_restricted=True))
    zones = {0: {"cpu": "16", "memory": "64Gi"}, 1: {"cpu": "16", "memory": "64Gi"}}
    cluster.add_node("n", make_topology("n", zones=zones))
    other = cluster.shape({"cpu": "1"})
    cluster.place(other, "n", numa=((0, {"cpu": 12000, "memory": 24 * GI}),))
    cluster.place(other, "n", numa=((1, {"cpu": 6000, "memory": 44 * GI}),))
    requests = {"cpu": "8", "memory": "30Gi"}

    def shape(policy: str) -> Any:
        # Pods of one NUMA node are there already, so meeting them has to be allowed.
        spec = {"numaTopologyPolicy": policy, "singleNUMANodeExclusive": "Preferred"}
        return cluster.shape(requests, numa=spec)

    halves = ((0, {"cpu": 4000, "memory": 15 * GI}), (1, {"cpu": 4000, "memory": 15 * GI}))
    for policy in ("Restricted", "BestEffort"):
        given = cluster.allocate(shape(policy), "n")
        assert isinstance(given, Allocation)
        assert given.numa == halves
    assert cluster.reasons(shape("SingleNUMANode")) == {"n": ("Unaligned NUMA Hint",)}
    assert cluster.allocate(shape("SingleNUMANode"), "n") == "Unaligned NUMA Hint"
    strict = NumaCluster()
    strict.add_node("n", make_topology("n", zones=zones))
    strict.place(other, "n", numa=((0, {"cpu": 12000, "memory": 24 * GI}),))
    strict.place(other, "n", numa=((1, {"cpu": 6000, "memory": 44 * GI}),))
    assert strict.reasons(shape("Restricted")) == {"n": ("Unaligned NUMA Hint",)}


def test_policies_of_pod_and_node() -> None:
    cluster = small_cluster(labels={LABEL_NUMA_TOPOLOGY_POLICY: "Restricted"})
    single = cluster.shape({"cpu": "2"}, numa={"numaTopologyPolicy": "SingleNUMANode"})
    assert cluster.reasons(single) == {"n": ("node(s) NUMA Topology policy not match",)}
    given = cluster.allocate(cluster.shape({"cpu": "2"}), "n")
    assert isinstance(given, Allocation)
    assert given.numa == ((0, {"cpu": 2000}),)


def test_a_policy_needs_numa_resources_and_names_what_is_short() -> None:
    cluster = NumaCluster()
    cluster.add_node("bare", make_topology("bare", cpus=SMALL.cpus()))
    cluster.add_node("full", make_topology("full", cpus=SMALL.cpus(), zones=SMALL_ZONES))
    shape = cluster.shape({"cpu": "1", "memory": "65Gi"}, numa={"numaTopologyPolicy": "BestEffort"})
    assert cluster.reasons(shape) == {
        "bare": ("node(s) missing NUMA resources",),
        "full": ("Insufficient NUMA memory",),
    }
    assert cluster.allocate(shape, "full") == "Insufficient NUMA memory"


def test_numa_nodes_that_fit_exactly_only_together_are_the_last_resort_of_best_effort() -> None:
    """No set has some of both, as one NUMA node has the CPUs and the other the memory."""
    cluster = NumaCluster()
    cluster.add_node("n", make_topology("n", zones={0: {"cpu": "8"}, 1: {"memory": "32Gi"}}))
    best_effort = {"numaTopologyPolicy": "BestEffort"}
    exact = cluster.shape({"cpu": "8", "memory": "32Gi"}, numa=best_effort)
    assert cluster.reasons(exact) == {"n": ()}
    given = cluster.allocate(exact, "n")
    assert isinstance(given, Allocation)
    assert given.numa == ((0, {"cpu": 8000}), (1, {"memory": 32 * GI}))
    more = cluster.shape({"cpu": "8001m", "memory": "32Gi"}, numa=best_effort)
    assert cluster.reasons(more)["n"]


def test_cpus_in_use_count_in_their_numa_node_where_it_states_no_cpu() -> None:
    cluster = small_cluster(zones={0: {"memory": "32Gi"}, 1: {"memory": "32Gi"}})
    cluster.place(cluster.shape({"cpu": "6"}, qos="LSR"), "n", cpus="0-5")
    numa = {"numaTopologyPolicy": "SingleNUMANode"}
    both = cluster.shape({"cpu": "4", "memory": "1Gi"}, qos="LSR", numa=numa)
    for _ in range(2):
        given = cluster.allocate(both, "n")
        assert isinstance(given, Allocation)
        assert given.numa == ((1, {"cpu": 4000, "memory": GI}),)
        cluster.place(both, "n", cpus=str(given.cpus), numa=given.numa)
    assert cluster.allocate(both, "n") == "Insufficient NUMA cpu"


def test_numa_ids_with_gaps_are_divided_by_what_each_has() -> None:
    """Availability belongs to the NUMA id, not to a position in a list."""
    cluster = NumaCluster()
    zones = {1: {"cpu": "20"}, 3: {"cpu": "4"}, 9: {"cpu": "6"}}
    cluster.add_node("n", make_topology("n", zones=zones))
    cluster.place(cluster.shape({"cpu": "1"}), "n", numa=((3, {"cpu": 1000}),))
    shape = cluster.shape({"cpu": "28"}, numa={"numaTopologyPolicy": "BestEffort"})
    given = cluster.allocate(shape, "n")
    assert isinstance(given, Allocation)
    assert given.numa == ((1, {"cpu": 19000}), (3, {"cpu": 3000}), (9, {"cpu": 6000}))


def test_bound_cpus_are_divided_as_whole_cores_where_required() -> None:
    cluster = small_cluster(labels={LABEL_NUMA_TOPOLOGY_POLICY: "BestEffort"})
    lsr = cluster.shape({"cpu": "1"}, qos="LSR")
    cluster.place(lsr, "n", cpus="0,2,4")
    shape = cluster.shape({"cpu": "10"}, qos="LSR", spec={"requiredCPUBindPolicy": "FullPCPUs"})
    given = cluster.allocate(shape, "n")
    assert isinstance(given, Allocation)
    assert (str(given.cpus), given.numa) == (
        "6-15",
        ((0, {"cpu": 2000}), (1, {"cpu": 8000})),
    )


def test_a_set_where_one_provider_would_mix_pods_comes_after_wider_ones() -> None:
    """The other provider, such as the one of devices, has no opinion about mixing."""
    own = {0b01: Hint(True, mixes=True), 0b11: Hint(True)}
    devices = {0b01: Hint(True), 0b11: Hint(True)}
    for hints in ((own, devices), (devices, own)):
        assert affinities(NUMATopologyPolicy.RESTRICTED, (0, 1), hints) == [0b11, 0b01]
    assert affinities(NUMATopologyPolicy.RESTRICTED, (0, 1), [devices]) == [0b01, 0b11]


@pytest.mark.parametrize(
    ("one", "other", "policy", "ranked"),
    [
        pytest.param(
            {0b01: Hint(True), 0b10: Hint(False), 0b11: Hint(True)},
            {0b01: Hint(False), 0b10: Hint(True), 0b11: Hint(True)},
            NUMATopologyPolicy.RESTRICTED,
            [0b11],
            id="only what all prefer",
        ),
        pytest.param(
            {0b01: Hint(True), 0b10: Hint(False), 0b11: Hint(True)},
            {0b01: Hint(False), 0b10: Hint(True), 0b11: Hint(True)},
            NUMATopologyPolicy.BEST_EFFORT,
            [0b11, 0b01, 0b10],
            id="what all prefer comes first",
        ),
        pytest.param(
            {0b01: Hint(True), 0b10: Hint(False), 0b11: Hint(True)},
            {0b01: Hint(False), 0b10: Hint(True), 0b11: Hint(True)},
            NUMATopologyPolicy.SINGLE_NUMA_NODE,
            [0b01, 0b10],
            id="one NUMA node, preferred or not",
        ),
        pytest.param(
            {0b01: Hint(True, 10), 0b10: Hint(True, 20)},
            {0b01: Hint(True, 15), 0b10: Hint(True, 1)},
            NUMATopologyPolicy.RESTRICTED,
            [0b01, 0b10],
            id="the larger sum of scores",
        ),
        pytest.param(
            {0b01: Hint(True), 0b10: Hint(True)},
            {0b10: Hint(True), 0b11: Hint(True)},
            NUMATopologyPolicy.BEST_EFFORT,
            [0b10, 0b11],
            id="in the end all NUMA nodes",
        ),
        pytest.param(
            {0b01: Hint(True)}, {0b10: Hint(True)}, NUMATopologyPolicy.RESTRICTED, [], id="none"
        ),
    ],
)
def test_sets_are_ranked_by_what_all_providers_say(
    one: Hints, other: Hints, policy: NUMATopologyPolicy, ranked: list[int]
) -> None:
    for hints in ((one, other), (other, one)):
        assert affinities(policy, (0, 1), hints) == ranked


@pytest.mark.parametrize(
    ("placed", "exclusive", "refused"),
    [
        (((0, {"memory": GI}), (1, {"memory": GI})), "", True),
        (((0, {"memory": GI}), (1, {"memory": GI})), "Preferred", False),
        (((0, {"memory": GI}),), "", False),
    ],
)
def test_wide_pods_keep_single_numa_pods_away(placed: Any, exclusive: str, refused: bool) -> None:
    """Memory alone counts, not CPU sets only."""
    cluster = small_cluster()
    cluster.place(cluster.shape({"memory": "2Gi"}), "n", numa=placed)
    numa = {"numaTopologyPolicy": "SingleNUMANode", "singleNUMANodeExclusive": exclusive}
    shape = cluster.shape({"cpu": "2"}, numa=numa)
    assert (cluster.reasons(shape)["n"] != ()) is refused
    assert isinstance(cluster.allocate(shape, "n"), str) is refused


def test_required_exclusivity_holds_for_best_effort_too() -> None:
    cluster = small_cluster()
    cluster.place(cluster.shape({"memory": "1Gi"}), "n", numa=((0, {"memory": GI}),))
    wide = {"cpu": "12", "memory": "1Gi"}
    required = {"numaTopologyPolicy": "BestEffort", "singleNUMANodeExclusive": "Required"}
    assert cluster.reasons(cluster.shape(wide, numa=required))["n"]
    assert isinstance(cluster.allocate(cluster.shape(wide, numa=required), "n"), str)
    assert not cluster.reasons(cluster.shape(wide, numa={"numaTopologyPolicy": "BestEffort"}))["n"]


def test_allocated_cpus_count_in_their_numa_node_without_numa_amounts() -> None:
    """Pods that are bound without NUMA amounts are taken off the NUMA node's cpu."""
    cluster = small_cluster()
    cluster.place(cluster.shape({"cpu": "6"}, qos="LSR"), "n", cpus="0-5")
    shape = cluster.shape({"cpu": "4"}, numa={"numaTopologyPolicy": "SingleNUMANode"})
    given = cluster.allocate(shape, "n")
    assert isinstance(given, Allocation)
    assert given.numa == ((1, {"cpu": 4000}),)


def test_cpus_are_not_bound_where_pods_of_a_numa_node_need_them() -> None:
    """An LS pod with a NUMA policy has cpu of NUMA node 0 as an amount, and runs on its CPUs."""
    cluster = small_cluster()
    aligned = cluster.shape({"cpu": "6500m"}, qos="LS", numa={"numaTopologyPolicy": "Restricted"})
    given = cluster.allocate(aligned, "n")
    assert isinstance(given, Allocation)
    assert given.numa == ((0, {"cpu": 6500}),)
    booking = cluster.place(aligned, "n", numa=given.numa)

    def bound(count: int, **spec: str) -> PodShape:
        return cluster.shape({"cpu": str(count)}, qos="LSR", spec=spec)

    for count, cpus in ((8, "8-15"), (9, "0,8-15")):
        shape = bound(count)
        assert cluster.reasons(shape)["n"] == ()
        assert cpus_of(cluster.allocate(shape, "n")) == cpus
    for count, spec in ((10, {}), (10, {"requiredCPUBindPolicy": "FullPCPUs"})):
        shape = bound(count, **spec)
        assert cluster.reasons(shape)["n"] == ("not enough cpus available to satisfy request",)
        assert cluster.allocate(shape, "n") == "not enough cpus available to satisfy request"
    cluster.tables.remove(booking.uid)
    assert cpus_of(cluster.allocate(bound(10), "n")) == "0-9"


def test_bound_cpus_and_amounts_of_a_numa_node_count_amplified_together() -> None:
    """8 CPUs at 1.5: 5 cores of amounts leave 7000 m, which 4 bound CPUs of 1500 m fit into."""
    ratio = {ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: '{"cpu": 1.5}'}
    cluster = small_cluster(annotations=ratio)
    plain = cluster.shape({"cpu": "5"}, qos="LS")
    cluster.place(plain, "n", numa=((0, {"cpu": 5000}),))
    cluster.place(plain, "n", numa=((1, {"cpu": 12_000}),))
    for count, fits in ((4, True), (5, False)):
        given = cluster.allocate(cluster.shape({"cpu": str(count)}, qos="LSR"), "n")
        assert isinstance(given, Allocation) is fits
    cluster.place(cluster.shape({"cpu": "2"}, qos="LSR"), "n", cpus="0-1")
    assert cpus_of(cluster.allocate(cluster.shape({"cpu": "2"}, qos="LSR"), "n")) == "2-3"
    assert isinstance(cluster.allocate(cluster.shape({"cpu": "3"}, qos="LSR"), "n"), str)


def test_amounts_count_without_a_cpu_topology() -> None:
    """NUMA memory is not given twice on a node whose CPUs are not known."""
    cluster = NumaCluster()
    cluster.add_node("n", make_topology("n", zones=SMALL_ZONES))
    shape = cluster.shape({"memory": "20Gi"}, numa={"numaTopologyPolicy": "SingleNUMANode"})
    for expected in (0, 1):
        given = cluster.allocate(shape, "n")
        assert isinstance(given, Allocation)
        assert given.numa == ((expected, {"memory": 20 * GI}),)
        cluster.place(shape, "n", numa=given.numa)
    assert cluster.reasons(shape)["n"]


# --- amplification -------------------------------------------------------------------------------


def amplified_cluster() -> NumaCluster:
    """Return a node of 16 CPUs that counts as 24."""
    cluster = NumaCluster()
    topology = make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES)
    ratio = {ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: '{"cpu":1.50}'}
    cluster.add_node("n", topology, annotations=ratio, allocatable={"cpu": "24"})
    return cluster


def test_bound_cpus_count_amplified() -> None:
    cluster = amplified_cluster()
    lsr = cluster.shape({"cpu": "8"}, qos="LSR")
    cluster.place(lsr, "n", cpus="0-7")
    # 8 bound CPUs count as 12 of 24; 8 more bound ones as 12, exactly what is left.
    assert cluster.reasons(lsr) == {"n": ()}
    cluster.place(cluster.shape({"cpu": "1"}), "n")
    assert cluster.reasons(lsr) == {"n": ("Insufficient amplified cpu",)}
    assert cluster.reasons(cluster.shape({"cpu": "11"})) == {"n": ()}
    assert cluster.reasons(cluster.shape({"cpu": "11100m"})) == {
        "n": ("Insufficient amplified cpu",)
    }


def test_amplified_numa_nodes() -> None:
    cluster = amplified_cluster()
    assert cluster.table.state(0).numa[0].total == {"cpu": 12000, "memory": 32 * GI}
    policy = {"numaTopologyPolicy": "SingleNUMANode"}
    cluster.place(cluster.shape({"cpu": "4"}, qos="LSR"), "n", cpus="0-3")
    given = cluster.allocate(cluster.shape({"cpu": "7"}, numa=policy), "n")
    assert isinstance(given, Allocation)
    assert given.numa == ((1, {"cpu": 7000}),)  # NUMA 0 has 12 - 6 left
    bound = cluster.allocate(cluster.shape({"cpu": "8"}, qos="LSR", numa=policy), "n")
    assert isinstance(bound, Allocation)
    assert bound.numa == ((1, {"cpu": 8000}),)


# --- score ---------------------------------------------------------------------------------------


def test_absurd_amounts_stay_within_the_columns() -> None:
    """Amplified 900 times, the largest amount does not fit 64 bits, nor do eight of them."""
    ratio = {ANNOTATION_RESOURCE_AMPLIFICATION_RATIO: '{"cpu": 900, "memory": 900}'}
    zones = {number: {"cpu": "8P", "memory": "8E"} for number in range(8)}
    labels = {LABEL_NUMA_TOPOLOGY_POLICY: "BestEffort"}
    cluster = small_cluster(labels=labels, annotations=ratio, zones=zones)
    assert cluster.reasons(cluster.shape({"cpu": "4503599627370"}, qos="LSR"))["n"] == (
        "Insufficient amplified cpu",
    )
    small = cluster.shape({"cpu": "1", "memory": "1Gi"}, qos="LS")
    assert cluster.reasons(small)["n"] == ()
    assert cluster.scores(small)["n"] == 99
    assert isinstance(cluster.allocate(small, "n"), Allocation)


def test_scores_of_nodes_without_numa_policy() -> None:
    """LeastAllocated of real requests: (16-6)/16 and (64-20)/64 of a node that has 4 and 16."""
    cluster = NumaCluster()
    cluster.add_node("n", make_topology("n", cpus=SMALL.cpus()))
    cluster.place(cluster.shape({"cpu": "4", "memory": "16Gi"}), "n")
    shape = cluster.shape({"cpu": "2", "memory": "4Gi"})
    assert cluster.scores(shape) == {"n": 65}
    most = NumaCluster(Settings(scoring=Scoring(True, {"cpu": 1, "memory": 1})))
    most.add_node("n", make_topology("n", cpus=SMALL.cpus()))
    most.place(most.shape({"cpu": "4", "memory": "16Gi"}), "n")
    assert most.scores(most.shape({"cpu": "2", "memory": "4Gi"})) == {"n": 34}


def test_a_pod_that_needs_nothing_of_numa_nodes_is_scored_by_the_whole_node() -> None:
    """CPU that no NUMA node reports: 14 of 16 stay free."""
    policy = {LABEL_NUMA_TOPOLOGY_POLICY: "SingleNUMANode"}
    zones = {number: {"memory": "32Gi"} for number in range(2)}
    settings = Settings(scoring=Scoring(False, {"cpu": 1}), numa_scoring=Scoring(True, {"cpu": 1}))
    cluster = small_cluster(labels=policy, zones=zones, settings=settings)
    shape = cluster.shape({"cpu": "2"})
    assert cluster.reasons(shape)["n"] == ()
    assert cluster.scores(shape) == {"n": 87}


def test_scores_of_numa_nodes_count_what_is_there() -> None:
    """NUMA 0 has 4 bound CPUs, NUMA 1 nothing; the pod of 2 goes to NUMA 1: 6 of 8 are free."""
    cluster = small_cluster(labels={LABEL_NUMA_TOPOLOGY_POLICY: "SingleNUMANode"})
    cluster.place(cluster.shape({"cpu": "4"}, qos="LSR"), "n", cpus="0-3")
    shape = cluster.shape({"cpu": "2"})
    assert cluster.scores(shape) == {"n": (75 + 100) // 2}
    weighted = small_cluster(
        labels={LABEL_NUMA_TOPOLOGY_POLICY: "SingleNUMANode"},
        settings=Settings(
            numa_scoring=Scoring(True, {"cpu": 1}), scoring=Scoring(True, {"cpu": 1})
        ),
    )
    weighted.place(weighted.shape({"cpu": "4"}, qos="LSR"), "n", cpus="0-3")
    assert weighted.scores(weighted.shape({"cpu": "2"})) == {"n": 75}  # NUMA 0: 6 of 8 in use


def test_numa_scoring_resources_choose_the_numa_node() -> None:
    """With weight on memory alone, the NUMA node with more free memory is chosen."""
    settings = Settings(numa_scoring=Scoring(False, {"memory": 1}))
    cluster = small_cluster(
        labels={LABEL_NUMA_TOPOLOGY_POLICY: "SingleNUMANode"}, settings=settings
    )
    other = cluster.shape({"cpu": "1"})
    cluster.place(other, "n", numa=((0, {"memory": 8 * GI}),))
    cluster.place(other, "n", numa=((1, {"cpu": 6000}),))
    given = cluster.allocate(cluster.shape({"cpu": "1"}), "n")
    assert isinstance(given, Allocation)
    assert given.numa == ((1, {"cpu": 1000}),)


# --- reservations --------------------------------------------------------------------------------


def test_the_remainder_of_a_reservation_is_free_for_its_pods_only() -> None:
    cluster = small_cluster(labels={LABEL_NUMA_TOPOLOGY_POLICY: "SingleNUMANode"})
    lsr = cluster.shape({"cpu": "4", "memory": "8Gi"}, qos="LSR")
    reserved = ((1, {"cpu": 8000, "memory": 24 * GI}),)
    cluster.place(lsr, "n", cpus="8-15", numa=reserved, uid="r")
    cluster.place(lsr, "n", cpus="0-7", numa=((0, {"cpu": 8000}),))
    assert cluster.reasons(lsr)["n"]
    first = cluster.allocate(lsr, "n", reservation="r")
    assert isinstance(first, Allocation)
    assert (str(first.cpus), first.numa) == ("8-11", ((1, {"cpu": 4000, "memory": 8 * GI}),))
    cluster.place(lsr, "n", cpus="8-11", numa=first.numa, uid="owner", reservation="r")
    # The owner's amounts lie within the reservation, so nothing else changed.
    assert cluster.table.state(0).numa[1].free == {"cpu": 0, "memory": 8 * GI}
    names = ("cpu", "memory")
    assert str(CpuSet.of_mask(cluster.table.reserved_state(0, "r", names).free)) == "12-15"
    within = cluster.table.reserved_state(0, "r", names).numa[1].free
    assert within == {"cpu": 4000, "memory": 16 * GI}
    assert cluster.table.reserved_state(0, "unknown", names) == cluster.table.state(0)
    assert cpus_of(cluster.allocate(lsr, "n", reservation="r")) == "12-15"


class _MatchesAll(Restoring):
    def rows(self, pod: PodShape, tables: Tables) -> NDArray[np.int64]:
        return np.array([0])

    def on(self, pod: PodShape, tables: Tables, row: int) -> tuple[str, ...]:
        return ("r",)


def test_a_node_passes_for_room_that_is_reserved_for_the_pod() -> None:
    cluster = small_cluster()
    lsr = cluster.shape({"cpu": "4"}, qos="LSR")
    cluster.place(lsr, "n", cpus="0-15", uid="r")
    assert cluster.reasons(lsr)["n"]
    cluster.plugin = type(cluster.plugin)(cluster.table, restored=_MatchesAll())
    assert cluster.reasons(lsr) == {"n": ()}
    cluster.place(lsr, "n", cpus="0-12", uid="owner", reservation="r")
    assert cluster.reasons(lsr)["n"]


def test_reserved_room_does_not_replace_amplified_cpu() -> None:
    """What others took of it is not there, whatever CPUs are reserved."""
    cluster = amplified_cluster()
    lsr = cluster.shape({"cpu": "8"}, qos="LSR")
    cluster.place(lsr, "n", cpus="0-15", uid="r")
    cluster.place(cluster.shape({"cpu": "8"}), "n")
    cluster.plugin = replace(cluster.plugin, restored=_MatchesAll())
    assert cluster.reasons(lsr) == {"n": ("Insufficient amplified cpu",)}


# --- record --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "qos", "spec", "recorded"),
    [
        ({}, "LSR", None, {"preferredCPUBindPolicy": "FullPCPUs"}),
        ({}, "LSR", {"preferredCPUBindPolicy": "FullPCPUs"}, None),
        (
            {},
            "LSR",
            {"preferredCPUBindPolicy": "Default", "preferredCPUExclusivePolicy": "PCPULevel"},
            {"preferredCPUBindPolicy": "FullPCPUs", "preferredCPUExclusivePolicy": "PCPULevel"},
        ),
        ({}, "LSR", {"requiredCPUBindPolicy": "SpreadByPCPUs"}, None),
        (
            {LABEL_CPU_BIND_POLICY: "SpreadByPCPUs"},
            "LS",
            None,
            {"requiredCPUBindPolicy": "SpreadByPCPUs"},
        ),
    ],
)
def test_what_is_recorded(
    labels: dict[str, str],
    qos: str,
    spec: dict[str, str] | None,
    recorded: dict[str, str] | None,
) -> None:
    cluster = small_cluster(labels=labels)
    shape = cluster.shape({"cpu": "2"}, qos=qos, spec=spec)
    given = cluster.allocate(shape, "n")
    assert isinstance(given, Allocation)
    booking = cluster.place(shape, "n", cpus=str(given.cpus), numa=given.numa)
    written = cluster.plugin.record(booking, cluster.tables).annotations
    text = written.get(ANNOTATION_RESOURCE_SPEC)
    assert (None if text is None else json.loads(text)) == recorded
    assert json.loads(written[ANNOTATION_RESOURCE_STATUS] or "") == {"cpuset": str(given.cpus)}


def test_a_pod_without_cpus_or_numa_nodes_records_nothing() -> None:
    cluster = small_cluster()
    booking = cluster.place(cluster.shape({"cpu": "2"}), "n")
    assert cluster.plugin.record(booking, cluster.tables).annotations == {}


def test_a_resource_status_that_the_pod_brought_is_taken_away() -> None:
    cluster = small_cluster()
    pod = make_pod("p", annotations={ANNOTATION_RESOURCE_STATUS: '{"cpuset":"0-3"}'})
    shape = Shapes().of(pod)
    assert cluster.plugin.applies(shape, cluster.tables)
    written = cluster.plugin.record(cluster.place(shape, "n"), cluster.tables).annotations
    assert written == {ANNOTATION_RESOURCE_STATUS: None}


def test_strategies() -> None:
    most = small_cluster(settings=Settings(numa_scoring=Scoring(True, {"cpu": 1})))
    for cluster, expected in (
        (most, "2-5"),
        (small_cluster(labels={LABEL_NUMA_ALLOCATE_STRATEGY: "MostAllocated"}), "2-5"),
        (small_cluster(), "8-11"),
    ):
        lsr = cluster.shape({"cpu": "4"}, qos="LSR")
        cluster.place(lsr, "n", cpus="0-1")
        assert cpus_of(cluster.allocate(lsr, "n")) == expected


class _DevicesOn:
    """A provider whose devices are on one NUMA node."""

    def __init__(self, numa: int) -> None:
        self._mask = 1 << numa

    def hints(
        self,
        pod: object,
        tables: object,
        row: int,
        sets: Iterable[int],
        *,
        reservation: str = "",
        without: frozenset[str] = frozenset(),
    ) -> Hints:
        """Return the sets with the device's NUMA node; the node alone is preferred."""
        return {each: Hint(each == self._mask) for each in sets if each & self._mask}


@pytest.mark.parametrize("numa", [0, 1])
@pytest.mark.parametrize("policy", ["SingleNUMANode", "Restricted", "BestEffort"])
def test_cpus_go_where_the_devices_are(policy: str, numa: int) -> None:
    cluster = small_cluster(labels={LABEL_NUMA_TOPOLOGY_POLICY: policy})
    cluster.plugin = replace(cluster.plugin, others=(_DevicesOn(numa),))
    shape = cluster.shape({"cpu": "4"}, qos="LSR")
    given = cluster.allocate(shape, "n")
    assert isinstance(given, Allocation)
    assert given.numa == ((numa, {"cpu": 4000}),)
    cluster.place(shape, "n", cpus="0-1" if numa == 0 else "8-9")
    cluster.place(shape, "n", cpus="2-5" if numa == 0 else "10-13")
    again = cluster.allocate(shape, "n")
    if policy == "BestEffort":
        assert isinstance(again, Allocation)
        assert {node for node, _ in again.numa} == {0, 1}
    else:
        assert again == "Unaligned NUMA Hint"


def test_a_plain_pod_costs_nothing_but_its_score() -> None:
    cluster = small_cluster()
    shape = cluster.shape({"cpu": "100m"})
    assert cluster.reasons(shape) == {"n": ()}
    assert cluster.allocate(shape, "n") == Allocation()
    assert cluster.scores(shape) == {"n": 99}


def test_a_resource_that_no_numa_node_has_any_more_takes_no_columns() -> None:
    cluster = NumaCluster()

    def report(node: str, *names: str) -> int:
        zones = {0: dict.fromkeys(names, "4")}
        return cluster.add_node(node, make_topology(node, zones=zones))

    report("n", "cpu", "example.com/a")
    report("m", "example.com/a")
    table = cluster.table
    for columns in (table.total, table.free, table.has):
        assert columns.keys() == {"cpu", "example.com/a"}
    row = report("n", "cpu", "example.com/b")
    assert table.total.keys() == {"cpu", "example.com/a", "example.com/b"}
    assert table.has["example.com/a"].tolist().count(True) == 1
    report("m", "cpu")
    for columns in (table.total, table.free, table.has):
        assert columns.keys() == {"cpu", "example.com/b"}
    table.forget(row)
    assert table.total.keys() == {"cpu"}


def test_nodes_keep_their_columns_when_the_tables_grow() -> None:
    cluster = NumaCluster()

    def add(number: int) -> int:
        name = f"n{number}"
        topology = make_topology(
            name, cpus=SMALL.cpus(), zones=SMALL_ZONES, policies=["SingleNUMANodePodLevel"]
        )
        return cluster.add_node(name, topology)

    first = add(0)
    cluster.place(cluster.shape({"cpu": "4"}, qos="LSR"), "n0", cpus="0-3")
    table = cluster.table

    def columns() -> list[Any]:
        of_zones: list[NDArray[Any]] = [*table.total.values(), *table.free.values()]
        of_node: list[NDArray[Any]] = [
            table.policy,
            table.core_step,
            table.bound,
            table.free_cpus,
            table.status,
        ]
        return [column[first].tolist() for column in (*of_zones, *of_node)]

    before, capacity = columns(), len(table.policy)
    assert table.free["cpu"][first].sum() < table.total["cpu"][first].sum()
    last = first
    for number in range(1, capacity + 2):
        last = add(number)
    assert len(table.policy) > capacity
    assert columns() == before
    assert table.total["cpu"][last].tolist() == table.total["cpu"][first].tolist()


def test_amounts_of_nothing_make_no_numa_node_shared() -> None:
    cluster = NumaCluster()
    row = cluster.add_node("n", make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES))
    shape = cluster.shape({"cpu": "1"})
    cluster.place(shape, "n", numa=((0, {"cpu": 1000}), (1, {"cpu": 0})))
    statuses = {number: node.status for number, node in cluster.table.state(row).numa.items()}
    assert statuses == {0: Status.SINGLE, 1: Status.IDLE}
    assert cluster.table.status[row, :2].tolist() == [Status.SINGLE, Status.IDLE]
    cluster.place(shape, "n", numa=((0, {"cpu": 500}), (1, {"cpu": 500})), uid="both")
    statuses = {number: node.status for number, node in cluster.table.state(row).numa.items()}
    assert statuses == {0: Status.SHARED, 1: Status.SHARED}
    cluster.tables.remove("both")
    assert cluster.table.status[row, :2].tolist() == [Status.SINGLE, Status.IDLE]


def test_columns_of_a_node_that_is_gone_are_empty() -> None:
    cluster = NumaCluster()
    topology = make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES)
    policy = {LABEL_NUMA_TOPOLOGY_POLICY: "SingleNUMANode"}
    row = cluster.add_node("n", topology, labels=policy)
    table = cluster.table
    assert table.any_policy and table.slots[row] == 2 and table.core_step[row] == 2
    assert table.total["cpu"][row, :2].tolist() == [8000, 8000]
    assert table.free_cpus[row].any() and table.managed_cpus[row].any()
    other = cluster.add_node("other", make_topology("other", zones={0: {"cpu": "4"}}))
    table.forget(row)
    cluster.tables.delete_node("n")
    assert not table.any_policy
    assert (table.slots[row], table.core_step[row], table.cpu_ratio[row]) == (0, 0, 100)
    assert table.policy[row] == 0
    for column in (table.total["cpu"], table.free["cpu"], table.has["cpu"]):
        assert not column[row].any() and column[other].any()
    assert not table.free_cpus[row].any() and not table.managed_cpus[row].any()
    # A resource that no node has any more has no columns.
    assert set(table.total) == set(table.free) == set(table.has) == {"cpu"}


def test_a_node_that_loses_its_policy_asks_nothing_of_pods() -> None:
    cluster = NumaCluster()
    topology = make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES)
    for policy, asks in (("SingleNUMANode", True), ("", False), ("Restricted", True)):
        labels = {LABEL_NUMA_TOPOLOGY_POLICY: policy} if policy else {}
        cluster.add_node("n", topology, labels=labels)
        assert cluster.table.any_policy == asks


def test_nothing_is_free_where_pods_have_more_than_there_is() -> None:
    cluster = NumaCluster()
    row = cluster.add_node("n", make_topology("n", zones=SMALL_ZONES))
    cluster.place(cluster.shape({"cpu": "9"}), "n", numa=((0, {"cpu": 9000}),))
    free = cluster.table.state(row).numa
    assert (free[0].free["cpu"], free[1].free["cpu"]) == (0, 8000)
    assert cluster.table.free["cpu"][row, :2].tolist() == [0, 8000]


def test_a_narrowed_state_has_nothing_free_but_what_is_given() -> None:
    cluster = NumaCluster()
    row = cluster.add_node("n", make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES))
    state = replace(cluster.table.state(row), preferred=CpuSet.parse("0-3").mask)
    given = ((0, {"cpu": 1000, "memory": 2**30}),)
    narrow = narrowed(state, CpuSet.parse("2-5").mask, given)
    assert str(CpuSet.of_mask(narrow.free)) == "2-5"
    assert str(CpuSet.of_mask(narrow.preferred)) == "2-3"
    # Amounts of cpu are not compared, and a NUMA node that is not given has nothing.
    free = {number: dict(node.free) for number, node in narrow.numa.items()}
    assert free == {0: {"cpu": 8000, "memory": 2**30}, 1: {}}
    assert narrow.numa[0].total == state.numa[0].total
    large = narrowed(state, 0, ((1, {"memory": 2**50}),))
    assert (large.free, dict(large.numa[1].free)) == (0, {"memory": 32 * 2**30})


def test_statuses_of_numa_nodes_go_with_their_node() -> None:
    cluster = NumaCluster()
    row = cluster.add_node("n", make_topology("n", cpus=SMALL.cpus(), zones=SMALL_ZONES))
    cluster.place(cluster.shape({"cpu": "1"}), "n", numa=((1, {"cpu": 1000}),), uid="p")
    assert cluster.table.status[row, :2].tolist() == [Status.IDLE, Status.SINGLE]
    cluster.tables.delete_node("n")
    cluster.table.forget(row)
    assert not cluster.table.status[row].any()
