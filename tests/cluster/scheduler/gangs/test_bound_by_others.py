"""A member of a gang that another program binds while it waits for the others."""

from __future__ import annotations

import pytest

from cluster.scheduler.cycle.waiting import QueueState
from tests.cluster.scheduler.beds.core import Bed


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_waiting_member_that_another_program_binds_counts_there_and_nowhere_else(
    node: str,
) -> None:
    bed = Bed()
    for name in ("n0", "n1"):
        bed.node(name, 4)
    for name in ("g0", "g1"):
        bed.pod(name, 3, 10, gang=2)
    assert bed.core.attempts.next(bed.now)
    (waits,) = (name for name in ("g0", "g1") if bed.core.attempts.waits_on(f"u-{name}"))
    bed.pods[waits]["spec"]["nodeName"] = node
    bed.change(waits)
    assert bed.core.attempts.held == 0
    assert bed.core.attempts.waits_on(f"u-{waits}") == ""
    booking = bed.core.tables.bookings[f"u-{waits}"]
    assert booking.node == node
    rows = [bed.core.tables.nodes.row(name) for name in ("n0", "n1")]
    requested = [int(bed.core.tables.nodes.requested[row, 0]) for row in rows if row is not None]
    assert requested == [3000 * (name == node) for name in ("n0", "n1")]
    gang = bed.core.gang_table.get("default/g")
    assert gang is not None
    assert {step.value: len(uids) for step, uids in gang.members.items() if uids} == {
        "bound": 1,
        "pending": 1,
    }
    # With the policy once-satisfied, the gang is satisfied by the pod that is bound.
    bed.run(30.0)
    assert {bed.node_of(name) for name in ("g0", "g1")} == {"n0", "n1"}
    assert not bed.core.attempts.faults.count


def test_pods_get_the_room_of_a_waiting_member_that_another_program_binds_elsewhere() -> None:
    bed = Bed()
    for name in ("n0", "n1"):
        bed.node(name, 4)
    for name in ("g0", "g1"):
        bed.pod(name, 3, 10, gang=2)
    assert bed.core.attempts.next(bed.now)
    (waits,) = (name for name in ("g0", "g1") if bed.core.attempts.waits_on(f"u-{name}"))
    node = bed.core.attempts.waits_on(f"u-{waits}")
    here = {"kubernetes.io/hostname": node}
    bed.pod("other", 4, 20, preemptionPolicy="Never", nodeSelector=here)
    assert bed.core.attempts.next(bed.now)
    assert bed.core.queue.state_of("u-other") is QueueState.UNSCHEDULABLE
    bed.pods[waits]["spec"]["nodeName"] = "n1" if node == "n0" else "n0"
    bed.change(waits)
    bed.run(10.0)
    assert bed.node_of("other") == node
