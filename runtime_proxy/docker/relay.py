"""One Docker client connection and its own connection to dockerd, octets through, without I/O.

Requests follow each other: the next head is read when the last answer has ended, so what belongs
to whom is never a question. A request that hooks care about is held whole until `release`; an
answer is kept (a copy) for a held request. After `101 Switching Protocols`, or an answer
that only the connection's end ends (dockerd's raw attach), both directions are plain pipes.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from runtime_proxy.docker.endless import endless
from runtime_proxy.docker.http1 import (
    Body,
    HttpFault,
    RequestHead,
    parse_request,
    parse_response,
    plain_response,
    request_framing,
    response_framing,
    split_head,
    with_body,
)

# Of the answer to a held request, which has an id and a few warnings. Chosen: a hundred times that;
# of a longer one only the relayed copy is whole. Twice the value: twice the memory for each held
# request.
_MAX_KEPT_ANSWER = 64 * 1024
# What a client may send ahead of an answer: raw input of an attach, or a pipelined request.
_MAX_AHEAD_BYTES = 1024 * 1024


class _Phase(enum.Enum):
    HEAD = enum.auto()
    BODY = enum.auto()
    HOLDING = enum.auto()
    ANSWER = enum.auto()
    PIPE = enum.auto()
    CLOSED = enum.auto()


@dataclass(frozen=True, slots=True)
class Held:
    """A whole request that waits for `release` or `refuse`."""

    head: RequestHead
    body: bytes


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the last held request has ended."""

    status: int
    body: bytes


