"""Hints get along with every event that the scheduler itself sends."""

from __future__ import annotations

import pytest

from cluster.scheduler.cycle.events import POD, RESERVATION, Action, ClusterEvent, may_help
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.registrations import registrations
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from tests.cluster.scheduler.making import make_pod

_ENDED = ClusterEvent(POD, Action.DELETE)
"""A nomination ended: there is no pod that left."""
_INTEREST = registrations().interest(_ENDED.kind, _ENDED.action)


@pytest.mark.parametrize("plugin", sorted(_INTEREST))
def test_the_end_of_a_nomination_has_every_pod_tried_that_room_may_help(
    plugin: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape = Shapes().of(make_pod("p"))
    pod = PendingPod(key="default/p", uid="p", priority=0, shape=shape, created=0.0)
    assert may_help(pod, [plugin], _ENDED, _INTEREST)
    assert not caplog.records


@pytest.mark.parametrize("plugin", ["InterPodAffinity", "LoadAwareScheduling", "PodTopologySpread"])
def test_a_pod_that_a_reserve_pod_keeps_away_is_tried_when_the_reservation_changes(
    plugin: str,
) -> None:
    queue: SchedulingQueue[PodShape] = SchedulingQueue(registrations())
    shape = Shapes().of(make_pod("p"))
    queue.add(PendingPod("default/p", "p", priority=0, shape=shape, created=0.0), now=0.0)
    assert queue.pop(now=0.0) is not None
    queue.refuse("p", {plugin}, now=0.0)
    assert queue.cluster_event(ClusterEvent(RESERVATION, Action.UPDATE_OTHER), now=5.0) == 1
    assert queue.pop(now=5.0) is not None
