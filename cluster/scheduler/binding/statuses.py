"""Conditions and nominations of pods that were not placed, written in the background.

Bindings matter more: few requests run in parallel, a pod's status that waits is replaced by a newer
one, and what the pod already shows is not written again. A status is given up, counted and logged
where the server refuses it; while the server cannot be reached it waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from apis.meta import format_time
from cluster.scheduler.binding.precedence import BehindBindings
from cluster.scheduler.binding.turns import Turns
from kube.client import STRATEGIC_PATCH, ApiError, Client, Unreachable
from kube.faults import Faults
from kube.resources import PODS

_log = logging.getLogger(__name__)

_MOST_WAITING: Final = 20_000
"""Pods whose status waits. Chosen: 20 MB with messages of 1 KiB. At twice the value a
longer absence of the API server loses nothing, for twice the memory."""
_MOST_REMEMBERED: Final = 20_000
"""Pods whose written status is remembered. Chosen: 20 MB; a forgotten status is compared with what
the watch shows, and at worst written once more."""
_LONGEST_MESSAGE: Final = 16 * 1024
"""Characters. Chosen: the longest messages, with a reason for each of many constraints, have 2 KiB;
the API server sets no limit of its own."""
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
"""Between two tries while the server cannot be reached. Chosen: nothing waits for a status."""

_MOST_FAILURES: Final = 5
"""Answers of 5xx until a status is given up. Chosen: with the pauses these are 8 s; an error that
depends on the request alone would be repeated for ever. The pod's next attempt writes again."""

UNSCHEDULABLE: Final = "Unschedulable"
SCHEDULER_ERROR: Final = "SchedulerError"
SCHEDULING_GATED: Final = "SchedulingGated"


