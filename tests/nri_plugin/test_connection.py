"""One trunk over a real socket: back-pressure, protocol errors, silence, and death in between."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from nri_plugin.connection import Connection, ConnectionClosed
from nri_plugin.session import PLUGIN, RUNTIME
from nri_plugin.supervisor import Supervisor
from nri_plugin.ttrpc import Call, Code, RpcError, encode_failure, encode_response
from tests.fake_runtime import profiles
from tests.fake_runtime.adaptation import Behaviour, FakeRuntime
from tests.fake_runtime.wire import frames, request_message
from tests.nri_plugin.scenes import (
    SHARES,
    RecordingHandler,
    container,
    options,
    pod,
    running,
)


async def pair(serve: Callable[[Call], bytes]) -> tuple[Connection, socket.socket]:
    """A connection, and the runtime's end of its trunk."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(lambda: Connection(serve), sock=ours)
    return connection, theirs


def test_a_peer_that_reads_no_replies_is_not_read_from() -> None:
    answered = 0

    def serve(call: Call) -> bytes:
        nonlocal answered
        answered += 1
        return bytes(20_000)

    async def scenario() -> None:
        connection, theirs = await pair(serve)
        loop = asyncio.get_running_loop()
        requests = b"".join(
            frames(1, request_message(2 * n + 1, PLUGIN, "M", bytes(3000), 0)) for n in range(1000)
        )
        flood = asyncio.ensure_future(loop.sock_sendall(theirs, requests))
        await asyncio.sleep(0.3)
        # One read's worth of requests may be answered after the limit, and no more.
        assert not flood.done()
        stuck_at = answered
        await asyncio.sleep(0.1)
        assert answered == stuck_at < 500
        received = 0
        while answered < 1000 or received < 1000 * 20_000:
            received += len(await loop.sock_recv(theirs, 1 << 20))
        await flood
        assert not connection.closed.done()
        theirs.close()
        assert await asyncio.wait_for(connection.closed, 5)

    uvloop.run(scenario())


@pytest.mark.parametrize("cut", [0, 9, 40], ids=["whole", "in the header", "in the message"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_reply_does_not_need_follows_once_the_runtime_can_read_it(
    cut: int, fails: bool
) -> None:
    readable: list[bool] = []

    def serve(call: Call) -> bytes:
        if fails:
            raise RpcError(Code.UNKNOWN, "no")
        return b"answer"

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)

        def written() -> None:
            readable.append(bool(select.select([theirs], [], [], 0)[0]))

        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: Connection(serve, written), sock=ours)
        request = frames(1, request_message(1, PLUGIN, "M", b"payload", 0))
        if cut:
            await loop.sock_sendall(theirs, request[:cut])
            await asyncio.sleep(0.05)
            assert not readable
        await loop.sock_sendall(theirs, request[cut:])
        assert await loop.sock_recv(theirs, 4096)
        theirs.close()

    uvloop.run(scenario())
    assert readable == [True]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frames(2, struct.pack(">IIBB", 1, 1, 3, 0) + b"x"), "protocol error: .*data message"),
        (frames(2, struct.pack(">IIBB", 2, 1, 2, 0) + b"\xff\xff"), "protocol error: .*be read"),
    ],
)
def test_a_protocol_error_closes_with_its_reason(sent: bytes, reason: str) -> None:
    async def scenario() -> None:
        connection, theirs = await pair(lambda call: b"")
        call = asyncio.ensure_future(connection.call(RUNTIME, "M", b"", timeout_s=5))
        await asyncio.sleep(0.01)
        await asyncio.get_running_loop().sock_sendall(theirs, sent)
        with pytest.raises(ConnectionClosed, match=reason):
            await call
        assert connection.closed.done()
        with pytest.raises(ConnectionClosed, match=reason):
            await connection.call(RUNTIME, "M", b"", timeout_s=5)
        theirs.close()

    uvloop.run(scenario())


def test_replies_in_any_order_find_their_calls_and_a_late_one_is_dropped() -> None:
    async def scenario() -> None:
        connection, theirs = await pair(lambda call: b"")
        loop = asyncio.get_running_loop()
        first = asyncio.ensure_future(connection.call(RUNTIME, "M", b"", timeout_s=5))
        second = asyncio.ensure_future(connection.call(RUNTIME, "M", b"", timeout_s=5))
        await asyncio.sleep(0)
        with pytest.raises(RpcError) as late:
            await connection.call(RUNTIME, "M", b"", timeout_s=0.01)
        assert late.value.code == Code.DEADLINE_EXCEEDED
        for answer in (
            encode_response(5, b"late"),
            encode_failure(3, Code.UNKNOWN, "no"),
            encode_response(1, b"yes"),
        ):
            await loop.sock_sendall(theirs, frames(2, answer))
        assert await first == b"yes"
        with pytest.raises(RpcError, match="no"):
            await second
        assert not connection.closed.done()
        theirs.close()

    uvloop.run(scenario())


def test_a_peer_that_takes_nothing_cannot_keep_a_closed_trunk_open() -> None:
    async def scenario() -> None:
        connection, theirs = await pair(lambda call: bytes(4_000_000))
        request = frames(1, request_message(1, PLUGIN, "M", b"", 0))
        await asyncio.get_running_loop().sock_sendall(theirs, request)
        await asyncio.sleep(0.05)
        connection.close("enough")
        assert await asyncio.wait_for(connection.closed, 10) == "enough"
        theirs.close()

    uvloop.run(scenario())


def test_a_silent_peer_before_us_delays_registration_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(registration_timeout_s=0.3)
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B, behaviour)
        async with runtime.running():
            _, silent = await asyncio.open_unix_connection(runtime.socket_path)
            supervisor = Supervisor(options(tmp_path), RecordingHandler())
            async with running(supervisor):
                await runtime.synchronized()
                assert supervisor.statistics.dials == 1
            silent.close()

    uvloop.run(scenario())


@pytest.mark.parametrize("method", ["CreateContainer", "UpdateContainer", "StateChange"])
@pytest.mark.parametrize("how", ["close_instead_of", "cut_frame_of"])
def test_a_runtime_that_dies_during_an_event_is_joined_again(
    tmp_path: Path, method: str, how: str
) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B)
        handler = RecordingHandler({SHARES: 77})
        supervisor = Supervisor(options(tmp_path), handler)
        async with runtime.running(), running(supervisor):
            await runtime.synchronized()
            runtime.containers["old"] = container("old")
            setattr(runtime.behaviour, how, method)
            if method == "CreateContainer":
                await runtime.create_container(container())
            elif method == "UpdateContainer":
                await runtime.update_container("old", container().linux.resources)
            else:
                await runtime.run_pod_sandbox(pod())
            runtime.behaviour = Behaviour()
            await runtime.wait(lambda: any(not active.trunk.closed for active in runtime.plugins))
            assert handler.methods().count("disconnected") == 1
            created = await runtime.create_container(container("new"))
            assert created.adjust.linux.resources.cpu.shares.value == 77

    uvloop.run(scenario())
