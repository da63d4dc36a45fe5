"""The usual exchange: read and written in few steps, as the machines for any cut do it."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nri_plugin import usual
from nri_plugin.connection import Connection
from nri_plugin.mux import PLUGIN_SERVICE, RUNTIME_SERVICE, Demultiplexer, frame_message
from nri_plugin.ttrpc import Call, RpcError, Server, encode_response
from tests.fake_runtime.wire import frames, request_message

SERVICE = "nri.pkg.api.v1alpha1.Plugin"


def usual_request(stream: int = 1, payload: bytes = b"abc") -> bytes:
    return frames(PLUGIN_SERVICE, request_message(stream, SERVICE, "M", payload, 0))


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 300, 4082, 4083, 4084, 4096, 20_000])
def test_a_reply_is_what_the_two_machines_write(length: int) -> None:
    payload = bytes(range(256)) * (length // 256 + 1)
    whole = frame_message(PLUGIN_SERVICE, encode_response(7, payload[:length]))
    assert usual.reply(7, payload[:length]) == whole


def test_a_reply_that_no_peer_takes_is_refused() -> None:
    with pytest.raises(RpcError, match="above ttRPC's limit"):
        usual.reply(1, bytes(5 << 20))


@given(st.integers(1, 1 << 31), st.binary(max_size=3000))
def test_a_usual_request_is_read_as_the_two_machines_read_it(stream: int, payload: bytes) -> None:
    data = usual_request(stream, payload)
    found = usual.request(data)
    assert found is not None
    ((connection, piece),) = Demultiplexer().feed(data)
    assert connection == PLUGIN_SERVICE
    assert [Server().request(*found)] == Server().receive(piece)


@pytest.mark.parametrize(
    "data",
    [
        usual_request()[:-1],
        usual_request()[:17],
        b"",
        usual_request() + b"\0",
        usual_request(1) + usual_request(3),
        frames(RUNTIME_SERVICE, request_message(1, SERVICE, "M", b"abc", 0)),
        # Two messages in one frame, one message in two frames, a message with flags, a response.
        frames(
            PLUGIN_SERVICE,
            request_message(1, SERVICE, "M", b"", 0) + request_message(3, SERVICE, "M", b"", 0),
        ),
        frames(PLUGIN_SERVICE, request_message(1, SERVICE, "M", bytes(6000), 0)),
        usual_request()[:17] + b"\x02" + usual_request()[18:],
        usual_request()[:16] + b"\x02" + usual_request()[17:],
    ],
)
def test_everything_else_is_left_to_the_machines(data: bytes) -> None:
    assert usual.request(data) is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_of_the_trunk_gets_the_same_replies(data: st.DataObject) -> None:
    """Whole requests, cut ones and several at once, in any order: each is answered once."""
    payloads = data.draw(st.lists(st.binary(max_size=5000), min_size=1, max_size=6))
    requests = [usual_request(2 * n + 1, payload) for n, payload in enumerate(payloads)]
    trunk = b"".join(requests)
    ends = [len(b"".join(requests[: n + 1])) for n in range(len(requests))]
    cuts = data.draw(
        st.lists(st.one_of(st.sampled_from(ends), st.integers(0, len(trunk))), max_size=8)
    )
    edges = sorted({0, len(trunk), *cuts})
    served: list[bytes] = []

    def serve(call: Call) -> bytes:
        served.append(call.payload)
        return call.payload

    replies = bytearray()
    transport = _Sink(replies)

    async def scenario() -> None:
        connection = Connection(serve)
        connection.connection_made(transport)
        for start, end in itertools.pairwise(edges):
            connection.data_received(trunk[start:end])

    asyncio.run(scenario())
    assert served == payloads
    expected = [
        frame_message(PLUGIN_SERVICE, encode_response(2 * n + 1, payload))
        for n, payload in enumerate(payloads)
    ]
    assert bytes(replies) == b"".join(expected)


def test_a_stream_id_that_was_used_is_refused_on_the_usual_way_too() -> None:
    async def scenario() -> bytes:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(
            lambda: Connection(lambda call: b""), sock=ours
        )
        for _ in range(2):
            await loop.sock_sendall(theirs, usual_request(5))
            answered = await loop.sock_recv(theirs, 4096)
        connection.abort("end of the test")
        theirs.close()
        return answered

    assert b"cannot be re-used" in asyncio.run(scenario())


class _Sink(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self, written: bytearray) -> None:
        super().__init__()
        self._written = written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass
