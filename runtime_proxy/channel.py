"""A gRPC channel over one unix socket: `http2.client` with sockets and waiting around it.

What this is instead of grpcio: the same unary calls without its threads and a third of the
process's memory. A channel has at most one connection, which a caller opens when it needs one.
"""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import cast

from runtime_proxy.http2.client import ClientConnection, Ended, Message, Ponged
from runtime_proxy.http2.frames import ConnectionFault
from runtime_proxy.http2.grpc import Code, Status

# Unread messages of one stream until it is cancelled. Chosen: above the events of a node whose
# containers all end and start again at once; a reader that is further behind compares the lists.
# Twice the value: a reader that hangs keeps twice as many, of some KB each.
_STREAM_BACKLOG = 4096


class RpcError(Exception):
    """A call that failed. `processed` is False where the server surely never saw it."""

    def __init__(self, status: Status, *, processed: bool = True) -> None:
        super().__init__(str(status))
        self.status = status
        self.processed = processed


class NotConnected(RpcError):
    """There is no connection to call on."""

    def __init__(self, reason: str) -> None:
        super().__init__(Status.unavailable(reason), processed=False)


class _Wire(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, max_message_bytes: int) -> None:
        self.machine = ClientConnection(max_message_bytes=max_message_bytes)
        self.unary: dict[int, tuple[asyncio.Future[bytes], list[bytes]]] = {}
        self.streams: dict[int, asyncio.Queue[bytes | Status]] = {}
        self.pongs: dict[bytes, asyncio.Future[None]] = {}
        self.lost_reason = ""
        self.retired = False

    @property
    def open(self) -> bool:
        return not self.lost_reason and not self.retired

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.flush()

    def data_received(self, data: bytes) -> None:
        try:
            self.machine.receive(data)
        except ConnectionFault as fault:
            self._lose(f"the server broke the protocol: {fault}")
            self.transport.abort()
            return
        self.flush()
        if self.machine.leaving:
            self.retire()

    def retire(self) -> None:
        """No more calls begin here; the connection ends with the last of those under way."""
        self.retired = True
        if not self.machine.open_calls:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("the server closed the connection" if exc is None else _reason(exc))

    def _lose(self, reason: str) -> None:
        if self.lost_reason:
            return
        self.lost_reason = reason
        self.machine.lost(reason)
        self._dispatch()
        for pong in self.pongs.values():
            if not pong.done():
                pong.set_exception(NotConnected(reason))

    def flush(self) -> None:
        if self.machine.output:
            self.transport.write(b"".join(self.machine.output))
        self.machine.output = []
        self._dispatch()

    def _dispatch(self) -> None:
        events, self.machine.events = self.machine.events, []
        for event in events:
            if isinstance(event, Message):
                if event.stream in self.unary:
                    self._answered(event.stream, event.body)
                elif event.stream in self.streams:
                    self._push(event.stream, event.body)
            elif isinstance(event, Ended):
                self._ended(event)
            elif isinstance(event, Ponged):
                pong = self.pongs.pop(event.payload, None)
                if pong is not None and not pong.done():
                    pong.set_result(None)

    def _answered(self, stream: int, body: bytes) -> None:
        """Keep the one message of a unary answer; a second one ends the call."""
        messages = self.unary[stream][1]
        if messages:
            self.machine.cancel(stream)
            self._ended(Ended(stream, Status(Code.INTERNAL, "the answer has several messages")))
            self.flush()
        else:
            messages.append(body)

    def _push(self, stream: int, item: bytes) -> None:
        queue = self.streams[stream]
        if queue.qsize() >= _STREAM_BACKLOG:
            self.machine.cancel(stream)
            self._ended(Ended(stream, Status.resource_exhausted("events come too fast")))
            self.flush()
        else:
            queue.put_nowait(item)

    def _ended(self, event: Ended) -> None:
        queue = self.streams.pop(event.stream, None)
        if queue is not None:
            queue.put_nowait(event.status)
        waiting = self.unary.pop(event.stream, None)
        if waiting is None or waiting[0].done():
            return
        future, messages = waiting
        if event.status.code == 0 and len(messages) == 1:
            future.set_result(messages[0])
        elif event.status.code == 0:
            future.set_exception(RpcError(Status(Code.INTERNAL, "the answer has no message")))
        else:
            future.set_exception(RpcError(event.status, processed=event.processed))


def _reason(error: Exception) -> str:
    """Return the system's words for an error, without its number."""
    return getattr(error, "strerror", None) or str(error)


