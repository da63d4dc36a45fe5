"""The proxy's own client frame by frame: windows, limits, ends, and what it says of each."""

from __future__ import annotations

import pytest

from runtime_proxy.http2 import client as client_module
from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.client import ClientConnection, Ended, Message, Ponged
from runtime_proxy.http2.frames import FRAME_HEADER, HEADER_SIZE, ConnectionFault, ErrorCode
from runtime_proxy.http2.grpc import Code, Status, add_prefix
from runtime_proxy.http2.hpack import Header


def connection(*, max_message_bytes: int = 1000) -> ClientConnection:
    made = ClientConnection(max_message_bytes=max_message_bytes)
    made.output.clear()
    return made


def begun(made: ClientConnection, message: bytes = b"") -> int:
    """Begin a call, and take what it says at once."""
    stream = made.call(b"/s/m", message, timeout_s=None)
    made.output.clear()
    return stream


def sent(made: ClientConnection) -> list[tuple[int, int, int, bytes]]:
    """Take the frames that the client wants to send: kind, flags, stream and payload."""
    octets, made.output = b"".join(made.output), []
    found, at = [], 0
    while at < len(octets):
        high, low, kind, flags, stream = FRAME_HEADER.unpack_from(octets, at)
        end = at + HEADER_SIZE + (high << 8 | low)
        found.append((kind, flags, stream, octets[at + HEADER_SIZE : end]))
        at = end
    return found


def data_sizes(made: ClientConnection) -> list[int]:
    return [len(payload) for kind, _, _, payload in sent(made) if kind == frames.DATA]


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags, stream, payload)


def headers(stream: int, *fields: Header, flags: int = frames.END_HEADERS) -> bytes:
    return frames.frame(frames.HEADERS, flags, stream, hpack.encode(list(fields)))


def trailers(stream: int, *fields: Header) -> bytes:
    return headers(stream, *fields, flags=frames.END_HEADERS | frames.END_STREAM)


def taken(made: ClientConnection) -> list[object]:
    events, made.events = made.events, []
    return list(events)


# -- what it says ---------------------------------------------------------------------------------


def test_a_connection_begins_with_a_window_for_whole_answers_and_without_push() -> None:
    made = ClientConnection(max_message_bytes=1)
    assert made.output.pop(0) == frames.PREFACE
    assert sent(made) == [
        (frames.SETTINGS, 0, 0, b"\0\4" + (1 << 30).to_bytes(4, "big") + b"\0\2\0\0\0\0"),
        (frames.WINDOW_UPDATE, 0, 0, ((1 << 30) - 65_535).to_bytes(4, "big")),
    ]


@pytest.mark.parametrize("timeout_s", [None, 1.5])
def test_a_call_is_one_header_block_and_its_message(timeout_s: float | None) -> None:
    made = connection()
    assert made.call(b"/s/m", b"abc", timeout_s=timeout_s) == 1
    (kind, flags, stream, block), message = sent(made)
    assert (kind, flags, stream) == (frames.HEADERS, frames.END_HEADERS, 1)
    assert hpack.Decoder().decode(block) == [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/s/m"),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"user-agent", b"koord-runtime-proxy"),
        *([(b"grpc-timeout", b"1500000u")] if timeout_s else []),
    ]
    assert message == (frames.DATA, frames.END_STREAM, 1, add_prefix(b"abc"))
    assert made.call(b"/s/m", b"", timeout_s=None) == 3
    assert made.open_calls == 2


def test_pings_are_answered_and_answers_are_events() -> None:
    made = connection()
    made.ping(b"12345678")
    assert sent(made) == [(frames.PING, 0, 0, b"12345678")]
    made.receive(frames.ping(b"abcdefgh") + frames.ping_ack(b"12345678"))
    assert sent(made) == [(frames.PING, frames.ACK, 0, b"abcdefgh")]
    assert taken(made) == [Ponged(b"12345678")]


# -- the server's windows -------------------------------------------------------------------------


