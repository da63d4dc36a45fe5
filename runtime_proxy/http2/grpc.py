"""gRPC over HTTP/2: message prefix, time-outs and statuses as they travel in headers.

Source: "gRPC over HTTP2" of the gRPC documentation; codes as in google.rpc.Code.
"""

import enum
import zlib
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from runtime_proxy.http2.hpack import Header

MESSAGE_PREFIX_SIZE = 5

_TIMEOUT_UNIT_S = {
    b"H": 3600.0,
    b"M": 60.0,
    b"S": 1.0,
    b"m": 1e-3,
    b"u": 1e-6,
    b"n": 1e-9,
}
# Of a status text of ours, coded: it must fit into one frame, and clients bound their headers (C
# core takes 8 KiB). A hook server's error may be a whole stack trace.
_MAX_CODED_MESSAGE = 4096
# Printable ASCII except the percent sign itself.
_PLAIN_MESSAGE_OCTETS = frozenset(range(0x20, 0x7F)) - {0x25}


class Code(enum.IntEnum):
    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


@dataclass(frozen=True, slots=True)
class Status:
    """A gRPC status. `code` is a number, because a server may send an unknown one."""

    code: int
    message: str = ""

    @classmethod
    def resource_exhausted(cls, message: str) -> "Status":
        return cls(Code.RESOURCE_EXHAUSTED, message)

    @classmethod
    def unavailable(cls, message: str) -> "Status":
        return cls(Code.UNAVAILABLE, message)

    def __str__(self) -> str:
        name = Code(self.code).name if self.code in Code._value2member_map_ else str(self.code)
        return f"{name}: {self.message}" if self.message else name


class MessageError(Exception):
    """A body that is not one readable gRPC message."""


def add_prefix(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def parse_unary_body(body: bytes, *, encoding: bytes, max_bytes: int) -> bytes:
    """The one message of a unary body, decompressed if it was compressed.

    Raises MessageError where there is not exactly one, or it cannot be decompressed into
    `max_bytes`.
    """
    if len(body) < MESSAGE_PREFIX_SIZE:
        raise MessageError(f"body of {len(body)} octets holds no message")
    length = int.from_bytes(body[1:MESSAGE_PREFIX_SIZE], "big")
    if len(body) != MESSAGE_PREFIX_SIZE + length:
        raise MessageError(f"message of {length} octets in a body of {len(body)}")
    message = body[MESSAGE_PREFIX_SIZE:]
    if body[0] == 0:
        return message
    if body[0] != 1 or encoding not in (b"gzip", b"deflate"):
        raise MessageError(f"message coded as {encoding!r}, flag {body[0]}")
    inflater = zlib.decompressobj(31 if encoding == b"gzip" else 15)
    try:
        plain = inflater.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise MessageError(f"broken {encoding!r} message: {error}") from error
    if len(plain) > max_bytes or not inflater.eof:
        raise MessageError(f"compressed message is cut short or above {max_bytes} octets")
    if inflater.unused_data:
        raise MessageError("more behind the end of a compressed message")
    return plain


def parse_answer(body: bytes, *, max_bytes: int) -> bytes:
    """Return the message of a server's unary answer, whose first octets show its coding.

    The answer's headers pass undecoded, so grpc-encoding is not known. Raises MessageError.
    """
    first = body[MESSAGE_PREFIX_SIZE : MESSAGE_PREFIX_SIZE + 2]
    encoding = b"gzip" if first == b"\x1f\x8b" else b"deflate"
    return parse_unary_body(body, encoding=encoding, max_bytes=max_bytes)


def parse_timeout(value: bytes | None) -> float | None:
    """Seconds of a grpc-timeout header; None where there is none or it is not readable.

    An unreadable one is the server's to refuse: the header has gone on to it.
    """
    if not value or len(value) > 9 or not value[:-1].isdigit():
        return None
    unit = _TIMEOUT_UNIT_S.get(value[-1:])
    return int(value[:-1]) * unit if unit is not None else None


def format_timeout(seconds: float) -> bytes:
    """A grpc-timeout of at most eight digits, rounded up to a whole unit of at least 1 us."""
    micros = max(1, int(seconds * 1e6))
    if micros < 10**8:
        return b"%du" % micros
    return b"%dm" % min(-(-micros // 1000), 10**8 - 1)


def encode_message(text: str) -> bytes:
    """The percent encoding of grpc-message, cut where it grows too long for a header."""
    coded = bytearray()
    for octet in text[: _MAX_CODED_MESSAGE + 1].encode("utf-8", "replace"):
        coded += bytes((octet,)) if octet in _PLAIN_MESSAGE_OCTETS else b"%%%02X" % octet
        if len(coded) > _MAX_CODED_MESSAGE:
            return bytes(coded) + b" [...]"
    return bytes(coded)


def decode_message(value: bytes) -> str:
    return unquote_to_bytes(value).decode("utf-8", "replace")


def status_headers(status: Status, *, trailers: bool) -> list[Header]:
    """The fields that end a call: a whole answer without a message, or trailers behind headers."""
    fields: list[Header] = [
        (b"grpc-status", b"%d" % status.code),
        (b"grpc-message", encode_message(status.message)),
    ]
    if trailers:
        return fields
    return [(b":status", b"200"), (b"content-type", b"application/grpc"), *fields]
