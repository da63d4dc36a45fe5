"""The cgroups that a kubelet would make: kubepods, its QoS levels, and one group per pod.

They live under a root of their own, so beds can stand side by side and nobody's pods are touched:
in the v2 hierarchy where that has the controllers, else in every v1 hierarchy (and in the empty v2
hierarchy that a hybrid layout has). What is left in the root at the end is ended, and every group
is removed. Resources are called by their v1 names, as everywhere here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.beds.errors import BedError

CGROUP_MOUNT = Path("/sys/fs/cgroup")
QosClass = Literal["guaranteed", "burstable", "besteffort"]
V1_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")
V2_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
V2_FILES = {
    "cpu.shares": "cpu.weight",
    "cpu.cfs_quota_us": "cpu.max",
    "memory.limit_in_bytes": "memory.max",
}
_counter = itertools.count()


@dataclass(frozen=True, slots=True)
class Kubepods:
    """`path` is absolute within each hierarchy, e.g. "/koord-bed-77-0/kubepods"."""

    path: str
    version: Literal[1, 2]
    hierarchies: tuple[Path, ...]

    def pod_path(self, uid: str, qos: QosClass) -> str:
        """Where the cgroupfs driver puts a pod: guaranteed pods stand right under kubepods."""
        level = "" if qos == "guaranteed" else f"/{qos}"
        return f"{self.path}{level}/pod{uid}"

    def name(self, resource: str) -> str:
        """What the kernel calls the resource here."""
        return V2_FILES.get(resource, resource) if self.version == 2 else resource

    def weight(self, cpu_shares: int) -> int:
        """cpu_shares (2..262144) as the kernel holds them here: on v2 by the kubelet's formula."""
        return 1 + (cpu_shares - 2) * 9999 // 262_142 if self.version == 2 else cpu_shares

    def file(self, group: str, resource: str) -> Path:
        """The resource's file in a group, which is given by its absolute cgroup path."""
        if self.version == 2:
            return CGROUP_MOUNT / group.lstrip("/") / self.name(resource)
        # cgroup.procs and the like stand in every hierarchy; memory's is as good as any.
        controller = resource.split(".")[0].replace("cgroup", "memory")
        return CGROUP_MOUNT / controller / group.lstrip("/") / resource

    def read(self, group: str, resource: str) -> str:
        """The file's text; on v2 limits read as v1 has them: quota alone, -1 for "max"."""
        text = self.file(group, resource).read_text().strip()
        if self.version == 2 and resource in ("cpu.cfs_quota_us", "memory.limit_in_bytes"):
            return text.split()[0].replace("max", "-1")
        return text

    def make_pod(
        self,
        uid: str,
        qos: QosClass,
        *,
        cpu_shares: int,
        cfs_quota_us: int | None = None,
        memory_limit_bytes: int | None = None,
    ) -> str:
        """Make the pod's group with the values a kubelet gives it; answers its path."""
        path = self.pod_path(uid, qos)
        self.make(path)
        for resource, value in (
            ("cpu.shares", self.weight(cpu_shares)),
            ("cpu.cfs_quota_us", cfs_quota_us),
            ("memory.limit_in_bytes", memory_limit_bytes),
        ):
            if value is not None:
                self.file(path, resource).write_text(str(value))
        return path

    def remove(self, path: str) -> None:
        """Remove a group that has no processes and no children. OSError when it has some."""
        for hierarchy in self.hierarchies:
            (hierarchy / path.lstrip("/")).rmdir()

    def remove_pod(self, uid: str, qos: QosClass) -> None:
        _remove_trees([h / self.pod_path(uid, qos).lstrip("/") for h in self.hierarchies])

    def make(self, path: str) -> None:
        """Make a group, given by its absolute cgroup path, in every hierarchy, with its parents."""
        for hierarchy in self.hierarchies:
            folder = hierarchy
            for part in path.strip("/").split("/"):
                parent, folder = folder, folder / part
                if self.version == 2:
                    wanted = " ".join(f"+{controller}" for controller in V2_CONTROLLERS)
                    (parent / "cgroup.subtree_control").write_text(wanted)
                try:
                    folder.mkdir()
                except FileExistsError:
                    continue
                if self.version == 1 and hierarchy.name == "cpuset":
                    # A v1 cpuset group starts empty and refuses processes until it is filled.
                    for name in ("cpuset.cpus", "cpuset.mems"):
                        (folder / name).write_text((parent / name).read_text())


