"""What the executor does to a kernel with its rules: order, clamps, states, back-off."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from apis.cpuset import CpuSet
from hooks.state import State
from koordlet.executor.table import Limits
from linux.resources import UNLIMITED, DeviceNode, Resource
from tests.koordlet.executor.bed import BOTH, TWO_CORES, Bed
from tests.simulated import (
    ANOLIS_8,
    DEBIAN_12_V1,
    DEBIAN_12_V2,
    UBUNTU_24_04,
    Crash,
    Profile,
)
from tests.simulated.kubelet import Limits as PodLimits

SHARES, QUOTA, BURST = Resource.CPU_SHARES, Resource.CPU_CFS_QUOTA, Resource.CPU_CFS_BURST
CPUS, LIMIT, IDLE = Resource.CPUSET_CPUS, Resource.MEMORY_LIMIT, Resource.CPU_IDLE


@BOTH
def test_a_value_is_written_once_and_then_left_alone(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, QUOTA, 150_000), (pod.cgroup, LIMIT, 1 << 29))
    assert bed.run().written == 2
    for _ in range(3):
        with bed.kernel.recording() as writes:
            assert bed.run().written == 0
        assert not writes
    assert bed.view("pod/a", QUOTA).state is State.APPLIED
    assert bed.view("pod/a", QUOTA).original == "200000"


@BOTH
def test_planning_writes_nothing_and_says_old_and_new(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, QUOTA, 150_000))
    with bed.kernel.recording() as writes:
        (planned,) = bed.executor.plan().writes
    assert not writes and not len(bed.journal)
    assert (planned.old, planned.new, planned.subject) == ("200000", "150000", "pod/a")
    assert planned.why == "test: because"


@BOTH
@pytest.mark.parametrize("up", [True, False], ids=["growing", "shrinking"])
def test_quotas_move_in_an_order_that_v1_takes(profile: Profile, up: bool) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    value = 300_000 if up else 50_000
    # Subjects come top-down, which is the wrong order for shrinking.
    bed.want("pod/a", (pod.cgroup, QUOTA, value))
    bed.want("container/1", (container.cgroup, QUOTA, value))
    report = bed.run()
    assert (report.written, report.failed) == (2, 0)
    order = [write.path.split("/")[-2] for write in bed.kernel.writes_of()]
    names = [pod.cgroup.split("/")[-1], container.cgroup.split("/")[-1]]
    assert order == (names if up else names[::-1])


def test_a_cpuset_that_moves_sideways_goes_through_the_union() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    for cpus in ("0-1", "2-3", "1-2"):
        for subject, cgroup in (("pod/a", pod.cgroup), ("container/1", container.cgroup)):
            bed.want(subject, (cgroup, CPUS, CpuSet.parse(cpus)))
        # The sandbox has all CPUs and is not managed.
        assert pod.sandbox is not None
        bed.want("sandbox/1", (pod.sandbox.cgroup, CPUS, CpuSet.parse(cpus)))
        assert bed.run().failed == 0
        assert bed.text(pod.cgroup, "cpuset.cpus") == cpus
        assert bed.text(container.cgroup, "cpuset.cpus") == cpus


def test_a_parent_is_kept_around_an_unmanaged_child() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    pod.start(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, QUOTA, 100_000))
    assert bed.run().failed == 0
    view = bed.view("pod/a", QUOTA)
    assert view.state is State.DEGRADED
    assert "kept around" in view.detail
    assert bed.text(pod.cgroup, "cpu.cfs_quota_us") == "200000"


def test_a_child_is_bounded_by_an_unmanaged_parent() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("container/1", (container.cgroup, QUOTA, 500_000))
    bed.set(container.cgroup, "cpu.cfs_quota_us", "50000")
    assert bed.run().failed == 0
    assert bed.text(container.cgroup, "cpu.cfs_quota_us") == "200000"
    assert bed.view("container/1", QUOTA).detail == f"bounded by {pod.cgroup}"
    # And when the parent grows, the wish is met.
    bed.set(pod.cgroup, "cpu.cfs_quota_us", "-1")
    bed.executor.look_again()
    bed.run()
    assert bed.text(container.cgroup, "cpu.cfs_quota_us") == "500000"
    assert bed.view("container/1", QUOTA).state is State.APPLIED


def test_a_cpuset_outside_the_parents_is_blocked_and_nothing_is_written() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    assert pod.sandbox is not None
    for cgroup in (pod.sandbox.cgroup, container.cgroup, pod.cgroup):
        bed.set(cgroup, "cpuset.cpus", "0-1")
    bed.want("container/1", (container.cgroup, CPUS, CpuSet.parse("2-3")))
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes
    view = bed.view("container/1", CPUS)
    assert view.state is State.BLOCKED and pod.cgroup in view.detail


@BOTH
def test_cpus_that_do_not_exist_are_left_out(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("container/1", (container.cgroup, CPUS, CpuSet.parse("2-9")))
    assert bed.run().failed == 0
    assert bed.text(container.cgroup, "cpuset.cpus") == "2-3"
    assert bed.view("container/1", CPUS).state is State.DEGRADED


@BOTH
def test_a_burst_stays_at_the_quota_and_moves_with_it(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    name = "cpu.cfs_burst_us" if profile.cgroup == 1 else "cpu.max.burst"
    steps = [
        (200_000, 2_000_000, "200000"),
        (100_000, 2_000_000, "100000"),
        (400_000, 300_000, "300000"),
        (UNLIMITED, 300_000, "0"),
        (100_000, 50_000, "50000"),
    ]
    for quota, burst, found in steps:
        bed.want("pod/a", (pod.cgroup, QUOTA, quota), (pod.cgroup, BURST, burst))
        assert bed.run().failed == 0
        assert bed.text(pod.cgroup, name) == found
        degraded = str(burst) != found
        expected = State.DEGRADED if degraded else State.APPLIED
        assert bed.view("pod/a", BURST).state is expected


def test_a_burst_follows_a_quota_that_only_the_parent_moves() -> None:
    bed = Bed(DEBIAN_12_V1)
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, QUOTA, UNLIMITED))
    bed.want("container/1", (container.cgroup, QUOTA, 50_000), (container.cgroup, BURST, 20_001))
    for of_pod, quota, burst in (
        (UNLIMITED, "50000", "20001"),
        (20_000, "20000", "20000"),
        (UNLIMITED, "50000", "20001"),
    ):
        bed.want("pod/a", (pod.cgroup, QUOTA, of_pod))
        for _ in range(2):
            assert bed.run().failed == 0
        assert bed.text(container.cgroup, "cpu.cfs_quota_us") == quota
        assert bed.text(container.cgroup, "cpu.cfs_burst_us") == burst


def test_alibaba_kernels_take_a_burst_above_the_quota() -> None:
    bed = Bed(ANOLIS_8)
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, BURST, 2_000_000))
    bed.run()
    assert bed.text(pod.cgroup, "cpu.cfs_burst_us") == "2000000"
    assert bed.view("pod/a", BURST).state is State.APPLIED


@BOTH
def test_a_foreign_burst_is_lowered_for_the_quota_and_comes_back(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    name = "cpu.cfs_burst_us" if profile.cgroup == 1 else "cpu.max.burst"
    bed.set(pod.cgroup, name, "150000", writer="operator")
    bed.want("pod/a", (pod.cgroup, QUOTA, 100_000))
    assert bed.run().failed == 0
    assert bed.text(pod.cgroup, name) == "100000"
    for _ in range(3):
        bed.executor.look_again()
        assert bed.run().written == 0
        assert not bed.executor.restoring()
    bed.want("pod/a")
    for _ in range(3):
        bed.run()
    assert bed.text(pod.cgroup, name) == "150000"
    assert not len(bed.journal)


@BOTH
def test_a_quota_is_scaled_to_the_groups_own_period(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(PodLimits(cpu_request_milli=1000))
    if profile.cgroup == 1:
        bed.set(pod.cgroup, "cpu.cfs_period_us", "10000")
    else:
        bed.set(pod.cgroup, "cpu.max", "max 10000")
    bed.want("pod/a", (pod.cgroup, QUOTA, 150_000))
    bed.run()
    name = "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"
    assert bed.text(pod.cgroup, name) == ("15000" if profile.cgroup == 1 else "15000 10000")
    assert bed.run().written == 0


def test_memory_is_compared_in_whole_pages() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, LIMIT, 1_000_000_001))
    assert bed.run().written == 1
    assert bed.run().written == 0
    assert bed.view("pod/a", LIMIT).state is State.APPLIED


def test_a_memory_limit_moves_past_the_limit_that_includes_swap() -> None:
    """A runtime that updates a v1 memory limit sets the one with swap to the same value."""
    bed = Bed()
    with_swap = "memory.memsw.limit_in_bytes"
    container = bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES)
    bed.set(container.cgroup, with_swap, str(1 << 30))
    for limit in (1 << 31, 1 << 29, UNLIMITED):
        bed.want("container/1", (container.cgroup, LIMIT, limit))
        assert bed.run().failed == 0
        assert bed.view("container/1", LIMIT).state is State.APPLIED
        both = [bed.text(container.cgroup, name) for name in (LIMIT.value, with_swap)]
        assert both[0] == both[1]
    bed.want("container/1")
    assert bed.run().failed == 0
    assert bed.text(container.cgroup, LIMIT.value) == str(1 << 30)


def test_a_memory_limit_leaves_an_unlimited_swap_alone() -> None:
    bed = Bed()
    container = bed.kubelet.add_pod(TWO_CORES).start(PodLimits(cpu_request_milli=100))
    before = bed.text(container.cgroup, "memory.memsw.limit_in_bytes")
    bed.want("container/1", (container.cgroup, LIMIT, 1 << 29))
    assert bed.run().written == 1
    assert bed.text(container.cgroup, "memory.memsw.limit_in_bytes") == before


@BOTH
def test_an_unlimited_value_is_no_difference(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(PodLimits(cpu_request_milli=100))
    bed.want("pod/a", (pod.cgroup, QUOTA, UNLIMITED), (pod.cgroup, LIMIT, UNLIMITED))
    assert bed.run().written == 0
    assert bed.view("pod/a", LIMIT).state is State.APPLIED


def test_weights_follow_the_formula_of_the_siblings() -> None:
    bed = Bed(UBUNTU_24_04)
    assert bed.kubelet.weights.value == "quadratic"
    pod = bed.kubelet.add_pod(TWO_CORES, TWO_CORES)
    one, other = pod.start(TWO_CORES), pod.start(TWO_CORES)
    # The requested shares show how the runtime converts; kubelet itself converts linearly.
    bed.want("container/1", (one.cgroup, SHARES, 512), requested={SHARES: 1024})
    bed.want("container/2", (other.cgroup, SHARES, 102), requested={SHARES: 1024})
    bed.want("pod/a", (pod.cgroup, SHARES, 512), requested={SHARES: 2048})
    assert bed.run().failed == 0
    assert bed.text(one.cgroup, "cpu.weight") == "59"
    assert bed.text(other.cgroup, "cpu.weight") == "17"
    assert bed.text(pod.cgroup, "cpu.weight") == "20"


@BOTH
def test_idle_fixes_the_weight_and_gives_it_back(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(PodLimits(cpu_request_milli=300), qos="BestEffort")
    weight = "cpu.shares" if profile.cgroup == 1 else "cpu.weight"
    before = bed.text(pod.cgroup, weight)
    bed.want("pod/a", (pod.cgroup, IDLE, 1))
    assert bed.run().failed == 0
    assert bed.text(pod.cgroup, "cpu.idle") == "1"
    for _ in range(3):
        assert bed.run().written == 0
    bed.want("pod/a", (pod.cgroup, IDLE, 1), (pod.cgroup, SHARES, 700))
    bed.run()
    assert bed.view("pod/a", SHARES).state is State.BLOCKED
    bed.want("pod/a")
    for _ in range(3):
        bed.run()
    assert bed.text(pod.cgroup, "cpu.idle") == "0"
    assert bed.text(pod.cgroup, weight) == before
    assert not len(bed.journal)


@BOTH
def test_a_foreign_weight_from_before_idle_began_is_the_one_that_comes_back(
    profile: Profile, tmp_path: Path
) -> None:
    """The weight is on record for idle's sake, and the kill came before the write."""
    bed = Bed(profile, journal_path=str(tmp_path / "journal"))
    pod = bed.kubelet.add_pod(PodLimits(cpu_request_milli=300), qos="BestEffort")
    weight = "cpu.shares" if profile.cgroup == 1 else "cpu.weight"
    bed.kernel.faults.crash("write", nth=1)
    with pytest.raises(Crash):
        bed.want("pod/a", (pod.cgroup, IDLE, 1))
        bed.run()
    bed.kernel.faults.clear()
    bed.restart()
    bed.set(pod.cgroup, weight, "77", writer="operator")
    bed.want("pod/a", (pod.cgroup, IDLE, 1))
    bed.run()
    assert bed.text(pod.cgroup, "cpu.idle") == "1"
    bed.want("pod/a")
    for _ in range(3):
        bed.run()
    assert bed.text(pod.cgroup, weight) == "77"


