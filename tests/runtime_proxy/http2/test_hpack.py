"""Our header decoding against the encoder of the hpack library."""

from __future__ import annotations

from contextlib import suppress

import hpack as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.http2 import hpack
from runtime_proxy.http2.frames import ConnectionFault

names = st.one_of(
    st.sampled_from([b":path", b":method", b"grpc-timeout", b"content-type", b"te"]),
    st.binary(min_size=1, max_size=60),
)
values = st.one_of(st.sampled_from([b"", b"POST", b"application/grpc"]), st.binary(max_size=300))
header_lists = st.lists(st.tuples(names, values), max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    blocks=st.lists(st.tuples(header_lists, st.booleans()), max_size=8),
    table_size=st.sampled_from([0, 100, 4096]),
)
def test_a_sequence_of_blocks_decodes_as_the_reference_encoded_it(
    blocks: list[tuple[list[tuple[bytes, bytes]], bool]], table_size: int
) -> None:
    encoder = reference.Encoder()
    encoder.header_table_size = table_size
    decoder = hpack.Decoder()
    for headers, huffman in blocks:
        assert decoder.decode(encoder.encode(headers, huffman=huffman)) == headers


@settings(max_examples=100, deadline=None)
@given(ours=header_lists, theirs=header_lists)
def test_our_literals_leave_another_senders_table_alone(
    ours: list[tuple[bytes, bytes]], theirs: list[tuple[bytes, bytes]]
) -> None:
    encoder, decoder = reference.Encoder(), reference.Decoder()

    def decoded(block: bytes) -> list[tuple[bytes, bytes]]:
        return [(bytes(n), bytes(v)) for n, v in decoder.decode(block, raw=True)]

    assert decoded(encoder.encode(theirs)) == theirs
    assert decoded(hpack.encode(ours)) == ours
    assert decoded(encoder.encode(theirs)) == theirs


@settings(max_examples=300, deadline=None)
@given(block=st.binary(max_size=100))
def test_any_block_decodes_or_is_a_fault(block: bytes) -> None:
    with suppress(ConnectionFault):
        hpack.Decoder().decode(block)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (b"\x80", "index 0"),
        (b"\x3f\xe1\xff\xff\x7f", "above the announced"),
        (b"\x82\x20", "after the first field"),
        (b"\x7f" + b"\xff" * 10, "integer"),
    ],
)
def test_what_is_wrong_with_a_block_is_named(block: bytes, reason: str) -> None:
    with pytest.raises(ConnectionFault, match=reason):
        hpack.Decoder().decode(block)


def test_a_small_block_cannot_unfold_into_a_huge_list() -> None:
    block = b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4000 + b"\xbe" * 3000
    with pytest.raises(ConnectionFault, match="4 MiB"):
        hpack.Decoder().decode(block)


@pytest.mark.parametrize(
    ("size_update", "kept"),
    [(b"\x3f\x03", True), (b"\x3f\x02", False), (b"\x20", False), (b"\x20\x3f\x03", False)],
    ids=["34 octets", "33 octets", "0", "0, then 34"],
)
def test_what_a_smaller_table_cannot_hold_is_gone(size_update: bytes, kept: bool) -> None:
    """An entry has the octets of its name and value, and 32 (RFC 7541, 4.1)."""
    decoder = hpack.Decoder()
    assert decoder.decode(b"\x40\x01a\x01b") == [(b"a", b"b")]
    if kept:
        assert decoder.decode(size_update + b"\xbe") == [(b"a", b"b")]
    else:
        with pytest.raises(ConnectionFault, match="index 62 is beyond the table"):
            decoder.decode(size_update + b"\xbe")


@pytest.mark.parametrize("size", [0, 126, 127, 128, 254, 255, 256, 16_510, 16_511, 2_097_278])
def test_a_length_is_written_in_as_many_octets_as_it_needs(size: int) -> None:
    """127 begins the second octet, 127 + 128 the third, and so on (RFC 7541, 5.1)."""
    headers = [(b"a", b"v" * size)]
    assert hpack.Decoder().decode(hpack.encode(headers)) == headers
    expected = reference.hpack.encode_integer(size, 7)
    assert hpack.encode(headers) == b"\x00\x01a" + expected + b"v" * size
