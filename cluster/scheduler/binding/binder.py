"""Binds pods: requests in parallel up to a bound, in order for each pod, with a certain outcome.

An outcome is read from an answer that is certain, or from the pod itself. After an answer that
leaves open whether the server acted (a connection that was cut, a time limit, a 5xx), the pod is
read: bound as decided, bound otherwise, gone, replaced, or unbound. An unbound pod is bound again
with the same placement and never given up for another decision, because the first request may
still be carried out. While the server cannot be reached, this goes on with growing pauses, and the
placement has no outcome: its booking stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from cluster.scheduler.binding.pauses import MOST_FAILURES, Pauses
from cluster.scheduler.binding.placement import (
    Bound,
    Outcome,
    Placement,
    PodAsRead,
    Refused,
    Why,
    binding_body,
    defect_of,
    outcome_of,
    patch_body,
    pod_as_read,
)
from cluster.scheduler.binding.turns import Turns
from cluster.scheduler.cycle.timings import BIND, PRE_BIND
from kube.client import MERGE_PATCH, ApiError, Client, Unreachable
from kube.faults import Faults
from kube.resources import PODS

_log = logging.getLogger(__name__)

_DELEGATED_S: Final = 30.0
"""How long a pod may have no node after an extender said that it bound the pod. Chosen: longer than
any binding takes, so that an extender may answer before it binds. A pod that is put back and bound
by the extender after all stays where the extender bound it: a pod is bound once."""
_STARTED: Final = 2
"""Placements that are started for each request that may run. Chosen: the next is ready when a
connection is free; a task for each of thousands that wait doubles the cost of all."""
_QUIET_S: Final = 30.0
"""Between two log lines about placements without an outcome. Chosen: thousands of placements can
fail in a second while a server is away. At twice the value what the log says is up to a minute
old."""


@dataclass(slots=True)
class BindingCounts:
    """Since the start. lost: requests whose answer was lost or left the effect open."""

    bound: int = 0
    refused: int = 0
    lost: int = 0
    patches: int = 0


class Binder:
    """Carries placements out in the background.

    on_outcome: called once for each placement, on the event loop; not for placements that `drain`
    leaves. on_step: called for each patch and each binding with whether it succeeded, and with its
    seconds. before: awaited before a pod's first request; for writes about the same pod that must
    not come later. at_once: requests in parallel. delegate: binds a delegated placement; False: it
    does not want to, and the placement is bound here. It raises ApiError. delegated_s: how long the
    pod may have no node after that.
    """

    def __init__(
        self,
        client: Client,
        on_outcome: Callable[[Placement, Outcome], None],
        *,
        at_once: int = 16,
        before: Callable[[str], Awaitable[None]] | None = None,
        delegate: Callable[[Placement], Awaitable[bool]] | None = None,
        delegated_s: float = _DELEGATED_S,
        on_step: Callable[[Placement, str, bool, float], None] | None = None,
    ) -> None:
        self._on_step = on_step
        self._client = client
        self._on_outcome = on_outcome
        self._before = before
        self._delegate = delegate
        self._delegated_s = delegated_s
        self._at_once = at_once
        self._gate = asyncio.Semaphore(at_once)
        self._turns = Turns()
        self._waiting: deque[Placement] = deque()
        self._tasks: dict[asyncio.Task[None], Placement] = {}
        self._unknown: set[str] = set()
        """Uids of pods."""
        self._logged_at = float("-inf")
        self._draining = False
        self._settled = asyncio.Event()
        self._settled.set()
        self.counts = BindingCounts()
        self.faults = Faults("binding")

    @property
    def in_flight(self) -> int:
        """How many placements have no outcome yet."""
        return len(self._tasks) + len(self._waiting)

    @property
    def backlogged(self) -> bool:
        """Whether placements wait that are not even started."""
        return bool(self._waiting)

    @property
    def unknown(self) -> int:
        """How many placements wait for an API server that cannot be reached or fails."""
        return len(self._unknown)

    def submit(self, placement: Placement) -> None:
        """Carry out a placement. Raises RuntimeError while draining."""
        if self._draining:
            raise RuntimeError("the binder is draining")
        self._waiting.append(placement)
        self._settled.clear()
        self._start()

    def _start(self) -> None:
        """Start what waits. Placements that wait for the server hold up no others."""
        while self._waiting and len(self._tasks) - len(self._unknown) < _STARTED * self._at_once:
            placement = self._waiting.popleft()
            task = asyncio.create_task(self._carry_out(placement))
            self._tasks[task] = placement
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._start()
        if not self._tasks:
            self._settled.set()

    async def drain(self, seconds: float) -> tuple[Placement, ...]:
        """Finish what is in flight within `seconds`; return the placements without an outcome.

        These may be bound or not. After a restart the watch shows which.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._settled.wait()
        left = (*self._tasks.values(), *self._waiting)
        self._waiting.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if left:
            _log.warning(
                "%d bindings have no certain outcome at the end: %s%s",
                len(left),
                ", ".join(placement.key for placement in left[:10]),
                ", ..." if len(left) > 10 else "",
            )
        return left

    async def _carry_out(self, placement: Placement) -> None:
        try:
            outcome = await self._outcome(placement)
        except Exception as error:  # noqa: BLE001 - a defect must not leave a booking for ever
            self.faults.note("carrying out a placement", about=placement.key)
            outcome = Refused(Why.FAILING, f"{type(error).__name__}: {error}")
        finally:
            self._unknown.discard(placement.uid)
        if isinstance(outcome, Bound):
            self.counts.bound += 1
        else:
            self.counts.refused += 1
        try:
            self._on_outcome(placement, outcome)
        except Exception:  # noqa: BLE001 - the other placements go on
            self.faults.note("taking an outcome", about=placement.key)

    async def _outcome(self, placement: Placement) -> Outcome:
        if defect := defect_of(placement):
            return Refused(Why.INVALID, f"pod {placement.key}: {defect}")
        async with self._turns.of(placement.key):
            if self._before is not None:
                await self._before(placement.key)
            patch = patch_body(placement)
            if patch is not None:
                began = time.perf_counter()
                refused = await self._patch(placement, patch)
                self._note_step(placement, PRE_BIND, refused is None, began)
                if refused is not None:
                    return refused
            began = time.perf_counter()
            outcome = await self._bind(placement)
            self._note_step(placement, BIND, isinstance(outcome, Bound), began)
            return outcome

    def _note_step(self, placement: Placement, step: str, succeeded: bool, began: float) -> None:
        if self._on_step is not None:
            self._on_step(placement, step, succeeded, time.perf_counter() - began)

    async def _patch(self, placement: Placement, body: bytes) -> Refused | None:
        """Write what goes before the Binding. Returns why that is not possible."""
        self.counts.patches += 1
        path = PODS.path(namespace=placement.namespace, name=placement.name)

        async def write() -> bytes:
            return await self._client.request(
                "PATCH", path, body=body, content_type=MERGE_PATCH, tries=1
            )

        answer = await self._until_certain(placement, write)
        if isinstance(answer, Bound):
            return Refused(Why.BOUND_ELSEWHERE, f"pod {placement.key} was bound before its patch")
        return answer if isinstance(answer, Refused) else None

    async def _bind(self, placement: Placement) -> Outcome:
        path = PODS.path(namespace=placement.namespace, name=placement.name, subresource="binding")
        body = binding_body(placement)

        delegated = False

        async def write() -> bytes:
            nonlocal delegated
            delegate = self._delegate if placement.delegated else None
            delegated = delegate is not None and await delegate(placement)
            return (
                b"" if delegated else await self._client.request("POST", path, body=body, tries=1)
            )

        answer = await self._until_certain(placement, write)
        if not isinstance(answer, bytes):
            return answer
        return await self._seen_bound(placement) if delegated else Bound()

    async def _seen_bound(self, placement: Placement) -> Outcome:
        """Return the outcome that a pod shows which an extender says that it bound."""
        end = time.monotonic() + self._delegated_s
        pauses = Pauses()
        while True:
            shown = outcome_of(placement, await self._read(placement))
            if shown is not None:
                return shown
            reason = "its extender answered that it is bound, and it has no node"
            if time.monotonic() >= end:
                message = f"pod {placement.key}: {reason} after {self._delegated_s:g} s"
                return Refused(Why.FAILING, message)
            self._note_unknown(placement, reason)
            await pauses.rest()

    async def _until_certain(
        self, placement: Placement, write: Callable[[], Awaitable[bytes]]
    ) -> bytes | Outcome:
        """Repeat `write` until its effect is certain.

        Return the answer of a 2xx, or the outcome that a refusal or the pod itself shows.
        """
        pauses = Pauses()
        failures = 0
        lost = False
        while True:
            refused: Refused | None = None
            try:
                async with self._gate:
                    return await write()
            except Unreachable as error:
                reason = str(error)
                failures = 0
                lost = True
            except ApiError as error:
                reason = str(error)
                if error.status in (401, 429):
                    # Not carried out: nothing to read.
                    self._note_unknown(placement, reason)
                    await pauses.rest(at_least_s=error.retry_after or 0.0)
                    continue
                if error.status >= 500 or error.status == 408:
                    failures += 1
                    lost = True
                else:
                    refused = _refused(placement, error)
                    # After a lost answer, the refusal may be the consequence of our own write.
                    if error.status != 409 and not lost:
                        return refused
            if refused is None:
                self.counts.lost += 1
                self._note_unknown(placement, reason)
            shown = outcome_of(placement, await self._read(placement))
            if shown is not None:
                return shown
            if refused is not None:
                return refused
            if failures >= MOST_FAILURES:
                return Refused(Why.FAILING, reason)
            await pauses.rest()

    async def _read(self, placement: Placement) -> PodAsRead | None:
        """Return the pod as stored, None if there is none of the name; tries until it is read."""
        path = PODS.path(namespace=placement.namespace, name=placement.name)
        pauses = Pauses()
        while True:
            try:
                async with self._gate:
                    # Without a resourceVersion the server reads from etcd, behind every write.
                    return pod_as_read(await self._client.request("GET", path, tries=1))
            except ApiError as error:
                if error.not_found:
                    return None
                reason = str(error)
            except (Unreachable, ValueError) as error:
                reason = str(error)
            self._note_unknown(placement, reason)
            await pauses.rest()

    def _note_unknown(self, placement: Placement, reason: str) -> None:
        if placement.uid not in self._unknown:
            self._unknown.add(placement.uid)
            self._start()
        now = time.monotonic()
        if now - self._logged_at >= _QUIET_S:
            self._logged_at = now
            _log.warning(
                "%d bindings have no certain outcome yet, the last is of pod %s: %s",
                len(self._unknown),
                placement.key,
                reason,
            )


def _refused(placement: Placement, error: ApiError) -> Refused:
    """Return the outcome that a refusal (4xx) means if the pod itself does not show another."""
    message = error.message or f"{error.status} {error.reason}"
    if error.status == 409:
        return Refused(Why.CONFLICT, message)
    if error.not_found:
        return Refused(Why.DELETED, message)
    if error.status == 422 and "metadata.uid" in error.message:
        # What a PATCH of a pod with another uid gets.
        return Refused(Why.OTHER_UID, message)
    if error.status == 403:
        return Refused(Why.FORBIDDEN, message)
    return Refused(Why.INVALID, f"{error.status} {error.reason}: {error.message}")
