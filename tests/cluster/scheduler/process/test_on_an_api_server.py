"""A scheduler process and a real API server: pods are bound once, within what nodes have."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from apis.meta import format_time
from kube.client import Client, encode_object
from kube.resources import (
    EVENTS,
    NODE_METRICS,
    POD_GROUPS,
    PODS,
)
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.scheduler.beds.on_api_server import (
    make_cpus,
    make_node,
    make_pod,
    nodes_of,
    play,
    pods,
    scheduler,
)

pytestmark = pytest.mark.apiserver

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: true, resourceName: koord-scheduler, resourceNamespace: default}
profiles:
- schedulerName: koord-scheduler
  plugins:
    filter: {enabled: [{name: LoadAwareScheduling}, {name: NodeNUMAResource}]}
    score:
      enabled:
      - {name: LoadAwareScheduling, weight: 1}
      - {name: NodeNUMAResource, weight: 1}
    reserve: {enabled: [{name: LoadAwareScheduling}, {name: NodeNUMAResource}]}
    preEnqueue: {enabled: [{name: Coscheduling}]}
    permit: {enabled: [{name: Coscheduling}]}
    preBind: {enabled: [{name: NodeNUMAResource}]}
- schedulerName: other-scheduler
"""


async def _events(client: Client, reason: str) -> list[dict[str, Any]]:
    raw = await client.request("GET", EVENTS.path(namespace="default"))
    return [event for event in msgspec.json.decode(raw)["items"] if event["reason"] == reason]


async def _pods_fill_nodes_exactly_and_the_rest_gets_its_reason(
    server: ApiServer, client: Client
) -> None:
    for number in range(4):
        await make_node(client, f"n{number}", cpu=8)
    async with scheduler(server.connection(), _CONFIGURATION):
        for number in range(16):
            name = "koord-scheduler" if number % 2 else "other-scheduler"
            await make_pod(client, f"p{number}", cpu="2", schedulerName=name)

        async def all_bound() -> bool:
            return all((await nodes_of(client)).values())

        await eventually(all_bound)
        assert Counter((await nodes_of(client)).values()) == {f"n{n}": 4 for n in range(4)}
        await make_pod(client, "late", cpu="2")

        async def condition() -> dict[str, Any] | None:
            late = next(p for p in await pods(client) if p["metadata"]["name"] == "late")
            conditions = late["status"].get("conditions", [])
            return next((c for c in conditions if c["type"] == "PodScheduled"), None)

        found = await eventually(condition)
        assert found["status"] == "False"
        assert found["reason"] == "Unschedulable"
        # Servers before 1.33 count no generations of pods.
        late = next(p for p in await pods(client) if p["metadata"]["name"] == "late")
        assert found.get("observedGeneration") == late["metadata"].get("generation")
        assert found["message"] == (
            "0/4 nodes are available: 4 Insufficient cpu. preemption: 0/4 nodes are available: "
            "4 No preemption victims found for incoming pod. "
            "One change away: 4 of 4 nodes lack only 2 of cpu."
        )

        async def failed() -> list[dict[str, Any]]:
            return await _events(client, "FailedScheduling")

        events = await eventually(failed)
        assert events[0]["involvedObject"]["name"] == "late"
        assert "4 Insufficient cpu" in events[0]["message"]
        await make_node(client, "large", cpu=64)

        async def late_is_bound() -> bool:
            return (await nodes_of(client))["late"] == "large"

        await eventually(late_is_bound)

        async def scheduled() -> bool:
            return len(await _events(client, "Scheduled")) == 17

        await eventually(scheduled)


def test_pods_fill_nodes_exactly_and_the_rest_gets_its_reason(server: ApiServer) -> None:
    play(server, _pods_fill_nodes_exactly_and_the_rest_gets_its_reason)


async def _a_scheduler_that_ends_in_the_middle_leaves_nothing_bound_twice(
    server: ApiServer, client: Client
) -> None:
    for number in range(3):
        await make_node(client, f"n{number}", cpu=10)
    for number in range(30):
        await make_pod(client, f"p{number}", cpu="1")
    for _ in range(3):
        async with scheduler(server.connection(), _CONFIGURATION):
            # Bindings are under way when the process is asked to stop.
            await asyncio.sleep(0.05)
    async with scheduler(server.connection(), _CONFIGURATION) as process:

        async def all_bound() -> bool:
            return all((await nodes_of(client)).values())

        await eventually(all_bound)
        assert Counter((await nodes_of(client)).values()) == {f"n{n}": 10 for n in range(3)}

        def settled() -> bool:
            return len(process.tables.bookings) == 30 and not process.binder.in_flight

        await eventually(settled)
        requested = process.tables.nodes.requested[: len(process.tables.nodes), 0]
        assert sorted(requested.tolist()) == [10000] * 3
    assert len(await _events(client, "Scheduled")) <= 30


def test_a_scheduler_that_ends_in_the_middle_leaves_nothing_bound_twice(server: ApiServer) -> None:
    play(server, _a_scheduler_that_ends_in_the_middle_leaves_nothing_bound_twice)


async def _cpus_of_a_pod_stand_on_it_when_it_is_bound(server: ApiServer, client: Client) -> None:
    await make_node(client, "n0", cpu=8)
    await make_cpus(client, "n0", 8)
    async with scheduler(server.connection(), _CONFIGURATION):
        for number in range(2):
            await make_pod(
                client,
                f"p{number}",
                cpu="2",
                limits={"cpu": "2", "memory": "1Gi"},
                metadata={"labels": {"koordinator.sh/qosClass": "LSR"}},
            )

        async def cpus() -> list[str]:
            texts = [
                pod["metadata"]
                .get("annotations", {})
                .get("scheduling.koordinator.sh/resource-status")
                for pod in await pods(client)
                if pod["spec"].get("nodeName")
            ]
            return texts if len(texts) == 2 else []

        texts = await eventually(cpus)
        sets = [json.loads(text)["cpuset"] for text in texts]
        assert sorted(sets) == ["0-1", "2-3"]


