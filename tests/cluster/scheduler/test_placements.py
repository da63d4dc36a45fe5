"""What is written to a pod: everything that the decision has for it."""

from __future__ import annotations

from dataclasses import MISSING, fields

from cluster.scheduler.binding.placement import Placement
from cluster.scheduler.cycle.scheduling import Decision
from cluster.scheduler.placements import of_pod
from cluster.scheduler.plugins.contract import Recorded
from cluster.scheduler.tables.booking import Allocation, Booking, PlannedVolumes
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import Shapes
from tests.cluster.scheduler.making import make_pod

GONE = "scheduling.koordinator.sh/device-allocated"
LOCK = "hami.io/mutex.lock"
VOLUMES = PlannedVolumes(binds=(("default/claim", "volume"),))


def placement() -> Placement:
    """Return the placement of a pod whose decision uses every member of a Placement."""
    shape = Shapes().of(make_pod("p", annotations={GONE: "before"}))
    pod = PendingPod(key="default/p", uid="u", priority=0, shape=shape, created=0.0)
    booking = Booking("default/p", "u", shape, "n1", Allocation(volumes=VOLUMES))
    recorded = Recorded({"a": "1", GONE: None, "absent": None}, {"l": "1", "m": None}, LOCK)
    return of_pod(pod, Decision(booking, recorded), recorded.annotations, delegated=True)


def test_a_placement_has_all_of_a_decision() -> None:
    assert placement() == Placement(
        namespace="default",
        name="p",
        uid="u",
        node="n1",
        annotations={"a": "1"},
        labels={"l": "1"},
        removed_annotations=(GONE,),
        volumes=VOLUMES,
        lock=LOCK,
        delegated=True,
    )


def test_no_member_of_a_placement_is_left_at_its_default() -> None:
    made = placement()
    for each in fields(Placement):
        if each.default_factory is not MISSING:
            default = each.default_factory()
        else:
            default = None if each.default is MISSING else each.default
        assert getattr(made, each.name) != default, each.name
