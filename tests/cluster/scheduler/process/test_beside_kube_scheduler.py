"""Random clusters without Koordinator's features: our verdicts beside a real kube-scheduler's.

Each pod is decided alone: kube-scheduler binds or refuses it, and it is deleted again. Ours is
worked out from the same API server before that. Compared are the reasons of a refusal with their
counts, and that kube-scheduler's node is one of those with our highest total. Volumes are left
out (nothing here decides about them), and so is what kube-scheduler adds about preemption. About
4 s a cluster.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.cycle.evaluation import Evaluator
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.sources.workloads import REPLICA_SETS
from kube.client import Client
from kube.kept_client import KeptClient
from kube.resources import NODES, PODS, Resource
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.kube_scheduler import kube_scheduler
from tests.cluster.scheduler.random_cluster import APPS, Tree, nodes, pod

pytestmark = [pytest.mark.apiserver, pytest.mark.kube_scheduler]

_NODES = 12
_RUNNING = 24
_PENDING = 22
_OURS = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
profiles: [{schedulerName: koord-scheduler}]
"""
_PREEMPTION = re.compile(r"\. (no new claims to deallocate, )?preemption: .*", re.DOTALL)


async def _create(client: Client, resource: Resource, body: Tree, query: str = "") -> bytes:
    namespace = "default" if resource.namespaced else ""
    path = resource.path(namespace=namespace) + query
    return await client.request("POST", path, body=msgspec.json.encode(body))


async def _clear(client: Client) -> None:
    for resource in (PODS, REPLICA_SETS, NODES):
        path = resource.path(namespace="default" if resource.namespaced else "")
        await client.request("DELETE", f"{path}?gracePeriodSeconds=0")


async def _make_cluster(client: Client, random: Random) -> dict[str, Tree]:
    """Make nodes, ReplicaSets and running pods; return the owner reference by app."""
    names = []
    for node in nodes(random, _NODES):
        name = node["metadata"]["name"]
        names.append(name)
        await _create(client, NODES, node)
        status = msgspec.json.encode({"status": node["status"]})
        await client.patch(NODES, name, status, subresource="status")
        # The API server marks a new node as not ready; a kubelet would take that off.
        await client.patch(NODES, name, msgspec.json.encode({"spec": node["spec"]}))
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
        made = msgspec.json.decode(await _create(client, REPLICA_SETS, body))
        owners[app] = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": app,
            "uid": made["metadata"]["uid"],
            "controller": True,
        }
    for number in range(_RUNNING):
        body = pod(random, f"r{number}", node=random.choice(names), owners=owners)
        await _create(client, PODS, body)
    return owners


async def _decided(client: Client, name: str) -> tuple[str, str]:
    """Return the node that kube-scheduler gave a pod, or "", and the message of its refusal."""

    async def decided() -> tuple[str, str] | None:
        raw = await client.request("GET", PODS.path(namespace="default", name=name))
        found: dict[str, Any] = msgspec.json.decode(raw)
        if node := found["spec"].get("nodeName"):
            return node, ""
        for condition in found["status"].get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return "", _PREEMPTION.sub(".", condition["message"])
        return None

    answer: tuple[str, str] = await eventually(decided, seconds=30, every=0.03)
    return answer


async def _compare(server: ApiServer, folder: Path, seed: int) -> None:
    random = Random(seed)
    stop = asyncio.Event()
    differences = []
    placed = 0
    async with KeptClient(server.connection(), user_agent="test") as client:
        await _clear(client)
        owners = await _make_cluster(client, random)
        process = SchedulerProcess(client, read_configuration(_OURS, obj="test"), seed=1)
        task = asyncio.create_task(process.run(stop))
        evaluator = Evaluator(process.plugins.profiles["koord-scheduler"], process.tables)
        try:
            await eventually(lambda: process.ready or task.done(), seconds=30)
            with kube_scheduler(server, folder):
                for number in range(_PENDING):
                    body = pod(random, f"p{number}", owners=owners)
                    # With the API server's defaults, but not seen by kube-scheduler yet.
                    shown = await _create(client, PODS, body, "?dryRun=All")
                    shape = process.source.shape_of(decode_scheduling_pod(shown))
                    await eventually(lambda: len(process.tables.bookings) == _RUNNING)
                    ours = evaluator.evaluate(shape)
                    totals = {
                        process.tables.nodes.name(int(row)): int(total)
                        for row, total in zip(ours.feasible, ours.totals, strict=True)
                    }
                    refusal = diagnose(shape, process.tables, ours.masks).message
                    await _create(client, PODS, body)
                    node, message = await _decided(client, f"p{number}")
                    path = PODS.path(namespace="default", name=f"p{number}")
                    await client.request("DELETE", f"{path}?gracePeriodSeconds=0")
                    if node:
                        placed += 1
                        if totals.get(node, -1) != max(totals.values(), default=0):
                            differences.append((node, totals, refusal, body))
                    elif totals or message != refusal:
                        differences.append((message, totals, refusal, body))
        finally:
            stop.set()
            await task
    text = "\n\n".join(str(each) for each in differences)
    assert not differences, f"{len(differences)} of {_PENDING} differ:\n{text}"
    # A cluster that takes all pods, or none, would compare only one side.
    assert 0 < placed < _PENDING


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_verdicts_are_those_ofkube_scheduler(server: ApiServer, tmp_path: Path, seed: int) -> None:
    asyncio.run(_compare(server, tmp_path, seed))
