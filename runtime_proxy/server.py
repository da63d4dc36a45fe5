"""The proxy's front: client connections, each with its own connection to the runtime.

Sockets, back-pressure and life times are here; what the frames mean is `http2.relay`'s business,
what an intercepted call means is its `Interceptor`'s. While the runtime is away a client is held
by `http2.refusal` and sent away the moment the runtime is back.
"""

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

from runtime_proxy.http2.frames import ConnectionFault
from runtime_proxy.http2.grpc import Status
from runtime_proxy.http2.held import Abandoned, Answered, RequestHeld
from runtime_proxy.http2.refusal import Refusal
from runtime_proxy.http2.relay import Relay

log = logging.getLogger(__name__)

# How often an absent runtime is looked for; also how late its return is noticed. Chosen: kubelet
# tries again after a second or later. Half of it: twice the attempts while no runtime runs.
_RETRY_INTERVAL_S = 0.1
# How long a client that was sent away may stay connected. A client that reads closes by itself, in
# milliseconds. Twice the value: the connection of one that does not read stays as much longer.
_LINGER_S = 2.0
# What a client may send before its upstream connection stands: preface, settings, first calls; so
# as much as is held for a connection that stands (below).
_MAX_EARLY_BYTES = 1024 * 1024
# Unsent bytes from which the other side is no longer read. Chosen: above nearly every CRI message,
# so that few calls pause a connection. Twice the value: a reader that stopped keeps 2 MiB each way.
_WRITE_BUFFER_BYTES = 1024 * 1024
# Streams that end with one of their two processes alone: a process that ends waits for others only.
_ENDLESS = frozenset(
    (
        b"/runtime.v1.RuntimeService/GetContainerEvents",
        b"/containerd.services.events.v1.Events/Subscribe",
        b"/grpc.health.v1.Health/Watch",
    )
)


@dataclass(frozen=True, slots=True)
class Forward:
    """Send the request on; `body` (message prefix included) replaces the original one."""

    body: bytes | None = None


Verdict = Forward | Status


class InterceptedCall(Protocol):
    """One held request. Exactly one of `answered` and `abandoned` is called at its end."""

    def decide(self) -> Verdict | Awaitable[Verdict]:
        """Return the verdict on the request; an awaitable where hooks are asked."""

    def answered(self, body: bytes) -> None:
        """The runtime answered; `body` is empty unless it carried a message (success)."""

    def abandoned(self) -> None:
        """The call ended before the runtime's answer."""


class Interceptor(Protocol):
    @property
    def paths(self) -> Collection[bytes]: ...

    def open(self, request: RequestHeld) -> InterceptedCall: ...


@dataclass(slots=True)
class Traffic:
    """What the front counts; `observe` gets each finished call's path and seconds."""

    observe: Callable[[bytes, float], None]
    refused_calls: int = 0
    faults: int = 0


class _State(enum.Enum):
    CONNECTING = enum.auto()
    RELAYING = enum.auto()
    REFUSING = enum.auto()
    CLOSED = enum.auto()


class Front:
    """Accepts clients for one runtime socket. `serve` starts it, `drain` ends it in order."""

    def __init__(
        self,
        *,
        backend: str,
        interceptor: Interceptor,
        max_message_bytes: int,
        traffic: Traffic,
    ) -> None:
        self.backend = backend
        self.interceptor = interceptor
        self.max_message_bytes = max_message_bytes
        self.traffic = traffic
        self.loop = asyncio.get_running_loop()
        self.draining = False
        # A successor serves, and this process can wait: streams without an end go on as well.
        self.succeeded = False
        self.connections: set[_Connection] = set()
        self._all_gone = asyncio.Event()
        self._seeker: asyncio.Task[None] | None = None

    def forget(self, connection: "_Connection") -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()

    def new_connection(self) -> asyncio.Protocol:
        return _Connection(self)

    @property
    def backend_away(self) -> bool:
        return self._seeker is not None

    @property
    def open_calls(self) -> int:
        return sum(c.open_calls for c in self.connections)

    def seek_backend(self) -> None:
        """The runtime did not take a connection: look for it until it does."""
        if self._seeker is None:
            log.warning("runtime is away", extra={"socket": self.backend})
            self._seeker = self.loop.create_task(self._seek())

    async def _seek(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_INTERVAL_S)
            try:
                _, writer = await asyncio.open_unix_connection(self.backend)
            except OSError:
                continue
            writer.close()
            break
        self._seeker = None
        log.info("runtime is back", extra={"socket": self.backend})
        for connection in list(self.connections):
            connection.send_away()

    async def drain(self, limit_s: float) -> int:
        """Let running calls end, for at most `limit_s`; how many were cut off then."""
        self.draining = True
        for connection in list(self.connections):
            connection.send_away()
        self._all_gone.clear()
        if self.connections:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._all_gone.wait()
        cut = self.open_calls
        for connection in list(self.connections):
            connection.close()
        if self._seeker is not None:
            self._seeker.cancel()
        return cut


