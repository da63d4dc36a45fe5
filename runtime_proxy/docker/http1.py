"""HTTP/1.1 without I/O: heads that are kept as they came, and bodies that are only measured.

The proxy passes octets on unchanged, so this module knows where a message ends and what its head
says, no more (RFC 9112, sections 2, 6 and 7). What is ambiguous (two lengths, a length and chunks)
is refused: two readers must never disagree on where a message ends.

dockerd reads with Go's net/http, so the same line ends are taken: a line of a head may end in a
bare line feed, a line with a chunk's size may not (Go 1.24), and a carriage return inside a line is
an error.
"""

import re
from dataclasses import dataclass

# As Go has it: registries' credentials travel in a header of a build.
MAX_HEAD_BYTES = 1024 * 1024
# As Go has it. The line is a length, possibly with extensions, which nothing here uses.
_MAX_CHUNK_LINE = 4096
# Chosen: neither docker's clients nor dockerd are known to send trailers; room for some dozen
# fields. Twice the value: a peer can keep a message open for twice as many bytes.
_MAX_TRAILER_BYTES = 16 * 1024
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_EMPTY_LINE = re.compile(rb"\n\r?\n")
_HTTP_VERSION = re.compile(rb"HTTP/1\.[01]")


class HttpFault(Exception):
    """A peer does not speak HTTP/1.1 as it must; `reason` says how."""


@dataclass(frozen=True, slots=True)
class Head:
    """A message's first line and fields. `octets` is the whole head as it came."""

    octets: bytes
    first_line: bytes
    fields: tuple[tuple[bytes, bytes], ...]

    def get(self, name: bytes) -> bytes | None:
        """The last value of a field; `name` in lower case."""
        found = None
        for key, value in self.fields:
            if key == name:
                found = value
        return found


@dataclass(frozen=True, slots=True)
class RequestHead(Head):
    method: bytes = b""
    target: bytes = b""


@dataclass(frozen=True, slots=True)
class ResponseHead(Head):
    status: int = 0


def split_head(buffer: bytes) -> tuple[bytes, bytes] | None:
    """(head with its empty line, rest), or None while the head is incomplete."""
    empty_line = _EMPTY_LINE.search(buffer)
    end = len(buffer) if empty_line is None else empty_line.end()
    if end > MAX_HEAD_BYTES:
        raise HttpFault(f"head larger than {MAX_HEAD_BYTES} octets")
    return None if empty_line is None else (buffer[:end], buffer[end:])


def _lines(octets: bytes) -> list[bytes]:
    """The lines of a whole head without their ends and without the empty one."""
    return [line.removesuffix(b"\r") for line in octets.split(b"\n")[:-2]]


def _fields(octets: bytes) -> tuple[bytes, tuple[tuple[bytes, bytes], ...]]:
    lines = _lines(octets)
    fields = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or b"\r" in value or b"\0" in value:
            raise HttpFault(f"bad header line {line[:40]!r}")
        fields.append((name.lower(), value.strip(b" \t")))
    if b"\r" in lines[0]:
        raise HttpFault("carriage return inside the first line")
    return lines[0], tuple(fields)


