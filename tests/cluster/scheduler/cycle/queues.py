"""A scheduling queue with the events of three plugins, and what the tests of queues ask it."""

from __future__ import annotations

from collections.abc import Callable

from cluster.scheduler.cycle.events import (
    NODE,
    POD,
    Action,
    ClusterEvent,
    EventTable,
    Hint,
    Registration,
)
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.waiting import Gate, QueueState, scheduling_gates
from tests.cluster.scheduler.pending import FakeShape, Pod

Queue = SchedulingQueue[FakeShape]

FREED = ClusterEvent(POD, Action.DELETE, old="a pod")
TAINT_GONE = ClusterEvent(NODE, Action.UPDATE_NODE_TAINT, old="tainted", new="clean")


def queue(*, hint: Hint | None = None, gate: Callable[[Pod], str | None] | None = None) -> Queue:
    gates: list[Gate[FakeShape]] = [Gate("SchedulingGates", scheduling_gates)]
    if gate is not None:
        gates.append(Gate("Coscheduling", gate))
    return SchedulingQueue(
        EventTable(
            {
                "Fit": [Registration(POD, Action.DELETE, hint), Registration(NODE, Action.ADD)],
                "Taints": [Registration(NODE, Action.ADD | Action.UPDATE_NODE_TAINT)],
                "Coscheduling": [],
            }
        ),
        gates=gates,
    )


def popped(q: Queue, now: float = 0.0) -> list[str]:
    """Pop every pod that is active or backs off after a refusal; they stay in flight."""
    names = []
    while (pod := q.pop(now)) is not None:
        names.append(pod.uid)
    return names


def pop(q: Queue, now: float = 0.0) -> str:
    pod = q.pop(now)
    assert pod is not None
    return pod.uid


def counts(q: Queue) -> tuple[int, int, int, int]:
    """Active, backing off, unschedulable, gated."""
    return (
        q.count(QueueState.ACTIVE),
        q.count(QueueState.BACKOFF),
        q.count(QueueState.UNSCHEDULABLE),
        q.count(QueueState.GATED),
    )
