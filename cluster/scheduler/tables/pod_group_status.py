"""The status of a PodGroup, from its pods.

Phases: Pending, PreScheduling (enough pods exist), Scheduling, Scheduled (enough are bound),
Running, and at the end Finished or Failed. docs/facts/scheduler.md, "Status of a PodGroup".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec

from apis.meta import format_time, parse_time
from apis.quota import PodGroup, PodGroupStatus

PENDING: Final = "Pending"
PRE_SCHEDULING: Final = "PreScheduling"
SCHEDULING: Final = "Scheduling"
SCHEDULED: Final = "Scheduled"
RUNNING: Final = "Running"
FINISHED: Final = "Finished"
FAILED: Final = "Failed"

_LONGEST_START: Final = timedelta(hours=48)
"""Upstream's: a group whose scheduling began that long after its creation and of which no pod runs
is not looked at any more."""


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A pod of the group.

    phase: status.phase. bound: it has a node. owners: names of its owners.
    """

    namespace: str
    phase: str
    bound: bool
    owners: tuple[str, ...]


def is_settled(group: PodGroup) -> bool:
    """Return whether the status does not change any more."""
    status = group.status
    if status.phase in (FINISHED, FAILED):
        return True
    if status.scheduled != group.spec.min_member or status.running:
        return False
    started, created = (
        _moment(status.schedule_start_time),
        _moment(group.metadata.creation_timestamp),
    )
    return started is not None and created is not None and started - created > _LONGEST_START


def next_status(
    group: PodGroup, pods: Sequence[MemberStatus], now: datetime
) -> PodGroupStatus | None:
    """Return the status to write, or None when the stored one holds.

    pods: all pods of the group, also terminated ones, in the order of their creation. Phases that
    are over at once are passed in one step, so a group costs fewer writes.
    """
    status = group.status
    if is_settled(group):
        return None
    while (following := _step(status, group.spec.min_member, pods, now)) != status:
        status = following
    return None if status == group.status else status


def _step(
    status: PodGroupStatus, least: int, pods: Sequence[MemberStatus], now: datetime
) -> PodGroupStatus:
    """Return what follows on `status`; itself when nothing does."""
    if not pods or not status.phase:
        return msgspec.structs.replace(
            status, phase=PENDING, scheduled=0, running=0, succeeded=0, failed=0
        )
    if status.phase == PENDING:
        if len(pods) < least or least <= 0:
            return status
        owners = sorted(f"{pods[0].namespace}/{owner}" for owner in pods[0].owners)
        return msgspec.structs.replace(
            status, phase=PRE_SCHEDULING, occupied_by=",".join(owners) or status.occupied_by
        )
    if least <= 0:
        return status
    phases = Counter(pod.phase for pod in pods)
    running, succeeded, failed = phases["Running"], phases["Succeeded"], phases["Failed"]
    bound = sum(1 for pod in pods if pod.bound)
    if bound < least:
        phase = SCHEDULING
    elif succeeded >= least:
        phase = FINISHED
    elif failed and failed + running + succeeded >= least:
        phase = FAILED
    elif running + succeeded >= least:
        phase = RUNNING
    else:
        phase = SCHEDULED
    return msgspec.structs.replace(
        status,
        phase=phase,
        scheduled=bound,
        running=running,
        succeeded=succeeded,
        failed=failed,
        schedule_start_time=status.schedule_start_time or format_time(now),
    )


def _moment(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        return parse_time(text)
    except ValueError:
        return None
