"""Events of scheduling, as `kubectl get events` and `kubectl describe` show them.

Events wait in a queue of their own and are written by few requests in parallel, so that bindings
come first. A repeated event is counted in the series of the first. What is not written is counted
and logged. The API is events.k8s.io/v1, as kube-scheduler's; docs/facts/scheduler.md, "Events".
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from apis.meta import ObjectReference, format_micro_time
from cluster.scheduler.binding.precedence import BehindBindings
from kube.client import MERGE_PATCH, ApiError, Client, Unreachable
from kube.faults import Faults
from kube.resources import RESERVATIONS, Resource

_log = logging.getLogger(__name__)

NEW_EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event", True)

_MOST_WAITING: Final = 20_000
"""Chosen: 36 s of 550 bindings a second, in about 20 MB. At twice the value a longer absence of the
API server loses nothing, for twice the memory."""
_MOST_KNOWN: Final = 20_000
"""Events that may still get a series. Chosen: as many unschedulable pods repeat theirs."""
_SAME_FOR_S: Final = 360.0
"""client-go's: a series ends when its event did not come for 6 minutes."""
_SERIES_EVERY_S: Final = 30.0
"""Between two writes of one series; what comes between is counted in the next. Chosen: a pod that
is tried every 10 s costs a third of the writes. At twice the value the count is older."""
_LONGEST_NOTE: Final = 1024
"""Bytes; the API server refuses longer notes."""
_LONGEST_NAME: Final = 200
"""Of the object, in the event's name: with a time stamp it stays below the limit of 253."""
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
"""Between two tries while the server cannot be reached. Chosen: nothing waits for an event."""
_MOST_FAILURES: Final = 5
"""Answers of 5xx until an event is given up. Chosen: 8 s with the pauses."""
_QUIET_S: Final = 30.0
"""Between two log lines about lost events; chosen as the binder's."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an object. kind: "Normal" or "Warning". related: another object
    that took part, such as the pod that preempts. controller: the profile's scheduler name."""

    about: ObjectReference
    kind: str
    reason: str
    action: str
    note: str
    controller: str
    related: ObjectReference | None = None


def pod_reference(namespace: str, name: str, uid: str) -> ObjectReference:
    """Return a reference to a pod."""
    return ObjectReference(api_version="v1", kind="Pod", namespace=namespace, name=name, uid=uid)


def reservation_reference(name: str, uid: str) -> ObjectReference:
    """Return a reference to a Reservation."""
    return ObjectReference(
        api_version=RESERVATIONS.api_version, kind=RESERVATIONS.kind, name=name, uid=uid
    )


def scheduled(about: ObjectReference, node: str, *, controller: str) -> Event:
    """Return the event of a pod, or of a Reservation, that was placed on a node."""
    what = f"{about.namespace}/{about.name}" if about.namespace else about.name
    note = f"Successfully assigned {what} to {node}"
    return Event(about, "Normal", "Scheduled", "Binding", note, controller)


def failed(about: ObjectReference, message: str, *, controller: str) -> Event:
    """Return the event of a pod, or of a Reservation, that was not placed."""
    return Event(about, "Warning", "FailedScheduling", "Scheduling", message, controller)


def preempted(
    victim: ObjectReference, preemptor: ObjectReference, node: str, *, controller: str
) -> Event:
    """Return the event of a pod that is evicted for another one."""
    note = f"Preempted by pod {preemptor.uid} on node {node}"
    return Event(victim, "Normal", "Preempted", "Preempting", note, controller, preemptor)


@dataclass(slots=True)
class EventCounts:
    """Since the start. repeated: counted in the series of an earlier event. replaced: an older
    failure of the same object, not yet written when a newer one came. lost: refused by the server,
    or dropped because too many wait."""

    written: int = 0
    repeated: int = 0
    replaced: int = 0
    lost: int = 0


@dataclass(slots=True)
class _Waiting:
    event: Event
    at: float
    name: str
    series: _Known | None = None
    """With it, the count of an event that was written is written."""
    failures: int = 0

    @property
    def subject(self) -> tuple[str, str]:
        return self.event.about.uid, self.event.reason


@dataclass(slots=True)
class _Known:
    name: str
    count: int
    last: float
    written_at: float


