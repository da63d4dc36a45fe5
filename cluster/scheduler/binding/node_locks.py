"""Takes the locks of device plugins' vendors on nodes, each before the pod that needs it is bound.

The plugins of some vendors find out which pod an allocation on their node is for by looking for the
one pod that waits for it. So only one such pod may be on its way to a node. A lock is an annotation
of the Node that names the pod. The scheduler sets it before it binds the pod, and the plugin
removes it when the pod has its devices. The scheduler removes the lock of a pod that is not bound
after all.

A lock that another pod holds is waited for; what holds it longer than a hand-over takes makes the
waiting pod be scheduled again. A lock is taken over if its time is over, or if its pod does not
exist any more, has ended or is on another node. So a lock that a scheduler left behind when it was
killed holds its node up for a limited time, and not at all for the pod that it was taken for.

The version of the Node is a precondition of every write. An answer that is lost is resolved by
reading. docs/facts/scheduler.md, "Device records".
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from apis.scheduling_pod import SchedulingNode, SchedulingPod
from cluster.scheduler.binding.lock_text import LOCK_SECONDS, NodeLock, lock_text, parse_lock
from cluster.scheduler.binding.pauses import MOST_FAILURES, Pauses
from cluster.scheduler.binding.placement import Bound, Outcome, Placement, Refused, Why
from cluster.scheduler.binding.preparation import GivenUp, check_pod
from kube.cache import Event, object_key
from kube.client import MERGE_PATCH, ApiError, Client, Unreachable
from kube.faults import Faults
from kube.resources import NODES, PODS, Resource

_log = logging.getLogger(__name__)

_HELD_S: Final = 10.0
"""How long an unchanged lock of another pod is waited for. Chosen: kubelet has devices handed over
within a second or two after a binding. At twice the value pods keep their room on a node whose
plugin hangs for twice as long."""
_LOOK_S: Final = 1.0
"""Between two looks at a lock; changes of the node that are watched are looked at before. Chosen:
one small request a second for each node whose lock is waited for."""
_AT_ONCE: Final = 8
"""Requests in parallel. Chosen: half of those of bindings, which wait for these."""
MANIFEST: Final = "deploy/scheduler/node-locks"
"""Grants the right to patch nodes, which only these locks need."""


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class _Node(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str | None = None


class _PodStatus(msgspec.Struct):
    phase: str | None = None


class _Pod(msgspec.Struct):
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


_node_of: Final = msgspec.json.Decoder(_Node).decode
_pod_of: Final = msgspec.json.Decoder(_Pod).decode


@dataclass(slots=True)
class _Waiting:
    """A placement that waits for the lock of its node.

    sent: texts that were written, or that may have been. failures: in a row.
    """

    placement: Placement
    sent: set[str] = field(default_factory=set)
    failures: int = 0
    pauses: Pauses = field(default_factory=Pauses)


class _Step(enum.Enum):
    DONE = enum.auto()
    """The placement is passed on or given up."""
    AGAIN = enum.auto()
    """A request failed."""


@dataclass(frozen=True, slots=True)
class _HeldBy:
    """Another pod holds the lock. pod: as NodeLock.pod."""

    pod: str


@dataclass(slots=True)
class NodeLockCounts:
    """Since the start. taken_over: locks that were taken although another pod's stood there."""

    taken: int = 0
    taken_over: int = 0
    refused: int = 0
    released: int = 0


