"""Reservations on a real API server: from their creation to their end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from apis.meta import format_time
from kube.client import Client, encode_object
from kube.resources import EVENTS, PODS, RESERVATIONS
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.unkind_server import Held, unkind
from tests.cluster.scheduler.beds.on_api_server import (
    make_cpus,
    make_node,
    make_pod,
    nodes_of,
    play,
    pods,
    refusal,
    scheduler,
)

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
    preEnqueue: {enabled: [{name: Coscheduling}]}
    preFilter: {enabled: [{name: Reservation}]}
    filter: {enabled: [{name: Reservation}, {name: NodeNUMAResource}]}
    preScore: {enabled: [{name: Reservation}]}
    score: {enabled: [{name: Reservation, weight: 5000}]}
    reserve: {enabled: [{name: Reservation}, {name: NodeNUMAResource}]}
    permit: {enabled: [{name: Coscheduling}]}
    preBind: {enabled: [{name: Reservation}]}
    bind: {enabled: [{name: Reservation}]}
"""
_USES = "scheduling.koordinator.sh/reservation-allocated"
_OWNER = {"labels": {"app": "web"}}


async def _reserve(
    client: Client,
    name: str,
    *,
    cpu: str = "4",
    metadata: dict[str, Any] | None = None,
    **spec: Any,
) -> None:
    resources = {"requests": {"cpu": cpu, "memory": "1Gi"}}
    template = {
        "spec": {
            "schedulerName": "koord-scheduler",
            "containers": [{"name": "main", "image": "x", "resources": resources}],
        }
    }
    body = {
        "metadata": {"name": name, **(metadata or {})},
        "spec": {
            "template": template,
            "owners": [{"labelSelector": {"matchLabels": {"app": "web"}}}],
            "ttl": "1h",
            **spec,
        },
    }
    await client.create(RESERVATIONS, encode_object(RESERVATIONS, body))


async def _reservation(client: Client, name: str) -> dict[str, Any]:
    raw = await client.request("GET", RESERVATIONS.path(name=name))
    found: dict[str, Any] = msgspec.json.decode(raw)
    return found


async def _reaches(client: Client, name: str, phase: str) -> dict[str, Any]:
    """Wait until a reservation has a phase; return its status."""

    async def look() -> dict[str, Any] | None:
        status: dict[str, Any] = (await _reservation(client, name)).get("status", {})
        return status if status.get("phase") == phase else None

    found: dict[str, Any] = await eventually(look, seconds=30)
    return found


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    found = (one for one in status.get("conditions", []) if one["type"] == kind)
    return next(found, {})


async def _bound(client: Client, *names: str) -> dict[str, dict[str, Any]]:
    """Wait until pods have nodes; return them by name."""

    async def look() -> bool:
        nodes = await nodes_of(client)
        return all(nodes.get(name) for name in names)

    await eventually(look, seconds=30)
    raw = await client.request("GET", PODS.path(namespace="default"))
    return {pod["metadata"]["name"]: pod for pod in msgspec.json.decode(raw)["items"]}


def _play(server: ApiServer, scenario: Callable[[ApiServer, Client], Awaitable[None]]) -> None:
    async def run(server: ApiServer, client: Client) -> None:
        try:
            await scenario(server, client)
        finally:
            # They would keep room on nodes of the same name in later tests.
            await client.request("DELETE", RESERVATIONS.path())

    play(server, run)


