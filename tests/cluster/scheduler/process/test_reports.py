"""What a pod shows when its nomination has ended: the last reason why it waits."""

from __future__ import annotations

import pytest

from cluster.scheduler.binding.events import Event
from cluster.scheduler.binding.reservation_writer import ReservationRefusal
from cluster.scheduler.binding.statuses import PodStatus, Shown
from cluster.scheduler.cycle.events import EventTable
from cluster.scheduler.cycle.explanations import Explanations
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.reports import Reports
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from tests.cluster.scheduler.making import make_pod


class Written:
    """Takes what is reported."""

    def __init__(self) -> None:
        self.statuses: list[PodStatus] = []

    def status(self, status: PodStatus, shown: Shown) -> None:
        self.statuses.append(status)

    def event(self, event: Event) -> None:
        raise AssertionError(event)

    def refuse_reservation(self, refusal: ReservationRefusal) -> None:
        raise AssertionError(refusal)


@pytest.mark.parametrize(
    ("uid", "message", "shown"),
    [
        ("uid-default-web", "0/3 nodes are available", "0/3 nodes are available"),
        ("uid-of-an-earlier-pod", "0/3 nodes are available", ""),
        ("uid-default-web", "", ""),
    ],
)
def test_the_end_of_a_nomination_keeps_the_reason_of_this_very_pod(
    uid: str, message: str, shown: str
) -> None:
    explanations, written = Explanations(), Written()
    explanations.held_up("default/web", uid, message, at=1.0)
    pod = make_pod("web")
    queue: SchedulingQueue[PodShape] = SchedulingQueue(EventTable({}))
    reports = Reports(
        queue,
        explanations,
        written,
        wall=lambda: 2.0,
        pod_of={"default/web": pod}.get,
        reserve_pods={},
    )
    reports.nomination_ended(
        PendingPod("default/web", "uid-default-web", 0, Shapes().of(pod), created=0.0)
    )
    (status,) = written.statuses
    assert (status.reason, status.message) == ("Unschedulable", shown)
    assert status.nominated_node == ""
