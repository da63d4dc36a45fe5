"""A scheduler process, a real API server and a small volume controller: claims before pods."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from kube.client import Client, encode_object
from kube.resources import (
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    STORAGE_CLASSES,
    Resource,
)
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.scheduler.beds.on_api_server import make_node, nodes_of, scheduler
from tests.cluster.scheduler.volumes.controller import (
    Tree,
    clear_volumes,
    objects,
    volume_controller,
)
from tests.cluster.scheduler.volumes.making import HOST, claim_json, on, volume_json

pytestmark = pytest.mark.apiserver

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
profiles: [{schedulerName: koord-scheduler}]
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 1
"""


async def _create(client: Client, resource: Resource, body: Tree, namespace: str = "") -> None:
    await client.create(resource, encode_object(resource, body), namespace=namespace)


async def _class(client: Client, name: str, provisioner: str) -> None:
    mode = "WaitForFirstConsumer"
    path = STORAGE_CLASSES.path(name=name)
    body = {"metadata": {"name": name}, "provisioner": provisioner, "volumeBindingMode": mode}
    with_kind = encode_object(STORAGE_CLASSES, body)
    found = {each["metadata"]["name"] for each in await objects(client, STORAGE_CLASSES.path())}
    if name in found:
        await client.request("DELETE", path)
    await client.create(STORAGE_CLASSES, with_kind)


async def _volume(client: Client, name: str, *, node: str, size: str = "1Gi") -> None:
    body = volume_json(
        name, class_name="volumes-local", size=size, terms=on(HOST, node), csi=("csi.test", name)
    )
    await _create(client, PERSISTENT_VOLUMES, body)
    status = msgspec.json.encode({"status": {"phase": "Available"}})
    await client.patch(PERSISTENT_VOLUMES, name, status, subresource="status")


async def _claim(client: Client, name: str, class_name: str, **fields: Any) -> None:
    body = claim_json(name, class_name=class_name, **fields)
    await _create(client, PERSISTENT_VOLUME_CLAIMS, body, "default")


