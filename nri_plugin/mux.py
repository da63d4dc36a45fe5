"""The multiplexer under NRI's ttRPC: one trunk, several byte streams. No I/O here.

A frame is an 8-byte header (connection id, payload length, both big-endian uint32) and the payload.
There is no handshake and no window; both sides just agree on the ids. Payloads of one id form a
byte stream, so this reader hands out pieces as they arrive and never gathers a frame: an announced
length of 4 GiB costs nothing until the bytes come, and the ttRPC layer bounds what is gathered.
Source: docs/facts/nri.md, "Multiplexer".
"""

from __future__ import annotations

import struct
from typing import Final

PLUGIN_SERVICE: Final = 1
"""Connection on which the plugin serves `nri.pkg.api.v1alpha1.Plugin`."""

RUNTIME_SERVICE: Final = 2
"""Connection on which the runtime serves `nri.pkg.api.v1alpha1.Runtime`."""

FIRST_FRAME_BYTES: Final = 4096
"""A Go peer reads a message's beginning through a buffer of this size. A longer first frame is lost
and ends the connection."""

_HEADER = struct.Struct(">II")
_unpack_header = _HEADER.unpack_from
_pack_header = _HEADER.pack
_HEADER_BYTES: Final = _HEADER.size


class Demultiplexer:
    """Trunk bytes in, (connection id, piece of that connection's stream) out.

    Pieces are never empty. Ids are not checked here: the reader of a piece drops the unknown ones.
    """

    __slots__ = ("_connection", "_left", "_partial_header")

    def __init__(self) -> None:
        self._partial_header = b""
        self._connection = 0
        self._left = 0  # payload bytes of the current frame that are still to come

    @property
    def within_frame(self) -> bool:
        """True when the trunk's end, now, would cut a frame."""
        return self._left > 0 or bool(self._partial_header)

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take what was read from the trunk; return the pieces in order."""
        pieces: list[tuple[int, bytes]] = []
        start = 0
        if self._left:
            start = min(self._left, len(data))
            if start:
                pieces.append((self._connection, data if start == len(data) else data[:start]))
            self._left -= start
        elif self._partial_header:
            data = self._partial_header + data
            self._partial_header = b""
        end = len(data)
        while end - start >= _HEADER_BYTES:
            connection, length = _unpack_header(data, start)
            start += _HEADER_BYTES
            stop = start + length
            if stop > end:
                if start < end:
                    pieces.append((connection, data[start:]))
                self._connection = connection
                self._left = stop - end
                return pieces
            if length:
                pieces.append((connection, data[start:stop]))
            start = stop
        if start < end:
            self._partial_header = data[start:]
        return pieces


def frame_message(connection: int, message: bytes) -> bytes:
    """Return the frames that carry one whole ttRPC message.

    At most 4096 bytes in the first frame and all the rest in one second frame: the only cut that a
    Go peer of any version can read (its queue holds 256 frames, its header buffer 4096 bytes). Two
    messages never share a frame.
    """
    total = len(message)
    if total <= FIRST_FRAME_BYTES:
        return _pack_header(connection, total) + message
    return b"".join(
        (
            _pack_header(connection, FIRST_FRAME_BYTES),
            message[:FIRST_FRAME_BYTES],
            _pack_header(connection, total - FIRST_FRAME_BYTES),
            message[FIRST_FRAME_BYTES:],
        )
    )
