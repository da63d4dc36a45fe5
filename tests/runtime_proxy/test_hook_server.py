"""One hook server: what its answers, its errors and its slowness lead to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from runtime_proxy import breaker as breaker_module
from runtime_proxy import hook_server
from runtime_proxy.breaker import State
from runtime_proxy.hook_server import GivenUp, HookCounts, HookError, HookServer
from runtime_proxy.http2.frames import ErrorCode
from runtime_proxy.registration import Registration
from runtime_proxy.stages import Stage
from tests.runtime_proxy.http2.h2_server import H2Server, Reply
from tests.waiting import until


def with_server(
    folder: Path,
    test: Callable[[HookServer, H2Server], Awaitable[None]],
    *,
    fail: bool = False,
    timeout_s: float = 10.0,
) -> list[tuple[Stage, str]]:
    """Run a test with a hook server of every stage; return the outcomes that were counted."""
    outcomes: list[tuple[Stage, str]] = []

    async def main() -> None:
        async with asyncio.timeout(30), H2Server(folder / "hook.sock") as peer:
            registration = Registration("h.json", str(peer.socket), fail, frozenset(Stage))
            server = HookServer(
                registration,
                timeout_s=timeout_s,
                counts=HookCounts(lambda name, stage, how, s: outcomes.append((stage, how))),
            )
            try:
                await test(server, peer)
            finally:
                server.close()

    asyncio.run(main())
    return outcomes


async def ask(server: HookServer, stage: Stage = Stage.PRE_CREATE_CONTAINER) -> bytes | None:
    return await server.call(stage, b"request", budget_s=None)


def test_an_answer_is_returned_as_it_came(tmp_path: Path) -> None:
    async def test(server: HookServer, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"answer"])
        assert await ask(server) == b"answer"
        assert peer.requests == [
            ("/runtime.v1alpha1.RuntimeHookService/PreCreateContainerHook", b"request")
        ]

    assert with_server(tmp_path, test) == [(Stage.PRE_CREATE_CONTAINER, "ok")]


@pytest.mark.parametrize(
    ("resets", "asked", "outcome"),
    [
        ([ErrorCode.REFUSED_STREAM], 2, "ok"),
        ([ErrorCode.REFUSED_STREAM] * 2, 2, "error"),
        ([ErrorCode.CANCEL], 1, "error"),
    ],
)
def test_a_call_that_the_server_did_not_look_at_is_made_once_more(
    tmp_path: Path, resets: list[int], asked: int, outcome: str
) -> None:
    """One that it may have looked at is not: hooks change things."""

    async def test(server: HookServer, peer: H2Server) -> None:
        peer.reply, peer.resets = Reply(messages=[b"answer"]), list(resets)
        if outcome == "ok":
            assert await ask(server) == b"answer"
        else:
            with pytest.raises(HookError, match="stream reset by the server"):
                await ask(server)
        assert [request for _, request in peer.requests] == [b"request"] * asked
        assert server.breaker.state is (State.CLOSED if outcome == "ok" else State.OPEN)

    assert with_server(tmp_path, test) == [(Stage.PRE_CREATE_CONTAINER, outcome)]


def test_a_server_whose_registration_is_gone_is_not_looked_for(tmp_path: Path) -> None:
    """Its last calls end with it, and nothing dials it again."""

    async def test(server: HookServer, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"answer"], pause_before_end=True)
        last = asyncio.create_task(ask(server))
        await until(lambda: peer.requests, "the call")
        server.close()
        await peer.cut_off()
        with pytest.raises(HookError):
            await last
        assert server._probe is None

    # Not "timeout": a call on a lost connection fails at once.
    assert with_server(tmp_path, test) == [(Stage.PRE_CREATE_CONTAINER, "error")]


def without_probes_of_its_own(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(hook_server, "_FIRST_PROBE_DELAY_S", 3600.0)
    patched.setattr(hook_server, "_LONGEST_PROBE_DELAY_S", 3600.0)


def test_a_lost_server_gets_the_first_call_after_its_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_probes_of_its_own(monkeypatch)

    async def test(server: HookServer, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"answer"])
        await peer.__aexit__(None, None, None)
        with pytest.raises(HookError):
            await ask(server)
        for _ in range(3):
            with pytest.raises(GivenUp):
                await ask(server)
        peer.socket.unlink(missing_ok=True)
        async with peer:
            assert list(await asyncio.gather(ask(server), ask(server))) == [b"answer"] * 2
            assert server.breaker.state is State.CLOSED
            assert await ask(server) == b"answer"

    outcomes = [how for _, how in with_server(tmp_path, test)]
    assert outcomes == ["error", "refused", "refused", "refused", "ok", "ok", "ok"]


def test_a_lost_server_that_hangs_at_its_return_costs_one_wait_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_probes_of_its_own(monkeypatch)
    monkeypatch.setattr(hook_server, "_PROBE_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(hook_server, "_PROBE_PATIENCE_S", 0.05)

    async def test(server: HookServer, peer: H2Server) -> None:
        await peer.__aexit__(None, None, None)
        with pytest.raises(HookError):
            await ask(server)
        accepted = 0

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal accepted
            accepted += 1
            await reader.read()
            writer.close()

        peer.socket.unlink(missing_ok=True)
        async with await asyncio.start_unix_server(hang, peer.socket):
            with pytest.raises(GivenUp):
                await ask(server)
            monkeypatch.setattr(asyncio, "timeout", None)  # nothing is waited for any more
            for _ in range(3):
                with pytest.raises(GivenUp):
                    await ask(server)
            monkeypatch.undo()
            assert accepted == 1
            assert server.breaker.state is State.OPEN
            server.close()

    with_server(tmp_path, test)


def test_a_call_waits_for_the_probe_no_longer_than_its_caller_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_probes_of_its_own(monkeypatch)
    monkeypatch.setattr(hook_server, "_PROBE_PATIENCE_S", 3600.0)

    async def test(server: HookServer, peer: H2Server) -> None:
        await peer.__aexit__(None, None, None)
        with pytest.raises(HookError):
            await ask(server)
        peer.socket.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(peer.socket))
            silent.listen()
            with pytest.raises(GivenUp):
                await server.call(Stage.PRE_CREATE_CONTAINER, b"request", budget_s=0.01)

    assert [how for _, how in with_server(tmp_path, test)] == ["error", "refused"]


LIMIT = 4 * 1024 * 1024

BAD_REPLIES: dict[str, tuple[Reply, str]] = {
    "no message": (Reply(), "the answer has no message"),
    "two messages": (Reply(messages=[b"a", b"b"]), "the answer has several messages"),
    "a message cut off before an OK": (
        Reply(raw=b"\0\0\0\0\x09half"),
        "the answer ends inside a message",
    ),
    "a prefix cut off before an OK": (Reply(raw=b"\0\0\0"), "the answer ends inside a message"),
    "a message without trailers": (
        Reply(messages=[b"answer"], trailers=None),
        "answer without trailers",
    ),
    "trailers without a status": (
        Reply(messages=[b"answer"], trailers=[("x", "y")]),
        "answer without grpc-status",
    ),
    "a compressed message": (Reply(raw=b"\1\0\0\0\1x"), "flag 1"),
    "a message above the limit": (Reply(messages=[b"x" * (LIMIT + 1)]), f"of {LIMIT + 1} octets"),
    "a size above the limit, and nothing more": (
        Reply(raw=b"\0\xff\xff\xff\xff", trailers=None, ends=False),
        "of 4294967295 octets",
    ),
    "the server's own error": (
        Reply(trailers=[("grpc-status", "3"), ("grpc-message", "bad%20thing")]),
        "bad thing",
    ),
    "an error without a text": (Reply(trailers=[("grpc-status", "3")]), "3"),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_a_bad_reply_is_an_error_that_says_why(tmp_path: Path, name: str) -> None:
    reply, reason = BAD_REPLIES[name]

    async def test(server: HookServer, peer: H2Server) -> None:
        peer.reply = reply
        with pytest.raises(HookError) as caught:
            await ask(server)
        assert str(caught.value).startswith(f"{peer.socket}: ")
        assert reason in str(caught.value)
        # The server is alive, and the connection serves the next call.
        assert server.breaker.state is State.CLOSED
        peer.reply = Reply(messages=[b"answer"])
        assert await ask(server) == b"answer"
        assert peer.accepted == 1

    assert [how for _, how in with_server(tmp_path, test)] == ["error", "ok"]


def test_the_largest_message_is_taken(tmp_path: Path) -> None:
    async def test(server: HookServer, peer: H2Server) -> None:
        peer.reply = Reply(messages=[b"x" * LIMIT])
        assert await ask(server) == b"x" * LIMIT

    with_server(tmp_path, test)


def test_incomplete_answers_are_bounded_together(tmp_path: Path) -> None:
    """Eight calls of three quarters of the largest message each: some fail, the others end."""

    async def test(server: HookServer, peer: H2Server) -> None:
        message = b"x" * (LIMIT * 3 // 4)
        peer.reply = Reply(messages=[message], pause_before_end=True)
        calls = [asyncio.create_task(ask(server)) for _ in range(8)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            with pytest.raises(HookError, match="incomplete at a time"):
                one.result()
        peer.go_on.set()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert 4 <= sum(one == message for one in ended) <= 5
        peer.reply = Reply(messages=[b"answer"])
        assert [await ask(server) for _ in range(8)] == [b"answer"] * 8

    with_server(tmp_path, test)


OURS = {Stage.PRE_REMOVE_POD_SANDBOX, Stage.PRE_UPDATE_POD_SANDBOX_RESOURCES}


@pytest.mark.parametrize(("stage", "again"), [(stage, stage not in OURS) for stage in Stage])
def test_an_added_stage_that_is_not_served_is_not_asked_again(
    tmp_path: Path, stage: Stage, again: bool
) -> None:
    async def test(server: HookServer, peer: H2Server) -> None:
        peer.reply = Reply(trailers=[("grpc-status", "12"), ("grpc-message", "unknown method")])
        assert server.serves(stage)
        if again:
            with pytest.raises(HookError, match="unknown method"):
                await ask(server, stage)
        else:
            assert await ask(server, stage) is None
        assert server.serves(stage) is again

    assert with_server(tmp_path, test) == [(stage, "error" if again else "unserved")]


@pytest.mark.parametrize(
    ("seconds", "fail", "state"),
    [
        (1.0, False, State.CLOSED),
        (1.1, False, State.OPEN),
        (1.1, True, State.CLOSED),
    ],
)
def test_slow_answers_open_the_breaker_unless_the_policy_is_fail(
    tmp_path: Path, seconds: float, fail: bool, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the time limit of 2 s is slow. Under Fail a slow answer is better than a refusal."""
    monkeypatch.setattr(breaker_module, "_SLOW_FOR_S", 0.0)

    async def test(server: HookServer, peer: H2Server) -> None:
        for _ in range(5):
            server._answered(seconds)
        assert server.breaker.state is state
        if state is State.OPEN:
            assert server.breaker.reason == "answers take more than 1 s"
            with pytest.raises(HookError, match="more than 1 s"):
                await ask(server)

    with_server(tmp_path, test, fail=fail, timeout_s=2.0)


@pytest.mark.parametrize("reply", [Reply(messages=[b"a"]), Reply(trailers=[("grpc-status", "3")])])
def test_the_time_of_a_call_is_what_counts(
    tmp_path: Path, reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of one that the server answers with an error."""
    monkeypatch.setattr(breaker_module, "_SLOW_FOR_S", 0.0)
    monkeypatch.setattr("runtime_proxy.hook_server._SLOW_SHARE", 0.0)

    async def test(server: HookServer, peer: H2Server) -> None:
        peer.reply = reply
        for number in range(5):
            assert server.breaker.state is State.CLOSED, number
            await asyncio.gather(ask(server), return_exceptions=True)
        assert server.breaker.state is State.OPEN

    with_server(tmp_path, test)