async def _a_pod_takes_what_is_kept_for_it(server: ApiServer, client: Client) -> None:
    await make_node(client, "n0", cpu=8)
    await make_node(client, "n1", cpu=2)
    async with scheduler(server.connection(), _CONFIGURATION):
        await _reserve(client, "once", cpu="6")
        status = await _reaches(client, "once", "Available")
        assert status["nodeName"] == "n0"
        assert status["allocatable"] == {"cpu": "6", "memory": "1Gi"}
        assert _condition(status, "Scheduled")["status"] == "True"
        # What is kept is taken for everybody else.
        await make_pod(client, "stranger", cpu="4")
        await make_pod(client, "owner", cpu="5", metadata=_OWNER)
        pods = await _bound(client, "owner")
        assert pods["owner"]["spec"]["nodeName"] == "n0"
        uses = json.loads(pods["owner"]["metadata"]["annotations"][_USES])
        assert uses["name"] == "once"
        status = await _reaches(client, "once", "Succeeded")
        (current,) = status["currentOwners"]
        assert current["name"] == "owner"
        assert status["allocated"] == {"cpu": "5", "memory": "100Mi"}
        assert not (await nodes_of(client))["stranger"]
        # 8 CPUs less the 5 of the owner: what it left of the reservation is free again.
        await make_pod(client, "small", cpu="3")
        await _bound(client, "small")

        async def event() -> bool:
            raw = await client.request("GET", EVENTS.path(namespace="default"))
            return any(
                each["reason"] == "Scheduled" and each["involvedObject"]["name"] == "once"
                for each in msgspec.json.decode(raw)["items"]
            )

        await eventually(event)


def test_a_pod_takes_what_is_kept_for_it(server: ApiServer) -> None:
    _play(server, _a_pod_takes_what_is_kept_for_it)


async def _a_scheduler_that_ends_at_any_moment_loses_nothing(
    server: ApiServer, client: Client
) -> None:
    for number in range(3):
        await make_node(client, f"n{number}", cpu=8)
    for number in range(6):
        await _reserve(client, f"r{number}", allocateOnce=False)
    for _ in range(3):
        async with scheduler(server.connection(), _CONFIGURATION):
            await asyncio.sleep(0.05)
    async with scheduler(server.connection(), _CONFIGURATION) as process:
        for number in range(6):
            await _reaches(client, f"r{number}", "Available")
    for number in range(12):
        await make_pod(client, f"p{number}", cpu="2", metadata=_OWNER)
    for _ in range(3):
        async with scheduler(server.connection(), _CONFIGURATION):
            await asyncio.sleep(0.05)
    async with scheduler(server.connection(), _CONFIGURATION) as process:
        await _bound(client, *(f"p{number}" for number in range(12)))

        async def counted() -> bool:
            listed = [await _reservation(client, f"r{number}") for number in range(6)]
            return all(one["status"].get("allocated", {}).get("cpu") == "4" for one in listed)

        await eventually(counted)
        nodes = process.tables.nodes
        requested = [int(nodes.requested[nodes.row(f"n{n}"), 0]) for n in range(3)]
        assert requested == [8000] * 3


def test_a_scheduler_that_ends_at_any_moment_loses_nothing(server: ApiServer) -> None:
    _play(server, _a_scheduler_that_ends_at_any_moment_loses_nothing)


async def _one_that_cannot_be_placed_says_why_and_expires(
    server: ApiServer, client: Client
) -> None:
    await make_node(client, "n0", cpu=4)
    async with scheduler(server.connection(), _CONFIGURATION):
        await _reserve(client, "large", cpu="64", ttl="0s")
        await _reserve(client, "bad", ttl="a while")

        async def refused(name: str) -> str:
            condition = _condition(
                (await _reservation(client, name)).get("status", {}), "Scheduled"
            )
            assert condition.get("status") != "True"
            return (
                condition.get("message", "") if condition.get("reason") == "Unschedulable" else ""
            )

        message = await eventually(lambda: refused("bad"))
        assert message == (
            "Reservation bad: spec.ttl = 'a while': not a duration such as 30s, 5m or 1h30m"
        )
        message = await eventually(lambda: refused("large"))
        assert message.startswith("0/1 nodes are available: 1 Insufficient cpu")
        await client.patch(RESERVATIONS, "bad", b'{"spec":{"ttl":"1h"}}')
        await _reaches(client, "bad", "Available")
        over = format_time(datetime.now(UTC) - timedelta(seconds=1))
        expires = msgspec.json.encode({"spec": {"expires": over}})
        await client.patch(RESERVATIONS, "large", expires)
        status = await _reaches(client, "large", "Failed")
        assert _condition(status, "Ready")["reason"] == "Expired"
        # An Available one that is deleted gives its room back.
        await make_pod(client, "waits", cpu="3")
        await client.delete(RESERVATIONS, "bad")
        await _bound(client, "waits")


