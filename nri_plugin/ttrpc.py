"""ttRPC, unary calls only, as state machines without I/O: bytes in, events out.

A message is a 10-byte header (length, stream id, type, flags) and a protobuf envelope. `Server`
turns a connection's bytes into calls to answer, `Client` into replies to our own calls. Neither
waits: deadlines are part of the events, and the connection looks at the clock.

There is no cancel message. A caller that gives up forgets the stream and drops the late reply.
Source: docs/facts/nri.md, "ttRPC".
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from protos.ttrpc.ttrpc_pb2 import Request, Response, Status

MAX_SENT_BYTES: Final = 4 << 20
"""What every ttRPC peer accepts as one message body."""

MAX_RECEIVED_BYTES: Final = 64 << 20
"""What we accept. Runtimes with ttRPC before 1.2.6 send a Synchronize above 4 MiB in one piece."""

REQUEST: Final = 1
RESPONSE: Final = 2
_DATA: Final = 3

_HEADER = struct.Struct(">IIBB")
_unpack_header = _HEADER.unpack_from
_pack_header = _HEADER.pack
_HEADER_BYTES: Final = _HEADER.size


class Code(IntEnum):
    """gRPC status codes, as far as they occur here."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RpcError(Exception):
    """A call that ended with a status. `code` may be a number that `Code` does not name."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        self.message = message
        name = Code(code).name if code in Code._value2member_map_ else str(code)
        super().__init__(f"{name}: {message}")


class ProtocolError(Exception):
    """The peer broke the protocol in a way that leaves nothing to read on: close, with this."""


class Message(NamedTuple):
    """One whole ttRPC message."""

    stream: int
    type: int
    flags: int
    body: bytes


class Oversized(NamedTuple):
    """A message above the limit, whose bytes are skipped as they come."""

    stream: int
    type: int
    length: int


class Gathering(NamedTuple):
    """A message of which only a part has arrived, in bytes of its body."""

    received: int
    announced: int


class MessageReader:
    """Gathers a byte stream into messages of at most `max_bytes`."""

    __slots__ = ("_buffer", "_max_bytes", "_needed", "_skip")

    def __init__(self, max_bytes: int = MAX_RECEIVED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._needed = _HEADER_BYTES  # bytes in the buffer before another look is worth it
        self._skip = 0

    @property
    def between_messages(self) -> bool:
        """True where the next byte begins a message."""
        return not self._buffer and not self._skip

    @property
    def gathering(self) -> Gathering | None:
        """What is there of the message that is being received, None between messages."""
        length = self._needed - _HEADER_BYTES
        if not self._buffer or length <= 0:
            return None
        return Gathering(len(self._buffer) - _HEADER_BYTES, length)

    def feed(self, piece: bytes) -> list[Message | Oversized]:
        """Take the next piece of the stream; return what became whole."""
        if self._skip:
            skipped = min(self._skip, len(piece))
            self._skip -= skipped
            piece = piece[skipped:]
            if not piece:
                return []
        if self._buffer:
            self._buffer += piece
            if len(self._buffer) < self._needed:
                return []
            piece = bytes(self._buffer)
            self._buffer.clear()
        messages: list[Message | Oversized] = []
        start, end = 0, len(piece)
        while end - start >= _HEADER_BYTES:
            length, stream, kind, flags = _unpack_header(piece, start)
            stop = start + _HEADER_BYTES + length
            if length > self._max_bytes:
                messages.append(Oversized(stream, kind, length))
                self._skip = max(0, stop - end)
            elif stop > end:
                self._needed = _HEADER_BYTES + length
                break
            else:
                messages.append(Message(stream, kind, flags, piece[start + _HEADER_BYTES : stop]))
            start = min(stop, end)
        else:
            self._needed = _HEADER_BYTES
        if start < end:
            self._buffer += piece[start:]
        return messages


class Call(NamedTuple):
    """A request to answer. timeout_ns: what the caller still had when it sent; 0 means no deadline,
    a negative value is a deadline that has passed."""

    stream: int
    service: str
    method: str
    payload: bytes
    timeout_ns: int


class Rejection(NamedTuple):
    """A request that is answered with an error before any method is asked."""

    stream: int
    code: Code
    message: str


class Server:
    """The callee's side of one connection."""

    __slots__ = ("_last_stream", "_reader")

    def __init__(self, max_bytes: int = MAX_RECEIVED_BYTES) -> None:
        self._reader = MessageReader(max_bytes)
        self._last_stream = 0

    @property
    def gathering(self) -> Gathering | None:
        """The call whose end has not arrived yet."""
        return self._reader.gathering

    @property
    def between_calls(self) -> bool:
        """True where the next byte begins a message."""
        return self._reader.between_messages

    def receive(self, piece: bytes) -> list[Call | Rejection]:
        """Return what the piece completes; message types that no server gets are ignored."""
        events: list[Call | Rejection] = []
        for message in self._reader.feed(piece):
            if message.type == REQUEST:
                events.append(self._request(message))
            elif message.type == _DATA:
                # Unary calls have no data, so the stream cannot be an open one.
                events.append(
                    Rejection(message.stream, Code.INVALID_ARGUMENT, "StreamID is no longer active")
                )
        return events

    def _request(self, message: Message | Oversized) -> Call | Rejection:
        if isinstance(message, Message) and not message.flags:
            return self.request(message.stream, message.body)
        stream = message.stream
        if not self._opens(stream):
            return _no_stream(stream)
        if isinstance(message, Oversized):
            return Rejection(
                stream,
                Code.RESOURCE_EXHAUSTED,
                f"message length {message.length} exceeds the limit of {self._reader._max_bytes}",
            )
        return Rejection(stream, Code.UNIMPLEMENTED, "streaming calls are not served")

    def _opens(self, stream: int) -> bool:
        """Take the id of a new stream; return whether it may be one."""
        if stream % 2 == 0 or stream <= self._last_stream:
            return False
        self._last_stream = stream
        return True

    def request(self, stream: int, body: bytes) -> Call | Rejection:
        """Return what to answer to a whole request without flags."""
        if not self._opens(stream):
            return _no_stream(stream)
        try:
            request = Request.FromString(body)
        except DecodeError as error:
            return Rejection(stream, Code.INVALID_ARGUMENT, f"unmarshal request error: {error}")
        return Call(stream, request.service, request.method, request.payload, request.timeout_nano)