@BOTH
def test_a_foreign_weight_written_over_ours_comes_back_when_idle_takes_its_place(
    profile: Profile,
) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(PodLimits(cpu_request_milli=300), qos="BestEffort")
    weight = "cpu.shares" if profile.cgroup == 1 else "cpu.weight"
    bed.want("pod/a", (pod.cgroup, SHARES, 700))
    bed.run()
    bed.set(pod.cgroup, weight, "77", writer="operator")
    bed.want("pod/a", (pod.cgroup, IDLE, 1))
    for _ in range(3):
        bed.run()
    assert bed.text(pod.cgroup, "cpu.idle") == "1"
    bed.want("pod/a")
    for _ in range(3):
        bed.run()
    assert bed.text(pod.cgroup, weight) == "77"


def test_a_cpuset_is_not_emptied_where_it_is_unknown_whether_the_group_is_empty() -> None:
    """The kernel would refuse it from a group with processes."""
    bed = Bed(DEBIAN_12_V2)
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("container/1", (container.cgroup, CPUS, CpuSet.parse("1")))
    bed.run()
    events = bed.kubelet.path(container.cgroup, "cgroup.events")
    bed.kernel.faults.fail("read", errno.EIO, path=events, nth=0)
    bed.want("container/1")
    assert bed.run().failed == 0
    assert bed.text(container.cgroup, "cpuset.cpus.effective") == "0-3"


