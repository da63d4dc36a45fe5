"""Netlink sockets: requests with their acknowledgements, and dumps.

pyroute2 encodes and decodes the content of messages. Its sockets are not used: each runs an event
loop of its own, and a dump decodes every message, where a few bytes distinguish most of them here.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

ROUTE: Final = 0  # NETLINK_ROUTE
NETFILTER: Final = 12  # NETLINK_NETFILTER

REQUEST: Final = 0x1  # NLM_F_REQUEST
ACK: Final = 0x4  # NLM_F_ACK
EXCLUSIVE: Final = 0x200  # NLM_F_EXCL
CREATE: Final = 0x400  # NLM_F_CREATE
APPEND: Final = 0x800  # NLM_F_APPEND
NESTED: Final = 0x8000  # NLA_F_NESTED, of an attribute's type
_DUMP: Final = 0x300  # NLM_F_DUMP
_INTERRUPTED: Final = 0x10  # NLM_F_DUMP_INTR
_CAPPED: Final = 0x100  # NLM_F_CAPPED, of acknowledgements
_TEXTS: Final = 0x200  # NLM_F_ACK_TLVS, of acknowledgements

_ERROR: Final = 2  # NLMSG_ERROR
_DONE: Final = 3  # NLMSG_DONE
_HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence number, port
_ATTRIBUTE: Final = struct.Struct("=HH")  # length, type
_ERROR_TEXT: Final = 1  # NLMSGERR_ATTR_MSG

_SOL_NETLINK: Final = 270  # SOL_NETLINK
_CAP_ACK: Final = 10  # NETLINK_CAP_ACK
_EXT_ACK: Final = 11  # NETLINK_EXT_ACK

_ANSWER_S: Final = 5.0
"""How long the kernel may take. Chosen: it answers in microseconds, or after a module was loaded;
twice the value lets a worker thread hang twice as long when it does not answer at all."""
_BUFFER: Final = 1 << 18
"""Bytes of one receive call. The kernel fills at most 32 KiB of a dump at a time."""
_RECEIVE: Final = 1 << 20
"""Bytes of the socket's receive buffer. An acknowledgement takes some 800 bytes of it, so there is
room for the thousand of one batch."""
_TRIES: Final = 4
"""A dump that changes of the tables interrupted is repeated. Chosen: it takes milliseconds, so four
interruptions in a row mean that something is very busy, and the caller looks again later."""


class Message(NamedTuple):
    """A request. kind: the message type; flags: besides REQUEST; body: what follows the header."""

    kind: int
    flags: int
    body: bytes


class NetlinkError(OSError):
    """The kernel refused a request. index: which one of a batch."""

    def __init__(self, number: int, text: str, index: int) -> None:
        super().__init__(number, text or os.strerror(number))
        self.index = index


class Netlink:
    """A socket, in the network namespace of the thread that makes it. One thread at a time."""

    def __init__(self, protocol: int) -> None:
        """Raises OSError when the kernel does not know the protocol."""
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol
        )
        try:
            self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
            self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE)
            self._socket.settimeout(_ANSWER_S)
            self._socket.bind((0, 0))
        except OSError:
            self._socket.close()
            raise
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def send(self, messages: Sequence[Message]) -> None:
        """Send the requests in one datagram and wait for the acknowledgements that they ask for.

        Raises NetlinkError for the first request that the kernel refuses.
        """
        first = self._sequence + 1
        self._sequence += len(messages)
        self._socket.send(
            b"".join(_packed(message, first + at) for at, message in enumerate(messages))
        )
        awaited = {first + at for at, message in enumerate(messages) if message.flags & ACK}
        while awaited:
            for kind, _, sequence, content in self._receive():
                if kind == _ERROR and first <= sequence <= self._sequence:
                    _raise(content, sequence - first)
                    awaited.discard(sequence)

    def dump(
        self, message: Message, wanted: Callable[[bytes], bool] = lambda _: True
    ) -> list[bytes]:
        """Return the bodies of the messages that answer a dump request, those that are wanted.

        Raises NetlinkError, also when the tables change all the time.
        """
        for _ in range(_TRIES):
            self._sequence += 1
            self._socket.send(
                _packed(message._replace(flags=message.flags | _DUMP), self._sequence)
            )
            found, whole = self._dumped(wanted)
            if whole:
                return found
        raise NetlinkError(errno.EINTR, "the tables change while they are read", 0)

    def _dumped(self, wanted: Callable[[bytes], bool]) -> tuple[list[bytes], bool]:
        found: list[bytes] = []
        whole = True
        while True:
            for kind, flags, sequence, content in self._receive():
                if sequence != self._sequence:
                    continue  # the rest of an answer that was given up
                whole = whole and not flags & _INTERRUPTED
                if kind == _DONE:
                    return found, whole
                if kind == _ERROR:
                    _raise(content, 0)
                elif wanted(content):
                    found.append(content)

    def _receive(self) -> list[tuple[int, int, int, bytes]]:
        data = self._socket.recv(_BUFFER)
        messages = []
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
            if length < _HEADER.size:
                break
            content = data[at + _HEADER.size : at + length]
            if kind == _ERROR:
                content = struct.pack("=H", flags) + content
            messages.append((kind, flags, sequence, content))
            at += (length + 3) & ~3
        return messages


def attribute(kind: int, content: bytes) -> bytes:
    """Return an attribute as it stands in a message. kind: with `NESTED` if others are in it."""
    length = _ATTRIBUTE.size + len(content)
    return _ATTRIBUTE.pack(length, kind) + content + bytes(-length % 4)


def attributes(content: bytes) -> dict[int, bytes]:
    """Return the attributes that follow each other in `content`; of two of a kind, the last."""
    found = {}
    at = 0
    while at + _ATTRIBUTE.size <= len(content):
        length, kind = _ATTRIBUTE.unpack_from(content, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind & ~NESTED] = content[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return found


def _packed(message: Message, sequence: int) -> bytes:
    length = _HEADER.size + len(message.body)
    header = _HEADER.pack(length, message.kind, message.flags | REQUEST, sequence, 0)
    return header + message.body + bytes(-length % 4)


def _raise(content: bytes, index: int) -> None:
    """Raise the error of an acknowledgement, unless it is none. content: after its flags."""
    flags, number = struct.unpack_from("=Hi", content)
    if number == 0:
        return
    text = b""
    if flags & _TEXTS and flags & _CAPPED:
        # Behind flags, number, and the header of the refused request.
        text = attributes(content[6 + _HEADER.size :]).get(_ERROR_TEXT, b"")
    raise NetlinkError(-number, text.rstrip(b"\0").decode("utf-8", "replace"), index)
