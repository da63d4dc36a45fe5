"""Calls hook servers, each within its time limit and behind its circuit breaker.

Upstream's proxy asks the first server that it finds for a stage, without a time limit, and looks
for a lost server every few seconds. Here all servers of a stage are asked in the order of the file
names, each one seeing what the ones before it changed; a call has a time limit; and a server that
was lost gets the first call after its return.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from runtime_proxy.breaker import Breaker, State
from runtime_proxy.channel import Channel, NotConnected, RpcError
from runtime_proxy.http2.grpc import Code
from runtime_proxy.registration import Registration
from runtime_proxy.stages import Stage
from runtime_proxy.tasks import spawn

log = logging.getLogger(__name__)

# grpc-go's default limit of a received message, which upstream's proxy has.
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
# An answer that took more than this share of the time limit is slow. Half of the default limit of
# 2 s is a hundred times what koordlet needs.
_SLOW_SHARE = 0.5
# How long a server may take to answer a ping. Chosen: half of a call's default limit; a server that
# is slower would fail calls. Twice the value: one that hangs is looked for half as often.
_PROBE_TIMEOUT_S = 1.0
# Before the first and between later probes of a lost server; doubled in between. Chosen: a restart
# of a hook server takes some tenths of a second, and a refused connection microseconds. Twice the
# values: a server that is back stays unused for up to 1.6 s, unless a call asks for a probe.
_FIRST_PROBE_DELAY_S = 0.1
_LONGEST_PROBE_DELAY_S = 0.8
# How long a call waits for the probe of a server that was lost. The socket of a dead server refuses
# the probe at once; one that is back answers within milliseconds, on a busy machine later. Twice
# the value: calls wait longer for a server whose socket accepts connections and that hangs, of each
# probe's second at most this part.
_PROBE_PATIENCE_S = 0.5


class HookError(Exception):
    """A hook call gave no answer. The text reaches the caller of the CRI under policy Fail."""


class GivenUp(HookError):
    """The server was not asked: its breaker is open, which has been logged."""


@dataclass(slots=True)
class HookCounts:
    """Calls by (server, stage, outcome) and their seconds by (server, stage)."""

    observe: Callable[[str, Stage, str, float], None]


class HookServer:
    """One registered server. `close` lets its calls end, and ends its connection with them."""

    def __init__(self, registration: Registration, *, timeout_s: float, counts: HookCounts) -> None:
        self.registration = registration
        self.breaker = Breaker()
        self._timeout_s = timeout_s
        self._counts = counts
        self._channel = Channel(
            registration.endpoint, max_message_bytes=_MAX_ANSWER_BYTES, owned_by_root=True
        )
        self._tripped = asyncio.Event()
        self._unserved: set[Stage] = set()
        self._probe: asyncio.Task[None] | None = None
        self._probe_wanted = asyncio.Event()
        self._probed = asyncio.Event()
        self._probing_since: float | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self.registration.name

    def serves(self, stage: Stage) -> bool:
        return stage in self.registration.stages and stage not in self._unserved

    async def call(self, stage: Stage, request: bytes, *, budget_s: float | None) -> bytes | None:
        """Return the server's serialised answer; None if it does not serve a stage of ours.

        budget_s: what the caller can spare, if less than the server's own limit. Raises HookError.
        """
        began = time.monotonic()
        outcome = "error"
        try:
            answer = await self._call(stage, request, budget_s)
            outcome = "ok"
            return answer
        except RpcError as error:
            if error.status.code == Code.UNIMPLEMENTED and stage.is_addition:
                outcome = "unserved"
                self._unserved.add(stage)
                log.info(
                    "hook server lists a stage that it does not serve",
                    extra={"server": self.name, "stage": stage.value},
                )
                return None
            raise HookError(
                f"{self.registration.endpoint}: {error.status.message or error}"
            ) from error
        except _Refused as error:
            outcome = "refused"
            raise GivenUp(str(error)) from error
        except TimeoutError as error:
            outcome = "timeout"
            raise HookError(
                f"{self.registration.endpoint}: no answer to {stage.value} in time"
            ) from error
        finally:
            self._counts.observe(self.name, stage, outcome, time.monotonic() - began)

    async def _call(self, stage: Stage, request: bytes, budget_s: float | None) -> bytes:
        breaker = self.breaker
        if breaker.lost:
            await self._probe_now(budget_s)
        if not breaker.admit():
            raise _Refused(f"{self.registration.endpoint}: {breaker.reason}")
        own_limit = budget_s is None or budget_s >= self._timeout_s
        limit_s = self._timeout_s if budget_s is None or own_limit else budget_s
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + limit_s
        retried = False
        while True:
            work = loop.create_task(self._once(stage, request, deadline))
            trip = loop.create_task(self._tripped.wait())
            try:
                await asyncio.wait({work, trip}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    # Another call has found out that there will be no answer.
                    raise _Refused(f"{self.registration.endpoint}: {breaker.reason}")
                answer = work.result()
            except RpcError as error:
                if error.status.code != Code.UNAVAILABLE:
                    self._answered(loop.time() - began)
                    raise
                if not isinstance(error, NotConnected) and not error.processed and not retried:
                    retried = True
                    continue
                # The probe finds out whether the server is gone or has only closed this connection.
                self._trip(partial(breaker.unreachable, str(error.status.message)))
                raise
            except TimeoutError:
                if own_limit:
                    reason = f"no answer within {self._timeout_s:g} s"
                    self._trip(partial(breaker.timed_out, reason, loop.time()))
                else:
                    breaker.abandoned()
                raise
            except BaseException:
                # Cancelled, or a fault of ours: a trial that is never ended would be the last one.
                breaker.abandoned()
                raise
            finally:
                work.cancel()
                trip.cancel()
            self._answered(loop.time() - began)
            return answer

    def _answered(self, seconds: float) -> None:
        """Note an answer, or the server's own error, after so many seconds.

        Under failure policy Fail a slow answer is better than none.
        """
        if seconds <= self._timeout_s * _SLOW_SHARE or self.registration.fail:
            self.breaker.succeeded()
        else:
            reason = f"answers take more than {self._timeout_s * _SLOW_SHARE:g} s"
            now = asyncio.get_running_loop().time()
            was = self.breaker.state
            self.breaker.answered_slowly(reason, now)
            if self.breaker.state is State.OPEN:
                self._tripped_from(was)

    async def _once(self, stage: Stage, request: bytes, deadline: float) -> bytes:
        loop = asyncio.get_running_loop()
        if not self._channel.connected:
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise TimeoutError
            try:
                await self._channel.connect(left_s)
            except NotConnected:
                if loop.time() >= deadline:
                    raise TimeoutError from None
                raise
        left_s = deadline - loop.time()
        if left_s <= 0:
            raise TimeoutError
        return await self._channel.unary(stage.method, request, timeout_s=left_s)

    def _trip(self, how: Callable[[], None]) -> None:
        was = self.breaker.state
        how()
        self._tripped_from(was)

    def _tripped_from(self, was: State) -> None:
        """Let all calls under way fail, and look for a sign of life."""
        if was is not State.OPEN:
            log.warning(
                "hook server is given up for now",
                extra={"server": self.name, "reason": self.breaker.reason},
            )
        self._tripped.set()
        if self._probe is None and not self._closed:
            self._probe = spawn("looking for a hook server", self._search())

    async def _search(self) -> None:
        """Look for a sign of life until calls may go to the server again."""
        delay_s = _FIRST_PROBE_DELAY_S
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay_s):
                        await self._probe_wanted.wait()
                delay_s = min(2 * delay_s, _LONGEST_PROBE_DELAY_S)
                if await self._try_probe():
                    return
        finally:
            self._probe = None

    async def _try_probe(self) -> bool:
        """Look for a sign of life once; return whether calls may go to the server again."""
        loop = asyncio.get_running_loop()
        self._probe_wanted.clear()
        self._probed.clear()
        self._probing_since = loop.time()
        try:
            if self._channel.connected:
                await self._channel.ping(_PROBE_TIMEOUT_S)
            else:
                await self._channel.connect(_PROBE_TIMEOUT_S)
        except NotConnected:
            self._channel.close()
            return False
        else:
            if not self.breaker.alive(loop.time()):
                return False
            self._tripped.clear()
            log.info(
                "hook server is back",
                extra={"server": self.name, "state": self.breaker.state.value},
            )
            return True
        finally:
            self._probing_since = None
            self._probed.set()

    async def _probe_now(self, budget_s: float | None) -> None:
        """Have the server looked for at once, and wait a moment for the result.

        It may be back, and a pod that is created now would be without its hooks for good.
        """
        if self._probe is None:
            return
        if self._probing_since is None:
            self._probed.clear()
            self._probe_wanted.set()
            left_s = _PROBE_PATIENCE_S
        else:
            probing_s = asyncio.get_running_loop().time() - self._probing_since
            left_s = _PROBE_PATIENCE_S - probing_s
        left_s = left_s if budget_s is None else min(left_s, budget_s)
        if left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._probed.wait()

    def close(self) -> None:
        self._closed = True
        if self._probe is not None:
            self._probe.cancel()
        self._channel.retire()


class _Refused(Exception):
    """The breaker is open."""


class HookServers:
    """The servers in force. `apply` brings them in line with the registrations."""

    def __init__(self, *, timeout_s: float, counts: HookCounts) -> None:
        self._timeout_s = timeout_s
        self._counts = counts
        self._servers: dict[str, HookServer] = {}
        self._by_stage: dict[Stage, tuple[HookServer, ...]] = {}

    @property
    def all(self) -> tuple[HookServer, ...]:
        return tuple(self._servers[name] for name in sorted(self._servers))

    def apply(self, registrations: Iterable[Registration]) -> None:
        """Make servers of registrations. An unchanged one keeps its connection and breaker."""
        wanted = {registration.name: registration for registration in registrations}
        for name in list(self._servers):
            if wanted.get(name) != self._servers[name].registration:
                self._servers.pop(name).close()
                if name not in wanted:
                    log.info("hook server is gone", extra={"server": name})
        for name, registration in wanted.items():
            if name not in self._servers:
                self._servers[name] = HookServer(
                    registration, timeout_s=self._timeout_s, counts=self._counts
                )
                log.info(
                    "hook server is registered",
                    extra={
                        "server": name,
                        "socket": registration.endpoint,
                        "policy": "Fail" if registration.fail else "Ignore",
                        "stages": sorted(s.value for s in registration.stages),
                    },
                )
        self._by_stage = {
            stage: tuple(s for s in self.all if stage in s.registration.stages) for stage in Stage
        }

    def serving(self, stage: Stage) -> tuple[HookServer, ...]:
        servers = self._by_stage.get(stage, ())
        return tuple(server for server in servers if server.serves(stage)) if servers else ()

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        self._by_stage.clear()
