"""Follows each workload from its creation until it is scheduled or deleted, for metrics.

A workload is a pod without a gang, or a group of gangs that are bound together. A preemption for
it begins a cycle. The cycle ends when all victims are gone; another result of the workload, or its
end, interrupts it. Between two scheduling events the time is measured, unless scheduling gates held
the workload meanwhile. What takes longer than the settings have it is logged.

docs/facts/scheduler.md, "Workload auditor".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from apis.errors import printable
from apis.qos import priority_class
from cluster.scheduler.auditing.events import (
    ADMITTED,
    CREATE,
    GANG_DELETED,
    GANG_SCHEDULED,
    GATED,
    MIN_MEMBER,
    NOMINATED,
    POD_DELETED,
    POD_SCHEDULED,
    PREEMPT_FAILURE,
    SCHEDULE_FAILURE,
    SCHEDULED,
    VICTIM_DELETING,
    VICTIMS_DELETED,
)
from cluster.scheduler.auditing.metrics import AuditorMetrics, Labels
from cluster.scheduler.configuration.auditing import AuditorSettings
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape

_log = logging.getLogger(__name__)

_FAILURES: Final = frozenset({PREEMPT_FAILURE, SCHEDULE_FAILURE})
_RESULTS: Final = frozenset({*_FAILURES, NOMINATED, SCHEDULED})


@dataclass(slots=True, eq=False)
class _Workload:
    """What is known about one. Times are the clock's.

    attempts, recorded: how many attempts began, and the last one whose result is known.
    nominated_at: when the cycle under way began. valid: whether the last preemption still counts as
    made for something. retries: attempts since then that found its victims still there. freed_at:
    when all were gone, until the next result. event_at: of the last scheduling event. victims: UIDs
    of those that are waited for.
    """

    name: str
    labels: Labels
    gang: bool
    gated: bool = False
    attempts: int = 0
    recorded: int = 0
    nominated_at: float | None = None
    valid: bool = False
    retries: int = 0
    freed_at: float | None = None
    event_at: float | None = None
    victims: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)


class WorkloadAuditor:
    """All workloads that wait to be scheduled.

    key: of a pod its UID, of gangs a text that the caller chooses.
    """

    def __init__(
        self, metrics: AuditorMetrics, settings: AuditorSettings, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._settings = settings
        self._clock = clock
        self._workloads: dict[str, _Workload] = {}
        self._waiting_for: dict[str, set[str]] = {}
        """UID of a victim that is not gone -> keys of the workloads that wait for its end."""

    def __len__(self) -> int:
        return len(self._workloads)

    @property
    def victims(self) -> int:
        """How many victims are not gone yet."""
        return len(self._waiting_for)

    # --- beginning and end ---------------------------------------------------------------------

    def add(self, key: str, name: str, pod: PendingPod[PodShape], *, gang: bool = False) -> None:
        """Follow a workload from now on; nothing changes for one that is followed already.

        pod: its first pod, whose labels and priority count for the metrics.
        """
        if key in self._workloads:
            return
        with self._metrics.timed("AddGangGroup" if gang else "AddPod"):
            shape = pod.shape
            labels = dict(shape.labels)
            taken = self._metrics.take(priority_class(labels, pod.priority).value, labels)
            workload = self._workloads[key] = _Workload(name, taken, gang)
            workload.counts[CREATE] = 1

    def delete(self, key: str) -> None:
        """End with a workload that is gone before it was scheduled; others are ignored."""
        workload = self._workloads.get(key)
        if workload is not None:
            with self._metrics.timed("DeleteGangGroup" if workload.gang else "DeletePod"):
                self._end(key, workload, GANG_DELETED if workload.gang else POD_DELETED)

    def scheduled(self, key: str) -> None:
        """End with a workload that is scheduled; others are ignored."""
        workload = self._workloads.get(key)
        if workload is not None:
            with self._metrics.timed(_result(workload)):
                self._note(workload, SCHEDULED)
                self._end(key, workload, GANG_SCHEDULED if workload.gang else POD_SCHEDULED)

    # --- between them --------------------------------------------------------------------------

    def gate(self, key: str, gated: bool) -> None:
        """Record whether scheduling gates hold the workload."""
        workload = self._workloads.get(key)
        if workload is not None and workload.gated != gated:
            with self._metrics.timed("RecordGangGating" if workload.gang else "RecordPodGating"):
                workload.gated = gated
                self._note(workload, GATED if gated else ADMITTED)

    def complete(self, key: str) -> None:
        """Record that a gang has as many pods as have to be placed together."""
        workload = self._workloads.get(key)
        if workload is not None:
            with self._metrics.timed("RecordGangGroup"):
                self._note(workload, MIN_MEMBER)

    def attempt(self, key: str) -> None:
        """Record that an attempt begins."""
        workload = self._workloads.get(key)
        if workload is not None:
            with self._metrics.timed("RecordAttemptPod"):
                workload.attempts += 1

    def result(self, key: str, event: str) -> None:
        """Record how an attempt ended without a node. A failure is none if a search for victims
        has given the attempt its result."""
        workload = self._workloads.get(key)
        if workload is None:
            return
        with self._metrics.timed(_result(workload)):
            if event == SCHEDULE_FAILURE and workload.recorded >= workload.attempts:
                return
            workload.recorded = workload.attempts
            self._note(workload, event)

    # --- preemption ----------------------------------------------------------------------------

    def searched(self, key: str, event: str) -> None:
        """Record the result of a search for victims that found none to evict."""
        workload = self._workloads.get(key)
        if workload is not None:
            with self._metrics.timed("RecordDiagnosis"):
                workload.recorded = workload.attempts
                self._note(workload, event)

    def preempted(self, key: str, victims: Iterable[str]) -> None:
        """Record a preemption for a workload. victims: UIDs of those that are not gone."""
        workload = self._workloads.get(key)
        if workload is None:
            return
        with self._metrics.timed("RecordDiagnosis"):
            workload.recorded = workload.attempts
            self._note(workload, NOMINATED)
            self._wait_no_more(key, workload)
            workload.victims.update(victims)
            for uid in workload.victims:
                self._waiting_for.setdefault(uid, set()).add(key)
            if not workload.victims:
                self._note(workload, VICTIMS_DELETED)

    def gone(self, uid: str) -> None:
        """Record that a pod is gone, which may be a victim."""
        for key in self._waiting_for.pop(uid, ()):
            workload = self._workloads[key]
            workload.victims.discard(uid)
            if not workload.victims:
                with self._metrics.timed("RecordGangGroup" if workload.gang else "RecordPod"):
                    self._note(workload, VICTIMS_DELETED)

    def stays(self, uid: str) -> None:
        """Record that a victim is not evicted after all: those for which it was are freed by no
        end of others."""
        for key in tuple(self._waiting_for.get(uid, ())):
            self._wait_no_more(key, self._workloads[key])

    def _wait_no_more(self, key: str, workload: _Workload) -> None:
        for uid in workload.victims:
            keys = self._waiting_for[uid]
            keys.discard(key)
            if not keys:
                del self._waiting_for[uid]
        workload.victims.clear()

    # --- what follows --------------------------------------------------------------------------

    def _note(self, workload: _Workload, event: str) -> None:
        workload.counts[event] += 1
        now, labels = self._clock(), workload.labels
        if event == NOMINATED and workload.counts[NOMINATED] > 1:
            self._metrics.repeated.labels(*labels).inc()
            self._alert(workload, event, f"preempts for time {workload.counts[event]}")
        if workload.valid and (event == NOMINATED or event in _FAILURES):
            workload.valid = False
            self._metrics.invalidated.labels(*labels).inc()
            self._alert(workload, event, "had victims evicted without being scheduled")
        if event in _RESULTS and workload.freed_at is not None:
            waited, workload.freed_at = now - workload.freed_at, None
            self._metrics.rescheduled.labels(*labels).observe(waited)
            if waited > self._settings.victim_reschedule_s:
                self._alert(workload, event, f"had no result for {waited:.1f} s after its victims")
        if event in _RESULTS or event == VICTIMS_DELETED:
            self._end_cycle(workload, event, now)
        if event == NOMINATED:
            workload.valid = True
            workload.nominated_at = now
            workload.retries = 0
        elif event == VICTIM_DELETING:
            workload.retries += 1
        elif event == VICTIMS_DELETED:
            workload.freed_at = now
        elif event == GATED:
            # It cannot be tried, so no result is to be expected.
            workload.freed_at = None
        self._measure_interval(workload, event, now)

    def _measure_interval(self, workload: _Workload, event: str, now: float) -> None:
        if event == VICTIMS_DELETED:
            # No attempt leads to it.
            return
        if event == GATED:
            workload.event_at = None
            return
        if event not in (ADMITTED, MIN_MEMBER) and workload.event_at is not None:
            interval = now - workload.event_at
            self._metrics.intervals.labels(*workload.labels).observe(interval)
            if interval > self._settings.event_interval_s:
                self._alert(workload, event, f"had no scheduling event for {interval:.1f} s")
        workload.event_at = now

    def _end_cycle(self, workload: _Workload, event: str, now: float) -> None:
        if workload.nominated_at is None:
            return
        lasted, workload.nominated_at = now - workload.nominated_at, None
        ended = event == VICTIMS_DELETED
        family = self._metrics.victims_deleted if ended else self._metrics.interrupted
        family.labels(*workload.labels).observe(lasted)
        self._metrics.retries.labels(*workload.labels).observe(workload.retries)
        if workload.retries > self._settings.victim_deleting_retries:
            self._alert(workload, event, f"was tried {workload.retries} times beside victims")
        if lasted > self._settings.victim_deletion_s:
            what = "waited for its victims" if ended else "waited in vain for its victims"
            self._alert(workload, event, f"{what} for {lasted:.1f} s")

    def _end(self, key: str, workload: _Workload, outcome: str) -> None:
        self._wait_no_more(key, workload)
        labels = workload.labels
        if workload.nominated_at is not None:
            self._metrics.interrupted.labels(*labels).observe(self._clock() - workload.nominated_at)
            self._metrics.retries.labels(*labels).observe(workload.retries)
        for event, count in workload.counts.items():
            self._metrics.events.labels(*labels, event, outcome).observe(count)
        self._metrics.give_back(labels)
        del self._workloads[key]

    def _alert(self, workload: _Workload, event: str, what: str) -> None:
        kind = "gang group" if workload.gang else "pod"
        # The name of a gang group comes from annotations of pods.
        name = printable(workload.name)
        _log.info("workload auditor: ALERT: %s %s %s (%s)", kind, name, what, event)


def _result(workload: _Workload) -> str:
    return "RecordGangScheduleResult" if workload.gang else "RecordPodScheduleResult"
