"""Where the table is tried: the simulated kernel, and the machine's own groups.

A `Ground` makes groups below one of its own and speaks plain file operations, so that a difference
between two grounds is a difference between kernels and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tests.simulated.kernel import SimulatedKernel
from tests.simulated.profiles import Profile
from tests.simulated.tree import Task

V1_CONTROLLERS = ("cpu", "cpuset", "memory")
V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids")
_CORE_FILES = ("cgroup.", "tasks", "notify_on_release")
_numbers = itertools.count()


class Ground(Protocol):
    """A kernel with a place of our own."""

    version: int  # of cgroup
    kernel: tuple[int, int]

    def cpus(self) -> int:
        """How many CPUs; they are numbered from 0."""

    def path(self, relative: str) -> list[str]:
        """Absolute paths of a group in each hierarchy, or of one file."""

    def read(self, path: str) -> str: ...
    def write(self, path: str, text: str) -> None: ...
    def mkdir(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def exists(self, path: str) -> bool: ...
    def start(self) -> int:
        """Start a process; its pid."""

    def allocate(self, pid: int, mebibytes: int) -> bool:
        """Let the process touch this much more memory; whether it got it."""

    def runs(self, pid: int) -> bool: ...


def paths_below(bases: dict[str, str], version: int, relative: str) -> list[str]:
    """The rule of steps.py for paths. bases: hierarchy -> the directory of the test's own group."""
    if relative.startswith("/"):
        return [relative]
    controller, colon, rest = relative.partition(":")
    if not colon:
        controller, rest = "", relative
    name = rest.rsplit("/", 1)[-1]
    is_file = "." in name or name == "tasks"
    if version == 2:
        return [f"{bases['']}/{rest}"]
    if not is_file:
        return [f"{base}/{rest}" for base in bases.values()]
    if not controller:
        controller = "cpu" if name.startswith(_CORE_FILES) else name.split(".")[0]
    return [f"{bases[controller]}/{rest}"]


