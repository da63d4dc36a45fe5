"""Docker mode put together: connections to dockerd, hooks, store and recovery."""

import asyncio
import logging
import select
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, cast

from runtime_proxy.docker.engine import Engine
from runtime_proxy.docker.http1 import HttpFault, plain_response
from runtime_proxy.docker.intercept import DockerCall, DockerHooks, Release
from runtime_proxy.docker.relay import DockerRelay, Held
from runtime_proxy.hook_registry import HookRegistry, hook_gauges
from runtime_proxy.hooks import Hooks
from runtime_proxy.options import Options
from runtime_proxy.records import Records
from runtime_proxy.recovery import with_retries
from runtime_proxy.status import Figures, Gauge
from runtime_proxy.tasks import spawn

log = logging.getLogger(__name__)

# All chosen. A sweep lists all containers, to find what ended unseen: twice as often costs dockerd
# twice as much, half as often reports such ends up to two minutes late.
_SWEEP_INTERVAL_S = 60.0
_RETRY_S = 0.5
# For after-stages behind the last call. It adds to the time that a stop takes.
_SETTLE_S = 2.0
# A head of the largest size may come before dockerd's socket is connected.
_MAX_EARLY_BYTES = 1024 * 1024
# For each direction of each connection. Chosen as in `runtime_proxy.server`.
_WRITE_BUFFER_BYTES = 1024 * 1024


class DockerAgent:
    """A `backend.Backend` for dockerd."""

    def __init__(self, chosen: Options, figures: Figures) -> None:
        self.chosen = chosen
        self._records = Records(chosen.state_dir)
        self._registry = HookRegistry(chosen, figures)
        self._engine = Engine(
            chosen.backend, self._records.store, self._records.recorded, self._records.reread
        )
        self.hooks = DockerHooks(
            Hooks(
                servers=self._registry.servers,
                store=self._records.store,
                recovery=self._engine,
                skip_label=(chosen.skip_key, chosen.skip_value),
            ),
            self._engine,
        )
        self.connections: set[_Connection] = set()
        self.backend_away = False
        self.draining = False
        self._succeeded = False
        self._all_gone = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._registry.start()
        self._tasks = [spawn("following dockerd", self._follow())]

    async def _follow(self) -> None:
        await with_retries(self._engine.rebuild, retry_s=_RETRY_S)
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            await with_retries(self._sweep, retry_s=_SWEEP_INTERVAL_S)

    async def _sweep(self) -> None:
        self._records.catch_up()
        self.hooks.hooks.vanished(*await self._engine.sweep())
        self.found_again()

    def new_connection(self) -> asyncio.Protocol:
        return _Connection(self)

    def found_again(self) -> None:
        if self.backend_away:
            log.info("dockerd is back", extra={"socket": self.chosen.backend})
        self.backend_away = False

    def forget(self, connection: "_Connection") -> None:
        self.connections.discard(connection)
        if self.draining and not self._keeping_us():
            self._all_gone.set()

    def _keeping_us(self) -> list["_Connection"]:
        """Connections to wait for. With a successor, that includes streams without an end."""
        return [one for one in self.connections if self._succeeded or not one.endless]

    @property
    def gauges(self) -> tuple[Gauge, ...]:
        prefix = "koord_runtime_proxy_"
        return (
            Gauge(f"{prefix}connections", "Open client connections", lambda: len(self.connections)),
            Gauge(
                f"{prefix}runtime_up",
                "1 unless dockerd refused the last connection",
                lambda: float(not self.backend_away),
            ),
            *self._records.gauges(),
            *hook_gauges(self._registry, self.hooks.hooks.skipped),
        )

    def health(self) -> list[str]:
        return [*self._registry.troubles(), *self._records.troubles()]

    def status(self) -> dict[str, object]:
        return {
            "runtime": {
                "socket": self.chosen.backend,
                "up": not self.backend_away,
            },
            "recovered": self._engine.done,
            "hookServers": self._registry.status(),
            "unusableRegistrations": self._registry.complaints,
            **self._records.status(),
        }

    def readiness(self) -> list[str]:
        if self.backend_away:
            return [f"dockerd is away: {self.chosen.backend}"]
        return [] if self._engine.done else ["recovery has not finished"]

    async def drain(self, limit_s: float) -> int:
        self.draining = True
        for connection in list(self.connections):
            connection.close_if_idle()
        if self._keeping_us():
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._all_gone.wait()
        cut = len(self._keeping_us())
        for connection in list(self.connections):
            connection.close()
        await self.hooks.hooks.settle(_SETTLE_S)
        return cut

    def stand_back(self) -> None:
        self._succeeded = True
        for task in self._tasks:
            task.cancel()
        self._records.stand_back()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._registry.close()
        self._records.close()


