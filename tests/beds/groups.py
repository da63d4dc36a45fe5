"""The cgroups that a kubelet would make: kubepods, its QoS levels, and one group per pod.

They live under a root of their own in every v1 hierarchy of this machine (and in the empty v2
hierarchy that a hybrid layout has), so beds can stand side by side and nobody's pods are touched.
What is left in the root at the end is ended, and every group is removed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.beds.packages import BedError

CGROUP_MOUNT = Path("/sys/fs/cgroup")
QosClass = Literal["guaranteed", "burstable", "besteffort"]
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids")
_counter = itertools.count()


@dataclass(frozen=True, slots=True)
class Kubepods:
    """`path` is absolute within each hierarchy, e.g. "/koord-bed-77-0/kubepods"."""

    path: str
    hierarchies: tuple[Path, ...]

    def pod_path(self, uid: str, qos: QosClass) -> str:
        """Where the cgroupfs driver puts a pod: guaranteed pods stand right under kubepods."""
        level = "" if qos == "guaranteed" else f"/{qos}"
        return f"{self.path}{level}/pod{uid}"

    def file(self, controller: str, group: str, name: str) -> Path:
        """The file of one controller for a group given by its absolute cgroup path."""
        return CGROUP_MOUNT / controller / group.lstrip("/") / name

    def read(self, controller: str, group: str, name: str) -> str:
        return self.file(controller, group, name).read_text().strip()

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
        self._make(path)
        values: list[tuple[str, str, int | None]] = [
            ("cpu", "cpu.shares", cpu_shares),
            ("cpu", "cpu.cfs_quota_us", cfs_quota_us),
            ("memory", "memory.limit_in_bytes", memory_limit_bytes),
        ]
        for controller, name, value in values:
            if value is not None:
                self.file(controller, path, name).write_text(str(value))
        return path

    def remove_pod(self, uid: str, qos: QosClass) -> None:
        _remove_trees([h / self.pod_path(uid, qos).lstrip("/") for h in self.hierarchies])

    def _make(self, path: str) -> None:
        for hierarchy in self.hierarchies:
            folder = hierarchy
            for part in path.strip("/").split("/"):
                parent, folder = folder, folder / part
                try:
                    folder.mkdir()
                except FileExistsError:
                    continue
                if hierarchy.name == "cpuset":
                    # A v1 cpuset group starts empty and refuses processes until it is filled.
                    for name in ("cpuset.cpus", "cpuset.mems"):
                        (folder / name).write_text((parent / name).read_text())


@contextmanager
def kubepods() -> Iterator[Kubepods]:
    """A kubepods tree for one bed; raises BedError where v1 hierarchies are missing."""
    missing = [c for c in CONTROLLERS if not (CGROUP_MOUNT / c / "cgroup.procs").exists()]
    if missing:
        raise BedError(
            f"no cgroup v1 hierarchy for {', '.join(missing)} under {CGROUP_MOUNT}: "
            "this bed needs v1 controllers mounted one by one"
        )
    for stale in CGROUP_MOUNT.glob("*/koord-bed-*-*"):
        if not owner_lives(stale.name):
            _remove_trees([stale])
    named = [CGROUP_MOUNT / name for name in ("systemd", "unified")]
    hierarchies = tuple(
        [CGROUP_MOUNT / c for c in CONTROLLERS]
        + [h for h in named if (h / "cgroup.procs").exists()]
    )
    root = f"/koord-bed-{os.getpid()}-{next(_counter)}"
    tree = Kubepods(f"{root}/kubepods", hierarchies)
    try:
        for level in ("", "/burstable", "/besteffort"):
            tree._make(f"{tree.path}{level}")
        yield tree
    finally:
        _remove_trees([h / root.lstrip("/") for h in hierarchies])


def owner_lives(name: str) -> bool:
    """Whether the process that a bed's group or folder is named after, koord-bed-PID-X, runs."""
    return Path("/proc", name.split("-")[2]).exists()


def _remove_trees(roots: list[Path], *, patience_s: float = 5.0) -> None:
    """End what still runs in these groups and remove them, children first."""
    deadline = time.monotonic() + patience_s
    while True:
        left = [root for root in roots if root.exists()]
        if not left:
            return
        for root in left:
            folders = [Path(folder) for folder, _, _ in os.walk(root, topdown=False)]
            for folder in folders:
                for pid in _processes(folder):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    folder.rmdir()
        if time.monotonic() > deadline:
            raise BedError(f"could not remove {', '.join(str(r) for r in left if r.exists())}")
        time.sleep(0.02)


def _processes(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []
