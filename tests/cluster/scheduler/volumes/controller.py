"""Kubernetes' volume controller and a provisioner, as far as a scheduler depends on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kube.client import ApiError, Client
from kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES
from tests.cluster.scheduler.volumes.making import HOST, on

Tree = dict[str, Any]
Made = Callable[[Tree, str], bool]
"""(claim, node) -> whether the provisioner can make the claim's volume there."""


@asynccontextmanager
async def volume_controller(
    client: Client, *, made: Made = lambda claim, node: True
) -> AsyncIterator[None]:
    """Bind claims of the namespace default, and make volumes for them, until the block ends."""
    task = asyncio.create_task(_run(client, made))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(client: Client, made: Made) -> None:
    while True:
        try:
            await bind_once(client, made)
        except ApiError as error:
            # Others write too; the next round sees what they wrote.
            assert error.status in (404, 409), error
        await asyncio.sleep(0.05)


async def bind_once(client: Client, made: Made) -> None:
    """Carry out what the claims and volumes ask for now."""
    claims = {
        claim["metadata"]["name"]: claim
        for claim in await objects(client, PERSISTENT_VOLUME_CLAIMS.path(namespace="default"))
    }
    volumes = await objects(client, PERSISTENT_VOLUMES.path())
    referred = {
        volume["spec"]["claimRef"]["uid"]: volume["metadata"]["name"]
        for volume in volumes
        if volume["spec"].get("claimRef", {}).get("uid")
    }
    for name, claim in claims.items():
        annotations = claim["metadata"].get("annotations", {})
        if claim["spec"].get("volumeName"):
            continue
        node = annotations.get("volume.kubernetes.io/selected-node")
        if claim["metadata"]["uid"] in referred:
            await _bind(client, name, referred[claim["metadata"]["uid"]])
        elif node and made(claim, node):
            await _provision(client, claim, node)
        elif node:
            patch = {"metadata": {"annotations": {"volume.kubernetes.io/selected-node": None}}}
            await _patch_claim(client, name, patch)


async def objects(client: Client, path: str) -> list[Tree]:
    items: list[Tree] = msgspec.json.decode(await client.request("GET", path))["items"]
    return items


async def _provision(client: Client, claim: Tree, node: str) -> None:
    metadata, spec = claim["metadata"], claim["spec"]
    body = {
        "metadata": {"name": f"pvc-{metadata['uid']}"},
        "spec": {
            "accessModes": spec["accessModes"],
            "capacity": spec["resources"]["requests"],
            "storageClassName": spec["storageClassName"],
            "csi": {"driver": "csi.test", "volumeHandle": metadata["uid"]},
            "nodeAffinity": {"required": {"nodeSelectorTerms": on(HOST, node)}},
            "claimRef": {
                "kind": "PersistentVolumeClaim",
                "apiVersion": "v1",
                "namespace": "default",
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        },
    }
    await client.create(PERSISTENT_VOLUMES, msgspec.json.encode(body))


async def _bind(client: Client, claim: str, volume: str) -> None:
    bound = {"phase": "Bound"}
    await client.patch(
        PERSISTENT_VOLUMES, volume, msgspec.json.encode({"status": bound}), subresource="status"
    )
    patch = {
        "metadata": {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
        "spec": {"volumeName": volume},
    }
    await _patch_claim(client, claim, patch)
    path = PERSISTENT_VOLUME_CLAIMS.path(namespace="default", name=claim, subresource="status")
    await client.request(
        "PATCH",
        path,
        body=msgspec.json.encode({"status": bound}),
        content_type="application/merge-patch+json",
    )


async def _patch_claim(client: Client, name: str, patch: Tree) -> None:
    await client.patch(
        PERSISTENT_VOLUME_CLAIMS, name, msgspec.json.encode(patch), namespace="default"
    )


async def clear_volumes(client: Client) -> None:
    """Remove all claims, volumes and storage classes that tests made."""
    for resource in (PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES):
        namespace = "default" if resource.namespaced else ""
        path = resource.path(namespace=namespace)
        await client.request("DELETE", path)
        for left in await objects(client, path):
            name = left["metadata"]["name"]
            patch = msgspec.json.encode({"metadata": {"finalizers": None}})
            try:
                # Without its controller nothing takes the protection of a volume in use away.
                await client.patch(resource, name, patch, namespace=namespace)
            except ApiError as error:
                assert error.not_found, error
