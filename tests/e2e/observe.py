"""What the kernel has for a pod, read from its files: the one judge of these tests."""

from __future__ import annotations

from tests.beds.containerd import Containerd
from tests.beds.daemon import wait_until
from tests.beds.groups import CGROUP_MOUNT
from tests.beds.kubelet import RunningPod

# The files that some policy may write on a v1 kernel without vendor patches.
WRITTEN = (
    ("cpu", "cpu.shares"),
    ("cpu", "cpu.cfs_quota_us"),
    ("cpu", "cpu.cfs_period_us"),
    ("cpu", "cpu.cfs_burst_us"),
    ("cpu", "cpu.idle"),
    ("cpuset", "cpuset.cpus"),
    ("cpuset", "cpuset.mems"),
    ("memory", "memory.limit_in_bytes"),
    ("memory", "memory.memsw.limit_in_bytes"),
)


def container_value(bed: Containerd, pod: RunningPod, name: str) -> str:
    return bed.groups.read(pod.container_cgroup("main"), name)


def pod_value(bed: Containerd, pod: RunningPod, name: str) -> str:
    return bed.groups.read(pod.cgroup, name)


def eventually(bed: Containerd, pod: RunningPod, name: str, value: str, *, level: str) -> None:
    """Wait for a value that the daemon writes after a trigger; says what is there if it stays."""
    read = container_value if level == "container" else pod_value
    try:
        wait_until(f"{level} {name} = {value}", lambda: read(bed, pod, name) == value)
    except Exception as error:
        error.add_note(f"it is {read(bed, pod, name)!r}")
        raise


def all_values(bed: Containerd) -> dict[str, bytes]:
    """Every file that a policy may write, below kubepods, with its bytes."""
    values = {}
    for controller, name in WRITTEN:
        root = CGROUP_MOUNT / controller / bed.groups.path.lstrip("/")
        for path in sorted(root.rglob(name)):
            values[str(path.relative_to(CGROUP_MOUNT))] = path.read_bytes()
    return values
