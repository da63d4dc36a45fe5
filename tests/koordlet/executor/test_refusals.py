"""What follows when a kernel refuses, loses or changes a write: who waits, whose value it is."""

from __future__ import annotations

import errno

import pytest

from apis.cpuset import CpuSet
from hooks.state import State
from koordlet.executor.slots import Want
from linux.resources import Resource
from tests.koordlet.executor.bed import BOTH, TWO_CORES, Bed, claim_of
from tests.simulated import ANOLIS_8, DEBIAN_12_V2, INTEL_RDT, Profile

SHARES, QUOTA, BURST = Resource.CPU_SHARES, Resource.CPU_CFS_QUOTA, Resource.CPU_CFS_BURST
CPUS, SCHEMATA = Resource.CPUSET_CPUS, Resource.RESCTRL_SCHEMATA
IDENTITY, CORE = "kernel.sched_group_identity_enabled", "kernel.sched_core"


@pytest.mark.parametrize(
    ("error", "state", "failed"),
    [
        (errno.ENODEV, State.UNSUPPORTED, 0),
        (errno.ENOENT, State.UNSUPPORTED, 0),
        (errno.EOPNOTSUPP, State.UNSUPPORTED, 1),
        (errno.EINVAL, State.FAILED, 1),
        (errno.EBUSY, State.FAILED, 1),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else "",
)
def test_what_a_write_answers_decides_the_state(error: int, state: State, failed: int) -> None:
    """A vanished group is not a failure; what the kernel cannot do is tried again much later."""
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, SHARES, 700))
    bed.kernel.faults.fail("write", error)
    assert bed.run().failed == failed
    assert bed.view("pod/a", SHARES).state is state
    if state is State.FAILED or not failed:
        bed.kernel.clock.advance(5)
        bed.run()
        assert bed.text(pod.cgroup, "cpu.shares") == "700"


def test_what_many_pods_meet_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    bed = Bed()
    pods = [bed.kubelet.add_pod(TWO_CORES) for _ in range(20)]
    for pod in pods:
        bed.want(f"pod/{pod.uid}", (pod.cgroup, SHARES, 700))
        bed.kernel.faults.fail("write", errno.EBUSY, path=f"*{pod.cgroup}*")
    assert bed.run().failed == 20
    (first,) = [record for record in caplog.records if "EBUSY" in record.getMessage()]
    assert pods[0].cgroup in first.getMessage()
    assert first.getMessage().endswith("EBUSY: Device or resource busy on writing '700'")
    assert all(bed.view(f"pod/{pod.uid}", SHARES).state is State.FAILED for pod in pods)
    caplog.clear()
    caplog.set_level("INFO")
    bed.kernel.faults.clear()
    bed.kernel.clock.advance(5)
    bed.run()
    assert all(bed.view(f"pod/{pod.uid}", SHARES).state is State.APPLIED for pod in pods)
    assert len(caplog.records) == 1


def test_a_child_does_not_grow_before_a_parent_that_was_refused() -> None:
    """Neither in the pass of the refusal nor while the parent rests: the kernel would refuse it."""
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, QUOTA, 400_000))
    bed.want("container/1", (container.cgroup, QUOTA, 400_000))
    bed.kernel.faults.fail("write", errno.EIO)
    assert bed.run().failed == 1
    assert bed.view("container/1", QUOTA).state is State.BLOCKED
    bed.executor.look_again()
    assert bed.run().failed == 0
    assert bed.text(container.cgroup, "cpu.cfs_quota_us") == "200000"
    bed.kernel.clock.advance(5)
    bed.executor.look_again()
    bed.run()
    assert bed.text(container.cgroup, "cpu.cfs_quota_us") == "400000"


def test_a_parent_does_not_shrink_below_a_child_that_was_refused() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, QUOTA, 50_000))
    bed.want("container/1", (container.cgroup, QUOTA, 50_000))
    bed.kernel.faults.fail("write", errno.EIO)
    assert bed.run().failed == 1
    assert bed.view("pod/a", QUOTA).state is State.BLOCKED
    assert container.cgroup in bed.view("pod/a", QUOTA).detail


def test_a_set_whose_widening_was_refused_is_not_moved() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    bed.want("container/1", (container.cgroup, CPUS, CpuSet.parse("0-1")))
    bed.run()
    bed.want("container/1", (container.cgroup, CPUS, CpuSet.parse("2-3")))
    bed.kernel.faults.fail("write", errno.EIO)
    with bed.kernel.recording() as writes:
        bed.run()
    assert [write.data for write in writes if not write.error] == []
    assert bed.text(container.cgroup, "cpuset.cpus") == "0-1"


@BOTH
def test_a_quota_does_not_go_below_a_burst_that_was_refused(profile: Profile) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, BURST, 150_000))
    bed.run()
    bed.want("pod/a", (pod.cgroup, QUOTA, 100_000), (pod.cgroup, BURST, 150_000))
    bed.kernel.faults.fail("write", errno.EIO)
    assert bed.run().failed == 1
    assert bed.view("pod/a", QUOTA).state is State.BLOCKED
    bed.kernel.clock.advance(5)
    bed.executor.look_again()
    assert bed.run().failed == 0
    assert bed.view("pod/a", QUOTA).state is State.APPLIED


