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
    parse_answer,
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
