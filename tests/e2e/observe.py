"""What the kernel has for a pod, read from its files: the one judge of these tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.beds.containerd import Containerd
from tests.beds.errors import BedError
from tests.beds.groups import CGROUP_MOUNT
from tests.beds.kubelet import RunningPod
from tests.waiting import wait_until

# The files that some policy may write on a kernel without vendor patches, or that move with them.
WRITTEN = {
    1: (
        "cpu/**/cpu.shares",
        "cpu/**/cpu.cfs_*_us",
        "cpu/**/cpu.idle",
        "cpuset/**/cpuset.cpus",
        "cpuset/**/cpuset.mems",
        "memory/**/memory.limit_in_bytes",
        "memory/**/memory.memsw.limit_in_bytes",
    ),
    2: (
        "**/cpu.weight",
        "**/cpu.max",
        "**/cpu.max.burst",
        "**/cpu.idle",
        "**/cpuset.cpus",
        "**/cpuset.mems",
        "**/memory.min",
        "**/memory.low",
        "**/memory.high",
        "**/memory.max",
        "**/memory.swap.max",
        "**/memory.oom.group",
    ),
}


def container_value(bed: Containerd, pod: RunningPod, name: str) -> str:
    return bed.groups.read(pod.container_cgroup("main"), name)


def pod_value(bed: Containerd, pod: RunningPod, name: str) -> str:
    return bed.groups.read(pod.cgroup, name)


def kernel_text(bed: Containerd, name: str, value: str) -> str:
    """A v1 value as `container_value` reads it here: shares are weights on v2."""
    return str(bed.groups.weight(int(value))) if name == "cpu.shares" else value


def eventually(bed: Containerd, pod: RunningPod, name: str, value: str, *, level: str) -> None:
    """Wait for a value that the daemon writes after a trigger; says what is there if it stays."""
    read = container_value if level == "container" else pod_value
    value = kernel_text(bed, name, value)
    try:
        wait_until(lambda: read(bed, pod, name) == value, f"{level} {name} = {value}")
    except Exception as error:
        error.add_note(f"it is {read(bed, pod, name)!r}")
        raise


@contextmanager
def values_seen(bed: Containerd, pod: RunningPod, name: str) -> Iterator[list[str]]:
    """The values that a container's file has during the block, in their order.

    A value that stands for less than about a millisecond may be missing.
    """
    path = bed.groups.file(pod.container_cgroup("main"), name)
    seen: list[str] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.0005):
            value = path.read_text().strip()
            if seen[-1:] != [value]:
                seen.append(value)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


def settled_values(bed: Containerd) -> dict[str, bytes]:
    """`all_values` once nothing moves: a runtime applies what it was told a moment later."""
    seen = all_values(bed)
    for _ in range(20):
        time.sleep(0.5)
        before, seen = seen, all_values(bed)
        if seen == before:
            return seen
    raise BedError("values still move after 10 s")


def all_values(bed: Containerd) -> dict[str, bytes]:
    """Every file that a policy may write, below kubepods, with its bytes."""
    values = {}
    for pattern in WRITTEN[bed.groups.version]:
        controller, _, below = pattern.rpartition("**/")
        root = CGROUP_MOUNT / controller / bed.groups.path.lstrip("/")
        for path in sorted(root.rglob(below)):
            values[str(path.relative_to(CGROUP_MOUNT))] = path.read_bytes()
    return values
