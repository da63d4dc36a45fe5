"""Writes about Reservations, in the background: bindings, and why one has no node.

One write about a Reservation at a time. A binding takes the place of a refusal that waits. While
the server cannot be reached both wait; a binding is never given up for another decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from apis.decode import json_decoder, to_plain
from apis.meta import format_time
from apis.scheduling import ENDED_PHASES, Reservation, ReservationCondition, ReservationPhase
from cluster.scheduler.binding.placement import Outcome, Refused, Why
from cluster.scheduler.binding.reservations import ReservationPlacement, bind_reservation
from kube.client import ApiError, Client
from kube.queue import WorkQueue
from kube.resources import RESERVATIONS

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 8
"""Requests in parallel. Chosen: half of those of the binder, because a reservation takes two
or three requests where a pod takes one; at twice the value bindings of pods wait behind them."""
_LONGEST_MESSAGE: Final = 16 * 1024
"""Characters; as of pods' conditions."""

_decode: Final = json_decoder(Reservation)


@dataclass(frozen=True, slots=True)
class ReservationRefusal:
    """Why a Reservation has no node."""

    name: str
    uid: str
    message: str


class ReservationWriter:
    """Carries out what is submitted; run it with `run`.

    on_outcome: called once for each placement, on the event loop; not for placements that `drain`
    leaves. now: the wall clock in seconds, for conditions.
    """

    def __init__(
        self,
        client: Client,
        on_outcome: Callable[[ReservationPlacement, Outcome], None],
        *,
        now: Callable[[], float],
    ) -> None:
        self._client = client
        self._on_outcome = on_outcome
        self._now = now
        self.queue = WorkQueue("writes of reservations")
        self._placements: dict[str, ReservationPlacement] = {}
        """By UID, until they have an outcome."""
        self._refusals: dict[str, ReservationRefusal] = {}
        self._draining = False
        self._settled = asyncio.Event()
        self._settled.set()
        self.faults = self.queue.faults

    @property
    def in_flight(self) -> int:
        """How many placements have no outcome yet."""
        return len(self._placements)

    async def run(self) -> None:
        """Write what was submitted, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self.queue.work(self._write))

    def submit(self, placement: ReservationPlacement) -> None:
        """Carry out a placement. Raises RuntimeError while draining."""
        if self._draining:
            raise RuntimeError("the writer of reservations is draining")
        self._refusals.pop(placement.uid, None)
        self._placements[placement.uid] = placement
        self._settled.clear()
        self.queue.add(placement.uid)

    def refuse(self, refusal: ReservationRefusal) -> None:
        """Write why a Reservation has no node; it replaces an earlier refusal."""
        if refusal.uid not in self._placements:
            self._refusals[refusal.uid] = refusal
            self.queue.add(refusal.uid)

    async def drain(self, seconds: float) -> tuple[ReservationPlacement, ...]:
        """Finish what is in flight within `seconds`; return the placements without an outcome.

        These may be carried out or not. After a restart the watch shows which.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._settled.wait()
        left = tuple(self._placements.values())
        if left:
            _log.warning(
                "%d reservations have no certain outcome at the end: %s%s",
                len(left),
                ", ".join(placement.name for placement in left[:10]),
                ", ..." if len(left) > 10 else "",
            )
        return left

    async def _write(self, uid: str) -> None:
        placement = self._placements.get(uid)
        if placement is not None:
            await self._bind(placement)
        refusal = self._refusals.pop(uid, None)
        if refusal is not None:
            await self._write_refusal(refusal)

    async def _bind(self, placement: ReservationPlacement) -> None:
        try:
            outcome = await bind_reservation(self._client, placement, now=self._now)
        except Exception as error:  # noqa: BLE001 - a defect must not leave a booking for ever
            self.faults.note("carrying out a placement", about=placement.name)
            outcome = Refused(Why.FAILING, f"{type(error).__name__}: {error}")
        if self._placements.get(placement.uid) is placement:
            # Else a newer one for the same Reservation was submitted meanwhile, and is next.
            del self._placements[placement.uid]
        if not self._placements:
            self._settled.set()
        try:
            self._on_outcome(placement, outcome)
        except Exception:  # noqa: BLE001 - the other placements go on
            self.faults.note("taking an outcome", about=placement.name)

    async def _write_refusal(self, refusal: ReservationRefusal) -> None:
        try:
            await self._try_refusal(refusal)
        except ApiError as error:
            if error.not_found:
                return
            if error.status < 500 and error.status not in (401, 408, 409, 429):
                _log.warning(
                    "the condition of reservation %s is not written: %s", refusal.name, error
                )
                return
            self._again(refusal)
            raise
        except Exception:
            self._again(refusal)
            raise

    def _again(self, refusal: ReservationRefusal) -> None:
        """Keep a refusal for the next try, unless a newer write about its object waits."""
        if refusal.uid not in self._placements:
            self._refusals.setdefault(refusal.uid, refusal)

    async def _try_refusal(self, refusal: ReservationRefusal) -> None:
        current = await self._client.find(RESERVATIONS, refusal.name, _decode)
        if current is None or current.metadata.uid != refusal.uid:
            return
        status = current.status
        if status.node_name or status.phase in ENDED_PHASES:
            return
        message = refusal.message
        if len(message) > _LONGEST_MESSAGE:
            message = message[: _LONGEST_MESSAGE - 3] + "..."
        former = next((one for one in status.conditions if one.type == "Scheduled"), None)
        if former is not None and (former.status, former.message) == ("False", message):
            return
        stamp = format_time(datetime.fromtimestamp(self._now(), UTC))
        since = former.last_transition_time if former and former.status == "False" else None
        condition = ReservationCondition(
            type="Scheduled",
            status="False",
            reason="Unschedulable",
            message=message,
            last_probe_time=stamp,
            last_transition_time=since or stamp,
        )
        others = [one for one in status.conditions if one.type != "Scheduled"]
        body = {
            "metadata": {"resourceVersion": current.metadata.resource_version},
            "status": {
                "phase": status.phase or ReservationPhase.PENDING.value,
                "conditions": to_plain([*others, condition]),
            },
        }
        await self._client.patch(
            RESERVATIONS, refusal.name, msgspec.json.encode(body), subresource="status"
        )