def test_a_cpuset_waits_while_the_cpus_of_the_machine_cannot_be_read() -> None:
    """Without them the restore of an empty set would be refused, and a wish would have no bound."""
    bed = Bed(DEBIAN_12_V2)
    container = bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES)
    bed.want("container/1", (container.cgroup, CPUS, CpuSet.parse("1")))
    bed.run()
    bed.want("container/1")
    possible = "/sys/devices/system/cpu/possible"
    bed.kernel.faults.fail("read", errno.EIO, path=possible, nth=0)
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes
    bed.kernel.faults.clear()
    bed.kernel.clock.advance(700)
    with bed.kernel.recording() as writes:
        bed.run()
    assert not [write for write in writes if write.error]
    assert bed.text(container.cgroup, "cpuset.cpus.effective") == "0-3"


@BOTH
def test_a_group_whose_weight_cannot_be_read_is_not_made_idle(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(PodLimits(cpu_request_milli=300), qos="BestEffort")
    weight = "cpu.shares" if profile.cgroup == 1 else "cpu.weight"
    before = bed.text(pod.cgroup, weight)
    bed.want("pod/a", (pod.cgroup, IDLE, 1))
    path = bed.kubelet.path(pod.cgroup, weight)
    bed.kernel.faults.fail("read", errno.EIO, path=path)
    assert bed.run().written == 0
    assert bed.view("pod/a", IDLE).state is State.BLOCKED
    bed.kernel.faults.clear()
    bed.executor.look_again()
    bed.run()
    assert bed.text(pod.cgroup, "cpu.idle") == "1"
    bed.want("pod/a")
    for _ in range(3):
        bed.run()
    assert bed.text(pod.cgroup, weight) == before


def test_a_weight_is_not_tried_while_the_group_could_not_be_made_busy_again() -> None:
    bed = Bed(DEBIAN_12_V1)
    pod = bed.kubelet.add_pod(PodLimits(cpu_request_milli=300), qos="BestEffort")
    bed.want("pod/a", (pod.cgroup, IDLE, 1))
    bed.run()
    path = bed.kubelet.path(pod.cgroup, "cpu.idle")
    bed.kernel.faults.fail("write", errno.EBUSY, path=path)
    bed.want("pod/a", (pod.cgroup, SHARES, 700))
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes  # the fault strikes before the kernel sees it
    assert bed.view("pod/a", SHARES).state is State.BLOCKED
    bed.kernel.faults.clear()
    bed.kernel.clock.advance(10)
    for _ in range(3):
        bed.run()
    assert bed.text(pod.cgroup, "cpu.shares") == "700"


def test_a_group_that_vanishes_is_nobodys_fault() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    path = bed.kubelet.path(pod.cgroup, "cpu.cfs_quota_us")
    bed.want("pod/a", (pod.cgroup, QUOTA, 100_000))
    bed.kernel.faults.before("write", pod.remove, path=path)
    report = bed.run()
    assert (report.written, report.failed) == (0, 0)
    assert bed.view("pod/a", QUOTA).state is State.PENDING
    assert bed.run().failed == 0
    bed.want("pod/a")
    bed.run()
    assert not len(bed.journal)


def test_what_the_kernel_lacks_is_unsupported() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, Resource.CPU_BVT, 2), (pod.cgroup, Resource.MEMORY_MIN, 4096))
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes
    assert bed.view("pod/a", Resource.CPU_BVT).state is State.UNSUPPORTED


