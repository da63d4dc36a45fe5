"""Docker mode's connections: their two ends, what ends them, and what an operator sees."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from runtime_proxy.hook_server import HookError
from runtime_proxy.stages import Stage
from tests.runtime_proxy.docker.agent_bed import (
    ATTACH,
    CREATE,
    EVENTS,
    GET,
    OK,
    RAW,
    SANDBOX,
    Bed,
    gauge,
    run,
)
from tests.runtime_proxy.processes import answering, echo
from tests.runtime_proxy.scripted import ScriptedServer
from tests.waiting import until

# -- two ends -------------------------------------------------------------------------------------


def test_a_connection_serves_one_request_after_the_other(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        client, dockerd = await bed.pair(GET)
        dockerd.send(OK)
        await client.receive(OK)
        client.send(GET)
        await dockerd.receive(GET)
        dockerd.send(OK[:-1])
        await client.receive(OK[:-1])
        dockerd.send(OK[-1:])
        await client.receive(OK[-1:])
        assert gauge(bed, "connections") == 1
        client.writer.close()
        assert await dockerd.rest() == b""
        dockerd.writer.close()
        await until(lambda: gauge(bed, "connections") == 0)

    run(tmp_path, test)


def test_a_client_that_has_ended_its_output_still_reads_the_answer(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        client, dockerd = await bed.pair(GET)
        client.end_output()
        assert await dockerd.rest() == b""
        dockerd.send(OK)
        dockerd.writer.close()
        assert await client.rest() == OK
        await until(lambda: not bed.agent.connections)

    run(tmp_path, test)


def test_an_end_behind_a_held_request_comes_behind_it(tmp_path: Path) -> None:
    """The request is held while hooks decide, and the end of the client's output with it."""

    async def test(bed: Bed) -> None:
        bed.hook(ScriptedServer({Stage.PRE_RUN_POD_SANDBOX: echo}))
        client = await bed.client()
        client.send(CREATE)
        client.end_output()
        dockerd = await bed.accepted.get()
        assert await dockerd.rest() == CREATE
        dockerd.send(OK)
        dockerd.writer.close()
        assert await client.rest() == OK

    run(tmp_path, test)


def test_an_end_behind_pipelined_requests_comes_behind_the_last_one(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        client = await bed.client()
        client.send(GET + EVENTS)
        client.end_output()
        dockerd = await bed.accepted.get()
        await dockerd.receive(GET)
        dockerd.send(OK)
        assert await dockerd.rest() == EVENTS
        dockerd.send(OK)
        dockerd.writer.close()
        assert await client.rest() == OK + OK

    run(tmp_path, test)


@pytest.mark.parametrize("part", [GET[:10], CREATE[:-1]], ids=["a head", "a held body"])
def test_an_end_inside_a_request_ends_the_connection(tmp_path: Path, part: bytes) -> None:
    """Nothing can complete the request, so none of it reaches dockerd."""

    async def test(bed: Bed) -> None:
        client = await bed.client()
        client.send(part)
        client.end_output()
        dockerd = await bed.accepted.get()
        assert await dockerd.rest() == b""
        dockerd.writer.close()
        assert await client.rest() == b""
        await until(lambda: not bed.agent.connections)

    run(tmp_path, test)


@pytest.mark.parametrize("first", ["client", "dockerd"])
def test_each_direction_of_a_pipe_ends_alone(tmp_path: Path, first: str) -> None:
    async def test(bed: Bed) -> None:
        client, dockerd = await bed.pair(ATTACH)
        dockerd.send(RAW)
        await client.receive(RAW)
        one, other = (client, dockerd) if first == "client" else (dockerd, client)
        one.send(b"last words")
        one.end_output()
        assert await other.rest() == b"last words"
        other.send(b"answer")
        await one.receive(b"answer")
        assert len(bed.agent.connections) == 1
        other.end_output()
        assert await one.rest() == b""
        await until(lambda: not bed.agent.connections)

    run(tmp_path, test)


@pytest.mark.parametrize("answer", [b"", OK[:-1]], ids=["nothing", "half an answer"])
def test_an_end_of_dockerds_output_is_the_end_of_the_connection(
    tmp_path: Path, answer: bytes
) -> None:
    async def test(bed: Bed) -> None:
        client, dockerd = await bed.pair(GET)
        dockerd.send(answer)
        dockerd.end_output()
        assert await client.rest() == answer
        await until(lambda: not bed.agent.connections)

    run(tmp_path, test)


@pytest.mark.parametrize("answer", [b"", RAW, OK, OK[:-1]])
def test_a_client_that_leaves_is_for_dockerd_to_notice(tmp_path: Path, answer: bytes) -> None:
    """As without the proxy: it decides what becomes of the call."""

    async def test(bed: Bed) -> None:
        client, dockerd = await bed.pair(ATTACH)
        dockerd.send(answer)
        await client.receive(answer)
        client.writer.close()
        assert await dockerd.rest() == b""
        dockerd.writer.close()
        await until(lambda: not bed.agent.connections)

    run(tmp_path, test)


# -- broken HTTP ----------------------------------------------------------------------------------


def test_a_client_that_speaks_no_http_learns_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bed: Bed) -> None:
        client = await bed.client()
        client.send(b"HELO mail\r\n\r\n")
        assert await client.rest() == (
            b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
            b"Content-Length: 29\r\nConnection: close\r\n\r\nbad request line b'HELO mail'"
        )
        await until(lambda: not bed.agent.connections)

    run(tmp_path, test)
    record: Any
    (record,) = [r for r in caplog.records if r.getMessage() == "broken HTTP"]
    assert (record.side, record.fault) == (
        "client",
        "bad request line b'HELO mail'",
    )