async def _until_status(queue: asyncio.Queue[bytes | Status]) -> AsyncIterator[bytes]:
    """Yield messages up to the call's status. Raises RpcError if that is not OK."""
    while True:
        item = await queue.get()
        if isinstance(item, Status):
            if item.code:
                raise RpcError(item)
            return
        yield item


class Channel:
    """Calls to one server. Not connected until `connect`; calls on a lost connection fail."""

    def __init__(self, path: str, *, max_message_bytes: int, owned_by_root: bool = False) -> None:
        self.path = path
        self._max_message_bytes = max_message_bytes
        self._owned_by_root = owned_by_root
        self._wire: _Wire | None = None
        self._connecting = asyncio.Lock()
        self._retired = False
        self._pings = 0

    @property
    def connected(self) -> bool:
        wire = self._wire
        return wire is not None and wire.open and wire.machine.usable

    async def connect(self, timeout_s: float) -> None:
        """Make sure of a connection whose server has answered a ping.

        Raises NotConnected with the reason.
        """
        try:
            async with asyncio.timeout(timeout_s), self._connecting:
                if not self.connected:
                    await self._connect()
        except TimeoutError as error:
            raise NotConnected(f"no sign of life within {timeout_s:g} s") from error
        except OSError as error:
            raise NotConnected(_reason(error)) from error

    async def _connect(self) -> None:
        """Open a connection. Calls under way on an older one end there."""
        if self._retired:
            raise NotConnected("no longer in use")
        if self._wire is not None:
            self._wire.retire()
        self._check_owner()
        loop = asyncio.get_running_loop()
        _, wire = await loop.create_unix_connection(
            lambda: _Wire(self._max_message_bytes), self.path
        )
        try:
            await self._ping(wire)
        except BaseException:
            wire.retire()
            raise
        if self._retired:
            wire.retire()
            raise NotConnected("no longer in use")
        self._wire = wire

    def _check_owner(self) -> None:
        """Refuse a socket of another user: its owner could change every container of the node."""
        if not self._owned_by_root:
            return
        status = os.stat(self.path)
        if not stat.S_ISSOCK(status.st_mode):
            raise NotConnected("not a socket")
        if status.st_uid not in (0, os.geteuid()):
            raise NotConnected(f"belongs to user {status.st_uid}, must be root's")

    async def _ping(self, wire: _Wire) -> None:
        self._pings += 1
        payload = self._pings.to_bytes(8, "big")
        pong: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wire.pongs[payload] = pong
        wire.machine.ping(payload)
        wire.flush()
        if wire.lost_reason:
            raise NotConnected(wire.lost_reason)
        try:
            await pong
        finally:
            wire.pongs.pop(payload, None)

    async def ping(self, timeout_s: float) -> None:
        """Raises NotConnected if the server does not answer in time."""
        wire = self._wire
        if wire is None or not wire.open:
            raise NotConnected("not connected")
        try:
            async with asyncio.timeout(timeout_s):
                await self._ping(wire)
        except TimeoutError as error:
            raise NotConnected(f"no sign of life within {timeout_s:g} s") from error

    async def unary(self, method: bytes, request: bytes, *, timeout_s: float) -> bytes:
        """One call. Raises RpcError, or TimeoutError after `timeout_s`, having cancelled it."""
        wire = self._wire
        if wire is None or not self.connected:
            raise NotConnected("not connected")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        stream = wire.machine.call(method, request, timeout_s=timeout_s)
        wire.unary[stream] = (future, [])
        wire.flush()
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            # Still there only if we gave up on it.
            if wire.unary.pop(stream, None) is not None:
                wire.machine.cancel(stream)
                wire.flush()
            if wire.retired:
                wire.retire()

    @contextmanager
    def messages(self, method: bytes, request: bytes) -> Iterator[AsyncIterator[bytes]]:
        """Make a server-streaming call without a deadline, and yield its messages.

        The request is sent at once: the server gets it before those of later calls. The messages
        end with RpcError unless the call ends with OK. Leaving the context cancels the call.
        """
        wire = self._wire
        if wire is None or not self.connected:
            raise NotConnected("not connected")
        queue: asyncio.Queue[bytes | Status] = asyncio.Queue()
        stream = wire.machine.call(method, request, timeout_s=None)
        wire.streams[stream] = queue
        wire.flush()
        try:
            yield _until_status(queue)
        finally:
            if wire.streams.pop(stream, None) is not None:
                wire.machine.cancel(stream)
                wire.flush()
            if wire.retired:
                wire.retire()

    def retire(self) -> None:
        """Begin no more calls; the connection ends with those under way."""
        self._retired = True
        if self._wire is not None:
            self._wire.retire()

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.transport.close()