class NodeLocks:
    """Takes the lock of a placement's node, and passes the placement on when it holds it.

    bind: takes placements whose lock is taken. refuse: takes those that are given up, once each.
    Every outcome of a placement that was passed on has to come back to `ended`.
    pod_of: namespace/name -> the pod as last seen. clock: seconds since 1970. steady: seconds that
    never jump. held_s: how long an unchanged lock of another pod is waited for.
    """

    def __init__(
        self,
        client: Client,
        *,
        bind: Callable[[Placement], None],
        refuse: Callable[[Placement, Refused], None],
        pod_of: Callable[[str], SchedulingPod | None],
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
        held_s: float = _HELD_S,
    ) -> None:
        self._client = client
        self._bind = bind
        self._refuse = refuse
        self._pod_of = pod_of
        self._clock = clock
        self._steady = steady
        self._held_s = held_s
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._queues: dict[str, deque[_Waiting]] = {}
        """By node: only one of a node's pods is looked after at a time."""
        self._changed: dict[str, asyncio.Event] = {}
        """By node with a queue: set when the Node changed."""
        self._sent: dict[str, frozenset[str]] = {}
        """By the pod's UID: the texts of the lock of a placement that is being bound."""
        self._seen: dict[tuple[str, str], tuple[str, float]] = {}
        """(Node, annotation) -> a text that was waited for, and the steady time of the first look
        at it: a holder's clock may be wrong."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases: dict[str, set[asyncio.Task[None]]] = {}
        """By node."""
        self.counts = NodeLockCounts()
        self.faults = Faults("node locks")

    @property
    def in_flight(self) -> int:
        """How many pods wait for the lock of their node."""
        return sum(map(len, self._queues.values()))

    def node_event(self, event: Event[SchedulingNode]) -> None:
        """Look at the lock of a node that changed."""
        changed = self._changed.get(event.new.metadata.name)
        if changed is not None:
            changed.set()

    def pod_event(self, event: Event[SchedulingPod]) -> None:
        """Give a pod up that was deleted while it waits, also one behind others.

        The others may hold the lock for long, and its room on the node would stay booked.
        """
        key = object_key(event.new)
        for node, queue in self._queues.items():
            for waiting in [each for each in queue if each.placement.key == key]:
                if waiting is queue[0]:
                    # A request for it may be under way.
                    self._changed[node].set()
                    continue
                try:
                    check_pod(waiting.placement, self._pod_of(key))
                except GivenUp as given_up:
                    queue.remove(waiting)
                    self._give_up(waiting, given_up.refused)

    def submit(self, placement: Placement) -> None:
        """Take the lock of a placement in the background, after those of the same node."""
        waiting = _Waiting(placement)
        queue = self._queues.get(placement.node)
        if queue is not None:
            queue.append(waiting)
            return
        self._queues[placement.node] = deque([waiting])
        self._changed[placement.node] = asyncio.Event()
        task = asyncio.create_task(self._serve(placement.node))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ended(self, placement: Placement, outcome: Outcome) -> None:
        """Take the outcome of a binding. The lock of a pod that is bound is the plugin's."""
        sent = self._sent.pop(placement.uid, frozenset())
        if sent and not isinstance(outcome, Bound):
            self._release(placement, sent)

    async def stop(self) -> None:
        """End all waiting. What was written stays: the next leader takes it over."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A task that had not begun cleans nothing up.
        self._queues.clear()
        self._changed.clear()

    async def settle(self, seconds: float) -> None:
        """Wait until the locks of refused pods are removed, at most so long."""
        releases = [task for tasks in self._releases.values() for task in tasks]
        if releases:
            await asyncio.wait(releases, timeout=seconds)
        for task in releases:
            task.cancel()
        await asyncio.gather(*releases, return_exceptions=True)

    # --- taking --------------------------------------------------------------------------------

    async def _serve(self, node: str) -> None:
        """Take the lock of a node for one placement after the other."""
        queue, changed = self._queues[node], self._changed[node]
        try:
            while queue:
                # The lock of a pod that was refused does not hold up the others.
                if releases := tuple(self._releases.get(node, ())):
                    await asyncio.wait(releases)
                waiting = queue[0]
                changed.clear()
                step = await self._attempt(waiting)
                if step is _Step.DONE:
                    queue.remove(waiting)
                elif step is _Step.AGAIN:
                    await waiting.pauses.rest()
                elif (holder := self._queued(waiting.placement, step.pod)) is not None:
                    # A scheduler before this one left the lock, and its pod waits for it too.
                    queue.remove(holder)
                    queue.appendleft(holder)
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK_S):
                            await changed.wait()
        finally:
            self._queues.pop(node, None)
            self._changed.pop(node, None)

    def _queued(self, placement: Placement, pod: str) -> _Waiting | None:
        """Return what waits for the same lock as a placement and is of the pod `pod`."""
        wanted = pod, placement.lock
        queue = self._queues[placement.node]
        return next((o for o in queue if (o.placement.key, o.placement.lock) == wanted), None)

    async def _attempt(self, waiting: _Waiting) -> _Step | _HeldBy:
        placement = waiting.placement
        try:
            found = await self._take(waiting)
        except GivenUp as given_up:
            self._give_up(waiting, given_up.refused)
            return _Step.DONE
        except Exception as error:  # noqa: BLE001 - a defect must not leave a booking for ever
            self.faults.note("taking the lock of a node", about=placement.key)
            text = f"{_about(placement)}: {type(error).__name__}: {error}"
            self._give_up(waiting, Refused(Why.FAILING, text))
            return _Step.DONE
        if found is not _Step.DONE:
            return found
        self.counts.taken += 1
        self._seen.pop((placement.node, placement.lock), None)
        self._sent[placement.uid] = frozenset(waiting.sent)
        # While the process stops, the binder takes no more; the next leader takes the lock over.
        with suppress(RuntimeError):
            self._bind(placement)
        return _Step.DONE

    async def _take(self, waiting: _Waiting) -> _Step | _HeldBy:
        """Look at the lock, and take it if it is free. Raises GivenUp.

        A lock that an earlier write took, whose answer was lost, is written again with the present
        time.
        """
        placement = waiting.placement
        check_pod(placement, self._pod_of(placement.key))
        try:
            node = _node_of(await self._request("GET", NODES, placement.node))
            text = (node.metadata.annotations or {}).get(placement.lock, "")
            holder = await self._holder(placement, text)
            if holder is not None:
                return self._held(placement, text, holder)
            mine = lock_text(placement.namespace, placement.name, now_s=self._clock())
            waiting.sent.add(mine)
            await self._write(placement.node, node, placement.lock, mine)
        except ApiError as error:
            reason = str(error)
            self._check_refusal(placement, error)
            if error.status not in (401, 429):
                waiting.failures += 1
        except (Unreachable, msgspec.DecodeError) as error:
            reason = str(error)
            waiting.failures = 0
        else:
            if text and not text.endswith(f",{placement.namespace},{placement.name}"):
                self.counts.taken_over += 1
                _log.info("%s: taken over for pod %s", _about(placement, text), placement.key)
            return _Step.DONE
        if waiting.failures >= MOST_FAILURES:
            raise GivenUp(Why.FAILING, f"{_about(placement)}: {reason}")
        _log.info("%s: not taken yet for pod %s: %s", _about(placement), placement.key, reason)
        return _Step.AGAIN

    def _check_refusal(self, placement: Placement, error: ApiError) -> None:
        """Return if another try may succeed. Raises GivenUp."""
        message = f"{_about(placement)}: {error.message}"
        if error.forbidden:
            message += f"; the right is in {MANIFEST}"
            raise GivenUp(Why.FORBIDDEN, message) from None
        if error.not_found:
            raise GivenUp(Why.CONFLICT, message) from None
        if error.status in (400, 422):
            raise GivenUp(Why.INVALID, message) from None

    async def _holder(self, placement: Placement, text: str) -> NodeLock | None:
        """Return the lock of another pod, None if the lock can be taken."""
        if not text:
            return None
        lock = parse_lock(text)
        if lock is None:
            _log.warning("%s: the text is not a lock, and does not count", _about(placement, text))
            return None
        if lock.pod == placement.key:
            return None
        if any(text in sent for sent in self._sent.values()):
            # Its binding has no outcome yet, however long the API server has been away.
            return lock
        seen, since = self._seen.get((placement.node, placement.lock), ("", 0.0))
        unchanged_s = self._steady() - since if seen == text else 0.0
        if max(self._clock() - lock.taken_s, unchanged_s) > LOCK_SECONDS:
            return None
        if lock.pod and not await self._waits_for_devices(lock, placement.node):
            return None
        return lock

    async def _waits_for_devices(self, lock: NodeLock, node: str) -> bool:
        """Return whether the pod of a lock exists, has not ended, and is not on another node.

        A pod that the cache does not show like this is read: the cache may be late.
        """
        known = self._pod_of(lock.pod)
        if known is not None and _may_hold(known.spec.node_name, known.status.phase, node):
            return True
        try:
            raw = await self._request("GET", PODS, lock.name, namespace=lock.namespace)
        except ApiError as error:
            if error.not_found:
                return False
            raise
        pod = _pod_of(raw)
        return _may_hold(pod.spec.node_name, pod.status.phase, node)

    def _held(self, placement: Placement, text: str, lock: NodeLock) -> _HeldBy:
        """Return who holds a lock, as long as it is worth waiting. Raises GivenUp."""
        key = (placement.node, placement.lock)
        now = self._steady()
        if self._seen.get(key, ("", 0.0))[0] != text:
            self._seen = {
                each: seen for each, seen in self._seen.items() if now - seen[1] <= 2 * LOCK_SECONDS
            }
            self._seen[key] = text, now
        waited = now - self._seen[key][1]
        if waited >= self._held_s and self._queued(placement, lock.pod) is None:
            holder = f"pod {lock.pod}" if lock.pod else "a pod that it does not name"
            message = f"{_about(placement, text)}: held until {holder} has its devices"
            raise GivenUp(Why.LOCKED, message)
        return _HeldBy(lock.pod)

    def _give_up(self, waiting: _Waiting, refused: Refused) -> None:
        self.counts.refused += 1
        if waiting.sent:
            # The answer to a write may be the one that was lost.
            self._release(waiting.placement, frozenset(waiting.sent))
        try:
            self._refuse(waiting.placement, refused)
        except Exception:  # noqa: BLE001 - the other placements go on
            self.faults.note("taking an outcome", about=waiting.placement.key)

    # --- releasing -----------------------------------------------------------------------------

    def _release(self, placement: Placement, texts: frozenset[str]) -> None:
        task = asyncio.create_task(self._remove(placement, texts))
        releases = self._releases.setdefault(placement.node, set())
        releases.add(task)
        task.add_done_callback(lambda done: self._released(placement.node, done))

    def _released(self, node: str, task: asyncio.Task[None]) -> None:
        self._releases[node].discard(task)
        if not self._releases[node]:
            del self._releases[node]

    async def _remove(self, placement: Placement, texts: frozenset[str]) -> None:
        """Remove a lock with one of these texts, until that is certain or the lock is stale."""
        end = self._steady() + LOCK_SECONDS
        pauses = Pauses()
        while self._steady() < end:
            try:
                node = _node_of(await self._request("GET", NODES, placement.node))
                if (node.metadata.annotations or {}).get(placement.lock, "") not in texts:
                    return
                await self._write(placement.node, node, placement.lock, None)
                self.counts.released += 1
                return
            except ApiError as error:
                if error.not_found:
                    return
                reason = str(error)
                if error.status in (400, 403, 422):
                    break
            except (Unreachable, msgspec.DecodeError) as error:
                reason = str(error)
            await pauses.rest()
        else:
            return
        _log.warning("%s: not removed for pod %s: %s", _about(placement), placement.key, reason)

    # --- requests ------------------------------------------------------------------------------

    async def _write(self, name: str, node: _Node, key: str, text: str | None) -> None:
        body: dict[str, Any] = {
            "metadata": {
                "resourceVersion": node.metadata.resource_version,
                "annotations": {key: text},
            }
        }
        await self._request("PATCH", NODES, name, body=msgspec.json.encode(body))

    async def _request(
        self,
        method: str,
        resource: Resource,
        name: str,
        *,
        namespace: str = "",
        body: bytes | None = None,
    ) -> bytes:
        path = resource.path(namespace=namespace, name=name)
        async with self._gate:
            if body is None:
                # Without a resourceVersion the server reads from etcd, behind every write.
                return await self._client.request(method, path, tries=1)
            return await self._client.request(
                method, path, body=body, content_type=MERGE_PATCH, tries=1
            )


def _may_hold(pod_node: str | None, phase: str | None, node: str) -> bool:
    """Return whether a pod on `pod_node`, "" for none yet, may wait for devices of `node`."""
    return pod_node in (None, "", node) and phase not in ("Succeeded", "Failed")


def _about(placement: Placement, text: str = "") -> str:
    return f"lock {placement.lock} of node {placement.node}" + (f" ({text[:200]})" if text else "")
