"""When an answer is written, renewed and deleted."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from apis.core import ObjectMeta
from apis.schedule_explanation import (
    DetailedExplanation,
    FeasibleSchedulingResult,
    ScheduleExplanation,
    ScheduleExplanationSpec,
    ScheduleExplanationStatus,
    SchedulingAttempt,
)
from cluster.scheduler.binding.schedule_explanations import ScheduleExplanations
from kube.client import ApiError, Client

_CREATED = 1_767_225_600.0
"""2026-01-01T00:00:00Z"""


def _error(code: int) -> ApiError:
    reason = {404: "NotFound", 409: "Conflict"}.get(code, "x")
    return ApiError(status=code, reason=reason, message="y", what="z")


class _Client:
    def __init__(self) -> None:
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.deleted: list[str] = []
        self.fails: dict[str, int] = {}
        """Name -> status code of writes about it."""

    async def patch(self, resource: Any, name: str, body: bytes, **options: Any) -> bytes:
        assert options["subresource"] == "status"
        body_uid = msgspec.json.decode(body)["metadata"]["uid"]
        assert (options["namespace"], body_uid) == ("default", f"uid-{name}")
        if name in self.fails:
            raise _error(self.fails[name])
        self.patches.append((name, msgspec.json.decode(body)["status"]))
        return b"{}"

    async def delete(self, resource: Any, name: str, *, namespace: str, uid: str) -> None:
        assert (namespace, uid) == ("default", f"uid-{name}")
        if name in self.fails:
            raise _error(self.fails[name])
        self.deleted.append(name)


class _Bed:
    def __init__(self) -> None:
        self.client = _Client()
        self.asked: dict[str, ScheduleExplanation] = {}
        self.answers: dict[str, ScheduleExplanationStatus] = {}
        self.now = _CREATED
        self.spent = 0.0
        self.answer_s = 0.0
        self.explanations = ScheduleExplanations(
            cast(Client, self.client),
            asked=self.asked,
            answer=self.answer,
            now=lambda: self.now,
            timer=lambda: self.spent,
        )

    def answer(self, namespace: str, key: str) -> ScheduleExplanationStatus:
        assert namespace == "default"
        self.spent += self.answer_s
        return self.answers[key]

    def ask(self, name: str, ttl: str | None = None) -> None:
        self.asked[f"default/{name}"] = ScheduleExplanation(
            metadata=ObjectMeta(
                name=name,
                namespace="default",
                uid=f"uid-{name}",
                creation_timestamp="2026-01-01T00:00:00Z",
            ),
            spec=ScheduleExplanationSpec(question_object_key=f"default/{name}", ttl=ttl),
        )
        self.answers[f"default/{name}"] = ScheduleExplanationStatus(failed_message="first")

    def look(self) -> None:
        asyncio.run(self.explanations.look())


def test_a_verdict_is_written_at_once_counts_later_and_nothing_new_once_a_minute() -> None:
    bed = _Bed()
    bed.ask("a")
    bed.look()
    assert bed.client.patches == [
        (
            "a",
            {
                "schedulable": False,
                "schedulableAfterPreemption": False,
                "failedMessage": "first",
                "lastUpdateTime": "2026-01-01T00:00:00Z",
                "detailedExplanation": [],
            },
        )
    ]
    bed.now += 5
    bed.answers["default/a"] = ScheduleExplanationStatus(failed_message="second")
    bed.look()
    assert len(bed.client.patches) == 1
    bed.now += 5
    bed.look()
    assert bed.client.patches[-1][1]["failedMessage"] == "second"
    bed.now += 1
    placed = FeasibleSchedulingResult(namespace="default", name="a", uid="u", node_name="n")
    attempt = SchedulingAttempt(schedulable=True, feasible_scheduling_result=(placed,))
    bed.answers["default/a"] = ScheduleExplanationStatus(
        schedulable=True, detailed_explanation=(DetailedExplanation(schedule_explanation=attempt),)
    )
    bed.look()
    status = bed.client.patches[-1][1]
    assert (len(bed.client.patches), status["schedulable"]) == (3, True)
    # The message that stood there is gone.
    assert status["failedMessage"] == ""
    bed.now += 59
    bed.look()
    assert len(bed.client.patches) == 3
    bed.now += 1
    bed.look()
    assert bed.client.patches[-1][1]["lastUpdateTime"] == "2026-01-01T00:01:11Z"


@pytest.mark.parametrize(
    ("ttl", "seconds", "over"),
    [
        ("1m", 59, False),
        ("1m", 60, True),
        (None, 24 * 3600 - 1, False),
        (None, 24 * 3600, True),
        ("0s", 10**8, False),
        ("soon", 10**8, False),
    ],
)
def test_an_explanation_whose_time_is_over_is_deleted(
    ttl: str | None, seconds: float, over: bool
) -> None:
    bed = _Bed()
    bed.ask("a", ttl)
    bed.now += seconds
    bed.look()
    assert bool(bed.client.deleted) == over
    assert bool(bed.client.patches) != over


def test_one_explanation_that_fails_costs_itself_alone() -> None:
    bed = _Bed()
    for name in ("a", "b", "c"):
        bed.ask(name)
    del bed.answers["default/a"]
    bed.client.fails["b"] = 500
    bed.look()
    assert [name for name, _ in bed.client.patches] == ["c"]
    assert (bed.explanations.faults.count, bed.explanations.writes) == (2, 1)
    bed.client.fails.clear()
    bed.look()
    assert [name for name, _ in bed.client.patches] == ["c", "b"]


def test_many_explanations_take_turns() -> None:
    bed = _Bed()
    for number in range(120):
        bed.ask(f"e{number:03}")
    for looks, written in ((1, 50), (2, 100), (3, 120)):
        bed.look()
        assert len({name for name, _ in bed.client.patches}) == written, looks


def test_a_turn_ends_after_50_ms_of_answers_and_the_next_goes_on_from_there() -> None:
    bed = _Bed()
    bed.answer_s = 0.02
    for number in range(7):
        bed.ask(f"e{number}")
    for written in (3, 6, 7):
        bed.look()
        assert len({name for name, _ in bed.client.patches}) == written
    # An answer that takes longer than a turn is given all the same.
    bed.answer_s = 1.0
    bed.answers = dict.fromkeys(bed.answers, ScheduleExplanationStatus(schedulable=True))
    count = len(bed.client.patches)
    bed.look()
    assert len(bed.client.patches) == count + 1


@pytest.mark.parametrize("code", [404, 409])
def test_an_explanation_that_was_deleted_or_edited_meanwhile_is_no_fault(code: int) -> None:
    bed = _Bed()
    bed.ask("a")
    bed.client.fails["a"] = code
    bed.look()
    assert (bed.explanations.faults.count, bed.explanations.writes) == (0, 0)
    # It was not written, so it is written in its next turn.
    bed.client.fails.clear()
    bed.look()
    assert [name for name, _ in bed.client.patches] == ["a"]


def test_an_explanation_that_cannot_be_deleted_is_tried_again() -> None:
    bed = _Bed()
    bed.ask("a", "1m")
    bed.now += 60
    bed.client.fails["a"] = 500
    bed.look()
    bed.client.fails.clear()
    bed.look()
    assert (bed.client.deleted, bed.client.patches) == (["a"], [])


def test_a_clock_that_was_set_back_does_not_stop_the_renewal() -> None:
    bed = _Bed()
    bed.ask("a")
    bed.now += 10
    bed.look()
    bed.now -= 5
    bed.look()
    assert len(bed.client.patches) == 2
    bed.look()
    assert len(bed.client.patches) == 2


@pytest.mark.parametrize("others", [0, 1])
def test_what_is_asked_again_under_the_same_name_is_answered_at_once(others: int) -> None:
    bed = _Bed()
    bed.ask("a")
    for number in range(others):
        bed.ask(f"other{number}")
    bed.look()
    asked = bed.asked.pop("default/a")
    bed.look()
    bed.asked["default/a"] = asked
    bed.look()
    assert [name for name, _ in bed.client.patches].count("a") == 2


def test_a_node_that_changes_is_a_new_verdict() -> None:
    def placed(node: str) -> ScheduleExplanationStatus:
        found = FeasibleSchedulingResult(namespace="default", name="a", uid="u", node_name=node)
        attempt = SchedulingAttempt(schedulable=True, feasible_scheduling_result=(found,))
        details = (DetailedExplanation(), DetailedExplanation(schedule_explanation=attempt))
        return ScheduleExplanationStatus(schedulable=True, detailed_explanation=details)

    bed = _Bed()
    bed.ask("a")
    for node, patches in (("n1", 1), ("n1", 1), ("n2", 2)):
        bed.answers["default/a"] = placed(node)
        bed.now += 1
        bed.look()
        assert len(bed.client.patches) == patches
