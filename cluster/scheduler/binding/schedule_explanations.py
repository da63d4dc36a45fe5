"""Keeps the status of ScheduleExplanations, and deletes those whose time is over.

A user asks by creating the object. A change of the verdict is written within a second, other
changes within ten, and an unchanged answer once a minute, so that its `lastUpdateTime` shows that
it is kept. One object that cannot be written costs itself alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from apis.decode import to_plain
from apis.meta import format_time, parse_duration, unix_seconds
from apis.schedule_explanation import (
    FeasibleSchedulingResult,
    ScheduleExplanation,
    ScheduleExplanationStatus,
)
from kube.client import ApiError, Client, Unreachable
from kube.faults import Faults
from kube.resources import SCHEDULE_EXPLANATIONS

_LOOK_S: Final = 1.0
_SETTLE_S: Final = 10.0
"""Between two writes that differ in counts and node names alone. Chosen: on a busy cluster these
change all the time. Half the value doubles the writes of a question that is open."""
_HEARTBEAT_S: Final = 60.0
"""docs/facts/scheduler.md, "ScheduleExplanation": at least once a minute."""
_DEFAULT_TTL_S: Final = 24 * 3600.0
"""The CRD's default."""
_MOST_AT_ONCE: Final = 50
"""Explanations that are looked at in a second; further ones take turns. Chosen: an answer takes
about 1 ms at 5,000 nodes, so this is a twentieth of the process's time."""
_LONGEST_TURN_S: Final = 0.05
"""Of work on answers in a second; the others then wait for the next turn. The same twentieth,
also where answers about many pods take longer. One answer is always given."""


@dataclass(frozen=True, slots=True)
class _Written:
    """Digests of what was written last; a status itself may have 100 KB."""

    status: bytes
    verdict: bytes
    at: float


class ScheduleExplanations:
    """Answers the ScheduleExplanations that are there; run it with `run`."""

    def __init__(
        self,
        client: Client,
        *,
        asked: Mapping[str, ScheduleExplanation],
        answer: Callable[[str, str], ScheduleExplanationStatus],
        now: Callable[[], float],
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """asked: by namespace/name, as last seen. answer: by the namespace of an explanation and
        the key of its question, without the time. now: the wall clock in seconds. timer: seconds
        from any start, for how long answers take."""
        self._client = client
        self._asked = asked
        self._answer = answer
        self._now = now
        self._timer = timer
        self._spent_s = 0.0
        """On answers of this turn."""
        self._written: dict[str, _Written] = {}
        """By UID."""
        self._next = 0
        self.writes = 0
        self.faults = Faults("explanations")

    async def run(self) -> None:
        """Keep them until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Bring those up to date whose turn it is."""
        names = sorted(self._asked)
        if not names:
            self._written.clear()
            return
        self._next %= len(names)
        turn = (names[self._next :] + names[: self._next])[:_MOST_AT_ONCE]
        self._spent_s = 0.0
        for name in turn:
            if self._spent_s >= _LONGEST_TURN_S:
                break
            self._next += 1
            explanation = self._asked.get(name)
            if explanation is None:
                continue
            try:
                await self._keep(explanation)
            except (ApiError, Unreachable):
                # Looked at again in its next turn.
                self.faults.note("writing an explanation", about=name)
            except Exception:  # noqa: BLE001 - one explanation must not end the others
                self.faults.note("an explanation", about=name)
            await asyncio.sleep(0)
        kept = {each.metadata.uid for each in self._asked.values()}
        for uid in [uid for uid in self._written if uid not in kept]:
            del self._written[uid]

    async def _keep(self, explanation: ScheduleExplanation) -> None:
        meta, now = explanation.metadata, self._now()
        if _is_over(explanation, now):
            await self._client.delete(
                SCHEDULE_EXPLANATIONS, meta.name, namespace=meta.namespace, uid=meta.uid
            )
            return
        began = self._timer()
        try:
            status = self._answer(meta.namespace, explanation.spec.question_object_key)
            written = _Written(_digest(status), _digest(_verdict(status)), now)
        finally:
            self._spent_s += self._timer() - began
        before = self._written.get(meta.uid)
        if before is not None:
            age = now - before.at
            changed = written.status != before.status
            urgent = written.verdict != before.verdict
            due = age >= (_SETTLE_S if changed else _HEARTBEAT_S)
            # A negative age: the clock was set back.
            if not urgent and not due and age >= 0:
                return
        moment = format_time(datetime.fromtimestamp(now, UTC))
        plain = to_plain(status) | {"lastUpdateTime": moment}
        # Members that are empty now have to replace what stood there.
        for member in ("schedulable", "schedulableAfterPreemption"):
            plain.setdefault(member, False)
        plain.setdefault("failedMessage", "")
        plain.setdefault("detailedExplanation", [])
        body = msgspec.json.encode({"metadata": {"uid": meta.uid}, "status": plain})
        try:
            await self._client.patch(
                SCHEDULE_EXPLANATIONS,
                meta.name,
                body,
                namespace=meta.namespace,
                subresource="status",
            )
        except ApiError as error:
            if error.not_found or error.conflict:
                return
            raise
        self.writes += 1
        self._written[meta.uid] = written


def _digest(value: object) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=16).digest()


def _verdict(
    status: ScheduleExplanationStatus,
) -> tuple[bool, bool, tuple[FeasibleSchedulingResult, ...]]:
    placed: tuple[FeasibleSchedulingResult, ...] = ()
    for detail in status.detailed_explanation:
        if detail.schedule_explanation is not None:
            placed += detail.schedule_explanation.feasible_scheduling_result
    return status.schedulable, status.schedulable_after_preemption, placed


def _is_over(explanation: ScheduleExplanation, now: float) -> bool:
    """Return whether the time of an explanation is over. A length of 0, or one that cannot be
    read, is without end."""
    ttl_s = _DEFAULT_TTL_S
    if explanation.spec.ttl is not None:
        try:
            ttl_s = parse_duration(explanation.spec.ttl) / 1e9
        except ValueError:
            return False
    created = unix_seconds(explanation.metadata.creation_timestamp)
    return ttl_s > 0 and created > 0 and now >= created + ttl_s
