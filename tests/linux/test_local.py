"""The real host: mapped paths, kept files, and this machine's own cgroup v1."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from linux.local import LocalHost
from service.inotify import IN_MODIFY, Inotify
from tests.conftest import require

CPU = Path("/sys/fs/cgroup/cpu")


@pytest.fixture
def group() -> Iterator[Path]:
    """A cpu group of our own on this machine."""
    path = CPU / f"koord-test-{os.getpid()}"
    path.mkdir()
    try:
        yield path
    finally:
        if path.exists():
            path.rmdir()


def test_paths_are_mapped_by_the_longest_root(tmp_path: Path) -> None:
    (tmp_path / "cg").mkdir()
    (tmp_path / "cg" / "x").write_text("one")
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs" / "y").write_text("two")
    host = LocalHost(
        {"/sys/fs": str(tmp_path / "fs"), "/sys/fs/cgroup": f"{tmp_path}/cg/"}, keep_open=0
    )
    assert host.read("/sys/fs/cgroup/x") == b"one"
    assert host.read("/sys/fs/y") == b"two"
    assert host.here("/sys/fsx") == "/sys/fsx"
    assert host.is_dir("/sys/fs/cgroup") and not host.is_dir("/sys/fs/cgroup/x")


def test_a_write_never_creates(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalHost().write(f"{tmp_path}/new", b"1")
    assert not list(tmp_path.iterdir())


def test_large_files_are_read_whole(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 300_000)
    host = LocalHost(kept_root=str(tmp_path))
    for _ in range(2):
        assert len(host.read(f"{tmp_path}/big")) == 300_000


def test_directories_get_the_mode_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        LocalHost().mkdir(f"{tmp_path}/d", 0o777)
    finally:
        os.umask(before)
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o777


def test_a_device_node_has_a_kind_and_numbers() -> None:
    assert LocalHost().device_number("/dev/null") == ("c", 1, 3)
    with pytest.raises(OSError):
        LocalHost().device_number("/proc/self/stat")


def test_this_machines_file_systems() -> None:
    host = LocalHost()
    assert host.filesystem_magic("/proc") == 0x9FA0
    assert host.readlink("/proc/self/exe").startswith("/")
    with pytest.raises(FileNotFoundError):
        host.filesystem_magic("/nowhere")


@pytest.mark.cgroups
def test_a_kept_file_shows_new_values_and_notices_its_end(group: Path) -> None:
    host = LocalHost()
    path = f"{group}/cpu.shares"
    assert host.read(path) == b"1024\n"
    (group / "cpu.shares").write_text("512")
    assert host.read(path) == b"512\n"
    inode = host.inode(str(group))
    group.rmdir()
    with pytest.raises(OSError) as gone:
        host.read(path)
    assert gone.value.errno in (errno.ENOENT, errno.ENODEV)
    # A later group of the same name is read by its own file.
    group.mkdir()
    assert host.read(path) == b"1024\n"
    assert host.inode(str(group)) != inode


@pytest.mark.cgroups
def test_no_more_files_are_kept_than_allowed(group: Path) -> None:
    host = LocalHost(keep_open=2)
    before = len(os.listdir("/proc/self/fd"))
    for name in ("cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.stat"):
        for _ in range(3):
            host.read(f"{group}/{name}")
    assert len(os.listdir("/proc/self/fd")) <= before + 2


@pytest.mark.cgroups
def test_the_files_of_a_directory_that_is_gone_are_closed(group: Path) -> None:
    host = LocalHost(keep_open=4)
    before = len(os.listdir("/proc/self/fd"))
    other = group / "below"
    other.mkdir()
    for name in ("cpu.shares", "cpu.cfs_quota_us"):
        assert host.read(f"{other}/{name}") and host.read(f"{group}/{name}")
    assert len(os.listdir("/proc/self/fd")) == before + 4
    other.rmdir()
    host.gone(str(other))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    host.gone(str(other))
    # There is room for two files again.
    assert host.read(f"{group}/cpu.stat") and host.read(f"{group}/cpu.cfs_period_us")
    assert len(os.listdir("/proc/self/fd")) == before + 4


@pytest.mark.cgroups
def test_only_the_groups_of_a_directory_are_listed(group: Path) -> None:
    (group / "below").mkdir()
    try:
        assert LocalHost().directories(str(group)) == ["below"]
        with pytest.raises(FileNotFoundError):
            LocalHost().directories(f"{group}/no-such-group")
    finally:
        (group / "below").rmdir()


@pytest.mark.cgroups
def test_kernel_refusals_come_through_unchanged(group: Path) -> None:
    host = LocalHost()
    with pytest.raises(OSError) as refused:
        host.write(f"{group}/cpu.cfs_quota_us", b"1")
    assert refused.value.errno == errno.EINVAL


@pytest.mark.cgroups
def test_writes_of_others_are_noticed(group: Path) -> None:
    with Inotify() as watch:
        assert watch.add(str(group)) and str(group) in watch
        assert not watch.add("/sys/fs/cgroup/cpu/no-such-group")
        assert not watch.events()
        (group / "cpu.shares").write_text("512")
        (event,) = watch.events()
        assert event.path == f"{group}/cpu.shares" and event.mask & IN_MODIFY
        # The kernel does not end a cgroup's watch with the group: whoever added it removes it.
        group.rmdir()
        watch.remove(str(group))
        assert not watch.events() and len(watch) == 0


def test_the_number_of_watches_is_bounded(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    with Inotify(limit=2) as watch:
        assert [watch.add(f"{tmp_path}/{name}") for name in "abc"] == [True, True, False]
        watch.remove(f"{tmp_path}/a")
        assert watch.add(f"{tmp_path}/c")


def test_core_scheduling_answers_or_refuses_with_an_errno() -> None:
    host = LocalHost()
    try:
        cookie = host.core_sched_cookie(os.getpid())
    except OSError as error:
        require(error.errno in (errno.EINVAL, errno.ENODEV), f"unexpected {error}")
        with pytest.raises(OSError):
            host.core_sched_create(os.getpid())
    else:
        assert cookie == 0
