"""A client of an absent runtime, frame by frame: each call is refused once."""

from __future__ import annotations

import h2.errors
import pytest
from hyperframe import frame as hyper

from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.frames import ConnectionFault, ErrorCode
from runtime_proxy.http2.grpc import Status, status_headers
from runtime_proxy.http2.refusal import Refusal

_AWAY = Status.unavailable("away")
_BLOCK = hpack.encode(status_headers(_AWAY, trailers=False))
_END_BOTH = frames.END_STREAM | frames.END_HEADERS
_PART = b"x" * 16_384


def refused(stream: int) -> bytes:
    return frames.frame(frames.HEADERS, _END_BOTH, stream, _BLOCK)


def begun() -> Refusal:
    refusal = Refusal(_AWAY)
    refusal.receive(frames.PREFACE)
    assert refusal.output == [frames.settings({})]
    refusal.output.clear()
    return refusal


def headers(stream: int, flags: int = _END_BOTH, block: bytes = b"never decoded") -> bytes:
    return frames.frame(frames.HEADERS, flags, stream, block)


def continuation(stream: int, block: bytes = b"", flags: int = 0) -> bytes:
    return frames.frame(frames.CONTINUATION, flags, stream, block)


def test_each_call_is_refused_once_and_counted() -> None:
    refusal = begun()
    refusal.receive(headers(1) + headers(3, frames.END_HEADERS))
    refusal.receive(frames.frame(frames.DATA, frames.END_STREAM, 3, b"12345"))
    assert refusal.output == [
        refused(1),
        refused(3),
        # The client may stop sending, and gets its window back until it does.
        frames.rst_stream(3, ErrorCode.NO_ERROR),
        frames.window_update(0, 5),
    ]
    refusal.output.clear()
    # Trailers of a call that is over, an empty frame, and frames that need no answer.
    refusal.receive(headers(3) + frames.frame(frames.DATA, frames.END_STREAM, 3))
    refusal.receive(frames.SETTINGS_ACK + frames.ping_ack(b"12345678"))
    refusal.receive(frames.window_update(0, 1) + frames.rst_stream(3, ErrorCode.CANCEL))
    assert refusal.output == []
    assert (refusal.refused, refusal.last_stream) == (2, 3)


def test_a_client_may_write_in_any_pieces() -> None:
    whole = frames.PREFACE + frames.settings({}) + headers(1) + frames.ping(b"12345678")
    refusal = Refusal(_AWAY)
    for at in range(len(whole)):
        refusal.receive(whole[at : at + 1])
    expected = [frames.settings({}), frames.SETTINGS_ACK, refused(1), frames.ping_ack(b"12345678")]
    assert refusal.output == expected
    at_once = Refusal(_AWAY)
    at_once.receive(whole)
    assert at_once.output == expected


def test_a_client_that_is_sent_away_learns_once_the_last_call_that_is_served() -> None:
    refusal = begun()
    refusal.receive(headers(5))
    refusal.output.clear()
    refusal.leave()
    refusal.leave()
    # It may try this one elsewhere: nothing was answered.
    refusal.receive(headers(7))
    assert refusal.output == [frames.goaway(5, ErrorCode.NO_ERROR, "runtime is up")]
    assert refusal.refused == 1
    untouched = begun()
    untouched.leave()
    assert untouched.output == [frames.goaway(0, ErrorCode.NO_ERROR, "runtime is up")]


def test_a_header_table_that_the_client_does_not_allow_is_given_up_first() -> None:
    refusal = begun()
    refusal.receive(frames.settings({frames.SETTING_HEADER_TABLE_SIZE: 0}) + headers(1))
    acknowledged, answer = refusal.output
    assert acknowledged == frames.SETTINGS_ACK
    assert answer == frames.frame(frames.HEADERS, _END_BOTH, 1, b"\x20" + _BLOCK)


def test_a_header_block_of_256_kib_is_skipped_in_parts() -> None:
    refusal = begun()
    refusal.receive(headers(1, frames.END_STREAM, _PART))
    parts = 14
    refusal.receive(continuation(1, _PART) * parts)
    left = 256 * 1024 - 16_384 - parts * (16_384 + 9) - 9
    assert refusal.output == []
    refusal.receive(continuation(1, b"x" * left, frames.END_HEADERS))
    assert refusal.output == [refused(1)], "its first frame has ended the stream"
    refusal.receive(headers(3, 0, _PART) + continuation(3, _PART) * parts)
    with pytest.raises(ConnectionFault, match="header block above 256 KiB") as caught:
        refusal.receive(continuation(3, b"x" * (left + 1), frames.END_HEADERS))
    assert caught.value.code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    ("octets", "code", "what"),
    [
        (b"\0\x40\1" + bytes(6), ErrorCode.FRAME_SIZE_ERROR, "frame of 16385 octets"),
        (
            headers(1, 0) + frames.ping(b"12345678"),
            ErrorCode.PROTOCOL_ERROR,
            "frame inside a header block",
        ),
        (continuation(0), ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS"),
        (headers(1, 0) + continuation(3), ErrorCode.PROTOCOL_ERROR, "CONTINUATION without"),
        (headers(1) + continuation(1), ErrorCode.PROTOCOL_ERROR, "CONTINUATION without"),
    ],
)
def test_a_client_that_breaks_the_protocol_gets_the_reason(
    octets: bytes, code: ErrorCode, what: str
) -> None:
    refusal = begun()
    refusal.receive(frames.frame(frames.DATA, 0, 1, _PART))
    with pytest.raises(ConnectionFault, match=what) as caught:
        refusal.receive(octets)
    assert caught.value.code is code


@pytest.mark.parametrize("octets", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSMx", b"x"])
def test_what_is_not_http_2_is_refused_at_its_first_octet(octets: bytes) -> None:
    with pytest.raises(ConnectionFault, match="no HTTP/2 connection preface") as caught:
        Refusal(_AWAY).receive(octets)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


def test_numbers_are_those_of_the_standard() -> None:
    """RFC 9113, sections 6 and 7, as other implementations have them."""
    for code in ErrorCode:
        assert code.value == h2.errors.ErrorCodes[code.name].value
    for kind in ("DATA", "HEADERS", "RST_STREAM", "SETTINGS", "PING", "GOAWAY", "CONTINUATION"):
        name = {"RST_STREAM": "RstStream", "GOAWAY": "GoAway"}.get(kind, kind.capitalize())
        assert getattr(frames, kind) == getattr(hyper, f"{name}Frame").type
    assert hyper.WindowUpdateFrame.type == frames.WINDOW_UPDATE
    for setting in ("HEADER_TABLE_SIZE", "INITIAL_WINDOW_SIZE", "MAX_FRAME_SIZE"):
        assert getattr(frames, f"SETTING_{setting}") == getattr(hyper.SettingsFrame, setting)
    limit = hyper.SettingsFrame.MAX_CONCURRENT_STREAMS
    assert limit == frames.SETTING_MAX_CONCURRENT_STREAMS
    bits = {flag.name: flag.bit for kind in hyper.FRAMES.values() for flag in kind.defined_flags}
    for name in ("END_STREAM", "END_HEADERS", "PADDED", "ACK"):
        assert getattr(frames, name) == bits[name]
    assert bits["PRIORITY"] == frames.PRIORITISED