def _no_stream(stream: int) -> Rejection:
    return Rejection(
        stream,
        Code.INVALID_ARGUMENT,
        "StreamID cannot be re-used and must increment"
        if stream % 2
        else "StreamID must be odd for client initiated streams",
    )


def encode_response(stream: int, payload: bytes) -> bytes:
    """Return the message that answers `stream` with success.

    Raises RpcError(RESOURCE_EXHAUSTED) for a payload that no peer would take.
    """
    # The success envelope is field 2 alone, and an empty payload is an empty body.
    body = b"\x12" + _varint(len(payload)) + payload if payload else b""
    if len(body) > MAX_SENT_BYTES:
        raise RpcError(
            Code.RESOURCE_EXHAUSTED,
            f"a reply of {len(body)} bytes is above ttRPC's limit of {MAX_SENT_BYTES}",
        )
    return _pack_header(len(body), stream, RESPONSE, 0) + body


def encode_failure(stream: int, code: int, message: str) -> bytes:
    """Return the message that answers `stream` with an error."""
    body = Response(status=Status(code=code, message=message[:4096])).SerializeToString()
    return _pack_header(len(body), stream, RESPONSE, 0) + body


class Reply(NamedTuple):
    """The end of one of our calls: a payload, or an error."""

    stream: int
    payload: bytes
    error: RpcError | None


class Client:
    """The caller's side of one connection.

    Giving up is `forget`: the late reply then belongs to an unknown stream, and is dropped.
    """

    __slots__ = ("_next_stream", "_pending", "_reader")

    def __init__(self, max_bytes: int = MAX_RECEIVED_BYTES) -> None:
        self._reader = MessageReader(max_bytes)
        self._next_stream = 1
        self._pending: set[int] = set()

    def call(
        self, service: str, method: str, payload: bytes, *, timeout_ns: int = 0
    ) -> tuple[int, bytes]:
        """Return the new call's stream and the message to send.

        Raises RpcError(RESOURCE_EXHAUSTED) for a request that no peer would take; the connection
        stays usable.
        """
        body = Request(
            service=service, method=method, payload=payload, timeout_nano=timeout_ns
        ).SerializeToString()
        if len(body) > MAX_SENT_BYTES:
            raise RpcError(
                Code.RESOURCE_EXHAUSTED,
                f"a request of {len(body)} bytes is above ttRPC's limit of {MAX_SENT_BYTES}",
            )
        stream = self._next_stream
        self._next_stream += 2
        self._pending.add(stream)
        return stream, _pack_header(len(body), stream, REQUEST, 0) + body

    def forget(self, stream: int) -> None:
        """Give a call up."""
        self._pending.discard(stream)

    def receive(self, piece: bytes) -> list[Reply]:
        """Return the calls that the piece ends. Raises ProtocolError for a data message."""
        replies: list[Reply] = []
        for message in self._reader.feed(piece):
            if message.type == _DATA:
                raise ProtocolError("the peer sent a data message in answer to a unary call")
            if message.type != RESPONSE or message.stream not in self._pending:
                continue
            self._pending.discard(message.stream)
            replies.append(_reply(message))
        return replies


def _reply(message: Message | Oversized) -> Reply:
    if isinstance(message, Oversized):
        return Reply(
            message.stream,
            b"",
            RpcError(Code.RESOURCE_EXHAUSTED, f"the reply has {message.length} bytes"),
        )
    try:
        response = Response.FromString(message.body)
    except DecodeError as error:
        raise ProtocolError(f"the peer's response cannot be read: {error}") from error
    if response.status.code:
        status = response.status
        return Reply(message.stream, b"", RpcError(status.code, status.message))
    return Reply(message.stream, response.payload, None)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
