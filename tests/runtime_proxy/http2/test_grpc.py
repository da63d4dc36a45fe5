"""Messages and statuses on the wire: what is ours fits, what is compressed is read or refused."""

from __future__ import annotations

import gzip
import zlib

import pytest

from runtime_proxy.http2 import frames
from runtime_proxy.http2.grpc import (
    MessageError,
    Status,
    add_prefix,
    decode_message,
    encode_message,
    format_timeout,
    parse_answer,
    parse_timeout,
    parse_unary_body,
    status_headers,
)
from runtime_proxy.http2.hpack import encode


def compressed(message: bytes) -> bytes:
    return b"\1" + len(message).to_bytes(4, "big") + message


@pytest.mark.parametrize("text", ["x" * 100_000, "ß" * 100_000, "%" * 5_000, "\ud800" * 5_000])
def test_a_hook_servers_stack_trace_fits_into_one_frame(text: str) -> None:
    block = encode(status_headers(Status(2, text), trailers=False))
    assert len(block) < frames.DEFAULT_MAX_FRAME_SIZE
    assert decode_message(encode_message(text)).endswith(" [...]")


def test_a_short_text_is_kept_whole() -> None:
    assert decode_message(encode_message("100 % Gefäß\n")) == "100 % Gefäß\n"


@pytest.mark.parametrize(
    "body",
    [
        add_prefix(b"an id"),
        compressed(gzip.compress(b"an id")),
        compressed(zlib.compress(b"an id")),
    ],
    ids=["plain", "gzip", "deflate"],
)
def test_an_answer_is_read_however_it_is_compressed(body: bytes) -> None:
    assert parse_answer(body, max_bytes=100) == b"an id"


def test_what_stands_behind_a_compressed_message_is_not_passed_over() -> None:
    body = compressed(gzip.compress(b"first") + gzip.compress(b"second"))
    with pytest.raises(MessageError):
        parse_unary_body(body, encoding=b"gzip", max_bytes=100)


@pytest.mark.parametrize(
    ("seconds", "header"),
    [
        (0.0, b"1u"),
        (1e-9, b"1u"),
        (0.0015, b"1500u"),
        (99.999999, b"99999999u"),
        (100.0, b"100000m"),
        (100.0001, b"100001m"),
        (99_999.999, b"99999999m"),
        (1e9, b"99999999m"),
    ],
)
def test_a_time_limit_has_at_most_eight_digits_and_is_never_none(
    seconds: float, header: bytes
) -> None:
    assert format_timeout(seconds) == header


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (b"2H", 7200.0),
        (b"2M", 120.0),
        (b"0S", 0.0),
        (b"99999999S", 99_999_999.0),
        (b"1500m", 1.5),
        (b"1500u", 0.0015),
        (b"1500n", 0.0000015),
        *((bad, None) for bad in (None, b"", b"S", b"5", b"5x", b"-5S", b"1.5S", b"123456789S")),
    ],
)
def test_a_time_limit_is_read_in_every_unit(header: bytes | None, seconds: float | None) -> None:
    found = parse_timeout(header)
    assert found == (seconds if seconds is None else pytest.approx(seconds))


def test_a_status_is_trailers_or_a_whole_answer() -> None:
    fields = [(b"grpc-status", b"8"), (b"grpc-message", b"50%25")]
    assert status_headers(Status(8, "50%"), trailers=True) == fields
    assert status_headers(Status(8, "50%"), trailers=False) == [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        *fields,
    ]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(5, "no such pod"), "NOT_FOUND: no such pod"),
        (Status(14), "UNAVAILABLE"),
        (Status(99, "odd"), "99: odd"),
    ],
)
def test_a_status_is_shown_by_its_name(status: Status, text: str) -> None:
    assert str(status) == text


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"\0\0\0\0", "body of 4 octets holds no message"),
        (add_prefix(b"abc")[:-1], "message of 3 octets in a body of 7"),
        (add_prefix(b"abc") + b"d", "message of 3 octets in a body of 9"),
    ],
)
def test_a_body_is_exactly_one_message(body: bytes, complaint: str) -> None:
    with pytest.raises(MessageError, match=complaint):
        parse_unary_body(body, encoding=b"identity", max_bytes=100)


@pytest.mark.parametrize(
    ("body", "encoding", "complaint"),
    [
        (compressed(b"x"), b"snappy", "message coded as b'snappy', flag 1"),
        (b"\2" + compressed(b"x")[1:], b"gzip", "message coded as b'gzip', flag 2"),
        (compressed(b"nonsense"), b"gzip", "broken b'gzip' message"),
        (compressed(gzip.compress(b"x" * 101)), b"gzip", "cut short or above 100 octets"),
        (compressed(gzip.compress(b"abc")[:-9]), b"gzip", "cut short or above 100 octets"),
    ],
)
def test_a_compressed_message_is_bounded_and_whole(
    body: bytes, encoding: bytes, complaint: str
) -> None:
    with pytest.raises(MessageError, match=complaint):
        parse_unary_body(body, encoding=encoding, max_bytes=100)
    largest = compressed(gzip.compress(b"x" * 100))
    assert parse_unary_body(largest, encoding=b"gzip", max_bytes=100) == b"x" * 100
