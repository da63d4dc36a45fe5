"""Random clusters without Koordinator's features: our verdicts beside a real kube-scheduler's.

Each pod is decided alone: kube-scheduler binds or refuses it, and it is deleted again. Ours is
worked out from the same API server before that. Compared are the reasons of a refusal with their
counts, the scores of each plugin for each feasible node, and that kube-scheduler's node is one of
those with our highest total. Pods are of two profiles, one of which scores otherwise than by
default. Volumes are left out (nothing here decides about them), and so is what kube-scheduler adds
about preemption. About 4 s a cluster.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from pathlib import Path
from random import Random

import msgspec
import pytest

from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.cycle.evaluation import Evaluation, Evaluator
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.sources.workloads import REPLICA_SETS
from cluster.scheduler.tables.tables import Tables
from kube.client import ApiError, Client
from kube.kept_client import KeptClient
from kube.resources import NAMESPACES, NODES, PODS, Resource
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.kube_scheduler import kube_scheduler
from tests.cluster.scheduler.beds.beside_kube_scheduler import (
    create,
    decided,
    delete,
    make_node,
    ours,
    scores,
    set_status,
)
from tests.cluster.scheduler.random_cluster import (
    APPS,
    NAMESPACE_TEAMS,
    RUNTIME_CLASS,
    Tree,
    nodes,
    pod,
    profile,
    statuses,
)

pytestmark = [pytest.mark.apiserver, pytest.mark.kube_scheduler]

_NODES = 12
_RUNNING = 24
_PENDING = 22
_RUNTIME_CLASSES = Resource("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", False)
_PROFILES = ("default-scheduler", "other-scheduler")


def _named(scheduler_name: str) -> str:
    """Return how we name a profile of kube-scheduler, so that its pods are not ours."""
    return f"our-{scheduler_name}"


async def _clear(client: Client) -> None:
    for name in NAMESPACE_TEAMS:
        await delete(client, PODS, namespace=name)
    for resource in (REPLICA_SETS, NODES, _RUNTIME_CLASSES):
        await delete(client, resource)


async def _make_namespaces(client: Client) -> None:
    for name, team in NAMESPACE_TEAMS.items():
        body = {"metadata": {"name": name, "labels": {"team": team}}}
        try:
            await create(client, NAMESPACES, body)
        except ApiError as error:
            # The API server makes the default one itself, and an earlier cluster made the others.
            if error.status != HTTPStatus.CONFLICT:
                raise
            await client.patch(NAMESPACES, name, msgspec.json.encode(body))


async def _make_owners(client: Client) -> dict[str, Tree]:
    """Make ReplicaSets; return the owner reference by app."""
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
    return owners


async def _make_cluster(client: Client, random: Random) -> dict[str, Tree]:
    """Make nodes, ReplicaSets and running pods; return the owner reference by app."""
    await _make_namespaces(client)
    overhead = {"podFixed": {"cpu": "150m", "memory": "120Mi"}}
    body: Tree = {"metadata": {"name": RUNTIME_CLASS}, "handler": "x", "overhead": overhead}
    await create(client, _RUNTIME_CLASSES, body)
    # Pods on a node that does not exist, or not yet, are nowhere.
    names = ["gone"]
    for node in nodes(random, _NODES):
        names.append(node["metadata"]["name"])
        await make_node(client, node)
    owners = await _make_owners(client)
    for number in range(_RUNNING):
        name = f"r{number}"
        body = pod(random, name, node=random.choice(names), owners=owners)
        namespace = body["metadata"].get("namespace", "default")
        await create(client, PODS, body)
        if random.random() < 0.4:
            status = statuses(random, body["spec"])
            await set_status(client, PODS, name, status, namespace=namespace)
        if random.random() < 0.2:
            labels = {"metadata": {"labels": {"version": random.choice("12")}}}
            await client.patch(PODS, name, msgspec.json.encode(labels), namespace=namespace)
    return owners


async def _compare(client: Client, server: ApiServer, folder: Path, random: Random) -> None:
    differences: list[object] = []
    placed = 0
    owners = await _make_cluster(client, random)
    profiles = [{"schedulerName": _PROFILES[0]}, {"schedulerName": _PROFILES[1], **profile(random)}]
    renamed = [{**each, "schedulerName": _named(each["schedulerName"])} for each in profiles]
    async with ours(server, renamed) as process:
        evaluators = {
            name: Evaluator(process.plugins.profiles[_named(name)], process.tables)
            for name in _PROFILES
        }
        with kube_scheduler(server, folder, profiles=profiles):
            for number in range(_PENDING):
                name = f"p{number}"
                body = pod(random, name, owners=owners)
                body["spec"]["schedulerName"] = random.choice(_PROFILES)
                namespace = body["metadata"].get("namespace", "default")
                # With the API server's defaults, but not seen by kube-scheduler yet.
                shown = await create(client, PODS, body, dry=True)
                shape = process.source.shape_of(decode_scheduling_pod(shown))
                await eventually(lambda: len(process.tables.bookings) == _RUNNING)
                verdict = evaluators[body["spec"]["schedulerName"]].evaluate(shape)
                parts = _parts(verdict, process.tables)
                totals = {
                    process.tables.nodes.name(int(row)): int(total)
                    for row, total in zip(verdict.feasible, verdict.totals, strict=True)
                }
                refusal = diagnose(shape, process.tables, verdict.masks).message
                await create(client, PODS, body)
                node, message = await decided(client, name, namespace=namespace)
                await delete(client, PODS, name, namespace=namespace)
                if node:
                    placed += 1
                    theirs = scores(folder / "log", f"{namespace}/{name}")
                    if (theirs and theirs != parts) or (
                        totals.get(node, -1) != max(totals.values(), default=0)
                    ):
                        differences.append((node, theirs, parts, totals, refusal, body))
                elif totals or message != refusal:
                    differences.append((message, totals, refusal, body))
    text = "\n\n".join(str(each) for each in differences)
    assert not differences, f"{len(differences)} of {_PENDING} differ:\n{text}"
    # A cluster that takes all pods, or none, would compare only one side.
    assert 0 < placed < _PENDING


def _parts(verdict: Evaluation, tables: Tables) -> dict[str, dict[str, int]]:
    """Return our scores as `scores` does those of kube-scheduler."""
    return {
        tables.nodes.name(int(row)): {
            part.name: part.weight * int(part.scores[row])
            for part in verdict.parts
            if part.scores[row]
        }
        for row in verdict.feasible
    }


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