def test_a_control_group_that_another_program_makes_a_moment_before_is_not_ours() -> None:
    bed = Bed(INTEL_RDT)
    text = "L3:0=f;1=f\n"
    wish = Want("node", "", SCHEMATA, "BE", text, claim_of(SCHEMATA, text, key="BE"))
    bed.executor.want("node", [wish])
    bed.kernel.faults.before("mkdir", lambda: bed.kernel.make("/sys/fs/resctrl/BE"))
    bed.run()
    bed.kernel.clock.advance(5)
    bed.run()
    assert bed.view("node", SCHEMATA).state is State.APPLIED
    bed.executor.want("node", [])
    bed.run()
    assert bed.kernel.is_dir("/sys/fs/resctrl/BE")


def test_who_writes_between_our_write_and_our_look_is_overruled_at_the_next_one() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    path = bed.kubelet.path(pod.cgroup, "cpu.shares")
    bed.want("pod/a", (pod.cgroup, SHARES, 700))
    bed.kernel.faults.after("write", lambda: bed.kernel.write_as("operator", path, "55"), path=path)
    bed.run()
    assert bed.view("pod/a", SHARES).state is State.DEGRADED
    bed.executor.look_again()
    bed.run()
    assert bed.text(pod.cgroup, "cpu.shares") == "700"


def test_what_the_kernel_makes_of_a_value_is_ours_too() -> None:
    bed = Bed(DEBIAN_12_V2)
    pod = bed.kubelet.add_pod(TWO_CORES)
    path = bed.kubelet.path(pod.cgroup, "cpu.weight")
    before = bed.kernel.text(path)
    bed.kernel.faults.after(
        "write", lambda: bed.kernel.write_as("the kernel", path, "13"), path=path, nth=0
    )
    bed.want("pod/a", (pod.cgroup, SHARES, 700))
    bed.run()
    assert bed.view("pod/a", SHARES).detail.endswith("and the kernel changed it to 13")
    for _ in range(3):
        assert bed.run().written == 0
    bed.kernel.faults.clear()
    bed.want("pod/a")
    bed.run()
    assert bed.kernel.text(path) == before


@pytest.mark.parametrize("on", [IDENTITY, CORE])
def test_a_switch_does_not_come_on_while_the_other_cannot_be_switched_off(on: str) -> None:
    """Group identity and core scheduling together can lock an Anolis kernel up."""
    bed = Bed(ANOLIS_8)
    off = CORE if on == IDENTITY else IDENTITY
    bed.kernel.sysctls.update({on: 0, off: 1})
    both: list[bool] = []
    bed.kernel.on_write(lambda _: both.append(bed.kernel.sysctls[on] == bed.kernel.sysctls[off]))
    bed.executor.want(
        "node",
        [
            Want("node", "", Resource.SYSCTL, key, value, claim_of(Resource.SYSCTL, value, key=key))
            for key, value in ((on, "1"), (off, "0"))
        ],
    )
    path = f"/proc/sys/{off.replace('.', '/')}"
    bed.kernel.faults.fail("write", errno.EIO, path=path)
    bed.run()
    bed.run()
    assert (bed.kernel.sysctls[on], bed.kernel.sysctls[off]) == (0, 1)
    bed.kernel.clock.advance(5)
    bed.run()
    assert (bed.kernel.sysctls[on], bed.kernel.sysctls[off]) == (1, 0)


def test_a_control_group_takes_the_place_of_another_in_one_pass() -> None:
    """There are few CLOSIDs: groups without a claim are removed first."""
    bed = Bed(INTEL_RDT)
    assert bed.kernel.resctrl is not None
    text = "L3:0=f;1=f\n"

    def wish(*names: str) -> None:
        bed.executor.want(
            "node",
            [
                Want("node", "", SCHEMATA, name, text, claim_of(SCHEMATA, text, key=name))
                for name in names
            ],
        )

    full = [f"koordlet-u{number}" for number in range(1, bed.kernel.resctrl.closids)]
    wish(*full)
    assert bed.run().failed == 0
    wish("BE", *full[1:])
    assert bed.run().failed == 0
    assert bed.kernel.is_dir("/sys/fs/resctrl/BE")


@BOTH
def test_a_period_is_written_without_touching_the_quota(profile: Profile) -> None:
    """On v2 both stand in one file, and a number alone would be taken for the quota."""
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, Resource.CPU_CFS_PERIOD, 50_000))
    assert bed.run().failed == 0
    if profile.cgroup == 2:
        assert bed.text(pod.cgroup, "cpu.max") == "200000 50000"
    else:
        assert bed.text(pod.cgroup, "cpu.cfs_period_us") == "50000"
        assert bed.text(pod.cgroup, "cpu.cfs_quota_us") == "200000"
    bed.want("pod/a")
    bed.run()
    assert not bed.journal.records()
