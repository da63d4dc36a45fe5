"""What a plan reads: the files of its values, and others only where a value may have to change."""

from __future__ import annotations

import msgspec

from hooks.state import State
from linux.resources import Resource
from tests.koordlet.executor.bed import TWO_CORES, Bed
from tests.simulated.faults import Operation
from tests.simulated.kubelet import Limits as PodLimits

QUOTA = Resource.CPU_CFS_QUOTA


def reads_of(bed: Bed, path: str) -> list[str]:
    """Return a list that grows with each read, or listing of a directory, of a matching path."""
    reads: list[str] = []
    operations: tuple[Operation, ...] = ("read", "listdir")
    for operation in operations:
        bed.kernel.faults.before(operation, lambda: reads.append(path), path=path, nth=0)
    return reads


def test_nothing_around_a_value_in_force_is_read() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("container/1", (container.cgroup, QUOTA, 200_000))
    above = reads_of(bed, bed.kubelet.path(pod.cgroup, "cpu.cfs_quota_us"))
    burst = reads_of(bed, bed.kubelet.path(container.cgroup, "cpu.cfs_burst_us"))
    assert bed.run().written == 0
    assert bed.view("container/1", QUOTA).state is State.APPLIED
    assert (above, burst) == ([], [])
    bed.want("container/1", (container.cgroup, QUOTA, 100_000))
    assert bed.run().written == 1
    assert above and burst


def test_the_period_of_a_group_around_is_read_only_if_its_quota_is_limited() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    limited = reads_of(bed, bed.kubelet.path(pod.cgroup, "cpu.cfs_period_us"))
    unlimited = reads_of(
        bed, bed.kubelet.path(bed.kubelet.qos_dir("Burstable"), "cpu.cfs_period_us")
    )
    bed.want("container/1", (container.cgroup, QUOTA, 100_000))
    assert bed.run().written == 1
    assert limited and not unlimited


def test_a_stand_in_that_is_in_force_is_not_judged_again() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(PodLimits(cpu_request_milli=300), qos="BestEffort")
    bed.want("pod/a", (pod.cgroup, QUOTA, 100_000))
    stand_in = bed.executor.wanted("pod/a")[pod.cgroup, QUOTA, ""]
    claim = msgspec.structs.replace(stand_in.claim, degraded="stands in for something else")
    bed.executor.want("pod/a", [msgspec.structs.replace(stand_in, claim=claim)])
    bed.run()
    assert bed.view("pod/a", QUOTA).state is State.DEGRADED
    period = reads_of(bed, bed.kubelet.path(pod.cgroup, "cpu.cfs_period_us"))
    for subjects in (None, ["pod/a"]):
        bed.executor.look_again(subjects)
        bed.run()
    assert not period
    bed.set(pod.cgroup, "cpu.cfs_quota_us", "50000")
    assert bed.run().written == 1


def test_a_value_that_is_held_back_is_judged_again() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("container/1", (container.cgroup, QUOTA, 500_000))
    bed.run()
    assert bed.view("container/1", QUOTA).state is State.DEGRADED
    bed.set(pod.cgroup, "cpu.cfs_quota_us", "600000")
    bed.executor.look_again(["container/1"])
    bed.run()
    assert bed.view("container/1", QUOTA).state is State.APPLIED
    assert bed.text(container.cgroup, "cpu.cfs_quota_us") == "500000"
