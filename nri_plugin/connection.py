"""One trunk to a runtime: an asyncio Protocol around the state machines.

A call from the runtime is answered inside `data_received`, without a task or a queue in between:
the hook path is read, decide, write. A peer that does not read its replies is not read from either,
so nothing piles up here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, cast

from nri_plugin import usual
from nri_plugin.mux import PLUGIN_SERVICE, RUNTIME_SERVICE, Demultiplexer, frame_message
from nri_plugin.ttrpc import (
    Call,
    Client,
    Code,
    Gathering,
    ProtocolError,
    Rejection,
    Reply,
    RpcError,
    Server,
    encode_failure,
)
from service.scheduling import keep_interpreter

log = logging.getLogger(__name__)

_UNSENT_BYTES_HIGH: Final = 1 << 20
"""Above this, requests are not read until replies are. The usual reply has a few hundred bytes, so
only a runtime that reads nothing gets here."""
_CLOSE_PATIENCE_S: Final = 2.0
"""How long a closed trunk may take to send what was answered: the runtime's own time-out, after
which it has no use for an answer."""

Serve = Callable[[Call], bytes]
"""Answers one call with a payload, or raises RpcError."""


def _nothing() -> None: ...


class ConnectionClosed(Exception):
    """The trunk ended before a call was answered; the text is the reason."""


class Connection(asyncio.Protocol):
    """A trunk. `closed` gets the reason of its end, in words."""

    def __init__(self, serve: Serve, reply_written: Callable[[], None] = _nothing) -> None:
        """reply_written: does what the last reply did not need, now that the runtime has it. It is
        called after each reply, and raises nothing."""
        self._serve = serve
        self._reply_written = reply_written
        self._mux = Demultiplexer()
        self._server = Server()
        self._client = Client()
        self._between_calls = True
        """Whether the next byte begins a frame and a message."""
        self._keep_interpreter = keep_interpreter()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._reason = ""
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_HIGH)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or self._reason:
            return
        try:
            with self._keep_interpreter:
                request = usual.request(data) if self._between_calls else None
                if request is None:
                    self._receive(transport, data)
                else:
                    self._reply(transport, self._server.request(*request))
        except ProtocolError as error:
            self.close(f"protocol error: {error}")

    def eof_received(self) -> bool:
        cut = " in the middle of a frame" if self._mux.within_frame else ""
        self.close(f"the runtime closed the connection{cut}")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._reason or f"the connection was lost: {exc or 'end of file'}"
        self._reason = reason
        self._transport = None
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ConnectionClosed(reason))
        if not self.closed.done():
            self.closed.set_result(reason)

    def pause_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # ours

    def _receive(self, transport: asyncio.Transport, data: bytes) -> None:
        """Answer what `data` completes. Raises ProtocolError."""
        for connection, piece in self._mux.feed(data):
            if connection == PLUGIN_SERVICE:
                for event in self._server.receive(piece):
                    self._reply(transport, event)
                    if self._reason:
                        return
            elif connection == RUNTIME_SERVICE:
                for reply in self._client.receive(piece):
                    self._settle(reply)
        self._between_calls = not self._mux.within_frame and self._server.between_calls

    @property
    def gathering(self) -> Gathering | None:
        """The runtime's call whose end has not arrived yet."""
        return self._server.gathering

    def close(self, reason: str) -> None:
        """End the trunk; what was answered before is still sent, if the peer takes it soon."""
        if not self._reason:
            self._reason = reason
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(_CLOSE_PATIENCE_S, self.abort, reason)

    def abort(self, reason: str) -> None:
        """End the trunk at once, without sending what is left."""
        if not self._reason:
            self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    async def call(self, service: str, method: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Call the runtime. Raises RpcError (DEADLINE_EXCEEDED when time is up) or
        ConnectionClosed."""
        transport = self._transport
        if transport is None or self._reason:
            raise ConnectionClosed(self._reason or "not connected")
        stream, message = self._client.call(
            service, method, payload, timeout_ns=int(timeout_s * 1e9)
        )
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[stream] = future
        transport.write(frame_message(RUNTIME_SERVICE, message))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise RpcError(
                Code.DEADLINE_EXCEEDED, f"no answer to {method} within {timeout_s:g} s"
            ) from None
        finally:
            self._waiting.pop(stream, None)
            self._client.forget(stream)

    def _reply(self, transport: asyncio.Transport, event: Call | Rejection) -> None:
        """Answer, and only then do what the answer did not need."""
        frames = self._answer(event)
        # uvloop hands it to the kernel before it returns, unless the peer is behind with reading.
        transport.write(frames)
        self._reply_written()

    def _answer(self, event: Call | Rejection) -> bytes:
        """Return the frames of the reply."""
        if isinstance(event, Rejection):
            failure = encode_failure(event.stream, event.code, event.message)
        else:
            try:
                return usual.reply(event.stream, self._serve(event))
            except RpcError as error:
                failure = encode_failure(event.stream, error.code, error.message)
        return frame_message(PLUGIN_SERVICE, failure)

    def _settle(self, reply: Reply) -> None:
        future = self._waiting.get(reply.stream)
        if future is None or future.done():
            return
        if reply.error is not None:
            future.set_exception(reply.error)
        else:
            future.set_result(reply.payload)
