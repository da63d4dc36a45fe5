"""The report of one pass, the counters over all passes, and the view of one subject."""

from __future__ import annotations

import msgspec

from hooks.decision import Decision
from hooks.subject import Subject
from koordlet.executor.slots import ResourceView


class PassReport(msgspec.Struct, frozen=True):
    """What one pass did.

    decided: subjects whose decision was made again. faults: policies that could not claim.
    cpu_ms: processor time of this thread.
    """

    reasons: tuple[str, ...] = ()
    subjects: int = 0
    decided: int = 0
    written: int = 0
    failed: int = 0
    deferred: int = 0
    restored: int = 0
    faults: int = 0
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    generation: int = 0


class ReconcileStats(msgspec.Struct, frozen=True):
    """Counters since the start, for metrics."""

    passes: int = 0
    pod_updates: int = 0  # pods that were looked at by themselves, between passes
    standing_updates: int = 0  # subjects with other standing claims, between passes
    written: int = 0
    failed: int = 0
    restored: int = 0
    foreign_changes: int = 0
    crashed_passes: int = 0
    crash: str = ""  # of the last pass; "" when it was finished
    last: PassReport = PassReport()
    last_finished_at: float = 0.0  # seconds since the epoch
    journal_records: int = 0
    journal_error: str = ""


class SubjectView(msgspec.Struct, frozen=True):
    """One subject: its decision, and the state of each value."""

    subject: Subject
    decision: Decision
    resources: tuple[ResourceView, ...]
