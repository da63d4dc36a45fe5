"""How many pods of a gang fit at most: against placing them one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.gang_plans import GangPlans
from cluster.scheduler.cycle.permit import Wanted
from cluster.scheduler.cycle.scheduling import Placed, Scheduling
from cluster.scheduler.profiles import make_plugins
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.booking import Booking
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


class _Cluster:
    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self.tables = Tables()
        plugins = make_plugins(_CONFIGURATION, self.tables)
        self.scheduling = Scheduling(self.tables, plugins.profiles, seed=1)
        self.plans = GangPlans(
            self.tables,
            self.scheduling.checks,
            self.scheduling.evaluate,
            None,
            admit=self.scheduling.admit,
            examine=self.scheduling.examine,
            node_of=self.scheduling.nominator.node_of,
        )
        for number, node in enumerate(nodes):
            self.tables.upsert_node(make_node(f"n{number}", **node))
        self.shapes = Shapes()
        self.made = 0

    def shape(self, cpu: int, **spec: Any) -> PodShape:
        return self.shapes.of(
            make_pod("p", requests={"cpu": f"{cpu}m"}, schedulerName="koord-scheduler", **spec)
        )

    def room(self, shape: PodShape, count: int) -> int:
        """Return the most pods for which there is room, up to `count`."""
        for least in range(count, 0, -1):
            if self.short(least, {shape: count}) is None:
                return least
        return 0

    def short(self, least: int, members: dict[PodShape, int]) -> Diagnosis | None:
        """Return why there is too little room for `least` members, or None."""
        pods = tuple(
            PendingPod(f"ns/m{number}", f"m{number}", 0, shape, 0.0, "ns/g")
            for number, shape in enumerate(
                shape for shape, count in members.items() for _ in range(count)
            )
        )
        found = self.plans.node_for(pods[0], [Wanted("ns/g", least, pods)])
        return found if isinstance(found, Diagnosis) else None

    def placed_one_by_one(self, shape: PodShape, count: int) -> int:
        for number in range(count):
            self.made += 1
            outcome = self.scheduling.schedule(
                key=f"ns/p{self.made}",
                uid=f"u{self.made}",
                shape=shape,
                profile="koord-scheduler",
                now=0.0,
            )
            if not isinstance(outcome, Placed):
                return number
        return count


_NODE = st.fixed_dictionaries(
    {
        "allocatable": st.fixed_dictionaries(
            {
                "cpu": st.sampled_from(["0", "1", "2500m", "4"]),
                "pods": st.sampled_from(["0", "1", "3", "10"]),
            }
        ),
        "labels": st.fixed_dictionaries({"zone": st.sampled_from(["a", "b"])}),
        "unschedulable": st.sampled_from([False, False, True]),
    }
)
_PORT = [{"name": "c", "ports": [{"containerPort": 1, "hostPort": 80}]}]


def _spread(key: str, **constraint: Any) -> list[dict[str, Any]]:
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {},
            **constraint,
        }
    ]


_ALONE = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}
        ]
    }
}


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.lists(_NODE, min_size=1, max_size=4),
    cpu=st.sampled_from([0, 400, 1000, 1500]),
    others=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([300, 1000])), max_size=4),
    spec=st.sampled_from(
        [
            {},
            {"nodeSelector": {"zone": "a"}},
            {"containers": _PORT},
            {"topologySpreadConstraints": _spread("zone")},
            {"topologySpreadConstraints": _spread("zone", minDomains=3, maxSkew=2)},
            {"topologySpreadConstraints": _spread("kubernetes.io/hostname")},
            {"affinity": _ALONE},
        ]
    ),
)
def test_the_room_is_never_below_what_one_by_one_finds_and_mostly_equal(
    nodes: list[dict[str, Any]], cpu: int, others: list[tuple[int, int]], spec: dict[str, Any]
) -> None:
    cluster = _Cluster(nodes)
    for number, (node, milli) in enumerate(others):
        other = cluster.shape(milli)
        cluster.tables.place(Booking(f"ns/o{number}", f"o{number}", other, f"n{node}"))
    shape = cluster.shape(cpu, **spec)
    room = cluster.room(shape, 12)
    placed = cluster.placed_one_by_one(shape, 12)
    if "topologySpreadConstraints" in spec:
        assert room >= placed
    else:
        assert room == placed


@pytest.mark.parametrize(
    ("closed", "running", "most"),
    [
        (False, 0, 4),
        # Four more pods leave the node with the fewest two at most, and the other one three.
        (True, 0, 3),
        # The other node has five, and the one with the fewest will have four at most.
        (True, 5, 0),
    ],
)
def test_the_node_with_the_fewest_pods_limits_the_room_of_pods_that_are_spread(
    closed: bool, running: int, most: int
) -> None:
    cluster = _Cluster([{"unschedulable": closed}, {}])
    for number in range(running):
        cluster.tables.place(Booking(f"ns/o{number}", f"o{number}", cluster.shape(0), "n1"))
    shape = cluster.shape(0, topologySpreadConstraints=_spread("kubernetes.io/hostname"))
    assert cluster.room(shape, 4) == most


def test_members_of_several_shapes_count_together() -> None:
    cluster = _Cluster([{"allocatable": {"cpu": "4"}}])
    large, small = cluster.shape(3000), cluster.shape(500)
    members = {large: 3, small: 2}
    # One large and two small ones, each looked at alone.
    assert cluster.short(3, members) is None
    assert cluster.short(4, members) is not None


@pytest.mark.parametrize("least", [0, 3])
def test_enough_room_is_no_refusal(least: int) -> None:
    cluster = _Cluster([{"allocatable": {"cpu": "4"}}])
    shape = cluster.shape(1000)
    assert cluster.short(least, {shape: 3}) is None


def test_a_refusal_says_how_many_fit_and_which_plugins_limit_that() -> None:
    cluster = _Cluster([{"allocatable": {"cpu": "4"}}, {"unschedulable": True}])
    shape = cluster.shape(1500)
    found = cluster.short(5, {shape: 7})
    assert found is not None
    assert found.message == (
        "0/2 nodes are available: gang ns/g needs room for 5 pods together,"
        " and there is room for 2 at most."
    )
    assert found.plugins == {"NodeUnschedulable", "NodeResourcesFit"}
