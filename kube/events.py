"""Kubernetes events, aggregated: a repeated event increases the count of the first.

Recording never waits and never fails: events are queued up to a bound, beyond which the oldest are
dropped. An event must not delay the work that it reports.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from apis.meta import ObjectReference, format_time
from kube.client import ApiError, Client, Unreachable, encode_object
from kube.faults import Faults
from kube.resources import EVENTS

_log = logging.getLogger(__name__)

_MOST_WAITING: Final = 1000
"""As many as client-go queues."""
_MOST_KNOWN: Final = 4096
"""Events that are aggregated; as many as client-go remembers."""
_SAME_FOR_SECONDS: Final = 600.0
"""client-go's interval of aggregation."""
_LONGEST_MESSAGE: Final = 1024
"""The API server refuses longer messages."""


@dataclass(slots=True)
class _Known:
    name: str
    namespace: str
    count: int
    last: float


@dataclass(frozen=True, slots=True)
class _Remark:
    about: ObjectReference
    kind: str
    reason: str
    message: str


class EventRecorder:
    """Writes events in the background; run it with `run`."""

    def __init__(self, client: Client, *, component: str, host: str = "") -> None:
        """component, host: the source that the events name. host: a node's name, "" for none."""
        self._client = client
        self._source = {"component": component, "host": host} if host else {"component": component}
        self._waiting: deque[_Remark] = deque(maxlen=_MOST_WAITING)
        self._known: OrderedDict[_Remark, _Known] = OrderedDict()
        self._wake = asyncio.Event()
        self.faults = Faults("events")

    def warning(self, about: ObjectReference, reason: str, message: str) -> None:
        self._record(_Remark(about, "Warning", reason, message[:_LONGEST_MESSAGE]))

    def _record(self, remark: _Remark) -> None:
        self._waiting.append(remark)
        self._wake.set()

    async def run(self) -> None:
        """Write what was recorded until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                remark = self._waiting.popleft()
                try:
                    await self._write(remark)
                except (ApiError, Unreachable) as error:
                    _log.info("event %s was not written: %s", remark.reason, error)
                except Exception:  # noqa: BLE001 - a remark must not end the process
                    self.faults.note("writing an event", about=remark.reason)

    @property
    def waiting(self) -> int:
        """How many events are not written yet."""
        return len(self._waiting)

    async def flush(self) -> None:
        """Write what waits now, as far as the server takes it.

        While it cannot be reached, everything goes on waiting, up to the bound.
        """
        while self._waiting:
            remark = self._waiting.popleft()
            try:
                await self._write(remark)
            except Unreachable as error:
                waits = len(self._waiting) < _MOST_WAITING
                if waits:
                    self._waiting.appendleft(remark)
                state = "is not written yet" if waits else "is lost, since too many wait"
                _log.info("event %s %s: %s", remark.reason, state, error)
                return
            except ApiError as error:
                _log.info("event %s was not written: %s", remark.reason, error)
                return

    async def _write(self, remark: _Remark) -> None:
        now = time.monotonic()
        stamp = format_time(datetime.now(UTC))
        known = self._known.get(remark)
        if known is not None and now - known.last < _SAME_FOR_SECONDS:
            known.count += 1
            known.last = now
            self._known.move_to_end(remark)
            body = msgspec.json.encode({"count": known.count, "lastTimestamp": stamp})
            try:
                await self._client.patch(EVENTS, known.name, body, namespace=known.namespace)
                return
            except ApiError as error:
                if not error.not_found:
                    raise
        # The API server takes events about cluster-scoped objects in this namespace only.
        namespace = remark.about.namespace or "default"
        name = f"{(remark.about.name or 'unknown')[:200]}.{time.time_ns():x}"
        await self._client.create(
            EVENTS,
            encode_object(
                EVENTS,
                {
                    "metadata": {"name": name, "namespace": namespace},
                    "involvedObject": msgspec.to_builtins(remark.about),
                    "type": remark.kind,
                    "reason": remark.reason,
                    "message": remark.message,
                    "source": self._source,
                    "count": 1,
                    "firstTimestamp": stamp,
                    "lastTimestamp": stamp,
                },
            ),
            namespace=namespace,
        )
        self._known[remark] = _Known(name, namespace, 1, now)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
