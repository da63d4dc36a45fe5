"""Gangs that are gathered in the network: planned as a whole, then tried member by member."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import permutations
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.evaluation import Evaluation
from cluster.scheduler.cycle.gang_plans import GangPlans, PlanOutdated
from cluster.scheduler.cycle.permit import Wanted
from cluster.scheduler.cycle.plan_trial import PlanTrial
from cluster.scheduler.cycle.scheduling import Scheduling
from cluster.scheduler.cycle.trial import RowChecks, Trial
from cluster.scheduler.plugins.between_pods.near_pods import NetworkTopologyScore
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.gather import Gather
from cluster.scheduler.tables.network_topology import Layer, NetworkTopology
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node, make_pod

_CONFIGURATION = read_configuration(
    "apiVersion: kubescheduler.config.k8s.io/v1\n"
    "kind: KubeSchedulerConfiguration\n"
    "profiles: [{schedulerName: koord-scheduler}]\n",
    obj="test",
)
_RACK = Gather(must=("RackLayer",))
_SELECTOR = {"scheduling.koordinator.sh/network-topology-selector": "job"}
_ALONE = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}
        ]
    }
}


_ON_Y = {"nodeSelector": {"zone": "y"}}


class _Bed:
    """Racks A (a0, a1) and B (b0, b1, b2); nodes of A have 8 CPUs, those of B have 4."""

    def __init__(
        self, *, topology: bool = True, may_preempt: bool = False, nodes: bool = True
    ) -> None:
        self.tables = Tables()
        plugins = make_plugins(_CONFIGURATION, self.tables)
        self.network = plugins.network
        if topology:
            self.network.set((Layer("RackLayer", ("rack",)),))
        self.scheduling = Scheduling(self.tables, plugins.profiles, seed=1)
        self.plans = GangPlans(
            self.tables,
            self.scheduling.checks,
            self._evaluate,
            self.network,
            admit=self.scheduling.admit,
            examine=self.scheduling.examine,
            node_of=self.scheduling.nominator.node_of,
            may_preempt=lambda pod: may_preempt,
        )
        for name in ("a0", "a1", "b0", "b1", "b2") if nodes else ():
            cpu = "8" if name[0] == "a" else "4"
            labels = {"rack": name[0].upper()}
            self.tables.upsert_node(make_node(name, labels=labels, allocatable={"cpu": cpu}))
        self.shapes = Shapes()
        self.evaluated = 0

    def _evaluate(self, shape: PodShape) -> Evaluation:
        self.evaluated += 1
        return self.scheduling.evaluate(shape)

    def pod(
        self,
        name: str,
        cpu: int = 4,
        *,
        index: int | None = None,
        own: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        **spec: Any,
    ) -> PendingPod[PodShape]:
        """own: labels and annotations of this pod alone."""
        annotations = {**_SELECTOR, **own.get("annotations", {})}
        if index is not None:
            annotations["gang.scheduling.koordinator.sh/network-topology-index"] = str(index)
        shape = self.shapes.of(
            make_pod(
                name,
                requests={"cpu": str(cpu)},
                labels={"job": "j", **own.get("labels", {})},
                annotations=annotations,
                schedulerName="koord-scheduler",
                **spec,
            )
        )
        return PendingPod(f"default/{name}", name, 0, shape, 0.0, "default/g")

    def nodes_of(self, pods: list[PendingPod[PodShape]], gather: Gather = _RACK) -> dict[str, str]:
        """Return the planned node of each pod."""
        wanted = [Wanted("default/g", len(pods), tuple(pods), gather)]
        found = {}
        for pod in pods:
            node = self.plans.node_for(pod, wanted)
            assert isinstance(node, str), node.message
            found[pod.uid] = node
            wanted = []
        return found

    def refusal(self, pods: list[PendingPod[PodShape]], gather: Gather = _RACK) -> Diagnosis:
        wanted = [Wanted("default/g", len(pods), tuple(pods), gather)]
        found = self.plans.node_for(pods[0], wanted)
        assert isinstance(found, Diagnosis)
        return found


def test_pods_are_planned_into_one_rack_in_the_order_of_their_names() -> None:
    bed = _Bed()
    pods = [bed.pod(f"worker-{number}") for number in (10, 9, 2)]
    # B has headroom for three and A for four: the narrower one is taken.
    assert bed.nodes_of(pods) == {"worker-2": "b0", "worker-9": "b1", "worker-10": "b2"}
    assert not bed.tables.bookings


def test_an_index_counts_before_the_name() -> None:
    bed = _Bed()
    pods = [bed.pod("a", index=3), bed.pod("b", index=2), bed.pod("c", index=1)]
    assert bed.nodes_of(pods) == {"c": "b0", "b": "b1", "a": "b2"}


def test_members_that_differ_in_nothing_that_nodes_look_at_are_evaluated_once() -> None:
    """Each member of a gang that is not strict has the gang looked at, as long as it is short."""
    bed = _Bed()
    pods = [bed.pod(f"w{number}", own={"labels": {"n": str(number)}}) for number in range(9)]
    assert len({pod.shape for pod in pods}) == len(pods)
    assert "there is room for 7 at most" in bed.refusal(pods).message
    assert bed.evaluated == 1


def test_what_only_a_trial_shows_corrects_the_plan() -> None:
    bed = _Bed()
    pods = [bed.pod(f"w{number}", cpu=1, affinity=_ALONE) for number in range(3)]
    # By their requests all fit on one node, but they keep apart.
    assert sorted(bed.nodes_of(pods).values()) == ["b0", "b1", "b2"]
    pods.append(bed.pod("w3", cpu=1, affinity=_ALONE))
    refusal = bed.refusal(pods)
    assert refusal.message.startswith(
        "0/5 nodes are available: no candidate topology nodes can accommodate job,"
        " desiredOfferSlot: 4, RackLayer: "
    )
    assert "Coscheduling" in refusal.plugins
    assert not bed.tables.bookings


@pytest.mark.parametrize(
    "own",
    [
        {"labels": "batch.kubernetes.io/job-completion-index"},
        {"annotations": "gang.scheduling.koordinator.sh/network-topology-index"},
    ],
)
def test_what_sets_each_member_apart_adds_no_room(own: dict[str, str]) -> None:
    bed = _Bed()
    # More nodes than plans that are tried; each takes one member.
    for number in range(70):
        bed.tables.upsert_node(
            make_node(f"c{number}", labels={"rack": "C"}, allocatable={"cpu": "4"})
        )
    pods = [bed.pod(f"w{number}", own={kind: {key: str(number)} for kind, key in own.items()})
            for number in range(10)]  # fmt: skip
    nodes = bed.nodes_of(pods)
    assert len(set(nodes.values())) == 10
    assert {node[0] for node in nodes.values()} == {"c"}
    # 5 of 8 CPUs: a node takes one member, and there is no room for more than two.
    pods = [bed.pod(f"w{number}", 5, own={kind: {key: str(number)} for kind, key in own.items()})
            for number in range(3)]  # fmt: skip
    assert "there is room for 2 at most" in bed.refusal(pods).message


@pytest.mark.parametrize(
    "spec",
    [
        {"affinity": _ALONE},
        {
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"job": "j"}},
                }
            ]
        },
    ],
)
def test_pods_that_are_spread_are_planned_on_as_many_nodes(spec: dict[str, Any]) -> None:
    bed = _Bed()
    # More nodes than plans that are tried; each has CPUs for all members.
    for number in range(70):
        bed.tables.upsert_node(
            make_node(f"c{number}", labels={"rack": "C"}, allocatable={"cpu": "64"})
        )
    nodes = bed.nodes_of([bed.pod(f"w{number}", 1, **spec) for number in range(10)])
    assert len(set(nodes.values())) == 10


def _by_zone(kind: str) -> dict[str, Any]:
    """Return the spec of pods of which zones have one each, or as many as others."""
    pods = {"matchLabels": {"job": "j"}}
    if kind == "anti-affinity":
        term = {"topologyKey": "zone", "labelSelector": pods}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        return {"affinity": {"podAntiAffinity": required}}
    constraint = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    return {"topologySpreadConstraints": [{**constraint, "labelSelector": pods}]}


@pytest.mark.parametrize("kind", ["anti-affinity", "spread"])
def test_pods_are_kept_apart_by_a_label_of_many_nodes(kind: str) -> None:
    bed = _Bed(nodes=False)
    # By its headroom the first zone takes all members; there are more nodes in it than plans.
    for zone in range(8):
        for number in range(100):
            labels = {"rack": "C", "zone": f"z{zone}"}
            name = f"c{zone}-{number:02}"
            bed.tables.upsert_node(make_node(name, labels=labels, allocatable={"cpu": "4"}))
    pods = [bed.pod(f"w{number}", **_by_zone(kind)) for number in range(8)]
    nodes = bed.nodes_of(pods)
    assert sorted(node[:2] for node in nodes.values()) == [f"c{zone}" for zone in range(8)]
    assert not bed.tables.bookings


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_members_of_even_zones_are_tried_in_any_order(order: tuple[int, ...]) -> None:
    bed = _Bed(nodes=False)
    for zone in "xy":
        for number in range(2):
            labels = {"rack": "C", "zone": zone}
            name = f"c{zone}{number}"
            bed.tables.upsert_node(make_node(name, labels=labels, allocatable={"cpu": "4"}))
    pods = [bed.pod(f"w{number}", **_by_zone("spread")) for number in range(4)]
    wanted = [Wanted("default/g", len(pods), tuple(pods), _RACK)]
    for number in order:
        pod = pods[number]
        node = bed.plans.node_for(pod, wanted)
        wanted = []
        assert isinstance(node, str)
        row = bed.tables.nodes.row(node)
        assert row is not None
        assert bed.scheduling.checks("koord-scheduler").passes(pod.shape, row)
        bed.tables.place(Booking(pod.key, pod.uid, pod.shape, node))
    assert len({booking.node for booking in bed.tables.bookings.values()}) == 4


def test_members_with_labels_of_their_own_are_looked_at_as_often_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each node that refuses one of them is not tried with the others, which are like it."""
    members = 40
    bed = _Bed(nodes=False)
    for number in range(members):
        labels = {"rack": "C", "zone": "xy"[number >= members // 2]}
        bed.tables.upsert_node(make_node(f"c{number}", labels=labels, allocatable={"cpu": "4"}))
    pods = [
        bed.pod(f"w{number}", own={"labels": {"own": f"{number}"}}, **_by_zone("spread"))
        for number in range(members)
    ]
    passes, checked = RowChecks.passes, 0

    def counting(checks: RowChecks, pod: PodShape, row: int) -> bool:
        nonlocal checked
        checked += 1
        return passes(checks, pod, row)

    monkeypatch.setattr(RowChecks, "passes", counting)
    wanted = [Wanted("default/g", members, tuple(pods), _RACK)]
    Random(1).shuffle(pods)
    for pod in pods:
        node = bed.plans.node_for(pod, wanted)
        assert isinstance(node, str)
        if wanted:
            assert members < checked <= 4 * members
            checked, wanted = 0, []
        bed.tables.place(Booking(pod.key, pod.uid, pod.shape, node))
    # A member that does not fit where it was planned looks at the nodes of all others at once.
    assert checked < members


def test_a_domain_with_too_few_zones_leaves_the_gang_to_another_one() -> None:
    bed = _Bed(nodes=False)
    # Rack C counts more pods in each of its two zones than there are plans, rack D has three zones.
    for rack, zone, count in (("C", "x", 100), ("C", "y", 100), ("D", "x", 70), ("D", "y", 70),
                              ("D", "z", 70)):  # fmt: skip
        for number in range(count):
            labels = {"rack": rack, "zone": zone}
            name = f"{rack}{zone}{number}".lower()
            bed.tables.upsert_node(make_node(name, labels=labels, allocatable={"cpu": "4"}))
    pods = [bed.pod(f"w{number}", **_by_zone("anti-affinity")) for number in range(3)]
    nodes = bed.nodes_of(pods)
    assert sorted(node[:2] for node in nodes.values()) == ["dx", "dy", "dz"]
    pods.append(bed.pod("w3", **_by_zone("anti-affinity")))
    assert "no candidate topology nodes can accommodate job" in bed.refusal(pods).message


def test_members_that_are_moved_keep_the_multiple_of_a_layer() -> None:
    bed = _Bed(nodes=False)
    for rack in "CD":
        for zone in range(4):
            for number in range(40):
                labels = {"rack": rack, "zone": f"{rack}{zone}"}
                name = f"{rack.lower()}{zone}-{number:02}"
                bed.tables.upsert_node(make_node(name, labels=labels, allocatable={"cpu": "4"}))
    gather = Gather(multiples=(("RackLayer", 4),))
    pods = [bed.pod(f"w{number}", **_by_zone("anti-affinity")) for number in range(8)]
    nodes = bed.nodes_of(pods, gather)
    assert sorted(node[:2] for node in nodes.values()) == [
        f"{r}{z}" for r in "cd" for z in range(4)
    ]


def _fits(bed: _Bed, pods: list[PendingPod[PodShape]], rows: list[int]) -> bool:
    """Return whether the rows take all pods, one after another in some way."""
    if not pods:
        return True
    pod, *others = pods
    for row in rows:
        booking = bed.scheduling.checks("koord-scheduler").booking(pod, row)
        if booking is not None:
            with Trial(bed.tables) as trial:
                trial.place(booking)
                if _fits(bed, others, rows):
                    return True
    return False


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kind", ["anti-affinity", "spread"])
def test_a_gang_is_gathered_wherever_one_rack_takes_it(kind: str, seed: int) -> None:
    random = Random(seed)
    bed = _Bed(nodes=False)
    racks: dict[str, list[int]] = {}
    for number in range(random.randint(3, 7)):
        rack, zone = random.choice("CD"), random.choice("xyz")
        name = f"c{number}"
        labels = {"rack": rack, "zone": zone}
        cpu = random.choice(["1", "4", "8"])
        bed.tables.upsert_node(make_node(name, labels=labels, allocatable={"cpu": cpu}))
        row = bed.tables.nodes.row(name)
        assert row is not None
        racks.setdefault(rack, []).append(row)
    pods = [bed.pod(f"w{number}", **_by_zone(kind)) for number in range(random.randint(1, 4))]
    found = bed.plans.node_for(pods[0], [Wanted("default/g", len(pods), tuple(pods), _RACK)])
    assert isinstance(found, str) == any(_fits(bed, pods, rows) for rows in racks.values())
    assert not bed.tables.bookings


def test_a_member_that_few_nodes_take_gets_one_before_the_others() -> None:
    bed = _Bed(nodes=False)
    for name, zone in (("c0", "x"), ("c1", "y")):
        labels = {"rack": "C", "zone": zone}
        bed.tables.upsert_node(make_node(name, labels=labels, allocatable={"cpu": "4"}))
    # In the order of their names, the first two take the node that the third one needs.
    pods = [bed.pod("w0", 2), bed.pod("w1", 2), bed.pod("w2", nodeSelector={"zone": "x"})]
    assert bed.nodes_of(pods) == {"w0": "c1", "w1": "c1", "w2": "c0"}
    assert not bed.tables.bookings


@pytest.mark.parametrize("seed", range(150))
def test_members_of_several_kinds_are_gathered_wherever_one_rack_takes_them(seed: int) -> None:
    random = Random(seed)
    bed = _Bed(nodes=False)
    racks: dict[str, list[int]] = {}
    for number in range(random.randint(2, 6)):
        rack, name = random.choice("CD"), f"c{number}"
        labels = {"rack": rack, "zone": random.choice("xy")}
        cpu = str(random.randint(2, 7))
        bed.tables.upsert_node(make_node(name, labels=labels, allocatable={"cpu": cpu}))
        row = bed.tables.nodes.row(name)
        assert row is not None
        racks.setdefault(rack, []).append(row)
    pods = []
    for number in range(random.randint(2, 6)):
        spec: dict[str, Any] = random.choice(({}, {}, {"nodeSelector": {"zone": "x"}}, _ON_Y))
        pods.append(bed.pod(f"w{number}", random.choice((1, 2, 3)), **spec))
    found = bed.plans.node_for(pods[0], [Wanted("default/g", len(pods), tuple(pods), _RACK)])
    assert isinstance(found, str) == any(_fits(bed, pods, rows) for rows in racks.values())
    assert not bed.tables.bookings


def test_the_search_for_another_division_ends_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = _Bed(nodes=False)
    for number in range(40):
        labels = {"rack": "C", "zone": "xy"[number % 2]}
        bed.tables.upsert_node(make_node(f"c{number}", labels=labels, allocatable={"cpu": "5"}))
    # The sum of what nodes take suffices, but two CPUs of each node are of no use.
    pods = [bed.pod(f"w{number}", 3 - number % 2) for number in range(79)]
    pods += [bed.pod(f"v{number}", 3, nodeSelector={"zone": "x"}) for number in range(4)]
    looks, examine = 0, PlanTrial._open

    def counting(trial: PlanTrial, shape: PodShape, domain: Any) -> list[int]:
        nonlocal looks
        looks += 1
        return examine(trial, shape, domain)

    monkeypatch.setattr(PlanTrial, "_open", counting)
    assert "Coscheduling" in bed.refusal(pods).plugins
    assert looks <= 1_000
    assert not bed.tables.bookings


def test_a_filter_that_holds_back_no_node_before_a_member_is_placed_may_wake_the_gang() -> None:
    bed = _Bed()
    disk = [{"name": "d", "gcePersistentDisk": {"pdName": "disk"}}]
    # A node takes one pod with the disk, and no rack has four nodes.
    pods = [bed.pod(f"w{number}", 1, volumes=disk) for number in range(4)]
    refusal = bed.refusal(pods)
    assert refusal.plugins >= {"Coscheduling", "NodeResourcesFit", "VolumeRestrictions"}


def test_pods_of_several_shapes_are_planned_together() -> None:
    bed = _Bed()
    pods = [bed.pod("large", cpu=7), bed.pod("small-1", cpu=1), bed.pod("small-2", cpu=1)]
    nodes = bed.nodes_of(pods)
    assert {node[0] for node in nodes.values()} == {"a"}
    for pod in pods:
        bed.tables.place(Booking(pod.key, pod.uid, pod.shape, nodes[pod.uid]))
    requested = bed.tables.nodes.requested[:5, 0]
    assert (requested <= bed.tables.nodes.allocatable[:5, 0]).all()


def test_without_a_topology_a_gang_that_asks_for_one_waits() -> None:
    bed = _Bed(topology=False)
    refusal = bed.refusal([bed.pod("w")])
    assert refusal.message == "0/5 nodes are available: no cluster network topology."
    assert "Coscheduling" in refusal.plugins


def test_too_little_room_is_said_before_the_network_is_looked_at() -> None:
    bed = _Bed(topology=False)
    refusal = bed.refusal([bed.pod(f"w{number}") for number in range(8)])
    assert "gang default/g needs room for 8 pods together, and there is room for 7" in (
        refusal.message
    )


def test_a_pod_that_comes_while_a_plan_is_carried_out_has_the_gang_planned_again() -> None:
    bed = _Bed()
    first, second, late = (bed.pod(name) for name in ("w0", "w1", "w2"))
    wanted = [Wanted("default/g", 2, (first, second), _RACK)]
    assert bed.plans.node_for(first, wanted) != ""
    with pytest.raises(PlanOutdated, match="gathered before this pod came"):
        bed.plans.node_for(late, [])
    # The old plan is not used any more.
    assert bed.plans.node_for(second, []) == ""


def test_members_that_are_bound_at_once_share_one_plan() -> None:
    bed = _Bed()
    pods = [bed.pod(name) for name in ("w0", "w1", "w2")]
    wanted = [Wanted("default/g", 0, tuple(pods), _RACK)]
    nodes = {}
    for number, pod in enumerate(pods):
        node = bed.plans.node_for(pod, [Wanted("default/g", 0, tuple(pods[number:]), _RACK)])
        assert isinstance(node, str)
        nodes[pod.uid] = node
        bed.tables.place(Booking(pod.key, pod.uid, pod.shape, node))
    assert set(nodes.values()) == {"b0", "b1", "b2"}
    assert len(wanted[0].pods) == 3


def test_a_gang_that_is_not_gathered_has_no_plan() -> None:
    bed = _Bed()
    pods = [bed.pod("w0")]
    assert bed.plans.node_for(pods[0], [Wanted("default/g", 1, tuple(pods))]) == ""


# --- the score of single pods --------------------------------------------------------------------


def _scores(bed: _Bed, pod: PendingPod[PodShape]) -> dict[str, int]:
    feasible = np.arange(5, dtype=np.intp)
    scores = NetworkTopologyScore(bed.network).score_set(pod.shape, bed.tables, feasible)
    return {bed.tables.nodes.name(row): int(score) for row, score in enumerate(scores)}


def test_a_pod_is_drawn_to_the_pods_of_its_job_by_the_layers_of_the_network() -> None:
    bed = _Bed()
    pod = bed.pod("w")
    # Without pods of the job, the rack with fewer nodes comes first, then names decide.
    assert _scores(bed, pod) == {"a0": 100, "a1": 75, "b0": 50, "b1": 25, "b2": 0}
    other = bed.pod("w1")
    bed.tables.place(Booking(other.key, other.uid, other.shape, "b1"))
    assert _scores(bed, pod) == {"b1": 100, "b0": 75, "b2": 50, "a0": 25, "a1": 0}


def test_a_node_outside_of_the_network_comes_last() -> None:
    bed = _Bed()
    bed.network.set((Layer("SpineLayer", ("spine",)), Layer("RackLayer", ("rack",))))
    for name in ("a1", "b2"):
        rack = name[0].upper()
        bed.tables.upsert_node(make_node(name, labels={"rack": rack, "spine": "s"}))
    scores = _scores(bed, bed.pod("w"))
    assert sorted(scores, key=lambda name: -scores[name])[:2] == ["a1", "b2"]


def test_the_score_counts_only_for_pods_that_name_their_job() -> None:
    bed = _Bed()
    plugin = NetworkTopologyScore(bed.network)
    assert plugin.applies(bed.pod("w").shape, bed.tables)
    plain = bed.shapes.of(make_pod("p", annotations={"x": json.dumps({})}))
    assert not plugin.applies(plain, bed.tables)
    feasible, pod = np.arange(5, dtype=np.intp), bed.pod("v").shape
    unknown = NetworkTopologyScore(NetworkTopology(bed.tables.nodes))
    assert unknown.score_set(pod, bed.tables, feasible).tolist() == [0] * 5
    assert plugin.score_set(pod, bed.tables, feasible[:0]).tolist() == []


@pytest.mark.parametrize(
    ("least", "may_preempt", "tried"), [(1, True, True), (1, False, False), (2, True, False)]
)
def test_only_a_member_that_needs_no_other_is_tried_without_room(
    least: int, may_preempt: bool, tried: bool
) -> None:
    """The attempt may make room for it, and does not for pods that need others."""
    bed = _Bed(may_preempt=may_preempt)
    pods = [bed.pod(f"worker-{number}", cpu=9) for number in range(2)]
    found = bed.plans.node_for(pods[0], [Wanted("default/g", least, tuple(pods), _RACK)])
    if tried:
        assert found == ""
    else:
        assert isinstance(found, Diagnosis)
        assert found.message.endswith("and there is room for 0 at most.")
