"""Pods with volumes in random clusters: our verdicts beside a real kube-scheduler's.

Each pod is decided alone, as in process/test_beside_kube_scheduler.py. Compared are the reasons of
a refusal with their counts, the node, and the volumes that its claims get. A small controller binds
what kube-scheduler has chosen. About 14 s, of which kube-scheduler waits 1 s for each pod whose
claims it binds.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import msgspec
import pytest

from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.cycle.evaluation import Evaluator
from cluster.scheduler.plugins.contract import Reason, Refusal
from cluster.scheduler.plugins.volumes.binding import VolumeBinding
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.reasons.diagnosis import diagnose, refused
from cluster.scheduler.tables.booking import NO_ALLOCATION
from cluster.scheduler.tables.shapes import PodShape
from kube.client import ApiError, Client
from kube.kept_client import KeptClient
from kube.resources import (
    CSI_DRIVERS,
    CSI_NODES,
    CSI_STORAGE_CAPACITIES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    STORAGE_CLASSES,
    Resource,
)
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.kube_scheduler import kube_scheduler
from tests.cluster.scheduler.beds.beside_kube_scheduler import (
    create,
    decided,
    delete,
    make_node,
    ours,
    set_status,
)
from tests.cluster.scheduler.random_cluster import nodes
from tests.cluster.scheduler.volumes import random_volumes
from tests.cluster.scheduler.volumes.controller import (
    Tree,
    clear_volumes,
    objects,
    volume_controller,
)

pytestmark = [pytest.mark.apiserver, pytest.mark.kube_scheduler]

_NODES = 10
_BOUND = 12
_FREE = 9
_RUNNING = 10
_PENDING = 24
_STORAGE = (STORAGE_CLASSES, CSI_NODES, CSI_DRIVERS, CSI_STORAGE_CAPACITIES)


async def _clear(client: Client) -> None:
    for resource in (PODS, NODES, *_STORAGE):
        await delete(client, resource)
    await clear_volumes(client)


def _pod(name: str, volumes: list[Tree], node: str = "") -> Tree:
    spec: Tree = {
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "containers": [{"name": "c", "image": "x"}],
        "tolerations": [{"operator": "Exists"}],
        "volumes": volumes,
    }
    if node:
        spec["nodeName"] = node
    return {"metadata": {"name": name}, "spec": spec}


def _volume(number: int, claim: str) -> Tree:
    return {"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim}}


async def _make_cluster(client: Client, random: Random) -> list[str]:
    """Make nodes, storage and running pods; return the names of the bound claims."""
    names = []
    for node in nodes(random, _NODES):
        names.append(node["metadata"]["name"])
        await make_node(client, {**node, "spec": {}})
    for body in random_volumes.classes(random):
        await create(client, STORAGE_CLASSES, body)
    for body in random_volumes.csi_nodes(random, names):
        await create(client, CSI_NODES, body)
    for body in random_volumes.csi_drivers():
        await create(client, CSI_DRIVERS, body)
    for body in random_volumes.capacities(random, names):
        await create(client, CSI_STORAGE_CAPACITIES, body)
    for body in random_volumes.free_volumes(random, _FREE, names):
        await create(client, PERSISTENT_VOLUMES, body)
        await set_status(
            client, PERSISTENT_VOLUMES, body["metadata"]["name"], {"phase": "Available"}
        )
    claims = []
    for claim, volume in random_volumes.bound(random, _BOUND, names):
        name = claim["metadata"]["name"]
        claims.append(name)
        made = msgspec.json.decode(await create(client, PERSISTENT_VOLUME_CLAIMS, claim))
        await set_status(client, PERSISTENT_VOLUME_CLAIMS, name, {"phase": "Bound"})
        if volume is not None:
            volume["spec"]["claimRef"]["uid"] = made["metadata"]["uid"]
            await create(client, PERSISTENT_VOLUMES, volume)
            await set_status(
                client, PERSISTENT_VOLUMES, volume["metadata"]["name"], {"phase": "Bound"}
            )
    await client.request(
        "DELETE", PERSISTENT_VOLUME_CLAIMS.path(namespace="default", name=claims[1])
    )
    await set_status(client, PERSISTENT_VOLUME_CLAIMS, claims[2], {"phase": "Lost"})
    for number in range(_RUNNING):
        volumes = [_volume(0, random.choice(claims))]
        if random.random() < 0.5:
            volumes.append({"name": "disk", **random_volumes.disk(random)})
        await create(client, PODS, _pod(f"r{number}", volumes, random.choice(names)))
    return claims


Verdict = tuple[str, dict[str, dict[str, str]]]
"""The message of a refusal, or the best nodes, each with the volumes that claims get there."""


def _ours(process: SchedulerProcess, shape: PodShape) -> Verdict:
    tables = process.tables
    evaluator = Evaluator(process.plugins.profiles["koord-scheduler"], tables)
    try:
        evaluation = evaluator.evaluate(shape)
    except Refusal as refusal:
        return refused(refusal, tables).message, {}
    if not len(evaluation.feasible):
        return diagnose(shape, tables, evaluation.masks).message, {}
    best = {}
    for row in evaluation.feasible[evaluation.totals == evaluation.totals.max()]:
        allocation = VolumeBinding().allocate(shape, tables, int(row), NO_ALLOCATION)
        assert not isinstance(allocation, Reason), allocation
        planned = allocation.volumes
        volumes = {claim.partition("/")[2]: volume for claim, volume in planned.binds}
        volumes |= {claim.partition("/")[2]: "made" for claim in planned.provisions}
        best[tables.nodes.name(int(row))] = volumes
    return "", best


async def _theirs(client: Client, claims: set[str]) -> dict[str, str]:
    """Return what kube-scheduler gave to claims: a volume, or "made"."""
    found = {}
    for claim in await objects(client, PERSISTENT_VOLUME_CLAIMS.path(namespace="default")):
        name, volume = claim["metadata"]["name"], claim["spec"].get("volumeName", "")
        if name in claims and volume:
            found[name] = volume if volume.startswith("free-") else "made"
    return found


async def _forget(client: Client, pod: str, claims: set[str]) -> None:
    """Take a pod, its fresh claims and what was bound to them back."""
    await delete(client, PODS, pod)
    for claim in claims:
        await _remove(client, PERSISTENT_VOLUME_CLAIMS, claim)
    for volume in await objects(client, PERSISTENT_VOLUMES.path()):
        name = volume["metadata"]["name"]
        if volume["spec"].get("claimRef", {}).get("name") not in claims:
            continue
        if name.startswith("free-"):
            await client.patch(PERSISTENT_VOLUMES, name, b'{"spec":{"claimRef":null}}')
            await set_status(client, PERSISTENT_VOLUMES, name, {"phase": "Available"})
        else:
            await _remove(client, PERSISTENT_VOLUMES, name)


async def _remove(client: Client, resource: Resource, name: str) -> None:
    namespace = "default" if resource.namespaced else ""
    path = resource.path(namespace=namespace, name=name)
    for method, body in (("DELETE", None), ("PATCH", b'{"metadata":{"finalizers":null}}')):
        try:
            if body is None:
                await client.request(method, path)
            else:
                await client.patch(resource, name, body, namespace=namespace)
        except ApiError as error:
            assert error.not_found, error


async def _compare(client: Client, server: ApiServer, folder: Path, random: Random) -> None:
    differences = []
    placed = chosen = 0
    bound = await _make_cluster(client, random)
    async with ours(server) as process:
        with kube_scheduler(server, folder):
            for number in range(_PENDING):
                name = f"p{number}"
                fresh = {}
                if random.random() < 0.4:
                    for index in range(random.choice((1, 1, 2, 3))):
                        fresh[f"{name}-{index}"] = random_volumes.fresh_claim(
                            random, f"{name}-{index}"
                        )
                used = list(fresh)
                if not used or random.random() < 0.4:
                    used += random.sample(bound, random.choice((1, 1, 2)))
                if random.random() < 0.05:
                    used.append("missing")
                volumes = [_volume(index, claim) for index, claim in enumerate(used)]
                if random.random() < 0.2:
                    volumes.append({"name": "disk", **random_volumes.disk(random)})
                if random.random() < 0.05:
                    volumes.append({"name": "e", "ephemeral": _template(random)})
                for claim in fresh.values():
                    await create(client, PERSISTENT_VOLUME_CLAIMS, claim)
                body = _pod(name, volumes)
                shown = await create(client, PODS, body, dry=True)
                shape = process.source.shape_of(decode_scheduling_pod(shown))
                table = process.tables.volumes
                await eventually(lambda: len(process.tables.bookings) == _RUNNING)
                await _seen(client, process)
                message, best = _ours(process, shape)
                before = {key: table.claim(f"default/{key}") for key in used}
                async with volume_controller(client):
                    await create(client, PODS, body)
                    node, theirs = await decided(client, name)
                got = await _theirs(client, set(fresh))
                await _forget(client, name, set(fresh))
                about = (name, node, theirs, got, message, best, before)
                if node:
                    placed += 1
                    chosen += len(got)
                    if best.get(node) != got:
                        differences.append(about)
                elif theirs != message:
                    differences.append(about)
    text = "\n\n".join(str(each) for each in differences)
    assert not differences, f"{len(differences)} of {_PENDING} differ:\n{text}"
    # A cluster that takes all pods, or none, would compare only one side.
    assert 0 < placed < _PENDING
    assert chosen


def _template(random: Random) -> Tree:
    claim = random_volumes.fresh_claim(random, "e")
    return {"volumeClaimTemplate": {"spec": claim["spec"]}}


async def _seen(client: Client, process: SchedulerProcess) -> None:
    """Wait until the process sees the volumes and claims as the API server has them."""
    stored = {
        each["metadata"]["name"]: each["metadata"]["resourceVersion"]
        for resource in (PERSISTENT_VOLUMES, PERSISTENT_VOLUME_CLAIMS)
        for each in await objects(client, resource.path())
    }

    def equal() -> bool:
        shown = {
            each.metadata.name: each.metadata.resource_version
            for cache in (process.volumes.volumes, process.volumes.claims)
            for each in cache.items.values()
        }
        return shown == stored

    await eventually(equal)


async def _play(server: ApiServer, folder: Path, seed: int) -> None:
    async with KeptClient(server.connection(), user_agent="test") as client:
        await _clear(client)
        try:
            await _compare(client, server, folder, Random(seed))
        finally:
            await _clear(client)


@pytest.mark.parametrize("seed", [3])
def test_verdicts_on_pods_with_volumes_are_those_of_kube_scheduler(
    server: ApiServer, tmp_path: Path, seed: int
) -> None:
    asyncio.run(_play(server, tmp_path, seed))
