"""Events of a pod that come later than the answer to its Binding."""

from __future__ import annotations

from cluster.scheduler.binding.placement import Bound
from tests.cluster.scheduler.process.test_reservations import Bed


def test_an_event_from_before_the_binding_does_not_queue_a_bound_pod() -> None:
    bed = Bed()
    bed.pod("p", "1")
    bed.process.schedule_for(10.0)
    placement = bed.binder.waiting.popleft()
    bed.process.attempts.bound(placement, Bound())
    # Written before the Binding, seen after its answer.
    bed.pod("p", "1", metadata={"labels": {"a": "b"}})
    assert len(bed.process.queue) == 0
    assert bed.placed() == {}
    assert bed.process.tables.bookings["uid-p"].node == "n"
    bed.pod("p", "1", metadata={"labels": {"a": "b"}}, node="n")
    assert bed.process.tables.bookings["uid-p"].node == "n"
    # Not what happens to a pod, except where the API server's data is restored from a backup.
    bed.pod("p", "1")
    assert bed.placed() == {"p": ""}


def test_an_event_from_before_its_status_does_not_queue_a_scheduled_reservation() -> None:
    bed = Bed()
    waits = {"phase": "Pending", "nodeName": ""}
    bed.reservation("r", "1", status=waits)
    bed.process.schedule_for(10.0)
    bed.process.attempts.bound(bed.writer.waiting.popleft(), Bound())
    bed.reservation("r", "1", status=waits, labels={"a": "b"})
    assert len(bed.process.queue) == 0
    assert bed.process.tables.bookings["uid-r"].node == "n"
