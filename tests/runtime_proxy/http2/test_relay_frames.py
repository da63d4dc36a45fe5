"""The relay frame by frame: what it sends on, what it says itself, and whom it ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.frames import ConnectionFault, ErrorCode
from runtime_proxy.http2.grpc import Status, status_headers
from runtime_proxy.http2.held import Abandoned
from runtime_proxy.http2.relay import Relay
from tests.runtime_proxy.http2.h2_ends import HELD, PLAIN, message


def _settled_relay() -> Relay:
    relay = _relay()
    relay.from_server(frames.settings({}) + frames.SETTINGS_ACK)
    relay.to_client.clear()
    return relay


def test_a_ping_of_the_servers_is_answered_without_waking_the_client() -> None:
    relay = _settled_relay()
    relay.from_server(frames.ping(b"12345678"))
    assert relay.to_client == []
    assert relay.to_server == [frames.ping_ack(b"12345678")]


def test_a_ping_of_the_clients_asks_the_server_and_its_answer_comes_back() -> None:
    relay = _settled_relay()
    relay.from_client(frames.ping(b"12345678"))
    assert relay.to_server == [frames.ping(b"12345678")]
    relay.from_server(frames.ping_ack(b"12345678"))
    assert relay.to_client == [frames.ping_ack(b"12345678")]


def test_a_leaving_servers_ping_asks_the_client_whether_it_knows() -> None:
    relay = _settled_relay()
    leaving = frames.goaway(frames.LARGEST_WINDOW, ErrorCode.NO_ERROR) + frames.ping(b"goodbye!")
    relay.from_server(leaving)
    assert b"".join(relay.to_client) == leaving
    assert relay.to_server == []


def test_small_grants_wait_until_they_are_worth_waking_the_client() -> None:
    relay = _settled_relay()
    relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * 1_000))
    relay.from_server(frames.window_update(0, 1_000))
    assert relay.to_client == []
    for _ in range(4):
        relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * 4_000))
        relay.from_server(frames.window_update(0, 4_000))
    assert relay.to_client == [frames.window_update(0, 17_000)]


def test_a_client_without_window_gets_the_smallest_grant_at_once() -> None:
    relay = _settled_relay()
    for size in (16_384, 16_384, 16_384, 16_383):
        relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * size))
    relay.from_server(frames.window_update(0, 1))
    assert relay.to_client == [frames.window_update(0, 1)]


def test_what_was_owed_is_granted_when_the_client_spends_the_rest() -> None:
    relay = _settled_relay()
    relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * 10_000))
    relay.from_server(frames.window_update(0, 10_000))
    assert relay.to_client == []
    for size in (16_384, 16_384):
        relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * size))
    assert relay.to_client == [frames.window_update(0, 10_000)]


def _relay() -> Relay:
    relay = Relay(intercepted=[HELD], max_message_bytes=1 << 20, clock=lambda: 0.0)
    relay.from_client(_preface())
    relay.to_server.clear()
    return relay


def _opened(stream: int, path: bytes = HELD) -> bytes:
    block = hpack.encode([(b":method", b"POST"), (b":path", path)])
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)


def _data(stream: int, body: bytes, flags: int = 0) -> bytes:
    return frames.data_frames(stream, body, max_frame_size=16_384, end=bool(flags))


def _answer(stream: int, flags: int = 0, block: bytes = b"\x88") -> bytes:
    return frames.frame(frames.HEADERS, frames.END_HEADERS | flags, stream, block)


def test_a_client_hears_the_servers_settings_before_anything_of_ours() -> None:
    relay = _relay()
    relay.from_client(_opened(1) + _data(1, message(200_000)[:16_384]))
    relay.drain()
    assert relay.to_client == []
    relay.from_server(frames.settings({}))
    heard = b"".join(relay.to_client)
    assert heard.startswith(frames.settings({}))
    assert frames.window_update(1, 200_005 - 65_535) in heard
    assert frames.goaway(1, ErrorCode.NO_ERROR, "draining") in heard


def test_what_comes_of_a_request_behind_its_answer_goes_nowhere() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(40_000)[:16_384]))
    relay.to_server.clear()
    relay.from_server(_answer(1, frames.END_STREAM))
    assert relay.to_server == [frames.rst_stream(1, ErrorCode.CANCEL)]
    assert relay.to_client[0] == _answer(1, frames.END_STREAM)
    assert frames.rst_stream(1, ErrorCode.NO_ERROR) in relay.to_client[1:]
    assert relay.events == [Abandoned(1)]
    relay.to_server.clear()
    relay.from_client(_data(1, message(40_000)[16_384:], frames.END_STREAM) + _opened(3, PLAIN))
    assert relay.to_server == [_opened(3, PLAIN)]


def test_data_that_waits_for_a_server_that_has_answered_is_let_go() -> None:
    relay = _settled_relay()
    grown = message(100_000)
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM) + _opened(3, PLAIN))
    relay.release(1, grown)
    relay.from_client(_data(3, b"x" * 9_000))
    relay.to_server.clear()
    relay.from_server(_answer(3, frames.END_STREAM))
    assert relay.to_server == [frames.rst_stream(3, ErrorCode.CANCEL)]
    relay.from_server(frames.window_update(0, 1 << 20) + frames.window_update(1, 1 << 20))
    assert b"".join(relay.to_server[1:]) == _data(1, grown[65_535:], frames.END_STREAM)


@pytest.mark.parametrize("ended", [False, True])
def test_a_client_that_still_sends_is_asked_to_stop_when_its_call_has_ended(ended: bool) -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM) + _opened(3, PLAIN))
    relay.release(1, message(100_000))
    relay.from_client(_data(3, b"x" * 9_000, frames.END_STREAM if ended else 0))
    relay.to_client.clear()
    relay.from_server(_answer(3, frames.END_STREAM))
    stop = frames.rst_stream(3, ErrorCode.NO_ERROR)
    assert (stop in relay.to_client) is not ended
    if not ended:
        relay.to_server.clear()
        relay.from_client(_data(3, b"x" * 9_000, frames.END_STREAM))
        assert relay.to_server == []


def test_a_call_that_ends_early_costs_none_of_many_that_are_held() -> None:
    relay = _settled_relay()
    held = range(1, 201, 2)
    for stream in held:
        relay.from_client(_opened(stream) + _data(stream, message(10), frames.END_STREAM))
    relay.from_client(_opened(201) + _data(201, message(40_000)[:16_384]))
    relay.from_server(_answer(201, frames.END_STREAM))
    for stream in held:
        relay.to_server.clear()
        relay.release(stream)
        assert relay.to_server == [_data(stream, message(10), frames.END_STREAM)]


def test_an_end_that_comes_behind_an_answer_does_not_wait_for_window() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM) + _opened(3, PLAIN))
    relay.release(1, message(100_000))
    relay.from_server(_answer(3, frames.END_STREAM))
    relay.to_server.clear()
    relay.from_client(_data(3, b"x" * 9_000, frames.END_STREAM))
    assert relay.to_server == [frames.rst_stream(3, ErrorCode.CANCEL)]


def test_an_answer_that_has_begun_wins_against_a_refusal() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM))
    relay.from_server(_answer(1))
    relay.reject(1, Status(2, "hook server err: no"))
    relay.from_server(_answer(1, frames.END_STREAM) + frames.SETTINGS_ACK)
    assert b"".join(relay.to_client) == _answer(1) + _answer(1, frames.END_STREAM)
    assert relay.events[1:] == [Abandoned(1)]


@pytest.mark.parametrize(
    ("allowed", "servers_own", "said"),
    [
        ([16_384, 5_000], [16_384], hpack.table_size_update(5_000)),
        ([300], [], hpack.table_size_update(300)),
        # The server keeps less than the client allows: saying more would undo that.
        ([16_384, 300], [0], b""),
        ([300, 4096], [], hpack.table_size_update(300)),
    ],
)
def test_a_refusal_begins_with_the_table_that_the_client_has_come_to_allow(
    allowed: list[int], servers_own: list[int], said: bytes
) -> None:
    relay = _settled_relay()
    relay.from_client(frames.settings({frames.SETTING_HEADER_TABLE_SIZE: allowed[0]}))
    relay.from_server(frames.SETTINGS_ACK)
    if servers_own:
        relay.from_client(_opened(1, PLAIN))
        sizes = b"".join(map(hpack.table_size_update, servers_own))
        relay.from_server(_answer(1, frames.END_STREAM, sizes + b"\x88"))
    for size in allowed[1:]:
        relay.from_client(frames.settings({frames.SETTING_HEADER_TABLE_SIZE: size}))
        relay.from_server(frames.SETTINGS_ACK)
    relay.from_client(_opened(3) + _data(3, message(10), frames.END_STREAM))
    relay.reject(3, Status(2, "no"))
    relay.to_client.clear()
    relay.from_server(frames.SETTINGS_ACK)
    block = said + hpack.encode(status_headers(Status(2, "no"), trailers=False))
    assert relay.to_client == [_answer(3, frames.END_STREAM, block)]


def test_streams_that_a_leaving_server_never_looks_at_are_over() -> None:
    relay = _settled_relay()
    held = _data(3, message(10), frames.END_STREAM)
    relay.from_client(_opened(1, PLAIN) + _opened(3) + held)
    relay.from_server(frames.goaway(1, ErrorCode.NO_ERROR))
    relay.from_client(_opened(5) + _data(5, message(10)))
    assert list(relay.active) == [1]
    assert relay.events[1:] == [Abandoned(3)]


def test_half_a_held_message_leaves_the_window_to_the_streams_beside_it() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _opened(3, PLAIN) + _data(1, message(40_000)[:30_000]))
    relay.to_client.clear()
    relay.from_client(_data(3, b"x" * 32_768) + _data(3, b"x" * 2_767))
    assert relay.to_client == [frames.window_update(0, 30_000)]


def test_padding_that_is_left_out_is_given_back_to_its_stream() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM) + _opened(3, PLAIN))
    relay.release(1, message(100_000))
    padded = bytes((200,)) + b"x" * 9_000 + bytes(200)
    relay.from_client(frames.frame(frames.DATA, frames.PADDED, 3, padded))
    relay.to_client.clear()
    relay.from_server(frames.window_update(0, 40_000) + frames.window_update(1, 100_000))
    assert frames.window_update(3, 201) in relay.to_client


def test_an_error_text_of_many_frames_passes() -> None:
    relay = _relay()
    block = (
        frames.frame(frames.HEADERS, frames.END_STREAM, 1, b"x" * 16_384)
        + frames.frame(frames.CONTINUATION, 0, 1, b"x" * 16_384) * 60
        + frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"x")
    )
    for at in range(0, len(block), 100_000):
        relay.from_server(block[at : at + 100_000])
    assert b"".join(relay.to_client) == block


def test_frames_sent_before_a_smaller_limit_was_seen_pass() -> None:
    relay = _relay()
    relay.from_server(frames.settings({frames.SETTING_MAX_FRAME_SIZE: 40_000}))
    relay.from_server(frames.settings({frames.SETTING_MAX_FRAME_SIZE: 16_384}))
    relay.from_client(frames.settings({frames.SETTING_MAX_FRAME_SIZE: 40_000}))
    relay.from_client(frames.settings({frames.SETTING_MAX_FRAME_SIZE: 16_384}))
    large = frames.frame(frames.DATA, 0, 1, b"x" * 30_000)
    relay.from_client(large)
    relay.from_server(large)
    assert relay.to_server[-1].endswith(large)
    assert relay.to_client[-1].endswith(large)


def test_half_messages_cannot_fill_the_memory() -> None:
    largest = 1 << 16
    relay = Relay(intercepted=[HELD], max_message_bytes=largest, clock=lambda: 0.0)
    relay.from_client(_preface())
    relay.from_server(frames.settings({}))
    block = hpack.encode([(b":method", b"POST"), (b":path", HELD)])

    def half(stream: int) -> None:
        relay.from_client(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block))
        body = b"\0" + largest.to_bytes(4, "big") + b"x" * 48_000
        for at in range(0, len(body), 16_000):
            relay.from_client(frames.frame(frames.DATA, 0, stream, body[at : at + 16_000]))

    for stream in range(1, 400, 2):
        relay.to_server.clear()
        half(stream)
        if len(relay.to_server) > 1:
            break
    assert stream == 11
    assert frames.rst_stream(stream, ErrorCode.CANCEL) in relay.to_server
    relay.from_server(frames.SETTINGS_ACK * 2)
    assert b"octets of requests wait" in b"".join(relay.to_client)
    for ended in (1, 3):
        relay.from_client(frames.rst_stream(ended, ErrorCode.CANCEL))
    relay.to_server.clear()
    half(13)
    assert relay.to_server == [frames.frame(frames.HEADERS, frames.END_HEADERS, 13, block)]


def test_a_released_message_keeps_to_settings_that_the_client_has_acknowledged() -> None:
    relay = _relay()
    relay.from_server(frames.settings({frames.SETTING_INITIAL_WINDOW_SIZE: 100}))
    relay.from_client(frames.SETTINGS_ACK)
    block = hpack.encode([(b":method", b"POST"), (b":path", HELD)])
    body = message(300)
    relay.from_client(
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
        + frames.frame(frames.DATA, frames.END_STREAM, 1, body)
    )
    relay.from_server(frames.settings({frames.SETTING_INITIAL_WINDOW_SIZE: 1000}))
    relay.to_server.clear()
    relay.release(1)
    assert relay.to_server == [frames.frame(frames.DATA, 0, 1, body[:100])]
    relay.to_server.clear()
    relay.from_client(frames.SETTINGS_ACK)
    assert relay.to_server == [
        frames.SETTINGS_ACK,
        frames.frame(frames.DATA, frames.END_STREAM, 1, body[100:]),
    ]


def _preface() -> bytes:
    return frames.PREFACE + frames.settings({})


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
        (_preface() + frames.frame(frames.DATA, 0, 1, b"x" * 16_385), ErrorCode.FRAME_SIZE_ERROR),
        (_preface() + frames.frame(frames.CONTINUATION, 4, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (
            _preface()
            + frames.frame(frames.HEADERS, 0, 1, b"\x82")
            + frames.frame(frames.DATA, 0, 1, b""),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (_preface() + frames.frame(frames.HEADERS, 4, 2, b"\x82"), ErrorCode.PROTOCOL_ERROR),
        (_preface() + frames.frame(frames.HEADERS, 4, 1, b"\xff\x00"), ErrorCode.COMPRESSION_ERROR),
        (_preface() + frames.frame(frames.HEADERS, 4, 1, b"\x40\x7f"), ErrorCode.COMPRESSION_ERROR),
        (
            _preface() + frames.frame(frames.HEADERS, 4 | 8, 1, b"\xff\x82"),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (_preface() + frames.settings({5: 1}), ErrorCode.PROTOCOL_ERROR),
        (_preface() + frames.frame(frames.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
        (
            _preface() + b"".join(frames.frame(frames.DATA, 0, 1, b"x" * 16_384) for _ in range(5)),
            ErrorCode.FLOW_CONTROL_ERROR,
        ),
        (
            _preface()
            + frames.frame(frames.HEADERS, 0, 1, b"")
            + b"".join(frames.frame(frames.CONTINUATION, 0, 1, b"\0" * 16_384) for _ in range(17)),
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
        (
            _preface()
            + frames.frame(frames.HEADERS, 0, 1, b"")
            + frames.frame(frames.CONTINUATION, 0, 1) * 100,
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
        (
            _preface()
            + frames.frame(frames.HEADERS, 0, 1, b"")
            + frames.frame(frames.CONTINUATION, 0, 1, b"x" * 16_385),
            ErrorCode.FRAME_SIZE_ERROR,
        ),
    ],
    ids=[
        "http/1.1",
        "frame too big",
        "continuation alone",
        "frame in a header block",
        "even stream",
        "index beyond the table",
        "block cut short",
        "padding too long",
        "frame size setting",
        "settings cut short",
        "more data than the window",
        "endless header block",
        "header block of empty frames",
        "continuation too big",
    ],
)
def test_a_client_that_breaks_the_protocol_gets_the_reason(octets: bytes, code: ErrorCode) -> None:
    relay = Relay(intercepted=[HELD], max_message_bytes=1 << 20, clock=lambda: 0.0)
    with pytest.raises(ConnectionFault) as fault:
        relay.from_client(octets)
    assert fault.value.code is code
    assert relay.fault_goodbye(fault.value)[3] == frames.GOAWAY


@settings(max_examples=200, deadline=None)
@given(garbage=st.binary(max_size=400), cut=st.integers(0, 400))
def test_no_octets_of_a_client_do_more_than_end_its_connection(garbage: bytes, cut: int) -> None:
    relay = Relay(intercepted=[HELD], max_message_bytes=1 << 20, clock=lambda: 0.0)
    try:
        relay.from_client(_preface() + garbage[:cut])
        relay.from_client(garbage[cut:])
        relay.from_server(garbage)
    except ConnectionFault:
        pass


@pytest.mark.parametrize(
    ("identifier", "value", "allowed"),
    [
        (frames.SETTING_INITIAL_WINDOW_SIZE, 0, True),
        (frames.SETTING_INITIAL_WINDOW_SIZE, frames.LARGEST_WINDOW, True),
        (frames.SETTING_INITIAL_WINDOW_SIZE, frames.LARGEST_WINDOW + 1, False),
        (frames.SETTING_MAX_FRAME_SIZE, 2**14, True),
        (frames.SETTING_MAX_FRAME_SIZE, 2**14 - 1, False),
        (frames.SETTING_MAX_FRAME_SIZE, 2**24 - 1, True),
        (frames.SETTING_MAX_FRAME_SIZE, 2**24, False),
        (frames.SETTING_MAX_CONCURRENT_STREAMS, 2**32 - 1, True),
    ],
)
def test_a_setting_is_taken_within_its_range(identifier: int, value: int, allowed: bool) -> None:
    """RFC 9113, section 6.5.2."""
    payload = identifier.to_bytes(2, "big") + value.to_bytes(4, "big")
    if allowed:
        assert frames.parse_settings(payload) == [(identifier, value)]
    else:
        with pytest.raises(frames.ConnectionFault):
            frames.parse_settings(payload)


def test_the_reserved_bit_of_a_stream_number_is_ignored_inside_a_header_block() -> None:
    """RFC 9113, section 4.1: receivers ignore it."""

    def frame(kind: int, flags: int, stream: int) -> bytes:
        return frames.FRAME_HEADER.pack(0, 1, kind, flags, stream) + b"x"

    block = frame(frames.HEADERS, 0, 7) + frame(
        frames.CONTINUATION, frames.END_HEADERS, 7 | 1 << 31
    )
    assert frames.header_block_end(block, 0, 16384, 65536) == len(block)
    other = frame(frames.HEADERS, 0, 7) + frame(frames.CONTINUATION, frames.END_HEADERS, 9)
    with pytest.raises(ConnectionFault, match="inside a header block"):
        frames.header_block_end(other, 0, 16384, 65536)


def test_a_new_initial_window_counts_for_requests_that_are_held_already() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1))
    relay.from_server(frames.settings({frames.SETTING_INITIAL_WINDOW_SIZE: 100_000}))
    relay.from_client(_data(1, message(200_000)[:16_384]))
    assert relay.to_client[-1] == frames.window_update(1, 200_005 - 100_000)
    relay.from_client(_opened(3) + _data(3, message(200_000)[:16_384]))
    assert relay.to_client[-1] == frames.window_update(3, 200_005 - 100_000)


def test_the_servers_reset_ends_a_held_call_and_reaches_its_client() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(40_000)[:16_384]))
    relay.to_server.clear()
    relay.to_client.clear()
    reset = frames.rst_stream(1, ErrorCode.CANCEL)
    relay.from_server(reset)
    # What was held is not a debt of the server's any more: the client gets its window back.
    assert relay.to_client == [reset, frames.window_update(0, 16_384)]
    assert (relay.events, relay.to_server, dict(relay.active)) == ([Abandoned(1)], [], {})
    assert relay._sending.queued == 0
    assert relay._calls.held_octets == 0


def test_the_servers_echo_of_a_reset_does_not_end_a_call_before_its_refusal() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM))
    relay.reject(1, Status.unavailable("no"))
    relay.from_server(frames.rst_stream(1, ErrorCode.CANCEL))
    assert relay.to_client == []
    relay.from_server(frames.SETTINGS_ACK)
    (answer,) = relay.to_client
    assert answer[9:].endswith(
        hpack.encode(status_headers(Status.unavailable("no"), trailers=False))
    )
    assert relay.events[-1] == Abandoned(1)
