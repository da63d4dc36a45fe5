"""Restores what a daemon changed, while none runs: values, traffic classes, terway-qos's files."""

from __future__ import annotations

import os
import sys
from contextlib import closing, suppress

from hooks.engine import Engine
from hooks.facts import NodeInputs
from koordlet.configuration.config import Config
from koordlet.daemon.run_dir import LOCK, daemon_lock, prepare_run_dir
from koordlet.executor.executor import Executor
from koordlet.executor.journal import FILE_NAME as JOURNAL
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.network import FILE_NAME as NETWORK_QOS
from koordlet.executor.network import Network
from koordlet.node.kubepods_lock import KubepodsLock
from koordlet.node.machine import layout_of, local_host
from koordlet.qos.lease_file import FILE_NAME as LEASES
from koordlet.reconciler.reconciler import Reconciler
from koordlet.reporters.terway import TerwayFiles
from koordlet.state.snapshot import Snapshot
from linux.discovery import DiscoveryError
from linux.procfs import boot_id
from service.locks import LockHeld


def restore(config: Config) -> int:
    """Restore every value that a daemon changed; refuse while one runs. Return the exit status.

    0: all originals are in force. 1: some are not, or it is not known which values were changed.
    """
    try:
        if not _ran_before(config):
            print(
                f"nothing to restore: {config.run_dir} has no file of a daemon. If one has run with"
                " this runDir since the node started, its files were removed, and what it changed"
                " is not known"
            )
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
            " changed may still be in force. A pod that is created again, or a reboot, brings"
            " kubelet's values back",
            file=sys.stderr,
        )
    return 1 if left or lost else 0
