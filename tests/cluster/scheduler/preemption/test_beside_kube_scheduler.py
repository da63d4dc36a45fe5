"""Random full clusters: our victims beside a real kube-scheduler's. About 4 s.

Each pod is decided alone: kube-scheduler nominates it for a node and evicts pods there, or refuses
it; what it changed is made as it was. Ours is worked out from the same API server before that.
Compared are the victims, or where nodes cost the same, what they cost, and the text of a refusal.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from apis.quantity import parse_quantity
from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.cycle.evaluation import Evaluator
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.victims import Candidate
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.sources.disruption_budgets import DISRUPTION_BUDGETS
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.occupants import importance
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape
from kube.client import Client
from kube.kept_client import KeptClient
from kube.resources import NODES, PODS, PRIORITY_CLASSES
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.kube_scheduler import kube_scheduler
from tests.cluster.scheduler.beds.beside_kube_scheduler import (
    create,
    delete,
    make_node,
    ours,
    set_status,
)

pytestmark = [pytest.mark.apiserver, pytest.mark.kube_scheduler]

Tree = dict[str, Any]
_CLASSES = {f"beside-{value}": value for value in (0, 10, 20, 1000)}
_NODES = 6
_PENDING = 12
_APPS = ("", "a", "b", "c")


async def _clear(client: Client) -> None:
    for resource in (PODS, DISRUPTION_BUDGETS, NODES):
        await delete(client, resource)
    for name in _CLASSES:
        await client.delete(PRIORITY_CLASSES, name)


def _pod(name: str, random: Random, priority: str, cpu: int, *, node: str = "") -> Tree:
    ports = []
    if random.random() < 0.25:
        ports = [{"containerPort": 80, "hostPort": random.choice((8080, 8081))}]
    app = random.choice(_APPS)
    return {
        "metadata": {"name": name, "labels": {"app": app} if app else {}},
        "spec": {
            "priorityClassName": priority,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "c",
                    "image": "x",
                    "resources": {"requests": {"cpu": f"{cpu}m"}},
                    "ports": ports,
                }
            ],
            **({"nodeName": node} if node else {}),
        },
    }


async def _run(client: Client, body: Tree, started: int) -> None:
    """Make a pod that runs, since `started` seconds after a fixed moment."""
    await create(client, PODS, body)
    since = f"2026-01-01T00:{started // 60:02}:{started % 60:02}Z"
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
    status = {"phase": "Running", "startTime": since, "conditions": [condition]}
    await set_status(client, PODS, body["metadata"]["name"], status)


async def _make_cluster(client: Client, random: Random) -> dict[str, tuple[Tree, int]]:
    """Make full nodes; return the pods by name, with when they started."""
    for name, value in _CLASSES.items():
        await create(client, PRIORITY_CLASSES, {"metadata": {"name": name}, "value": value})
    running: dict[str, tuple[Tree, int]] = {}
    for number in range(_NODES):
        node = f"n{number}"
        amounts = {"cpu": "4", "memory": "32Gi", "pods": str(random.choice((5, 9)))}
        status = {"capacity": amounts, "allocatable": amounts}
        await make_node(client, {"metadata": {"name": node}, "status": status})
        left = 4000
        while left > 400:
            cpu = min(left, random.choice((300, 700, 1100, 1900)))
            left -= cpu
            name = f"r{len(running)}"
            priority = f"beside-{random.choice((0, 10, 20))}"
            body = _pod(name, random, priority, cpu, node=node)
            running[name] = (body, len(running) * 7 % 61)
            await _run(client, *running[name])
    for app in _APPS[1:]:
        body = {
            "metadata": {"name": app},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": app}}},
        }
        await create(client, DISRUPTION_BUDGETS, body)
        allowed = random.choice((0, 0, 1, 2))
        status_of_budget = {
            "currentHealthy": 3,
            "desiredHealthy": 1,
            "expectedPods": 3,
            "disruptionsAllowed": allowed,
        }
        await set_status(client, DISRUPTION_BUDGETS, app, status_of_budget)
    return running


async def _list(client: Client) -> dict[str, Tree]:
    raw = await client.request("GET", PODS.path(namespace="default"))
    return {pod["metadata"]["name"]: pod for pod in msgspec.json.decode(raw)["items"]}


async def _theirs(
    client: Client, name: str, most_pods: dict[str, int]
) -> tuple[str, list[str], str]:
    """Return the nominated node, the victims, and the message of a refusal without a node.

    Victims are evicted one after another. None of them is needless, so all are evicted when the
    pod fits beside those that stay.
    """

    async def decided() -> tuple[str, list[str], str] | None:
        pods = await _list(client)
        pod = pods[name]
        victims = [each for each, other in pods.items() if _ends(other)]
        if node := pod["spec"].get("nodeName"):
            return node, [], ""
        if node := pod["status"].get("nominatedNodeName"):
            on_node = [each for each in pods.values() if each["spec"].get("nodeName") == node]
            staying = [each for each in on_node if not _ends(each)]
            return (node, victims, "") if _fits(pod, staying, most_pods[node]) else None
        for condition in pod["status"].get("conditions", []):
            if condition["type"] == "PodScheduled" and not victims:
                return "", [], condition["message"].replace("no new claims to deallocate, ", "")
        return None

    answer: tuple[str, list[str], str] = await eventually(decided, seconds=30, every=0.03)
    return answer


def _ends(pod: Tree) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _fits(pod: Tree, staying: list[Tree], most_pods: int) -> bool:
    if len(staying) + 1 > most_pods:
        return False
    containers = [each["spec"]["containers"][0] for each in (*staying, pod)]
    milli = [parse_quantity(c["resources"]["requests"]["cpu"]).milli_value() for c in containers]
    ports = [port["hostPort"] for c in containers for port in c.get("ports", ())]
    own = [port["hostPort"] for port in containers[-1].get("ports", ())]
    return sum(milli) <= 4000 and all(ports.count(port) == 1 for port in own)


async def _compare(client: Client, server: ApiServer, folder: Path, random: Random) -> None:
    differences: list[object] = []
    preempted = 0
    running = await _make_cluster(client, random)
    async with ours(server) as process:
        evaluator = Evaluator(process.plugins.profiles["koord-scheduler"], process.tables)
        (search,) = process.scheduling.post_filters["koord-scheduler"]
        most_pods = {
            name: int(node.status.allocatable["pods"].value())
            for name, node in process.nodes.items.items()
        }
        with kube_scheduler(server, folder):
            for number in range(_PENDING):
                cpu = random.choice((500, 1500, 2500, 3900))
                priority = random.choice(("beside-20", "beside-1000", "beside-1000"))
                body = _pod(f"p{number}", random, priority, cpu)
                shown = decode_scheduling_pod(await create(client, PODS, body, dry=True))
                await eventually(lambda: _settled(process, running))
                shape = process.source.shape_of(shown)
                pod = PendingPod(f"default/p{number}", "new", shape.priority, shape, 0.0)
                evaluation = evaluator.evaluate(shape)
                diagnosis = diagnose(shape, process.tables, evaluation.masks)
                found = search.post_filter(
                    pod, diagnosis, being_evicted=lambda booking: False, salt=number
                )
                before = {b.key.partition("/")[2]: b for b in process.tables.bookings.values()}
                await create(client, PODS, body)
                node, victims, message = await _theirs(client, f"p{number}", most_pods)
                await _restore(client, running, f"p{number}", victims)
                if len(evaluation.feasible):
                    continue
                if isinstance(found, NotFound):
                    wanted = f"{diagnosis.message} {found.remark}"
                    if node or message != wanted:
                        differences.append(("theirs", node, victims, message, "ours", wanted))
                    continue
                preempted += 1
                names = sorted(victim.key.partition("/")[2] for victim in found.victims)
                if names != sorted(victims):
                    theirs = _candidate(process, pod, before, node, victims)
                    if theirs.cost != found.cost or found.row == theirs.row:
                        costs = (theirs.cost, found.cost)
                        differences.append((node, victims, message, "ours", names, costs))
    text = "\n\n".join(str(each) for each in differences)
    assert not differences, f"{len(differences)} of {_PENDING} differ:\n{text}"
    assert preempted > 2


def _settled(process: SchedulerProcess, running: dict[str, Any]) -> bool:
    bookings = process.tables.bookings.values()
    return len(bookings) == len(running) and not any(each.terminating for each in bookings)


def _candidate(
    process: SchedulerProcess,
    pod: PendingPod[PodShape],
    before: dict[str, Booking],
    node: str,
    victims: list[str],
) -> Candidate:
    """Return kube-scheduler's choice with what it costs."""
    row = process.tables.nodes.row(node)
    evictable = [
        each for each in before.values() if each.node == node and each.shape.priority < pod.priority
    ]
    evictable.sort(key=importance)
    beyond = process.scheduling.budgets.violating(evictable)
    chosen = tuple(each for each in evictable if each.key.partition("/")[2] in victims)
    return Candidate(row or 0, chosen, len(beyond & {each.uid for each in chosen}))


async def _restore(
    client: Client, running: dict[str, tuple[Tree, int]], name: str, victims: list[str]
) -> None:
    for each in (name, *victims):
        await delete(client, PODS, each)
    for each in victims:
        await _run(client, *running[each])


async def _play(server: ApiServer, folder: Path, seed: int) -> None:
    async with KeptClient(server.connection(), user_agent="test") as client:
        await _clear(client)
        try:
            await _compare(client, server, folder, Random(seed))
        finally:
            await _clear(client)


@pytest.mark.parametrize("seed", [1])
def test_victims_are_those_of_kube_scheduler(server: ApiServer, tmp_path: Path, seed: int) -> None:
    asyncio.run(_play(server, tmp_path, seed))