async def _pod(client: Client, name: str, *claims: str) -> None:
    volumes = [
        {"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]
    spec = {
        "schedulerName": "koord-scheduler",
        "automountServiceAccountToken": False,
        "containers": [{"name": "main", "image": "x"}],
        "volumes": volumes,
    }
    await _create(client, PODS, {"metadata": {"name": name}, "spec": spec}, "default")


async def _volumes_of(client: Client) -> dict[str, str]:
    """Return the volume of each claim that is bound."""
    claims = await objects(client, PERSISTENT_VOLUME_CLAIMS.path(namespace="default"))
    return {
        claim["metadata"]["name"]: claim["spec"]["volumeName"]
        for claim in claims
        if claim["spec"].get("volumeName")
    }


async def _message(client: Client, name: str) -> str:
    raw = await client.request("GET", PODS.path(namespace="default", name=name))
    conditions = msgspec.json.decode(raw)["status"].get("conditions", [])
    return next((each.get("message", "") for each in conditions), "")


def _play(server: ApiServer, scenario: Callable[[ApiServer, Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with server.client() as client:
            for resource, namespace in ((PODS, "default"), (NODES, "")):
                path = resource.path(namespace=namespace)
                await client.request("DELETE", f"{path}?gracePeriodSeconds=0")
            await clear_volumes(client)
            await _class(client, "volumes-local", "kubernetes.io/no-provisioner")
            await _class(client, "volumes-made", "csi.test")
            try:
                await scenario(server, client)
            finally:
                await clear_volumes(client)
                for name in ("volumes-local", "volumes-made"):
                    await client.request("DELETE", STORAGE_CLASSES.path(name=name))

    asyncio.run(run())


async def _every_claim_gets_a_volume_of_its_own_where_its_pod_runs(
    server: ApiServer, client: Client
) -> None:
    for number in range(3):
        await make_node(client, f"n{number}", cpu=64, labels={HOST: f"n{number}"})
        for size in (1, 2, 3):
            await _volume(client, f"v{number}-{size}", node=f"n{number}", size=f"{size}Gi")
    async with volume_controller(client), scheduler(server.connection(), _CONFIGURATION) as process:
        for number in range(9):
            await _claim(client, f"data-{number}", "volumes-local")
            await _claim(client, f"made-{number}", "volumes-made")
            await _pod(client, f"web-{number}", f"data-{number}", f"made-{number}")

        async def all_bound() -> bool:
            nodes = await nodes_of(client)
            return len(nodes) == 9 and all(nodes.values())

        await eventually(all_bound, seconds=60)
        volumes = await _volumes_of(client)
        assert len(set(volumes.values())) == len(volumes) == 18
        nodes = await nodes_of(client)
        for number in range(9):
            assert volumes[f"data-{number}"][:2] == f"v{nodes[f'web-{number}'][1:]}"
        # What is bound is not planned any more.
        bookings = process.tables.bookings
        await eventually(lambda: not any(each.allocation.volumes for each in bookings.values()))
        assert len(bookings) == 9
        await _claim(client, "late", "volumes-local")
        await _pod(client, "late", "late")

        async def refused() -> str:
            return await _message(client, "late")

        message = await eventually(refused)
        none_left = "3 node(s) didn't find available persistent volumes to bind"
        assert message.startswith(f"0/3 nodes are available: {none_left}")
        await _volume(client, "new", node="n1")

        async def late_is_bound() -> bool:
            return (await nodes_of(client))["late"] == "n1"

        await eventually(late_is_bound)


def test_every_claim_gets_a_volume_of_its_own_where_its_pod_runs(server: ApiServer) -> None:
    _play(server, _every_claim_gets_a_volume_of_its_own_where_its_pod_runs)


async def _a_pod_goes_elsewhere_when_its_volume_cannot_be_made(
    server: ApiServer, client: Client
) -> None:
    for number in range(2):
        await make_node(client, f"n{number}", cpu=64, labels={HOST: f"n{number}"})
    tried: list[str] = []

    def made(claim: Tree, node: str) -> bool:
        tried.append(node)
        return node != tried[0]

    async with volume_controller(client, made=made), scheduler(server.connection(), _CONFIGURATION):
        await _claim(client, "c", "volumes-made")
        await _pod(client, "p", "c")

        async def bound() -> bool:
            return bool((await nodes_of(client))["p"])

        await eventually(bound, seconds=60)
        assert (await nodes_of(client))["p"] != tried[0]


def test_a_pod_goes_elsewhere_when_its_volume_cannot_be_made(server: ApiServer) -> None:
    _play(server, _a_pod_goes_elsewhere_when_its_volume_cannot_be_made)


async def _a_restart_goes_on_with_the_volumes_that_were_chosen(
    server: ApiServer, client: Client
) -> None:
    for number in range(3):
        await make_node(client, f"n{number}", cpu=64, labels={HOST: f"n{number}"})
        await _volume(client, f"v{number}", node=f"n{number}")
    await _claim(client, "data", "volumes-local")
    await _claim(client, "made", "volumes-made")
    await _pod(client, "p", "data", "made")

    async def written() -> dict[str, str]:
        claims = await objects(client, PERSISTENT_VOLUME_CLAIMS.path(namespace="default"))
        key = "volume.kubernetes.io/selected-node"
        selected = [claim["metadata"].get("annotations", {}).get(key, "") for claim in claims]
        volumes = await objects(client, PERSISTENT_VOLUMES.path())
        chosen = [each["metadata"]["name"] for each in volumes if each["spec"].get("claimRef")]
        if not chosen or not any(selected):
            return {}
        return {"volume": chosen[0], "node": max(selected)}

    async with scheduler(server.connection(), _CONFIGURATION):
        before = await eventually(written)
    assert not any((await nodes_of(client)).values())
    async with scheduler(server.connection(), _CONFIGURATION) as process, volume_controller(client):

        async def bound() -> bool:
            return bool((await nodes_of(client))["p"])

        await eventually(bound)
        assert (await nodes_of(client))["p"] == before["node"]
        assert (await _volumes_of(client))["data"] == before["volume"]
        assert process.volume_binder.counts.refused == 0


def test_a_restart_goes_on_with_the_volumes_that_were_chosen(server: ApiServer) -> None:
    _play(server, _a_restart_goes_on_with_the_volumes_that_were_chosen)
