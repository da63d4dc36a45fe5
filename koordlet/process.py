"""The process around the daemon: its directory and lock, the event loop, the exit status."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Final

import uvloop

from hooks.engine import Engine
from hooks.facts import NodeInputs
from hooks.policies import BUILTIN
from koordlet.configuration.config import Config
from koordlet.configuration.flags import Parsed
from koordlet.configuration.gates import BEYOND_POLICIES
from koordlet.daemon.daemon import Daemon
from koordlet.executor.executor import Executor
from koordlet.executor.journal import FILE_NAME as JOURNAL
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.network import FILE_NAME as NETWORK_QOS
from koordlet.executor.network import Network
from koordlet.node.kubepods_lock import KubepodsLock
from koordlet.node.machine import layout_of, local_host
from koordlet.qos.lease_file import FILE_NAME as LEASES
from koordlet.qos.strategies.registry import STRATEGIES
from koordlet.reconciler.reconciler import Reconciler
from koordlet.reporters.terway import TerwayFiles
from koordlet.state.snapshot import Snapshot
from linux.discovery import DiscoveryError
from linux.procfs import boot_id
from nri_plugin.options import launch_of
from service import open_files
from service.files import UNWRITABLE
from service.locks import LockHeld, lock_directory, node_lock
from service.memory import give_back
from service.scheduling import schedule_beside_event_loop, schedule_event_loop

_LOG = logging.getLogger("koordlet")

LOCK: Final = "koordlet.lock"

SWITCH_INTERVAL_S: Final = 0.00005
"""How long the reconciler's thread may hold the interpreter while a hook waits: half of what an
answer takes. Python's default of 5 ms would show in the tail of every hook's latency. Twice the
value costs a hook that meets the reconciler that much more."""
_CAP_DAC_OVERRIDE: Final = 1
"""The bit of capabilities(7)."""

_YOUNGEST: Final = 2000
"""New objects between two collections of the youngest generation: about a third of a millisecond
each. Twice the value doubles that pause and halves their number."""
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
    used = {policy.gate for policy in BUILTIN} | BEYOND_POLICIES
    used |= {gate for strategy in STRATEGIES for gate in strategy.gates}
    idle = sorted(name for name, on in config.feature_gates.items() if on and name not in used)
    if idle:
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

    async def serve() -> bool:
        daemon = Daemon(config, launch=launch, reload=reload)
        collecting: list[asyncio.Task[None]] = []

        def started() -> None:
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            schedule_event_loop()
            collecting.append(asyncio.ensure_future(_collect_when_quiet(daemon)))

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


async def _collect_when_quiet(daemon: Daemon) -> None:
    """Run full garbage collections only while no hooks arrive.

    A full collection traverses every object of the daemon and holds the interpreter for tens of
    milliseconds. Reference counts free almost all objects here, so only the youngest generation is
    collected as usual. Surviving objects are frozen every second, which costs nothing. They are
    collected when no hook has come for a while: every ten minutes, and after a runtime's list,
    whose memory the C library would keep otherwise.
    """
    gc.set_threshold(_YOUNGEST, _NEVER, _NEVER)
    gc.collect()
    gc.freeze()
    loop = asyncio.get_running_loop()
    collected_at = quiet_since = loop.time()
    nri = daemon.parts.nri
    answered, lists = nri.hooks_answered, nri.lists_taken
    while True:
        await asyncio.sleep(1)
        gc.freeze()
        now = loop.time()
        if nri.hooks_answered != answered:
            answered, quiet_since = nri.hooks_answered, now
        quiet = now - quiet_since >= _QUIET_S
        waited_s = now - collected_at
        due = waited_s >= _COLLECT_EVERY_S or nri.lists_taken != lists
        if (quiet and due) or waited_s >= _COLLECT_AT_LAST_S:
            lists = nri.lists_taken
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            # In a thread: ctypes releases the interpreter while the C library works.
            await asyncio.to_thread(give_back)
            collected_at = loop.time()


def prepare_run_dir(path: str) -> None:
    """Make the run directory, for its owner only; OSError if others could write in it."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(f"{path} is not a directory of user {os.geteuid()}")
    if status.st_mode & 0o022:
        raise OSError(f"{path} is writable by others: chmod 0755 {path}, or set runDir")


