"""What waits for the server's window goes as far as the window does."""

from __future__ import annotations

import pytest

from runtime_proxy.http2 import frames
from runtime_proxy.http2.sending import Sending


@pytest.mark.parametrize("padded", [False, True])
def test_a_frame_larger_than_the_window_goes_in_parts(padded: bool) -> None:
    sending = Sending()
    sending.server_window = 50
    flags, payload = frames.END_STREAM, b"x" * 80
    if padded:
        flags, payload = flags | frames.PADDED, b"\x09" + payload + b"\0" * 9
    sending.enqueue_frame(1, frames.frame(frames.DATA, flags, 1, payload))
    assert sending.pump() == [frames.frame(frames.DATA, 0, 1, b"x" * 50)]
    assert (sending.server_window, sending.queued) == (0, 30)
    assert sending.pump() == []
    sending.server_window = 100
    assert sending.pump() == [frames.frame(frames.DATA, frames.END_STREAM, 1, b"x" * 30)]
    assert (sending.server_window, sending.queued) == (70, 0)


def test_a_frame_from_before_a_smaller_limit_goes_in_parts() -> None:
    sending = Sending()
    sending.enqueue_frame(1, frames.frame(frames.DATA, frames.END_STREAM, 1, b"x" * 20_000))
    assert sending.pump() == [
        frames.frame(frames.DATA, 0, 1, b"x" * 16_384),
        frames.frame(frames.DATA, frames.END_STREAM, 1, b"x" * 3_616),
    ]
