"""Deciding, watched: timing of each policy, faults as events, site policies held in bounds.

Both callers of the engine go through here: the hooks (from the event loop) and the reconciler (from
its thread). Counting is cheap and lock-free on each side; `koordlet.metrics` reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from apis.errors import InputError, InputErrors
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

RepairKey = tuple[str, str, bool]
"""level, resource, succeeded."""


class Decider:
    """Decides with the given engine and notes what happened. One for each thread."""

    def __init__(
        self,
        events: Events,
        *,
        site_guard: Guard | None = None,
        later: Callable[[Callable[[], None]], Any] | None = None,
    ) -> None:
        """later: runs the report of a fault at a better time; None: at once."""
        self._events = events
        self._site_guard = site_guard
        self._later = later
        self._stage = Stage.RECONCILE
        self.site_names: frozenset[str] = frozenset()
        self.timings: dict[TimingKey, Histogram] = {}
        self.repairs: dict[RepairKey, Histogram] = {}
        self.faults = 0

    def decide(self, engine: Engine, subject: Subject, stage: Stage) -> Decision:
        """Return the engine's decision."""
        self._stage = stage
        return engine.decide(subject, self.guard)

    def guard(
        self, policy: str, function: ClaimFunction, rule: Any, subject: Subject
    ) -> Iterable[Claimed]:
        """Call a policy: timed, and bounded when it is a site's."""
        started = time.perf_counter()
        succeeded = False
        claims: Iterable[Claimed] = ()
        try:
            if policy in self.site_names and self._site_guard is not None:
                claims = self._site_guard(policy, function, rule, subject)
            else:
                # A generator does its work here, not in the engine's loop.
                claims = tuple(function(rule, subject))
            succeeded = True
            for claim in claims:
                if isinstance(claim, InputError):
                    succeeded = False
                    self._tell(policy, subject, claim)
            return claims
        except Exception as error:
            self._tell(policy, subject, error)
            raise
        finally:
            took_ms = (time.perf_counter() - started) * 1000
            _observe(self.timings, (policy, self._stage.value, succeeded), took_ms)
            if self._stage is Stage.RECONCILE:
                resources = {c.resource.value for c in claims if not isinstance(c, InputError)}
                for resource in resources or ({""} if not succeeded else ()):
                    _observe(self.repairs, (subject.level.value, resource, succeeded), took_ms)

    def _tell(self, policy: str, subject: Subject, error: Exception) -> None:
        """Leave an event for a fault, now or later."""
        self.faults += 1
        if isinstance(error, InputError | InputErrors):
            message, severity = f"{policy}: {error}", Severity.WARNING
            kind = "bad-input"
        else:
            message = f"{policy} failed and claims nothing here: {type(error).__name__}: {error}"
            kind, severity = "policy-fault", Severity.ERROR

        def tell() -> None:
            self._events.add(kind, name_of(subject), message, severity=severity)

        if self._later is None:
            tell()
        else:
            self._later(tell)


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
