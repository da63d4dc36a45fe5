"""Which changes have a refused pod tried again; hints get along with every event that the scheduler
itself sends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apis.quantity import parse_quantity
from apis.storage import CSIStorageCapacity, PersistentVolume, PersistentVolumeClaim
from cluster.scheduler.cycle.events import POD, RESERVATION, Action, ClusterEvent, may_help
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.waiting import QueueState
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


_WAKES = """
NoNodes               Node: ADD
SchedulingHint        Node: ADD
NodeUnschedulable     Node: ADD UPDATE_NODE_TAINT
TaintToleration       Node: ADD UPDATE_NODE_TAINT
NodeAffinity          Node: ADD UPDATE_NODE_LABEL
NodeDeclaredFeatures  Node: ADD UPDATE_NODE_DECLARED_FEATURES
NodePorts             Node: ADD, Pod: DELETE, Reservation: *
NodeResourcesFit      Node: ADD UPDATE_NODE_ALLOCATABLE, Reservation: *,
                      Pod: DELETE UPDATE_POD_LABEL UPDATE_POD_SCALE_DOWN
VolumeRestrictions    Node: ADD, Pod: DELETE, PersistentVolumeClaim: ADD UPDATE_OTHER
NodeVolumeLimits      Node: ADD, Pod: DELETE, PersistentVolumeClaim: ADD UPDATE_OTHER, CSINode: *,
                      VolumeAttachment: DELETE
VolumeBinding         Node: ADD UPDATE_NODE_LABEL, Pod: DELETE,
                      PersistentVolumeClaim: ADD UPDATE_OTHER, PersistentVolume: ADD UPDATE_OTHER,
                      StorageClass: ADD UPDATE_OTHER, CSIDriver: DELETE UPDATE_OTHER,
                      CSIStorageCapacity: ADD UPDATE_OTHER
VolumeZone            Node: ADD UPDATE_NODE_LABEL, PersistentVolumeClaim: ADD UPDATE_OTHER,
                      PersistentVolume: ADD UPDATE_OTHER, StorageClass: ADD
LoadAwareScheduling   Node: ADD UPDATE_NODE_ALLOCATABLE UPDATE_NODE_ANNOTATION,
                      Pod: DELETE UPDATE_POD_LABEL UPDATE_POD_SCALE_DOWN, Reservation: *,
                      NodeMetric: *
NodeNUMAResource      Node: ADD UPDATE_NODE_ALLOCATABLE UPDATE_NODE_LABEL UPDATE_NODE_ANNOTATION,
                      Pod: DELETE UPDATE_POD_LABEL UPDATE_POD_SCALE_DOWN, Reservation: *,
                      NodeResourceTopology: *, Device: *
Coscheduling          Node: ADD UPDATE_NODE_LABEL, ClusterNetworkTopology: *
DeviceShare           Node: ADD UPDATE_NODE_LABEL, Pod: DELETE UPDATE_POD_SCALE_DOWN,
                      Reservation: *, Device: *
Reservation           Node: ADD UPDATE_NODE_ALLOCATABLE UPDATE_NODE_LABEL, Reservation: *,
                      Pod: ADD DELETE UPDATE_POD_LABEL UPDATE_POD_SCALE_DOWN,
                      NodeResourceTopology: *, Device: *
PodTopologySpread     Node: ADD DELETE UPDATE_NODE_LABEL UPDATE_NODE_TAINT, Reservation: *,
                      Pod: ADD DELETE UPDATE_POD_LABEL UPDATE_OTHER
InterPodAffinity      Node: ADD UPDATE_NODE_LABEL, Reservation: *, Namespace: *,
                      Pod: ADD DELETE UPDATE_POD_LABEL
ElasticQuota          Node: ADD UPDATE_NODE_ALLOCATABLE, ElasticQuota: *,
                      Pod: DELETE UPDATE_POD_LABEL UPDATE_POD_SCALE_DOWN UPDATE_OTHER