class _Connection(asyncio.Protocol):
    """A client's side of the pair; `_Upstream` is dockerd's."""

    _client: asyncio.Transport

    def __init__(self, agent: DockerAgent) -> None:
        self._agent = agent
        self._upstream: asyncio.Transport | None = None
        self._relay = DockerRelay(
            wants=agent.hooks.wants, max_body_bytes=agent.chosen.max_message_bytes
        )
        self._early = bytearray()
        self._client_ended = False
        self._server_ended = False
        self._refused = ""
        self._call: DockerCall | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast(asyncio.Transport, transport)
        self._client.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._agent.connections.add(self)
        self._spawn(self._connect())

    async def _connect(self) -> None:
        try:
            await asyncio.get_running_loop().create_unix_connection(
                lambda: _Upstream(self), self._agent.chosen.backend
            )
        except OSError as error:
            if not self._agent.backend_away:
                log.warning("dockerd is away", extra={"socket": self._agent.chosen.backend})
            self._agent.backend_away = True
            self._refused = (
                f"Cannot connect to the Docker daemon at unix://{self._agent.chosen.backend}: "
                f"{(error.strerror or str(error)).lower()}"
            )
            if self._early:
                self._refuse()
            elif self._client_ended:
                self.close()

    def upstream_made(self, transport: asyncio.Transport) -> None:
        if self._closed:
            transport.close()
            return
        self._agent.found_again()
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._upstream = transport
        early, self._early = bytes(self._early), bytearray()
        if early:
            self.data_received(early)
        self._pass_end_on()

    def _refuse(self) -> None:
        """Send the refusal. The client has sent its request: an earlier answer would confuse it."""
        self._answer(503, "Service Unavailable", self._refused)

    def _answer(self, status: int, reason: str, text: str) -> None:
        """Answer in dockerd's place and end the connection."""
        self._client.write(plain_response(status, reason, text))
        self.close()

    def data_received(self, data: bytes) -> None:
        if self._upstream is None:
            self._early += data
            if self._refused:
                self._refuse()
            elif len(self._early) > _MAX_EARLY_BYTES:
                self.close()
            return
        try:
            self._relay.from_client(data)
        except HttpFault as fault:
            log.warning("broken HTTP", extra={"side": "client", "fault": str(fault)})
            self._answer(400, "Bad Request", str(fault))
            return
        self._flush()

    def eof_received(self) -> bool:
        """A client that ends its output (docker attach) still reads the answer."""
        self._client_ended = True
        if self._refused or (self._relay.holds_back and _other_end_closed(self._client)):
            # Nothing is left to answer. What dockerd has got is dockerd's to end.
            self.close()
        self._pass_end_on()
        return not self._server_ended and not self._closed

    def _pass_end_on(self) -> None:
        """End dockerd's input with the client's, behind all requests that it is still to get."""
        upstream = self._upstream
        if not self._client_ended or upstream is None or self._relay.holds_back:
            return
        if not upstream.is_closing():
            upstream.write_eof()

    def upstream_data(self, data: bytes) -> None:
        try:
            self._relay.from_server(data)
        except HttpFault as fault:
            log.warning("broken HTTP", extra={"side": "dockerd", "fault": str(fault)})
            self.close()
            return
        self._flush()
        self.close_if_idle()

    def upstream_ended(self) -> bool:
        """dockerd ends its output; in a pipe the client may still have something to say."""
        self._server_ended = True
        if not self._relay.piped or self._client_ended:
            return False
        if not self._client.is_closing():
            self._client.write_eof()
        return True

    def _flush(self) -> None:
        relay = self._relay
        while relay.to_server or relay.to_client or relay.events:
            if relay.to_server:
                out, relay.to_server = relay.to_server, []
                if self._upstream is not None:
                    self._upstream.write(b"".join(out))
            if relay.to_client:
                out, relay.to_client = relay.to_client, []
                self._client.write(b"".join(out))
            events, relay.events = relay.events, []
            for event in events:
                if isinstance(event, Held):
                    self._call = self._agent.hooks.open(event.head, event.body)
                    self._spawn(self._decide(self._call))
                elif self._call is not None:
                    call, self._call = self._call, None
                    call.answered(event.status, event.body)
        self._pass_end_on()
        if relay.closing:
            self.close()

    async def _decide(self, call: DockerCall) -> None:
        verdict = await call.decide()  # cancelled where the connection ends meanwhile
        if isinstance(verdict, Release):
            self._relay.release(verdict.body)
        else:
            self._relay.refuse(500, "Internal Server Error", verdict.text)
        self._flush()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = spawn("docker connection", work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def pause_writing(self) -> None:
        if self._upstream is not None:
            self._upstream.pause_reading()

    def resume_writing(self) -> None:
        if self._upstream is not None and not self._upstream.is_closing():
            self._upstream.resume_reading()

    def upstream_paused(self) -> None:
        self._client.pause_reading()

    def upstream_resumed(self) -> None:
        if not self._client.is_closing():
            self._client.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close()

    @property
    def endless(self) -> bool:
        return self._relay.endless

    def close_if_idle(self) -> None:
        if self._agent.draining and not self._relay.busy:
            self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._agent.forget(self)
        for task in self._tasks:
            task.cancel()
        for transport in (self._client, self._upstream):
            if transport is not None:
                transport.close()


def _other_end_closed(transport: asyncio.Transport) -> bool:
    """Whether the peer of a Unix socket has closed it, not only ended its output."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket"), 0)  # POLLHUP is reported without being asked
    return bool(poll.poll(0))


class _Upstream(asyncio.Protocol):
    """dockerd's side of the pair."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.upstream_made(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._connection.upstream_data(data)

    def eof_received(self) -> bool:
        return self._connection.upstream_ended()

    def pause_writing(self) -> None:
        self._connection.upstream_paused()

    def resume_writing(self) -> None:
        self._connection.upstream_resumed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.close()
