"""Reservations as they are watched: which pods, events and refusals follow."""

from __future__ import annotations

from typing import Any

import pytest

from apis.scheduling import Reservation
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.cycle.events import RESERVATION, Action
from cluster.scheduler.sources.reservations import ReservationSource
from cluster.scheduler.tables.tables import Tables
from kube.cache import Change, Event
from tests.cluster.scheduler.sources.heard import HeardQueue
from tests.cluster.scheduler.sources.reserve_pod_making import reservation, template


class _Bed:
    def __init__(self) -> None:
        self.table = Tables().reservations
        self.queue = HeardQueue()
        self.pods: list[tuple[Change, str, str]] = []
        """Change, UID and node of each event of a reserve pod."""
        self.refused: list[tuple[str, str]] = []
        self.withdrawn: list[str] = []
        self.stays_booked = False
        self.source = ReservationSource(
            self.table,
            self.queue,
            pod_event=self._pod_event,
            withdraw=self._withdraw,
            scheduler_names={"koord-scheduler"},
            clock=lambda: 0.0,
            refuse=lambda read, why: self.refused.append((read.uid, why)),
        )

    def _pod_event(self, event: Event[SchedulingPod]) -> None:
        assert (event.old is None) == (event.change is Change.ADDED)
        new = event.new
        self.pods.append((event.change, new.metadata.uid, new.spec.node_name))

    def _withdraw(self, uid: str) -> bool:
        self.withdrawn.append(uid)
        return self.stays_booked

    def show(self, old: Reservation | None, new: Reservation) -> list[tuple[Change, str, str]]:
        change = Change.ADDED if old is None else Change.MODIFIED
        self.source.reservation_event(Event(change, old, new))
        return self.took()

    def took(self) -> list[tuple[Change, str, str]]:
        pods, self.pods = self.pods, []
        return pods


def _made(*, uid: str = "u", node: str = "", phase: str = "", **members: Any) -> Reservation:
    metadata = {"uid": uid, **members.pop("metadata", {})}
    status = {"phase": phase or ("Available" if node else ""), "nodeName": node}
    given = {"template": template(), **members}
    return reservation(given.pop("template"), metadata=metadata, status=status, **given)


def test_a_reservation_waits_gets_a_node_and_ends() -> None:
    bed = _Bed()
    waiting, available = _made(), _made(node="n")
    assert bed.show(None, waiting) == [(Change.ADDED, "u", "")]
    assert bed.queue.heard() == []
    assert bed.table.get("u") is None
    assert bed.show(waiting, available) == [(Change.MODIFIED, "u", "n")]
    assert bed.queue.heard() == [(RESERVATION, Action.UPDATE_OTHER)]
    assert bed.table.get("u") is not None
    ended = _made(node="n", phase="Succeeded")
    assert bed.show(available, ended) == [(Change.DELETED, "u", "n")]
    assert bed.queue.heard() == [(RESERVATION, Action.UPDATE_OTHER)]
    assert bed.table.get("u") is None
    bed.source.reservation_event(Event(Change.DELETED, ended, ended))
    assert bed.took() == []
    assert bed.queue.heard() == []
    assert dict(bed.source.reserve_pods) == {}


def test_one_that_is_found_available_is_an_addition_and_its_end_a_deletion() -> None:
    bed = _Bed()
    available = _made(node="n")
    assert bed.show(None, available) == [(Change.ADDED, "u", "n")]
    assert bed.queue.heard() == [(RESERVATION, Action.ADD)]
    bed.source.reservation_event(Event(Change.DELETED, available, available))
    assert bed.took() == [(Change.DELETED, "u", "n")]
    assert bed.queue.heard() == [(RESERVATION, Action.DELETE)]
    assert bed.table.get("u") is None


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"resourceVersion": "2"}},
        {"metadata": {"managedFields": []}},
    ],
)
def test_what_only_observes_is_kept_and_followed_no_further(change: dict[str, Any]) -> None:
    bed = _Bed()
    before, after = _made(node="n"), _made(node="n", **change)
    bed.show(None, before)
    bed.queue.heard()
    assert bed.show(before, after) == []
    assert bed.queue.heard() == []
    assert bed.source.reserve_pods["u"].reservation is after


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"labels": {"a": "b"}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"allocatePolicy": "Aligned"},
    ],
)
def test_what_decides_is_followed(change: dict[str, Any]) -> None:
    bed = _Bed()
    before, after = _made(node="n"), _made(node="n", **change)
    bed.show(None, before)
    bed.queue.heard()
    assert bed.show(before, after) == [(Change.MODIFIED, "u", "n")]
    assert bed.queue.heard() == [(RESERVATION, Action.UPDATE_OTHER)]


def test_one_of_the_same_name_is_another_one() -> None:
    bed = _Bed()
    old, new = _made(node="n"), _made(uid="v")
    bed.show(None, old)
    bed.queue.heard()
    assert bed.show(old, new) == [(Change.DELETED, "u", "n"), (Change.ADDED, "v", "")]
    assert bed.queue.heard() == [(RESERVATION, Action.DELETE)]
    assert set(bed.source.reserve_pods) == {"v"}


@pytest.mark.parametrize("after", ["m", ""])
def test_one_that_leaves_its_node_is_a_pod_that_ends_and_another_one(after: str) -> None:
    bed = _Bed()
    before, moved = _made(node="n"), _made(node=after)
    bed.show(None, before)
    assert bed.show(before, moved) == [(Change.DELETED, "u", "n"), (Change.ADDED, "u", after)]


def test_one_that_cannot_be_used_is_refused_once_and_waits_no_more() -> None:
    bed = _Bed()
    good, bad = _made(), _made(owners=[])
    bed.show(None, good)
    assert bed.show(good, bad) == [(Change.DELETED, "u", "")]
    assert bed.withdrawn == ["u"]
    ((uid, why),) = bed.refused
    assert uid == "u"
    assert "spec.owners" in why
    assert bed.source.problems == {"u": (why,)}
    bed.show(bad, _made(owners=[], metadata={"labels": {"a": "b"}}))
    assert len(bed.refused) == 1
    # Its binding failed: meanwhile no refusal was written.
    bed.source.look_again("u")
    assert len(bed.refused) == 2
    bed.source.look_again("none")
    assert bed.show(bad, good) == [(Change.ADDED, "u", "")]
    assert bed.source.problems == {}


def test_one_whose_binding_is_under_way_keeps_its_room() -> None:
    bed = _Bed()
    good, bad = _made(), _made(owners=[])
    bed.show(None, good)
    bed.stays_booked = True
    assert bed.show(good, bad) == []
    bed.stays_booked = False
    bed.source.look_again("u")
    assert bed.took() == [(Change.DELETED, "u", "")]


def test_one_of_another_scheduler_is_neither_followed_nor_refused() -> None:
    bed = _Bed()
    other = _made(template=template(spec={"schedulerName": "x"}), owners=[])
    assert bed.show(None, other) == []
    assert (bed.refused, set(bed.source.problems)) == ([], {"u"})
    on_node = _made(template=template(spec={"schedulerName": "x"}), node="n")
    assert bed.show(other, on_node) == [(Change.ADDED, "u", "n")]
