"""Unmanaged groups around a managed one: their values decide what can be written."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from hooks.state import State
from linux.resources import UNLIMITED, Resource
from tests.koordlet.executor.bed import BOTH, TWO_CORES, Bed
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2, Profile
from tests.simulated.kubelet import Limits as PodLimits

SHARES, QUOTA, LIMIT = Resource.CPU_SHARES, Resource.CPU_CFS_QUOTA, Resource.MEMORY_LIMIT
IDLE, CPUS = Resource.CPU_IDLE, Resource.CPUSET_CPUS


def test_a_limited_group_below_an_unlimited_one_counts() -> None:
    """The unlimited one in between hands the limit above it down to those below."""
    bed = Bed()
    pod = bed.kubelet.add_pod(PodLimits())
    container = pod.start(TWO_CORES)
    burstable = bed.kubelet.qos_dir("Burstable")
    bed.want("qos/burstable", (burstable, QUOTA, 100_000))
    report = bed.run()
    assert (report.failed, bed.text(container.cgroup, "cpu.cfs_quota_us")) == (0, "200000")
    assert bed.text(burstable, "cpu.cfs_quota_us") == "200000"
    assert container.cgroup in bed.view("qos/burstable", QUOTA).detail


@pytest.mark.parametrize("period_us", [33_333, 50_000, 70_001, 250_000])
@pytest.mark.parametrize("parents", [True, False], ids=["parent's", "child's"])
def test_quotas_of_other_periods_are_compared_as_the_kernel_does(
    period_us: int, parents: bool
) -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(PodLimits())
    odd = pod.cgroup if parents else container.cgroup
    bed.set(odd, "cpu.cfs_period_us", str(period_us))
    bed.set(pod.cgroup, "cpu.cfs_quota_us", "123457")
    bed.want("container/1", (container.cgroup, QUOTA, 10_000_000))
    assert bed.run().failed == 0
    assert bed.view("container/1", QUOTA).state is State.DEGRADED
    quota = int(bed.text(container.cgroup, "cpu.cfs_quota_us"))
    with pytest.raises(OSError, match="Invalid"):
        bed.set(container.cgroup, "cpu.cfs_quota_us", str(quota + 2))


def test_what_was_bounded_stays_so_while_another_value_moves() -> None:
    bed = Bed()
    pod, other = bed.kubelet.add_pod(TWO_CORES), bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("container/1", (container.cgroup, QUOTA, 500_000))
    assert bed.run().failed == 0
    bed.want("pod/b", (other.cgroup, QUOTA, 300_000))
    assert bed.run().failed == 0


@BOTH
def test_less_than_a_page_is_no_difference(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, LIMIT, (1 << 30) + 100))
    assert bed.run().written == 0
    assert bed.view("pod/a", LIMIT).state is State.APPLIED


def test_memory_and_swap_without_a_limit_stay_without() -> None:
    """Only who has both alike, as runtimes set them, is kept from swapping."""
    bed = Bed(DEBIAN_12_V1)
    container = bed.kubelet.add_pod(PodLimits()).start(PodLimits())
    before = bed.text(container.cgroup, "memory.memsw.limit_in_bytes")
    bed.want("container/1", (container.cgroup, LIMIT, 1 << 29))
    bed.run()
    assert bed.text(container.cgroup, "memory.limit_in_bytes") == str(1 << 29)
    assert bed.text(container.cgroup, "memory.memsw.limit_in_bytes") == before


def test_a_controller_is_handed_down_over_several_levels_at_once() -> None:
    bed = Bed(DEBIAN_12_V2)
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    burstable = bed.kubelet.qos_dir("Burstable")
    for cgroup in (pod.cgroup, burstable):
        bed.kernel.write_as("operator", f"/sys/fs/cgroup/{cgroup}/cgroup.subtree_control", "-cpu")
    bed.want("container/1", (container.cgroup, SHARES, 2048))
    bed.run()
    with bed.kernel.recording() as writes:
        bed.executor.look_again()
        bed.run()
    assert not [write for write in writes if write.error]
    bed.executor.look_again()
    bed.run()
    assert bed.view("container/1", SHARES).state is State.APPLIED


def test_a_controller_that_the_pods_root_lacks_is_not_ours_to_enable() -> None:
    bed = Bed(DEBIAN_12_V2)
    pod = bed.kubelet.add_pod(TWO_CORES)
    for cgroup in (pod.cgroup, bed.kubelet.qos_dir("Burstable"), bed.kubelet.root):
        bed.kernel.write_as("operator", f"/sys/fs/cgroup/{cgroup}/cgroup.subtree_control", "-cpu")
    bed.kernel.write_as("operator", "/sys/fs/cgroup/cgroup.subtree_control", "-cpu")
    bed.want("pod/a", (pod.cgroup, SHARES, 2048))
    with bed.kernel.recording() as writes:
        bed.run()
        bed.executor.look_again()
        bed.run()
    assert not writes
    assert bed.view("pod/a", SHARES).state is State.UNSUPPORTED


@BOTH
def test_a_weight_in_place_of_idle_takes_one_pass(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, IDLE, 1))
    bed.run()
    bed.want("pod/a", (pod.cgroup, SHARES, 2048))
    bed.run()
    assert bed.view("pod/a", SHARES).state is State.APPLIED


@BOTH
@pytest.mark.parametrize("kernel", [(6, 1), (6, 12)], ids=["6.1", "6.12"])
def test_a_weight_comes_back_after_an_idle_that_ended_late(
    profile: Profile, kernel: tuple[int, int]
) -> None:
    """Neither what an idle group reads nor what the kernel resets it to is anybody's weight."""
    bed = Bed(replace(profile, kernel=kernel))
    pod = bed.kubelet.add_pod(TWO_CORES)
    name = "cpu.shares" if profile.cgroup == 1 else "cpu.weight"
    bed.want("pod/a", (pod.cgroup, SHARES, 4096))
    bed.run()
    kubelets = bed.view("pod/a", SHARES).original
    bed.want("pod/a", (pod.cgroup, IDLE, 1))
    bed.run()
    bed.run()
    bed.want("pod/a")
    bed.kernel.faults.fail("write", errno.EIO)
    for _ in range(4):
        bed.run()
        bed.executor.look_again()
        bed.kernel.clock.advance(5)
    assert (bed.text(pod.cgroup, "cpu.idle"), bed.text(pod.cgroup, name)) == ("0", kubelets)
    assert not bed.journal.records()


def test_unlimited_is_no_bound() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(PodLimits())
    container = pod.start(TWO_CORES)
    bed.want("container/1", (container.cgroup, QUOTA, UNLIMITED))
    bed.run()
    assert bed.view("container/1", QUOTA).state is State.APPLIED