@dataclass(frozen=True, slots=True)
class PodStatus:
    """Why a pod is not placed. reason: one of the constants above.

    nominated_node: the node that preemption frees for it; "" clears, None leaves it as it is.
    generation: of the pod that was tried, 0 where the API server counts none. A status that
    differs in nothing else is not written, as kube-scheduler's.
    """

    namespace: str
    name: str
    uid: str
    reason: str
    message: str
    nominated_node: str | None = None
    generation: int = 0

    @property
    def key(self) -> str:
        """Return namespace/name."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Shown:
    """What a pod shows in the watch: its condition PodScheduled and its nomination.

    status: "True", "False", or "" without the condition.
    """

    status: str = ""
    reason: str = ""
    message: str = ""
    nominated_node: str = ""


@dataclass(slots=True)
class StatusCounts:
    """Since the start. unchanged: not written, because the pod shows it. replaced: by a newer one,
    or by a binding, before it was written. gone: the pod was deleted or replaced. lost: refused by
    the server, or dropped because too many wait."""

    written: int = 0
    gone: int = 0
    unchanged: int = 0
    replaced: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Waiting:
    status: PodStatus
    false_already: bool
    """Whether the pod shows the condition as False: its lastTransitionTime stays."""
    failures: int = 0


class StatusWriter:
    """Writes statuses; run it with `run`.

    now: the wall clock in seconds, for lastTransitionTime. at_once: requests in parallel.
    bindings_wait: returns whether bindings wait for a request, which statuses do not hold up.
    """

    def __init__(
        self,
        client: Client,
        *,
        now: Callable[[], float],
        at_once: int = 4,
        bindings_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client = client
        self._now = now
        self._at_once = at_once
        self._behind = BehindBindings(bindings_wait, many=_MOST_WAITING // 2)
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        """By key."""
        self._written: OrderedDict[str, PodStatus] = OrderedDict()
        """By uid."""
        self._lost: OrderedDict[str, str] = OrderedDict()
        """UID -> a nomination, or its end (""), that was not written: the pod's next status has it
        again. Until then a scheduler that starts reads what the pod shows."""
        self._turns = Turns()
        self._wake = asyncio.Event()
        self.counts = StatusCounts()
        self.faults = Faults("statuses")

    @property
    def waiting(self) -> int:
        """How many statuses are not written yet."""
        return len(self._waiting)

    def submit(self, status: PodStatus, shown: Shown) -> None:
        """Write a status unless the pod shows it. shown: what the watch has of the pod."""
        if len(status.message) > _LONGEST_MESSAGE:
            short = status.message[: _LONGEST_MESSAGE - 3] + "..."
            status = replace(status, message=short)
        lost = self._lost.pop(status.uid, None)
        if status.nominated_node is None:
            status = replace(status, nominated_node=lost)
        older = self._waiting.get(status.key)
        if older is not None:
            self.counts.replaced += 1
            status = _after(status, older.status)
        # Our own last write is newer than the watch, which may not have it yet. What a write that
        # is under way leaves on the pod is not known.
        known = self._written.get(status.uid)
        if not self._turns.busy(status.key) and _is_shown(known, shown, status):
            self._waiting.pop(status.key, None)
            self.counts.unchanged += 1
            return
        false_already = known is not None or shown.status == "False"
        # In the place of an older one: a pod that is refused again and again gets its turn.
        self._waiting[status.key] = _Waiting(status, false_already)
        if len(self._waiting) > _MOST_WAITING:
            _, dropped = self._waiting.popitem(last=False)
            self._lose(dropped.status, "too many statuses wait")
        self._wake.set()

    async def settle(self, key: str) -> None:
        """Drop what waits for a pod and wait for what is being written; before its binding.

        A condition that arrived after the binding would show a bound pod as not scheduled. A
        nomination that waits is dropped with it: where the binding is refused, the status that
        says so has the nomination again.
        """
        while True:
            if self._waiting.pop(key, None) is not None:
                self.counts.replaced += 1
            if not self._turns.busy(key):
                return
            async with self._turns.of(key):
                # A write that fails waits to be repeated: it is dropped in the next round.
                pass

    def forget(self, key: str, uid: str) -> None:
        """Forget what was written about a pod that is bound, and drop what waits."""
        self._written.pop(uid, None)
        self._lost.pop(uid, None)
        waiting = self._waiting.get(key)
        if waiting is not None and waiting.status.uid == uid:
            del self._waiting[key]
            self.counts.replaced += 1

    async def run(self) -> None:
        """Write what was submitted, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(
                    self._behind.write(
                        self._write_next,
                        waiting=lambda: len(self._waiting),
                        wake=self._wake,
                        pauses=(_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
                    )
                )

    async def _write_next(self) -> bool:
        """Write the next status. Return whether to pause before the one after it."""
        _, waiting = self._waiting.popitem(last=False)
        try:
            return await self._write(waiting)
        except Exception:  # noqa: BLE001 - one status must not end the writing of others
            self.faults.note("writing a status", about=waiting.status.key)
            self.counts.lost += 1
            return False

    async def _write(self, waiting: _Waiting) -> bool:
        """Write one status. Return whether to pause before the next."""
        status = waiting.status
        path = PODS.path(namespace=status.namespace, name=status.name, subresource="status")
        body = self._body(waiting)
        async with self._turns.of(status.key):
            try:
                await self._client.request(
                    "PATCH", path, body=body, content_type=STRATEGIC_PATCH, tries=1
                )
            except (ApiError, Unreachable) as error:
                return self._failed(waiting, error)
        self.counts.written += 1
        known = self._written.pop(status.uid, None)
        if status.nominated_node is None and known is not None:
            status = replace(status, nominated_node=known.nominated_node)
        self._written[status.uid] = status
        if len(self._written) > _MOST_REMEMBERED:
            self._written.popitem(last=False)
        return False

    def _body(self, waiting: _Waiting) -> bytes:
        status = waiting.status
        condition: dict[str, Any] = {
            "type": "PodScheduled",
            "status": "False",
            "reason": status.reason,
            "message": status.message,
        }
        if status.generation:
            condition["observedGeneration"] = status.generation
        if not waiting.false_already:
            now = datetime.fromtimestamp(self._now(), UTC)
            condition["lastTransitionTime"] = format_time(now)
        plain: dict[str, Any] = {"conditions": [condition]}
        if status.nominated_node is not None:
            plain["nominatedNodeName"] = status.nominated_node or None
        # The uid is a precondition: a pod of the same name that came later is not written.
        return msgspec.json.encode({"metadata": {"uid": status.uid}, "status": plain})

    def _failed(self, waiting: _Waiting, error: ApiError | Unreachable) -> bool:
        status = waiting.status
        if isinstance(error, ApiError):
            if error.not_found or (error.status == 422 and "metadata.uid" in error.message):
                self.counts.gone += 1
                return False
            if error.status >= 500:
                waiting.failures += 1
            if waiting.failures >= _MOST_FAILURES or (
                error.status < 500 and error.status not in (401, 408, 409, 429)
            ):
                self._lose(status, str(error))
                return False
        newer = self._waiting.get(status.key)
        if newer is None:
            self._waiting[status.key] = waiting
        else:
            self.counts.replaced += 1
            newer.status = _after(newer.status, status)
        return True

    def _lose(self, status: PodStatus, why: str) -> None:
        self.counts.lost += 1
        newer = self._waiting.get(status.key)
        if newer is not None:
            newer.status = _after(newer.status, status)
        elif status.nominated_node is not None:
            self._lost[status.uid] = status.nominated_node
            if len(self._lost) > _MOST_REMEMBERED:
                self._lost.popitem(last=False)
        _log.warning("the status of pod %s (%s) is not written: %s", status.key, status.reason, why)


def _after(newer: PodStatus, older: PodStatus) -> PodStatus:
    """Return what to write of a pod in place of two statuses. The nomination of the older one
    holds where the newer one leaves it as it is."""
    if newer.nominated_node is None and newer.uid == older.uid:
        return replace(newer, nominated_node=older.nominated_node)
    return newer


def _is_shown(known: PodStatus | None, shown: Shown, wanted: PodStatus) -> bool:
    """Return whether the pod has the wanted status already.

    known: the last one that was written, None for none. shown: what the watch has.
    """
    if known is not None:
        if (known.reason, known.message) != (wanted.reason, wanted.message):
            return False
        nominated = known.nominated_node
        if nominated is None:
            nominated = shown.nominated_node
    else:
        if (shown.status, shown.reason, shown.message) != ("False", wanted.reason, wanted.message):
            return False
        nominated = shown.nominated_node
    return wanted.nominated_node in (None, nominated)
