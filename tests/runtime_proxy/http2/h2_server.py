"""A gRPC server on h2 that replies as a test says, right or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import h2.config
import h2.connection
import h2.events

from runtime_proxy.http2.grpc import add_prefix

OK = [("grpc-status", "0")]


@dataclass(frozen=True, slots=True)
class Reply:
    """messages: framed as gRPC does. raw: octets behind them. trailers: None for none.

    ends: whether the stream ends. pause_before_end: keep the last octet back until `go_on` is set.
    """

    messages: list[bytes] = field(default_factory=list)
    raw: bytes = b""
    trailers: list[tuple[str, str]] | None = field(default_factory=lambda: OK)
    ends: bool = True
    pause_before_end: bool = False

    @property
    def octets(self) -> bytes:
        return b"".join(map(add_prefix, self.messages)) + self.raw


class H2Server:
    """An async context manager. `requests` are the paths and messages of whole calls.

    reply: what each call gets, or a function from its path and message to that.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.reply: Reply | Callable[[str, bytes], Reply] = Reply()
        self.requests: list[tuple[str, bytes]] = []
        self.accepted = 0
        self.resets: list[int] = []
        """HTTP/2 codes that the next calls are reset with, in the place of a reply."""
        self.cancelled = 0
        """How many calls clients have reset."""
        self.replied = 0
        """How many replies were sent whole."""
        self.go_on = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> H2Server:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut_off()

    @property
    def open_connections(self) -> int:
        return sum(not task.done() for task in self._tasks)

    async def cut_off(self) -> None:
        """End all connections; further ones are taken."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection(self, writer)
        try:
            with suppress(ConnectionError):
                while data := await reader.read(65_536):
                    connection.receive(data)
        finally:
            connection.stop()
            writer.close()


class _Connection:
    def __init__(self, server: H2Server, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._writer = writer
        self._machine = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self._machine.initiate_connection()
        self._paths: dict[int, str] = {}
        self._bodies: dict[int, bytes] = {}
        self._replies: dict[int, asyncio.Task[None]] = {}
        self._moved = asyncio.Event()
        self._flush()

    def _flush(self) -> None:
        self._writer.write(self._machine.data_to_send())

    def receive(self, data: bytes) -> None:
        for event in self._machine.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                headers = {bytes(name): bytes(value) for name, value in event.headers}
                self._paths[event.stream_id] = headers[b":path"].decode()
                self._bodies[event.stream_id] = b""
            elif isinstance(event, h2.events.DataReceived):
                self._bodies[event.stream_id] += event.data
            elif isinstance(event, h2.events.StreamEnded):
                stream = event.stream_id
                self._server.requests.append((self._paths[stream], self._bodies[stream][5:]))
                if self._server.resets:
                    self._machine.reset_stream(stream, self._server.resets.pop(0))
                    continue
                reply = self._server.reply
                if not isinstance(reply, Reply):
                    reply = reply(self._paths[stream], self._bodies[stream][5:])
                self._replies[stream] = asyncio.create_task(self._reply(stream, reply))
            elif isinstance(event, h2.events.StreamReset):
                self._server.cancelled += 1
                self._replies.pop(event.stream_id).cancel()
            elif isinstance(event, h2.events.WindowUpdated):
                self._moved.set()
        self._flush()

    async def _reply(self, stream: int, reply: Reply) -> None:
        self._machine.send_headers(stream, [(":status", "200")])
        octets = reply.octets
        if reply.pause_before_end:
            await self._send(stream, octets[:-1])
            octets = octets[-1:]
            await self._server.go_on.wait()
        await self._send(stream, octets)
        if not reply.ends:
            self._flush()
            return
        if reply.trailers is None:
            self._machine.end_stream(stream)
        else:
            self._machine.send_headers(stream, reply.trailers, end_stream=True)
        self._server.replied += 1
        self._flush()

    async def _send(self, stream: int, octets: bytes) -> None:
        while octets:
            size = min(
                self._machine.local_flow_control_window(stream),
                self._machine.max_outbound_frame_size,
                len(octets),
            )
            if size == 0:
                self._moved.clear()
                await self._moved.wait()
                continue
            self._machine.send_data(stream, octets[:size])
            octets = octets[size:]
            self._flush()
            await asyncio.sleep(0)

    def stop(self) -> None:
        for task in self._replies.values():
            task.cancel()
