"""A change of a pod wakes every pod that it lets be placed, and few others."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from apis.scheduling_pod import SchedulingPod, decode_scheduling_pod
from cluster.scheduler.cycle.events import POD, Action, ClusterEvent, may_help
from cluster.scheduler.plugins.between_pods.hints import AffinityHint, ChangedPod, SpreadHint
from cluster.scheduler.plugins.between_pods.pod_affinity import InterPodAffinity
from cluster.scheduler.plugins.between_pods.topology_spread import PodTopologySpread
from cluster.scheduler.registrations import registrations
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_node

_ZONE = "topology.kubernetes.io/zone"
_HOST = "kubernetes.io/hostname"
_APPS = ("a", "b", "c")
_NODES = 4


class _Cluster:
    """Nodes in two zones, pods that run, and pods that are asked about after each change."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.tables = Tables()
        self.shapes = Shapes()
        self.running: dict[str, SchedulingPod] = {}
        self.spread, self.affinity = PodTopologySpread(), InterPodAffinity()
        changed = ChangedPod(self.shapes.of)
        self.events = registrations(
            None,
            SpreadHint({"s": self.spread}, self.tables, changed),
            AffinityHint(self.tables, changed),
        )
        for number in range(_NODES):
            labels = {_ZONE: f"z{number % 2}"} if number else {}
            self.tables.upsert_node(make_node(f"n{number}", labels=labels))
        self.waiting = [self.shapes.of(self._pod(f"w{number}")) for number in range(8)]

    def _pod(self, name: str, *, bare: bool = False) -> SchedulingPod:
        random = self.random
        selector = {"labelSelector": {"matchLabels": {"app": random.choice(_APPS)}}}
        spec: dict[str, Any] = {"schedulerName": "s", "containers": [{"name": "c"}]}
        kind = "" if bare else random.choice(("spread", "podAffinity", "podAntiAffinity", ""))
        key = random.choice((_ZONE, _HOST))
        if kind == "spread":
            spec["topologySpreadConstraints"] = [
                {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", **selector}
            ]
        elif kind:
            rule = {"topologyKey": key, **selector}
            required = {"requiredDuringSchedulingIgnoredDuringExecution": [rule]}
            spec["affinity"] = {kind: required}
        labels = {"app": random.choice(_APPS)}
        meta = {"name": name, "namespace": "default", "uid": name, "labels": labels}
        return decode_scheduling_pod(msgspec.json.encode({"metadata": meta, "spec": spec}))

    def refusing(self, shape: PodShape) -> frozenset[str] | None:
        """Return the plugins that hold nodes back from a pod; None if a node takes it."""
        every = slice(0, _NODES)
        masks = [
            (plugin.name, plugin.filter(shape, self.tables, every))
            for plugin in (self.spread, self.affinity)
            if plugin.applies(shape, self.tables)
        ]
        held = np.zeros(_NODES, dtype=np.bool_)
        for _, mask in masks:
            held |= mask != 0
        if not held.all():
            return None
        return frozenset(name for name, mask in masks if mask.any())

    def change(self, number: int) -> ClusterEvent:
        """Have a pod come, go, change its labels, or begin to end."""
        random = self.random
        names = sorted(self.running)
        kind = random.choice(("comes", "comes", "goes", "label", "ends")) if names else "comes"
        if kind == "comes":
            pod = self._pod(f"p{number}")
            self.running[pod.metadata.name] = pod
            node = f"n{random.randrange(_NODES)}"
            self._place(pod, node)
            return ClusterEvent(POD, Action.ADD, None, pod)
        old = self.running[random.choice(names)]
        name = old.metadata.name
        booking = self.tables.bookings[name]
        if kind == "goes":
            del self.running[name]
            self.tables.remove(name)
            if random.random() < 0.5:
                return ClusterEvent(POD, Action.DELETE, old, None)
            # A placement that is taken back.
            shape = booking.shape
            pending = PendingPod(booking.key, name, 0, shape, 0.0)
            return ClusterEvent(POD, Action.DELETE, pending, None)
        if kind == "ends":
            self.tables.place(replace(booking, terminating=True))
            return ClusterEvent(POD, Action.UPDATE_OTHER, old, old)
        labels = {"app": random.choice(_APPS)}
        new = msgspec.structs.replace(
            old, metadata=msgspec.structs.replace(old.metadata, labels=labels)
        )
        self.running[name] = new
        self._place(new, booking.node)
        return ClusterEvent(POD, Action.UPDATE_POD_LABEL, old, new)

    def _place(self, pod: SchedulingPod, node: str) -> None:
        name = pod.metadata.name
        self.tables.place(Booking(f"default/{name}", name, self.shapes.of(pod), node))

    def wakes(self, shape: PodShape, plugins: frozenset[str], event: ClusterEvent) -> bool:
        pod = PendingPod("default/w", "w", 0, shape, 0.0)
        return may_help(pod, plugins, event, self.events.interest(event.kind, event.action))


@pytest.mark.parametrize("seed", range(8))
def test_a_pod_that_could_be_placed_is_always_woken(seed: int) -> None:
    cluster = _Cluster(seed)
    helped = asleep = 0
    for number in range(150):
        before = [cluster.refusing(shape) for shape in cluster.waiting]
        event = cluster.change(number)
        for shape, plugins in zip(cluster.waiting, before, strict=True):
            if plugins is None:
                continue
            woken = cluster.wakes(shape, plugins, event)
            if cluster.refusing(shape) is None:
                assert woken, (number, shape, event)
                helped += 1
            asleep += not woken
    assert helped > 0
    # Without hints every such change would wake every pod.
    assert asleep > helped


def test_a_pod_of_another_kind_wakes_no_pod() -> None:
    cluster = _Cluster(1)
    other = decode_scheduling_pod(
        b'{"metadata":{"name":"x","namespace":"elsewhere","uid":"x","labels":{"app":"a"}},'
        b'"spec":{"containers":[{"name":"c"}]}}'
    )
    for action, old, new in ((Action.ADD, None, other), (Action.DELETE, other, None)):
        event = ClusterEvent(POD, action, old, new)
        for shape in cluster.waiting:
            assert not cluster.wakes(shape, frozenset({"PodTopologySpread"}), event)
            assert not cluster.wakes(shape, frozenset({"InterPodAffinity"}), event)


def test_the_last_pod_that_affinity_means_wakes_the_first_of_a_group_when_it_loses_its_label() -> (
    None
):
    cluster = _Cluster(1)

    def pod(app: str, **spec: Any) -> SchedulingPod:
        meta = {"name": "p", "namespace": "default", "uid": "p", "labels": {"app": app}}
        return decode_scheduling_pod(msgspec.json.encode({"metadata": meta, "spec": spec}))

    term = {"topologyKey": _HOST, "labelSelector": {"matchLabels": {"app": "a"}}}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    shape = cluster.shapes.of(pod("a", affinity={"podAffinity": required}))
    event = ClusterEvent(POD, Action.UPDATE_POD_LABEL, pod("a"), pod("b"))
    assert cluster.wakes(shape, frozenset({"InterPodAffinity"}), event)
