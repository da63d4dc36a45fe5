"""Preemption on a real API server: budgets, what stands on a victim, a restart, and who gets the
room. About 3 s."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from cluster.scheduler.configuration.auditing import AuditorSettings
from cluster.scheduler.sources.disruption_budgets import DISRUPTION_BUDGETS
from kube.client import Client, encode_object
from kube.resources import EVENTS, NODES, PODS, PRIORITY_CLASSES
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.scheduler.beds.on_api_server import make_node, scheduler

pytestmark = pytest.mark.apiserver

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
profiles: [{schedulerName: koord-scheduler}]
"""
_CLASSES = {"preempted-low": 10, "preempting-high": 1000}


async def _make_pod(
    client: Client, name: str, cpu: int, priority: str, *, app: str = "", node: str = ""
) -> None:
    resources = {"requests": {"cpu": str(cpu)}}
    spec = {
        "schedulerName": "koord-scheduler",
        "priorityClassName": priority,
        "automountServiceAccountToken": False,
        "containers": [{"name": "main", "image": "x", "resources": resources}],
        **({"nodeName": node} if node else {}),
    }
    body = {"metadata": {"name": name, "labels": {"app": app or "any"}}, "spec": spec}
    await client.create(PODS, encode_object(PODS, body), namespace="default")


async def _make_budget(client: Client, app: str) -> None:
    """Make a budget that allows no disruption, as its controller would find it."""
    body = {
        "metadata": {"name": app},
        "spec": {"minAvailable": 2, "selector": {"matchLabels": {"app": app}}},
    }
    raw = encode_object(DISRUPTION_BUDGETS, body)
    await client.create(DISRUPTION_BUDGETS, raw, namespace="default")
    status = {"currentHealthy": 2, "desiredHealthy": 2, "expectedPods": 2, "disruptionsAllowed": 0}
    path = DISRUPTION_BUDGETS.path(namespace="default", name=app, subresource="status")
    await client.request(
        "PATCH",
        path,
        body=msgspec.json.encode({"status": status}),
        content_type="application/merge-patch+json",
    )


async def _pod(client: Client, name: str) -> dict[str, Any]:
    raw = await client.request("GET", PODS.path(namespace="default", name=name))
    found: dict[str, Any] = msgspec.json.decode(raw)
    return found


async def _clear(client: Client) -> None:
    for resource, namespace in (
        (PODS, "default"),
        (EVENTS, "default"),
        (DISRUPTION_BUDGETS, "default"),
        (NODES, ""),
    ):
        path = f"{resource.path(namespace=namespace)}?gracePeriodSeconds=0"
        await client.request("DELETE", path)
    for name in _CLASSES:
        await client.delete(PRIORITY_CLASSES, name)


async def _play(server: ApiServer) -> None:
    async with server.client() as client:
        await _clear(client)
        for name, value in _CLASSES.items():
            body = encode_object(PRIORITY_CLASSES, {"metadata": {"name": name}, "value": value})
            await client.create(PRIORITY_CLASSES, body)
        for node, app in (("n0", "kept"), ("n1", "any")):
            await make_node(client, node, cpu=4)
            for number in range(2):
                name = f"{node}-{number}"
                await _make_pod(client, name, 2, "preempted-low", app=app, node=node)
        await _make_budget(client, "kept")
        try:
            await _scenario(server, client)
        finally:
            await _clear(client)


async def _scenario(server: ApiServer, client: Client) -> None:
    victims = ("n1-0", "n1-1")

    async def both_end() -> bool:
        pods = [await _pod(client, name) for name in victims]
        return all("deletionTimestamp" in pod["metadata"] for pod in pods)

    async def nominated() -> bool:
        return bool((await _pod(client, "new"))["status"].get("nominatedNodeName") == "n1")

    auditor = AuditorSettings()
    async with scheduler(server.connection(), _CONFIGURATION, auditor=auditor) as process:
        await _make_pod(client, "new", 4, "preempting-high")
        await eventually(both_end)
        await eventually(nominated)
        assert process.auditor is not None
        assert process.auditor.victims == 2
    for name in victims:
        (condition,) = (
            each
            for each in (await _pod(client, name))["status"]["conditions"]
            if each["type"] == "DisruptionTarget"
        )
        assert condition["reason"] == "PreemptionByScheduler"
        assert condition["status"] == "True"
    async with scheduler(server.connection(), _CONFIGURATION, auditor=auditor) as process:
        # The new process knows the nomination and the victims from the API server alone.
        await _make_pod(client, "late", 2, "preempted-low")

        async def told(name: str, text: str) -> bool:
            conditions = (await _pod(client, name))["status"].get("conditions", [])
            return any(text in each.get("message", "") for each in conditions)

        await eventually(lambda: told("new", "not eligible due to a terminating pod"))
        await eventually(lambda: told("late", "Insufficient cpu"))
        for name in victims:
            path = PODS.path(namespace="default", name=name)
            await client.request("DELETE", f"{path}?gracePeriodSeconds=0")

        async def bound() -> bool:
            return bool((await _pod(client, "new"))["spec"].get("nodeName") == "n1")

        await eventually(bound, seconds=30)
        assert "nodeName" not in (await _pod(client, "late"))["spec"]
        for number in range(2):
            assert "deletionTimestamp" not in (await _pod(client, f"n0-{number}"))["metadata"]
        await eventually(lambda: len(process.scheduling.nominator) == 0)
        text = "".join(process.metrics.registry.slices())
        for event in ("create", "preemptVictimDeleting", "scheduled"):
            labels = f'priority="",event_type="{event}",outcome="scheduled"'
            assert f"events_before_outcome_count{{{labels}}} 1\n" in text
        # The process before this one began the preemption.
        assert 'event_type="preemptNominated"' not in text


def test_a_pod_gets_the_node_whose_budget_allows_it_across_a_restart(server: ApiServer) -> None:
    asyncio.run(_play(server))