class _Connection(asyncio.Protocol):
    """A client's side of the pair; `_Upstream` is the runtime's side and forwards to here."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._state = _State.CONNECTING
        self._client: asyncio.Transport | None = None
        self._upstream: asyncio.Transport | None = None
        self._early = bytearray()
        self._relay: Relay | None = None
        self._refusal: Refusal | None = None
        self._calls: dict[int, InterceptedCall] = {}
        self._deciding: dict[int, asyncio.Future[Verdict]] = {}
        self._connecting: asyncio.Task[None] | None = None
        self._leaving = False
        self._parted = False

    @property
    def open_calls(self) -> int:
        return len(self._relay.active) if self._relay is not None else 0

    @property
    def _keeps_us(self) -> bool:
        """Return whether there is a call to wait for."""
        assert self._relay is not None
        paths = {path for path, _ in self._relay.active.values()}
        return bool(paths if self._front.succeeded else paths - _ENDLESS)

    # -- the client -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface without the base class.
        self._client = cast(asyncio.Transport, transport)
        self._client.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._front.connections.add(self)
        self._connecting = self._front.loop.create_task(self._connect())

    async def _connect(self) -> None:
        front = self._front
        try:
            await front.loop.create_unix_connection(lambda: _Upstream(self), front.backend)
        except OSError as error:
            self._refuse(error)

    def upstream_made(self, transport: asyncio.Transport) -> None:
        """The pair stands. The runtime's first frames may arrive with the next event."""
        front = self._front
        if self._state is not _State.CONNECTING:
            transport.close()
            return
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._upstream = transport
        self._relay = Relay(
            intercepted=front.interceptor.paths,
            max_message_bytes=front.max_message_bytes,
            clock=front.loop.time,
            on_finished=front.traffic.observe,
        )
        self._state = _State.RELAYING
        early, self._early = bytes(self._early), bytearray()
        if early:
            self.data_received(early)
        if front.draining:
            self.send_away()

    def _refuse(self, error: OSError) -> None:
        if self._state is not _State.CONNECTING:
            return
        reason = error.strerror or str(error)
        self._refusal = Refusal(
            Status.unavailable(
                f'connection error: desc = "transport: Error while dialing: dial unix '
                f'{self._front.backend}: connect: {reason.lower()}"'
            )
        )
        self._state = _State.REFUSING
        self._front.seek_backend()
        early, self._early = bytes(self._early), bytearray()
        if early:
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        try:
            if self._relay is not None:
                self._relay.from_client(data)
                self._flush()
            elif self._refusal is not None:
                before = self._refusal.refused
                self._refusal.receive(data)
                self._front.traffic.refused_calls += self._refusal.refused - before
                self._write_client(self._refusal.output)
            elif self._state is _State.CONNECTING:
                self._early += data
                if len(self._early) > _MAX_EARLY_BYTES:
                    self.close()
        except ConnectionFault as fault:
            self._fault(fault, "client")

    def pause_writing(self) -> None:
        """The client does not read: the runtime's side is not read either."""
        source = self._client if self._refusal is not None else self._upstream
        if source is not None and not source.is_closing():
            source.pause_reading()

    def resume_writing(self) -> None:
        source = self._client if self._refusal is not None else self._upstream
        if source is not None and not source.is_closing():
            source.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._client = None
        self.close()

    # -- the runtime ------------------------------------------------------------------------------

    def upstream_data(self, data: bytes) -> None:
        relay = self._relay
        if relay is None:
            return
        try:
            relay.from_server(data)
        except ConnectionFault as fault:
            self._fault(fault, "runtime")
            return
        self._flush()

    def upstream_paused(self) -> None:
        if self._client is not None and not self._client.is_closing():
            self._client.pause_reading()

    def upstream_resumed(self) -> None:
        if self._client is not None and not self._client.is_closing():
            self._client.resume_reading()

    def upstream_lost(self) -> None:
        self._upstream = None
        self.close()

    # -- both -------------------------------------------------------------------------------------

    def _flush(self) -> None:
        relay = self._relay
        assert relay is not None
        # Deciding can release more frames at once, hence the loop. What the runtime has done is on
        # record before the client hears of it: a successor may get the client's next call.
        while relay.to_server or relay.to_client or relay.events:
            if relay.events:
                events = relay.events.copy()
                relay.events.clear()
                for event in events:
                    self._handle(relay, event)
            if relay.to_server:
                if self._upstream is not None:
                    self._upstream.write(_joined(relay.to_server))
                relay.to_server.clear()
            if relay.to_client:
                self._write_client(relay.to_client)
                relay.to_client.clear()
        if self._leaving and not self._keeps_us:
            self._part()

    def _write_client(self, chunks: list[bytes]) -> None:
        if self._client is not None and chunks and not self._parted:
            self._client.write(_joined(chunks))
        if self._refusal is not None:
            self._refusal.output = []

    def _handle(self, relay: Relay, event: RequestHeld | Answered | Abandoned) -> None:
        if isinstance(event, RequestHeld):
            call = self._front.interceptor.open(event)
            self._calls[event.stream] = call
            verdict = call.decide()
            if isinstance(verdict, Forward | Status):
                self._apply(relay, event.stream, verdict)
            else:
                # One task and no coroutine around it, which a cancellation might never begin.
                task = asyncio.ensure_future(verdict)
                self._deciding[event.stream] = task
                task.add_done_callback(partial(self._decided, relay, event.stream))
        elif isinstance(event, Answered):
            known = self._calls.pop(event.stream, None)
            if known is not None:
                known.answered(event.body)
        else:
            self._abandon(event.stream)

    def _decided(self, relay: Relay, stream: int, task: asyncio.Future[Verdict]) -> None:
        self._deciding.pop(stream, None)
        if not task.cancelled() and self._state is _State.RELAYING:
            self._apply(relay, stream, task.result())
            self._flush()

    @staticmethod
    def _apply(relay: Relay, stream: int, verdict: Verdict) -> None:
        if isinstance(verdict, Forward):
            relay.release(stream, verdict.body)
        else:
            relay.reject(stream, verdict)

    def _abandon(self, stream: int) -> None:
        task = self._deciding.pop(stream, None)
        if task is not None:
            task.cancel()
        call = self._calls.pop(stream, None)
        if call is not None:
            call.abandoned()

    def _fault(self, fault: ConnectionFault, side: str) -> None:
        self._front.traffic.faults += 1
        log.warning("broken HTTP/2", extra={"side": side, "fault": str(fault)})
        if self._relay is not None:
            self._write_client([self._relay.fault_goodbye(fault)])
        self.close()

    def send_away(self) -> None:
        """Ask the client to go on elsewhere: behind us, or on a connection to the runtime."""
        if self._refusal is not None:
            self._refusal.leave()
            self._write_client(self._refusal.output)
            self._part()
        elif self._relay is not None and self._front.draining:
            self._leaving = True
            self._relay.drain()
            self._flush()

    def _part(self) -> None:
        """Send nothing more, and read on until the client goes.

        It may have begun a call before it saw our GOAWAY. If that met a closed socket, the client
        could not know that it was not processed, and would fail it instead of trying elsewhere.
        """
        if self._parted or self._client is None or self._client.is_closing():
            return
        self._parted = True
        self._client.write_eof()
        self._front.loop.call_later(_LINGER_S, self.close)

    def close(self) -> None:
        """End both sides; what was written to them is still delivered."""
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._front.forget(self)
        if self._connecting is not None:
            self._connecting.cancel()
        for stream in list(self._calls):
            self._abandon(stream)
        for transport in (self._client, self._upstream):
            if transport is not None:
                transport.close()


def _joined(chunks: list[bytes]) -> bytes:
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class _Upstream(asyncio.Protocol):
    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.data_received = connection.upstream_data  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.upstream_made(cast(asyncio.Transport, transport))

    def pause_writing(self) -> None:
        self._connection.upstream_paused()

    def resume_writing(self) -> None:
        self._connection.upstream_resumed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.upstream_lost()