def parse_request(octets: bytes) -> RequestHead:
    first, fields = _fields(octets)
    words = first.split(b" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or not _HTTP_VERSION.fullmatch(words[2]):
        raise HttpFault(f"bad request line {first[:60]!r}")
    return RequestHead(octets, first, fields, words[0], words[1])


def parse_response(octets: bytes) -> ResponseHead:
    first, fields = _fields(octets)
    words = first.split(b" ", 2)
    if (
        len(words) < 2
        or not _HTTP_VERSION.fullmatch(words[0])
        or not re.fullmatch(rb"[1-9]\d\d", words[1])
    ):
        raise HttpFault(f"bad status line {first[:60]!r}")
    return ResponseHead(octets, first, fields, int(words[1]))


@dataclass(frozen=True, slots=True)
class Framing:
    """How a body ends: after `length` octets, with the last chunk, or with the connection."""

    length: int = 0
    chunked: bool = False
    until_close: bool = False


def _lengths(head: Head) -> tuple[int | None, bool]:
    lengths = {value for name, value in head.fields if name == b"content-length"}
    codings = [value for name, value in head.fields if name == b"transfer-encoding"]
    if len(lengths) > 1:
        raise HttpFault("two different content lengths")
    if codings and (lengths or len(codings) > 1 or codings[0].lower() != b"chunked"):
        raise HttpFault(f"transfer coding {codings[0][:40]!r} beside a length or not only chunked")
    if not lengths:
        return None, bool(codings)
    text = lengths.pop()
    if not text.isdigit() or len(text) > 18:
        raise HttpFault(f"bad content length {text[:20]!r}")
    return int(text), False


def request_framing(head: RequestHead) -> Framing:
    length, chunked = _lengths(head)
    return Framing(length=length or 0, chunked=chunked)


def response_framing(head: ResponseHead, method: bytes) -> Framing:
    if method == b"HEAD" or head.status in (204, 304) or 100 <= head.status < 200:
        return Framing()
    length, chunked = _lengths(head)
    return Framing(length=length or 0, chunked=chunked, until_close=length is None and not chunked)


class Body:
    """Measures one body: `feed` says how many of the given octets belong to it.

    With a `keep` limit its content, chunking removed, is collected up to so many octets.
    """

    def __init__(self, framing: Framing, *, keep: int = 0) -> None:
        self.content = bytearray()
        self.overflowed = False
        self._keep = keep
        self._until_close = framing.until_close
        self._chunked = framing.chunked
        self._left = framing.length
        self._line = bytearray()
        self._state = "size" if framing.chunked else "data"
        self._trailer_bytes = 0
        self.done = not framing.chunked and not framing.until_close and framing.length == 0

    def feed(self, data: bytes) -> int:
        if self.done:
            return 0
        if self._until_close:
            self._collect(data)
            return len(data)
        if not self._chunked:
            used = min(self._left, len(data))
            self._collect(data[:used])
            self._left -= used
            self.done = self._left == 0
            return used
        at = 0
        while at < len(data) and not self.done:
            if self._state == "data":
                used = min(self._left, len(data) - at)
                self._collect(data[at : at + used])
                self._left -= used
                at += used
                if self._left == 0:
                    self._state = "end of data"
            else:
                at = self._feed_line(data, at)
        return at

    def _feed_line(self, data: bytes, at: int) -> int:
        """Read up to a line's end and act on the line."""
        end = data.find(b"\n", at)
        stop = len(data) if end < 0 else end + 1
        self._line += data[at:stop]
        if len(self._line) > _MAX_CHUNK_LINE:
            raise HttpFault("chunk line too long")
        if end < 0:
            return stop
        if not self._line.endswith(b"\r\n"):
            raise HttpFault("chunk line without carriage return")
        line = bytes(self._line[:-2])
        self._line.clear()
        if self._state == "end of data":
            if line:
                raise HttpFault("chunk longer than its size")
            self._state = "size"
        elif self._state == "size":
            match = _CHUNK_SIZE.fullmatch(line)
            if match is None:
                raise HttpFault(f"bad chunk size {line[:20]!r}")
            self._left = int(match[1], 16)
            self._state = "data" if self._left else "trailer"
        elif not line:
            self.done = True
        else:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > _MAX_TRAILER_BYTES:
                raise HttpFault("trailers too long")
        return stop

    def _collect(self, part: bytes) -> None:
        room = self._keep - len(self.content)
        if len(part) > room:
            self.overflowed = True
            part = part[: max(0, room)]
        self.content += part


def with_body(head: RequestHead, body: bytes) -> bytes:
    """A request with another body: its length given, chunking and expectation gone."""
    dropped = (b"content-length", b"transfer-encoding", b"expect", b"trailer")
    lines = [head.first_line]
    for line in _lines(head.octets)[1:]:
        if line.partition(b":")[0].lower() not in dropped:
            lines.append(line)
    lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def plain_response(status: int, reason: str, text: str) -> bytes:
    """A whole response of ours, which ends the connection."""
    body = text.encode()
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        + body
    )
