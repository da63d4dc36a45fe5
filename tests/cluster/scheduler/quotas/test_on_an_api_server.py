"""A scheduler with quotas on a real API server: lending, reclaiming, edits, statuses."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from kube.client import Client, encode_object
from kube.resources import ELASTIC_QUOTAS, NAMESPACES, PODS, Resource
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.scheduler.beds.on_api_server import (
    make_node,
    make_pod,
    nodes_of,
    play,
    pods,
    refusal,
    scheduler,
)
from tests.cluster.scheduler.quotas.making import PREFIX, assert_as_made_from_objects

pytestmark = pytest.mark.apiserver

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 1
profiles:
- schedulerName: koord-scheduler
  plugins:
    preFilter: {enabled: [{name: ElasticQuota}]}
    postFilter: {enabled: [{name: ElasticQuota}]}
    reserve: {enabled: [{name: ElasticQuota}]}
  pluginConfig:
  - name: ElasticQuota
    args:
      quotaGroupNamespace: quota-test
      monitorAllQuotas: true
      delayEvictTime: 1s
      revokePodInterval: 200ms
"""
_NAMESPACE = "quota-test"
_URGENT = "quota-test-urgent"
_PRIORITY_CLASSES = Resource(
    "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False
)


async def _quota(client: Client, name: str, least: int, most: int, **labels: str) -> None:
    """labels: without their prefix."""
    amounts = {"cpu": str(most), "memory": "64Gi"}
    prefixed = {PREFIX + key.replace("_", "-"): value for key, value in labels.items()}
    body = {
        "metadata": {"name": name, "namespace": _NAMESPACE, "labels": prefixed},
        "spec": {"min": {"cpu": str(least)}, "max": amounts},
    }
    await client.create(ELASTIC_QUOTAS, encode_object(ELASTIC_QUOTAS, body), namespace=_NAMESPACE)


async def _edit(client: Client, name: str, spec: dict[str, Any]) -> None:
    body = json.dumps({"spec": spec}).encode()
    await client.patch(ELASTIC_QUOTAS, name, body, namespace=_NAMESPACE)


async def _read(client: Client, name: str) -> dict[str, Any]:
    path = ELASTIC_QUOTAS.path(namespace=_NAMESPACE, name=name)
    found: dict[str, Any] = json.loads(await client.request("GET", path))
    return found


async def _pod(client: Client, name: str, quota: str, **more: Any) -> None:
    await make_pod(client, name, cpu="1", metadata={"labels": {PREFIX + "name": quota}}, **more)


async def _bound(client: Client) -> set[str]:
    return {name for name, node in (await nodes_of(client)).items() if node}


async def _prepare(client: Client) -> None:
    """Make the namespace, or take away the quotas of an earlier try."""
    path = ELASTIC_QUOTAS.path(namespace=_NAMESPACE)
    if await client.find(NAMESPACES, _NAMESPACE, bytes) is None:
        body = encode_object(NAMESPACES, {"metadata": {"name": _NAMESPACE}})
        await client.create(NAMESPACES, body)
        urgent = {"metadata": {"name": _URGENT}, "value": 1000}
        await client.create(_PRIORITY_CLASSES, encode_object(_PRIORITY_CLASSES, urgent))
    else:
        await client.request("DELETE", path)


async def _quotas_lend_reclaim_and_change_while_pods_wait(
    server: ApiServer, client: Client
) -> None:
    await _prepare(client)
    await make_node(client, "n0", cpu=8)
    await _quota(client, "a", 4, 8)
    await _quota(client, "b", 4, 8)
    async with scheduler(server.connection(), _CONFIGURATION) as process:
        # b lends what it does not request: a gets more than its minimum.
        for number in range(7):
            await _pod(client, f"a{number}", "a")

        async def lent() -> bool:
            return len(await _bound(client)) == 7

        await eventually(lent, seconds=30)

        async def status_shows() -> bool:
            shown = await _read(client, "a")
            annotations = shown["metadata"].get("annotations", {})
            return bool(
                shown.get("status", {}).get("used", {}).get("cpu") == "7"
                and json.loads(annotations.get(PREFIX + "runtime", "{}")).get("cpu") == "7"
                and json.loads(annotations.get(PREFIX + "request", "{}")).get("cpu") == "7"
            )

        await eventually(status_shows, seconds=30)

        # b wants its minimum back: pods of a are evicted until a is at its runtime.
        for number in range(4):
            await _pod(client, f"b{number}", "b")

        async def reclaimed() -> bool:
            bound = await _bound(client)
            of_a = {name for name in bound if name.startswith("a")}
            return len(of_a) == 4 and len(bound - of_a) == 4

        await eventually(reclaimed, seconds=60)

        # More pods of a wait for the quota, and say so.
        await _pod(client, "late", "a")

        async def waits() -> bool:
            (late,) = [pod for pod in await pods(client) if pod["metadata"]["name"] == "late"]
            return "Insufficient quotas, quotaName: a, runtime: cpu:4," in refusal(late)

        await eventually(waits, seconds=30)
        # An edit that cannot be used changes nothing; one that can lets the pod in.
        await _edit(client, "b", {"min": {"cpu": "9"}})
        await eventually(lambda: process.quota_source is not None and process.quota_source.problems)
        await make_node(client, "n1", cpu=8)

        async def late_is_bound() -> bool:
            return "late" in await _bound(client)

        await eventually(late_is_bound, seconds=30)
        await _edit(client, "b", {"min": {"cpu": "1"}, "max": {"cpu": "5"}})
        await eventually(
            lambda: process.quota_source is not None and not process.quota_source.problems
        )
        await _edit(client, "a", {"max": {"cpu": "5"}})
        await _pod(client, "over", "a")

        async def over_waits() -> bool:
            (over,) = [pod for pod in await pods(client) if pod["metadata"]["name"] == "over"]
            return "exceedDimensions: [cpu]" in refusal(over)

        await eventually(over_waits, seconds=30)
        await _edit(client, "a", {"max": {"cpu": "6"}})

        async def over_is_bound() -> bool:
            return "over" in await _bound(client)

        await eventually(over_is_bound, seconds=30)
        # A deleted pod gives its place in the quota to the next.
        await _pod(client, "next", "a")
        await client.delete(PODS, "over", namespace="default")

        async def next_is_bound() -> bool:
            return "next" in await _bound(client)

        await eventually(next_is_bound, seconds=30)

        # The quota is full: an important pod takes the place of one that is not.
        await _pod(client, "urgent", "a", priorityClassName=_URGENT)

        async def urgent_is_bound() -> bool:
            bound = await _bound(client)
            return "urgent" in bound and len({name for name in bound if name[0] != "b"}) == 6

        await eventually(urgent_is_bound, seconds=30)

        async def built_in() -> bool:
            path = ELASTIC_QUOTAS.path(namespace=_NAMESPACE)
            items = json.loads(await client.request("GET", path))["items"]
            return {
                "koordinator-root-quota", "koordinator-system-quota", "koordinator-default-quota",
            } <= {item["metadata"]["name"] for item in items}  # fmt: skip

        await eventually(built_in, seconds=40)
    await client.request("DELETE", ELASTIC_QUOTAS.path(namespace=_NAMESPACE))


