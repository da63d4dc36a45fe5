"""Frames of HTTP/2: their constants, and functions that write the frames of our own.

Reading frames is a loop over one buffer in the connection state machines, because that loop is
the hot path of the proxy; what both directions share stands here (RFC 9113, sections 4 and 6).
"""

import enum
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA = 0x0
HEADERS = 0x1
PRIORITY = 0x2
RST_STREAM = 0x3
SETTINGS = 0x4
PUSH_PROMISE = 0x5
PING = 0x6
GOAWAY = 0x7
WINDOW_UPDATE = 0x8
CONTINUATION = 0x9

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITISED = 0x20

SETTING_HEADER_TABLE_SIZE = 0x1
SETTING_MAX_CONCURRENT_STREAMS = 0x3
SETTING_INITIAL_WINDOW_SIZE = 0x4
SETTING_MAX_FRAME_SIZE = 0x5

HEADER_SIZE = 9
DEFAULT_WINDOW = 65_535
DEFAULT_MAX_FRAME_SIZE = 16_384
LARGEST_MAX_FRAME_SIZE = 16_777_215
LARGEST_WINDOW = 2**31 - 1
STREAM_MASK = 0x7FFF_FFFF
# A client's header block that we keep until its last CONTINUATION; kubelet sends 300 octets.
MAX_CLIENT_BLOCK = 256 * 1024
# The runtime's: an error's text travels in a header, and gRPC clients take 16 MiB of them.
MAX_SERVER_BLOCK = 16 * 1024 * 1024
# Frames of one block beside what its size needs: each costs a look for every part that arrives.
# Chosen: clients fill their frames, so that one or two are enough. Twice the value: as many looks.
_SPARE_FRAMES = 16

# Length as two parts (high 16 bits, low 8 bits), type, flags, stream with its reserved bit.
FRAME_HEADER = struct.Struct(">HBBBI")
_UINT32 = struct.Struct(">I")
_SETTING = struct.Struct(">HI")


class ErrorCode(enum.IntEnum):
    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class ConnectionFault(Exception):
    """The peer broke the protocol in a way that ends the connection."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    length = len(payload)
    return FRAME_HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(k, v) for k, v in values.items()))


SETTINGS_ACK = frame(SETTINGS, ACK, 0)


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _UINT32.pack(increment))


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream, _UINT32.pack(code))


def goaway(last_stream: int, code: ErrorCode, reason: str = "") -> bytes:
    payload = _UINT32.pack(last_stream) + _UINT32.pack(code) + reason.encode()[:256]
    return frame(GOAWAY, 0, 0, payload)


def ping(payload: bytes) -> bytes:
    return frame(PING, 0, 0, payload)


def ping_ack(payload: bytes) -> bytes:
    return frame(PING, ACK, 0, payload)


def data_frames(stream: int, payload: bytes, *, max_frame_size: int, end: bool) -> bytes:
    """`payload` as DATA frames of at most `max_frame_size`, the last one ending the stream or not.

    An empty payload becomes one empty frame, which is how a stream is ended without data.
    """
    if len(payload) <= max_frame_size:
        return frame(DATA, END_STREAM if end else 0, stream, payload)
    out = bytearray()
    for start in range(0, len(payload), max_frame_size):
        part = payload[start : start + max_frame_size]
        last = start + max_frame_size >= len(payload)
        out += frame(DATA, END_STREAM if end and last else 0, stream, part)
    return bytes(out)


def parse_settings(payload: bytes) -> list[tuple[int, int]]:
    """The (identifier, value) pairs of a SETTINGS payload, in order."""
    if len(payload) % 6:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS payload is not a list of pairs")
    pairs = [_SETTING.unpack_from(payload, at) for at in range(0, len(payload), 6)]
    for identifier, value in pairs:
        if identifier == SETTING_INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, f"initial window {value} is too big"
            )
        if identifier == SETTING_MAX_FRAME_SIZE and not (
            DEFAULT_MAX_FRAME_SIZE <= value <= LARGEST_MAX_FRAME_SIZE
        ):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"frame size {value} is out of range")
    return pairs


def parse_uint31(payload: bytes) -> int:
    """The 31 bit number that WINDOW_UPDATE, RST_STREAM and GOAWAY begin with."""
    if len(payload) < 4:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "payload shorter than four bytes")
    value: int = _UINT32.unpack_from(payload)[0]
    return value & STREAM_MASK


def strip_padding(flags: int, payload: bytes) -> bytes:
    """The content of a DATA payload without its padding."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding is longer than the frame")
    return payload[1 : len(payload) - payload[0]]


def header_fragment(kind: int, flags: int, payload: bytes) -> bytes:
    """The part of the header block that a HEADERS or CONTINUATION frame carries."""
    if kind == CONTINUATION:
        return payload
    fragment = strip_padding(flags, payload)
    if flags & PRIORITISED:
        if len(fragment) < 5:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS shorter than its priority")
        fragment = fragment[5:]
    return fragment


def header_block_end(buffer: bytes, at: int, max_frame_size: int, max_block: int) -> int:
    """Where the HEADERS at `at` and their CONTINUATIONs end, or 0 while they are incomplete."""
    start = at
    size = len(buffer)
    expected: int | None = None
    frames_left = max_block // DEFAULT_MAX_FRAME_SIZE + _SPARE_FRAMES
    while size - at >= HEADER_SIZE:
        high, low, kind, flags, stream = FRAME_HEADER.unpack_from(buffer, at)
        length = high << 8 | low
        if length > max_frame_size:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} octets")
        stream &= STREAM_MASK
        if expected is None:
            expected = stream
        elif kind != CONTINUATION or stream != expected:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame inside a header block")
        at += HEADER_SIZE + length
        if at > size:
            break
        if flags & END_HEADERS:
            return at
        frames_left -= 1
        if frames_left == 0:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "header block in too many frames")
    if size - start > max_block:
        raise ConnectionFault(
            ErrorCode.ENHANCE_YOUR_CALM, f"header block above {max_block // 1024} KiB"
        )
    return 0


def header_block(buffer: bytes, at: int, end: int) -> bytes:
    """The header block in the frames between `at` and `end`, without framing and padding."""
    fragments: list[bytes] = []
    while at < end:
        high, low, kind, flags, _ = FRAME_HEADER.unpack_from(buffer, at)
        stop = at + HEADER_SIZE + (high << 8 | low)
        fragments.append(header_fragment(kind, flags, buffer[at + HEADER_SIZE : stop]))
        at = stop
    return fragments[0] if len(fragments) == 1 else b"".join(fragments)


def without_end_of_stream(octets: bytes) -> bytes:
    """The frames of a header block as they were, but leaving the stream open."""
    return octets[:4] + bytes((octets[4] & ~END_STREAM,)) + octets[5:]
