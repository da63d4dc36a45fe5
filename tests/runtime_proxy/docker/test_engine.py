"""What the proxy asks dockerd, and what the store holds after it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime_proxy.checkpoint import Recorded
from runtime_proxy.docker import engine as engine_module
from runtime_proxy.docker.engine import Engine
from runtime_proxy.model import Container, Pod, PodChanges, PodMeta, Resources
from runtime_proxy.runtime import RuntimeAway
from runtime_proxy.store import NoJournal, Store
from tests.runtime_proxy.docker.client import Docker
from tests.runtime_proxy.docker.fake_dockerd import FakeDockerd, fake_dockerd
from tests.waiting import until

Test = Callable[[Engine, Store], Awaitable[None]]


@pytest.fixture
def dockerd(tmp_path: Path) -> Iterator[FakeDockerd]:
    with fake_dockerd(tmp_path) as running:
        yield running


def run(dockerd: FakeDockerd, test: Test, recorded: Recorded | None = None) -> None:
    async def main() -> None:
        store = Store(NoJournal())
        async with asyncio.timeout(30):
            await test(Engine(str(dockerd.path), store, recorded or Recorded()), store)

    asyncio.run(main())


def make(dockerd: FakeDockerd) -> tuple[str, str]:
    docker = Docker(dockerd.path)
    sandbox = docker.run_sandbox(HostConfig={"CgroupParent": "/kubepods/pod-u", "CpuShares": 5})
    container = docker.create_container(
        sandbox, Env=["A=1", "B"], HostConfig={"CgroupParent": "/kubepods/pod-u", "Memory": 6}
    )
    docker.create("mine", {"app": "not Kubernetes'"})
    return sandbox, container


def pod_of(identifier: str) -> Pod:
    return Pod(
        id=identifier,
        meta=PodMeta(name="web-0", uid="u-1", namespace="default", attempt=0),
        runtime_handler="docker",
        labels={"app": "web", "io.kubernetes.docker.type": "podsandbox"},
        annotations={"note": "n"},
        cgroup_parent="/kubepods/pod-u",
        resources=Resources(cpu_shares=5),
    )


def container_of(identifier: str, sandbox: str) -> Container:
    return Container(
        id=identifier,
        pod_id=sandbox,
        name="main",
        attempt=2,
        resources=Resources(memory_limit_in_bytes=6),
        cgroup_parent="/kubepods/pod-u",
        envs={"A": "1"},
    )


def test_kubernetes_containers_are_stored_and_others_are_not(dockerd: FakeDockerd) -> None:
    sandbox, container = make(dockerd)

    async def test(engine: Engine, store: Store) -> None:
        assert not engine.done
        await engine.rebuild()
        assert engine.done
        assert store.sizes == (1, 1)
        assert store.pod(sandbox) == pod_of(sandbox)
        assert store.container(container) == container_of(container, sandbox)
        assert await engine.driver() == "cgroupfs"
        assert len(dockerd.asked("/info")) == 1

    run(dockerd, test)


def test_an_unknown_object_is_looked_up_once(dockerd: FakeDockerd) -> None:
    sandbox, container = make(dockerd)

    async def test(engine: Engine, store: Store) -> None:
        for _ in range(2):
            assert await engine.pod(sandbox) == pod_of(sandbox)
            assert await engine.container(container) == container_of(container, sandbox)
        assert len(dockerd.asked(f"/{sandbox}/json")) == 1
        assert len(dockerd.asked(f"/{container}/json")) == 1
        assert await engine.pod("") is None
        assert await engine.container("") is None
        assert await engine.pod(container) is None
        assert await engine.container("nothing") is None

    run(dockerd, test)


@pytest.mark.parametrize("of", [lambda i: i, lambda i: i[:12], lambda i: "mine"])
def test_a_reference_leads_to_the_whole_id(dockerd: FakeDockerd, of: Callable[[str], str]) -> None:
    _, container = make(dockerd)

    async def test(engine: Engine, store: Store) -> None:
        reference = of(container)
        expected = reference if reference == "mine" else container
        assert await engine.resolve(reference) == expected
        assert (store.container(container) is not None) is (reference != "mine")
        assert await engine.resolve("nothing") == "nothing"

    run(dockerd, test)


def test_the_journal_adds_what_dockerd_does_not_know(dockerd: FakeDockerd) -> None:
    sandbox, container = make(dockerd)
    changes = PodChanges(cgroup_parent="/moved")
    recorded = Recorded(
        pods={sandbox: Pod(id=sandbox, changes=changes, stopped=True)},
        containers={
            container: Container(
                id=container, annotations={"by-a-hook": "h"}, cgroup_parent="/moved"
            )
        },
    )

    async def test(engine: Engine, store: Store) -> None:
        await engine.rebuild()
        pod, found = store.pod(sandbox), store.container(container)
        assert pod is not None
        assert found is not None
        assert (pod.changes, pod.stopped) == (changes, True)
        assert found.annotations == {"by-a-hook": "h"}
        assert found.cgroup_parent == "/moved"

    run(dockerd, test, recorded)


def test_a_sweep_returns_what_is_gone(dockerd: FakeDockerd) -> None:
    sandbox, container = make(dockerd)

    async def test(engine: Engine, store: Store) -> None:
        await engine.rebuild()
        assert await engine.sweep() == ([], [])
        del dockerd.containers[container]
        assert await engine.sweep() == ([], [container_of(container, sandbox)])
        del dockerd.containers[sandbox]
        assert await engine.sweep() == ([pod_of(sandbox)], [])
        assert store.sizes == (0, 0)

    run(dockerd, test)


def test_one_container_that_dockerd_cannot_inspect_costs_itself_alone(dockerd: FakeDockerd) -> None:
    _, container = make(dockerd)
    dockerd.broken.add(container)

    async def test(engine: Engine, store: Store) -> None:
        await engine.rebuild()
        assert store.sizes == (1, 0)
        with pytest.raises(RuntimeAway, match="HTTP 500"):
            await engine.container(container)

    run(dockerd, test)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "connection closed before an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "connection closed before an answer"),
        (b"nonsense\r\n\r\n", "bad status line"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{not ", "not JSON"),
        (b"HTTP/1.1 503 Away\r\nContent-Length: 0\r\n\r\n", "HTTP 503"),
    ],
)
def test_an_answer_that_cannot_be_used_is_an_absent_dockerd(
    tmp_path: Path, answer: bytes, reason: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def main() -> None:
        async with await asyncio.start_unix_server(serve, tmp_path / "d.sock"):
            engine = Engine(str(tmp_path / "d.sock"), Store(NoJournal()), Recorded())
            for ask in (engine.driver, engine.rebuild, engine.sweep):
                with pytest.raises(RuntimeAway, match=reason):
                    await ask()
            assert not engine.done

    asyncio.run(main())


def test_no_socket_is_an_absent_dockerd(tmp_path: Path) -> None:
    engine = Engine(str(tmp_path / "none.sock"), Store(NoJournal()), Recorded())

    async def main() -> Any:
        with pytest.raises(RuntimeAway, match=r"/info: .*No such file"):
            await engine.driver()

    asyncio.run(main())


@pytest.mark.parametrize("listed", [{}, "text", [5, {"Names": "x"}, {"Names": [5]}, {}]])
def test_a_list_of_another_shape_holds_nothing(tmp_path: Path, listed: Any) -> None:
    async def main() -> None:
        engine = Engine(str(tmp_path / "none.sock"), Store(NoJournal()), Recorded())

        async def get(target: str) -> Any:
            assert target == "/containers/json?all=1"
            return listed

        engine._get = get  # type: ignore[method-assign]
        assert await engine._list() == set()

    asyncio.run(main())


def answered_with(folder: Path, octets: bytes) -> str:
    """Ask for the driver where dockerd answers with these octets and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(octets)
        writer.close()

    async def main() -> str:
        path = str(folder / "docker.sock")
        async with asyncio.timeout(30), await asyncio.start_unix_server(answer, path):
            return await Engine(path, Store(NoJournal()), Recorded()).driver()

    return asyncio.run(main())


