"""Docker mode's connections: their two ends, what ends them, and what a stop waits for."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runtime_proxy.checkpoint import Checkpoint
from runtime_proxy.docker import agent as agent_module
from runtime_proxy.docker.agent import _Upstream
from runtime_proxy.hook_server import HookError
from runtime_proxy.model import Pod, PodChanges
from runtime_proxy.stages import Stage
from tests.runtime_proxy.docker.agent_bed import Bed, bed_in, run
from tests.runtime_proxy.processes import answering, echo
from tests.runtime_proxy.scripted import ScriptedServer
from tests.waiting import until

GET = b"GET /version HTTP/1.1\r\nHost: d\r\n\r\n"
EVENTS = b"GET /events HTTP/1.1\r\nHost: d\r\n\r\n"
ATTACH = b"POST /containers/c/attach HTTP/1.1\r\nHost: d\r\n\r\n"
RAW = b"HTTP/1.1 200 OK\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
SANDBOX = b'{"Labels":{"io.kubernetes.docker.type":"podsandbox"},"HostConfig":{}}'
CREATE = (
    b"POST /containers/create?name=k8s_POD_p_n_u_0 HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s"
    % (
        len(SANDBOX),
        SANDBOX,
    )
)


def gauge(bed: Bed, name: str) -> float:
    (found,) = [one for one in bed.agent.gauges if one.name == f"koord_runtime_proxy_{name}"]
    return found.read()


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


# -- backpressure and early octets, with transports that only record ------------------------------


class Wire(asyncio.Transport):
    """Records what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = False
        self.ended = False
        self.high: int | None = None
        self.ends = socket.socketpair()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self.ends[0]}[name]

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def on_wires(folder: Path, test: Any) -> None:
    """Run a test with a connection, its client's wire, and dockerd's, which is not yet there."""

    async def main() -> None:
        bed = bed_in(folder)
        connection: Any = bed.agent.new_connection()
        client = Wire()
        connection.connection_made(client)
        test(connection, client, Wire())
        connection.close()
        await bed.agent.close()

    asyncio.run(main())


def test_a_reader_that_is_slow_slows_the_other_side(tmp_path: Path) -> None:
    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        connection.pause_writing()
        connection.resume_writing()
        upstream = _Upstream(connection)
        upstream.connection_made(dockerd)
        for writer, reader, protocol in (
            (client, dockerd, connection),
            (dockerd, client, upstream),
        ):
            pause, resume = protocol.pause_writing, protocol.resume_writing
            assert writer.high == 1024 * 1024
            pause()
            assert (reader.reading, writer.reading) == (False, True)
            resume()
            assert reader.reading
            # Its own loop ends what is closed: uvloop refuses to read on.
            pause()
            reader.closed = True
            resume()
            assert not reader.reading
            reader.closed, reader.reading = False, True

    on_wires(tmp_path, test)


def test_what_comes_before_dockerd_answers_the_dial_is_kept_up_to_a_limit(tmp_path: Path) -> None:
    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        head = b"POST /echo HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n"
        early = head + b"x" * (1024 * 1024 - len(head))
        connection.data_received(early[:5])
        connection.data_received(early[5:])
        connection.upstream_made(dockerd)
        assert (dockerd.written, dockerd.ended) == (early, False)
        connection.data_received(b"y")
        assert dockerd.written == early + b"y"
        assert (client.written, client.closed) == (b"", False)

    on_wires(tmp_path, test)


def test_more_than_the_limit_before_dockerd_answers_the_dial_ends_the_connection(
    tmp_path: Path,
) -> None:
    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        connection.data_received(GET + b"x" * (1024 * 1024 + 1 - len(GET)))
        assert client.closed
        connection.upstream_made(dockerd)
        assert dockerd.closed
        assert dockerd.written == b""

    on_wires(tmp_path, test)


@pytest.mark.parametrize("sent", [GET, b""])
def test_a_client_that_ends_before_dockerd_answers_the_dial_is_passed_on(
    tmp_path: Path, sent: bytes
) -> None:
    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        if sent:
            connection.data_received(sent)
        assert connection.eof_received()
        connection.upstream_made(dockerd)
        assert (dockerd.written, dockerd.ended) == (sent, True)

    on_wires(tmp_path, test)


@pytest.mark.parametrize("sent", [GET, b""])
def test_a_client_that_ends_before_the_dial_fails_is_answered_and_closed(
    tmp_path: Path, sent: bytes
) -> None:
    async def main() -> None:
        bed = bed_in(tmp_path)
        connection: Any = bed.agent.new_connection()
        client = Wire()
        connection.connection_made(client)
        if sent:
            connection.data_received(sent)
        assert connection.eof_received()
        await until(lambda: client.closed)
        assert client.written.startswith(b"HTTP/1.1 503 ") is bool(sent)

    asyncio.run(main())


def test_a_pipe_whose_ends_have_both_ended_is_closed(tmp_path: Path) -> None:
    """A protocol that returns False to its transport has it closed."""

    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        upstream = _Upstream(connection)
        upstream.connection_made(dockerd)
        connection.data_received(ATTACH)
        upstream.data_received(RAW)
        assert upstream.eof_received()
        assert client.ended
        assert not dockerd.ended
        assert not connection.eof_received()
        assert dockerd.ended
        assert not upstream.eof_received()

    on_wires(tmp_path, test)


@pytest.mark.parametrize("closing", ["client", "dockerd"])
def test_an_end_is_not_passed_on_to_a_side_that_closes(tmp_path: Path, closing: str) -> None:
    """The event loop refuses to write to it."""

    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        upstream = _Upstream(connection)
        upstream.connection_made(dockerd)
        connection.data_received(ATTACH)
        upstream.data_received(RAW)
        if closing == "client":
            client.closed = True
            upstream.eof_received()
        else:
            dockerd.closed = True
            connection.eof_received()
        assert not client.ended
        assert not dockerd.ended

    on_wires(tmp_path, test)


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


# -- background -----------------------------------------------------------------------------------

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


# -- the end --------------------------------------------------------------------------------------


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
