"""The multiplexer: how a trunk's bytes become streams, and messages become frames."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_plugin.mux import Demultiplexer, frame_message


def frame(connection: int, payload: bytes) -> bytes:
    return struct.pack(">II", connection, len(payload)) + payload


def frame_sizes(framed: bytes) -> list[int]:
    sizes = []
    while framed:
        _, length = struct.unpack_from(">II", framed)
        sizes.append(length)
        framed = framed[8 + length :]
    return sizes


@pytest.mark.parametrize(
    ("data_bytes", "expected_frames"),
    [
        (10, [20]),
        (4086, [4096]),
        (4087, [4096, 1]),
        (5000, [4096, 914]),
        (8182, [4096, 4096]),
        (8183, [4096, 4097]),
        (4194304, [4096, 4190218]),
    ],
)
def test_a_message_goes_out_in_the_frames_that_a_go_peer_can_read(
    data_bytes: int, expected_frames: list[int]
) -> None:
    message = bytes(10 + data_bytes)
    assert frame_sizes(frame_message(1, message)) == expected_frames


def test_a_frame_is_handed_out_with_its_connection() -> None:
    assert Demultiplexer().feed(frame(2, b"abc") + frame(1, b"de")) == [(2, b"abc"), (1, b"de")]


def test_zero_length_frames_mean_nothing() -> None:
    mux = Demultiplexer()
    assert mux.feed(frame(1, b"") + frame(1, b"x") + frame(7, b"")) == [(1, b"x")]
    assert not mux.within_frame


def test_an_announced_length_of_4_gib_gathers_nothing() -> None:
    mux = Demultiplexer()
    assert mux.feed(struct.pack(">II", 1, 0xFFFFFFFF) + b"first") == [(1, b"first")]
    assert mux.feed(b"second") == [(1, b"second")]
    assert mux.within_frame


@given(
    frames=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=12),
    data=st.data(),
)
def test_any_cut_of_the_trunk_gives_the_same_streams(
    frames: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    trunk = b"".join(frame(connection, payload) for connection, payload in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(trunk)), max_size=20)))
    expected: dict[int, bytes] = {}
    for connection, payload in frames:
        if payload:
            expected[connection] = expected.get(connection, b"") + payload

    mux, streams = Demultiplexer(), dict[int, bytes]()
    for start, stop in zip([0, *cuts], [*cuts, len(trunk)], strict=True):
        for connection, piece in mux.feed(trunk[start:stop]):
            assert piece
            streams[connection] = streams.get(connection, b"") + piece

    assert streams == expected
    assert not mux.within_frame


@given(message=st.binary(max_size=20_000), connection=st.integers(1, 2))
def test_what_is_framed_comes_out_again(message: bytes, connection: int) -> None:
    pieces = Demultiplexer().feed(frame_message(connection, message))
    assert b"".join(piece for _, piece in pieces) == message
    assert {at for at, _ in pieces} <= {connection}
