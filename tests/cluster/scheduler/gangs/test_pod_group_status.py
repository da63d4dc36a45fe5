"""The status of a PodGroup."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.core import ObjectMeta
from apis.quota import PodGroup, PodGroupSpec, PodGroupStatus
from cluster.scheduler.tables.pod_group_status import MemberStatus, is_settled, next_status

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
CREATED = "2026-05-01T11:00:00Z"


def group(least: int, status: PodGroupStatus | None = None) -> PodGroup:
    return PodGroup(
        metadata=ObjectMeta(name="g", namespace="ns", creation_timestamp=CREATED),
        spec=PodGroupSpec(min_member=least),
        status=status or PodGroupStatus(),
    )


def pods(text: str) -> list[MemberStatus]:
    """p: pending; b: bound and pending; r: running; s: succeeded; f: failed."""
    phases = {"p": "Pending", "b": "Pending", "r": "Running", "s": "Succeeded", "f": "Failed"}
    return [MemberStatus("ns", phases[one], one != "p", ("job-b", "job-a")) for one in text]


@pytest.mark.parametrize(
    ("least", "members", "phase", "counts"),
    [
        (2, "", "Pending", (0, 0, 0, 0)),
        (2, "p", "Pending", (0, 0, 0, 0)),
        (2, "pp", "Scheduling", (0, 0, 0, 0)),
        (2, "pb", "Scheduling", (1, 0, 0, 0)),
        (2, "bb", "Scheduled", (2, 0, 0, 0)),
        (2, "br", "Scheduled", (2, 1, 0, 0)),
        (2, "rr", "Running", (2, 2, 0, 0)),
        (2, "rs", "Running", (2, 1, 1, 0)),
        (2, "rf", "Failed", (2, 1, 0, 1)),
        (3, "bbf", "Scheduled", (3, 0, 0, 1)),
        (2, "ss", "Finished", (2, 0, 2, 0)),
        (2, "ssf", "Finished", (3, 0, 2, 1)),
        (0, "p", "Pending", (0, 0, 0, 0)),
    ],
)
def test_the_phase_follows_from_the_pods(
    least: int, members: str, phase: str, counts: tuple[int, int, int, int]
) -> None:
    status = next_status(group(least), pods(members), NOW)
    assert status is not None
    assert status.phase == phase
    assert (status.scheduled, status.running, status.succeeded, status.failed) == counts


def test_owners_and_start_are_recorded_once() -> None:
    first = next_status(group(2), pods("pp"), NOW)
    assert first is not None
    assert first.occupied_by == "ns/job-a,ns/job-b"
    assert first.schedule_start_time == "2026-05-01T12:00:00Z"
    later = next_status(group(2, first), pods("bb"), NOW.replace(hour=13))
    assert later is not None
    assert later.schedule_start_time == first.schedule_start_time


def test_a_group_whose_pods_are_gone_is_pending_again() -> None:
    status = next_status(group(2, PodGroupStatus(phase="Running", running=2)), [], NOW)
    assert status is not None
    assert (status.phase, status.running) == ("Pending", 0)


@pytest.mark.parametrize(
    ("status", "settled"),
    [
        (PodGroupStatus(phase="Finished"), True),
        (PodGroupStatus(phase="Failed"), True),
        (PodGroupStatus(phase="Running", scheduled=2, running=2), False),
        (PodGroupStatus(scheduled=2, schedule_start_time="2026-05-03T11:00:01Z"), True),
        (PodGroupStatus(scheduled=2, schedule_start_time="2026-05-03T11:00:00Z"), False),
        (PodGroupStatus(scheduled=2, running=1, schedule_start_time="2026-06-01T00:00:00Z"), False),
        (PodGroupStatus(scheduled=2, schedule_start_time="yesterday"), False),
    ],
)
def test_a_settled_group_is_not_written(status: PodGroupStatus, settled: bool) -> None:
    assert is_settled(group(2, status)) == settled
    assert (next_status(group(2, status), pods("p"), NOW) is None) == settled


def test_a_minimum_lowered_to_0_does_not_end_a_group() -> None:
    status = PodGroupStatus(phase="Scheduling", scheduled=1, running=1)
    assert next_status(group(0, status), pods("bp"), NOW) is None


@given(least=st.integers(0, 4), members=st.text("pbrsf", max_size=5))
def test_what_was_written_holds(least: int, members: str) -> None:
    status = next_status(group(least), pods(members), NOW)
    assert next_status(group(least, status), pods(members), NOW) is None