def test_a_request_waits_for_both_windows_in_frames_that_the_server_takes() -> None:
    made = connection()
    first = made.call(b"/s/m", b"x" * (100_000 - 5), timeout_s=None)
    assert data_sizes(made) == [16_384, 16_384, 16_384, 16_383]
    made.receive(frames.window_update(0, 10_000))
    assert data_sizes(made) == [], "the stream's own window is used up"
    made.receive(frames.window_update(first, 4_000))
    assert data_sizes(made) == [4_000]
    second = made.call(b"/s/m", b"y" * (7_000 - 5), timeout_s=None)
    assert data_sizes(made) == [6_000], "what the first left of the connection's"
    made.receive(frames.settings({frames.SETTING_MAX_FRAME_SIZE: 20_000}))
    made.receive(frames.window_update(0, 100_000))
    assert data_sizes(made) == [1_000]
    made.receive(frames.window_update(first, 100_000))
    last = [f for f in sent(made) if f[0] == frames.DATA]
    assert [(flags, len(payload)) for _, flags, _, payload in last] == [
        (0, 20_000),
        (frames.END_STREAM, 100_000 - 65_535 - 4_000 - 20_000),
    ]
    assert made.open_calls == 2
    made.receive(trailers(second, (b"grpc-status", b"0")))
    assert made.open_calls == 1


def test_a_change_of_the_initial_window_reaches_calls_under_way() -> None:
    made = connection()
    made.receive(frames.settings({frames.SETTING_INITIAL_WINDOW_SIZE: 100}))
    assert sent(made) == [(frames.SETTINGS, frames.ACK, 0, b"")]
    stream = made.call(b"/s/m", b"x" * 195, timeout_s=None)
    assert data_sizes(made) == [100]
    made.receive(frames.settings({frames.SETTING_INITIAL_WINDOW_SIZE: 60}))
    made.receive(frames.window_update(stream, 40))
    assert data_sizes(made) == [], "40 octets more than it may were sent"
    made.receive(frames.settings({frames.SETTING_INITIAL_WINDOW_SIZE: 61}))
    assert data_sizes(made) == [1]
    made.receive(frames.SETTINGS_ACK)
    assert sent(made) == []


def test_a_cancelled_call_sends_nothing_more_and_frees_its_place() -> None:
    made = connection()
    made.receive(frames.settings({frames.SETTING_MAX_CONCURRENT_STREAMS: 1}))
    made.output.clear()
    first = made.call(b"/s/m", b"x" * 100_000, timeout_s=None)
    second = made.call(b"/s/m", b"y", timeout_s=None)
    third = made.call(b"/s/m", b"z", timeout_s=None)
    assert {stream for _, _, stream, _ in sent(made)} == {first}
    made.cancel(third)
    assert sent(made) == [], "the server has not seen this call"
    made.cancel(first)
    made.receive(frames.window_update(0, 100_000) + frames.window_update(first, 100_000))
    assert [(kind, stream) for kind, _, stream, _ in sent(made)] == [
        (frames.RST_STREAM, first),
        (frames.HEADERS, second),
        (frames.DATA, second),
    ]
    made.cancel(first)
    made.cancel(third)
    assert (sent(made), taken(made), made.open_calls) == ([], [], 1)


# -- answers --------------------------------------------------------------------------------------


def test_messages_are_cut_out_of_any_frames_and_their_window_is_given_back() -> None:
    made = connection()
    stream = begun(made)
    octets = add_prefix(b"one") + add_prefix(b"") + add_prefix(b"three")
    for at in range(len(octets) - 1):
        made.receive(data(stream, octets[at : at + 1]))
    padded = frames.frame(frames.DATA, frames.PADDED, stream, b"\2" + octets[-1:] + b"\0\0")
    made.receive(padded + trailers(stream, (b"grpc-status", b"0"), (b"grpc-message", b"f%C3%BCr")))
    assert taken(made) == [
        Message(stream, b"one"),
        Message(stream, b""),
        Message(stream, b"three"),
        Ended(stream, Status(Code.OK, "für")),
    ]
    assert sent(made) == [
        (frames.WINDOW_UPDATE, 0, stream, (8).to_bytes(4, "big")),
        (frames.WINDOW_UPDATE, 0, stream, (10).to_bytes(4, "big")),
    ]


