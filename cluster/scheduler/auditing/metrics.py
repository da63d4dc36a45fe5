"""Metrics of the workload auditor, by upstream's names, labels and buckets.

A series is kept for each set of label values. Values come from the labels of pods, so sets are
limited: a new set takes the place of one without a workload that is audited.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from cluster.exposition import Registry
from cluster.scheduler.auditing.events import EVENTS, OUTCOMES
from cluster.scheduler.configuration.auditing import EVENT_TYPE, OUTCOME, PRIORITY, MetricLabel

_PREFIX: Final = "scheduler_workload_auditor_"
_SECONDS: Final = tuple(0.1 * 2.0**power for power in range(15))
"""This and the following bounds are upstream's: 0.1 s to 27 min."""
_INTERVALS: Final = tuple(0.1 * 2.0**power for power in range(20))
_RETRIES: Final = tuple(float(number) for number in range(20))
_COUNTS: Final = tuple(float(number) for number in range(30))
_METHODS: Final = tuple(1e-6 * 4.0**power for power in range(10))

MOST_SETS: Final = 256
"""Sets of label values, of which each has some 10 to 50 series. Chosen: quotas or teams of a
cluster; with a label of ever-new values, a scrape stays below 300,000 lines."""
OVERFLOW: Final = "overflow"
"""The value of the configured labels where all sets have workloads that are audited."""
_LONGEST_VALUE: Final = 63
"""Of a label's value, in characters, as the API server has it."""

Labels = tuple[str, ...]
"""The priority class, then the values of the configured labels."""


class AuditorMetrics:
    """The nine families, and which sets of label values they have."""

    def __init__(self, registry: Registry, labels: Sequence[MetricLabel]) -> None:
        names = (PRIORITY, *(label.name for label in labels))
        self.repeated = registry.counter(
            f"{_PREFIX}repeated_preemptions_total",
            "Preemptions for a workload that was preempted for before.",
            *names,
        )
        self.invalidated = registry.counter(
            f"{_PREFIX}preemption_invalidations_total",
            "Preemptions after which the workload failed to be scheduled, or preempted again.",
            *names,
        )
        self.rescheduled = registry.histogram(
            f"{_PREFIX}victim_reschedule_duration_seconds",
            "From the end of all victims to the next result for the workload.",
            *names,
            bounds=_SECONDS,
        )
        self.retries = registry.histogram(
            f"{_PREFIX}preemption_victim_deleting_retries",
            "Attempts of a workload while the victims of one preemption ended.",
            *names,
            bounds=_RETRIES,
        )
        self.victims_deleted = registry.histogram(
            f"{_PREFIX}preemption_to_victim_deleted_seconds",
            "From a preemption to the end of all its victims.",
            *names,
            bounds=_SECONDS,
        )
        self.interrupted = registry.histogram(
            f"{_PREFIX}preemption_cycle_interrupted_seconds",
            "From a preemption to what ended the wait for its victims before they were gone.",
            *names,
            bounds=_SECONDS,
        )
        self.events = registry.histogram(
            f"{_PREFIX}scheduling_events_before_outcome",
            "How often each event happened to a workload until it was scheduled or deleted.",
            *names,
            EVENT_TYPE,
            OUTCOME,
            bounds=_COUNTS,
        )
        self.intervals = registry.histogram(
            f"{_PREFIX}scheduling_event_interval_seconds",
            "Between two scheduling events of a workload that waits in the queue.",
            *names,
            bounds=_INTERVALS,
        )
        self._methods = registry.histogram(
            f"{_PREFIX}record_method_duration_seconds",
            "Duration of a step of the auditor, by upstream's names of them.",
            "method",
            bounds=_METHODS,
        )
        self._keys = tuple(label.key for label in labels)
        self._sets: OrderedDict[Labels, int] = OrderedDict()
        """Set of label values -> count of the audited workloads that use it. The set that was taken
        most recently is the last one."""

    def __len__(self) -> int:
        return len(self._sets)

    def take(self, priority: str, labels: dict[str, str]) -> Labels:
        """Return the label values for a workload. labels: of its pod.

        They are its own until they are given back.
        """
        found = (priority, *(labels.get(key, "")[:_LONGEST_VALUE] for key in self._keys))
        if found not in self._sets and len(self._sets) >= MOST_SETS:
            unused = next((each for each, count in self._sets.items() if not count), None)
            if unused is None:
                return (priority, *(OVERFLOW for _ in self._keys))
            self._drop(unused)
        self._sets[found] = self._sets.get(found, 0) + 1
        self._sets.move_to_end(found)
        return found

    def give_back(self, labels: Labels) -> None:
        """Take back the label values of a workload that is audited no more."""
        if labels in self._sets:
            self._sets[labels] -= 1

    @contextmanager
    def timed(self, method: str) -> Iterator[None]:
        """Measure a step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._methods.labels(method).observe(time.perf_counter() - began)

    def _drop(self, labels: Labels) -> None:
        del self._sets[labels]
        self.repeated.remove(*labels)
        self.invalidated.remove(*labels)
        for family in (
            self.rescheduled,
            self.retries,
            self.victims_deleted,
            self.interrupted,
            self.intervals,
        ):
            family.remove(*labels)
        for event in EVENTS:
            for outcome in OUTCOMES:
                self.events.remove(*labels, event, outcome)
