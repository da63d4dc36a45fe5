"""One HTTP/1.1 connection that is kept for many small requests, one at a time.

`httptools` (llhttp) parses the answers; everything here that it leaves to its caller is bounded:
the size of an answer, its head and its trailers. The time limit is the pool's (`kube.kept_client`),
which ends a connection by `break_off`. An answer that is not complete, or not HTTP, breaks the
connection, and the request fails with LostAnswer: whether the server acted on it is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

_LONGEST_ANSWER: Final = 16 * 1024 * 1024
"""Bytes, with head and framing. Chosen: bounds memory. An API server stores objects of at most
1.5 MiB by default, and lists are read in pages."""
_LONGEST_WITHOUT_BODY: Final = 64 * 1024
"""Bytes of head, trailers, chunk extensions and interim answers (1xx) in a row. Chosen: an API
server's head has less than 1 KiB, and proxies allow 8 to 64 KiB."""


class LostAnswer(ConnectionError):
    """The connection ended, or was broken off, before an answer was complete."""


class LongAnswer(LostAnswer):
    """The answer was broken off because it is longer than a connection takes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to one request. retry_after: the header's value, "" where there is none."""

    status: int
    phrase: str
    retry_after: str
    body: bytes


class HttpConnection(asyncio.Protocol):
    """The client's end of one connection. `deadline` and `idle_since` are in the loop's time."""

    def __init__(self, on_lost: Callable[[HttpConnection], None]) -> None:
        """on_lost: called once when the connection has ended."""
        # Late, as everything that only some of the processes need: a node's daemon has no use for
        # it.
        from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

        self._parser_errors: Final = (HttpParserError, HttpParserUpgrade)
        self._parser = HttpResponseParser(self)
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self.deadline = 0.0
        self.idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._received = 0
        self._without_body = 0
        self._status = 0
        self._phrase = b""
        self._retry_after = b""
        self._body = bytearray()
        self._framed = False
        self._headed = False
        self._complete = False
        self._surplus = False
        self._keep = False

    # --- requests ------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether a request can be sent: the connection is open and no answer is awaited."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and self._waiter is None

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited."""
        return self._waiter is not None

    async def exchange(self, request: bytes) -> Answer:
        """Send the bytes of one request and return its answer. Raises LostAnswer."""
        transport = self._transport
        if transport is None or self._waiter is not None:
            raise LostAnswer("the connection is closed")
        self._begin()
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        transport.write(request)
        try:
            return await waiter
        except asyncio.CancelledError:
            # The answer, if it comes, would be taken for that of the next request.
            self.break_off("the request was cancelled")
            raise

    def break_off(self, why: str, kind: type[LostAnswer] = LostAnswer) -> None:
        """Close the connection at once; the request that waits for an answer fails."""
        self._fail(kind(why))
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close an idle connection in order."""
        if self._transport is not None:
            self._transport.close()

    def _fail(self, error: LostAnswer) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _finish(self, *, keep: bool) -> None:
        answer = Answer(
            self._status,
            self._phrase.decode(errors="replace"),
            self._retry_after.decode(errors="replace"),
            bytes(self._body),
        )
        waiter, self._waiter = self._waiter, None
        if not keep:
            self.close()
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    # --- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self.break_off("bytes without a request")
            return
        before = len(self._body)
        try:
            self._parser.feed_data(data)
        except self._parser_errors as error:
            self.break_off(f"the answer is not HTTP/1.1: {type(error).__name__}: {error}")
            return
        self._received += len(data)
        if self._complete:
            if self._surplus:
                self.break_off("more than one answer to one request")
                return
            self._finish(keep=self._keep)
            return
        self._without_body = 0 if len(self._body) > before else self._without_body + len(data)
        if self._without_body > _LONGEST_WITHOUT_BODY:
            self.break_off("the answer's head or framing is too long")
        elif self._received > _LONGEST_ANSWER:
            self.break_off("the answer is too long", LongAnswer)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._headed and not self._complete and not self._framed and error is None:
            # A body without a length ends with the connection (RFC 9112, section 6.3).
            self._finish(keep=False)
        detail = f": {error}" if error is not None else ""
        self._fail(LostAnswer(f"the connection was closed before the answer was complete{detail}"))
        self._on_lost(self)

    # --- httptools -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_status(self, status: bytes) -> None:
        self._phrase += status

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headed:
            return  # a trailer
        # Compared by length first: few of the names have one of these lengths.
        length = len(name)
        if length == 11:
            if name.lower() == b"retry-after":
                self._retry_after = value.strip()
        elif (length == 14 and name.lower() == b"content-length") or (
            length == 17 and name.lower() == b"transfer-encoding"
        ):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._headed = self._status >= 200

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._headed:
            self._complete = True
            self._keep = self._parser.should_keep_alive()
        else:
            # An interim answer (1xx): the answer follows.
            self._phrase = self._retry_after = b""
            self._framed = False
