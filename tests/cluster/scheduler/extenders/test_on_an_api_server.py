"""Extenders beside a scheduler process on a real API server."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.scheduler.binding.placement import Placement, patch_body
from cluster.scheduler.process import SchedulerProcess
from kube.client import Client, encode_object
from kube.resources import NODES, PODS, PRIORITY_CLASSES
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.kubernetes import programs
from tests.cluster.conftest import read
from tests.cluster.scheduler.beds.on_api_server import make_node, scheduler
from tests.cluster.scheduler.extenders.serving import Serving, Tree, serving

pytestmark = pytest.mark.apiserver

_SPECIAL = "example.com/special"


def _configuration(extenders: list[Tree], **members: Any) -> Tree:
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "profiles": [{"schedulerName": "extended"}],
        "extenders": extenders,
        **members,
    }


def _scheduler(
    server: ApiServer, *extenders: Tree
) -> AbstractAsyncContextManager[SchedulerProcess]:
    text = json.dumps(_configuration(list(extenders)))
    return scheduler(server.connection(), text)


async def _make_nodes(client: Client, *names: str) -> None:
    await client.request("DELETE", f"{PODS.path(namespace='default')}?gracePeriodSeconds=0")
    await client.request("DELETE", NODES.path())
    for name in names:
        await make_node(client, name, cpu=8, labels={"kubernetes.io/hostname": name})


async def _make_pod(
    client: Client,
    name: str,
    *,
    special: bool = False,
    cpu: str = "1",
    spec: Tree | None = None,
    **metadata: Any,
) -> None:
    requests = {"cpu": cpu} | ({_SPECIAL: "1"} if special else {})
    limits = {_SPECIAL: "1"} if special else {}
    container = {
        "name": "main",
        "image": "x",
        "resources": {"requests": requests, "limits": limits},
    }
    body = {
        "metadata": {"name": name, **metadata},
        "spec": {
            "schedulerName": "extended",
            "automountServiceAccountToken": False,
            "containers": [container],
            **(spec or {}),
        },
    }
    await client.create(PODS, encode_object(PODS, body), namespace="default")


async def _node_of(client: Client, name: str) -> str:
    async def bound() -> str:
        found: str = (await read(client, PODS, name, "default"))["spec"].get("nodeName", "")
        return found

    node: str = await eventually(bound, seconds=30)
    return node


async def _condition(client: Client, name: str, reason: str) -> str:
    async def refused() -> str:
        status = (await read(client, PODS, name, "default"))["status"]
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition.get("reason") == reason:
                text: str = condition["message"]
                return text
        return ""

    message: str = await eventually(refused, seconds=30)
    return message


def _only(*names: str, **failed: str) -> Callable[[Tree], Tree]:
    def answer(body: Tree) -> Tree:
        asked = body["NodeNames"] or [n["metadata"]["name"] for n in body["Nodes"]["items"]]
        return {"NodeNames": [n for n in asked if n in names], "FailedNodes": failed}

    return answer


_MANAGED = [{"name": _SPECIAL, "ignoredByScheduler": True}]


def test_extenders_filter_and_rank_and_their_messages_reach_the_condition(
    server: ApiServer,
) -> None:
    async def run() -> None:
        async with (
            server.client() as client,
            serving({"filter": _only("n1", "n2", "n3", n0="broken")}) as first,
            serving(
                {
                    "filter": _only("n1", "n2"),
                    "rank": lambda _: [{"Host": "n2", "Score": 10}, {"Host": "n1", "Score": 1}],
                }
            ) as second,
        ):
            await _make_nodes(client, "n0", "n1", "n2", "n3")
            filters = {"urlPrefix": first.url, "filterVerb": "filter"}
            ranks = {
                "urlPrefix": second.url,
                "filterVerb": "filter",
                "prioritizeVerb": "rank",
                "weight": 5,
                "nodeCacheCapable": True,
            }
            async with _scheduler(server, filters, ranks) as process:
                for number in range(3):
                    await _make_pod(client, f"p{number}")
                    # Without the extender pods would be spread.
                    assert await _node_of(client, f"p{number}") == "n2"
                body = first.bodies("filter")[0]
                assert body["Pod"]["metadata"]["name"] == "p0"
                items = {node["metadata"]["name"]: node for node in body["Nodes"]["items"]}
                assert set(items) == {"n0", "n1", "n2", "n3"}
                assert items["n3"]["status"]["allocatable"]["cpu"] == "8"
                assert second.bodies("filter")[0]["NodeNames"] == ["n1", "n2", "n3"]
                assert second.bodies("rank")[0]["NodeNames"] == ["n1", "n2"]
                second.answers["filter"] = _only()
                await _make_pod(client, "none")
                message = await _condition(client, "none", "Unschedulable")
                expected = f"1 broken, 3 node(s) didn't pass extender {second.url}."
                assert message.startswith(f"0/4 nodes are available: {expected}")
                assert len(process.tables.bookings) == 3

    asyncio.run(run())


def test_an_extender_that_hangs_delays_only_the_pods_that_it_is_asked_about(
    server: ApiServer,
) -> None:
    async def run() -> None:
        async with server.client() as client, serving({"filter": _only("n0")}) as extender:
            await _make_nodes(client, "n0", "n1")
            extender.open.clear()
            configured = {
                "urlPrefix": extender.url,
                "filterVerb": "filter",
                "nodeCacheCapable": True,
                "managedResources": _MANAGED,
                "httpTimeout": "60s",
            }
            async with _scheduler(server, configured) as process:
                for number in range(20):
                    await _make_pod(client, f"s{number}", special=True)
                await eventually(lambda: len(extender.asked) == 16)
                for number in range(5):
                    await _make_pod(client, f"p{number}")
                for number in range(5):
                    assert await _node_of(client, f"p{number}")
                assert len(process.tables.bookings) == 5
                # A pod that is deleted meanwhile is not placed.
                await client.delete(PODS, "s0", namespace="default")
                await eventually(lambda: len(process.queue) == 19)
                extender.open.set()
                # 8 CPUs of n0, of which the plain pods have some.
                free = 8 - [await _node_of(client, f"p{n}") for n in range(5)].count("n0")

                async def special() -> bool:
                    pods = [await read(client, PODS, f"s{n}", "default") for n in range(1, 20)]
                    nodes = [p["spec"]["nodeName"] for p in pods if p["spec"].get("nodeName")]
                    return nodes == ["n0"] * free

                await eventually(special, seconds=30)
                assert len(process.tables.bookings) == 5 + free

    asyncio.run(run())


def test_an_extender_that_fails_holds_its_pods_up_unless_it_is_ignorable(
    server: ApiServer,
) -> None:
    async def run() -> None:
        answers: dict[str, Callable[[Tree], Any]] = {"filter": lambda _: {"Error": "no licence"}}
        async with server.client() as client, serving(answers) as extender:
            await _make_nodes(client, "n0")
            configured: Tree = {
                "urlPrefix": extender.url,
                "filterVerb": "filter",
                "prioritizeVerb": "absent",
                "weight": 1,
            }
            async with _scheduler(server, configured):
                await _make_pod(client, "p")
                message = await _condition(client, "p", "SchedulerError")
                assert message == f"extender {extender.url}: no licence"
                # It is tried again after its back-off.
                extender.answers["filter"] = _only("n0")
                assert await _node_of(client, "p") == "n0"
            extender.answers["filter"] = lambda _: {"Error": "no licence"}
            async with _scheduler(server, configured | {"ignorable": True}):
                await _make_pod(client, "q")
                assert await _node_of(client, "q") == "n0"

    asyncio.run(run())


def test_annotations_are_patched_only_where_an_extender_binds() -> None:
    placement = Placement("ns", "p", "u", "n0", annotations={"a": "1"})
    assert patch_body(placement) is None
    patch = patch_body(replace(placement, delegated=True))
    assert patch is not None
    assert json.loads(patch) == {"metadata": {"uid": "u", "annotations": {"a": "1"}}}


def test_an_extender_binds_and_after_its_refusal_the_pod_is_tried_again(server: ApiServer) -> None:
    async def run() -> None:
        async with server.client() as client, serving({}) as extender:
            await _make_nodes(client, "n0")
            refusals = ["not today"]

            async def really(body: Tree) -> None:
                binding = {
                    "apiVersion": "v1",
                    "kind": "Binding",
                    "metadata": {"name": body["PodName"], "uid": body["PodUID"]},
                    "target": {"kind": "Node", "name": body["Node"]},
                }
                path = PODS.path(namespace=body["PodNamespace"], name=body["PodName"])
                await client.request("POST", f"{path}/binding", body=msgspec.json.encode(binding))

            bindings: list[asyncio.Task[None]] = []

            def bind(body: Tree) -> Tree:
                if refusals:
                    return {"Error": refusals.pop()}
                bindings.append(asyncio.get_running_loop().create_task(really(body)))
                return {}

            extender.answers["bind"] = bind
            configured = {
                "urlPrefix": extender.url,
                "bindVerb": "bind",
                "managedResources": _MANAGED,
            }
            async with _scheduler(server, configured):
                await _make_pod(client, "s", special=True)
                message = await _condition(client, "s", "SchedulerError")
                assert message == f"extender {extender.url}: not today"
                assert await _node_of(client, "s") == "n0"
                await _make_pod(client, "p")
                assert await _node_of(client, "p") == "n0"
                uid = (await read(client, PODS, "s", "default"))["metadata"]["uid"]
                assert (
                    extender.bodies("bind")
                    == [{"PodName": "s", "PodNamespace": "default", "PodUID": uid, "Node": "n0"}]
                    * 2
                )
            await asyncio.gather(*bindings)

    asyncio.run(run())


@contextmanager
def _kube_scheduler(server: ApiServer, folder: Path, extenders: list[Tree]) -> Iterator[None]:
    kubeconfig, file = folder / "kubeconfig", folder / "configuration"
    kubeconfig.write_text(server.kubeconfig())
    connection = {"kubeconfig": str(kubeconfig)}
    file.write_text(json.dumps(_configuration(extenders, clientConnection=connection)))
    program = programs("kube-scheduler") / "kube-scheduler"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, f"--config={file}", "--secure-port=0"], stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.kube_scheduler
def test_requests_are_those_of_kube_scheduler(server: ApiServer, tmp_path: Path) -> None:
    """A pod is decided by kube-scheduler and by ours, with the same two extenders."""

    def plain(body: Tree) -> Tree:
        """Return what both must agree in: times and versions differ, and the order of nodes."""
        pod = body["Pod"]
        for key in ("uid", "resourceVersion", "creationTimestamp", "managedFields"):
            pod["metadata"].pop(key, None)
        pod.pop("apiVersion", None)
        pod.pop("kind", None)
        for node in (body["Nodes"] or {}).get("items", ()):
            node.pop("apiVersion", None)
            node.pop("kind", None)
        if body["Nodes"] is not None:
            body["Nodes"]["items"].sort(key=lambda node: node["metadata"]["name"])
        if body["NodeNames"] is not None:
            body["NodeNames"].sort()
        return body

    async def ask(first: Serving, second: Serving, client: Client) -> list[Any]:
        first.asked.clear()
        second.asked.clear()
        await _make_pod(client, "p")
        assert await _node_of(client, "p") == "n1"
        await client.request(
            "DELETE", f"{PODS.path(namespace='default', name='p')}?gracePeriodSeconds=0"
        )
        return [
            sorted((verb, json.dumps(plain(body), sort_keys=True)) for verb, body in extender.asked)
            for extender in (first, second)
        ]

    async def run() -> None:
        rank: Callable[[Tree], Any] = lambda _: [{"Host": "n1", "Score": 10}]  # noqa: E731
        async with (
            server.client() as client,
            serving({"filter": _only("n1", "n2"), "rank": rank}) as first,
            serving({"filter": _only("n1", "n2"), "rank": rank}) as second,
        ):
            # kube-scheduler passes what it is sent on, so whole nodes have to come back.
            first.answers["filter"] = lambda body: {
                "Nodes": {
                    "items": [
                        node for node in body["Nodes"]["items"] if node["metadata"]["name"] != "n0"
                    ]
                },
                "FailedNodes": {"n0": "broken"},
            }
            await _make_nodes(client, "n0", "n1", "n2")
            both = {"filterVerb": "filter", "prioritizeVerb": "rank", "weight": 100}
            extenders = [
                {"urlPrefix": first.url, **both},
                {"urlPrefix": second.url, "nodeCacheCapable": True, **both},
            ]
            async with _scheduler(server, *extenders):
                ours = await ask(first, second, client)
            with _kube_scheduler(server, tmp_path, extenders):
                expected = await ask(first, second, client)
            assert [len(asked) for asked in expected] == [2, 2]
            assert ours == expected

    asyncio.run(run())


@pytest.mark.kube_scheduler
@pytest.mark.parametrize("capable", [True, False])
def test_a_preempt_request_is_that_of_kube_scheduler_and_its_answer_decides(
    server: ApiServer, tmp_path: Path, capable: bool
) -> None:
    """n0 has the cheaper victim, and the extender wants the one on n1."""
    high = {"priorityClassName": "extended-high", "preemptionPolicy": "PreemptLowerPriority"}

    def only_n1(body: Tree) -> Tree:
        given = body["NodeNameToMetaVictims"] or body["NodeNameToVictims"]
        uids = [pod["UID"] if capable else pod["metadata"]["uid"] for pod in given["n1"]["Pods"]]
        return {"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": uid} for uid in uids]}}}

    async def preempted(extender: Serving, client: Client) -> Any:
        """Return the request, without what differs between two pods of one name."""
        await _make_nodes(client, "n0", "n1")
        for number, priority in enumerate((1, 5)):
            low: Tree = {"priorityClassName": f"extended-{priority}", "nodeName": f"n{number}"}
            low["terminationGracePeriodSeconds"] = 0
            await _make_pod(client, f"low{number}", cpu="7", spec=low)
        pods = await client.request("GET", PODS.path(namespace="default"))
        names = {
            pod["metadata"]["uid"]: pod["metadata"]["name"]
            for pod in msgspec.json.decode(pods)["items"]
        }
        extender.asked.clear()
        await _make_pod(client, "p", cpu="4", spec=high)

        async def victim_is_gone() -> bool:
            raw = await client.request("GET", PODS.path(namespace="default"))
            left = {pod["metadata"]["name"] for pod in msgspec.json.decode(raw)["items"]}
            return left == {"low0", "p"}

        await eventually(victim_is_gone, seconds=30)
        body = extender.bodies("preempt")[0]
        assert body["Pod"]["metadata"]["name"] == "p"
        del body["Pod"]
        for given in (body["NodeNameToMetaVictims"], body["NodeNameToVictims"]):
            for each in (given or {}).values():
                each["Pods"] = [
                    names[pod["UID"] if capable else pod["metadata"]["uid"]] for pod in each["Pods"]
                ]
        return body

    async def run() -> None:
        async with server.client() as client, serving({"preempt": only_n1}) as extender:
            for name, value in (("extended-1", 1), ("extended-5", 5), ("extended-high", 1000)):
                body = {"metadata": {"name": name}, "value": value}
                await client.delete(PRIORITY_CLASSES, name)
                await client.create(PRIORITY_CLASSES, encode_object(PRIORITY_CLASSES, body))
            configured = {
                "urlPrefix": extender.url,
                "preemptVerb": "preempt",
                "nodeCacheCapable": capable,
            }
            async with _scheduler(server, configured):
                ours = await preempted(extender, client)
                assert await _node_of(client, "p") == "n1"
            with _kube_scheduler(server, tmp_path, [configured]):
                expected = await preempted(extender, client)
            assert ours == expected

    asyncio.run(run())