def test_a_dockerd_that_speaks_no_http_ends_the_connection_without_a_word_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bed: Bed) -> None:
        client, dockerd = await bed.pair(GET)
        dockerd.send(b"220 mail ready\r\n\r\n")
        assert await client.rest() == b""
        assert await dockerd.rest() == b""

    run(tmp_path, test)
    record: Any
    (record,) = [r for r in caplog.records if r.getMessage() == "broken HTTP"]
    assert (record.side, record.fault) == (
        "dockerd",
        "bad status line b'220 mail ready'",
    )


# -- dockerd is away ------------------------------------------------------------------------------


def test_without_dockerd_a_request_is_refused_once_it_came(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def test(bed: Bed) -> None:
        bed.backend.unlink()
        assert not bed.agent.backend_away
        silent = await bed.client()
        await until(lambda: bed.agent.backend_away)
        assert len(bed.agent.connections) == 1, "an answer to no request would confuse a client"
        text = (
            f"Cannot connect to the Docker daemon at unix://{bed.backend}: "
            "no such file or directory"
        )
        refusal = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}"
        ).encode()
        asking = await bed.client()
        asking.send(GET)
        assert await asking.rest() == refusal
        silent.send(GET)
        assert await silent.rest() == refusal
        for leaves_early in (True, False):
            leaving = await bed.client()
            if not leaves_early:
                await until(lambda: [c for c in bed.agent.connections if c._refused])
            leaving.end_output()
            assert await leaving.rest() == b""
        assert not bed.agent.connections
        assert bed.agent.readiness() == [f"dockerd is away: {bed.backend}"]
        assert bed.agent.status()["runtime"] == {"socket": str(bed.backend), "up": False}
        assert gauge(bed, "runtime_up") == 0.0
        async with await bed.dockerd():
            for _ in range(2):
                client, dockerd = await bed.pair(GET)
                dockerd.send(OK)
                await client.receive(OK)
            assert gauge(bed, "runtime_up") == 1.0
            assert bed.agent.status()["runtime"] == {"socket": str(bed.backend), "up": True}
            assert bed.agent.readiness() == ["recovery has not finished"]

    run(tmp_path, test)
    said: list[Any] = [r for r in caplog.records if "dockerd" in r.getMessage()]
    backend = str(tmp_path / "docker.sock")
    assert [(r.levelname, r.getMessage(), r.socket) for r in said] == [
        ("WARNING", "dockerd is away", backend),
        ("INFO", "dockerd is back", backend),
    ]


# -- hooks ----------------------------------------------------------------------------------------


