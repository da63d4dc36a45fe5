"""Controllers and an API server that refuses writes or holds objects that cannot be decoded."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from aiohttp import web

from apis.core import ConfigMap, Node, Pod
from apis.device import Device
from apis.meta import ObjectReference, format_time
from apis.nodemetric import NodeMetric
from apis.topology import NodeResourceTopology
from cluster.manager.admission import Admission
from cluster.manager.caches import Caches
from cluster.manager.config_source import SLOConfigSource
from cluster.manager.flags import parse
from cluster.manager.manager import Manager
from cluster.manager.node_metric import node_metric_controller
from cluster.manager.node_resource import NodeResourceController
from cluster.metrics import ManagerMetrics
from cluster.webhook.configuration import WEBHOOKS, Webhook
from kube.cache import Cache
from kube.client import ApiError, Client
from kube.connection import Connection
from kube.events import EventRecorder
from kube.resources import (
    CONFIG_MAPS,
    DEVICES,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    PODS,
)
from kube.webhook import ALLOWED, AdmissionRequest, GroupVersionKind
from tests.kube.scripted import answer, api, status

# What reviews of a webhook are counted under, by the resource that it is registered for.
KINDS = {
    "pods": "Pod",
    "pods/binding": "Binding",
    "nodes": "Node",
    "nodes/status": "Node",
    "configmaps": "ConfigMap",
    "elasticquotas": "ElasticQuota",
    "reservations": "Reservation",
}
AMOUNTS = {"cpu": "16", "memory": "64Gi"}
NODE = {
    "metadata": {"name": "n1", "uid": "u"},
    "status": {"capacity": AMOUNTS, "allocatable": AMOUNTS},
}

USED = {"nodeMetric": {"nodeUsage": {"resources": {"cpu": "1", "memory": "1Gi"}}}}


def event(kind: str, obj: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"type": kind, "object": obj})


def configured(client: Client, data: dict[str, str]) -> tuple[SLOConfigSource, Cache[ConfigMap]]:
    maps: Cache[ConfigMap] = Cache(client, CONFIG_MAPS, ConfigMap)
    metrics = ManagerMetrics()
    events = EventRecorder(client, component="test")
    source = SLOConfigSource(maps, events, metrics, namespace="ns", name="config")
    maps.take(event("ADDED", config_map(data)))
    return source, maps


def config_map(data: dict[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": "config", "namespace": "ns"}, "data": data}


def test_a_refused_write_of_zones_does_not_prevent_writes_of_the_node() -> None:
    written: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if "noderesourcetopologies" in request.path:
            return status(403, "Forbidden", "not yours")
        written.append(request.path)
        return answer({})

    async def run() -> None:
        async with api(handler) as client:
            source, _ = configured(client, {"colocation-config": '{"enable":true}'})
            nodes: Cache[Node] = Cache(client, NODES, Node)
            reports: Cache[NodeMetric] = Cache(client, NODE_METRICS, NodeMetric)
            zones: Cache[NodeResourceTopology] = Cache(
                client, NODE_RESOURCE_TOPOLOGIES, NodeResourceTopology
            )
            controller = NodeResourceController(
                client,
                nodes,
                Cache(client, PODS, Pod),
                reports,
                zones,
                Cache(client, DEVICES, Device),
                source,
                EventRecorder(client, component="test"),
                ManagerMetrics(),
            )
            nodes.take(event("ADDED", NODE))
            now = format_time(datetime.now(UTC))
            report = {"metadata": {"name": "n1"}, "status": {"updateTime": now, **USED}}
            reports.take(event("ADDED", report))
            cpu = {"name": "cpu", "capacity": "16", "allocatable": "16", "available": "16"}
            zone = {"name": "node-0", "type": "Node", "resources": [cpu]}
            zones.take(event("ADDED", {"metadata": {"name": "n1"}, "zones": [zone]}))
            try:
                await controller.reconcile("n1")
            except ApiError as error:
                # Said, and tried again.
                assert error.status == 403
            else:
                raise AssertionError("the refusal was swallowed")

    asyncio.run(run())
    assert written == ["/api/v1/nodes/n1/status", "/api/v1/nodes/n1"]


def test_objects_of_a_node_that_cannot_be_decoded_stay() -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(f"{request.method} {request.path}")
        return answer({})

    async def run() -> None:
        async with api(handler) as client:
            source, _ = configured(client, {})
            nodes: Cache[Node] = Cache(client, NODES, Node)
            reports: Cache[NodeMetric] = Cache(client, NODE_METRICS, NodeMetric)
            controller = node_metric_controller(client, nodes, reports, source, ManagerMetrics())
            odd = {**NODE, "status": {"capacity": {"cpu": "many"}}}
            nodes.take(event("ADDED", odd))
            reports.take(event("ADDED", {"metadata": {"name": "n1", "uid": "m"}}))
            await controller.reconcile("n1")
            assert asked == []
            nodes.take(event("DELETED", odd))
            await controller.reconcile("n1")

    asyncio.run(run())
    assert [each.split()[0] for each in asked] == ["DELETE"]


def test_writes_of_a_nodes_object_are_counted_by_their_outcome() -> None:
    refused = False

    async def handler(request: web.Request) -> web.StreamResponse:
        return status(403, "Forbidden", "not yours") if refused else answer({})

    async def run() -> None:
        nonlocal refused
        async with api(handler) as client:
            source, _ = configured(client, {"colocation-config": '{"enable":true}'})
            nodes: Cache[Node] = Cache(client, NODES, Node)
            reports: Cache[NodeMetric] = Cache(client, NODE_METRICS, NodeMetric)
            metrics = ManagerMetrics()
            controller = node_metric_controller(client, nodes, reports, source, metrics)
            nodes.take(event("ADDED", NODE))
            await controller.reconcile("n1")
            refused = True
            with pytest.raises(ApiError):
                await controller.reconcile("n1")
            assert metrics.node_metric.labels("succeeded", "").value == 1
            assert metrics.node_metric.labels("failed", "createNodeMetric").value == 1
            assert len(metrics.node_metric) == 2

    asyncio.run(run())


def test_a_recreated_config_map_is_no_longer_stale() -> None:
    async def run() -> None:
        async with Client(Connection("http://localhost")) as client:
            maps: Cache[ConfigMap] = Cache(client, CONFIG_MAPS, ConfigMap)
            metrics = ManagerMetrics()
            events = EventRecorder(client, component="test")
            SLOConfigSource(maps, events, metrics, namespace="ns", name="config")
            said = config_map({"colocation-config": '{"enable":true}'})
            stale = metrics.config_stale.labels("colocation-config")
            maps.take(event("ADDED", said))
            assert stale.value == 0
            maps.take(event("DELETED", said))
            assert stale.value == 1
            maps.take(event("ADDED", said))
            assert stale.value == 0

    asyncio.run(run())


def test_values_of_reviews_create_no_series() -> None:
    """Every client that reaches the port can send reviews."""
    settings = parse([], {})

    async def run() -> ManagerMetrics:
        async with Client(Connection("http://localhost")) as client:
            metrics = ManagerMetrics()
            source, _ = configured(client, {})
            caches = Caches(client, settings)
            served = Admission(client, settings, caches, source, metrics, port=0)
            for number in range(50):
                review = AdmissionRequest(
                    uid="u", kind=GroupVersionKind(kind=f"K{number}"), operation=f"O{number}"
                )
                served._observe("/mutate-pod", review, ALLOWED, 0.001)
        return metrics

    assert len(asyncio.run(run()).webhook) == 1


@pytest.mark.parametrize("webhook", WEBHOOKS, ids=lambda webhook: webhook.path)
def test_reviews_are_counted_by_the_kind_of_their_webhook(webhook: Webhook) -> None:
    settings = parse([], {})

    async def run() -> ManagerMetrics:
        async with Client(Connection("http://localhost")) as client:
            metrics = ManagerMetrics()
            source, _ = configured(client, {})
            caches = Caches(client, settings)
            served = Admission(client, settings, caches, source, metrics, port=0)
            served._observe(webhook.path, AdmissionRequest(uid="u"), ALLOWED, 0.001)
        return metrics

    shown = "".join(asyncio.run(run()).registry.slices())
    assert f'object_type="{KINDS[webhook.resource]}"' in shown


def test_events_that_cannot_be_sent_do_not_delay_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.manager.manager._FLUSH_SECONDS", 0.2)

    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async def run() -> None:
        async with api(silent) as client:
            one = Manager(client, parse([], {}), webhook_port=0)
            one.events.warning(ObjectReference(kind="Node", name="n1"), "Reason", "text")
            await asyncio.wait_for(one._flush_events(), 5)

    asyncio.run(run())
