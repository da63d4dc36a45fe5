"""Reservations become Available once, on one node, whatever is lost on the way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from cluster.scheduler.binding import pauses
from cluster.scheduler.binding.placement import Bound, Outcome, Refused, Why
from cluster.scheduler.binding.reservations import ReservationPlacement, Seen, bind_reservation
from kube.kept_client import KeptClient
from tests.cluster.fake_api import merged
from tests.cluster.scheduler.binding.stored_pods import After, Fault, cut, refuse
from tests.kube.scripted import answer, api, status

_EPOCH = "1970-01-01T00:00:00Z"
PLACEMENT = ReservationPlacement("r", "u", "n1", {"cpu": "4"}, {"a": "b"})


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pauses, "FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(pauses, "LONGEST_PAUSE_S", 0.01)
    yield


class Stored:
    """One Reservation with optimistic locking, its status a subresource."""

    def __init__(self, *faults: Fault | After | None, **reservation: Any) -> None:
        self.faults = deque(faults)
        self.always: Fault | None = None
        self.patches: list[str] = []
        self.looks = 0
        self.plain: dict[str, Any] = {
            "metadata": {"uid": "u", "resourceVersion": "1"},
            "status": {"phase": "Pending"},
        }
        self.plain = merged(self.plain, reservation)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.method == "GET":
            self.looks += 1
            return answer(self.plain) if self.plain else status(404, "NotFound", "not found")
        self.patches.append(request.path.rsplit("/", 1)[-1])
        fault = self.faults.popleft() if self.faults else self.always
        found = None if isinstance(fault, After) or fault is None else fault(request)
        if fault is None or isinstance(fault, After):
            found = self._patch(request.path, msgspec.json.decode(data))
            if isinstance(fault, After):
                found = fault.fault(request)
        if found is None:
            assert request.transport is not None
            request.transport.abort()
            return answer({})
        return found

    def _patch(self, path: str, patch: dict[str, Any]) -> web.Response:
        if patch["metadata"]["resourceVersion"] != self.plain["metadata"]["resourceVersion"]:
            return status(409, "Conflict")
        part = "status" if path.endswith("/status") else "metadata"
        self.plain[part] = merged(self.plain[part], patch[part])
        self.plain["metadata"]["resourceVersion"] += "1"
        return answer(self.plain)


def outcome(store: Stored, placement: ReservationPlacement = PLACEMENT) -> Outcome:
    async def run() -> Outcome:
        async with api(store.handle, kind=KeptClient) as client:
            return await bind_reservation(client, placement, now=lambda: 0.0)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("faults", "patches"),
    [
        ([], ["r", "status"]),
        ([After(cut)], ["r", "status"]),
        ([cut], ["r", "r", "status"]),
        ([None, After(cut)], ["r", "status"]),
        ([None, After(refuse(500, "InternalError"))], ["r", "status"]),
        ([None, cut], ["r", "status", "status"]),
        ([refuse(409, "Conflict")], ["r", "r", "status"]),
        ([None, refuse(409, "Conflict")], ["r", "status", "status"]),
        ([None, refuse(503, "Unavailable"), refuse(500, "X")], ["r", *["status"] * 3]),
        # What the server did not take up is no refusal.
        *([[refuse(code, "X")] * 7, ["r"] * 8 + ["status"]] for code in (401, 408, 429)),
    ],
)
def test_it_becomes_available_and_a_lost_answer_is_resolved_by_reading(
    faults: list[Fault | After | None], patches: list[str]
) -> None:
    other = {"type": "Other", "status": "True"}
    store = Stored(*faults, status={"conditions": [other, {"type": "Ready", "status": "False"}]})
    assert outcome(store) == Bound()
    assert store.patches == patches
    assert store.plain["metadata"]["annotations"] == {"a": "b"}
    stored = store.plain["status"]
    times = dict.fromkeys(("lastProbeTime", "lastTransitionTime"), "1970-01-01T00:00:00Z")
    assert stored == {
        "phase": "Available",
        "nodeName": "n1",
        "allocatable": {"cpu": "4"},
        "conditions": [
            other,
            {"type": "Scheduled", "status": "True", "reason": "Scheduled", **times},
            {"type": "Ready", "status": "True", "reason": "Available", **times},
        ],
    }


def test_without_annotations_there_is_one_write() -> None:
    store = Stored()
    assert outcome(store, replace(PLACEMENT, annotations={})) == Bound()
    assert store.patches == ["status"]


@pytest.mark.parametrize(
    ("reservation", "why"),
    [
        ({"status": {"phase": "Failed"}}, Why.CONFLICT),
        ({"status": {"phase": "Succeeded", "nodeName": "n1"}}, Why.CONFLICT),
        ({"status": {"phase": "Available", "nodeName": "n2"}}, Why.BOUND_ELSEWHERE),
        ({"metadata": {"uid": "other"}}, Why.OTHER_UID),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, Why.DELETED),
    ],
)
def test_what_cannot_be_bound_is_refused_without_a_write(
    reservation: dict[str, Any], why: Why
) -> None:
    store = Stored(**reservation)
    found = outcome(store)
    assert isinstance(found, Refused)
    assert found.why is why
    assert store.patches == []


def test_a_deleted_reservation_is_refused() -> None:
    store = Stored()
    store.plain = {}
    found = outcome(store)
    assert isinstance(found, Refused)
    assert found.why is Why.DELETED


@pytest.mark.parametrize(
    ("fault", "why", "patches"),
    [
        (refuse(403, "Forbidden", "no"), Why.FORBIDDEN, 1),
        (refuse(422, "Invalid", "no"), Why.INVALID, 1),
        (refuse(409, "Conflict", "no"), Why.CONFLICT, 6),
        (refuse(500, "InternalError", "no"), Why.FAILING, 6),
    ],
)
def test_refusals_have_reasons_and_an_end(fault: Fault, why: Why, patches: int) -> None:
    store = Stored()
    store.always = fault
    found = outcome(store)
    assert isinstance(found, Refused)
    assert found.why is why
    assert "no" in found.message
    assert len(store.patches) == patches


@pytest.mark.parametrize(("since", "expected"), [("2025-01-01T00:00:00Z", None), (None, _EPOCH)])
@pytest.mark.parametrize("kind", ["Scheduled", "Ready"])
def test_a_condition_that_was_true_before_keeps_the_time_since_when(
    kind: str, since: str | None, expected: str | None
) -> None:
    before = {"type": kind, "status": "True", "lastTransitionTime": since}
    store = Stored(status={"conditions": [before]})
    assert outcome(store) == Bound()
    conditions = {each["type"]: each for each in store.plain["status"]["conditions"]}
    other = "Ready" if kind == "Scheduled" else "Scheduled"
    assert conditions[kind]["lastTransitionTime"] == (expected or since)
    assert conditions[other]["lastTransitionTime"] == _EPOCH
    assert len(conditions) == 2


def test_an_annotation_that_is_there_already_costs_no_write_and_a_null_removes_one() -> None:
    store = Stored(metadata={"annotations": {"a": "b", "c": "d"}})
    assert outcome(store, replace(PLACEMENT, annotations={"a": "b", "x": None})) == Bound()
    assert store.patches == ["status"]
    store = Stored(metadata={"annotations": {"a": "b", "c": "d"}})
    assert outcome(store, replace(PLACEMENT, annotations={"a": "b", "c": None})) == Bound()
    assert store.patches == ["r", "status"]
    assert store.plain["metadata"]["annotations"] == {"a": "b"}


def test_what_the_watch_showed_saves_the_first_look() -> None:
    other = {"type": "Other", "status": "True"}
    seen = Seen("1", {"a": "b"}, [other])
    store = Stored(metadata={"annotations": {"a": "b"}})
    assert outcome(store, replace(PLACEMENT, seen=seen)) == Bound()
    assert store.looks == 0
    assert store.patches == ["status"]
    assert store.plain["status"]["conditions"][0] == other


@pytest.mark.parametrize(
    "reservation", [{"metadata": {"uid": "v"}}, {"status": {"phase": "Failed"}}]
)
def test_what_changed_since_the_watch_showed_it_is_read(reservation: dict[str, Any]) -> None:
    changed = {"metadata": {"resourceVersion": "2", **reservation.get("metadata", {})}}
    store = Stored(**{**reservation, **changed})
    found = outcome(store, replace(PLACEMENT, annotations={}, seen=Seen("1", {}, [])))
    assert isinstance(found, Refused)
    assert store.looks == 1
    assert store.plain["status"]["phase"] in ("Pending", "Failed")


def test_a_lost_answer_to_the_first_write_is_resolved_by_reading() -> None:
    store = Stored(After(cut))
    seen = Seen("1", {}, [])
    assert outcome(store, replace(PLACEMENT, annotations={}, seen=seen)) == Bound()
    assert store.patches == ["status"]
    assert store.looks == 1
