"""NodeSLO and NodeMetric of each Node: created, repaired, deleted, and written once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from apis.core import ConfigMap, Node
from apis.meta import ObjectReference
from apis.nodemetric import NodeMetric
from cluster.manager.config_source import SLOConfigSource
from cluster.manager.node_metric import node_metric_controller
from cluster.manager.node_slo import node_slo_controller
from cluster.manager.objects import StoredNodeSLO, detach_node_slo
from cluster.metrics import ManagerMetrics
from kube.cache import Cache
from kube.events import EventRecorder
from kube.resources import CONFIG_MAPS, NODE_METRICS, NODE_SLOS, NODES
from tests.cluster.fake_api import FakeApi, in_virtual_time

BANDWIDTH = "node.koordinator.sh/network-bandwidth"
STRATEGY = "node.koordinator.sh/colocation-strategy"


class Said(EventRecorder):
    """Keeps warnings as texts."""

    def __init__(self, server: FakeApi) -> None:
        super().__init__(server.client(), component="test")
        self.texts: list[str] = []

    def warning(self, about: ObjectReference, reason: str, message: str) -> None:
        self.texts.append(f"{about.kind} {about.name} {reason}: {message}")


class World:
    """Both running controllers, with caches that follow the server."""

    def __init__(self) -> None:
        self.server = FakeApi()
        client = self.server.client()
        self.nodes = Cache(client, NODES, Node)
        self.slos = Cache(client, NODE_SLOS, StoredNodeSLO, shrink=detach_node_slo)
        self.reports = Cache(client, NODE_METRICS, NodeMetric)
        self.maps = Cache(client, CONFIG_MAPS, ConfigMap)
        self.events = Said(self.server)
        self.metrics = ManagerMetrics()
        self.source = SLOConfigSource(
            self.maps, self.events, self.metrics, namespace="ns", name="config"
        )
        self.parts: list[str] = []
        self.slo = node_slo_controller(
            client, self.nodes, self.slos, self.source, self.events, self.metrics
        )
        self.metric = node_metric_controller(
            client, self.nodes, self.reports, self.source, self.metrics
        )
        self.source.subscribe(self.parts.append)
        self.server.follow(self.maps, self.nodes, self.slos, self.reports)

    def start(self) -> None:
        self.workers = [
            asyncio.create_task(each.queue.work(each.reconcile))
            for each in (self.slo, self.metric)
            for _ in range(2)
        ]

    def configure(self, name: str = "config", **keys: Any) -> None:
        data = {
            key.replace("_", "-"): value if isinstance(value, str) else json.dumps(value)
            for key, value in keys.items()
        }
        self.server.put(CONFIG_MAPS, {"metadata": {"name": name, "namespace": "ns"}, "data": data})

    def node(self, name: str = "a", **metadata: Any) -> None:
        self.server.put(NODES, {"metadata": {"name": name, **metadata}})

    def spec(self, name: str = "a") -> Any:
        return self.server.get(NODE_SLOS, name)["spec"]

    def policy(self, name: str = "a") -> Any:
        return self.server.get(NODE_METRICS, name)["spec"]["metricCollectPolicy"]

    def wrote(self) -> list[str]:
        """Return the writes since the last call, such as "PATCH nodeslos/a"."""
        found = [
            f"{method} {'/'.join(path.split('/')[4:])}"
            + (f"/{body['metadata']['name']}" if method == "POST" else "")
            for method, path, body in self.server.writes
        ]
        self.server.writes.clear()
        return sorted(found)


def live(life: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        await life(world)
        faults = (world.slo.queue.faults, world.metric.queue.faults, world.source.faults)
        assert [each.count for each in faults] == [0, 0, 0]

    in_virtual_time(main)


ON = {"enable": True}
BURST = {"clusterStrategy": {"policy": "auto"}}


def test_objects_come_and_go_with_their_node() -> None:
    async def life(world: World) -> None:
        world.configure(colocation_config=ON)
        world.node()
        world.start()
        await asyncio.sleep(1)
        assert world.wrote() == ["POST nodemetrics/a", "POST nodeslos/a"]
        assert world.spec()["extensions"] == {"Object": {}}
        world.node("b")
        await asyncio.sleep(1)
        assert world.wrote() == ["POST nodemetrics/b", "POST nodeslos/b"]
        world.server.remove(NODES, "a")
        await asyncio.sleep(1)
        assert world.wrote() == ["DELETE nodemetrics/a", "DELETE nodeslos/a"]
        # Left over from a time when no manager ran.
        for resource in (NODE_SLOS, NODE_METRICS):
            world.server.put(resource, {"metadata": {"name": "gone"}, "spec": {}})
        await asyncio.sleep(1)
        assert world.wrote() == ["DELETE nodemetrics/gone", "DELETE nodeslos/gone"]
        assert (world.slo.writes, world.metric.writes) == (4, 4)
        counted = world.metrics.node_slo.labels("succeeded", "").value
        await asyncio.sleep(3600)
        assert world.wrote() == []
        assert world.metrics.node_slo.labels("succeeded", "").value == counted

    live(life)


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({"labels": {"pool": "x"}}, ["PATCH nodeslos/a"]),
        ({"annotations": {BANDWIDTH: "1G"}}, ["PATCH nodeslos/a"]),
        ({"annotations": {STRATEGY: '{"metricReportIntervalSeconds":7}'}}, ["PATCH nodemetrics/a"]),
        ({"annotations": {"other": "x"}}, []),
        ({"labels": {"other": "x"}}, []),
    ],
)
def test_a_change_of_a_node_writes_what_depends_on_it(
    change: dict[str, Any], written: list[str]
) -> None:
    async def life(world: World) -> None:
        entry = {
            "name": "x",
            "nodeSelector": {"matchLabels": {"pool": "x"}},
            "policy": "cpuBurstOnly",
        }
        world.configure(colocation_config=ON, cpu_burst_config={**BURST, "nodeStrategies": [entry]})
        world.node()
        world.start()
        await asyncio.sleep(1)
        world.wrote()
        world.node(**change)
        await asyncio.sleep(1)
        assert world.wrote() == written
        world.node()
        await asyncio.sleep(1)
        assert world.wrote() == written  # and back

    live(life)


def test_each_key_changes_its_object() -> None:
    async def life(world: World) -> None:
        world.configure(colocation_config=ON)
        world.node()
        world.start()
        await asyncio.sleep(1)
        world.wrote()
        burst = {**ON, "metricAggregateDurationSeconds": 77, "metricReportIntervalSeconds": 9}
        world.configure(colocation_config=burst)
        await asyncio.sleep(1)
        assert world.wrote() == ["PATCH nodemetrics/a"]
        assert world.policy()["aggregateDurationSeconds"] == 77
        assert world.policy()["reportIntervalSeconds"] == 9
        world.configure(colocation_config=burst, cpu_burst_config=BURST)
        await asyncio.sleep(1)
        assert world.wrote() == ["PATCH nodeslos/a"]
        assert world.spec()["cpuBurstStrategy"]["policy"] == "auto"
        world.configure(colocation_config={**burst, "enable": False}, cpu_burst_config=BURST)
        await asyncio.sleep(1)
        # With co-location off the defaults hold, and the node still reports.
        assert world.wrote() == ["PATCH nodemetrics/a"]
        assert world.policy()["aggregateDurationSeconds"] == 300
        assert world.policy()["reportIntervalSeconds"] == 60
        world.configure("another", colocation_config=burst)
        world.configure(colocation_config={**burst, "enable": False}, cpu_burst_config=BURST)
        await asyncio.sleep(1)
        assert world.wrote() == []

    live(life)


def test_the_entry_that_applied_is_named_and_forgotten_with_it() -> None:
    async def life(world: World) -> None:
        entry = {"name": "x", "nodeSelector": {"matchLabels": {"pool": "x"}}, "policy": "auto"}
        world.configure(colocation_config=ON, cpu_burst_config={"nodeStrategies": [entry]})
        world.node(labels={"pool": "x"})
        world.start()
        await asyncio.sleep(1)
        metadata = world.server.get(NODE_SLOS, "a")["metadata"]
        assert metadata["annotations"] == {
            "slo.koordinator.sh/applied-entries": '{"cpu-burst-config":"x"}'
        }
        world.node()
        await asyncio.sleep(1)
        metadata = world.server.get(NODE_SLOS, "a")["metadata"]
        assert metadata["annotations"] == {}
        assert world.spec()["cpuBurstStrategy"]["policy"] == "none"

    live(life)


def test_outside_writes_to_an_object_are_repaired_but_extensions_stay() -> None:
    async def life(world: World) -> None:
        world.configure(colocation_config=ON, cpu_burst_config=BURST)
        world.node()
        world.start()
        await asyncio.sleep(1)
        world.wrote()
        right = world.spec()
        stored = world.server.get(NODE_SLOS, "a")
        mine = {"Object": {"mine": {"x": 1}}}
        wrong = {**right, "extensions": mine, "cpuBurstStrategy": {"policy": "none"}, "odd": 1}
        world.server.put(NODE_SLOS, {**stored, "spec": wrong})
        await asyncio.sleep(1)
        assert world.wrote() == ["PATCH nodeslos/a"]
        assert world.spec() == {**right, "extensions": mine}
        stored = world.server.get(NODE_METRICS, "a")
        policy = {**stored["spec"]["metricCollectPolicy"], "reportIntervalSeconds": 1}
        world.server.put(NODE_METRICS, {**stored, "spec": {"metricCollectPolicy": policy}})
        await asyncio.sleep(1)
        assert world.wrote() == ["PATCH nodemetrics/a"]
        assert world.policy()["reportIntervalSeconds"] == 60
        # A report is not a change of the spec, and is not even looked at.
        looked = world.metrics.node_metric.labels("succeeded", "").value
        stored = world.server.get(NODE_METRICS, "a")
        status = {"updateTime": "2026-01-01T00:00:00Z"}
        world.server.put(NODE_METRICS, {**stored, "status": status})
        await asyncio.sleep(1)
        assert world.wrote() == []
        assert world.metrics.node_metric.labels("succeeded", "").value == looked

    live(life)


def test_an_object_that_another_client_deletes_is_created_again() -> None:
    async def life(world: World) -> None:
        world.configure(colocation_config=ON)
        world.node()
        world.start()
        await asyncio.sleep(1)
        world.wrote()
        world.server.remove(NODE_SLOS, "a")
        world.server.remove(NODE_METRICS, "a")
        await asyncio.sleep(1)
        assert world.wrote() == ["POST nodemetrics/a", "POST nodeslos/a"]

    live(life)


def test_a_write_based_on_an_outdated_cache_is_no_error() -> None:
    async def life(world: World) -> None:
        world.configure(colocation_config=ON, cpu_burst_config=BURST)
        world.node()
        await asyncio.sleep(1)
        # Not in the caches yet: creating them finds them there.
        for resource in (NODE_SLOS, NODE_METRICS):
            world.server.put(resource, {"metadata": {"name": "a"}, "spec": {}})
        world.start()
        await asyncio.sleep(1)
        assert world.wrote() == [
            *("PATCH nodemetrics/a", "PATCH nodeslos/a"),
            *("POST nodemetrics/a", "POST nodeslos/a"),
        ]
        # Still in the caches: patching them finds nothing.
        world.configure(
            colocation_config={**ON, "metricReportIntervalSeconds": 5}, cpu_burst_config={}
        )
        await asyncio.sleep(0.0099)
        for resource in (NODE_SLOS, NODE_METRICS):
            world.server.remove(resource, "a")
        await asyncio.sleep(1)
        assert world.policy()["reportIntervalSeconds"] == 5
        assert world.metrics.node_slo.labels("failed", "updateNodeSLO").value == 0

    live(life)


@pytest.mark.parametrize(
    ("resource", "family", "kind"),
    [(NODE_SLOS, "node_slo", "NodeSLO"), (NODE_METRICS, "node_metric", "NodeMetric")],
)
def test_refused_writes_are_counted_by_their_verb(resource: Any, family: str, kind: str) -> None:
    async def life(world: World) -> None:
        failed = getattr(world.metrics, family)
        world.configure(colocation_config=ON)
        world.node()
        world.server.refuse[resource.path()] = 403
        world.server.refuse[resource.path(name="a")] = 403
        world.start()
        await asyncio.sleep(1)
        assert failed.labels("failed", f"create{kind}").value >= 3
        del world.server.refuse[resource.path()]
        await asyncio.sleep(60)
        world.configure(
            colocation_config={**ON, "metricReportIntervalSeconds": 5}, cpu_burst_config=BURST
        )
        await asyncio.sleep(1)
        assert failed.labels("failed", f"update{kind}").value >= 3
        world.server.remove(NODES, "a")
        await asyncio.sleep(61)
        assert failed.labels("failed", f"delete{kind}").value >= 1
        world.server.refuse.clear()
        await asyncio.sleep(61)
        assert resource.path(name="a") not in world.server.objects

    live(life)


# --- the configuration -----------------------------------------------------------------------


def stale(world: World) -> dict[str, float]:
    keys = ("colocation-config", "cpu-burst-config", "resource-qos-config")
    return {key: world.metrics.config_stale.labels(key).value for key in keys}


def test_a_key_that_breaks_leaves_its_last_good_value_and_the_others_change() -> None:
    async def life(world: World) -> None:
        world.configure(colocation_config=ON, cpu_burst_config=BURST)
        world.node()
        world.start()
        await asyncio.sleep(1)
        world.wrote()
        world.configure(
            colocation_config={**ON, "metricReportIntervalSeconds": 5}, cpu_burst_config="{"
        )
        await asyncio.sleep(1)
        assert world.wrote() == ["PATCH nodemetrics/a"]
        assert stale(world) == {
            "colocation-config": 0,
            "cpu-burst-config": 1,
            "resource-qos-config": 0,
        }
        (event,) = world.events.texts
        assert event.startswith("ConfigMap config ")
        assert "cpu-burst-config" in event and "the last good value stays in force" in event
        world.configure(colocation_config="{", cpu_burst_config=BURST)
        await asyncio.sleep(1)
        assert world.policy()["reportIntervalSeconds"] == 5
        assert not world.source.colocation_healthy and world.source.colocation_known
        # A node that comes now gets its objects by the values in force, an old one is left alone.
        world.node("new")
        world.node(annotations={STRATEGY: '{"metricReportIntervalSeconds":7}'})
        await asyncio.sleep(1)
        assert world.policy("new")["reportIntervalSeconds"] == 5
        assert world.policy()["reportIntervalSeconds"] == 5
        world.configure(colocation_config=ON, cpu_burst_config=BURST)
        await asyncio.sleep(1)
        assert world.source.colocation_healthy
        assert world.policy()["reportIntervalSeconds"] == 7
        assert set(stale(world).values()) == {0}

    live(life)


def test_a_manager_that_starts_on_broken_keys_changes_nothing_by_them() -> None:
    async def life(world: World) -> None:
        world.configure(colocation_config="{", cpu_burst_config="{", resource_qos_config={})
        stored = {"cpuBurstStrategy": {"policy": "auto"}, "hostApplications": [{"name": "x"}]}
        world.server.put(NODE_SLOS, {"metadata": {"name": "a"}, "spec": stored})
        world.node()
        world.node("new")
        world.start()
        await asyncio.sleep(1)
        assert world.source.never_good == {"colocation-config", "cpu-burst-config"}
        assert world.spec()["cpuBurstStrategy"]["policy"] == "auto"
        assert "cpuBurstStrategy" not in world.spec("new")
        assert world.spec().get("hostApplications") != [{"name": "x"}]
        assert not [each for each in world.wrote() if "nodemetrics" in each]
        world.configure(colocation_config=ON, cpu_burst_config={})
        await asyncio.sleep(1)
        assert world.source.never_good == frozenset()
        assert {world.spec(name)["cpuBurstStrategy"]["policy"] for name in ("a", "new")} == {"none"}
        assert world.policy()["reportIntervalSeconds"] == 60

    live(life)


def test_a_config_map_that_is_deleted_stays_in_force_and_is_called_stale() -> None:
    async def life(world: World) -> None:
        world.configure(colocation_config=ON, cpu_burst_config=BURST)
        world.node()
        world.start()
        await asyncio.sleep(1)
        world.wrote()
        world.server.remove(CONFIG_MAPS, "config", namespace="ns")
        await asyncio.sleep(1)
        assert world.wrote() == [] and set(stale(world).values()) == {1}
        world.configure(colocation_config=ON, cpu_burst_config=BURST)
        await asyncio.sleep(1)
        assert world.wrote() == [] and set(stale(world).values()) == {0}

    live(life)


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("resource_threshold_config", {"clusterStrategy": {"enable": True}}, ["nodeslo"]),
        ("resource_qos_config", {"clusterStrategy": {"lsClass": {}}}, ["nodeslo"]),
        ("cpu_burst_config", BURST, ["nodeslo"]),
        ("system_config", {"clusterStrategy": {"minFreeKbytesFactor": 7}}, ["nodeslo"]),
        ("host_application_config", {"applications": [{"name": "x"}]}, ["nodeslo"]),
        ("colocation_config", {"enable": False}, ["colocation", "noderesource"]),
        ("cpu_normalization_config", {"enable": True}, ["noderesource"]),
        ("resource_amplification_config", {"enable": True}, ["noderesource"]),
        ("another_key", "text", []),
    ],
)
def test_which_subscribers_each_key_notifies(key: str, value: Any, parts: list[str]) -> None:
    async def life(world: World) -> None:
        keys: dict[str, Any] = {"colocation_config": ON}
        world.configure(**keys)
        await asyncio.sleep(1)
        world.parts.clear()
        world.configure(**{**keys, key: value})
        await asyncio.sleep(1)
        assert world.parts == parts

    live(life)


def test_a_failing_subscriber_does_not_affect_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        world = World()
        heard: list[str] = []

        def broken(_: str) -> None:
            raise KeyError("a bug")

        world.source.subscribe(broken)
        world.source.subscribe(heard.append)
        world.configure(colocation_config=ON)
        await asyncio.sleep(1)
        assert set(heard) >= {"colocation", "noderesource"}
        assert world.source.faults.count == len(heard)

    in_virtual_time(main)
    assert "slo-controller-config: a subscriber of" in caplog.text