class EventWriter:
    """Writes events; run it with `run`.

    instance: names this process, for reportingInstance. now: the wall clock in seconds.
    bindings_wait: returns whether bindings wait for a request, which events do not hold up.
    """

    def __init__(
        self,
        client: Client,
        *,
        instance: str,
        now: Callable[[], float],
        at_once: int = 4,
        bindings_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self._client = client
        self._instance = instance[:128]
        self._now = now
        self._at_once = at_once
        self._behind = BehindBindings(bindings_wait, many=_MOST_WAITING // 2)
        self._waiting: deque[_Waiting] = deque()
        self._failures: dict[tuple[str, str], _Waiting] = {}
        """The warnings that wait, by uid and reason."""
        self._known: OrderedDict[Event, _Known] = OrderedDict()
        """Warnings only: a pod is placed or preempted once."""
        self._stamp = itertools.count(int(now() * 1e9))
        self._writing = 0
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._logged_at = float("-inf")
        self._unlogged = 0
        self.counts = EventCounts()
        self.faults = Faults("scheduling events")

    @property
    def waiting(self) -> int:
        """How many events are not written yet."""
        return len(self._waiting)

    def record(self, event: Event) -> None:
        """Write an event in the background."""
        now = self._now()
        if event.kind == "Warning" and self._aggregated(event, now):
            return
        base = (event.about.name or "unknown")[:_LONGEST_NAME]
        waiting = _Waiting(event, now, f"{base}.{next(self._stamp):x}")
        if event.kind == "Warning":
            self._failures[waiting.subject] = waiting
        self._append(waiting)

    def _append(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._settled.clear()
        if len(self._waiting) > _MOST_WAITING:
            self._lose(self._take(), "too many events wait")
        self._wake.set()

    def _aggregated(self, event: Event, now: float) -> bool:
        """Merge a warning into an earlier one, written or waiting; return whether there was one."""
        older = self._failures.get((event.about.uid, event.reason))
        if older is not None:
            # Only the newest reason of a pod matters to its reader.
            self.counts.replaced += 1
            older.event = event
            older.at = now
            return True
        known = self._known.get(event)
        # A time before the last one: the clock was set back.
        if known is None or not 0 <= now - known.last <= _SAME_FOR_S:
            return False
        known.count += 1
        known.last = now
        self._known.move_to_end(event)
        self.counts.repeated += 1
        if now - known.written_at >= _SERIES_EVERY_S:
            known.written_at = now
            self._append(_Waiting(event, now, known.name, known))
        return True

    def _take(self) -> _Waiting:
        waiting = self._waiting.popleft()
        if self._failures.get(waiting.subject) is waiting:
            del self._failures[waiting.subject]
        return waiting

    async def run(self) -> None:
        """Write what was recorded, until cancelled."""
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
        """Write the next event. Return whether to pause before the one after it."""
        waiting = self._take()
        self._writing += 1
        try:
            wait = await self._write(waiting)
        except Exception:  # noqa: BLE001 - one event must not end the writing of others
            self.faults.note("writing an event", about=waiting.event.reason)
            self._lose(waiting, "a defect")
            wait = False
        finally:
            self._writing -= 1
        if not self._waiting and not self._writing:
            self._settled.set()
        return wait

    async def _write(self, waiting: _Waiting) -> bool:
        """Write one event or series. Return whether to pause before the next."""
        event = waiting.event
        # The API server takes events about cluster-scoped objects in this namespace only.
        namespace = event.about.namespace or "default"
        try:
            if waiting.series is not None:
                await self._client.request(
                    "PATCH",
                    NEW_EVENTS.path(namespace=namespace, name=waiting.name),
                    body=_series_body(waiting.series),
                    content_type=MERGE_PATCH,
                    tries=1,
                )
            else:
                path = NEW_EVENTS.path(namespace=namespace)
                body = self._body(waiting, namespace)
                await self._client.request("POST", path, body=body, tries=1)
        except ApiError as error:
            if waiting.series is not None and error.not_found:
                # Events end after an hour by default; the next repetition is an event of its own.
                self._known.pop(event, None)
                return False
            if not error.already_exists:
                return self._failed(waiting, error)
            # A write whose answer was lost had succeeded.
        except Unreachable as error:
            return self._failed(waiting, error)
        self.counts.written += 1
        if event.kind == "Warning" and waiting.series is None:
            self._known[event] = _Known(waiting.name, 1, waiting.at, waiting.at)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return False

    def _body(self, waiting: _Waiting, namespace: str) -> bytes:
        event = waiting.event
        plain: dict[str, object] = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": waiting.name, "namespace": namespace},
            "eventTime": _text_of(waiting.at),
            "reportingController": event.controller,
            "reportingInstance": self._instance,
            "action": event.action,
            "reason": event.reason,
            "regarding": event.about,
            "note": _cut(event.note),
            "type": event.kind,
        }
        if event.related is not None:
            plain["related"] = event.related
        return msgspec.json.encode(plain)

    def _failed(self, waiting: _Waiting, error: ApiError | Unreachable) -> bool:
        if isinstance(error, ApiError):
            if error.status >= 500:
                waiting.failures += 1
            if waiting.failures >= _MOST_FAILURES or (
                error.status < 500 and error.status not in (401, 408, 429)
            ):
                self._lose(waiting, str(error))
                return False
        if waiting.series is None and waiting.event.kind == "Warning":
            if waiting.subject in self._failures:
                self.counts.replaced += 1
                return True
            self._failures[waiting.subject] = waiting
        self._waiting.appendleft(waiting)
        return True

    def _lose(self, waiting: _Waiting, why: str) -> None:
        self.counts.lost += 1
        self._unlogged += 1
        now = self._now()
        if 0 <= now - self._logged_at < _QUIET_S:
            return
        about = waiting.event.about
        _log.warning(
            "%d events are lost, the last is %s about %s %s/%s: %s",
            self._unlogged,
            waiting.event.reason,
            about.kind,
            about.namespace,
            about.name,
            why,
        )
        self._logged_at = now
        self._unlogged = 0

    async def flush(self, seconds: float) -> int:
        """Wait up to `seconds` until everything is written, while `run` runs; return what is left.

        What is left in the queue is counted and logged as lost; requests that run may succeed.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._settled.wait()
        left = len(self._waiting) + self._writing
        if self._waiting:
            self.counts.lost += len(self._waiting)
            lost = self._unlogged + len(self._waiting)
            _log.warning("%d events are lost: the scheduler ends", lost)
            self._unlogged = 0
            self._waiting.clear()
            self._failures.clear()
        return left


def _series_body(known: _Known) -> bytes:
    series = {"count": known.count, "lastObservedTime": _text_of(known.last)}
    return msgspec.json.encode({"series": series})


def _text_of(seconds: float) -> str:
    return format_micro_time(datetime.fromtimestamp(seconds, UTC))


def _cut(note: str) -> str:
    encoded = note.encode()
    if len(encoded) <= _LONGEST_NOTE:
        return note
    return encoded[: _LONGEST_NOTE - 3].decode(errors="ignore") + "..."
