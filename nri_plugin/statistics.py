"""What the transport counts: plain numbers that the daemon exports as metrics.

One `Statistics` lives as long as the daemon; connections come and go below it. Nothing here knows
how numbers are exported.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from service.histogram import Histogram

LATENCY_BOUNDS_S: Final = (
    0.00005,
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.05,
    0.2,
    1.0,
    2.0,
)


_MOST_OBSERVED: Final = 512
"""Latencies that wait to be sorted in, which takes 0.2 ms then. A scrape finds fewer, as a rule."""


class State(StrEnum):
    """Where the one connection stands. Only SYNCED protects: new containers are adjusted.

    UNLISTED: configured, and the runtime's list of containers is overdue.
    """

    DISCONNECTED = "disconnected"
    DIALING = "dialing"
    REGISTERING = "registering"
    CONFIGURED = "configured"
    UNLISTED = "unlisted"
    SYNCED = "synced"


class Missed(StrEnum):
    """Why a container did not get, through the runtime, what was decided for it."""

    LATE = "late"  # the runtime had stopped waiting
    FAULT = "fault"  # the handler failed
    SUPERSEDED = "superseded"  # the connection was no longer the live one


class Statistics:
    """Counters of the transport.

    adjustments: containers whose creation was adjusted; updates: container updates in replies.
    missed: adjustments and updates that the runtime did not get, by reason.
    created_while_away: containers found by a Synchronize that this daemon had not seen created,
        although it had been connected before.
    truncated_synchronizations: replies that left updates to the reconciler: no time or no room.
    unusable_values: decided values, or whole answers, that could not be put into a reply.
    refused: CRI calls that the handler made fail.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._since = self._started
        self._in_state: dict[State, float] = dict.fromkeys(State, 0.0)
        self.state = State.DISCONNECTED
        self._latency: dict[str, Histogram] = {}
        self._observed: list[tuple[str, float]] = []
        self.adjustments = 0
        self.updates = 0
        self.missed: Counter[Missed] = Counter()
        self.refused = 0
        self.handler_faults = 0
        self.unusable_values = 0
        self.dials = 0
        self.connections = 0
        self.disconnections = 0
        self.synchronizations = 0
        self.truncated_synchronizations = 0
        self.created_while_away = 0

    def enter(self, state: State) -> None:
        """Note a change of state."""
        now = self._clock()
        self._in_state[self.state] += now - self._since
        self._since = now
        self.state = state

    def seconds_in(self, state: State) -> float:
        """Total time spent in `state` so far."""
        running = self._clock() - self._since if state is self.state else 0.0
        return self._in_state[state] + running

    @property
    def in_state_s(self) -> float:
        """Time since the last change of state."""
        return self._clock() - self._since

    @property
    def connected_s(self) -> float:
        """Total time with a live, synchronized connection."""
        return self.seconds_in(State.SYNCED)

    @property
    def unprotected_s(self) -> float:
        """Total time in which containers could be created without being adjusted."""
        return self._clock() - self._started - self.connected_s

    def observe(self, method: str, seconds: float) -> None:
        """Count one hook's latency. The reply waits for this: most are sorted in when read."""
        self._observed.append((method, seconds))
        if len(self._observed) >= _MOST_OBSERVED:
            self._sort_in()

    @property
    def hook_latency(self) -> Mapping[str, Histogram]:
        """By RPC, from the decoded envelope to the encoded reply."""
        self._sort_in()
        return self._latency

    def _sort_in(self) -> None:
        observed, self._observed = self._observed, []
        for method, seconds in observed:
            histogram = self._latency.get(method)
            if histogram is None:
                histogram = self._latency[method] = Histogram(LATENCY_BOUNDS_S)
            histogram.observe(seconds)
