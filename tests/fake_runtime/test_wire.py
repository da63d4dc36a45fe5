"""The fake runtime reads as strictly as the Go implementation, so what passes here passes there."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nri_plugin.mux import frame_message
from nri_plugin.ttrpc import encode_response
from tests.fake_runtime.wire import GO_QUEUE, Broken, GoReader, response_message


def payloads(framed: bytes) -> list[bytes]:
    found = []
    while framed:
        _, length = struct.unpack_from(">II", framed)
        found.append(framed[8 : 8 + length])
        framed = framed[8 + length :]
    return found


def read(*frames: bytes) -> list[bytes]:
    """The bodies that a Go peer reads; Broken when it gives up."""

    async def scenario() -> list[bytes]:
        reader = GoReader()
        for frame in frames:
            reader.push(frame)
        reader.end()
        bodies: list[bytes] = []
        while True:
            try:
                _, _, _, body = await reader.message()
            except Broken as error:
                if str(error) == "ttrpc: closed":
                    return bodies
                raise
            bodies.append(body)

    return asyncio.run(scenario())


def test_one_frame_above_the_readers_buffer_is_lost() -> None:
    with pytest.raises(Broken, match="cannot allocate memory"):
        read(response_message(1, bytes(5000)))


def test_a_second_frame_longer_than_what_is_missing_is_lost() -> None:
    first = response_message(1, bytes(9000))
    joined = first + response_message(3, b"")
    with pytest.raises(Broken, match="cannot allocate memory"):
        read(joined[:4096], joined[4096:])


def test_more_frames_than_the_queue_holds_end_the_trunk() -> None:
    message = response_message(1, bytes((GO_QUEUE + 1) * 4096))
    cut = [message[at : at + 4096] for at in range(0, len(message), 4096)]
    with pytest.raises(Broken, match="failed to queue"):
        read(*cut)


def test_an_oversized_message_ends_the_reader() -> None:
    with pytest.raises(Broken, match="failed to discard"):
        read(*payloads(frame_message(1, response_message(1, bytes(5 << 20)))))


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(0, 20_000), min_size=1, max_size=6))
def test_our_frames_are_always_read(sizes: list[int]) -> None:
    frames = []
    for number, size in enumerate(sizes):
        message = encode_response(2 * number + 1, bytes(size))
        frames += payloads(frame_message(1, message))
    bodies = read(*frames)
    assert len(bodies) == len(sizes)


@pytest.mark.parametrize("body_bytes", [10, 4086, 4087, 8182, 8183, 1 << 20, 4194304])
def test_the_sizes_around_the_limits(body_bytes: int) -> None:
    message = struct.pack(">IIBB", body_bytes, 1, 2, 0) + bytes(body_bytes)
    (body,) = read(*payloads(frame_message(1, message)))
    assert len(body) == body_bytes