class SimulatedGround:
    """A fresh simulated kernel for each behaviour."""

    def __init__(self, profile: Profile) -> None:
        self.machine = SimulatedKernel(profile)
        self.version = profile.cgroup
        self.kernel = profile.kernel
        self._tasks: dict[int, Task] = {}
        if self.version == 2:
            root = "/sys/fs/cgroup"
            for folder in (root, f"{root}/system.slice", f"{root}/system.slice/session.service"):
                self.machine.make(folder)
                self.machine.write_as(
                    "systemd",
                    f"{folder}/cgroup.subtree_control",
                    " ".join(f"+{name}" for name in V2_CONTROLLERS),
                )
            self.bases = {"": f"{root}/system.slice/session.service"}
        else:
            self.bases = {name: f"/sys/fs/cgroup/{name}/koord-test" for name in V1_CONTROLLERS}
            for base in self.bases.values():
                self.machine.make(base)
            for kind in ("cpus", "mems"):
                self.machine.write_as(
                    "test",
                    f"{self.bases['cpuset']}/cpuset.{kind}",
                    self.machine.text(f"/sys/fs/cgroup/cpuset/cpuset.{kind}"),
                )

    def cpus(self) -> int:
        return self.machine.possible_cpus

    def path(self, relative: str) -> list[str]:
        return paths_below(self.bases, self.version, relative)

    def read(self, path: str) -> str:
        return self.machine.read(path).decode()

    def write(self, path: str, text: str) -> None:
        self.machine.write(path, text.encode())

    def mkdir(self, path: str) -> None:
        self.machine.mkdir(path)

    def rmdir(self, path: str) -> None:
        self.machine.rmdir(path)

    def exists(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in self.machine.listdir(folder)

    def start(self) -> int:
        task = self.machine.spawn_process("test")
        self._tasks[task.pid] = task
        return task.pid

    def allocate(self, pid: int, mebibytes: int) -> bool:
        task = self._tasks[pid]
        self.machine.use_memory(task, task.anon_bytes + (mebibytes << 20))
        return self.runs(pid)

    def runs(self, pid: int) -> bool:
        return pid in self.machine.tasks


# The process touches as much memory as each line of its input says, and answers with a line.
_HOLDER = """
import sys
held = []
for line in sys.stdin:
    held.append(bytearray(b"x") * (int(line) << 20))
    print("held", flush=True)
"""


class RealGround:
    """This machine's kernel. Groups are named koord-test-<pid>-<n>; see `real_ground`."""

    def __init__(self, version: int, bases: dict[str, str]) -> None:
        self.version = version
        self.bases = bases
        match = re.match(r"(\d+)\.(\d+)", platform.release())
        assert match is not None
        self.kernel = (int(match.group(1)), int(match.group(2)))
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def cpus(self) -> int:
        text = Path("/sys/devices/system/cpu/possible").read_text().strip()
        return int(text.rpartition("-")[2]) + 1

    def path(self, relative: str) -> list[str]:
        return paths_below(self.bases, self.version, relative)

    def read(self, path: str) -> str:
        return Path(path).read_bytes().decode()

    def write(self, path: str, text: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def mkdir(self, path: str) -> None:
        Path(path).mkdir()

    def rmdir(self, path: str) -> None:
        Path(path).rmdir()

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def start(self) -> int:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes[process.pid] = process
        return process.pid

    def allocate(self, pid: int, mebibytes: int) -> bool:
        process = self._processes[pid]
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{mebibytes}\n")
        process.stdin.flush()
        return process.stdout.readline() == "held\n"

    def runs(self, pid: int) -> bool:
        deadline = time.monotonic() + 10
        while self._processes[pid].poll() is None:
            if time.monotonic() > deadline:
                return True
            time.sleep(0.02)
        return False

    def end_processes(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()


def machine_version() -> int:
    """The cgroup version of this machine, 0 if it has none."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return 2
    return 1 if (root / "cpu" / "cgroup.procs").exists() else 0


def missing_place() -> str | None:
    """Why the table cannot be tried on this machine's own kernel; None if it can."""
    version = machine_version()
    if version == 0:
        return "needs cgroup hierarchies at /sys/fs/cgroup"
    if os.geteuid() != 0:
        return "needs root: run the tests with sudo"
    if version == 1:
        return None  # the marker's probe tried it by making a group
    own = Path("/proc/self/cgroup").read_text().strip().removeprefix("0::")
    controllers = Path(f"/sys/fs/cgroup{own}/cgroup.controllers").read_text().split()
    lacking = sorted(set(V2_CONTROLLERS) - set(controllers))
    if lacking:
        return (
            f"needs a delegated cgroup v2 subtree with {' '.join(lacking)}: "
            "run in a unit with Delegate=yes"
        )
    return None


@contextmanager
def real_ground() -> Iterator[RealGround]:
    """A group of our own in this machine's hierarchies, gone afterwards with all in it."""
    name = f"koord-test-{os.getpid()}-{next(_numbers)}"
    version = machine_version()
    if version == 2:
        bases = {"": f"{_delegated()}/{name}"}
    else:
        bases = {each: f"/sys/fs/cgroup/{each}/{name}" for each in V1_CONTROLLERS}
    for base in bases.values():
        Path(base).mkdir()
    ground = RealGround(version, bases)
    try:
        if version == 2:
            wanted = " ".join(f"+{each}" for each in V2_CONTROLLERS)
            ground.write(f"{bases['']}/cgroup.subtree_control", wanted)
        else:
            for kind in ("cpus", "mems"):
                listed = ground.read(f"/sys/fs/cgroup/cpuset/cpuset.{kind}")
                ground.write(f"{bases['cpuset']}/cpuset.{kind}", listed)
        yield ground
    finally:
        ground.end_processes()
        for base in bases.values():
            _remove(Path(base))


def _delegated() -> str:
    """The subtree that systemd left to us: our own processes step aside into a leaf of it."""
    own = Path("/proc/self/cgroup").read_text().strip().removeprefix("0::")
    unit = own.removesuffix("/koord-test-runner")
    base = Path(f"/sys/fs/cgroup{unit}")
    leaf = base / "koord-test-runner"
    leaf.mkdir(exist_ok=True)
    for pid in (base / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (leaf / "cgroup.procs").write_text(pid)
    (base / "cgroup.subtree_control").write_text(" ".join(f"+{each}" for each in V2_CONTROLLERS))
    return str(base)


def _remove(base: Path) -> None:
    deadline = time.monotonic() + 5
    while base.exists():
        for folder, _, _ in os.walk(base, topdown=False):
            with contextlib.suppress(OSError):
                for pid in (Path(folder) / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
        if time.monotonic() > deadline:
            raise TimeoutError(f"could not remove {base}")
        time.sleep(0.01)