@contextmanager
def daemon_lock(run_dir: str) -> Iterator[None]:
    """Hold the run directory for the block. Raises LockHeld when another daemon has it, OSError.

    Where the lock file cannot be made, because the directory is read-only or full, the directory
    itself is locked: hooks must be answered all the same.
    """
    with ExitStack() as held:
        try:
            held.enter_context(node_lock(f"{run_dir}/{LOCK}"))
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            held.callback(os.close, lock_directory(run_dir))
        yield


def writes_for_root(status: str = "/proc/self/status") -> bool:
    """Return whether this process may write root's files: as root, or with CAP_DAC_OVERRIDE."""
    if os.geteuid() == 0:
        return True
    with open(status, encoding="ascii", errors="replace") as file:
        effective = next((line for line in file if line.startswith("CapEff:")), "CapEff: 0")
    return bool(int(effective.split()[1], 16) >> _CAP_DAC_OVERRIDE & 1)


def restore(config: Config) -> int:
    """Restore every value that a daemon changed; refuse while one runs. Return the exit status.

    0: all originals are in force. 1: some are not, or it is not known which values were changed.
    """
    try:
        if not _ran_before(config):
            print(f"nothing to restore: no daemon has used {config.run_dir} since the node started")
            return 0
        prepare_run_dir(config.run_dir)
        with daemon_lock(config.run_dir):
            with suppress(OSError):  # missing, or on a file system where no daemon can keep it
                # The next daemon must not claim again what is restored now.
                os.unlink(f"{config.run_dir}/{LEASES}")
            if TerwayFiles(config.terway_qos.directory).remove():
                print("the files of terway-qos are removed")
            network = _restore_network(config)
            return _restore(config, f"{config.run_dir}/{JOURNAL}") or network
    except LockHeld as held:
        print(f"stop the daemon first, it would write again: {held}", file=sys.stderr)
    except (DiscoveryError, JournalError, OSError) as error:
        print(f"cannot restore: {error}", file=sys.stderr)
    return 1


def _restore_network(config: Config) -> int:
    """Take the traffic classes away, if there may be any. Return 1 if they stay."""
    network = Network(f"{config.run_dir}/{NETWORK_QOS}")
    try:
        if network.applied and network.remove():
            print("the traffic classes of network QoS are removed")
    except OSError as error:
        print(f"the traffic classes of network QoS stay: {error}", file=sys.stderr)
        return 1
    finally:
        network.close()
    return 0


def _ran_before(config: Config) -> bool:
    """Return whether a daemon left files in the run directory. Raises OSError."""
    for name in (JOURNAL, LOCK):
        try:
            os.stat(f"{config.run_dir}/{name}")
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise OSError(f"{error}; run it as root") from error
        return True
    return False


def _restore(config: Config, path: str) -> int:
    host = local_host(config)
    layout = layout_of(config, host)
    nothing = Snapshot(engine=Engine(NodeInputs(), (), 0), subjects=())
    existed = os.path.lexists(path)
    with closing(KubepodsLock(host.here)) as lock:
        lock.hold(layout)
        journal = Journal(path, boot=boot_id(host))
        if journal.problem:
            raise JournalError(journal.problem)
        reconciler = Reconciler(Executor(host, layout, journal), journal, lambda: nothing)
        try:
            report = reconciler.restore_all()
            left = journal.records()
        finally:
            reconciler.close()
            journal.close()
    print(f"{report.restored} values restored, {report.failed} refused")
    for record in left:
        print(
            f"left: {record.place or 'node'} {record.resource} {record.key}".rstrip()
            + f", original {record.original}",
            file=sys.stderr,
        )
    lost = journal.lost if existed else "it is not there"
    if lost:
        print(
            f"{path}: {lost}. The originals that it held are not known, so values that a daemon"
            " changed may still be in force; `koordctl doctor` shows them. A pod that is created"
            " again, or a reboot, brings kubelet's values back",
            file=sys.stderr,
        )
    return 1 if left or lost else 0