def test_the_connections_window_is_given_back_when_half_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also what was received for calls that are over."""
    made = connection()
    monkeypatch.setattr(client_module, "_RECEIVE_WINDOW", 1000)
    stream = begun(made)
    made.receive(data(stream, b"\0\0\0\3\0" + b"x" * 295))
    made.cancel(stream)
    assert [kind for kind, *_ in sent(made)] == [frames.RST_STREAM]
    made.receive(data(stream, b"x" * 200))
    assert sent(made) == []
    made.receive(data(stream, b"x"))
    assert sent(made) == [(frames.WINDOW_UPDATE, 0, 0, (501).to_bytes(4, "big"))]
    made.receive(data(stream, b"x" * 500))
    assert sent(made) == []


@pytest.mark.parametrize(
    ("prefix", "complaint"),
    [
        (b"\0" + (1001).to_bytes(4, "big"), "answer of 1001 octets, flag 0; the limit is 1000"),
        (b"\1" + (7).to_bytes(4, "big"), "answer of 7 octets, flag 1; the limit is 1000"),
    ],
)
def test_an_answer_that_is_too_large_or_compressed_ends_its_call(
    prefix: bytes, complaint: str
) -> None:
    made = connection()
    stream, other = begun(made), begun(made)
    made.receive(data(stream, prefix))
    assert sent(made) == [(frames.RST_STREAM, 0, stream, (8).to_bytes(4, "big"))]
    assert taken(made) == [Ended(stream, Status(Code.RESOURCE_EXHAUSTED, complaint))]
    made.receive(data(stream, b"more") + trailers(stream, (b"grpc-status", b"0")))
    made.receive(data(other, add_prefix(b"x" * 1000)))
    assert taken(made) == [Message(other, b"x" * 1000)]


def test_incomplete_answers_may_have_four_times_the_largest_message_together() -> None:
    made = connection()
    streams = [begun(made) for _ in range(6)]
    part = b"\0" + (1000).to_bytes(4, "big") + b"x" * 795
    for stream in streams[:5]:
        made.receive(data(stream, part))
    assert taken(made) == []
    made.receive(data(streams[5], add_prefix(b"z")))
    complaint = "4006 octets of answers are incomplete at a time"
    assert taken(made) == [Ended(streams[5], Status(Code.RESOURCE_EXHAUSTED, complaint))]
    # A message that is complete, and a call that is over, make room again.
    made.cancel(streams[1])
    made.receive(data(streams[0], b"x" * 205))
    made.receive(trailers(streams[2], (b"grpc-status", b"2")))
    assert taken(made) == [
        Message(streams[0], b"x" * 1000),
        Ended(streams[2], Status(Code.UNKNOWN)),
    ]
    stream = begun(made)
    made.receive(data(stream, part) + data(streams[0], part) + data(streams[3], b"x" * 204))
    assert taken(made) == []
    assert made._received == 800 * 4 + 204


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ([(b":status", b"200"), (b"grpc-status", b"5"), (b"grpc-message", b"no")], Status(5, "no")),
        ([(b":status", b"200"), (b"grpc-status", b"99")], Status(99)),
        ([(b":status", b"503")], Status(Code.UNKNOWN, "answer without grpc-status (HTTP 503)")),
        (
            [(b":status", b"200"), (b"grpc-status", b"-1")],
            Status(Code.UNKNOWN, "answer without grpc-status (HTTP 200)"),
        ),
    ],
)
def test_a_call_ends_with_the_servers_status(answer: list[Header], status: Status) -> None:
    made = connection()
    stream = begun(made)
    made.receive(trailers(stream, *answer))
    assert taken(made) == [Ended(stream, status)]
    assert made.open_calls == 0


def test_an_answer_that_ends_too_early_is_an_error() -> None:
    made = connection()
    inside, behind = begun(made), begun(made)
    made.receive(headers(inside, (b":status", b"200")) + data(inside, b"\0\0\0\0\1"))
    made.receive(trailers(inside, (b"grpc-status", b"0")))
    made.receive(data(behind, add_prefix(b"x"), frames.END_STREAM))
    assert taken(made) == [
        Ended(inside, Status(Code.INTERNAL, "the answer ends inside a message")),
        Message(behind, b"x"),
        Ended(behind, Status(Code.INTERNAL, "answer without trailers")),
    ]


def test_a_reset_says_whether_the_server_looked_at_the_call() -> None:
    made = connection()
    refused, ended = begun(made), begun(made)
    made.receive(frames.rst_stream(refused, ErrorCode.REFUSED_STREAM))
    made.receive(frames.rst_stream(ended, ErrorCode.CANCEL))
    text = "stream reset by the server, HTTP/2 code"
    assert taken(made) == [
        Ended(refused, Status(Code.UNAVAILABLE, f"{text} 7"), processed=False),
        Ended(ended, Status(Code.UNAVAILABLE, f"{text} 8"), processed=True),
    ]


def test_a_leaving_server_ends_the_calls_above_its_last_one() -> None:
    made = connection()
    first, second, third = (begun(made) for _ in range(3))
    assert made.usable
    made.receive(frames.goaway(second, ErrorCode.NO_ERROR))
    assert not made.usable
    assert taken(made) == [
        Ended(third, Status(Code.UNAVAILABLE, "the server is closing"), processed=False)
    ]
    made.receive(trailers(first, (b"grpc-status", b"0")))
    made.lost("cut")
    assert taken(made) == [
        Ended(first, Status(Code.OK)),
        Ended(second, Status(Code.UNAVAILABLE, "cut")),
    ]
    assert made.open_calls == 0


def test_a_connection_is_left_before_its_stream_numbers_run_out() -> None:
    made = connection()
    made._next_stream = 2**31 - 103
    assert made.usable
    made.call(b"/s/m", b"", timeout_s=None)
    assert not made.usable


# -- header blocks and broken servers -------------------------------------------------------------


def test_a_header_block_may_come_in_parts() -> None:
    made = connection()
    stream = begun(made)
    block = hpack.encode([(b"grpc-status", b"0"), (b"grpc-message", b"m" * 40)])
    made.receive(frames.frame(frames.HEADERS, frames.END_STREAM, stream, block[:3]))
    made.receive(frames.frame(frames.CONTINUATION, 0, stream, block[3:9]))
    assert taken(made) == []
    made.receive(frames.frame(frames.CONTINUATION, frames.END_HEADERS, stream, block[9:]))
    assert taken(made) == [Ended(stream, Status(Code.OK, "m" * 40))]
    made.receive(frames.ping(b"12345678"))


_PART = b"x" * 16_384
_OPEN = frames.frame(frames.HEADERS, 0, 1, _PART)


@pytest.mark.parametrize(
    ("octets", "code", "what"),
    [
        (b"\0\x40\1" + bytes(6), ErrorCode.FRAME_SIZE_ERROR, "frame of 16385 octets"),
        (_OPEN + frames.ping(b"12345678"), ErrorCode.PROTOCOL_ERROR, "inside a header block"),
        (
            _OPEN + frames.frame(frames.CONTINUATION, 0, 3),
            ErrorCode.PROTOCOL_ERROR,
            "CONTINUATION without HEADERS",
        ),
        (
            frames.frame(frames.CONTINUATION, 0, 0),
            ErrorCode.PROTOCOL_ERROR,
            "CONTINUATION without HEADERS",
        ),
        (
            _OPEN
            + frames.frame(frames.CONTINUATION, 0, 1, _PART) * 15
            + frames.frame(frames.CONTINUATION, 0, 1, b"x"),
            ErrorCode.ENHANCE_YOUR_CALM,
            "header block above 256 KiB",
        ),
    ],
)
def test_a_server_that_breaks_the_protocol_loses_the_connection(
    octets: bytes, code: ErrorCode, what: str
) -> None:
    made = connection()
    begun(made)
    with pytest.raises(ConnectionFault, match=what) as caught:
        made.receive(octets)
    assert caught.value.code is code


def test_a_block_and_a_frame_of_the_largest_size_are_taken() -> None:
    made = connection()
    made.receive(_OPEN + frames.frame(frames.CONTINUATION, 0, 1, _PART) * 15)
    other = connection(max_message_bytes=20_000)
    stream = begun(other)
    other.receive(data(stream, add_prefix(b"y" * (16_384 - 5))))
    assert taken(other) == [Message(stream, b"y" * (16_384 - 5))]