def layout() -> tuple[Literal[1, 2], tuple[Path, ...]]:
    """The cgroup version of this machine and its hierarchies; BedError says what is missing."""
    controllers = CGROUP_MOUNT / "cgroup.controllers"
    if controllers.exists():
        lacking = set(V2_CONTROLLERS) - set(controllers.read_text().split())
        if lacking:
            raise BedError(
                f"the cgroup v2 hierarchy at {CGROUP_MOUNT} has no {', '.join(sorted(lacking))}: "
                "a container sees only what its host delegates; run this on the host"
            )
        return 2, (CGROUP_MOUNT,)
    missing = [c for c in V1_CONTROLLERS if not (CGROUP_MOUNT / c / "cgroup.procs").exists()]
    if missing:
        raise BedError(
            f"neither a cgroup v2 hierarchy at {CGROUP_MOUNT} nor v1 hierarchies below it "
            f"(no {', '.join(missing)}): mount one of the two"
        )
    named = [CGROUP_MOUNT / name for name in ("systemd", "unified")]
    return 1, tuple(
        [CGROUP_MOUNT / c for c in V1_CONTROLLERS]
        + [h for h in named if (h / "cgroup.procs").exists()]
    )


@contextmanager
def kubepods() -> Iterator[Kubepods]:
    """A kubepods tree for one bed; raises BedError where there are no cgroups to make it in."""
    version, hierarchies = layout()
    for hierarchy in hierarchies:
        for stale in hierarchy.glob("koord-bed-*-*"):
            if not owner_lives(stale.name):
                _remove_trees([stale])
    root = f"/koord-bed-{os.getpid()}-{next(_counter)}"
    tree = Kubepods(f"{root}/kubepods", version, hierarchies)
    try:
        for level in ("", "/burstable", "/besteffort"):
            tree.make(f"{tree.path}{level}")
        yield tree
    finally:
        _remove_trees([h / root.lstrip("/") for h in hierarchies])


def owner_lives(name: str) -> bool:
    """Whether the process that a bed's group or folder is named after, koord-bed-PID-X, runs."""
    return Path("/proc", name.split("-")[2]).exists()


def _remove_trees(roots: list[Path], *, patience_s: float = 60.0) -> None:
    """End what still runs in these groups and remove them, children first.

    A killed process leaves its group when it has ended: after a frozen group was thawed, and after
    a request to a busy disk. patience_s: how long neither a group nor a process may go before
    BedError, which names those that are left.
    """
    fewest = (sys.maxsize, 0)
    deadline = 0.0
    while groups := [Path(name) for root in roots for name, _, _ in os.walk(root, topdown=False)]:
        running = {pid for group in groups for pid in _processes(group)}
        if (left := (len(groups), len(running))) < fewest:
            fewest, deadline = left, time.monotonic() + patience_s
        elif time.monotonic() > deadline:
            raise BedError(f"could not remove {_what_is_left(groups)}")
        for group in groups:
            _thaw(group)
        _end_processes(running, within_s=0.5)
        for group in groups:
            # EBUSY while a process is about to end, or where a runtime has made a group meanwhile.
            with contextlib.suppress(OSError):
                group.rmdir()
        time.sleep(0.005)


def _processes(group: Path) -> list[int]:
    """The processes of a group; 0 stands for those that this PID namespace does not show."""
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _thaw(group: Path) -> None:
    """Let processes go on that a runtime, itself killed meanwhile, has left frozen."""
    for name, text in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        file = group / name
        with contextlib.suppress(OSError):
            if file.exists():
                file.write_text(text)


def _end_processes(pids: Iterable[int], *, within_s: float) -> None:
    """Kill processes and wait until they have ended, or for `within_s`."""
    with contextlib.ExitStack() as stack:
        ends = select.poll()
        waiting = 0
        for pid in pids:
            try:
                process = os.pidfd_open(pid)
            except OSError:  # it has ended, or is the 0 of another PID namespace
                continue
            stack.callback(os.close, process)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            ends.register(process, select.POLLIN)
            waiting += 1
        deadline = time.monotonic() + within_s
        while waiting and (rest_s := deadline - time.monotonic()) > 0:
            for process, _ in ends.poll(rest_s * 1000):
                ends.unregister(process)
                waiting -= 1


def _what_is_left(groups: list[Path]) -> str:
    """The groups that are left, each with its processes and the state that the kernel has of them:
    D waits for a device."""
    return ", ".join(
        f"{group} ({'; '.join(map(_described, _processes(group))) or 'no processes'})"
        for group in groups
        if group.exists()
    )


def _described(pid: int) -> str:
    try:
        # "77 (name) D ...": a name may contain blanks and parentheses.
        head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
        return f"{head}) {rest[:1]}"
    except OSError:
        return f"{pid} which is not to be seen here"
