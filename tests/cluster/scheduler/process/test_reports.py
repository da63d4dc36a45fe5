"""What users see of pods that wait: conditions, events, and messages of Reservations."""

from __future__ import annotations

import msgspec
import pytest

from apis.decode import decode_object
from apis.meta import ObjectReference
from apis.scheduling import Reservation
from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.binding.events import Event
from cluster.scheduler.binding.reservation_writer import ReservationRefusal
from cluster.scheduler.binding.statuses import PodStatus, Shown
from cluster.scheduler.cycle.events import EventTable
from cluster.scheduler.cycle.explanations import Explanations
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.reports import Reports, shown
from cluster.scheduler.sources.reserve_pods import ReservePod
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from tests.cluster.scheduler.making import make_pod


class Written:
    """Takes what is reported."""

    def __init__(self) -> None:
        self.statuses: list[PodStatus] = []
        self.shown: list[Shown] = []
        self.events: list[Event] = []
        self.refused: list[ReservationRefusal] = []

    def status(self, status: PodStatus, shown: Shown) -> None:
        self.statuses.append(status)
        self.shown.append(shown)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def refuse_reservation(self, refusal: ReservationRefusal) -> None:
        self.refused.append(refusal)


@pytest.mark.parametrize(
    ("uid", "message", "expected"),
    [
        ("uid-default-web", "0/3 nodes are available", "0/3 nodes are available"),
        ("uid-of-an-earlier-pod", "0/3 nodes are available", ""),
        ("uid-default-web", "", ""),
    ],
)
def test_the_end_of_a_nomination_keeps_the_reason_of_this_very_pod(
    uid: str, message: str, expected: str
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
    assert (status.reason, status.message) == ("Unschedulable", expected)
    assert status.nominated_node == ""
    assert not written.events


_POD = decode_scheduling_pod(
    msgspec.json.encode(
        {
            "metadata": {"name": "web", "namespace": "default", "uid": "u", "generation": 3},
            "spec": {"schedulerName": "s", "containers": [{"name": "c"}]},
            "status": {
                "nominatedNodeName": "n",
                "conditions": [
                    {"type": "Ready", "status": "True", "reason": "A", "message": "b"},
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/2 nodes",
                    },
                ],
            },
        }
    )
)
_SHOWN = Shown("False", "Unschedulable", "0/2 nodes", "n")
_RESERVE_POD = ReservePod(
    decode_object(b'{"metadata": {"name": "r", "uid": "v"}}', Reservation, obj="r"),
    make_pod("reserve", schedulerName="s"),
    {},
)


class _Bed:
    """A pod `web` and a Reservation `r`, with their UIDs `u` and `v`."""

    def __init__(self) -> None:
        self.written = Written()
        self.explanations = Explanations()
        self.queue: SchedulingQueue[PodShape] = SchedulingQueue(EventTable({}))
        self.reports = Reports(
            self.queue,
            self.explanations,
            self.written,
            wall=lambda: 2.0,
            pod_of={"default/web": _POD}.get,
            reserve_pods={"v": _RESERVE_POD},
        )


def _pending(key: str, uid: str) -> PendingPod[PodShape]:
    return PendingPod(key, uid, 0, Shapes().of(_POD), created=0.0)


@pytest.mark.parametrize("nominated", [None, "", "m"])
def test_a_pod_that_no_node_takes_has_a_condition_and_an_event(nominated: str | None) -> None:
    bed = _Bed()
    bed.reports.report("default/web", "u", "Unschedulable", "0/3 nodes", nominated)
    assert bed.written.statuses == [
        PodStatus("default", "web", "u", "Unschedulable", "0/3 nodes", nominated, 3)
    ]
    assert bed.written.shown == [_SHOWN]
    about = ObjectReference(api_version="v1", kind="Pod", namespace="default", name="web", uid="u")
    assert bed.written.events == [
        Event(about, "Warning", "FailedScheduling", "Scheduling", "0/3 nodes", "s")
    ]


def test_a_gated_pod_has_a_condition_alone() -> None:
    bed = _Bed()
    bed.reports.report("default/web", "u", "SchedulingGated", "waiting")
    assert [each.reason for each in bed.written.statuses] == ["SchedulingGated"]
    assert not bed.written.events


@pytest.mark.parametrize(("key", "uid"), [("default/web", "another"), ("default/gone", "u")])
def test_nothing_is_written_about_a_pod_that_is_gone(key: str, uid: str) -> None:
    bed = _Bed()
    bed.reports.report(key, uid, "Unschedulable", "0/3 nodes")
    bed.reports.nomination_ended(_pending(key, uid))
    assert not bed.written.statuses
    assert not bed.written.events


def test_what_a_reserve_pod_waits_for_is_told_about_its_reservation() -> None:
    bed = _Bed()
    bed.reports.report("default/reserve", "v", "Unschedulable", "0/3 nodes", "n")
    bed.reports.refuse_reservation(_RESERVE_POD, "it is odd")
    assert bed.written.refused == [
        ReservationRefusal("r", "v", "0/3 nodes"),
        ReservationRefusal("r", "v", "it is odd"),
    ]
    about = ObjectReference(
        api_version="scheduling.koordinator.sh/v1alpha1", kind="Reservation", name="r", uid="v"
    )
    assert [(each.about, each.note, each.controller) for each in bed.written.events] == [
        (about, "0/3 nodes", "s"),
        (about, "it is odd", "s"),
    ]
    assert not bed.written.statuses
    assert bed.reports.reference(_pending("default/reserve", "v")) == about


def test_an_event_refers_to_a_pod_by_its_name_and_uid() -> None:
    assert _Bed().reports.reference(_pending("default/web", "u")) == ObjectReference(
        api_version="v1", kind="Pod", namespace="default", name="web", uid="u"
    )


def test_members_that_are_held_up_show_why_and_their_new_nomination() -> None:
    bed = _Bed()
    bed.queue.add(_pending("default/web", "u"), 0.0)
    bed.reports.held_up(("unknown", "u"), "w waits", {"u": "m"})
    (status,) = bed.written.statuses
    assert (status.message, status.nominated_node) == ("w waits", "m")
    explained = bed.explanations.get("default/web")
    assert explained is not None
    assert (explained.uid, explained.at, explained.message) == ("u", 2.0, "w waits")
    bed.reports.held_up(("u",), "w waits", {})
    assert bed.written.statuses[-1].nominated_node is None


def test_the_end_of_a_nomination_keeps_what_the_pod_shows() -> None:
    bed = _Bed()
    bed.reports.nomination_ended(_pending("default/web", "u"))
    assert bed.written.statuses == [
        PodStatus("default", "web", "u", "Unschedulable", "0/2 nodes", "", 3)
    ]
    assert bed.written.shown == [_SHOWN]


def test_a_pod_without_a_condition_shows_its_nomination() -> None:
    without = make_pod("a", schedulerName="s")
    assert shown(without) == Shown(nominated_node="")
    assert shown(_POD) == _SHOWN
