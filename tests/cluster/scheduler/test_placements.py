"""What is written of a decision, to a pod or to a Reservation: everything that it has for it."""

from __future__ import annotations

from dataclasses import MISSING, fields

import msgspec
import pytest

from apis.decode import decode_object, to_plain
from apis.device import DeviceAllocation
from apis.quantity import parse_quantity
from apis.scheduling import Reservation
from cluster.scheduler.binding.placement import Placement
from cluster.scheduler.binding.reservations import ReservationPlacement, Seen, TakenPod
from cluster.scheduler.cycle.scheduling import Decision
from cluster.scheduler.placements import of_pod, of_reservation, reference_of
from cluster.scheduler.plugins.contract import Recorded
from cluster.scheduler.sources.reserve_pods import ReservePod
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


def _reserve_pod() -> ReservePod:
    reservation = {
        "metadata": {
            "name": "r",
            "uid": "v",
            "resourceVersion": "7",
            "annotations": {GONE: "before", "kept": "k"},
        },
        "status": {"conditions": [{"type": "Scheduled", "status": "False"}]},
    }
    return ReservePod(
        decode_object(msgspec.json.encode(reservation), Reservation, obj="r"),
        make_pod("r"),
        {"cpu": parse_quantity("4"), "koordinator.sh/gpu": parse_quantity("2")},
    )


@pytest.mark.parametrize("takes", [(), (TakenPod("default", "p", "u"),)])
@pytest.mark.parametrize("resizes", [False, True])
def test_a_reservation_gets_a_node_with_what_is_reserved(
    takes: tuple[TakenPod, ...], resizes: bool
) -> None:
    gpus = tuple(
        DeviceAllocation(minor, resources={"koordinator.sh/gpu-core": parse_quantity("100")})
        for minor in range(2)
    )
    shape = Shapes().of(make_pod("r"))
    booking = Booking("default/r", "v", shape, "n1", Allocation(devices={"gpu": gpus}))
    annotations = {"a": "1", GONE: None, "absent": None}
    decision = Decision(booking, Recorded({}, {"l": "1"}))
    made = of_reservation(_reserve_pod(), decision, annotations, takes, resizes=resizes)
    assert made == ReservationPlacement(
        name="r",
        uid="v",
        node="n1",
        allocatable={
            "cpu": "4",
            "koordinator.sh/gpu": "2",
            **({"koordinator.sh/gpu-core": "200"} if resizes else {}),
        },
        # One that is not there need not be removed.
        annotations={"a": "1", GONE: None},
        takes=takes,
        # With pods to mark, the Reservation is read again before.
        seen=None
        if takes
        else Seen(
            "7",
            {GONE: "before", "kept": "k"},
            to_plain(_reserve_pod().reservation.status.conditions),
        ),
    )
    about = reference_of(made)
    assert (about.kind, about.namespace, about.name, about.uid) == ("Reservation", "", "r", "v")


def test_an_event_about_a_placement_refers_to_its_pod() -> None:
    about = reference_of(placement())
    assert (about.kind, about.namespace, about.name, about.uid) == ("Pod", "default", "p", "u")
