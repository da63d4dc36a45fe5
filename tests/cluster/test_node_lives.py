"""Nodes over hours of virtual time: ended pods, missing reports, and the number of writes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from apis.core import ConfigMap, Node, Pod
from apis.device import Device
from apis.meta import ObjectReference, format_time
from apis.nodemetric import NodeMetric
from apis.topology import NodeResourceTopology
from cluster.manager.config_source import SLOConfigSource
from cluster.manager.node_resource import NodeResourceController
from cluster.metrics import ManagerMetrics
from kube.cache import Cache
from kube.client import RateLimit
from kube.events import EventRecorder
from kube.resources import (
    CONFIG_MAPS,
    DEVICES,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    PODS,
)
from tests.cluster.fake_api import FakeApi, VirtualTimeLoop, in_virtual_time, merged

BATCH, MID = "kubernetes.io/batch-cpu", "kubernetes.io/mid-cpu"
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def now() -> datetime:
    return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())


class Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return now()


class Said(EventRecorder):
    """Keeps warnings as texts."""

    def __init__(self, texts: list[str], server: FakeApi) -> None:
        super().__init__(server.client(), component="test")
        self.texts = texts

    def warning(self, about: ObjectReference, reason: str, message: str) -> None:
        self.texts.append(f"{about.name} {reason}: {message}")


class World:
    """A controller that works, and caches that follow the server by themselves."""

    def __init__(self, colocation: dict[str, Any]) -> None:
        self.server = FakeApi()
        client = self.server.client()
        self.nodes = Cache(client, NODES, Node)
        self.pods = Cache(client, PODS, Pod)
        self.reports = Cache(client, NODE_METRICS, NodeMetric)
        self.maps = Cache(client, CONFIG_MAPS, ConfigMap)
        self.topologies = Cache(client, NODE_RESOURCE_TOPOLOGIES, NodeResourceTopology)
        self.devices = Cache(client, DEVICES, Device)
        self.events: list[str] = []
        self.metrics = ManagerMetrics()
        events = Said(self.events, self.server)
        source = SLOConfigSource(self.maps, events, self.metrics, namespace="ns", name="config")
        self.controller = NodeResourceController(
            client,
            self.nodes,
            self.pods,
            self.reports,
            self.topologies,
            self.devices,
            source,
            events,
            self.metrics,
        )
        self.configure(colocation)
        self.server.follow(
            *(self.nodes, self.pods, self.reports, self.maps, self.topologies, self.devices)
        )
        queue = self.controller.queue
        self.workers = [
            asyncio.create_task(queue.work(self.controller.reconcile)) for _ in range(3)
        ]

    def configure(self, colocation: dict[str, Any]) -> None:
        data = {"colocation-config": json.dumps({"enable": True, **colocation})}
        meta = {"name": "config", "namespace": "ns"}
        self.server.put(CONFIG_MAPS, {"metadata": meta, "data": data})

    def node(self, name: str = "n1", cpu: str = "16", memory: str = "64Gi") -> None:
        amounts = {"cpu": cpu, "memory": memory}
        status = {"capacity": amounts, "allocatable": amounts}
        self.server.put(NODES, {"metadata": {"name": name}, "status": status})

    def pod(self, name: str, cpu: str, *, namespace: str = "default", on: str = "n1") -> None:
        resources = {"requests": {"cpu": cpu, "memory": "1Gi"}}
        self.server.put(
            PODS,
            {
                "metadata": {"name": name, "namespace": namespace},
                "spec": {
                    "nodeName": on,
                    "priority": 9000,
                    "containers": [{"name": "c", "resources": resources}],
                },
                "status": {"phase": "Running"},
            },
        )

    def report(self, cpu: float, name: str = "n1", **status: Any) -> None:
        """The node reports that its system uses that many milli-cores."""
        used = {"resources": {"cpu": f"{round(cpu)}m", "memory": "1Gi"}}
        info = {"nodeUsage": used, "systemUsage": used}
        body = {"updateTime": format_time(now()), "nodeMetric": info, **status}
        self.server.put(NODE_METRICS, {"metadata": {"name": name}, "status": body})

    def offered(self, resource: str = BATCH, name: str = "n1") -> str | None:
        text: str | None = self.server.get(NODES, name)["status"]["allocatable"].get(resource)
        return text

    def written(self, path: str = "/api/v1/nodes/n1/status") -> int:
        return sum(1 for _, at, _ in self.server.writes if at == path)


def live(
    monkeypatch: pytest.MonkeyPatch,
    life: Callable[[World], Awaitable[None]],
    **colocation: Any,
) -> None:
    """Run one scenario. colocation: strategy of the cluster."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        module = "cluster.manager.node_resource"
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=loop.time))
        monkeypatch.setattr(f"{module}.datetime", Clock)
        world = World(colocation)
        world.node()
        await life(world)
        assert all(not worker.done() for worker in world.workers)
        parts = (world.controller.queue, world.nodes, world.pods, world.reports, world.devices)
        assert [each.faults.count for each in parts] == [0] * 5

    in_virtual_time(main)


