"""The process around the daemon: its directory and lock, the event loop, the exit status."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import stat
import sys
from collections.abc import Callable
from typing import Final

import uvloop

from hooks.engine import Engine
from hooks.facts import NodeInputs
from hooks.policies import BUILTIN
from koordlet.config import Config
from koordlet.daemon import Daemon
from koordlet.executor import Executor
from koordlet.flags import Parsed
from koordlet.gates import BEYOND_POLICIES
from koordlet.journal import Journal, JournalError
from koordlet.machine import layout_of, local_host
from koordlet.reconciler import Reconciler
from koordlet.snapshot import Snapshot
from linux.discovery import DiscoveryError
from linux.procfs import boot_id
from nri_plugin.node_lock import LockHeld, node_lock
from nri_plugin.options import launch_of

_LOG = logging.getLogger("koordlet")

LOCK: Final = "koordlet.lock"

SWITCH_INTERVAL_S: Final = 0.0005
"""How long the reconciler's thread may hold the interpreter while a hook waits. The default of 5 ms
would stand in the tail of every hook's latency; below this, switching itself begins to cost."""


def run_daemon(config: Config, *, flags: Parsed, reload: Callable[[], Config]) -> int:
    """Run until told to stop; returns the exit status."""
    if flags.without_effect:
        _LOG.info("flags without effect", extra={"flags": ",".join(flags.without_effect)})
    used = {policy.gate for policy in BUILTIN} | BEYOND_POLICIES
    idle = sorted(name for name, on in config.feature_gates.items() if on and name not in used)
    if idle:
        _LOG.info("feature gates without effect", extra={"gates": ",".join(idle)})
    try:
        prepare_run_dir(config.run_dir)
        with node_lock(f"{config.run_dir}/{LOCK}"):
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
        await daemon.run(started=_tune)
        return daemon.failed

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return 1 if runner.run(serve()) else 0


def _tune() -> None:
    """Set the interpreter up for short replies beside a busy thread."""
    # Everything made so far lives as long as the daemon: the collector need not look at it.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def prepare_run_dir(path: str) -> None:
    """Make the run directory, for its owner only; OSError when it cannot be ours alone."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(f"{path} is not a directory of user {os.geteuid()}")
    if status.st_mode & 0o022:
        raise OSError(f"{path} is writable by others: chmod 0755 {path}, or set runDir")


def restore(config: Config) -> int:
    """Give back every value that a daemon changed; refuses while one runs. Returns the status."""
    journal_path = f"{config.run_dir}/journal"
    if not os.path.exists(journal_path):
        print(f"nothing to restore: no journal at {journal_path}")
        return 0
    try:
        prepare_run_dir(config.run_dir)
        with node_lock(f"{config.run_dir}/{LOCK}"):
            return _restore(config, journal_path)
    except LockHeld as held:
        print(f"stop the daemon first, it would write again: {held}", file=sys.stderr)
    except (DiscoveryError, JournalError, OSError) as error:
        print(f"cannot restore: {error}", file=sys.stderr)
    return 1


def _restore(config: Config, journal_path: str) -> int:
    host = local_host(config)
    layout = layout_of(config, host)
    journal = Journal(journal_path, boot=boot_id(host))
    nothing = Snapshot(engine=Engine(NodeInputs(), (), 0), subjects=())
    reconciler = Reconciler(Executor(host, layout, journal), journal, lambda: nothing)
    try:
        report = reconciler.restore_all()
        left = journal.records()
    finally:
        reconciler.close()
        journal.close()
    print(f"{report.restored} values put back, {report.failed} refused")
    for record in left:
        print(
            f"left: {record.place or 'node'} {record.resource} {record.key}".rstrip()
            + f", original {record.original}",
            file=sys.stderr,
        )
    return 1 if left else 0
