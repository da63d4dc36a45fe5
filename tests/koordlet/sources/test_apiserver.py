"""The API server as a source, against a scripted server: bad objects, breaks, restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from apis.core import Node as CoreNode
from apis.decode import decode_object
from koordlet.configuration.config import Kubernetes
from koordlet.sources.apiserver import KEPT_FILE, ApiServer
from koordlet.sources.objects import NodeObjects
from kube.connection import Connection, ConnectionConfigError, load_connection
from service.events import Events
from tests.koordlet.sources.scripted_server import PLURALS, serving
from tests.waiting import until

BE_ON = {"resourceQOSStrategy": {"beClass": {"cpuQOS": {"enable": True, "groupIdentity": -1}}}}


KUBECONFIG = """
current-context: a
contexts: [{{name: a, context: {{cluster: a, user: a}}}}]
clusters: [{{name: a, cluster: {{server: "https://x", certificate-authority-data: "{}"}}}}]
users: [{{name: a, user: {{token: x}}}}]
"""


def slo(version: int, spec: dict[str, Any], name: str = "n1") -> dict[str, Any]:
    return {
        "apiVersion": "slo.koordinator.sh/v1alpha1",
        "kind": "NodeSLO",
        "metadata": {"name": name, "resourceVersion": str(version)},
        "spec": spec,
    }


class Node:
    """What the daemon is to the source."""

    def __init__(self, folder: Path, connect: Callable[[], Connection]) -> None:
        self.events = Events()
        self.published: list[NodeObjects] = []
        self._workers = ThreadPoolExecutor(1)
        self.source = ApiServer(
            Kubernetes(enabled=True),
            "n1",
            str(folder),
            self.events,
            self._workers,
            self.published.append,
            connect=connect,
        )

    @property
    def identity(self) -> object:
        """What the NodeSLO in force says of best-effort pods."""
        spec = self.source.objects.slo
        return None if spec is None else spec.resource_qos_strategy.be_class.cpu_qos.group_identity

    @property
    def messages(self) -> str:
        return "\n".join(event.message for event in self.events.latest())

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        self.source.take_kept(self.source.read_kept())
        task = asyncio.create_task(self.source.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._workers.shutdown()


def test_this_nodes_objects_arrive_whole_and_follow_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))
            ratio = {"node.koordinator.sh/cpu-normalization-ratio": "1.20"}
            node = {"metadata": {"name": "n1", "annotations": ratio, "resourceVersion": "1"}}
            server.put("nodes", {**node, "status": {"allocatable": {"cpu": "4", "memory": "1Gi"}}})
            n = Node(tmp_path, lambda: Connection(server.url))
            async with n.following():
                await n.source.wait_first()
                assert len(n.published) == 1, "half of the first lists was published"
                meta = n.published[0].node
                assert meta is not None
                assert (meta.annotations, meta.allocatable_cpu_milli) == (ratio, 4000)
                assert n.identity == -1 and n.source.problem == ""
                assert set(server.requests) == {f"{plural} metadata.name=n1" for plural in PLURALS}
                await until(lambda: all(server.watchers.values()))
                # A heartbeat changes nothing that anybody reads.
                beat = {**node, "metadata": {**node["metadata"], "resourceVersion": "2"}}
                calm = {"type": "MemoryPressure", "status": "False", "lastHeartbeatTime": "x"}
                allocatable = {"allocatable": {"cpu": "4", "memory": "1Gi"}, "conditions": [calm]}
                server.put("nodes", {**beat, "status": allocatable})
                spec = {"resourceQOSStrategy": {"beClass": {"cpuQOS": {"groupIdentity": 0}}}}
                server.put("nodeslos", slo(3, spec))
                await until(lambda: n.identity == 0)
                assert len(n.published) == 2
                server.delete("nodeslos", "n1")
                await until(lambda: n.source.objects.slo is None)

    asyncio.run(scenario())


def test_a_bad_field_is_named_and_its_last_good_value_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))
            n = Node(tmp_path, lambda: Connection(server.url))
            async with n.following():
                await until(lambda: n.identity == -1 and all(server.watchers.values()))
                bad = json.loads(json.dumps(BE_ON))
                bad["resourceQOSStrategy"]["beClass"]["cpuQOS"]["groupIdentity"] = "low"
                server.put("nodeslos", slo(2, bad))
                await until(lambda: n.source.objects.problems)
                assert n.identity == -1
                (problem,) = n.source.objects.problems
                assert problem.file == "NodeSLO of the API server"
                assert "beClass.cpuQOS.groupIdentity" in problem.message
                assert "low" in problem.message and "stays" in problem.message

    asyncio.run(scenario())


def test_a_server_that_goes_away_costs_nothing_and_its_return_is_noticed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))
            n = Node(tmp_path, lambda: Connection(server.url))
            async with n.following():
                await until(lambda: n.identity == -1 and all(server.watchers.values()))
                server.refusal = 503
                server.requests.clear()
                server.hang_up()
                await until(lambda: "not now" in n.source.problem, timeout_s=20)
                assert n.identity == -1 and n.source.failures
                await until(lambda: len(set(server.requests)) == len(PLURALS), timeout_s=20)
                lost_at = n.source.answered_at
                assert lost_at is not None
                server.requests.clear()
                await until(lambda: server.requests, timeout_s=20)
                assert n.source.answered_at == lost_at, "a refusal is no answer"
                server.refusal = 0
                server.stored["nodeslos"]["n1"] = slo(9, {})
                await until(lambda: n.source.problem == "", timeout_s=30)
                assert "answers again" in n.messages
                await until(lambda: (n.source.answered_at or 0) > lost_at, timeout_s=30)

    asyncio.run(scenario())


def test_a_restart_without_the_server_starts_from_its_last_word(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))
            first = Node(tmp_path, lambda: Connection(server.url))
            async with first.following():
                await until((tmp_path / KEPT_FILE).exists)
            assert (tmp_path / KEPT_FILE).stat().st_mode & 0o777 == 0o600
            server.refusal = 503
            second = Node(tmp_path, lambda: Connection(server.url))
            async with second.following():
                assert second.identity == -1 and len(second.published) == 1
                # What was deleted meanwhile goes when the server says so, and not before.
                server.stored["nodeslos"].clear()
                await until(lambda: second.source.failures == 1)
                assert second.identity == -1
                server.refusal = 0
                await until(lambda: second.source.objects.slo is None, timeout_s=30)

    asyncio.run(scenario())


def bad_slo(version: int) -> dict[str, Any]:
    qos = {"enable": True, "groupIdentity": "low"}
    return slo(version, {"resourceQOSStrategy": {"beClass": {"cpuQOS": qos}}})


def test_a_restart_while_the_newest_version_is_bad_keeps_the_last_good_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))
            first = Node(tmp_path, lambda: Connection(server.url))
            async with first.following():
                await until(lambda: first.identity == -1 and all(server.watchers.values()))
                server.put("nodeslos", bad_slo(2))
                await until(lambda: first.source.objects.problems)
            second = Node(tmp_path, lambda: Connection(server.url))
            async with second.following():
                assert second.identity == -1
                await until(lambda: second.source.objects.problems)
                assert second.identity == -1

    asyncio.run(scenario())


def test_an_object_without_a_bottom_leaves_the_last_good_one_in_force(tmp_path: Path) -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"a": deep}

    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))
            n = Node(tmp_path, lambda: Connection(server.url))
            async with n.following():
                await until(lambda: n.identity == -1 and all(server.watchers.values()))
                server.put("nodeslos", slo(2, {**BE_ON, "extensions": deep}))
                await until(lambda: n.source.objects.problems)
                assert "too deep" in n.source.objects.problems[0].message
                # Beyond what any reader takes: the watch fails, and nothing else.
                line = b'{"type":"MODIFIED","object":' + b"[" * 5000 + b"]" * 5000 + b"}\n"
                broken = set(server.watchers["nodeslos"])
                for watcher in broken:
                    watcher.put_nowait(line)
                await until(lambda: any(cache.restarts for cache in n.source._caches))
                assert n.identity == -1
                await until(lambda: server.watchers["nodeslos"] - broken, timeout_s=20)
                server.put("nodeslos", slo(3, {}))
                await until(lambda: n.identity == 0, timeout_s=20)

    asyncio.run(scenario())


def test_a_server_that_does_not_know_the_types_yet_takes_nothing_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))
            first = Node(tmp_path, lambda: Connection(server.url))
            async with first.following():
                await until((tmp_path / KEPT_FILE).exists)
            server.refusal = 404
            second = Node(tmp_path, lambda: Connection(server.url))
            async with second.following():
                await until(lambda: all(cache.synced for cache in second.source._caches))
                await until(lambda: "not now" in second.source.problem)
                assert second.identity == -1

    asyncio.run(scenario())


def test_how_to_reach_the_server_is_read_again_when_it_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kube.reconnecting._RECONNECT_S", 0.5)
    monkeypatch.setattr("kube.reconnecting._LOOK_EVERY_S", 0.1)
    asked: list[str] = []

    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))

            def connect() -> Connection:
                asked.append("")
                return Connection("http://127.0.0.1:1" if len(asked) == 1 else server.url)

            n = Node(tmp_path, connect)
            async with n.following():
                await until(lambda: n.identity == -1, timeout_s=20)

    asyncio.run(scenario())


def test_pauses_after_defects_grow_until_the_server_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def connected(*_: object, **__: object) -> NoReturn:
        synced: Any = SimpleNamespace(synced=len(pauses) == 2)
        source._caches = (synced,)
        raise ValueError("a defect")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise asyncio.CancelledError

    source = Node(tmp_path, lambda: Connection("http://127.0.0.1:1")).source
    monkeypatch.setattr("koordlet.sources.apiserver.stay_connected", connected)
    monkeypatch.setattr("koordlet.sources.apiserver.asyncio.sleep", sleep)
    monkeypatch.setattr("koordlet.sources.apiserver.random.uniform", lambda low, high: 1.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(source.run())
    assert pauses == [1, 2, 1, 2]
    assert source.problem == "ValueError: a defect"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"x":' * 20000, '{"NodeSLO of the API server": 7}', "\x00"]
)
def test_a_torn_file_of_kept_objects_is_not_used(tmp_path: Path, text: str) -> None:
    async def scenario() -> None:
        (tmp_path / KEPT_FILE).write_text(text)
        n = Node(tmp_path, lambda: Connection("http://127.0.0.1:1"))
        async with n.following():
            assert n.published == []
            await until(lambda: n.source.problem not in ("", "not connected yet"))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text", ["", "a: [", "[]", "\x00", "kind: Config", KUBECONFIG.format("!!!"), None]
)
def test_a_kubeconfig_that_is_being_written_ends_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)

    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))
            n = Node(tmp_path, lambda: load_connection(str(path)))
            async with n.following():
                await until(lambda: "no usable configuration" in n.source.problem)
                path.write_text(KUBECONFIG.format("").replace("https://x", server.url))
                await until(lambda: n.identity == -1, timeout_s=20)

    asyncio.run(scenario())


def test_credentials_that_cannot_be_had_are_asked_for_again(tmp_path: Path) -> None:
    answers: list[object] = []

    def authorization() -> str:
        answers.append(None)
        if len(answers) == 1:
            raise RuntimeError("the plug-in failed")
        return "Bearer x"

    async def scenario() -> None:
        async with serving() as server:
            server.put("nodeslos", slo(1, BE_ON))
            n = Node(tmp_path, lambda: Connection(server.url, None, authorization))
            async with n.following():
                await until(lambda: n.identity == -1, timeout_s=20)
                assert len(answers) > 1

    asyncio.run(scenario())


def test_without_a_configuration_the_problem_says_what_to_do(tmp_path: Path) -> None:
    def connect() -> Connection:
        raise ConnectionConfigError("no usable configuration (pass --kubeconfig)")

    async def scenario() -> None:
        n = Node(tmp_path, connect)
        async with n.following():
            await until(lambda: "--kubeconfig" in n.source.problem)
            assert "the last objects stay in force" in n.messages

    asyncio.run(scenario())


def test_kubelets_pressure_is_kept_without_the_times_of_its_heartbeats() -> None:
    from koordlet.sources.apiserver import _manifest
    from koordlet.sources.documents import node_meta
    from kube.resources import NODES

    def condition(type_: str, status: str) -> dict[str, str]:
        return {"type": type_, "status": status, "lastHeartbeatTime": "2026-01-01T00:00:00Z"}

    conditions = [
        condition("MemoryPressure", "True"),
        condition("DiskPressure", "False"),
        condition("Ready", "True"),
        {},
    ]
    tree = {"metadata": {"name": "n1"}, "status": {"conditions": conditions}}
    made = _manifest(NODES, msgspec.json.encode(tree)).tree
    assert made["status"] == {"conditions": [{"type": "MemoryPressure", "status": "True"}]}
    node = decode_object(dict(made), CoreNode, obj="Node n1")
    assert node_meta(node).pressures == {"MemoryPressure"}


def test_an_object_is_kept_small() -> None:
    from koordlet.sources.apiserver import _manifest
    from kube.resources import NODES

    tree = {
        "metadata": {"name": "n1", "managedFields": [{}], "resourceVersion": "7"},
        "spec": {"podCIDR": "10.0.0.0/24"},
        "status": {"images": [{"names": ["x"]}], "allocatable": {"cpu": "4"}},
    }
    made = _manifest(NODES, msgspec.json.encode(tree))
    assert made.metadata.resource_version == "7"
    assert made.tree == {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n1"},
        "status": {"allocatable": {"cpu": "4"}},
    }
