"""Deciding, watched: timing of each policy, faults as events, site policies held in bounds.

Both callers of the engine go through here: the hooks (from the event loop) and the reconciler (from
its thread). Counting is cheap and lock-free on each side; `koordlet.exposition.metrics` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from apis.errors import InputError
from hooks.claim import Claimed
from hooks.decision import Decision, Fault
from hooks.engine import Engine, Guard, fault_of
from hooks.policy import ClaimFunction
from hooks.subject import ContainerSubject, Pod, PodSubject, SandboxSubject, Subject
from koordlet.events import Events, Severity
from service.histogram import Histogram

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

RepairKey = tuple[str, str, bool]
"""level, resource, succeeded."""


class _Call(NamedTuple):
    policy: str
    took_ms: float


class Decider:
    """Decides with the given engine and notes what happened. One for each thread."""

    def __init__(
        self,
        events: Events,
        *,
        site_guard: Guard | None = None,
        later: Callable[[Callable[[], None]], Any] | None = None,
    ) -> None:
        """later: counts and reports a hook's decision at a better time; None: at once."""
        self._events = events
        self._site_guard = site_guard
        self._later = later
        self._calls: list[_Call] = []
        self.site_names: frozenset[str] = frozenset()
        self.timings: dict[TimingKey, Histogram] = {}
        self.repairs: dict[RepairKey, Histogram] = {}

    def decide(self, engine: Engine, subject: Subject, stage: Stage) -> Decision:
        """Return the engine's decision, for a runtime that waits."""
        calls: list[_Call] = []
        self._calls = calls
        decision = engine.decide(subject, self._call)

        def count() -> None:
            faulty = {fault.policy for fault in decision.faults}
            for policy, took_ms in calls:
                _observe(self.timings, (policy, stage, policy not in faulty), took_ms)
            for fault in decision.faults:
                self._tell(fault, subject)

        if calls or decision.faults:
            if self._later is None:
                count()
            else:
                self._later(count)
        return decision

    def guard(
        self, policy: str, function: ClaimFunction, rule: Any, subject: Subject
    ) -> Iterable[Claimed]:
        """Call a policy for the reconciler, whose decisions the engine makes by itself."""
        calls: list[_Call] = []
        self._calls = calls
        faults: list[Fault] = []
        claims: Iterable[Claimed] = ()
        try:
            claims = self._call(policy, function, rule, subject)
            faults += (fault_of(policy, claim) for claim in claims if isinstance(claim, InputError))
            return claims
        except Exception as error:
            faults.append(fault_of(policy, error))
            raise
        finally:
            took_ms = calls[0].took_ms
            _observe(self.timings, (policy, Stage.RECONCILE, not faults), took_ms)
            resources = {c.resource.value for c in claims if not isinstance(c, InputError)}
            for resource in resources or ({""} if faults else ()):
                _observe(self.repairs, (subject.level.value, resource, not faults), took_ms)
            for fault in faults:
                self._tell(fault, subject)

    def _call(
        self, policy: str, function: ClaimFunction, rule: Any, subject: Subject
    ) -> Iterable[Claimed]:
        """Call a policy: timed, and bounded when it is a site's."""
        started = time.perf_counter()
        try:
            if policy in self.site_names and self._site_guard is not None:
                return self._site_guard(policy, function, rule, subject)
            # A generator does its work here, not in the engine's loop.
            return tuple(function(rule, subject))
        finally:
            self._calls.append(_Call(policy, (time.perf_counter() - started) * 1000))

    def _tell(self, fault: Fault, subject: Subject) -> None:
        """Leave an event for a fault."""
        kind, severity = "bad-input", Severity.WARNING
        message = f"{fault.policy}: {fault.message}"
        if not fault.input_error:
            kind, severity = "policy-fault", Severity.ERROR
            message = f"{fault.policy} failed and claims nothing here: {fault.message}"
        self._events.add(kind, name_of(subject), message, severity=severity)


def _observe(table: dict[tuple[str, str, bool], Histogram], key: TimingKey, took_ms: float) -> None:
    histogram = table.get(key)
    if histogram is None:
        histogram = table[key] = Histogram(BOUNDS_MS)
    histogram.observe(took_ms)


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
