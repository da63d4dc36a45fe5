"""Random clusters without Koordinator's features: our verdicts beside a real kube-scheduler's.

Each pod is decided alone: kube-scheduler binds or refuses it, and it is deleted again. Ours is
worked out from the same API server before that. Compared are the reasons of a refusal with their
counts, and that kube-scheduler's node is one of those with our highest total. Volumes are left
out (nothing here decides about them), and so is what kube-scheduler adds about preemption. About
4 s a cluster.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import msgspec
import pytest

from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.cycle.evaluation import Evaluator
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.sources.workloads import REPLICA_SETS
from kube.client import Client
from kube.kept_client import KeptClient
from kube.resources import NODES, PODS
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
from tests.cluster.scheduler.random_cluster import APPS, Tree, nodes, pod

pytestmark = [pytest.mark.apiserver, pytest.mark.kube_scheduler]

_NODES = 12
_RUNNING = 24
_PENDING = 22


async def _clear(client: Client) -> None:
    for resource in (PODS, REPLICA_SETS, NODES):
        await delete(client, resource)


async def _make_cluster(client: Client, random: Random) -> dict[str, Tree]:
    """Make nodes, ReplicaSets and running pods; return the owner reference by app."""
    names = []
    for node in nodes(random, _NODES):
        names.append(node["metadata"]["name"])
        await make_node(client, node)
    owners = {}
    for app in APPS:
        labels = {"owned": app}
        template = {
            "metadata": {"labels": labels},
            "spec": {"containers": [{"name": "c", "image": "x"}]},
        }
        body = {
            "metadata": {"name": app},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        }
        made = msgspec.json.decode(await create(client, REPLICA_SETS, body))
        owners[app] = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": app,
            "uid": made["metadata"]["uid"],
            "controller": True,
        }
    for number in range(_RUNNING):
        body = pod(random, f"r{number}", node=random.choice(names), owners=owners)
        await create(client, PODS, body)
        if random.random() < 0.3:
            await _resize(client, random, body)
    return owners


async def _resize(client: Client, random: Random, body: Tree) -> None:
    """Show that a pod's first container has another amount of cpu than it asks for."""
    container = body["spec"]["containers"][0]
    requests = container["resources"]["requests"]
    allocated, in_force = (requests | {"cpu": f"{random.randint(0, 900)}m"} for _ in range(2))
    status = {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": True,
        "restartCount": 0,
        "allocatedResources": allocated,
        "resources": {"requests": in_force},
    }
    condition = {"type": "PodResizePending", "status": "True", "reason": "Infeasible"}
    conditions = [condition] if random.random() < 0.3 else []
    statuses = {"containerStatuses": [status], "conditions": conditions}
    await set_status(client, PODS, body["metadata"]["name"], statuses)


async def _compare(client: Client, server: ApiServer, folder: Path, random: Random) -> None:
    differences = []
    placed = 0
    owners = await _make_cluster(client, random)
    async with ours(server) as process:
        evaluator = Evaluator(process.plugins.profiles["koord-scheduler"], process.tables)
        with kube_scheduler(server, folder):
            for number in range(_PENDING):
                body = pod(random, f"p{number}", owners=owners)
                # With the API server's defaults, but not seen by kube-scheduler yet.
                shown = await create(client, PODS, body, dry=True)
                shape = process.source.shape_of(decode_scheduling_pod(shown))
                await eventually(lambda: len(process.tables.bookings) == _RUNNING)
                verdict = evaluator.evaluate(shape)
                totals = {
                    process.tables.nodes.name(int(row)): int(total)
                    for row, total in zip(verdict.feasible, verdict.totals, strict=True)
                }
                refusal = diagnose(shape, process.tables, verdict.masks).message
                await create(client, PODS, body)
                node, message = await decided(client, f"p{number}")
                await delete(client, PODS, f"p{number}")
                if node:
                    placed += 1
                    if totals.get(node, -1) != max(totals.values(), default=0):
                        differences.append((node, totals, refusal, body))
                elif totals or message != refusal:
                    differences.append((message, totals, refusal, body))
    text = "\n\n".join(str(each) for each in differences)
    assert not differences, f"{len(differences)} of {_PENDING} differ:\n{text}"
    # A cluster that takes all pods, or none, would compare only one side.
    assert 0 < placed < _PENDING


async def _play(server: ApiServer, folder: Path, seed: int) -> None:
    async with KeptClient(server.connection(), user_agent="test") as client:
        await _clear(client)
        try:
            await _compare(client, server, folder, Random(seed))
        finally:
            await _clear(client)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_verdicts_are_those_of_kube_scheduler(server: ApiServer, tmp_path: Path, seed: int) -> None:
    asyncio.run(_play(server, tmp_path, seed))
