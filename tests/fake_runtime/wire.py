"""The runtime's end of a trunk, reading the way the Go implementation reads.

Written apart from the product's codec on purpose: a mistake made twice would not be found. The two
ways in which a Go peer loses a frame are here: a frame above what its reader happens to offer (it
fails with ENOMEM), and a queue of 256 frames per connection.
Source: docs/facts/nri.md, "Multiplexer".
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence

from protos.ttrpc import ttrpc_pb2 as ttrpc

PLUGIN_ID = 1
RUNTIME_ID = 2
GO_BUFFER = 4096
GO_QUEUE = 256
MAX_MESSAGE = 4194304


class Broken(Exception):
    """The trunk is of no use any more; the text is what Go would say."""


class CallFailed(Exception):
    """A plugin answered with a status."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text
        super().__init__(f"{code}: {text}")


def frame(connection: int, payload: bytes) -> bytes:
    return struct.pack(">II", connection, len(payload)) + payload


def frames(connection: int, message: bytes) -> bytes:
    """Go's write pattern: 4096 bytes, then everything else at once."""
    if len(message) <= GO_BUFFER:
        return frame(connection, message)
    return frame(connection, message[:GO_BUFFER]) + frame(connection, message[GO_BUFFER:])


def request_message(
    stream: int,
    service: str,
    method: str,
    payload: bytes,
    timeout_ns: int,
    metadata: Sequence[tuple[str, str]] = (),
) -> bytes:
    body = ttrpc.Request(service=service, method=method, payload=payload, timeout_nano=timeout_ns)
    for key, value in metadata:
        body.metadata.add(key=key, value=value)
    encoded = body.SerializeToString()
    return struct.pack(">IIBB", len(encoded), stream, 1, 0) + encoded


def response_message(stream: int, payload: bytes, code: int = 0, text: str = "") -> bytes:
    body = ttrpc.Response()
    if code:
        body.status.code = code
        body.status.message = text
    else:
        body.payload = payload
    encoded = body.SerializeToString()
    return struct.pack(">IIBB", len(encoded), stream, 2, 0) + encoded


class GoReader:
    """A logical connection read through Go's 4096-byte buffered reader, frame by frame."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._buffered = b""
        self._arrived = asyncio.Event()
        self._ended = False
        self.largest_header_frame = 0

    def push(self, payload: bytes) -> None:
        """A frame arrived; Broken when nobody took the 256 before it."""
        if len(self._frames) >= GO_QUEUE:
            raise Broken("failed to queue payload for reading")
        self._frames.append(payload)
        self._arrived.set()

    def end(self) -> None:
        self._ended = True
        self._arrived.set()

    async def message(self) -> tuple[int, int, int, bytes]:
        """Return (stream, type, flags, body) of the next ttRPC message."""
        header = await self._full(10)
        length, stream, kind, flags = struct.unpack(">IIBB", header)
        if length > MAX_MESSAGE:
            raise Broken(
                "failed to discard after receiving oversized message: cannot allocate memory"
            )
        return stream, kind, flags, await self._full(length)

    async def _full(self, wanted: int) -> bytes:
        taken = b""
        while len(taken) < wanted:
            missing = wanted - len(taken)
            if self._buffered:
                taken += self._buffered[:missing]
                self._buffered = self._buffered[missing:]
            elif missing >= GO_BUFFER:
                taken += await self._frame_into(missing)
            else:
                self._buffered = await self._frame_into(GO_BUFFER)
        return taken

    async def _frame_into(self, room: int) -> bytes:
        while not self._frames:
            if self._ended:
                raise Broken("ttrpc: closed")
            self._arrived.clear()
            await self._arrived.wait()
        payload = self._frames.popleft()
        if len(payload) > room:
            raise Broken("cannot allocate memory")
        return payload


class Trunk:
    """One plugin's connection, from the runtime's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._connections = {PLUGIN_ID: GoReader(), RUNTIME_ID: GoReader()}
        self._next_stream = 1
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.requests: asyncio.Queue[tuple[int, ttrpc.Request]] = asyncio.Queue()
        self.broken = ""
        self.metadata: Sequence[tuple[str, str]] = ()
        self.noise = b""  # written before each message
        self.dribble = False  # write byte by byte
        self.largest_frame = 0  # see profiles

    def start(self) -> None:
        """Begin to read; until then what the plugin sends waits in the socket."""
        self._tasks = [
            asyncio.ensure_future(self._read_trunk()),
            asyncio.ensure_future(self._read_responses()),
            asyncio.ensure_future(self._read_requests()),
        ]

    @property
    def closed(self) -> bool:
        return bool(self.broken)

    def close(self, reason: str = "closed by the runtime") -> None:
        if not self.broken:
            self.broken = reason
        self._writer.close()
        for connection in self._connections.values():
            connection.end()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Broken(reason))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def write_raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def write(self, connection: int, message: bytes) -> None:
        if self.largest_frame and len(message) - GO_BUFFER > self.largest_frame:
            self._writer.write(frame(connection, message[:GO_BUFFER]))
            raise Broken("message too long")
        data = self.noise + frames(connection, message)
        if not self.dribble:
            self._writer.write(data)
            return
        for at in range(len(data)):
            self._writer.write(data[at : at + 1])
            if at % 7 == 0:
                await asyncio.sleep(0)

    async def call(self, method: str, payload: bytes, timeout_s: float) -> bytes:
        """Call the plugin. Raises CallFailed, Broken, or TimeoutError at the local deadline."""
        if self.broken:
            raise Broken(self.broken)
        stream = self._next_stream
        self._next_stream += 2
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._pending[stream] = future
        await self.write(
            PLUGIN_ID,
            request_message(
                stream,
                "nri.pkg.api.v1alpha1.Plugin",
                method,
                payload,
                int(timeout_s * 1e9),
                self.metadata,
            ),
        )
        try:
            return await asyncio.wait_for(future, timeout_s)
        finally:
            self._pending.pop(stream, None)

    async def respond(self, stream: int, payload: bytes, code: int = 0, text: str = "") -> None:
        await self.write(RUNTIME_ID, response_message(stream, payload, code, text))

    async def _read_trunk(self) -> None:
        try:
            while True:
                connection, length = struct.unpack(">II", await self._reader.readexactly(8))
                payload = await self._reader.readexactly(length)
                if connection in self._connections and payload:
                    self._connections[connection].push(payload)
        except Broken as error:
            self.close(str(error))
        except (asyncio.IncompleteReadError, OSError):
            self.close("the plugin closed the connection")

    async def _read_responses(self) -> None:
        try:
            while True:
                stream, _, _, body = await self._connections[PLUGIN_ID].message()
                response = ttrpc.Response.FromString(body)
                future = self._pending.get(stream)
                if future is None or future.done():
                    continue
                if response.status.code:
                    status = response.status
                    future.set_exception(CallFailed(status.code, status.message))
                else:
                    future.set_result(response.payload)
        except Broken as error:
            self.close(str(error))

    async def _read_requests(self) -> None:
        try:
            while True:
                stream, _, _, body = await self._connections[RUNTIME_ID].message()
                self.requests.put_nowait((stream, ttrpc.Request.FromString(body)))
        except Broken as error:
            self.close(str(error))