def test_cpus_of_a_pod_stand_on_it_when_it_is_bound(server: ApiServer) -> None:
    play(server, _cpus_of_a_pod_stand_on_it_when_it_is_bound)


async def _a_node_that_reports_high_usage_is_avoided_until_it_recovers(
    server: ApiServer, client: Client
) -> None:
    await make_node(client, "busy", cpu=8)

    async def report(cpu: str) -> None:
        usage = {"resources": {"cpu": cpu, "memory": "1Gi"}}
        status = {
            "updateTime": format_time(datetime.now(UTC)),
            "nodeMetric": {"nodeUsage": usage},
        }
        patch = msgspec.json.encode({"status": status})
        await client.patch(NODE_METRICS, "busy", patch, subresource="status")

    await client.create(NODE_METRICS, encode_object(NODE_METRICS, {"metadata": {"name": "busy"}}))
    await report("7")
    async with scheduler(server.connection(), _CONFIGURATION):
        await make_pod(client, "p", cpu="1")

        async def has_reason() -> bool:
            (pod,) = await pods(client)
            return any(
                "node(s) cpu usage exceed threshold" in condition.get("message", "")
                for condition in pod["status"].get("conditions", [])
            )

        await eventually(has_reason)
        await report("1")

        async def bound() -> bool:
            return (await nodes_of(client))["p"] == "busy"

        await eventually(bound)


def test_a_node_that_reports_high_usage_is_avoided_until_it_recovers(server: ApiServer) -> None:
    play(server, _a_node_that_reports_high_usage_is_avoided_until_it_recovers)


async def _what_is_not_decided_here_is_refused_with_its_field(
    server: ApiServer, client: Client
) -> None:
    await make_node(client, "n0", cpu=8)
    claim = {"name": "v", "resourceClaimName": "c"}
    async with scheduler(server.connection(), _CONFIGURATION):
        await make_pod(client, "p", cpu="1", resourceClaims=[claim])

        async def reason() -> str:
            (pod,) = await pods(client)
            conditions = pod["status"].get("conditions", [])
            return next((c.get("message", "") for c in conditions), "")

        message = await eventually(reason)
        assert "spec.resourceClaims" in message
        assert not any((await nodes_of(client)).values())


def test_what_is_not_decided_here_is_refused_with_its_field(server: ApiServer) -> None:
    play(server, _what_is_not_decided_here_is_refused_with_its_field)


async def _a_gang_is_bound_together_or_not_at_all(server: ApiServer, client: Client) -> None:
    for number in range(2):
        await make_node(client, f"n{number}", cpu=8)
    group = {"metadata": {"name": "g"}, "spec": {"minMember": 5}}
    await client.create(POD_GROUPS, encode_object(POD_GROUPS, group), namespace="default")
    member = {"labels": {"pod-group.scheduling.sigs.k8s.io": "g"}}
    async with scheduler(server.connection(), _CONFIGURATION) as process:
        for number in range(4):
            await make_pod(client, f"g{number}", cpu="4", metadata=member)
        # Four members are not enough; they are gated, and another pod takes no notice of them.
        await make_pod(client, "other", cpu="1")

        async def other_is_bound() -> bool:
            return bool((await nodes_of(client))["other"])

        await eventually(other_is_bound)
        await make_pod(client, "g4", cpu="4", metadata=member)

        async def rejected() -> bool:
            return any(
                'GangGroup "default/g" gets rejected' in condition.get("message", "")
                for pod in await pods(client)
                for condition in pod["status"].get("conditions", [])
            )

        await eventually(rejected)
        nodes = await nodes_of(client)
        assert [name for name, node in nodes.items() if node] == ["other"]

        async def status(*phases: str) -> dict[str, Any] | None:
            raw = await client.request("GET", POD_GROUPS.path(namespace="default", name="g"))
            found: dict[str, Any] = msgspec.json.decode(raw).get("status", {})
            return found if found.get("phase") in phases else None

        found = await eventually(lambda: status("Scheduling"))
        assert found.get("scheduled", 0) == 0
        # What the members held for a moment is free again.
        await eventually(lambda: len(process.tables.bookings) == 1)
        await make_node(client, "large", cpu=16)

        async def all_bound() -> bool:
            return all((await nodes_of(client)).values())

        await eventually(all_bound, seconds=30)
        key = "internal.scheduling.koordinator.sh/bind-gang-member-count"
        counts = {
            pod["metadata"]["name"]: pod["metadata"].get("annotations", {}).get(key)
            for pod in await pods(client)
        }
        assert counts == {"other": None, **{f"g{number}": "5" for number in range(5)}}
        assert (await eventually(lambda: status("Scheduled")))["scheduled"] == 5
        running = b'{"status":{"phase":"Running"}}'
        for number in range(5):
            await client.patch(
                PODS, f"g{number}", running, namespace="default", subresource="status"
            )
        assert (await eventually(lambda: status("Running")))["running"] == 5


def test_a_gang_is_bound_together_or_not_at_all(server: ApiServer) -> None:
    play(server, _a_gang_is_bound_together_or_not_at_all)