def test_a_pod_that_was_deleted_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life(world: World) -> None:
        for name, namespace in (("p", "a"), ("p", "b"), ("q", "a")):
            world.pod(name, "1", namespace=namespace)
        world.report(1000)
        await asyncio.sleep(1)
        assert (world.offered(), world.offered(MID)) == ("12k", "12k")
        world.server.remove(PODS, "p", namespace="b")
        world.report(1000)
        await asyncio.sleep(1)
        assert (world.offered(), world.offered(MID)) == ("13k", "13k")
        ended = world.server.get(PODS, "q", namespace="a")
        world.server.put(PODS, {**ended, "status": {"phase": "Succeeded"}})
        world.report(1000)
        await asyncio.sleep(1)
        assert (world.offered(), world.offered(MID)) == ("14k", "14k")
        moved = world.server.get(PODS, "p", namespace="a")
        world.server.put(PODS, {**moved, "spec": {**moved["spec"], "nodeName": "n2"}})
        world.report(1000)
        await asyncio.sleep(1)
        assert (world.offered(), world.offered(MID)) == ("15k", "15k")
        world.server.remove(PODS, "p", namespace="a")
        world.server.remove(PODS, "q", namespace="a")
        await asyncio.sleep(1)
        assert world.controller._pods == {}

    live(
        monkeypatch,
        life,
        cpuReclaimThresholdPercent=100,
        midUnallocatedPercent=100,
        resourceDiffThreshold=0.001,
    )


@pytest.mark.parametrize(("minutes", "after"), [(1, 61), (4, 241), (15, 901)])
def test_a_node_that_reports_no_more_offers_nothing_from_then_on(
    monkeypatch: pytest.MonkeyPatch, minutes: int, after: int
) -> None:
    async def life(world: World) -> None:
        world.report(1000)
        await asyncio.sleep(minutes * 60 - 1)
        assert world.offered() == "8600"
        # Nothing happens to the node: no heartbeat, no report, no pod.
        await asyncio.sleep(after - minutes * 60 + 1.5)
        assert world.offered() is None
        explained = json.loads(
            world.server.get(NODES, "n1")["metadata"]["annotations"][
                "node.koordinator.sh/resource-explanation"
            ]
        )
        assert "is stale: reported at" in json.dumps(explained)
        world.report(1000)
        await asyncio.sleep(1)
        assert world.offered() == "8600"

    live(monkeypatch, life, degradeTimeMinutes=minutes, updateTimeThresholdSeconds=3600)


@pytest.mark.parametrize("empty", [{"nodeMetric": {}}, {"nodeMetric": None}])
def test_a_report_without_use_counts_as_no_report(
    monkeypatch: pytest.MonkeyPatch, empty: dict[str, Any]
) -> None:
    async def life(world: World) -> None:
        world.report(1000)
        await asyncio.sleep(1)
        assert (world.offered(), world.offered(MID)) == ("8600", "0")
        world.report(1000, **empty)
        await asyncio.sleep(1)
        assert (world.offered(), world.offered(MID)) == (None, None)
        annotations = world.server.get(NODES, "n1")["metadata"]["annotations"]
        text = annotations["node.koordinator.sh/resource-explanation"]
        assert "NodeMetric n1 reports no use of cpu and memory" in text
        world.report(2000)
        await asyncio.sleep(1)
        assert world.offered() == "7600"

    live(monkeypatch, life)