def test_a_held_request_goes_on_as_hooks_have_it_and_its_answer_is_stored(tmp_path: Path) -> None:
    def change(answer: Any) -> None:
        answer.resources.cpu_shares = 7

    async def test(bed: Bed) -> None:
        bed.hook(ScriptedServer({Stage.PRE_RUN_POD_SANDBOX: answering(change)}))
        client = await bed.client()
        client.send(CREATE)
        dockerd = await bed.accepted.get()
        body = SANDBOX.replace(b"{}}", b'{"CpuShares":7}}')
        await dockerd.receive(
            b"POST /containers/create?name=k8s_POD_p_n_u_0 HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        answer = b'HTTP/1.1 201 Created\r\nContent-Length: 13\r\n\r\n{"Id":"abcd"}'
        dockerd.send(answer)
        await client.receive(answer)
        pod = bed.agent.hooks.hooks.store.pod("abcd")
        assert pod is not None
        assert pod.resources is not None
        assert pod.resources.cpu_shares == 7
        assert bed.agent.status()["pods"] == 1

    run(tmp_path, test)


def test_a_refusal_is_dockerds_own_kind_of_error(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        def fails(request: Any) -> HookError:
            return HookError("out of order")

        bed.hook(ScriptedServer({Stage.PRE_RUN_POD_SANDBOX: fails}, fail=True))
        client = await bed.client()
        client.send(CREATE)
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
        assert answer.endswith(b"\r\n\r\nout of order")

    run(tmp_path, test)


def test_a_client_that_leaves_while_hooks_decide_makes_no_call(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        asked, cancelled = asyncio.Event(), asyncio.Event()

        class NeverAnswers(ScriptedServer):
            async def call(
                self, stage: Stage, request: bytes, *, budget_s: float | None
            ) -> bytes | None:
                asked.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()
                return None

        bed.hook(NeverAnswers({Stage.PRE_RUN_POD_SANDBOX: echo}))
        client = await bed.client()
        client.send(CREATE)
        await asked.wait()
        client.writer.close()
        await cancelled.wait()
        dockerd = await bed.accepted.get()
        assert await dockerd.rest() == b""
        assert not bed.agent.connections

    run(tmp_path, test)


def test_a_connection_that_serves_for_long_keeps_nothing_of_old_calls(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        client = await bed.client()
        client.send(CREATE)
        dockerd = await bed.accepted.get()
        for _ in range(5):
            await dockerd.receive(CREATE)
            dockerd.send(OK)
            await client.receive(OK)
            client.send(CREATE)
        await dockerd.receive(CREATE)
        (connection,) = bed.agent.connections
        await until(lambda: not connection._tasks)

    run(tmp_path, test)


# -- what an operator sees ------------------------------------------------------------------------


def test_the_figures_of_a_new_agent(tmp_path: Path) -> None:
    async def test(bed: Bed) -> None:
        await bed.client()
        await until(lambda: bed.agent.connections)
        assert {
            one.name.removeprefix("koord_runtime_proxy_"): one.read() for one in bed.agent.gauges
        } == {
            "connections": 1,
            "runtime_up": 1.0,
            "stored_pods": 0,
            "stored_containers": 0,
            "journal_errors": 0,
            "hook_servers": 0,
            "hook_servers_given_up": 0,
            "hook_server_trips": 0,
            "hooks_skipped_unreadable": 0.0,
            "hooks_skipped_labelled": 0.0,
            "hooks_skipped_unknown_object": 0.0,
            "hooks_skipped_runtime_away": 0.0,
            "hooks_skipped_fault": 0.0,
        }
        helps = {
            one.name.removeprefix("koord_runtime_proxy_"): one.help for one in bed.agent.gauges
        }
        assert helps["connections"] == "Open client connections"
        assert helps["runtime_up"] == "1 unless dockerd refused the last connection"

    run(tmp_path, test)


def test_the_status_and_the_health_name_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "bad.json").write_text("{")
    (tmp_path / "no folder").write_text("")

    async def test(bed: Bed) -> None:
        await bed.agent.start()
        journal = f"no journal: {tmp_path / 'no folder'} cannot be made: File exists"
        ((name, complaint),) = bed.agent.status()["unusableRegistrations"].items()  # type: ignore[attr-defined]
        assert name == "bad.json"
        assert bed.agent.health() == [complaint, journal]
        assert bed.agent.status() == {
            "runtime": {"socket": str(bed.backend), "up": True},
            "recovered": False,
            "hookServers": [],
            "unusableRegistrations": {"bad.json": complaint},
            "pods": 0,
            "containers": 0,
            "journalProblem": journal,
        }

    run(tmp_path, test, flags=(f"--state-dir={tmp_path / 'no folder'}",))
