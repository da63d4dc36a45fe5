"""Events of a pod that come during its binding, or later than the answer."""

from __future__ import annotations

import pytest

from cluster.scheduler.binding.placement import Bound, Refused, Why
from tests.cluster.scheduler.reservations.bed import ReservationBed


def test_an_event_from_before_the_binding_does_not_queue_a_bound_pod() -> None:
    bed = ReservationBed()
    bed.pod("p", "1")
    bed.core.schedule_for(10.0)
    placement = bed.placements.pop(0)
    bed.core.attempts.bound(placement, Bound())
    # Written before the Binding, seen after its answer.
    bed.pod("p", "1", metadata={"labels": {"a": "b"}})
    assert len(bed.core.queue) == 0
    assert bed.placed() == {}
    assert bed.core.tables.bookings["uid-p"].node == "n"
    bed.pod("p", "1", metadata={"labels": {"a": "b"}}, node="n")
    assert bed.core.tables.bookings["uid-p"].node == "n"
    # Not what happens to a pod, except where the API server's data is restored from a backup.
    bed.pod("p", "1")
    assert bed.placed() == {"p": ""}


def test_an_event_from_before_its_status_does_not_queue_a_scheduled_reservation() -> None:
    bed = ReservationBed()
    waits = {"phase": "Pending", "nodeName": ""}
    bed.reservation("r", "1", status=waits)
    bed.core.schedule_for(10.0)
    bed.core.attempts.bound(bed.reserved.pop(0), Bound())
    bed.reservation("r", "1", status=waits, labels={"a": "b"})
    assert len(bed.core.queue) == 0
    assert bed.core.tables.bookings["uid-r"].node == "n"


_TO_ANOTHER = {"labels": {"scheduling.koordinator.sh/scheduler-name": "another"}}


def test_a_pod_that_is_given_to_another_scheduler_leaves_the_queue() -> None:
    bed = ReservationBed()
    bed.pod("large", "9")
    bed.pod("p", "1")
    assert bed.placed() == {"p": ""}
    bed.pod("large", "9", metadata=_TO_ANOTHER)
    assert bed.core.queue.state_of("uid-large") is None
    bed.pod("q", "1")
    bed.pod("q", "1", metadata=_TO_ANOTHER)
    assert bed.placed() == {}


@pytest.mark.parametrize("back", [False, True])
def test_a_pod_that_is_given_to_another_scheduler_during_its_binding(back: bool) -> None:
    bed = ReservationBed()
    bed.pod("p", "3")
    bed.core.schedule_for(10.0)
    placement = bed.placements.pop(0)
    bed.pod("p", "3", metadata=_TO_ANOTHER)
    # The Binding may still be carried out: the room is kept until its outcome is known.
    assert "uid-p" in bed.core.tables.bookings
    if back:
        bed.pod("p", "3")
        assert bed.placed() == {}
    bed.core.attempts.bound(placement, Refused(Why.FORBIDDEN, "as the test wants it"))
    assert not bed.core.tables.bookings
    assert bed.placed() == ({"p": ""} if back else {})
