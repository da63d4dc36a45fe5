"""koord-runtime-proxy: the process. Options, sockets, signals, and the parts wired together.

Order at start: the socket is served first, so that kubelet never meets "connection refused";
recovery and hook servers follow as they come. SIGTERM drains, SIGHUP hands over to a successor
(an upgraded one, if the program was replaced) that takes the sockets while we drain.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import uvloop

from runtime_proxy import handover, options
from runtime_proxy.backend import Backend
from runtime_proxy.options import Options
from runtime_proxy.status import Figures, pages
from service import logs, open_files, unix
from service.http_server import Server
from service.systemd import Notifier

log = logging.getLogger(__name__)

# How long a successor may take until it serves. As the unit's TimeoutStartSec: it starts as a
# service does. Twice the value: a successor that hangs is given up after a minute; calls are served
# by this process meanwhile.
_HANDOVER_TIMEOUT_S = 30.0
# A predecessor has nothing else to do than to let its calls end. Chosen: hardly an image is pulled
# for longer, and kubelet pulls it again. Twice the value: a stream that is left open keeps the
# process for two hours.
_HANDED_OVER_DRAIN_S = 3600.0
# Of the unit's WatchdogSec, between two notices. systemd recommends half, so that one missing
# notice does no harm; the rest is a margin for a busy machine. At twice the value one late notice
# ends the process.
_WATCHDOG_SHARE = 0.4
# From Python 3.13 on a loop removes the socket file with the server; a successor may serve it.
_KEEP_SOCKET: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


class StartError(Exception):
    """The proxy cannot serve; the text says what to do about it."""


def open_listener(path: str) -> socket.socket:
    """Listen on `path` with mode 0600, in place of a socket that no process serves."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        return unix.listen(path)
    except OSError as error:
        raise StartError(f"cannot listen on {path}: {error.strerror or error}") from error


@dataclass(slots=True)
class _Ended:
    """Set by a signal: that the process ends, and why."""

    event: asyncio.Event
    handed_over: bool = False


def _agent(chosen: Options, figures: Figures) -> Backend:
    """Return the chosen mode's part. The modules of the other mode are not loaded: memory."""
    if chosen.mode == "Docker":
        from runtime_proxy.docker.agent import DockerAgent

        return DockerAgent(chosen, figures)
    from runtime_proxy.agent import CriAgent

    return CriAgent(chosen, figures)


async def serve(chosen: Options, command: Sequence[str]) -> None:
    """Run until a signal ends it. Raises StartError."""
    loop = asyncio.get_running_loop()
    passed = handover.take_passed()
    notifier = Notifier()
    listener = passed.sockets.get(handover.CRI_SOCKET) or open_listener(chosen.listen)
    sockets = {handover.CRI_SOCKET: listener}
    figures = Figures(loop.time)
    ended = _Ended(asyncio.Event())
    async with AsyncExitStack() as stack:
        agent = _agent(chosen, figures)
        await agent.start()
        stack.push_async_callback(agent.close)
        server = await loop.create_unix_server(
            agent.new_connection, sock=listener, backlog=unix.BACKLOG, **_KEEP_SOCKET
        )
        stack.callback(server.close)
        http = pages(
            figures,
            agent.gauges,
            health=agent.health,
            readiness=agent.readiness,
            status=agent.status,
        )
        stack.push_async_callback(http.close)
        await _serve_pages(http, chosen, passed.sockets.get(handover.HTTP_SOCKET))
        if http.sockets:
            sockets[handover.HTTP_SOCKET] = http.sockets[0]
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.event.set)
        handovers: set[asyncio.Task[None]] = set()

        def hand_over() -> None:
            if not handovers:
                task = loop.create_task(_hand_over(command, sockets, ended, notifier))
                handovers.add(task)
                task.add_done_callback(handovers.discard)

        loop.add_signal_handler(signal.SIGHUP, hand_over)
        # What is loaded by now stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        if passed.predecessor is None:
            notifier.send(READY="1", STATUS="serving")
        passed.tell_predecessor()
        log.info("serving", extra={"socket": chosen.listen, "backend": chosen.backend})
        watchdog = loop.create_task(_watchdog(notifier))
        stack.callback(watchdog.cancel)
        await ended.event.wait()
        if ended.handed_over:
            watchdog.cancel()
            agent.stand_back()
            # Our successor answers on the same socket; our figures end here.
            await http.close()
        else:
            notifier.send(STOPPING="1", STATUS="letting running calls end")
        server.close()
        limit_s = _HANDED_OVER_DRAIN_S if ended.handed_over else chosen.drain_timeout_s
        if not ended.handed_over and handover.CRI_SOCKET not in passed.sockets:
            # A client that connects now learns at once that no proxy serves here.
            with suppress(OSError):
                os.unlink(chosen.listen)
        cut = await agent.drain(limit_s)
        log.info("ended", extra={"calls_cut_off": cut})


async def _serve_pages(http: Server, chosen: Options, passed: socket.socket | None) -> None:
    if passed is not None:
        await http.listen_socket(passed)
    elif chosen.http_address is not None:
        host, port = chosen.http_address
        try:
            await http.listen_tcp(host, port)
        except OSError as error:
            # Pods come before metrics.
            log.error(
                "no /metrics and /healthz",
                extra={"address": f"{host}:{port}", "reason": error.strerror or str(error)},
            )


async def _hand_over(
    command: Sequence[str],
    sockets: dict[str, socket.socket],
    ended: _Ended,
    notifier: Notifier,
) -> None:
    """Start a successor with our sockets, and end this process once it serves."""
    notifier.send(STATUS="handing over to a successor")
    try:
        successor = handover.start_successor(command, sockets)
    except OSError as error:
        log.error("no successor", extra={"reason": error.strerror or str(error)})
        return
    loop = asyncio.get_running_loop()
    said: asyncio.Future[bytes] = loop.create_future()

    def readable() -> None:
        if not said.done():
            said.set_result(os.read(successor.ready, 16))

    loop.add_reader(successor.ready, readable)
    try:
        async with asyncio.timeout(_HANDOVER_TIMEOUT_S):
            serves = bool(await said)
    except TimeoutError:
        serves = False
    finally:
        loop.remove_reader(successor.ready)
        os.close(successor.ready)
    if serves:
        log.info("handed over", extra={"successor": successor.pid})
        # systemd listens to the main process alone: this process reports the successor's readiness.
        notifier.send(MAINPID=str(successor.pid), READY="1", STATUS="serving")
        ended.handed_over = True
        ended.event.set()
    else:
        log.error("the successor does not serve: this process goes on")
        with suppress(ProcessLookupError):
            os.kill(successor.pid, signal.SIGKILL)
        notifier.send(READY="1", STATUS="serving; a handover failed")


async def _watchdog(notifier: Notifier) -> None:
    """Notify systemd's watchdog while the event loop runs."""
    if notifier.watchdog_seconds is None:
        return
    while True:
        await asyncio.sleep(notifier.watchdog_seconds * _WATCHDOG_SHARE)
        notifier.send(WATCHDOG="1")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    logs.set_up(level="info", form="text")
    chosen = options.parse(arguments)
    logs.set_up(level=chosen.log_level, form=chosen.log_format)
    open_files.raise_limit()
    # A successor is started as we were, by the script or module that is there by then.
    command = [sys.executable, *sys.orig_argv[1:]]
    try:
        uvloop.run(serve(chosen, command))
    except StartError as error:
        log.error(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