def test_quotas_lend_reclaim_and_change_while_pods_wait(server: ApiServer) -> None:
    play(server, _quotas_lend_reclaim_and_change_while_pods_wait)


_ROOT = "koordinator-root-quota"
_STREAM = 15
"""Pods of each quota, and of none."""


async def _stream(client: Client) -> None:
    for number in range(_STREAM):
        for quota in ("fixed", "a", "b", "gone"):
            await _pod(client, f"{quota}-{number}", quota)
        await make_pod(client, f"none-{number}", cpu="1")


async def _edits(client: Client) -> None:
    """Change minimum, maximum and parent, delete, and write what cannot be used. No maximum of
    `a` and `b` is above 8."""
    for turn in range(8):
        await _edit(client, "a", {"min": {"cpu": "2"}, "max": {"cpu": str(2 + turn % 4 * 2)}})
        await _edit(client, "b", {"min": {"cpu": str(turn % 3)}})
        await _edit(client, "fixed", {"min": {"cpu": str(1 if turn % 2 else 99)}})
        parent = _ROOT if turn % 2 else "team"
        label = json.dumps({"metadata": {"labels": {PREFIX + "parent": parent}}}).encode()
        await client.patch(ELASTIC_QUOTAS, "b", label, namespace=_NAMESPACE)
        await client.delete(ELASTIC_QUOTAS, "gone", namespace=_NAMESPACE)
        await asyncio.sleep(0.05)
        await _quota(client, "gone", 0, 1 + turn)


async def _used(client: Client) -> Counter[str]:
    return Counter(name.partition("-")[0] for name in await _bound(client))


async def _quotas_are_edited_under_a_stream_of_pods(server: ApiServer, client: Client) -> None:
    await _prepare(client)
    for number in range(2):
        await make_node(client, f"n{number}", cpu=40)
    await _quota(client, "team", 8, 12, is_parent="true")
    await _quota(client, "a", 2, 4, parent="team")
    await _quota(client, "b", 2, 8, parent="team")
    await _quota(client, "fixed", 1, 5)
    await _quota(client, "gone", 0, 1)
    streaming = _CONFIGURATION.replace("monitorAllQuotas: true", "monitorAllQuotas: false")
    async with scheduler(server.connection(), streaming) as process:
        work = asyncio.gather(_stream(client), _edits(client))
        while not work.done():
            used = await _used(client)
            assert used["fixed"] <= 5 and used["a"] <= 8 and used["b"] <= 8, used
        await work
        for name, most in (("team", 16), ("a", 8), ("b", 8), ("gone", 99), ("fixed", 5)):
            await _edit(client, name, {"min": {"cpu": "1"}, "max": {"cpu": str(most)}})
        every = {"a": 8, "b": 8, "fixed": 5, "gone": _STREAM, "none": _STREAM}

        async def as_the_quotas_allow() -> bool:
            return await _used(client) == every

        await eventually(as_the_quotas_allow, seconds=60)
        await eventually(lambda: not process.binder.in_flight)
        await eventually(lambda: len(process.tables.bookings) == sum(every.values()))
        assert_as_made_from_objects(process)
        assert not process.attempts.faults.count
    await client.request("DELETE", ELASTIC_QUOTAS.path(namespace=_NAMESPACE))


def test_quotas_are_edited_under_a_stream_of_pods(server: ApiServer) -> None:
    play(server, _quotas_are_edited_under_a_stream_of_pods)