def test_a_value_of_the_wrong_kind_fails_and_leaves_the_others_alone() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    odd = DeviceNode("/dev/x", "c", 1, 2, 0o600)
    bed.want("pod/a", (pod.cgroup, SHARES, odd), (pod.cgroup, QUOTA, 100_000))
    assert bed.run().written == 1
    assert bed.view("pod/a", SHARES).state is State.FAILED


def test_out_of_range_is_brought_into_range_and_said() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, SHARES, 1))
    bed.run()
    assert bed.text(pod.cgroup, "cpu.shares") == "2"
    assert bed.view("pod/a", SHARES).state is State.DEGRADED


def test_a_refused_file_rests_longer_each_time() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    path = bed.kubelet.path(pod.cgroup, "cpu.shares")
    bed.kernel.faults.fail("write", errno.EINVAL, path=path, nth=0)
    bed.want("pod/a", (pod.cgroup, SHARES, 700))
    for _ in range(20):
        with bed.kernel.recording() as writes:
            bed.run()
        (view,) = bed.executor.views("pod/a")
        assert view.state is State.FAILED and "EINVAL" in view.detail
        assert not writes  # the fault strikes before the kernel sees it
        bed.kernel.clock.advance(1.0)
    # Refused at 0, 1, 3, 7 and 15 s.
    assert len(bed.executor.views("pod/a")[0].writes) == 5
    bed.kernel.faults.clear()
    bed.kernel.clock.advance(60)
    assert bed.run().written == 1
    assert bed.view("pod/a", SHARES).state is State.APPLIED


