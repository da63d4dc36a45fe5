"""Docker mode's agent: work in the background, and what a stop waits for."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from runtime_proxy.checkpoint import Checkpoint
from runtime_proxy.docker import agent as agent_module
from runtime_proxy.model import Pod, PodChanges
from runtime_proxy.stages import Stage
from tests.runtime_proxy.docker.agent_bed import (
    ATTACH,
    EVENTS,
    GET,
    OK,
    SANDBOX,
    Bed,
    run,
)
from tests.runtime_proxy.processes import echo
from tests.runtime_proxy.scripted import ScriptedServer
from tests.waiting import until

LISTED = b'[{"Id":"s1","Names":["/k8s_POD_p_n_u_0"]}]'
INSPECTED = b'{"Id":"s1","Name":"/k8s_POD_p_n_u_0","Config":%s,"HostConfig":{}}' % SANDBOX


def test_containers_that_vanish_unseen_are_reported_by_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_module, "_SWEEP_INTERVAL_S", 0.01)
    monkeypatch.setattr(agent_module, "_RETRY_S", 0.01)
    caplog.set_level(logging.INFO)

    async def test(bed: Bed) -> None:
        server = ScriptedServer({Stage.POST_STOP_POD_SANDBOX: echo})
        bed.hook(server)
        await bed.agent.start()
        # dockerd does not know the list yet: it is asked again.
        await until(lambda: len(bed.asked) > 2)
        assert bed.agent.readiness() == []
        bed.answers["/containers/s1/json"] = INSPECTED
        bed.answers["/containers/json?all=1"] = LISTED
        assert await bed.agent.hooks.engine.pod("s1") is not None
        bed.agent.backend_away = True
        await until(lambda: not bed.agent.backend_away)
        assert server.asked == []
        bed.answers["/containers/json?all=1"] = b"[]"
        await until(lambda: server.asked)
        assert bed.agent.status()["pods"] == 0

    run(tmp_path, test)
    assert [r.getMessage() for r in caplog.records].count("dockerd is back") == 1


def test_a_stop_ends_idle_connections_and_waits_for_the_others(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        early, dockerd = await bed.pair(GET)
        early.writer.close()
        dockerd.writer.close()
        await until(lambda: not bed.agent.connections)
        await until(lambda: not bed.agent.connections)
        idle, one = await bed.pair(GET)
        one.send(OK)
        await idle.receive(OK)
        busy, other = await bed.pair(GET)
        drained = asyncio.create_task(bed.agent.drain(20))
        assert await idle.rest() == b""
        assert await one.rest() == b""
        assert not drained.done()
        assert len(bed.agent.connections) == 1
        other.send(OK[:-1])
        await busy.receive(OK[:-1])
        assert not drained.done()
        other.send(OK[-1:])
        assert await busy.rest() == OK[-1:]
        assert await drained == 0

    run(tmp_path, test)


def test_a_stop_cuts_off_what_does_not_end_in_time(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        pairs = [await bed.pair(GET), await bed.pair(ATTACH), await bed.pair(EVENTS)]
        # Who waits for an answer counts; who follows events does not.
        assert await bed.agent.drain(0.05) == 2
        for client, dockerd in pairs:
            assert await client.rest() == b""
            assert await dockerd.rest() == b""
        assert not bed.agent.connections

    run(tmp_path, test)


@pytest.mark.parametrize("succeeded", [False, True])
def test_streams_without_an_end_are_waited_for_beside_a_successor_alone(
    tmp_path: Path, succeeded: bool
) -> None:
    async def test(bed: Bed) -> None:
        await bed.agent.start()
        client, dockerd = await bed.pair(EVENTS)
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        dockerd.send(head)
        await client.receive(head)
        if succeeded:
            bed.agent.stand_back()
        drained = asyncio.create_task(bed.agent.drain(20))
        if succeeded:
            dockerd.send(b"1\r\nx\r\n")
            await client.receive(b"1\r\nx\r\n")
            assert not drained.done()
            dockerd.send(b"0\r\n\r\n")
            assert await client.rest() == b"0\r\n\r\n"
        assert await drained == 0

    run(tmp_path, test)


def test_a_successor_knows_what_hooks_changed_in_its_predecessors_last_calls(
    tmp_path: Path,
) -> None:
    async def test(bed: Bed) -> None:
        bed.answers["/containers/json?all=1"] = b"[]"
        await bed.agent.start()
        await until(lambda: bed.agent.status()["recovered"])
        predecessor = Checkpoint(str(tmp_path / "state"))
        changes = PodChanges(cgroup_parent="/moved")
        predecessor.pod(Pod(id="s1", changes=changes))
        predecessor.close()
        bed.answers["/containers/s1/json"] = INSPECTED
        pod = await bed.agent.hooks.engine.pod("s1")
        assert pod is not None
        assert pod.changes == changes

    run(tmp_path, test, flags=(f"--state-dir={tmp_path / 'state'}",))


REGISTRATION = (
    '{"remote-endpoint":"/run/none.sock","failure-policy":"Ignore",'
    '"runtime-hooks":["PreRunPodSandbox"]}'
)


def test_a_successor_gets_the_background_work_and_the_journal(tmp_path: Path) -> None:
    journal = tmp_path / "state" / "journal"

    async def test(bed: Bed) -> None:
        await bed.agent.start()
        hooks = bed.agent.hooks.hooks
        hooks.store.put_pod(Pod(id="kept"))
        bed.agent.stand_back()
        assert b'"kept"' in journal.read_bytes()
        for task in bed.agent._tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        size = journal.stat().st_size
        for _ in range(3000):
            hooks.store.put_pod(Pod(id="p", labels={"a": "x" * 1000}))
            hooks.store.drop_pod("p")
        assert journal.stat().st_size > size + 3_000_000, "only its successor rewrites the file"
        (tmp_path / "hooks" / "a.json").write_text(REGISTRATION)
        await until(lambda: bed.agent.status()["hookServers"])
        await bed.agent.close()
        assert bed.agent.status()["hookServers"] == []
        assert str(journal) not in open_files()

    run(tmp_path, test, flags=(f"--state-dir={tmp_path / 'state'}",))


def open_files() -> set[str]:
    names = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            names.add(str(descriptor.readlink()))
    return names


def test_a_stop_waits_for_hooks_of_after_stages(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        reported: list[str] = []

        async def report() -> None:
            await asyncio.sleep(0.05)
            reported.append("p1")

        bed.agent.hooks.hooks.in_background("p1", report())
        assert await bed.agent.drain(20) == 0
        assert reported == ["p1"]

    run(tmp_path, test)
