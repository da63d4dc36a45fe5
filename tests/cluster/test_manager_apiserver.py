"""The manager and a real API server: configuration becomes objects, resources and refusals."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import pytest

from apis.explanation import ANNOTATION_RESOURCE_EXPLANATION, parse_explanation, render
from cluster.manager.manager import Manager
from cluster.manager.node_slo import ANNOTATION_APPLIED_ENTRIES
from kube.client import ApiError, Client, encode_object
from kube.resources import (
    CONFIG_MAPS,
    DEVICES,
    ELASTIC_QUOTAS,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODE_SLOS,
    NODES,
    PODS,
    PROFILES,
    QUOTA_PROFILES,
)
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.conftest import (
    NAMESPACE,
    manager,
    read,
    register_webhooks,
    set_config,
    settled,
    write_report,
)

pytestmark = pytest.mark.apiserver

COLOCATION = {"colocation-config": json.dumps({"enable": True})}


async def make_node(
    client: Client,
    name: str,
    *,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> None:
    await client.delete(NODES, name)
    metadata = {"name": name, "labels": labels or {}, "annotations": annotations or {}}
    await client.create(NODES, encode_object(NODES, {"metadata": metadata}))
    amounts = {"cpu": "16", "memory": "64Gi", "pods": "110"}
    patch = {"status": {"capacity": amounts, "allocatable": {**amounts, "cpu": "15500m"}}}
    await client.patch(NODES, name, msgspec.json.encode(patch), subresource="status")


async def offered(client: Client, name: str) -> dict[str, str]:
    node = await read(client, NODES, name)
    allocatable = node["status"]["allocatable"]
    assert {k: v for k, v in node["status"]["capacity"].items() if k.startswith("kub")} == {
        k: v for k, v in allocatable.items() if k.startswith("kub")
    }
    return {key: value for key, value in allocatable.items() if "/" in key}


def test_the_config_map_reaches_node_slo_and_node_metric(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            await set_config(client, COLOCATION)
            await make_node(client, "a", labels={"pool": "db"})
            await make_node(
                client, "b", annotations={"node.koordinator.sh/network-bandwidth": "1G"}
            )
            async with manager(server):
                first = await eventually(lambda: read(client, NODE_SLOS, "a"))
                assert first["spec"]["resourceUsedThresholdWithBE"]["enable"] is False
                threshold = {
                    "clusterStrategy": {"enable": True, "cpuSuppressThresholdPercent": 60},
                    "nodeStrategies": [
                        {
                            "name": "db",
                            "nodeSelector": {"matchLabels": {"pool": "db"}},
                            "cpuSuppressThresholdPercent": 45,
                        }
                    ],
                }
                await set_config(
                    client, {**COLOCATION, "resource-threshold-config": json.dumps(threshold)}
                )

                async def percents() -> list[int]:
                    stored = [await read(client, NODE_SLOS, name) for name in ("a", "b")]
                    found = [each["spec"]["resourceUsedThresholdWithBE"] for each in stored if each]
                    return [each["cpuSuppressThresholdPercent"] for each in found]

                await eventually(lambda: _equals(percents(), [45, 60]))
                a, b = await read(client, NODE_SLOS, "a"), await read(client, NODE_SLOS, "b")
                applied = json.loads(a["metadata"]["annotations"][ANNOTATION_APPLIED_ENTRIES])
                assert applied == {"resource-threshold-config": "db"}
                assert b["spec"]["systemStrategy"] == {"totalNetworkBandwidth": "1G"}
                assert b["spec"]["extensions"] == {"Object": {}}
                # Each controller works at its own pace.
                metric = await eventually(lambda: read(client, NODE_METRICS, "a"))
                assert metric["spec"]["metricCollectPolicy"] == {
                    "aggregateDurationSeconds": 300,
                    "reportIntervalSeconds": 60,
                    "nodeAggregatePolicy": {"durations": ["5m0s", "10m0s", "30m0s"]},
                    "nodeMemoryCollectPolicy": "usageWithoutPageCache",
                }
                await client.delete(NODES, "a")
                await eventually(lambda: _gone(client, "a"))

    asyncio.run(run())


async def _equals(work: Any, wanted: Any) -> bool:
    return bool(await work == wanted)


async def _gone(client: Client, name: str) -> bool:
    return (
        await read(client, NODE_SLOS, name) is None
        and await read(client, NODE_METRICS, name) is None
    )


def test_nothing_is_written_twice_and_a_restart_writes_nothing(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            qos = {
                "clusterStrategy": {
                    "beClass": {"networkQOS": {"enable": True, "egressLimit": "50M"}},
                    "lsClass": {"memoryQOS": {"wmarkRatio": 95}},
                }
            }
            await set_config(client, {**COLOCATION, "resource-qos-config": json.dumps(qos)})
            for name in ("r1", "r2", "r3"):
                await make_node(client, name)
            async with manager(server) as one:
                for name in ("r1", "r2", "r3"):
                    await eventually(partial(read, client, NODE_SLOS, name))
                    await write_report(client, name)
                    await eventually(partial(_has_batch, client, name))
                await settled(one)
            versions = await _versions(client)
            async with manager(server) as two:
                looked = two.metrics.node_slo.labels("succeeded", "")
                await eventually(lambda: looked.value >= 3)
                await settled(two)
                written = {n: getattr(c, "writes", 0) for n, c in two.controllers.items()}
                assert written == dict.fromkeys(written, 0)
            assert await _versions(client) == versions

    asyncio.run(run())


async def _has_batch(client: Client, name: str) -> bool:
    return "kubernetes.io/batch-cpu" in await offered(client, name)


async def _versions(client: Client) -> dict[str, str]:
    found = {}
    for resource in (NODE_SLOS, NODE_METRICS, NODES):
        data = msgspec.json.decode(await client.request("GET", resource.path()))
        for item in data["items"]:
            key = f"{resource.plural}/{item['metadata']['name']}"
            found[key] = item["metadata"]["resourceVersion"]
    return found


def test_a_report_becomes_batch_and_mid_resources_with_their_explanation(
    server: ApiServer,
) -> None:
    async def run() -> None:
        async with server.client() as client:
            await set_config(client, COLOCATION)
            await make_node(client, "m")
            await client.delete(NODE_RESOURCE_TOPOLOGIES, "m")
            zone = {"name": "node-0", "type": "Node", "resources": []}
            for name, amount in (("cpu", "16"), ("memory", "64Gi")):
                one = {"name": name, "capacity": amount, "allocatable": amount, "available": amount}
                zone["resources"].append(one)  # type: ignore[attr-defined]
            topology = {"metadata": {"name": "m"}, "topologyPolicies": ["None"], "zones": [zone]}
            await client.create(
                NODE_RESOURCE_TOPOLOGIES, encode_object(NODE_RESOURCE_TOPOLOGIES, topology)
            )
            async with manager(server):
                await write_report(client, "m")
                await eventually(lambda: _has_batch(client, "m"))
                # 16000 - 6400 margin - max(1000 used, 500 reserved)
                got = await offered(client, "m")
                assert got["kubernetes.io/batch-cpu"] == "8600"
                assert got["kubernetes.io/mid-cpu"] == "2k"
                node = await read(client, NODES, "m")
                text = node["metadata"]["annotations"][ANNOTATION_RESOURCE_EXPLANATION]
                explained = parse_explanation(text, obj="Node m").resources
                shown = render("batch-cpu", explained["kubernetes.io/batch-cpu"])
                assert "capacity - margin - system_used - hp_used" in shown
                assert "NodeMetric m" in shown and "s ago)" in shown
                zones = (await read(client, NODE_RESOURCE_TOPOLOGIES, "m"))["zones"]
                names = [resource["name"] for resource in zones[0]["resources"]]
                assert names == [
                    "cpu",
                    "kubernetes.io/batch-cpu",
                    "kubernetes.io/batch-memory",
                    "memory",
                ]
                # A node that stopped reporting stops offering, in its zones too.
                await write_report(client, "m", age=timedelta(minutes=16))
                await eventually(lambda: _equals(offered(client, "m"), {}))
                zones = (await read(client, NODE_RESOURCE_TOPOLOGIES, "m"))["zones"]
                assert [r["name"] for r in zones[0]["resources"]] == ["cpu", "memory"]

    asyncio.run(run())


def test_the_explanation_is_left_out_if_a_node_has_no_room_for_it(server: ApiServer) -> None:
    """An API server accepts 256 KiB of annotations. Amounts are more important than reasons."""

    async def run() -> None:
        async with server.client() as client:
            await set_config(client, COLOCATION)
            await make_node(client, "full")
            patch = {"metadata": {"annotations": {"someone/else": "x" * (256 * 1024 - 700)}}}
            await client.patch(NODES, "full", msgspec.json.encode(patch))
            async with manager(server):
                await write_report(client, "full")
                await eventually(lambda: _has_batch(client, "full"))
                annotations = (await read(client, NODES, "full"))["metadata"]["annotations"]
                assert ANNOTATION_RESOURCE_EXPLANATION not in annotations
                assert "someone/else" in annotations

    asyncio.run(run())


def test_devices_count_also_while_co_location_is_off(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            await set_config(client, {"colocation-config": '{"enable":false}'})
            await make_node(client, "g")
            await client.delete(DEVICES, "g")
            gpu = {
                "type": "gpu",
                "health": True,
                "resources": {
                    "koordinator.sh/gpu-core": "100",
                    "koordinator.sh/gpu-memory": "16Gi",
                },
            }
            device = {
                "metadata": {"name": "g", "labels": {"node.koordinator.sh/gpu-model": "A100"}},
                "spec": {"devices": [gpu, {**gpu, "minor": 1}]},
            }
            await client.create(DEVICES, encode_object(DEVICES, device))
            async with manager(server):
                await eventually(lambda: _equals(_gpu(client, "g"), ("200", "32Gi", "A100")))
                patch = {"spec": {"devices": [gpu, {**gpu, "minor": 1, "health": False}]}}
                await client.patch(DEVICES, "g", msgspec.json.encode(patch))
                await eventually(lambda: _equals(_gpu(client, "g"), ("100", "16Gi", "A100")))

    asyncio.run(run())


async def _gpu(client: Client, name: str) -> tuple[str | None, str | None, str | None]:
    node = await read(client, NODES, name)
    allocatable, labels = node["status"]["allocatable"], node["metadata"].get("labels", {})
    return (
        allocatable.get("koordinator.sh/gpu-core"),
        allocatable.get("koordinator.sh/gpu-memory"),
        labels.get("kubernetes.io/gpu-model"),
    )


def test_broken_and_deleted_configuration_leaves_what_was_in_force(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            burst = {"clusterStrategy": {"policy": "auto"}}
            await set_config(client, {**COLOCATION, "cpu-burst-config": json.dumps(burst)})
            await make_node(client, "k")
            async with manager(server) as one:
                await eventually(lambda: _equals(_burst(client, "k"), "auto"))
                await set_config(client, {**COLOCATION, "cpu-burst-config": "{"})
                events = await eventually(lambda: _events(client, "SLOCfgUnmarshalFailed"))
                assert "cpu-burst-config" in events[0]["message"]
                await client.delete(CONFIG_MAPS, "slo-controller-config", namespace=NAMESPACE)
                # Every key is stale then, also a usable key.
                stale = one.metrics.config_stale.labels("colocation-config")
                await eventually(lambda: stale.value == 1)
                assert one.metrics.config_stale.labels("cpu-burst-config").value == 1
                await settled(one)
                assert await _burst(client, "k") == "auto"
            # A manager that starts on a broken key keeps what the objects say.
            await set_config(client, {**COLOCATION, "cpu-burst-config": "{"})
            async with manager(server) as two:
                looked = two.metrics.node_slo.labels("succeeded", "")
                await eventually(lambda: looked.value >= 1)
                await settled(two)
                assert await _burst(client, "k") == "auto"

    asyncio.run(run())


async def _burst(client: Client, name: str) -> str | None:
    stored = await read(client, NODE_SLOS, name)
    return stored["spec"]["cpuBurstStrategy"]["policy"] if stored else None


async def _events(client: Client, reason: str) -> list[Any]:
    data = await client.request("GET", f"/api/v1/namespaces/{NAMESPACE}/events")
    return [item for item in msgspec.json.decode(data)["items"] if item["reason"] == reason]


def test_a_quota_profile_follows_its_nodes(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client:
            for name, cordoned in (("q1", False), ("q2", True)):
                await make_node(client, name, labels={"pool": "a"})
                ready = [{"type": "Ready", "status": "True"}]
                patch = {"status": {"conditions": ready}}
                await client.patch(NODES, name, msgspec.json.encode(patch), subresource="status")
                spec = {"spec": {"unschedulable": cordoned}}
                await client.patch(NODES, name, msgspec.json.encode(spec))
            profile = {
                "metadata": {"name": "pool-a", "namespace": "default"},
                "spec": {
                    "quotaName": "pool-a-root",
                    "resourceRatio": "0.9",
                    "nodeSelector": {"matchLabels": {"pool": "a"}},
                },
            }
            await client.create(
                QUOTA_PROFILES, encode_object(QUOTA_PROFILES, profile), namespace="default"
            )
            async with manager(server):
                quota = await eventually(
                    lambda: read(client, ELASTIC_QUOTAS, "pool-a-root", "default")
                )
                # 2 x 15500m x 0.9, 2 x 64Gi x 0.9
                assert quota["spec"]["min"] == {"cpu": "27900m", "memory": "123695058124"}
                assert quota["spec"]["max"]["cpu"] == "4611686018427387"
                labels = quota["metadata"]["labels"]
                assert labels["quota.scheduling.koordinator.sh/tree-id"] == "10329762061428129167"
                annotations = quota["metadata"]["annotations"]
                missing = json.loads(
                    annotations["quota.scheduling.koordinator.sh/unschedulable-resource"]
                )
                assert missing["cpu"] == "13950m"
                await client.delete(NODES, "q2")

                async def shrunk() -> bool:
                    now = await read(client, ELASTIC_QUOTAS, "pool-a-root", "default")
                    return bool(now["spec"]["min"]["cpu"] == "13950m")

                await eventually(shrunk)

    asyncio.run(run())


# --- admission ---------------------------------------------------------------------------------


def pod(name: str, *, labels: dict[str, str] | None = None, **resources: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "default", "labels": labels or {}},
        "spec": {"containers": [{"name": "main", "image": "x", "resources": resources}]},
    }


async def create_pod(client: Client, plain: dict[str, Any]) -> Any:
    name = plain["metadata"]["name"]
    await client.delete(PODS, name, namespace="default")
    stored = await client.create(PODS, encode_object(PODS, plain), namespace="default")
    return msgspec.json.decode(stored)


def test_pods_join_co_location_at_admission_and_contradictions_are_refused(
    server: ApiServer,
) -> None:
    async def run() -> None:
        async with server.client() as client:
            await register_webhooks(client)
            await client.delete(PROFILES, "batch")
            profile = {
                "metadata": {"name": "batch"},
                "spec": {
                    "selector": {"matchLabels": {"team": "ml"}},
                    "qosClass": "BE",
                    "priorityClassName": "koord-batch",
                    "koordinatorPriority": 5500,
                    "schedulerName": "koord-scheduler",
                    "labels": {"profiled": "yes"},
                    "patch": {"spec": {"terminationGracePeriodSeconds": 7}},
                },
            }
            await client.create(PROFILES, encode_object(PROFILES, profile))
            async with manager(server, webhooks=True):
                amounts = {"cpu": "1500m", "memory": "1Gi"}
                got = await create_pod(
                    client, pod("ml", labels={"team": "ml"}, requests=amounts, limits=amounts)
                )
                assert got["metadata"]["labels"] == {
                    "team": "ml",
                    "profiled": "yes",
                    "koordinator.sh/qosClass": "BE",
                    "koordinator.sh/priority": "5500",
                }
                spec = got["spec"]
                assert (spec["schedulerName"], spec["priority"]) == ("koord-scheduler", 5000)
                assert spec["terminationGracePeriodSeconds"] == 7
                batch = {"kubernetes.io/batch-cpu": "1500", "kubernetes.io/batch-memory": "1Gi"}
                assert spec["containers"][0]["resources"] == {"requests": batch, "limits": batch}
                annotation = got["metadata"]["annotations"]
                described = json.loads(annotation["node.koordinator.sh/extended-resource-spec"])
                assert described == {"containers": {"main": {"limits": batch, "requests": batch}}}
                other = await create_pod(client, pod("other", requests=amounts))
                assert other["spec"]["containers"][0]["resources"]["requests"] == amounts

                with pytest.raises(ApiError, match="does not go with priority class"):
                    await create_pod(client, pod("be", labels={"koordinator.sh/qosClass": "BE"}))
                with pytest.raises(ApiError, match="is for pods of QoS class BE"):
                    await create_pod(client, pod("stray", requests=batch, limits=batch))
                change = {"metadata": {"labels": {"koordinator.sh/qosClass": "LS"}}}
                with pytest.raises(ApiError, match="QoS class cannot change"):
                    await client.patch(PODS, "ml", msgspec.json.encode(change), namespace="default")

    asyncio.run(run())


def test_quotas_keep_the_rules_of_their_tree(server: ApiServer) -> None:
    async def run() -> None:
        def quota(name: str, parent: str, least: int, **labels: str) -> dict[str, Any]:
            marks = {f"quota.scheduling.koordinator.sh/{k}": v for k, v in labels.items()}
            if parent:
                marks["quota.scheduling.koordinator.sh/parent"] = parent
            return {
                "metadata": {"name": name, "namespace": "default", "labels": marks},
                "spec": {"min": {"cpu": str(least)}, "max": {"cpu": "20"}},
            }

        async def create(client: Client, one: Manager, plain: dict[str, Any]) -> Any:
            """Create a quota, and wait until admission knows it."""
            body = encode_object(ELASTIC_QUOTAS, plain)
            stored = await client.create(ELASTIC_QUOTAS, body, namespace="default")
            name = plain["metadata"]["name"]
            await eventually(lambda: one.caches.quotas.get(name, namespace="default"))
            return msgspec.json.decode(stored)

        async with server.client() as client:
            await register_webhooks(client)
            async with manager(server, webhooks=True) as one:
                parent = await create(client, one, quota("p", "", 10, **{"is-parent": "true"}))
                assert (
                    parent["metadata"]["labels"]["quota.scheduling.koordinator.sh/parent"]
                    == "koordinator-root-quota"
                )
                weight = parent["metadata"]["annotations"][
                    "quota.scheduling.koordinator.sh/shared-weight"
                ]
                assert weight == '{"cpu":"20"}'
                await create(client, one, quota("a", "p", 6))
                with pytest.raises(ApiError, match=r"spec\.min cpu 11 in all, above its own 10"):
                    await create(client, one, quota("b", "p", 5))
                with pytest.raises(ApiError, match="has children"):
                    await client.delete(ELASTIC_QUOTAS, "p", namespace="default")
                loop = {"metadata": {"labels": {"quota.scheduling.koordinator.sh/parent": "a"}}}
                with pytest.raises(ApiError, match="leads back to the quota itself"):
                    await client.patch(
                        ELASTIC_QUOTAS, "p", msgspec.json.encode(loop), namespace="default"
                    )

    asyncio.run(run())