def test_a_refusal_stops_what_depends_on_it_without_punishing_it() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.kernel.faults.fail(
        "write", errno.EINVAL, path=bed.kubelet.path(pod.cgroup, "cpu.cfs_quota_us")
    )
    bed.want("pod/a", (pod.cgroup, QUOTA, 300_000))
    bed.want("container/1", (container.cgroup, QUOTA, 300_000))
    assert bed.run().failed == 1
    assert bed.view("container/1", QUOTA).state is State.BLOCKED
    assert bed.view("container/1", QUOTA).retry_in_s == 0
    bed.kernel.clock.advance(2)
    bed.run()
    assert bed.view("container/1", QUOTA).state is State.APPLIED


def test_the_write_budget_defers_and_catches_up() -> None:
    bed = Bed(limits=Limits(writes_per_second=10, burst=5))
    pods = [bed.kubelet.add_pod(TWO_CORES) for _ in range(12)]
    for number, pod in enumerate(pods):
        bed.want(f"pod/{number}", (pod.cgroup, SHARES, 700))
    report = bed.run()
    assert (report.written, report.deferred) == (5, 7)
    bed.kernel.clock.advance(1.0)
    bed.run()
    bed.kernel.clock.advance(1.0)
    bed.run()
    assert {bed.text(pod.cgroup, "cpu.shares") for pod in pods} == {"700"}


