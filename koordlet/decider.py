"""Deciding, watched: timing of each policy, faults as events, site policies held in bounds.

Both callers of the engine go through here: the hooks (from the event loop) and the reconciler (from
its thread). Counting is cheap and lock-free on each side; `koordlet.metrics` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from hooks.claim import Claimed
from hooks.decision import Decision
from hooks.engine import Engine, Guard
from hooks.policy import ClaimFunction
from hooks.subject import ContainerSubject, Pod, PodSubject, SandboxSubject, Subject
from koordlet.events import Events, Severity
from nri_plugin.statistics import Histogram

BOUNDS_MS: tuple[float, ...] = tuple(0.01 * 4**power for power in range(8))
"""Upstream's buckets of hook durations, in milliseconds (koordlet.md 23.2)."""


class Stage(StrEnum):
    """When a decision is made; upstream's stage names, and the reconciler."""

    RUN_POD_SANDBOX = "PreRunPodSandbox"
    CREATE_CONTAINER = "PreCreateContainer"
    UPDATE_CONTAINER = "PreUpdateContainerResources"
    SYNCHRONIZE = "Synchronize"
    RECONCILE = "Reconcile"


TimingKey = tuple[str, str, bool]
"""policy, stage, succeeded."""


class Decider:
    """Decides with the given engine and notes what happened. One for each thread."""

    def __init__(self, events: Events, *, site_guard: Guard | None = None) -> None:
        self._events = events
        self._site_guard = site_guard
        self._stage = Stage.RECONCILE
        self.site_names: frozenset[str] = frozenset()
        self.timings: dict[TimingKey, Histogram] = {}
        self.faults = 0

    def decide(
        self,
        engine: Engine,
        subject: Subject,
        stage: Stage,
        *,
        later: Callable[[Callable[[], None]], Any] | None = None,
    ) -> Decision:
        """Return the engine's decision. later: runs the report of faults after the reply."""
        self._stage = stage
        decision = engine.decide(subject, self.guard)
        if decision.faults:
            self.faults += len(decision.faults)
            if later is None:
                self.report(subject, decision)
            else:
                later(lambda: self.report(subject, decision))
        return decision

    def guard(
        self, policy: str, function: ClaimFunction, rule: Any, subject: Subject
    ) -> Iterable[Claimed]:
        """Call a policy: timed, and bounded when it is a site's."""
        started = time.perf_counter()
        succeeded = False
        try:
            if policy in self.site_names and self._site_guard is not None:
                claims: Iterable[Claimed] = self._site_guard(policy, function, rule, subject)
            else:
                # A generator does its work here, not in the engine's loop.
                claims = tuple(function(rule, subject))
            succeeded = True
            return claims
        finally:
            key = (policy, self._stage.value, succeeded)
            histogram = self.timings.get(key)
            if histogram is None:
                histogram = self.timings[key] = Histogram(BOUNDS_MS)
            histogram.observe((time.perf_counter() - started) * 1000)

    def report(self, subject: Subject, decision: Decision) -> None:
        """Leave an event for each fault of a decision."""
        for fault in decision.faults:
            if fault.input_error:
                self._events.add("bad-input", name_of(subject), f"{fault.policy}: {fault.message}")
            else:
                self._events.add(
                    "policy-fault",
                    name_of(subject),
                    f"policy {fault.policy} failed and claims nothing here: {fault.message}",
                    severity=Severity.ERROR,
                )


def name_of(subject: Subject) -> str:
    """Return how people call a subject."""
    if isinstance(subject, ContainerSubject):
        return f"{subject.pod.obj} container {subject.name}"
    if isinstance(subject, PodSubject | SandboxSubject):
        return subject.pod.obj
    return subject.key


def pod_of(subject: Subject) -> Pod | None:
    """Return the pod that a subject belongs to, if any."""
    if isinstance(subject, ContainerSubject | PodSubject | SandboxSubject):
        return subject.pod
    return None
