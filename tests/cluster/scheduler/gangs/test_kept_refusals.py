"""The refusal of a gang without room is kept for its other members until something changes."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.gang_plans import GangPlans
from cluster.scheduler.cycle.headroom import headroom_of
from cluster.scheduler.cycle.permit import Wanted
from cluster.scheduler.cycle.scheduling import Scheduling
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


def _anti_affinity(**term: Any) -> dict[str, Any]:
    required = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {}, **term}]
    kind = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    return {"affinity": {"podAntiAffinity": kind}}


_SPREAD = {
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "zone",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "x"}},
        }
    ]
}
_KINDS: dict[str, dict[str, Any]] = {
    "amounts": {},
    "selector": {"nodeSelector": {"zone": "a"}},
    "spread": _SPREAD,
    "apart": _anti_affinity(),
    "apart from a team": _anti_affinity(namespaceSelector={"matchLabels": {"team": "t"}}),
}


class _Bed:
    def __init__(self) -> None:
        self.tables = Tables()
        plugins = make_plugins(_CONFIGURATION, self.tables)
        self.scheduling = Scheduling(self.tables, plugins.profiles, seed=1)
        self.plans = self.new_plans()
        self.shapes = Shapes()

    def new_plans(self) -> GangPlans:
        return GangPlans(
            self.tables,
            self.scheduling.checks,
            self.scheduling.evaluate,
            None,
            admit=self.scheduling.admit,
            examine=self.scheduling.examine,
            node_of=self.scheduling.nominator.node_of,
        )

    def shape(self, cpu: int, namespace: str = "default", **spec: Any) -> PodShape:
        pod = make_pod(
            "p",
            namespace=namespace,
            requests={"cpu": str(cpu)},
            labels={"app": "x"},
            schedulerName="koord-scheduler",
            **spec,
        )
        return self.shapes.of(pod)

    def wanted(self, least: int, shapes: list[PodShape]) -> tuple[Wanted[PodShape], ...]:
        pods = tuple(
            PendingPod(f"default/m{number}", f"m{number}", 0, shape, 0.0, "default/g")
            for number, shape in enumerate(shapes)
        )
        return (Wanted("default/g", least, pods, strict=False),)

    def node(self, name: str, cpu: int, zone: str = "a", **spec: Any) -> None:
        node = make_node(name, allocatable={"cpu": str(cpu)}, labels={"zone": zone}, **spec)
        self.tables.upsert_node(node)


def _text(found: str | Diagnosis) -> tuple[str, frozenset[str]]:
    if isinstance(found, str):
        return found, frozenset()
    return found.message, found.plugins


def test_room_is_counted_once_for_members_that_are_refused_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bed = _Bed()
    bed.node("n", 2)
    counted = 0

    def counting(*args: Any) -> Any:
        nonlocal counted
        counted += 1
        return headroom_of(*args)

    monkeypatch.setattr("cluster.scheduler.cycle.gang_plans.headroom_of", counting)
    wanted = bed.wanted(3, [bed.shape(1)] * 4)
    refusals = [bed.plans.node_for(pod, wanted) for pod in wanted[0].pods]
    assert all(isinstance(each, Diagnosis) for each in refusals)
    assert counted == 1
    # Another gang, and the same one with other pods, are looked at.
    other = bed.wanted(3, [bed.shape(1)] * 3)
    assert isinstance(bed.plans.node_for(other[0].pods[0], other), Diagnosis)
    assert counted == 2


@pytest.mark.parametrize("kind", sorted(_KINDS))
@pytest.mark.parametrize("seed", range(12))
def test_a_kept_refusal_is_what_would_be_found_now(kind: str, seed: int) -> None:
    random = Random(seed)
    bed = _Bed()
    tables = bed.tables
    shapes = [bed.shape(random.choice((1, 2)), **_KINDS[kind]) for _ in range(random.randint(2, 5))]
    wanted = bed.wanted(random.randint(2, len(shapes)), shapes)
    for name in "opq":
        bed.node(name, random.randint(0, 3), random.choice("ab"))
    answers = set()

    def change() -> None:
        name = random.choice("nopq")
        step = random.randrange(7)
        if step == 0:
            bed.node(name, random.randint(0, 4), random.choice("ab"))
        elif step == 1:
            taint = [{"key": "k", "effect": "NoSchedule"}] * random.randrange(2)
            bed.node(name, 4, taints=taint, unschedulable=random.random() < 0.3)
        elif step == 2:
            tables.delete_node(name)
        elif step == 3:
            labels = {"team": "t"} if random.random() < 0.5 else {}
            tables.namespaces.set("other", labels)
        elif step == 4:
            shape = bed.shape(1, random.choice(("default", "other")))
            uid = f"b{random.randrange(4)}"
            tables.place(Booking(f"{shape.namespace}/{uid}", uid, shape, name))
        elif step == 5:
            tables.remove(f"b{random.randrange(4)}")
        # Else nothing changes.

    for _ in range(60):
        change()
        pod = random.choice(wanted[0].pods)
        found = bed.plans.node_for(pod, wanted)
        assert _text(found) == _text(bed.new_plans().node_for(pod, wanted))
        answers.add(isinstance(found, Diagnosis))
    assert True in answers
