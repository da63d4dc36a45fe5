"""How evictions are reported: the history in status, metrics, the audit log, and events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from koordlet.qos.eviction.kubelet_restarts import restarts_containers
from koordlet.qos.eviction.means import EvictionApi
from koordlet.qos.eviction.round import Choice
from koordlet.qos.strategy import Note
from service.events import Events

SUCCESS: Final = "evictPodSuccess"
FAILURE: Final = "evictPodFail"
"""Upstream's reasons of Kubernetes events."""
REASON: Final = "evicted"
"""Upstream's reason in metrics and the audit log."""
DRY_RUN: Final = "evictionDryRun"
"""Our reason in the audit log for an eviction that a dry run left out."""

_DETAIL_S: Final = 300.0
"""How long a pod's series of the metric stays after its last change; upstream's."""
_HISTORY: Final = 256
"""Evictions that status shows. Chosen: two full nodes' worth of pods."""


class Evicted(msgspec.Struct, frozen=True):
    """One line of the history. at: seconds since the epoch. means: api, cri or dry-run."""

    at: float
    pod: str
    gate: str
    means: str
    outcome: str
    message: str


class Reports:
    """The reports of one evictor. Belongs to the event loop.

    api: returns the connected API server, or None where there is none.
    note: takes a line of the audit log.
    """

    def __init__(
        self,
        *,
        api: Callable[[], EvictionApi | None],
        events: Events,
        note: Callable[[Note], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._events = events
        self._note = note
        self._clock = clock
        self._wall = wall
        self.history: deque[Evicted] = deque(maxlen=_HISTORY)
        self.evictions = 0
        """Pods evicted since the start."""
        self._details: dict[tuple[str, str], tuple[int, float]] = {}
        """(namespace, name) -> (evictions of the pod, when the last was)."""
        self._failures: dict[tuple[str, str], tuple[float, str]] = {}
        """(uid, gate) -> (when, message) of the last event about a failure."""

    def details(self) -> Mapping[tuple[str, str], int]:
        """Return (namespace, name) -> evictions of the pod, of the last five minutes."""
        now = self._clock()
        for key in [key for key, (_, at) in self._details.items() if now - at > _DETAIL_S]:
            del self._details[key]
        return {key: count for key, (count, _) in self._details.items()}

    def keep(self, uids: Collection[str]) -> None:
        """Drop the failures of pods that have left; these pods are on the node."""
        self._failures = {key: each for key, each in self._failures.items() if key[0] in uids}

    def would_go(self, choice: Choice) -> None:
        """Report an eviction that a dry run leaves out."""
        message = f"dry run: would {_message(choice)}; {choice.shortage.numbers}"
        self._report(choice, "dry-run", "would be evicted", message, reason=DRY_RUN)

    def goes(self, choice: Choice, means: str) -> None:
        """Report an eviction."""
        pod = choice.victim.pod
        self.evictions += 1
        key = pod.namespace, pod.name
        self._details[key] = self._details.get(key, (0, 0.0))[0] + 1, self._clock()
        message = f"{_message(choice)}; {_means_text(choice, means)}{choice.shortage.numbers}"
        self._report(choice, means, REASON, message)
        if (api := self._api()) is not None:
            api.warn(pod, SUCCESS, message)

    def fails(self, choice: Choice, means: str, error: str) -> None:
        """Report an eviction that did not happen; an event repeats the first one's words."""
        pod, gate = choice.victim.pod, choice.shortage.gate
        now = self._clock()
        at, message = self._failures.get((pod.uid, gate), (now, ""))
        new = f"{_message(choice)}, error {error}"
        if now - at >= _DETAIL_S or not message.startswith(new):
            at, message = now, f"{new}; {choice.shortage.numbers}"
            self._failures[pod.uid, gate] = at, message
            self._report(choice, means, "failed", message)
        if (api := self._api()) is not None:
            api.warn(pod, FAILURE, message)

    def _report(
        self, choice: Choice, means: str, outcome: str, message: str, *, reason: str = REASON
    ) -> None:
        pod = choice.victim.pod
        self.history.append(
            Evicted(self._wall(), pod.obj, choice.shortage.gate, means, outcome, message)
        )
        self._events.add("eviction", pod.obj, message)
        self._note(Note(0, reason, message, f"{pod.namespace}/{pod.name}"))


def _message(choice: Choice) -> str:
    """Return upstream's text of an event."""
    pod = choice.victim.pod
    return (
        f"evict Pod:{pod.namespace}/{pod.name}, reason: {REASON}, message: trigger by koordlet"
        f" feature {choice.shortage.gate}, kill pod: {pod.name}"
    )


def _means_text(choice: Choice, means: str) -> str:
    if means != "cri":
        return ""
    pod = choice.victim.pod
    again = f", which kubelet will start again (restartPolicy {pod.restart_policy})"
    return f"stopped its containers{again if restarts_containers(pod) else ''}; "
