"""Two daemons and the same pods: one of them refuses, whatever their configurations say.

Directories stand in for cgroups, and processes of our own for other daemons.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from koordlet.node.kubepods_lock import KubepodsLock
from linux.cgroup_paths import Driver, Layout
from service.locks import LockHeld
from tests.beds.groups import kubepods

_HOLD = (
    "import fcntl, os, sys; descriptor = os.open(sys.argv[1], os.O_RDONLY);"
    " os.setuid(int(sys.argv[2])); fcntl.flock(descriptor, fcntl.LOCK_EX);"
    " print('held', flush=True); sys.stdin.read()"
)


def layout(folder: Path, kubepods: str) -> Layout:
    return Layout(2, MappingProxyType({"": str(folder)}), Driver.CGROUPFS, kubepods)


@contextmanager
def held_by(path: Path, *, user: int) -> Iterator[int]:
    """Another process holds a directory; gives its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path), str(user)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline() == "held\n"
            yield child.pid
        finally:
            child.stdin.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A hierarchy with two pods' roots."""
    for name in ("kubepods", "other"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_second_daemon_is_refused_with_the_name_of_the_first(root: Path) -> None:
    pods = layout(root, "kubepods")
    with held_by(root / "kubepods", user=os.geteuid()) as pid:
        with pytest.raises(LockHeld, match=f"process {pid} holds {root}/kubepods"):
            KubepodsLock().hold(pods)
        os.kill(pid, 9)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        KubepodsLock().hold(pods)  # however it ended


def test_the_lock_is_let_go_when_it_is_closed(root: Path) -> None:
    first, second = KubepodsLock(), KubepodsLock()
    first.hold(layout(root, "kubepods"))
    with pytest.raises(LockHeld):
        second.hold(layout(root, "kubepods"))
    first.close()
    second.hold(layout(root, "kubepods"))
    second.close()


def test_daemons_of_different_pods_do_not_meet(root: Path) -> None:
    first, second = KubepodsLock(), KubepodsLock()
    first.hold(layout(root, "kubepods"))
    second.hold(layout(root, "other"))
    first.close()
    second.close()


def test_before_any_pod_daemons_meet_at_the_root_and_then_where_the_pods_are(root: Path) -> None:
    first, second = KubepodsLock(), KubepodsLock()
    first.hold(layout(root, ""))
    with pytest.raises(LockHeld, match=f"holds {root}:"):
        second.hold(layout(root, ""))
    first.hold(layout(root, "kubepods"))
    with pytest.raises(LockHeld, match="kubepods"):
        second.hold(layout(root, "kubepods"))
    second.hold(layout(root, ""))
    first.close()
    second.close()


def test_a_directory_that_was_made_again_is_locked_again(root: Path) -> None:
    first, second = KubepodsLock(), KubepodsLock()
    pods = layout(root, "kubepods")
    first.hold(pods)
    (root / "kubepods").rename(root / "gone")
    first.hold(pods)  # nothing is there
    (root / "kubepods").mkdir()
    first.hold(pods)
    with pytest.raises(LockHeld):
        second.hold(pods)
    first.close()


@pytest.mark.root
def test_a_user_who_locks_the_directory_keeps_no_daemon_out(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = KubepodsLock()
    with held_by(root / "kubepods", user=65534) as pid:
        for _ in range(2):
            lock.hold(layout(root, "kubepods"))
        (message,) = caplog.messages
        assert f"process {pid}, which is not a daemon, holds {root}/kubepods" in message
    lock.hold(layout(root, "kubepods"))
    with pytest.raises(LockHeld):
        KubepodsLock().hold(layout(root, "kubepods"))
    lock.close()


@pytest.mark.cgroups
def test_cgroups_can_be_held_and_removed_all_the_same() -> None:
    """On the kernel's own file system, in groups of our own."""
    with kubepods() as tree:
        place = tree.hierarchies[0].name if tree.version == 1 else ""
        mounts = MappingProxyType({place: str(tree.hierarchies[0])})
        pods = Layout(tree.version, mounts, Driver.CGROUPFS, tree.path.lstrip("/"))
        first, second = KubepodsLock(), KubepodsLock()
        first.hold(pods)
        with pytest.raises(LockHeld, match=f"process {os.getpid()} holds"):
            second.hold(pods)
    first.close()