def test_one_that_cannot_be_placed_says_why_and_expires(server: ApiServer) -> None:
    _play(server, _one_that_cannot_be_placed_says_why_and_expires)


async def _a_gang_of_reservations_gets_nodes_together(server: ApiServer, client: Client) -> None:
    await make_node(client, "n0", cpu=6)
    prefix = "gang.scheduling.koordinator.sh"
    gang = {"annotations": {f"{prefix}/name": "g", f"{prefix}/min-available": "2"}}
    async with scheduler(server.connection(), _CONFIGURATION):
        for name in ("a", "b"):
            await _reserve(client, name, metadata=gang)

        async def rejected() -> bool:
            found = [await _reservation(client, name) for name in ("a", "b")]
            messages = [_condition(each.get("status", {}), "Scheduled") for each in found]
            return any("GangGroup" in each.get("message", "") for each in messages)

        await eventually(rejected)
        for name in ("a", "b"):
            assert not (await _reservation(client, name))["status"].get("nodeName")
        await make_node(client, "n1", cpu=6)
        nodes = {(await _reaches(client, name, "Available"))["nodeName"] for name in ("a", "b")}
        assert nodes == {"n0", "n1"}
        key = "internal.scheduling.koordinator.sh/bind-gang-member-count"
        assert (await _reservation(client, "a"))["metadata"]["annotations"][key] == "2"


def test_a_gang_of_reservations_gets_nodes_together(server: ApiServer) -> None:
    _play(server, _a_gang_of_reservations_gets_nodes_together)


async def _a_pod_that_demands_a_reservation_waits_for_it_and_gets_its_cpus(
    server: ApiServer, client: Client
) -> None:
    await make_node(client, "n0", cpu=8)
    await make_cpus(client, "n0", 8)
    bound_to_cpus = {"koordinator.sh/qosClass": "LSR"}
    demands = {"scheduling.koordinator.sh/reservation-affinity": json.dumps({"name": "kept"})}
    async with scheduler(server.connection(), _CONFIGURATION):
        metadata = {"labels": bound_to_cpus, "annotations": demands}
        await make_pod(client, "chosen", cpu="2", metadata=metadata)

        async def refused() -> bool:
            (pod,) = await pods(client)
            return "no reservations match reservation affinity" in refusal(pod)

        await eventually(refused)
        # The owner is the pod by its name; a replica would look the same otherwise.
        owners = [{"object": {"name": "chosen", "namespace": "default"}}]
        await _reserve(
            client,
            "kept",
            cpu="4",
            metadata={"labels": bound_to_cpus},
            owners=owners,
            allocatePolicy="Restricted",
            allocateOnce=False,
        )
        found = (await _bound(client, "chosen"))["chosen"]["metadata"]["annotations"]
        assert json.loads(found[_USES])["name"] == "kept"
        status = "scheduling.koordinator.sh/resource-status"
        kept = (await _reservation(client, "kept"))["metadata"]["annotations"]
        assert json.loads(kept[status])["cpuset"] == "0-3"
        assert json.loads(found[status])["cpuset"] == "0-1"
        # The other half of what is kept is not for a replica.
        metadata = {"labels": bound_to_cpus}
        await make_pod(client, "other", cpu="4", metadata=metadata)
        found = (await _bound(client, "other"))["other"]["metadata"]["annotations"]
        assert json.loads(found[status])["cpuset"] == "4-7"


def test_a_pod_that_demands_a_reservation_waits_for_it_and_gets_its_cpus(
    server: ApiServer,
) -> None:
    _play(server, _a_pod_that_demands_a_reservation_waits_for_it_and_gets_its_cpus)