def test_implausible_use_is_bounded_and_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def life(world: World) -> None:
        def pods(*cpu: str) -> list[dict[str, Any]]:
            return [
                {"name": f"p{at}", "namespace": "a", "podUsage": {"resources": {"cpu": text}}}
                for at, text in enumerate(cpu)
            ]

        for minute in range(10):  # values change, the fields do not
            world.report(1000, podsMetric=pods(f"-{minute + 1}", "500m"))
            await asyncio.sleep(60)
        assert world.offered() == "8100"
        assert world.events == [
            "n1 ImplausibleUsage: NodeMetric n1: status.podsMetric[a/p0].podUsage[cpu] = '-1': "
            "is negative; it counts as 0"
        ]
        world.report(1000, podsMetric=pods("0", "1E", "-1", "-2", "-3", "-4"))
        await asyncio.sleep(60)
        assert world.offered() == "0"
        assert len(world.events) == 2 and world.events[1].endswith("; and 2 more")
        world.report(1000)
        await asyncio.sleep(60)
        assert world.offered() == "8600"
        world.report(1000, podsMetric=pods("-1"))
        await asyncio.sleep(60)
        assert len(world.events) == 3  # it was fine in between

    live(monkeypatch, life)
    assert "status.podsMetric[a/p0].podUsage[cpu] = '-1'" in caplog.text