class DockerRelay:
    def __init__(self, *, wants: Callable[[RequestHead], bool], max_body_bytes: int) -> None:
        """wants: whether a request with this head is to be held."""
        self.to_client: list[bytes] = []
        self.to_server: list[bytes] = []
        self.events: list[Held | Answered] = []
        self.closing = False
        self._wants = wants
        self._max_body_bytes = max_body_bytes
        self._phase = _Phase.HEAD
        self._ahead = b""
        self._request: RequestHead | None = None
        self._request_body: Body | None = None
        self._was_held = False
        self._held_body = b""
        self._server_rest = b""
        self._answer_status = 0
        self._answer_body: Body | None = None

    @property
    def busy(self) -> bool:
        """A request is under way, or the connection has become a pipe."""
        return self._phase not in (_Phase.HEAD, _Phase.CLOSED) or bool(self._ahead)

    @property
    def endless(self) -> bool:
        """What is under way ends with one of the two ends alone."""
        answering = self._phase in (_Phase.ANSWER, _Phase.PIPE)
        return answering and self._request is not None and endless(self._request)

    @property
    def piped(self) -> bool:
        """Both directions are plain octets from here on."""
        return self._phase is _Phase.PIPE

    @property
    def holds_back(self) -> bool:
        """Whether a whole request, or part of the next one, is still to be sent to dockerd."""
        if self._phase is _Phase.HOLDING:
            return self._request_body is None
        return self._phase is _Phase.ANSWER and bool(self._ahead)

    # -- the client -------------------------------------------------------------------------------

    def from_client(self, data: bytes) -> None:
        if self._phase is _Phase.PIPE:
            self.to_server.append(data)
            return
        self._ahead += data
        self._advance()

    def _advance(self) -> None:
        while self._ahead:
            if self._phase is _Phase.HEAD:
                if not self._begin():
                    return
            elif self._phase in (_Phase.BODY, _Phase.HOLDING) and self._request_body is not None:
                self._continue_body()
            elif self._phase is _Phase.CLOSED:
                self._ahead = b""
            else:
                if len(self._ahead) > _MAX_AHEAD_BYTES:
                    raise HttpFault("too much sent ahead of an answer")
                return

    def _begin(self) -> bool:
        parted = split_head(self._ahead)
        if parted is None:
            return False
        octets, self._ahead = parted
        head = parse_request(octets)
        self._request = head
        framing = request_framing(head)
        self._was_held = self._wants(head)
        if self._was_held:
            self._request_body = Body(framing, keep=self._max_body_bytes)
            self._phase = _Phase.HOLDING
            expects = (head.get(b"expect") or b"").lower() == b"100-continue"
            if expects and not self._request_body.done:
                self.to_client.append(b"HTTP/1.1 100 Continue\r\n\r\n")
        else:
            self._request_body = Body(framing)
            self._phase = _Phase.BODY
            self.to_server.append(octets)
        self._end_body()
        return True

    def _continue_body(self) -> None:
        body = self._request_body
        assert body is not None
        used = body.feed(self._ahead)
        part, self._ahead = self._ahead[:used], self._ahead[used:]
        if self._phase is _Phase.BODY and part:
            self.to_server.append(part)
        if body.overflowed and self._phase is _Phase.HOLDING:
            self.refuse(413, "Content Too Large", "request body is too large")
        else:
            self._end_body()

    def _end_body(self) -> None:
        body = self._request_body
        if body is None or not body.done:
            return
        if self._phase is _Phase.HOLDING:
            assert self._request is not None
            self._request_body = None
            self._held_body = bytes(body.content)
            self.events.append(Held(self._request, self._held_body))
        else:
            self._request_body = None
            self._phase = _Phase.ANSWER

    def release(self, body: bytes | None = None) -> None:
        """Send the held request on; `body` replaces its own."""
        if self._phase is not _Phase.HOLDING or self._request is None:
            return
        self._phase = _Phase.ANSWER
        head, original = self._request, self._held_body
        self._held_body = b""
        if body is None and head.get(b"content-length") and not head.get(b"expect"):
            self.to_server.append(head.octets + original)
        else:
            self.to_server.append(with_body(head, original if body is None else body))

    def refuse(self, status: int, reason: str, text: str) -> None:
        """Answer in dockerd's place and end the connection."""
        self.to_client.append(plain_response(status, reason, text))
        self._phase = _Phase.CLOSED
        self.closing = True

    # -- dockerd ----------------------------------------------------------------------------------

    def from_server(self, data: bytes) -> None:
        if self._phase is _Phase.PIPE:
            self.to_client.append(data)
            return
        self._server_rest += data
        while self._server_rest and not self.piped and self._phase is not _Phase.CLOSED:
            if self._answer_body is None:
                if not self._begin_answer():
                    return
            else:
                self._continue_answer()
        if self.piped and self._server_rest:
            self.to_client.append(self._server_rest)
            self._server_rest = b""

    def _begin_answer(self) -> bool:
        if self._request is None:
            raise HttpFault("dockerd answers without a request")
        parted = split_head(self._server_rest)
        if parted is None:
            return False
        octets, self._server_rest = parted
        head = parse_response(octets)
        self.to_client.append(octets)
        if head.status == 101:
            self._become_pipe()
            return True
        if head.status < 200:
            return True
        framing = response_framing(head, self._request.method)
        if framing.until_close:
            self._become_pipe()
            return True
        self._answer_status = head.status
        self._answer_body = Body(framing, keep=_MAX_KEPT_ANSWER if self._was_held else 0)
        self._end_answer()
        return True

    def _continue_answer(self) -> None:
        body = self._answer_body
        assert body is not None
        used = body.feed(self._server_rest)
        self.to_client.append(self._server_rest[:used])
        self._server_rest = self._server_rest[used:]
        self._end_answer()

    def _end_answer(self) -> None:
        body = self._answer_body
        if body is None or not body.done:
            return
        self._answer_body = None
        if self._was_held:
            self.events.append(Answered(self._answer_status, bytes(body.content)))
        if self._phase is _Phase.BODY:
            # dockerd answered without reading the whole request: nothing can follow on this
            # connection that both sides would understand alike.
            self._phase = _Phase.CLOSED
            self.closing = True
            return
        self._request = None
        self._phase = _Phase.HEAD
        self._advance()

    def _become_pipe(self) -> None:
        self._phase = _Phase.PIPE
        if self._ahead:
            self.to_server.append(self._ahead)
            self._ahead = b""
