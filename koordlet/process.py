"""The process around the daemon: the event loop, garbage collection, the exit status."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import uvloop

from koordlet.configuration.config import Config
from koordlet.configuration.flags import Parsed
from koordlet.daemon.daemon import Daemon
from koordlet.daemon.parts import gates_without_effect
from koordlet.daemon.run_dir import daemon_lock, prepare_run_dir, writes_for_root
from linux.discovery import DiscoveryError
from nri_plugin.options import launch_of
from service import open_files
from service.locks import LockHeld
from service.memory import give_back
from service.scheduling import schedule_beside_event_loop, schedule_event_loop

_LOG = logging.getLogger("koordlet")

SWITCH_INTERVAL_S: Final = 0.00005
"""How long the reconciler's thread may hold the interpreter while a hook waits: half of what an
answer takes. Python's default of 5 ms would show in the tail of every hook's latency. Twice the
value costs a hook that meets the reconciler that much more."""
_YOUNGEST: Final = 10_000
"""New objects before the youngest generation is collected wherever the next one is made, which may
be in an answer: some 5 ms. Background threads collect much sooner (`service.collection`), so this
is for floods that leave them no time. Twice the value doubles that pause."""
_NEVER: Final = 1_000_000
"""The threshold of the older generations: they are never collected by count."""
_LEAVE_S: Final = 5.0
"""How long the end waits for threads that wait for a source or the kernel. Chosen: half of the 10 s
that upstream's DaemonSet allows. Twice the value would let kubelet kill the process."""
_QUIET_S: Final = 5.0
"""Without a hook for so long, a full collection may run. Chosen: the hooks of one pod's start are
closer together. Twice the value finds fewer such moments."""
_COLLECT_EVERY_S: Final = 600.0
"""Between full collections. Chosen: cycles grow slowly here. Twice the value doubles the memory
that they hold."""
_COLLECT_AT_LAST_S: Final = 6 * 3600.0
"""After this time a full collection runs even if the node is never quiet, for the same reason."""


def run_daemon(config: Config, *, flags: Parsed, reload: Callable[[], Config]) -> int:
    """Run the daemon until a signal ends it; return the exit status."""
    open_files.raise_limit()
    if flags.without_effect:
        _LOG.info("flags without effect", extra={"flags": ",".join(flags.without_effect)})
    if idle := gates_without_effect(config):
        _LOG.info("feature gates without effect", extra={"gates": ",".join(idle)})
    try:
        prepare_run_dir(config.run_dir)
        with daemon_lock(config.run_dir):
            if not writes_for_root():
                _LOG.error("not root: no kernel file could be written; run it as root")
                return 2
            return _serve(config, reload)
    except LockHeld as held:
        _LOG.error("another daemon runs on this node: %s", held)
        return 1
    except DiscoveryError as error:
        _LOG.error("%s", error)
        return 1
    except OSError as error:
        _LOG.error("cannot run: %s", error)
        return 1


def _serve(config: Config, reload: Callable[[], Config]) -> int:
    launch = launch_of(os.environ)
    # What has been imported stays to the end. Frozen, it is not walked by later collections.
    gc.collect()
    gc.freeze()

    async def serve() -> bool:
        daemon = Daemon(config, launch=launch, reload=reload)
        collecting: list[asyncio.Task[None]] = []

        def started() -> None:
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            schedule_event_loop()
            collecting.append(asyncio.ensure_future(collect_when_quiet(daemon.parts.nri)))

        try:
            await daemon.run(started=started)
        finally:
            for task in collecting:
                task.cancel()
        _leave_soon(1 if daemon.failed else 0)
        return daemon.failed

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return 1 if runner.run(serve()) else 0


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return the daemon's event loop. Its default pool is scheduled beside it, as other threads.

    asyncio's own pool has as many threads at most, and leaves them ordinary.
    """
    loop = uvloop.new_event_loop()
    loop.set_default_executor(
        ThreadPoolExecutor(
            thread_name_prefix="koordlet-asyncio", initializer=schedule_beside_event_loop
        )
    )
    return loop


def _leave_soon(status: int) -> None:
    """End the process even if a worker thread does not end: everything else is closed by now.

    A thread may wait for a file server that is away, or for a kernel write.
    """

    def leave() -> None:
        _LOG.warning("a thread did not end in time: a source or the kernel does not answer")
        os._exit(status)

    timer = threading.Timer(_LEAVE_S, leave)
    timer.daemon = True
    timer.start()


class Hooks(Protocol):
    """What says when a runtime is quiet: see `NriLink`."""

    @property
    def hooks_answered(self) -> int: ...
    @property
    def lists_taken(self) -> int: ...


async def collect_when_quiet(hooks: Hooks) -> None:
    """Run full garbage collections only while no hooks arrive.

    Reference counts free almost all objects here, so otherwise only the youngest generation is
    collected, by background threads (`service.collection`). A full collection traverses all objects
    but the frozen ones, which are two thirds of the daemon's on a node with 110 pods, and holds the
    interpreter for some milliseconds. It runs when no hook has come for a while: every ten minutes,
    and after a runtime's list, whose memory the C library would keep otherwise.
    """
    gc.set_threshold(_YOUNGEST, _NEVER, _NEVER)
    gc.collect()
    loop = asyncio.get_running_loop()
    collected_at = quiet_since = loop.time()
    answered, lists = hooks.hooks_answered, hooks.lists_taken
    while True:
        await asyncio.sleep(1)
        now = loop.time()
        if hooks.hooks_answered != answered:
            answered, quiet_since = hooks.hooks_answered, now
        quiet = now - quiet_since >= _QUIET_S
        waited_s = now - collected_at
        due = waited_s >= _COLLECT_EVERY_S or hooks.lists_taken != lists
        if (quiet and due) or waited_s >= _COLLECT_AT_LAST_S:
            lists = hooks.lists_taken
            gc.collect()
            # In a thread: ctypes releases the interpreter while the C library works.
            await asyncio.to_thread(give_back)
            collected_at = loop.time()
