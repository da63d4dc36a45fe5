"""Keeps the daemon registered with the runtime, over one connection at a time.

One task dials, registers, waits for the end, and dials again; nothing else reconnects. While it
holds a connection it holds the node's lock, so a second daemon cannot register beside it. A session
whose trunk ended is retired before the next dial.

Reconnecting is not free: on containerd since 1.7.26 a registration waits until no CRI call runs,
and holds new ones back. So the back-off grows, and Synchronize is awaited without a limit.
Source: docs/facts/nri.md, "Registration".
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import socket
import stat
from collections.abc import Callable

import msgspec

from nri_plugin.capabilities import RuntimeProfile
from nri_plugin.connection import Connection, ConnectionClosed
from nri_plugin.handler import Handler
from nri_plugin.options import Launch, Options
from nri_plugin.session import NRI_VERSION, RUNTIME, Inventory, Session
from nri_plugin.statistics import State, Statistics
from nri_plugin.ttrpc import Gathering, RpcError
from protos.nri.v1alpha1 import nri_pb2 as nri
from service.files import UNWRITABLE
from service.locks import LockHeld, node_lock, runtime_lock
from service.repeats import Repeats

log = logging.getLogger(__name__)

LOCK_FILE = "nri.lock"


class Status(msgspec.Struct, frozen=True):
    """What `koordctl status` and readiness show.

    generation: counts the dials; each has its own session.
    runtime: what the present connection's runtime is, None before Configure.
    problem: why there is no connection, in words; "" while one is up.
    in_state_s: since when the state has been what it is.
    """

    state: State
    generation: int
    runtime: RuntimeProfile | None
    problem: str
    in_state_s: float

    @property
    def protects(self) -> bool:
        """True while new containers are adjusted."""
        return self.state is State.SYNCED


class Supervisor:
    """Owns the node's one NRI connection. Run `run` as a task; cancel it, or `stop`, to end.

    launch: given when the runtime started this process; then there is one connection, and `run`
        returns when it ends.
    """

    def __init__(
        self,
        options: Options,
        handler: Handler,
        *,
        statistics: Statistics | None = None,
        launch: Launch | None = None,
    ) -> None:
        self._options = options.checked()
        self._handler = handler
        self._launch = launch
        self._inventory = Inventory()
        self.statistics = statistics or Statistics()
        self._generation = 0
        self._problem = "not started"
        self._connection: Connection | None = None
        self._session: Session | None = None
        self._unlisted = False
        """The last connection was configured, and no list came on it."""
        self._repeats = Repeats()
        self._stopping = asyncio.Event()
        self._configured = asyncio.Event()
        self._synced = asyncio.Event()

    @property
    def status(self) -> Status:
        """The present state."""
        return Status(
            state=self.statistics.state,
            generation=self._generation,
            runtime=self._session.runtime if self._session else None,
            problem=self._problem,
            in_state_s=self.statistics.in_state_s,
        )

    async def wait_synced(self) -> None:
        """Return when a connection is synchronized."""
        await self._synced.wait()

    def stop(self) -> None:
        """End the connection and then `run`."""
        self._stopping.set()
        if self._connection is not None:
            self._connection.close("the daemon stops")

    async def run(self) -> None:
        """Keep connected until `stop`. Returns the first time a launched plugin's trunk ends."""
        failures = 0
        while not self._stopping.is_set():
            seen = socket_identity(self._options.socket)
            before = self.statistics.connected_s
            try:
                await self._one_connection()
                failures += 1
            except LockHeld as held:
                # Trying the lock costs nothing, so it is tried often.
                self._give_up(str(held))
                failures = 0
            if self._launch is not None:
                return
            if self.statistics.connected_s - before >= self._options.stable_after_s:
                failures = 0
            await self._back_off(failures, seen)

    # ---------------------------------------------------------------- one connection

    async def _one_connection(self) -> None:
        """Dial, register and serve until the trunk ends, whatever ends it. Raises LockHeld."""
        try:
            with contextlib.ExitStack() as locks:
                try:
                    path = os.path.join(self._options.run_dir, LOCK_FILE)
                    locks.enter_context(node_lock(path))
                except OSError as error:
                    # A read-only or full run directory takes no file. Then the daemon's own lock,
                    # which can be on the directory itself, has to do.
                    if error.errno not in UNWRITABLE:
                        raise
                if self._launch is None:
                    locks.enter_context(runtime_lock(self._options.socket))
                await self._hold_connection()
        except (OSError, RpcError, ConnectionClosed, TimeoutError) as error:
            self._unlisted = False
            self._give_up(_words(error, self._options.socket))

    async def _hold_connection(self) -> None:
        self._generation += 1
        self.statistics.dials += 1
        self.statistics.enter(State.DIALING)
        session = self._new_session()
        connection = await self._dial(session)
        self._session, self._connection = session, connection
        try:
            if self._stopping.is_set():
                return
            self.statistics.connections += 1
            if self.statistics.state is State.DIALING:
                self.statistics.enter(State.REGISTERING)
            await self._register(connection)
            await self._await_list(connection, session)
            reason = await asyncio.shield(connection.closed)
            self._give_up(reason)
        except (RpcError, ConnectionClosed) as error:
            self._give_up(_words(error, self._options.socket))
        except asyncio.CancelledError:
            self._stopping.set()
            raise
        finally:
            # Retired and closed before anything else happens: no two live sessions, ever.
            session.retire()
            self._session = self._connection = None
            self._configured.clear()
            self._synced.clear()
            connection.abort(self._problem or "given up")
            self.statistics.enter(State.DISCONNECTED)
            self.statistics.disconnections += 1
            if session.runtime is not None:
                reason = "" if self._stopping.is_set() else self._problem or "given up"
                self._report_to(self._handler.disconnected, reason)
            await asyncio.shield(connection.closed)

    def _report_to(self, method: Callable[[str], None], reason: str) -> None:
        try:
            method(reason)
        except Exception:
            log.exception("the handler failed", extra={"method": method.__name__})
            self.statistics.handler_faults += 1

    def _new_session(self) -> Session:
        generation = self._generation

        def entered(state: State) -> None:
            if generation == self._generation:
                self.statistics.enter(state)
                # A runtime that sent no list the last time is configured again and again.
                if state is State.SYNCED or not self._unlisted:
                    self._problem = ""
                self._configured.set()
                if state is State.SYNCED:
                    self._unlisted = False
                    self._synced.set()
                    log.info("synchronized with the runtime", extra={"generation": generation})

        def broken(reason: str) -> None:
            if generation == self._generation and self._connection is not None:
                # Soon, not now: the answer to the present call goes out first.
                asyncio.get_running_loop().call_soon(self._connection.close, reason)

        return Session(
            handler=self._handler,
            options=self._options,
            statistics=self.statistics,
            inventory=self._inventory,
            entered=entered,
            broken=broken,
            repeats=self._repeats,
            launched=self._launch is not None,
        )

    async def _dial(self, session: Session) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._options.dial_timeout_s):
            if self._launch is not None:
                inherited = socket.socket(fileno=self._launch.descriptor)
                inherited.setblocking(False)
                _, connection = await loop.create_unix_connection(
                    lambda: Connection(session.serve, session.reply_written), sock=inherited
                )
            else:
                _, connection = await loop.create_unix_connection(
                    lambda: Connection(session.serve, session.reply_written),
                    self._options.socket,
                )
        return connection

    async def _register(self, connection: Connection) -> None:
        """Register, and see that Configure follows. Raises RpcError or ConnectionClosed."""
        launch = self._launch
        request = nri.RegisterPluginRequest(
            plugin_name=(launch.name if launch else "") or self._options.name,
            plugin_idx=(launch.index if launch else "") or self._options.index,
            NRI_version=NRI_VERSION,
        )
        await connection.call(
            RUNTIME,
            "RegisterPlugin",
            request.SerializeToString(),
            timeout_s=self._options.register_timeout_s,
        )
        if not await _within(self._options.register_timeout_s, self._configured, connection):
            raise ConnectionClosed(
                "the runtime took the registration but did not configure the plugin"
            )

    async def _await_list(self, connection: Connection, session: Session) -> None:
        """Return when the runtime's list came, or the trunk ended.

        Raises ConnectionClosed when the list is given up. Up to NRI 0.6.1 a runtime that cannot
        send its list keeps the connection open and never sends an event on it.
        """
        options, runtime = self._options, session.runtime
        if await _within(options.list_overdue_s, self._synced, connection):
            return
        reason = _unlisted(runtime, connection.gathering)
        self._unlisted = True
        self.statistics.enter(State.UNLISTED)
        self._log_problem(reason)
        self._report_to(self._handler.list_overdue, reason)
        if runtime is None or not runtime.lists_at_once:
            patience_s = max(options.list_given_up_s - options.list_overdue_s, 0.0)
            if await _within(patience_s, self._synced, connection):
                return
        raise ConnectionClosed(reason)

    def _give_up(self, reason: str) -> None:
        self._log_problem(reason)
        if self.statistics.state is not State.DISCONNECTED:
            self.statistics.enter(State.DISCONNECTED)

    def _log_problem(self, reason: str) -> None:
        """Take `reason` as the present problem, and log it unless it is unchanged."""
        if reason != self._problem and (left_out := self._repeats.due(reason)) is not None:
            log.log(
                logging.INFO if self._stopping.is_set() else logging.WARNING,
                "no NRI connection: %s",
                reason,
                extra={"connections_not_logged": left_out},
            )
        self._problem = reason

    # ---------------------------------------------------------------- between connections

    async def _back_off(self, failures: int, seen: SocketIdentity) -> None:
        """Wait before the next dial; shorter when the runtime's socket is a new one."""
        options = self._options
        longest_s = (
            options.longest_unlisted_backoff_s if self._unlisted else options.longest_backoff_s
        )
        waited, delay = (
            0.0,
            back_off_s(failures, options.first_backoff_s, longest_s, random.random()),
        )
        while waited < delay and not self._stopping.is_set():
            step = min(options.socket_poll_s, delay - waited)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(step):
                    await self._stopping.wait()
            waited += step
            if waited >= options.first_backoff_s:
                now = socket_identity(options.socket)
                if now is not None and now != seen:
                    return