INFO = b'{"CgroupDriver":"systemd"}'


@pytest.mark.parametrize(
    "octets",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n" + INFO,
        b"HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n" + INFO + b"more",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1a\r\n" + INFO + b"\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + INFO,
    ],
    ids=["a length", "a length, and more", "chunks", "the end of the connection"],
)
def test_an_answer_is_read_whatever_ends_it(tmp_path: Path, octets: bytes) -> None:
    assert answered_with(tmp_path, octets) == "systemd"


def test_no_id_is_no_question(dockerd: FakeDockerd) -> None:
    async def test(engine: Engine, store: Store) -> None:
        assert await engine.pod("") is None
        assert await engine.container("") is None
        assert dockerd.requests == []

    run(dockerd, test)


def test_what_a_call_has_stored_meanwhile_is_newer_than_dockerds_answer(
    dockerd: FakeDockerd,
) -> None:
    sandbox, container = make(dockerd)

    async def test(engine: Engine, store: Store) -> None:
        newer = Pod(id=sandbox, labels={"newer": "yes"})
        updated = Container(id=container, pod_id=sandbox, name="newer")
        store.put_pod(newer)
        store.put_container(updated)
        await engine.rebuild()
        assert (store.pod(sandbox), store.container(container)) == (newer, updated)

    run(dockerd, test)