async def _the_room_of_a_running_pod_is_kept_when_it_ends(
    server: ApiServer, client: Client
) -> None:
    await make_node(client, "n0", cpu=4)
    async with scheduler(server.connection(), _CONFIGURATION):
        await make_pod(client, "old", cpu="3", metadata=_OWNER)
        await _bound(client, "old")
        wanted: dict[str, Any] = {
            "preAllocation": True,
            "allocatePolicy": "Restricted",
            "allocateOnce": False,
        }
        await _reserve(client, "r", cpu="3", **wanted)
        await _reaches(client, "r", "Available")

        async def owners() -> list[str]:
            status = (await _reservation(client, "r"))["status"]
            return [one["name"] for one in status.get("currentOwners", [])]

        async def old_is_owner() -> bool:
            return await owners() == ["old"]

        async def none_is_owner() -> bool:
            return await owners() == []

        await eventually(old_is_owner)
        await make_pod(client, "stranger", cpu="2")
        path = PODS.path(namespace="default", name="old")
        await client.request("DELETE", f"{path}?gracePeriodSeconds=0")
        await eventually(none_is_owner)
        await make_pod(client, "new", cpu="2", metadata=_OWNER)
        await _bound(client, "new")
        assert not (await nodes_of(client))["stranger"]


def test_the_room_of_a_running_pod_is_kept_when_it_ends(server: ApiServer) -> None:
    _play(server, _the_room_of_a_running_pod_is_kept_when_it_ends)


async def _one_that_expires_while_its_pod_is_bound_gives_nothing_twice(
    server: ApiServer, client: Client
) -> None:
    await make_node(client, "n0", cpu=8)

    def binding(name: str) -> tuple[str, str]:
        return "POST", PODS.path(namespace="default", name=name, subresource="binding")

    async with (
        unkind(server, seed=0, share=0.0) as between,
        scheduler(between.connection, _CONFIGURATION) as process,
    ):
        await _reserve(client, "r", cpu="6", allocateOnce=False)
        await _reaches(client, "r", "Available")
        between.holds |= {binding("owner"): Held.BEFORE, binding("gone"): Held.BEFORE}
        await make_pod(client, "owner", cpu="4", metadata=_OWNER)
        await make_pod(client, "gone", cpu="2", metadata=_OWNER)
        await eventually(lambda: between.held == set(between.holds))
        over = format_time(datetime.now(UTC) - timedelta(seconds=1))
        expires = msgspec.json.encode({"spec": {"expires": over}})
        await client.patch(RESERVATIONS, "r", expires)
        assert _condition(await _reaches(client, "r", "Failed"), "Ready")["reason"] == "Expired"
        # Both pods keep their room, and what the reservation had left of the node is free: 2 of 8.
        await make_pod(client, "fits", cpu="2")
        await _bound(client, "fits")
        await make_pod(client, "late", cpu="2", metadata=_OWNER)

        async def late_is_refused() -> bool:
            (late,) = [pod for pod in await pods(client) if pod["metadata"]["name"] == "late"]
            return "1 Insufficient cpu" in refusal(late)

        await eventually(late_is_refused)
        # A binding that is not carried out gives its room to a pod that the reservation was for.
        path = PODS.path(namespace="default", name="gone")
        await client.request("DELETE", f"{path}?gracePeriodSeconds=0")
        between.release()
        found = await _bound(client, "owner", "late")
        assert json.loads(found["owner"]["metadata"]["annotations"][_USES])["name"] == "r"
        assert _USES not in found["late"]["metadata"].get("annotations", {})
        nodes = process.tables.nodes
        await eventually(lambda: not process.binder.in_flight)
        assert int(nodes.requested[nodes.row("n0"), 0]) == 8000
        assert not process.attempts.faults.count


def test_one_that_expires_while_its_pod_is_bound_gives_nothing_twice(server: ApiServer) -> None:
    _play(server, _one_that_expires_while_its_pod_is_bound_gives_nothing_twice)
