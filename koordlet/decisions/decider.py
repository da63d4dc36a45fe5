"""Decides with the engine, times each policy, reports faults as events, and limits site policies.

The hooks (on the event loop) and the reconciler (in its thread) have a decider each, so counting
needs no lock. `koordlet.exposition.metrics` reads the counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

from apis.errors import InputError
from hooks.decision import Decision, Fault
from hooks.engine import Engine, Guard, Watch
from hooks.stage import RepairKey, Stage, TimingKey
from hooks.standing import NOTHING_STANDS, Standing, still_lifted, under
from hooks.subject import ContainerSubject, Pod, PodSubject, SandboxSubject, Subject
from service.events import Events, Severity
from service.histogram import Histogram

BOUNDS_MS: tuple[float, ...] = tuple(0.01 * 4**power for power in range(8))
"""Upstream's buckets of hook durations, in milliseconds: docs/facts/koordlet.md, "Metrics"."""


class Decider:
    """Decides with a given engine, and counts. One for each thread.

    standing: the strategies' claims in force; replaced as a whole, by any thread. Only `decide`
        uses it: the reconciler composes the standing claims into decisions itself.
    """

    def __init__(
        self,
        events: Events,
        *,
        site_guard: Guard | None = None,
        later: Callable[[Callable[[], None]], Any] | None = None,
    ) -> None:
        """later: defers the counting until after the reply of a hook; None: count at once."""
        self._events = events
        self._site_guard = site_guard
        self._later = later
        self.site_names: frozenset[str] = frozenset()
        self.standing: Standing = NOTHING_STANDS
        self._newest: Standing = NOTHING_STANDS
        self._standing_lock = threading.Lock()
        self.timings: dict[TimingKey, Histogram] = {}
        self.repairs: dict[RepairKey, Histogram] = {}

    def stand(self, standing: Standing) -> None:
        """Have these claims in force from now on. Any thread.

        New containers stay without a quota of their own until `followed`, see `still_lifted`.
        """
        with self._standing_lock:
            self._newest = standing
            self.standing = still_lifted(self.standing, standing)

    def followed(self, standing: Standing) -> None:
        """The kernel has what follows from these claims. Any thread."""
        with self._standing_lock:
            if standing is self._newest:
                self.standing = standing

    def decide(self, engine: Engine, subject: Subject, stage: Stage) -> Decision:
        """Return the engine's decision, for a runtime that waits."""
        standing = self.standing
        claims = () if standing is NOTHING_STANDS else standing.of(subject)
        known = engine.known(subject)
        if known is not None:
            return under(known, claims, subject) if claims else known
        watch = self._watch()
        decision = engine.decide(subject, watch, standing=claims)

        def count() -> None:
            self._count(watch, decision, subject, stage)

        if watch.calls or decision.faults:
            if self._later is None:
                count()
            else:
                self._later(count)
        return decision

    def repair(self, engine: Engine, subject: Subject, before: Decision | None) -> Decision:
        """Return the policies' decision, for the reconciler. before: see `Engine.decide`."""
        watch = self._watch()
        decision = engine.decide(subject, watch, before=before)
        faulty = self._count(watch, decision, subject, Stage.RECONCILE)
        for policy, took_s, claims in watch.calls:
            failed = policy in faulty
            resources = {c.resource.value for c in claims if not isinstance(c, InputError)}
            for resource in resources or ({""} if failed else ()):
                _observe(self.repairs, (subject.level.value, resource, not failed), took_s)
        return decision

    def _watch(self) -> Watch:
        guard = self._site_guard
        return Watch([], dict.fromkeys(self.site_names, guard) if guard is not None else {})

    def _count(
        self, watch: Watch, decision: Decision, subject: Subject, stage: Stage
    ) -> Collection[str]:
        """Count the calls and report the faults; return the policies that have some."""
        faulty = {fault.policy for fault in decision.faults}
        for policy, took_s, _ in watch.calls:
            _observe(self.timings, (policy, stage, policy not in faulty), took_s)
        for fault in decision.faults:
            self._report(fault, subject)
        return faulty

    def _report(self, fault: Fault, subject: Subject) -> None:
        """Add an event for a fault."""
        kind, severity = "bad-input", Severity.WARNING
        message = f"{fault.policy}: {fault.message}"
        if not fault.input_error:
            kind, severity = "policy-fault", Severity.ERROR
            message = f"{fault.policy} failed and claims nothing here: {fault.message}"
        self._events.add(kind, name_of(subject), message, severity=severity)


def _observe(table: dict[tuple[str, str, bool], Histogram], key: TimingKey, took_s: float) -> None:
    histogram = table.get(key)
    if histogram is None:
        histogram = table[key] = Histogram(BOUNDS_MS)
    histogram.observe(took_s * 1000)


def name_of(subject: Subject) -> str:
    """Return a subject's name for people."""
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
