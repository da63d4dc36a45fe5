"""Hints get along with every event that the scheduler itself sends."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.scheduler.cycle.events import POD, RESERVATION, Action, ClusterEvent, may_help
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.registrations import registrations
from cluster.scheduler.sources.cluster import pod_actions
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from tests.cluster.scheduler.beds.core import Bed
from tests.cluster.scheduler.making import make_pod

_ENDED = ClusterEvent(POD, Action.DELETE)
"""A nomination ended: there is no pod that left."""
_TABLE = registrations()
_INTEREST = _TABLE.interest(_ENDED.kind, _ENDED.action)


@pytest.mark.parametrize("plugin", sorted(_INTEREST))
def test_the_end_of_a_nomination_has_every_pod_tried_that_room_may_help(
    plugin: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape = Shapes().of(make_pod("p"))
    pod = PendingPod(key="default/p", uid="p", priority=0, shape=shape, created=0.0)
    assert may_help(pod, [plugin], _ENDED, _INTEREST)
    assert not caplog.records


@pytest.mark.parametrize(
    ("plugin", "kind"),
    [
        # A reserve pod keeps the pod away.
        ("InterPodAffinity", RESERVATION),
        ("LoadAwareScheduling", RESERVATION),
        ("PodTopologySpread", RESERVATION),
        # A reservation cannot give CPUs or devices.
        ("Reservation", "NodeResourceTopology"),
        ("Reservation", "Device"),
    ],
)
def test_a_refused_pod_is_tried_when_an_object_changes(plugin: str, kind: str) -> None:
    queue: SchedulingQueue[PodShape] = SchedulingQueue(registrations())
    shape = Shapes().of(make_pod("p"))
    queue.add(PendingPod("default/p", "p", priority=0, shape=shape, created=0.0), now=0.0)
    assert queue.pop(now=0.0) is not None
    queue.refuse("p", {plugin}, now=0.0)
    assert queue.cluster_event(ClusterEvent(kind, Action.UPDATE_OTHER), now=5.0) == 1
    assert queue.pop(now=5.0) is not None


@pytest.mark.parametrize("plugin", ["LoadAwareScheduling", "NodeNUMAResource", "Reservation"])
def test_of_the_labels_of_a_bound_pod_only_those_of_its_class_wake_what_it_hindered(
    plugin: str,
) -> None:
    shape = Shapes().of(make_pod("p"))
    refused = PendingPod("default/p", "p", priority=0, shape=shape, created=0.0)

    def woken(before: dict[str, str], after: dict[str, str]) -> bool:
        old, new = (make_pod("running", node="n", labels=labels) for labels in (before, after))
        event = ClusterEvent(POD, pod_actions(old, new), old, new)
        return may_help(refused, [plugin], event, _TABLE.interest(event.kind, event.action))

    classes = {"koordinator.sh/qosClass": "LSE", "koordinator.sh/priority-class": "koord-prod"}
    for key in classes:
        without = {each: value for each, value in classes.items() if each != key}
        assert woken(classes, without)
        assert woken(without, classes)
        assert woken(classes, {**classes, key: "another"})
    assert not woken(classes, {**classes, "app": "web"})
    assert not woken({**classes, "app": "web"}, {**classes, "app": "shop"})


def test_a_pod_whose_devices_lie_apart_is_tried_when_one_beside_another_is_healthy() -> None:
    bed = Bed(
        """
        apiVersion: kubescheduler.config.k8s.io/v1
        kind: KubeSchedulerConfiguration
        profiles:
        - schedulerName: koord-scheduler
          plugins: {multiPoint: {enabled: [{name: NodeNUMAResource}, {name: DeviceShare}]}}
        """
    )
    caches = {cache.resource.kind: cache for cache in bed.core.caches}
    policy = {"node.koordinator.sh/numa-topology-policy": "SingleNUMANode"}
    amounts = {"cpu": "16", "pods": "9", "koordinator.sh/gpu": "300"}
    node = {"metadata": {"name": "n", "labels": policy}, "status": {"allocatable": amounts}}
    bed.show(caches["Node"], "ADDED", node)
    zones = [
        {
            "name": f"node-{numa}",
            "type": "Node",
            "resources": [{"name": "cpu", "allocatable": "8", "available": "8", "capacity": "8"}],
        }
        for numa in range(2)
    ]
    bed.show(caches["NodeResourceTopology"], "ADDED", {"metadata": {"name": "n"}, "zones": zones})

    def devices(*healthy: int) -> dict[str, Any]:
        has = {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100"}
        gpus = [
            {
                "type": "gpu",
                "minor": minor,
                "health": minor in healthy,
                "resources": has,
                "topology": {"socketID": 0, "nodeID": minor // 2, "pcieID": f"p{minor // 2}"},
            }
            for minor in range(3)
        ]
        return {"metadata": {"name": "n"}, "spec": {"devices": gpus}}

    bed.show(caches["Device"], "ADDED", devices(0, 2))
    requests = {"cpu": "1", "koordinator.sh/gpu": "200"}
    bed.pod("p", 1, 0, containers=[{"name": "c", "resources": {"requests": requests}}])
    bed.run()
    assert "Unaligned NUMA Hint" in bed.messages["p"]
    bed.show(caches["Device"], "MODIFIED", devices(0, 1, 2))
    bed.run(15)
    assert bed.node_of("p") == "n"