def test_a_rebuild_forgets_what_dockerd_no_longer_has(
    dockerd: FakeDockerd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sandbox, _ = make(dockerd)
    broken = Docker(dockerd.path).create("k8s_x_p_n_u_0", {})
    dockerd.broken.add(broken)
    forgotten: list[str] = []

    class Journal(NoJournal):
        def forget(self, identifier: str) -> None:
            forgotten.append(identifier)

    async def main() -> None:
        store = Store(Journal())
        recorded = Recorded(
            pods={sandbox: Pod(id=sandbox), "old pod": Pod(id="old pod")},
            containers={"old container": Container(id="old container")},
        )
        store.put_pod(Pod(id="ended meanwhile"))
        async with asyncio.timeout(10):
            await Engine(str(dockerd.path), store, recorded).rebuild()
        assert store.sizes == (1, 1)

    asyncio.run(main())
    assert sorted(forgotten) == ["ended meanwhile", "old container", "old pod"]
    said: list[Any] = caplog.records
    (warning,) = [record for record in said if record.levelname == "WARNING"]
    assert (warning.getMessage(), warning.id, warning.reason) == (
        "no status",
        broken,
        f"/containers/{broken}/json: HTTP 500",
    )
    assert said[-1].getMessage() == "recovered"
    assert (said[-1].pods, said[-1].containers) == (1, 1)


def test_what_is_new_since_the_list_survives_a_sweep(dockerd: FakeDockerd) -> None:
    async def test(engine: Engine, store: Store) -> None:
        listing = engine._list

        async def list_and_create() -> set[str]:
            listed = await listing()
            store.put_pod(Pod(id="new"))
            return listed

        engine._list = list_and_create  # type: ignore[method-assign]
        for step in (engine.sweep, engine.rebuild):
            await step()
            assert store.pod("new") is not None
            store.drop_pod("new")

    run(dockerd, test)


def test_a_question_is_one_request_on_its_own_connection(tmp_path: Path) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        for octet in b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(INFO), INFO):
            writer.write(bytes([octet]))
            await asyncio.sleep(0)
        assert await reader.read() == b"", "the connection is closed by who asked"
        asked.append(b"<end>")
        writer.close()

    async def main() -> None:
        path = str(tmp_path / "d.sock")
        async with asyncio.timeout(10), await asyncio.start_unix_server(serve, path):
            assert await Engine(path, Store(NoJournal()), Recorded()).driver() == "systemd"
            await until(lambda: len(asked) == 2)

    asyncio.run(main())
    assert asked == [
        b"GET /info HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n\r\n",
        b"<end>",
    ]


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 26", b"Transfer-Encoding: chunked"], ids=["length", "chunks"]
)
@pytest.mark.parametrize("limit", [25, 26])
def test_an_answer_has_a_limit(
    tmp_path: Path, framing: bytes, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_MAX_ANSWER_BYTES", limit)
    body = INFO if b"Length" in framing else b"1a\r\n" + INFO + b"\r\n0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n\r\n" + body
    if limit == 26:
        assert answered_with(tmp_path, answer) == "systemd"
    else:
        with pytest.raises(RuntimeAway, match=r"^/info: answer above 25 octets$"):
            answered_with(tmp_path, answer)


def test_a_dockerd_that_says_nothing_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_TIMEOUT_S", 0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> None:
        path = str(tmp_path / "d.sock")
        async with asyncio.timeout(10), await asyncio.start_unix_server(serve, path):
            with pytest.raises(RuntimeAway, match=r"^/info: no answer within 0.05 s$"):
                await Engine(path, Store(NoJournal()), Recorded()).driver()

    asyncio.run(main())


def test_deeply_nested_json_is_no_answer(tmp_path: Path) -> None:
    body = b"[" * 100_000
    with pytest.raises(RuntimeAway, match=r"^/info: not JSON: "):
        answered_with(
            tmp_path, b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )


def test_what_a_predecessor_adds_to_the_journal_while_its_last_calls_end_is_found(
    dockerd: FakeDockerd,
) -> None:
    async def main() -> None:
        added = Recorded()
        read: list[None] = []

        def reread() -> Recorded:
            read.append(None)
            return added

        store = Store(NoJournal())
        engine = Engine(str(dockerd.path), store, Recorded(), reread)
        async with asyncio.timeout(10):
            await engine.rebuild()
            sandbox, container = make(dockerd)
            changes = PodChanges(cgroup_parent="/moved")
            added.pods[sandbox] = Pod(id=sandbox, changes=changes)
            added.containers[container] = Container(id=container, annotations={"by-a-hook": "h"})
            pod, found = await engine.pod(sandbox), await engine.container(container)
        assert pod is not None
        assert found is not None
        assert pod.changes == changes
        assert found.annotations == {"by-a-hook": "h"}
        assert len(read) == 2

    asyncio.run(main())


def test_the_journal_is_not_read_again_for_what_it_had_or_before_recovery(
    dockerd: FakeDockerd,
) -> None:
    sandbox, _ = make(dockerd)

    def reread() -> Recorded:
        raise AssertionError("the journal of the start has it")

    async def main() -> None:
        recorded = Recorded(pods={sandbox: Pod(id=sandbox, stopped=True)})
        store = Store(NoJournal())
        engine = Engine(str(dockerd.path), store, recorded, reread)
        async with asyncio.timeout(10):
            await engine.rebuild()
            store.drop_pod(sandbox)
            pod = await engine.pod(sandbox)
        assert pod is not None
        assert pod.stopped
        assert store.sizes == (1, 0)

    asyncio.run(main())