@pytest.mark.parametrize(
    ("cpu", "most"),
    [
        # Use that stands still: written once.
        (lambda minute: 1000, 1),
        # Use that moves by less than the threshold: once in five minutes.
        (lambda minute: 1000 + 300 * math.sin(minute), 120 / 5 + 1),
        # Use that crosses the threshold every half hour.
        (lambda minute: 1000 + 3000 * (minute // 30 % 2), 4),
        # Use that jumps with every report: one write for each report.
        (lambda minute: 1000 + 3000 * (minute % 2), 120),
    ],
    ids=["still", "small moves", "steps", "jumps"],
)
def test_how_often_a_node_is_written_in_two_hours(
    monkeypatch: pytest.MonkeyPatch, cpu: Callable[[int], float], most: float
) -> None:
    async def life(world: World) -> None:
        await asyncio.sleep(1)
        for minute in range(120):
            world.report(cpu(minute))
            await asyncio.sleep(60)
        assert 1 <= world.written() <= most
        assert world.written("/api/v1/nodes/n1") <= 1  # annotations
        assert world.controller.writes == len(world.server.writes)
        assert world.written() >= most - 2  # the bound is the right one

    live(monkeypatch, life)


def test_odd_amounts_are_offered_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life(world: World) -> None:
        world.node("odd", "15987m", "67415896067")
        used = {"resources": {"cpu": "333m", "memory": "1000000007"}}
        world.report(
            *(333, "odd"),
            nodeMetric={"nodeUsage": used, "systemUsage": used},
            prodReclaimableMetric={"resource": {"resources": {"cpu": "17m", "memory": "12345679"}}},
        )
        await asyncio.sleep(1)
        memory = 67415896067 - 67415896067 * 35 // 100 - 1000000007
        assert world.offered(name="odd") == str(15987 - 15987 * 40 // 100 - 333)
        assert world.offered("kubernetes.io/batch-memory", "odd") == str(memory)
        assert world.offered(MID, "odd") == "17"
        assert world.offered("kubernetes.io/mid-memory", "odd") == "12345679"

    live(monkeypatch, life)


CPU_INFO = "node.koordinator.sh/cpu-basic-info"
ZONE = {"name": "node-0", "type": "Node", "resources": []}
GPU = {"type": "gpu", "health": True, "resources": {"koordinator.sh/gpu-core": "100"}}
TRIGGERS: tuple[tuple[Any, dict[str, Any], dict[str, Any], bool], ...] = (
    # resource, what is stored beside the name, what it becomes, whether the node is looked at
    (NODES, {"labels": {"a": "b"}}, {}, True),
    (NODES, {"annotations": {"a": "b"}}, {}, True),
    (NODES, {"finalizers": ["x"]}, {}, False),
    (NODES, {}, {"status": {"capacity": {"cpu": "15", "memory": "64Gi"}}}, True),
    (NODES, {}, {"status": {"allocatable": {"cpu": "15"}}}, True),
    (NODES, {}, {"spec": {"unschedulable": True}}, False),
    (NODE_METRICS, {}, {"status": {"updateTime": "2026-01-01T00:16:50Z"}}, True),
    (NODE_METRICS, {}, {"spec": {"metricCollectPolicy": {"reportIntervalSeconds": 1}}}, False),
    (NODE_METRICS, {"labels": {"a": "b"}}, {}, False),
    (NODE_RESOURCE_TOPOLOGIES, {"annotations": {CPU_INFO: '{"cpuModel":"x"}'}}, {}, True),
    (NODE_RESOURCE_TOPOLOGIES, {"annotations": {"other": "x"}}, {}, False),
    (NODE_RESOURCE_TOPOLOGIES, {"labels": {"a": "b"}}, {}, False),
    (NODE_RESOURCE_TOPOLOGIES, {}, {"zones": [ZONE]}, True),
    (DEVICES, {"labels": {"node.koordinator.sh/gpu-model": "x"}}, {}, True),
    (DEVICES, {"annotations": {"a": "b"}}, {}, False),
    (DEVICES, {}, {"spec": {"devices": [GPU]}}, True),
)


@pytest.mark.parametrize(("resource", "metadata", "plain", "looked"), TRIGGERS)
def test_which_changes_requeue_a_node(
    monkeypatch: pytest.MonkeyPatch,
    resource: Any,
    metadata: dict[str, Any],
    plain: dict[str, Any],
    looked: bool,
) -> None:
    async def life(world: World) -> None:
        world.report(1000)
        world.server.put(DEVICES, {"metadata": {"name": "n1"}, "spec": {"devices": []}})
        world.server.put(NODE_RESOURCE_TOPOLOGIES, {"metadata": {"name": "n1"}, "zones": []})
        await asyncio.sleep(1)

        def times() -> float:
            return world.metrics.node_resource.labels("succeeded", "").value

        before, stored = times(), world.server.get(resource, "n1")
        body = merged(stored, {"metadata": metadata, **plain})
        world.server.put(resource, body)
        await asyncio.sleep(1)
        assert (times() > before) is looked
        before = times()
        world.server.put(resource, body)  # the same again, as a watch that resumes may say
        await asyncio.sleep(1)
        assert times() == before

    live(monkeypatch, life)


@pytest.mark.parametrize(
    ("resource", "gone"),
    [(NODE_METRICS, BATCH), (DEVICES, "koordinator.sh/gpu-core")],
)
def test_which_state_is_dropped_with_a_deleted_object(
    monkeypatch: pytest.MonkeyPatch, resource: Any, gone: str
) -> None:
    async def life(world: World) -> None:
        world.report(1000)
        world.server.put(DEVICES, {"metadata": {"name": "n1"}, "spec": {"devices": [GPU]}})
        await asyncio.sleep(1)
        assert world.offered(gone) is not None
        world.server.remove(resource, "n1")
        await asyncio.sleep(1)
        assert world.offered(gone) is None

    live(monkeypatch, life)


def test_what_a_node_offers_is_a_series_each_with_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life(world: World) -> None:
        reclaimable = {"resource": {"resources": {"cpu": "2", "memory": "3"}}}
        world.report(1000, prodReclaimableMetric=reclaimable)
        await asyncio.sleep(1)
        kinds = [(BATCH, "integer"), ("kubernetes.io/batch-memory", "byte")]
        kinds += [(MID, "integer"), ("kubernetes.io/mid-memory", "byte")]
        assert [
            world.metrics.allocatable.labels("n1", resource, unit).value for resource, unit in kinds
        ] == [8600, 64 * 2**30 - 64 * 2**30 * 35 // 100 - 2**30, 2000, 3]
        assert len(world.metrics.allocatable) == 4
        # Withdrawn is not a value; the series ends when it is old.
        world.server.remove(NODE_METRICS, "n1")
        await asyncio.sleep(1)
        assert len(world.metrics.allocatable) == 4
        plugins = world.metrics.plugin.labels("MidResource", "succeeded", "ResourceCalculate")
        assert plugins.value == world.metrics.node_resource.labels("succeeded", "").value > 0

    live(monkeypatch, life)


def test_pods_and_heartbeats_alone_cause_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life(world: World) -> None:
        world.report(1000)
        await asyncio.sleep(10)
        before = len(world.server.writes)
        looked = world.metrics.node_resource.labels("succeeded", "").value
        for second in range(200):
            beat = world.server.get(NODES, "n1")
            condition = {"type": "Ready", "status": "True", "message": str(second)}
            status = {**beat["status"], "conditions": [condition]}
            world.server.put(NODES, {**beat, "status": status})
            await asyncio.sleep(1)
        assert len(world.server.writes) == before
        assert world.metrics.node_resource.labels("succeeded", "").value == looked

    live(monkeypatch, life)


def test_nodes_that_come_and_go_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def life(world: World) -> None:
        for number in range(300):
            name = f"spot-{number}"
            world.node(name)
            if number % 7 == 0:
                bad = {"node.koordinator.sh/thirdPartyAllocations": "{"}
                stored = world.server.get(NODES, name)
                world.server.put(NODES, merged(stored, {"metadata": {"annotations": bad}}))
            world.report(1000, name, podsMetric=[] if number % 3 else [
                {"name": "p", "namespace": "a", "podUsage": {"resources": {"cpu": "-1"}}}
            ])  # fmt: skip
            world.pod(name, "1", on=name)
            await asyncio.sleep(0.015 if number % 2 else 5)  # some while a write is under way
            world.server.remove(NODES, name)
            world.server.remove(PODS, name, namespace="default")
            world.server.remove(NODE_METRICS, name)
            await asyncio.sleep(1)
        await asyncio.sleep(7200)
        assert any("thirdPartyAllocations" in text for text in world.events)
        controller = world.controller
        left = (controller._written_at, controller._problems, controller._implausible)
        assert [set(each) - {"n1"} for each in left] == [set(), set(), set()]
        assert controller._pods == {}
        assert controller.queue.remembered <= 80

    live(monkeypatch, life)


def test_a_refused_write_is_retried_with_back_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def life(world: World) -> None:
        world.server.refuse["/api/v1/nodes/n1"] = 403
        world.report(1000)
        await asyncio.sleep(3600)
        # Two parts a try: about 14 tries in the first minute and a half, then one a minute.
        assert 2 * 60 <= len(world.server.writes) <= 2 * 80
        assert world.metrics.node_resource.labels("failed", "updateNodeStatus").value > 0
        world.server.refuse.clear()
        world.report(1000)
        await asyncio.sleep(70)
        assert world.offered() == "8600"

    live(monkeypatch, life, degradeTimeMinutes=1000)


def test_a_rate_limit_holds_over_time_and_not_only_for_a_burst() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit(10, 5)
        started = loop.time()
        for _ in range(1000):
            await limit.take()
        assert loop.time() - started == pytest.approx((1000 - 5) / 10, abs=0.2)
        await asyncio.sleep(3600)  # a pause fills up one burst, not an hour of them
        started = loop.time()
        for _ in range(100):
            await limit.take()
        assert loop.time() - started == pytest.approx((100 - 5) / 10, abs=0.2)
        started = loop.time()
        await asyncio.gather(*(limit.take() for _ in range(200)))
        assert loop.time() - started == pytest.approx(200 / 10, abs=0.6)

    in_virtual_time(main)
