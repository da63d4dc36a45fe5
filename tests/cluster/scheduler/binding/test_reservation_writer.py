"""Bindings and refusals of Reservations: in order, once, and never about what changed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from cluster.scheduler.binding.placement import Bound, Outcome, Refused, Why
from cluster.scheduler.binding.reservation_writer import ReservationRefusal, ReservationWriter
from cluster.scheduler.binding.reservations import ReservationPlacement, TakenPod
from kube.client import ApiError
from kube.resources import PODS, RESERVATIONS
from tests.cluster.fake_api import FakeApi, in_virtual_time

PATH = RESERVATIONS.path(name="r")


class Bed:
    def __init__(self) -> None:
        self.api = FakeApi()
        self.outcomes: list[tuple[str, Outcome]] = []
        self.writer = ReservationWriter(self.api.client(), self._take, now=lambda: 0.0)

    def _take(self, placement: ReservationPlacement, outcome: Outcome) -> None:
        self.outcomes.append((placement.node, outcome))

    def make(self, **status: Any) -> str:
        metadata = {"name": "r", "annotations": {"old": "x"}}
        stored = self.api.put(RESERVATIONS, {"metadata": metadata, "status": status})
        uid: str = stored["metadata"]["uid"]
        return uid

    @property
    def stored(self) -> dict[str, Any]:
        return self.api.objects[PATH]

    @property
    def scheduled(self) -> dict[str, Any]:
        conditions = self.stored["status"].get("conditions", [])
        return next((one for one in conditions if one["type"] == "Scheduled"), {})


def place(uid: str) -> ReservationPlacement:
    return ReservationPlacement("r", uid, "n1", {"cpu": "4"}, {"new": "y", "old": None})


def play(scenario: Callable[[Bed], Awaitable[None]]) -> None:
    async def run() -> None:
        bed = Bed()
        task = asyncio.create_task(bed.writer.run())
        try:
            await scenario(bed)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert not bed.writer.faults.count

    in_virtual_time(run)


def test_a_refusal_is_written_once_and_a_binding_takes_its_place() -> None:
    async def scenario(bed: Bed) -> None:
        other = {"type": "Other", "status": "True"}
        uid = bed.make(conditions=[other])
        bed.writer.refuse(ReservationRefusal("r", uid, "no room"))
        await asyncio.sleep(1)
        assert bed.scheduled["status"] == "False"
        assert (bed.scheduled["reason"], bed.scheduled["message"]) == ("Unschedulable", "no room")
        assert bed.stored["status"]["phase"] == "Pending"
        assert bed.stored["status"]["conditions"][0] == other
        # Against the version that was read, so that it undoes no write of others.
        ((_, _, body),) = bed.api.writes
        assert body["metadata"] == {"resourceVersion": "1"}
        writes = len(bed.api.writes)
        bed.writer.refuse(ReservationRefusal("r", uid, "no room"))
        await asyncio.sleep(1)
        assert len(bed.api.writes) == writes
        bed.writer.refuse(ReservationRefusal("r", uid, "still no room"))
        bed.writer.submit(place(uid))
        bed.writer.refuse(ReservationRefusal("r", uid, "later than the binding"))
        await asyncio.sleep(1)
        assert bed.outcomes == [("n1", Bound())]
        assert bed.stored["status"]["phase"] == "Available"
        assert bed.scheduled["status"] == "True"
        assert bed.stored["metadata"]["annotations"] == {"new": "y"}
        assert bed.writer.in_flight == 0

    play(scenario)


@pytest.mark.parametrize(
    "status", [{"phase": "Failed"}, {"phase": "Succeeded"}, {"nodeName": "n2"}]
)
def test_nothing_is_refused_that_ended_or_has_a_node(status: dict[str, Any]) -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make(**status)
        bed.writer.refuse(ReservationRefusal("r", uid, "no room"))
        await asyncio.sleep(1)
        assert bed.api.writes == []

    play(scenario)


def test_one_of_the_same_name_and_one_that_is_gone_are_left_alone() -> None:
    async def scenario(bed: Bed) -> None:
        bed.make()
        bed.writer.refuse(ReservationRefusal("r", "another", "no room"))
        bed.writer.refuse(ReservationRefusal("gone", "gone", "no room"))
        bed.writer.submit(place("third"))
        await asyncio.sleep(1)
        assert bed.api.writes == []
        ((_, outcome),) = bed.outcomes
        assert isinstance(outcome, Refused) and outcome.why is Why.OTHER_UID

    play(scenario)


def test_a_refusal_waits_for_the_server_and_is_dropped_where_it_is_forbidden() -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.api.refuse[PATH] = 503
        bed.writer.refuse(ReservationRefusal("r", uid, "no room"))
        await asyncio.sleep(10)
        assert bed.scheduled == {}
        bed.api.refuse[PATH] = 403
        await asyncio.sleep(120)
        writes = len(bed.api.writes)
        await asyncio.sleep(600)
        assert len(bed.api.writes) == writes
        del bed.api.refuse[PATH]
        bed.writer.refuse(ReservationRefusal("r", uid, "no room"))
        await asyncio.sleep(1)
        assert bed.scheduled["message"] == "no room"

    play(scenario)


def test_a_long_message_is_cut() -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.writer.refuse(ReservationRefusal("r", uid, "x" * 100_000))
        await asyncio.sleep(1)
        assert len(bed.scheduled["message"]) == 16 * 1024

    play(scenario)


def test_draining_waits_for_what_is_in_flight_and_names_the_rest() -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.writer.submit(place(uid))
        assert await bed.writer.drain(5.0) == ()
        assert bed.outcomes == [("n1", Bound())]
        with pytest.raises(RuntimeError):
            bed.writer.submit(place(uid))

    play(scenario)

    async def stuck(bed: Bed) -> None:
        uid = bed.make()
        bed.api.refuse[PATH] = 429
        bed.writer.submit(place(uid))
        assert await bed.writer.drain(5.0) == (place(uid),)
        assert bed.outcomes == []

    play(stuck)


def test_draining_without_anything_in_flight_ends_at_once() -> None:
    async def never_used(bed: Bed) -> None:
        begin = asyncio.get_running_loop().time()
        assert await bed.writer.drain(5.0) == ()
        assert asyncio.get_running_loop().time() == begin

    play(never_used)

    async def done_before(bed: Bed) -> None:
        bed.writer.submit(place(bed.make()))
        assert bed.writer.in_flight == 1
        await asyncio.sleep(60)
        assert bed.outcomes == [("n1", Bound())]
        begin = asyncio.get_running_loop().time()
        assert await bed.writer.drain(5.0) == ()
        assert asyncio.get_running_loop().time() == begin

    play(done_before)


def test_a_newer_placement_of_the_same_reservation_is_carried_out_too() -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.api.refuse[PATH] = 429
        bed.writer.submit(place(uid))
        await asyncio.sleep(1)
        bed.writer.submit(replace(place(uid), node="n2"))
        del bed.api.refuse[PATH]
        await asyncio.sleep(60)
        assert [node for node, _ in bed.outcomes] == ["n1", "n2"]
        first, second = (outcome for _, outcome in bed.outcomes)
        assert first == Bound()
        assert isinstance(second, Refused) and second.why is Why.BOUND_ELSEWHERE
        assert bed.writer.in_flight == 0

    play(scenario)


def test_pods_that_are_taken_over_are_marked_before_the_reservation_is_available() -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        pod = bed.api.put(PODS, {"metadata": {"name": "p", "namespace": "default"}})
        takes = (
            TakenPod("default", "p", pod["metadata"]["uid"]),
            TakenPod("default", "gone", "uid-gone"),
        )
        bed.writer.submit(ReservationPlacement("r", uid, "n1", {"cpu": "4"}, {}, takes))
        await asyncio.sleep(1)
        assert bed.outcomes == [("n1", Bound())]
        marked = bed.api.get(PODS, "p", namespace="default")["metadata"]["annotations"]
        assert marked == {
            "scheduling.koordinator.sh/reservation-allocated": f'{{"name":"r","uid":"{uid}"}}'
        }
        assert [path.rsplit("/", 1)[-1] for _, path, _ in bed.api.writes] == ["p", "gone", "status"]

    play(scenario)


def test_a_pod_that_must_not_be_marked_keeps_the_reservation_pending() -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        pod = bed.api.put(PODS, {"metadata": {"name": "p", "namespace": "default"}})
        takes = (TakenPod("default", "p", pod["metadata"]["uid"]),)
        bed.api.refuse[PODS.path(namespace="default", name="p")] = 403
        bed.writer.submit(ReservationPlacement("r", uid, "n1", {"cpu": "4"}, {}, takes))
        await asyncio.sleep(1)
        ((_, outcome),) = bed.outcomes
        assert isinstance(outcome, Refused) and outcome.why is Why.FORBIDDEN
        assert bed.stored["status"] == {}

    play(scenario)


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (404, "not found", Bound()),
        (409, "Precondition failed: uid", Bound()),
        (422, "metadata.uid: immutable", Bound()),
        (422, "spec", Refused(Why.INVALID, "a pod: 422 Reason: spec")),
    ],
)
def test_room_of_a_pod_that_is_gone_or_replaced_is_left_to_the_reservation(
    code: int, message: str, expected: Outcome
) -> None:
    async def scenario(bed: Bed) -> None:
        uid, store = bed.make(), bed.api.handle

        async def handle(method: str, path: str, data: bytes | None) -> dict[str, Any]:
            if "/pods/" in path:
                reason = "NotFound" if code == 404 else "Reason"
                raise ApiError(status=code, reason=reason, message=message, what="a pod")
            return await store(method, path, data)

        bed.api.handle = handle  # type: ignore[method-assign]
        takes = (TakenPod("default", "p", "u"),)
        bed.writer.submit(ReservationPlacement("r", uid, "n1", {"cpu": "4"}, {}, takes))
        await asyncio.sleep(1)
        ((_, outcome),) = bed.outcomes
        assert type(outcome) is type(expected)
        if isinstance(outcome, Refused):
            assert isinstance(expected, Refused) and outcome.why is expected.why

    play(scenario)


@pytest.mark.parametrize("code", [401, 408, 409, 429, 500])
def test_a_refusal_that_the_server_does_not_take_now_is_written_later(code: int) -> None:
    async def scenario(bed: Bed) -> None:
        uid = bed.make()
        bed.api.refuse[PATH] = code
        bed.writer.refuse(ReservationRefusal("r", uid, "no room"))
        await asyncio.sleep(1)
        assert bed.scheduled == {}
        del bed.api.refuse[PATH]
        await asyncio.sleep(120)
        assert bed.scheduled == {
            "type": "Scheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "no room",
            "lastProbeTime": "1970-01-01T00:00:00Z",
            "lastTransitionTime": "1970-01-01T00:00:00Z",
        }

    play(scenario)


@pytest.mark.parametrize(
    ("former", "since"), [("False", "2020-01-01T00:00:00Z"), ("True", "1970-01-01T00:00:00Z")]
)
def test_a_refusal_of_what_was_refused_before_keeps_the_time_since_when(
    former: str, since: str
) -> None:
    async def scenario(bed: Bed) -> None:
        before = {"type": "Scheduled", "status": former, "message": "no room"}
        uid = bed.make(
            phase="Waiting", conditions=[{**before, "lastTransitionTime": "2020-01-01T00:00:00Z"}]
        )
        bed.writer.refuse(ReservationRefusal("r", uid, "still no room"))
        await asyncio.sleep(1)
        assert bed.scheduled["lastTransitionTime"] == since
        assert bed.scheduled["message"] == "still no room"
        assert bed.stored["status"]["phase"] == "Waiting"
        assert len(bed.stored["status"]["conditions"]) == 1

    play(scenario)


def test_defects_are_outcomes_and_counted() -> None:
    outcomes: list[Outcome] = []

    def take(placement: ReservationPlacement, outcome: Outcome) -> None:
        outcomes.append(outcome)
        raise ValueError("a defect in taking it")

    def now() -> float:
        raise ValueError("no clock")

    async def run() -> None:
        api = FakeApi()
        uid = api.put(RESERVATIONS, {"metadata": {"name": "r"}})["metadata"]["uid"]
        writer = ReservationWriter(api.client(), take, now=now)
        task = asyncio.create_task(writer.run())
        writer.submit(place(uid))
        await asyncio.sleep(1)
        assert outcomes == [Refused(Why.FAILING, "ValueError: no clock")]
        assert (writer.faults.count, writer.in_flight) == (2, 0)
        assert await writer.drain(0) == ()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    in_virtual_time(run)


@pytest.mark.parametrize(("count", "more"), [(10, ""), (11, ", ...")])
def test_of_many_placements_that_are_left_ten_are_named(
    caplog: pytest.LogCaptureFixture, count: int, more: str
) -> None:
    async def run() -> None:
        writer = ReservationWriter(FakeApi().client(), lambda *_: None, now=lambda: 0.0)
        for number in range(count):
            writer.submit(ReservationPlacement(f"r{number}", str(number), "n1", {}))
        assert len(await writer.drain(1)) == count

    in_virtual_time(run)
    named = ", ".join(f"r{number}" for number in range(10))
    text = f"{count} reservations have no certain outcome at the end: {named}{more}\n"
    assert text in caplog.text
