"""The usual exchange: one call in one frame, and its reply in another, in few steps.

A runtime waits for the reply to each event, and nearly every event is one message in one frame that
arrives in one read. `mux` and `ttrpc` read any cut of the stream, by gathering; here the headers of
both are read and written together. What is not usual is left to them.
"""

from __future__ import annotations

import struct
from typing import Final

from nri_plugin import mux, ttrpc

_HEADERS = struct.Struct(">IIIIBB")
"""Of a frame (connection, length) and of a message (length, stream, type, flags)."""
_unpack = _HEADERS.unpack_from
_pack = _HEADERS.pack
_BOTH_BYTES: Final = _HEADERS.size
_MESSAGE_HEADER_BYTES: Final = _BOTH_BYTES - 8

_MOST_REPLY: Final = mux.FIRST_FRAME_BYTES - _MESSAGE_HEADER_BYTES - 3
"""Payloads up to this go into one frame, behind the message's header, a tag and a length."""


def request(data: bytes) -> tuple[int, bytes] | None:
    """Return (stream, envelope) if `data` is exactly one frame with exactly one unary request."""
    if len(data) < _BOTH_BYTES:
        return None
    connection, framed, length, stream, kind, flags = _unpack(data)
    if (
        connection == mux.PLUGIN_SERVICE
        and framed == len(data) - 8
        and length == framed - _MESSAGE_HEADER_BYTES
        and kind == ttrpc.REQUEST
        and not flags
    ):
        return stream, data[_BOTH_BYTES:]
    return None


def reply(stream: int, payload: bytes) -> bytes:
    """Return the frame or frames that answer `stream` with success. Raises RpcError as `ttrpc`."""
    length = len(payload)
    if length > _MOST_REPLY:
        return mux.frame_message(mux.PLUGIN_SERVICE, ttrpc.encode_response(stream, payload))
    if length == 0:
        envelope = b""
    elif length < 0x80:
        envelope = b"\x12%c%b" % (length, payload)
    else:
        envelope = b"\x12%c%c%b" % (length & 0x7F | 0x80, length >> 7, payload)
    length = len(envelope)
    return (
        _pack(mux.PLUGIN_SERVICE, length + _MESSAGE_HEADER_BYTES, length, stream, ttrpc.RESPONSE, 0)
        + envelope
    )