SocketIdentity = tuple[int, int, int] | None
"""(device, inode, ctime in ns) of the runtime's socket: a new one at every start of the runtime."""


def socket_identity(path: str) -> SocketIdentity:
    """Return the identity of the socket at `path`; None when there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def back_off_s(failures: int, first_s: float, longest_s: float, chance: float) -> float:
    """Return the wait after `failures` unstable connections in a row; `chance` is in 0..1.

    Doubles from the first to the longest, then takes off up to a quarter, so that a node's plugins
    do not dial in step. Never below the first.
    """
    doublings = min(max(failures - 1, 0), 30)
    delay = min(first_s * 2.0**doublings, longest_s)
    return max(first_s, delay * (1 - chance / 4))


async def _within(seconds: float, event: asyncio.Event, connection: Connection) -> bool:
    """Return whether `event` was set, or the trunk ended, within the time."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        done, _ = await asyncio.wait(
            (waiting, connection.closed), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        waiting.cancel()
    return bool(done)


def _unlisted(runtime: RuntimeProfile | None, gathering: Gathering | None) -> str:
    """Say that no list came, with what is known about it and what to do."""
    name = f"{runtime.name} {runtime.version_text}" if runtime is not None else "the runtime"
    part = ""
    if gathering is not None:
        part = f" but {gathering.received} of the {gathering.announced} bytes of a message"
    if runtime is not None and runtime.lists_at_once:
        advice = (
            "NRI up to 0.6.1 cannot send a list that is too large for one message:"
            " upgrade to containerd 1.7.26 or CRI-O 1.32, or run fewer or smaller pods here"
        )
    else:
        advice = "it may be waiting for a container that takes long to stop"
    return f"{name} configured the plugin and sends no list of containers{part}; {advice}"


def _words(error: Exception, path: str) -> str:
    """An error of dialing or registering, with what to do about it."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, TimeoutError):
        return f"{path}: dialing took too long"
    if isinstance(error, OSError) and error.errno == errno.ENOENT:
        return f"{path} does not exist: is the runtime running, with NRI enabled?"
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
        return f"{path}: nothing listens there: is the runtime running?"
    if isinstance(error, OSError):
        return f"{path}: {error.strerror or error}"
    if isinstance(error, RpcError):
        return f"registration failed: {error}"
    return str(error)