def test_the_write_budget_limits_writes_over_time_and_not_only_each_pass() -> None:
    bed = Bed(limits=Limits(writes_per_second=10, burst=5))
    pods = [bed.kubelet.add_pod(TWO_CORES) for _ in range(30)]
    for number, pod in enumerate(pods):
        bed.want(f"pod/{number}", (pod.cgroup, SHARES, 700))
    written = bed.run().written
    for tenth in range(1, 31):
        bed.kernel.clock.advance(0.1)
        written += bed.run().written
        assert written <= 5 + tenth
    assert written == 30
    assert {bed.text(pod.cgroup, "cpu.shares") for pod in pods} == {"700"}
    # What a quiet time did not use is not a credit above the burst.
    bed.kernel.clock.advance(60)
    for number, pod in enumerate(pods):
        bed.want(f"pod/{number}", (pod.cgroup, SHARES, 800))
    assert bed.run().written == 5


def test_a_foreign_write_becomes_the_original_and_is_overruled() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, QUOTA, 150_000))
    bed.run()
    bed.set(pod.cgroup, "cpu.cfs_quota_us", "400000")
    assert bed.run().written == 1
    assert bed.view("pod/a", QUOTA).original == "400000"
    bed.want("pod/a")
    bed.run()
    assert bed.text(pod.cgroup, "cpu.cfs_quota_us") == "400000"
    assert not len(bed.journal)


def test_a_writer_that_never_gives_in_is_left_alone_for_a_while() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, QUOTA, 150_000))
    bed.run()
    with bed.kernel.recording() as writes:
        for _ in range(20):
            bed.set(pod.cgroup, "cpu.cfs_quota_us", "400000")
            bed.run()
            bed.kernel.clock.advance(1.0)
    assert len(writes) == 3
    view = bed.view("pod/a", QUOTA)
    assert view.state is State.BLOCKED and "another writer" in view.detail


def test_nothing_outside_the_pods_root_is_touched() -> None:
    bed = Bed()
    bed.kernel.make("/sys/fs/cgroup/cpu/other")
    bed.want("pod/a", ("other", SHARES, 700))
    bed.run()
    assert bed.view("pod/a", SHARES).state is State.BLOCKED
    assert bed.kernel.text("/sys/fs/cgroup/cpu/other/cpu.shares") == "1024"
    bed.want("hostapp/x", ("other", SHARES, 600))
    bed.want("pod/a")
    bed.run()
    assert bed.kernel.text("/sys/fs/cgroup/cpu/other/cpu.shares") == "600"


def test_two_subjects_on_one_place_do_not_fight() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, SHARES, 600))
    bed.want("pod/b", (pod.cgroup, SHARES, 700))
    bed.run()
    assert bed.run().written == 0
    assert bed.text(pod.cgroup, "cpu.shares") == "600"
    assert "pod/a" in bed.view("pod/b", SHARES).detail
    bed.want("pod/a")
    bed.run()
    assert bed.text(pod.cgroup, "cpu.shares") == "700"


def test_a_controller_that_stops_above_is_handed_down() -> None:
    bed = Bed(DEBIAN_12_V2)
    pod = bed.kubelet.add_pod(TWO_CORES)
    folder = f"/sys/fs/cgroup/{pod.cgroup}"
    bed.kernel.make(f"{folder}/bare")
    assert pod.sandbox is not None
    for child in (pod.sandbox.cgroup,):
        bed.kernel.remove_group(child)
    bed.kernel.write_as("operator", f"{folder}/cgroup.subtree_control", b"-cpuset")
    bed.want("container/1", (f"{pod.cgroup}/bare", CPUS, CpuSet.parse("1")))
    assert bed.run().written == 1
    assert "cpuset" in bed.kernel.text(f"{folder}/cgroup.subtree_control").split()
    assert bed.run().written == 1
    assert bed.text(f"{pod.cgroup}/bare", "cpuset.cpus") == "1"
    assert bed.view("container/1", CPUS).state is State.APPLIED


def test_nothing_is_handed_down_for_what_the_kernel_lacks() -> None:
    bed = Bed(DEBIAN_12_V2)
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, Resource.CPU_BVT, 2))
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes
