"""What happens to a workload, by the names that upstream's metrics have for it."""

from __future__ import annotations

from typing import Final

CREATE: Final = "create"
GATED: Final = "gatedByQueueAdmission"
ADMITTED: Final = "admissionPassed"
MIN_MEMBER: Final = "gangMinMemberSatisfied"
NOMINATED: Final = "preemptNominated"
VICTIM_DELETING: Final = "preemptVictimDeleting"
PREEMPT_FAILURE: Final = "preemptFailure"
SCHEDULE_FAILURE: Final = "scheduleFailure"
ALL_ATTEMPTED: Final = "gangAllPodsAlreadyAttempted"
VICTIMS_DELETED: Final = "victimAllDeleted"
SCHEDULED: Final = "scheduled"

EVENTS: Final = (
    CREATE,
    GATED,
    ADMITTED,
    MIN_MEMBER,
    NOMINATED,
    VICTIM_DELETING,
    PREEMPT_FAILURE,
    SCHEDULE_FAILURE,
    ALL_ATTEMPTED,
    VICTIMS_DELETED,
    SCHEDULED,
)

POD_SCHEDULED: Final = "scheduled"
POD_DELETED: Final = "deleted"
GANG_SCHEDULED: Final = "gangScheduled"
GANG_DELETED: Final = "gangDeleted"

OUTCOMES: Final = (POD_SCHEDULED, POD_DELETED, GANG_SCHEDULED, GANG_DELETED)