"""
"""Plugin -> kinds of objects, and what has to happen to one; * is anything."""


def _wakes() -> dict[str, set[tuple[str, Action]]]:
    found: dict[str, set[tuple[str, Action]]] = {}
    for line in _WAKES.replace(",\n", ",").strip().splitlines():
        plugin, kinds = line.split(maxsplit=1)
        rows = [kind.split(":") for kind in kinds.split(",")]
        found[plugin] = {
            (kind.strip(), action)
            for kind, names in rows
            for action in Action
            if action.name in names.split() or names.strip() == "*"
        }
    return found


def test_a_refused_pod_waits_for_the_changes_that_may_help_it() -> None:
    wakes = _wakes()
    kinds = {kind for rows in wakes.values() for kind, _ in rows}
    table = registrations()
    # What an extender looks at is not known.
    wakes["Extender"] = {(kind, action) for kind in kinds for action in Action}
    found: dict[str, set[tuple[str, Action]]] = {}
    for kind, action in sorted(wakes["Extender"], key=str):
        for plugin in table.interest(kind, action):
            found.setdefault(plugin, set()).add((kind, action))
    assert found == wakes


def _claim(name: str, namespace: str = "default") -> PersistentVolumeClaim:
    value = {"metadata": {"name": name, "namespace": namespace}}
    return msgspec.convert(value, PersistentVolumeClaim)


def _volume(**labels: str) -> PersistentVolume:
    return msgspec.convert({"metadata": {"name": "v", "labels": labels}}, PersistentVolume)


def _storage(size: str) -> CSIStorageCapacity:
    return CSIStorageCapacity(capacity=parse_quantity(size))


def _pending(name: str, *volumes: dict[str, Any]) -> PendingPod[PodShape]:
    shape = Shapes().of(make_pod(name, volumes=list(volumes)))
    return PendingPod(f"default/{name}", name, priority=0, shape=shape, created=0.0)


_USES_CLAIM = {"name": "v", "persistentVolumeClaim": {"claimName": "c"}}
_USES_DISK = {"name": "v", "gcePersistentDisk": {"pdName": "d"}}


@pytest.mark.parametrize(
    ("kind", "old", "new", "woken"),
    [
        # A claim of the pod.
        ("PersistentVolumeClaim", None, _claim("c"), True),
        ("PersistentVolumeClaim", None, _claim("another"), False),
        ("PersistentVolumeClaim", None, _claim("c", "elsewhere"), False),
        # A pod that leaves volumes, bound or taken back.
        ("Pod", make_pod("gone", volumes=[_USES_CLAIM]), None, True),
        ("Pod", make_pod("gone"), None, False),
        ("Pod", _pending("gone", _USES_CLAIM), None, True),
        ("Pod", _pending("gone", _USES_DISK), None, True),
        ("Pod", _pending("gone"), None, False),
        # Storage for larger volumes.
        ("CSIStorageCapacity", None, _storage("1Gi"), True),
        ("CSIStorageCapacity", _storage("1Gi"), _storage("2Gi"), True),
        ("CSIStorageCapacity", _storage("1Gi"), _storage("1Gi"), False),
        ("CSIStorageCapacity", _storage("2Gi"), _storage("1Gi"), False),
    ],
)
def test_of_changes_of_volumes_those_that_give_the_pod_some_wake_it(
    kind: str, old: Any, new: Any, woken: bool
) -> None:
    action = Action.ADD if old is None else Action.DELETE if new is None else Action.UPDATE_OTHER
    interest = _TABLE.interest(kind, action)
    refused = _pending("p", _USES_CLAIM)
    event = ClusterEvent(kind, action, old, new)
    assert may_help(refused, ["VolumeBinding"], event, interest) is woken


@pytest.mark.parametrize(
    ("old", "new", "woken"),
    [(None, _volume(), True), (_volume(), _volume(zone="a"), True), (_volume(), _volume(), False)],
)
def test_a_volume_with_other_labels_may_be_in_another_zone(
    old: PersistentVolume | None, new: PersistentVolume, woken: bool
) -> None:
    action = Action.ADD if old is None else Action.UPDATE_OTHER
    event = ClusterEvent("PersistentVolume", action, old, new)
    interest = _TABLE.interest(event.kind, event.action)
    assert may_help(_pending("p", _USES_CLAIM), ["VolumeZone"], event, interest) is woken


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


def test_hints_about_other_pods_are_those_of_the_plugin_that_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hint that fails would have the pod tried too, and be logged."""
    bed = Bed()
    for zone in ("a", "b"):
        bed.node(f"n-{zone}", 4, zone=zone)
    selector = {"matchLabels": {"app": "web"}}
    term = {"labelSelector": {"matchLabels": {"app": "db"}}, "topologyKey": "zone"}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    spread = {
        "topologyKey": "zone",
        "maxSkew": 1,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": selector,
    }
    bed.pod("full", 4, 9, node="n-b")
    bed.pod("web", 0, 9, node="n-a", app="web")
    bed.pod("spread", 1, 0, app="web", topologySpreadConstraints=[spread])
    bed.pod("beside", 0, 0, affinity={"podAffinity": required})
    bed.run()
    waiting = ("u-spread", "u-beside")
    states = bed.core.queue.state_of
    assert [states(uid) for uid in waiting] == [QueueState.UNSCHEDULABLE] * 2
    bed.pod("plain", 0, 9, node="n-a", app="other")
    assert [states(uid) for uid in waiting] == [QueueState.UNSCHEDULABLE] * 2
    bed.pod("db", 0, 9, node="n-a", app="db")
    assert [states(uid) for uid in waiting] == [QueueState.UNSCHEDULABLE, QueueState.BACKOFF]
    bed.gone("web")
    assert [states(uid) for uid in waiting] == [QueueState.BACKOFF, QueueState.BACKOFF]
    assert not caplog.records
