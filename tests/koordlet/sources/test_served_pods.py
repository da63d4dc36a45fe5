"""The API server as a source of pods: only this node's, whole, and kept while it is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from koordlet.configuration.config import Kubernetes
from koordlet.sources.apiserver import KEPT_FILE, ApiServer
from koordlet.sources.served_pods import ServedPods
from koordlet.state.podspec import KnownPod
from kube.connection import Connection
from service.events import Events
from tests.koordlet.builders import pod_manifest
from tests.koordlet.sources.scripted_server import Server, serving
from tests.waiting import until

CPUS = "scheduling.koordinator.sh/resource-status"


def served(name: str, version: int, **parts: Any) -> dict[str, Any]:
    """A pod as the server has it."""
    metadata = {"resourceVersion": str(version), **parts.pop("metadata", {})}
    return pod_manifest(name, uid=f"uid-{name}", metadata=metadata, **parts)


class Node:
    """What the daemon is to the source."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.lists: list[list[KnownPod]] = []
        self.bad: list[tuple[str, str]] = []
        self._workers = ThreadPoolExecutor(1)
        self.events = Events()
        pods = ServedPods(
            "n1", changed=self._take, bad_pod=lambda obj, problem: self.bad.append((obj, problem))
        )
        self.source = ApiServer(
            Kubernetes(enabled=True, pods=True),
            "n1",
            str(folder),
            self.events,
            self._workers,
            lambda _: None,
            pods=pods,
            connect=lambda: Connection(server.url),
        )

    def _take(self, pods: Sequence[KnownPod]) -> None:
        self.lists.append(list(pods))

    @property
    def names(self) -> list[str]:
        return sorted(known.pod.name for known in self.lists[-1]) if self.lists else ["not listed"]

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.source.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._workers.shutdown()


def test_the_pods_of_this_node_arrive_whole_and_follow_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving("pods") as server:
            server.put("pods", served("web", 1, metadata={"annotations": {CPUS: "{}"}}))
            mirror = {"kubernetes.io/config.hash": "hash", "kubernetes.io/config.mirror": "hash"}
            server.put("pods", served("static", 1, metadata={"annotations": mirror}))
            n = Node(tmp_path, server)
            async with n.following():
                await until(lambda: n.names == ["static", "web"])
                assert len(n.lists) == 1, "half of the first list was taken"
                assert "pods spec.nodeName=n1" in server.requests
                # The directory of a static pod is named after its configuration.
                uids = {known.pod.name: known.uids for known in n.lists[0]}
                assert uids["static"] == ("uid-static", "hash")
                await until(lambda: all(server.watchers.values()))
                assert n.source.problem == "" and n.source.answered_at is not None
                edited = {"annotations": {CPUS: '{"cpuset":"1"}'}, "resourceVersion": "2"}
                server.put("pods", served("web", 2, metadata=edited))
                await until(
                    lambda: (
                        '{"cpuset":"1"}'
                        in {known.pod.annotations.get(CPUS) for known in n.lists[-1]}
                    )
                )
                server.delete("pods", "web")
                await until(lambda: n.names == ["static"])
                server.delete("pods", "static")
                await until(lambda: n.names == [])

    asyncio.run(scenario())


def test_a_node_without_pods_has_a_list_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving("pods") as server:
            n = Node(tmp_path, server)
            async with n.following():
                await until(lambda: n.lists == [[]])

    asyncio.run(scenario())


def test_a_pod_that_cannot_be_read_keeps_its_last_good_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving("pods") as server:
            server.put("pods", served("web", 1))
            server.put("pods", served("bad", 1, spec={"containers": "none"}))
            n = Node(tmp_path, server)
            async with n.following():
                await until(lambda: n.names == ["web"])
                ((obj, problem),) = n.bad
                assert obj == "Pod default/bad of the API server" and "spec.containers" in problem
                await until(lambda: all(server.watchers.values()))
                server.put("pods", served("web", 2, spec={"containers": 7}))
                server.put("pods", served("other", 3))
                await until(lambda: n.names == ["other", "web"])
                assert {obj for obj, _ in n.bad} == {
                    "Pod default/bad of the API server",
                    "Pod default/web of the API server",
                }

    asyncio.run(scenario())


def test_a_server_that_goes_away_leaves_the_last_list(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving("pods") as server:
            server.put("pods", served("web", 1))
            n = Node(tmp_path, server)
            async with n.following():
                await until(lambda: n.names == ["web"] and all(server.watchers.values()))
                server.refusal = 503
                server.hang_up()
                await until(lambda: "not now" in n.source.problem, timeout_s=20)
                assert n.names == ["web"]
                server.refusal = 0
                server.stored["pods"] = {"new": served("new", 9)}
                server.hang_up()
                await until(lambda: n.source.problem == "", timeout_s=30)
            assert "uid-" not in (tmp_path / KEPT_FILE).read_text(), "pods are kept on the disk"

    asyncio.run(scenario())


def test_a_missing_right_to_pods_is_named_and_costs_no_other_object(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving("pods") as server:
            server.forbidden = {"pods"}
            node = {"metadata": {"name": "n1", "labels": {"a": "b"}, "resourceVersion": "1"}}
            server.put("nodes", node)
            server.put("pods", served("web", 1))
            n = Node(tmp_path, server)
            async with n.following():
                await until(lambda: n.source.objects.node is not None)
                await until(lambda: "no right" in n.source.problem, timeout_s=20)
                assert "apply deploy/koordlet/rbac-pods.yaml" in n.source.problem
                assert n.names == ["not listed"]
                server.forbidden = set()
                await until(lambda: n.names == ["web"], timeout_s=30)
                await until(lambda: n.source.problem == "", timeout_s=20)

    asyncio.run(scenario())
