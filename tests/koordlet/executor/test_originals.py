"""What the executor restores: originals of files and of delivered values, with the journal."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from apis.cpuset import CpuSet
from koordlet.executor.records import Record
from koordlet.executor.slots import WriteReport
from linux.cgroup_files import FILES
from linux.resources import Resource
from tests.koordlet.executor.bed import BOTH, TWO_CORES, Bed, fill_disk
from tests.simulated import (
    DEBIAN_12_V1,
    Profile,
)
from tests.simulated.kubelet import Limits as PodLimits

SHARES, QUOTA, CPUS = Resource.CPU_SHARES, Resource.CPU_CFS_QUOTA, Resource.CPUSET_CPUS


@BOTH
def test_values_delivered_at_creation_are_restored_to_the_request(
    profile: Profile,
) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    # Two cores were requested, and our reply delivered one and a half.
    container = pod.start(PodLimits(cpu_request_milli=1000, cpu_limit_milli=1500))
    bed.journal.note_delivered("c1", QUOTA, 200_000, 150_000)
    bed.journal.update()
    bed.executor.adopt_deliveries("c1", container.cgroup)
    bed.want("container/c1", (container.cgroup, QUOTA, 150_000))
    assert bed.run().written == 0
    bed.want("container/c1")
    bed.run()
    name = "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"
    assert bed.text(container.cgroup, name).split()[0] == "200000"


@BOTH
@pytest.mark.parametrize("error", [errno.EIO, errno.ENODEV])
@pytest.mark.parametrize("nth", range(1, 6))
def test_a_read_that_fails_while_a_delivery_is_adopted_costs_no_restore(
    profile: Profile, nth: int, error: int
) -> None:
    bed = Bed(profile)
    pod = bed.kubelet.add_pod(TWO_CORES)
    # kubelet requested no CPUs; our reply delivered one.
    container = pod.start(PodLimits(cpu_request_milli=1000, cpus="1"))
    bed.journal.note_delivered("c1", CPUS, None, CpuSet([1]))
    bed.journal.update()
    bed.kernel.faults.fail("read", error, nth=nth)
    for _ in range(2):
        bed.executor.adopt_deliveries("c1", container.cgroup)
    bed.kernel.faults.clear()
    bed.want("container/c1", (container.cgroup, CPUS, CpuSet([1])))
    bed.run()
    bed.want("container/c1")
    bed.run()
    # The parent's on v1; all there are come closest to v2's empty set, while tasks run there.
    assert bed.text(container.cgroup, "cpuset.cpus") == "0-3"


@BOTH
def test_a_handed_value_that_the_runtime_writes_late_does_not_stay(
    profile: Profile, tmp_path: Path
) -> None:
    """Meanwhile the policy was switched off, and a pass has looked at the group."""
    bed = Bed(profile, journal_path=str(tmp_path / "journal"))
    name = "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"
    container = bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES)
    bed.journal.note_delivered("c1", QUOTA, 200_000, 150_000)
    bed.journal.update()
    bed.executor.adopt_deliveries("c1", container.cgroup)
    bed.executor.watch_runtime_values()
    assert bed.run() == WriteReport()
    bed.restart()
    bed.executor.watch_runtime_values()
    bed.set(container.cgroup, name, "150000", writer="runtime")
    bed.run()
    assert bed.text(container.cgroup, name).split()[0] == "200000"


def test_an_unknown_original_stops_no_pass() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    inode = bed.kernel.inode(f"/sys/fs/cgroup/cpu/{pod.cgroup}")
    record = Record(place=pod.cgroup, inode=inode, resource=Resource.CPU_BVT, ours=("0",))
    bed.journal.update([record])
    other = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/b", (other.cgroup, SHARES, 700))
    bed.executor.restore(record)
    bed.run()
    assert bed.text(other.cgroup, "cpu.shares") == "700"


@BOTH
def test_a_delivered_value_stays_ours_while_its_delivery_cannot_be_adopted(
    profile: Profile,
) -> None:
    """Another value was delivered since, and a read fails in the pass that would journal it."""
    bed, name = Bed(profile), "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"
    container = bed.kubelet.add_pod(TWO_CORES).start(PodLimits(1000, cpu_limit_milli=1500))
    bed.journal.note_delivered("c1", QUOTA, 200_000, 150_000)
    bed.journal.update()
    bed.executor.adopt_deliveries("c1", container.cgroup)
    bed.want("container/c1", (container.cgroup, QUOTA, 150_000))
    bed.run()
    bed.set(container.cgroup, name, "120000", writer="runtime")
    bed.journal.note_delivered("c1", QUOTA, 200_000, 120_000)
    bed.journal.update()
    bed.want("container/c1", (container.cgroup, QUOTA, 120_000))
    path = bed.kubelet.path(container.cgroup, name)
    bed.kernel.faults.fail("read", errno.EIO, path=path, nth=0)
    bed.executor.adopt_deliveries("c1", container.cgroup)
    bed.kernel.faults.clear()
    bed.run()
    # systemd is back at what the container was made with before the delivery was ever adopted.
    bed.set(container.cgroup, name, "150000", writer="systemd")
    bed.executor.adopt_deliveries("c1", container.cgroup)
    bed.want("container/c1")
    bed.run()
    assert bed.text(container.cgroup, name).split()[0] == "200000"


@BOTH
def test_handed_cpus_that_were_found_before_their_note_came_are_not_foreign(
    profile: Profile,
) -> None:
    bed = Bed(profile)
    container = bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES)
    bed.want("container/c1", (container.cgroup, CPUS, CpuSet([0])))
    bed.run()
    bed.set(container.cgroup, "cpuset.cpus", "1", writer="runtime")
    bed.run()
    bed.journal.note_delivered("c1", CPUS, None, CpuSet([1]))
    bed.journal.update()
    bed.set(container.cgroup, "cpuset.cpus", "1", writer="runtime")
    bed.executor.adopt_deliveries("c1", container.cgroup)
    bed.want("container/c1")
    bed.run()
    assert bed.text(container.cgroup, "cpuset.cpus") == "0-3"


@BOTH
def test_what_a_runtime_writes_again_after_the_switch_off_does_not_stay(
    profile: Profile, tmp_path: Path
) -> None:
    """systemd at a reload, runc at an update of something else: they know the old value only."""
    bed = Bed(profile, journal_path=str(tmp_path / "journal"))
    name = "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(PodLimits(cpu_request_milli=1000, cpu_limit_milli=1500))

    def quota() -> str:
        return bed.text(container.cgroup, name).split()[0]

    bed.journal.note_delivered("c1", QUOTA, 200_000, 150_000)
    bed.journal.update()
    bed.executor.adopt_deliveries("c1", container.cgroup)
    bed.want("container/c1", (container.cgroup, QUOTA, 150_000))
    bed.run()
    bed.want("container/c1")
    bed.run()
    for again in ("", "after a restart"):
        if again:
            bed.restart()
            bed.executor.watch_runtime_values()
            bed.run()
        bed.set(container.cgroup, name, "150000", writer="systemd")
        assert bed.run().written == 1
        assert quota() == "200000"
        with bed.kernel.recording() as writes:
            assert bed.run() == WriteReport()
        assert not writes
    # The value is desired again; the original is still kubelet's request.
    bed.want("container/c1", (container.cgroup, QUOTA, 120_000))
    bed.run()
    bed.set(container.cgroup, name, "150000", writer="systemd")
    bed.run()
    assert quota() == "120000"
    bed.want("container/c1")
    bed.run()
    assert quota() == "200000"
    # A new request of kubelet's is not ours, even if it equals a value that was delivered before.
    bed.journal.supersede("c1", {QUOTA})
    bed.journal.update()
    bed.set(container.cgroup, name, "150000", writer="kubelet")
    assert bed.run().written == 0
    pod.remove()
    bed.run()
    bed.restart()
    assert not bed.journal.all_runtime_values()


@BOTH
def test_what_a_runtime_was_handed_is_forgotten_with_the_container(
    profile: Profile, tmp_path: Path
) -> None:
    bed = Bed(profile, journal_path=str(tmp_path / "journal"))
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(PodLimits(cpu_request_milli=1000, cpu_limit_milli=1500))
    bed.want("container/1", (container.cgroup, QUOTA, 150_000), requested={QUOTA: 200_000})
    bed.run()
    assert [one.container_id for one in bed.journal.all_runtime_values()] == ["1"]
    pod.remove()
    bed.want("container/1")
    bed.run()
    assert not bed.journal.all_runtime_values() and not len(bed.journal)
    bed.restart()
    assert not bed.journal.all_runtime_values()


def test_a_full_run_directory_costs_no_delivery_and_ends_no_pass(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    bed = Bed(journal_path=path)
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(PodLimits(cpu_request_milli=1000, cpu_limit_milli=1500))
    bed.journal.note_delivered("c1", QUOTA, 200_000, 150_000)
    bed.journal.update()
    fill_disk(bed.journal)
    os.mkdir(f"{path}.new")  # and no new file can take the old one's place
    for _ in range(3):
        bed.executor.adopt_deliveries("c1", container.cgroup)
    assert bed.run().written == 0
    os.rmdir(f"{path}.new")
    bed.kernel.clock.advance(1)
    bed.journal.update()
    bed.restart()
    bed.run()
    assert bed.text(container.cgroup, "cpu.cfs_quota_us") == "200000"


def test_without_a_note_the_request_is_the_original() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(PodLimits(cpu_request_milli=1000, cpu_limit_milli=1500))
    bed.want("container/1", (container.cgroup, QUOTA, 150_000), requested={QUOTA: 200_000})
    assert bed.run().written == 0
    bed.want("container/1")
    bed.run()
    assert bed.text(container.cgroup, "cpu.cfs_quota_us") == "200000"


def test_a_later_group_of_the_same_name_keeps_its_own_values() -> None:
    # What it has by itself happens to be what the former one had from us.
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES, uid="u1")
    bed.want("pod/a", (pod.cgroup, SHARES, 3072))
    bed.run()
    pod.remove()
    again = bed.kubelet.add_pod(PodLimits(cpu_request_milli=3000), uid="u1")
    assert again.cgroup == pod.cgroup
    bed.want("pod/a")
    bed.run()
    bed.run()
    assert bed.text(again.cgroup, "cpu.shares") == "3072"
    assert not len(bed.journal)


def test_a_damaged_original_harms_no_other() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    inode = bed.kernel.inode(f"/sys/fs/cgroup/cpu/{pod.cgroup}")
    for resource in Resource:
        bed.journal.update([
            Record(place=pod.cgroup, inode=0 if resource not in FILES else inode,
                   resource=resource, original="junk", ours=("1024", "200000", "-1", "0-3", "0")),
            Record(place=pod.cgroup, inode=0, resource=resource, key="k", requested="junk",
                   ours=("1024", "200000", "-1", "0-3", "0")),
        ])  # fmt: skip
    other = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/b", (other.cgroup, QUOTA, 100_000), (other.cgroup, SHARES, 700))
    bed.run()
    assert bed.text(other.cgroup, "cpu.shares") == "700"
    assert bed.text(other.cgroup, "cpu.cfs_quota_us") == "100000"


def test_without_a_journal_nothing_is_written(tmp_path: object) -> None:
    bed = Bed(journal_path=f"{tmp_path}/journal")
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.want("pod/a", (pod.cgroup, SHARES, 700))
    fill_disk(bed.journal)
    with bed.kernel.recording() as writes:
        report = bed.run()
    assert report.failed == 1 and not writes
    assert "journal" in bed.view("pod/a", SHARES).detail


@BOTH
def test_cpus_that_a_new_group_copied_from_a_narrowed_parent_are_not_its_original(
    profile: Profile,
) -> None:
    """Best-effort pods that start while their class is suppressed get all CPUs afterwards."""
    bed = Bed(profile)
    everywhere = [bed.kubelet.qos_dir("BestEffort")]

    def add_pod() -> None:
        pod = bed.kubelet.add_pod(TWO_CORES, qos="BestEffort")
        assert pod.sandbox is not None
        container = pod.start(PodLimits(cpu_request_milli=0))
        everywhere.extend([pod.cgroup, pod.sandbox.cgroup, container.cgroup])

    def hold(*cpus: int) -> list[str]:
        for place in everywhere:
            bed.want(f"subject/{place}", *([(place, CPUS, CpuSet(cpus))] if cpus else []))
        bed.run()
        return [bed.text(place, "cpuset.cpus") for place in everywhere]

    add_pod()
    hold(0, 1)
    assert set(hold(0)) == {"0"}
    # The first pod copies the set in force. The next set is wanted before a look at the second.
    add_pod()
    hold(0)
    add_pod()
    assert set(hold(1, 2)) == {"1-2"}
    # v2 does not take the empty set back while tasks run below.
    assert set(hold()) <= ({"0-3"} if profile.cgroup == 1 else {"", "0-3"})


def test_a_restored_set_takes_along_new_groups_that_copied_it() -> None:
    """Kubelet makes a pod's directory some time before koordlet hears of the pod."""
    bed = Bed(DEBIAN_12_V1)
    root = bed.kubelet.qos_dir("BestEffort")
    known = bed.kubelet.add_pod(TWO_CORES, qos="BestEffort")
    assert known.sandbox is not None
    places = [root, known.cgroup, known.sandbox.cgroup]
    for place in places:
        bed.want(f"subject/{place}", (place, CPUS, CpuSet([0, 1])))
    bed.run()
    new = bed.kubelet.add_pod(TWO_CORES, qos="BestEffort")
    narrow = bed.kubelet.add_pod(TWO_CORES, qos="BestEffort")
    assert new.sandbox is not None and narrow.sandbox is not None
    # A set that is not ours is another program's.
    bed.set(narrow.sandbox.cgroup, "cpuset.cpus", "1")
    for place in places:
        bed.want(f"subject/{place}")
    assert bed.run().failed == 0
    widened = [*places, new.cgroup, new.sandbox.cgroup, narrow.cgroup]
    assert {bed.text(place, "cpuset.cpus") for place in widened} == {"0-3"}
    assert bed.text(narrow.sandbox.cgroup, "cpuset.cpus") == "1"
    assert bed.run().written == 0


@BOTH
@pytest.mark.parametrize("restarted", [False, True])
def test_a_value_stays_ours_however_often_a_newer_one_is_refused(
    profile: Profile, restarted: bool, tmp_path: Path
) -> None:
    """A strategy claims another value every second; the kernel may refuse them for a while."""
    bed = Bed(profile, journal_path=str(tmp_path / "journal"))
    pod = bed.kubelet.add_pod(TWO_CORES)
    name = "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"
    before = bed.text(pod.cgroup, name)
    bed.want("pod/a", (pod.cgroup, QUOTA, 90_000))
    bed.run()
    assert bed.text(pod.cgroup, name) != before
    bed.kernel.faults.fail("write", errno.EINVAL, path=f"*{pod.cgroup}/{name}", nth=0)
    for step in range(12):
        bed.kernel.clock.advance(400)
        bed.want("pod/a", (pod.cgroup, QUOTA, 80_000 - step * 1000))
        bed.executor.look_again()
        bed.run()
    assert bed.text(pod.cgroup, name).split()[0] == "90000"
    bed.kernel.faults.clear()
    bed.kernel.clock.advance(400)
    if restarted:
        bed.restart()
        for record in bed.executor.orphans():
            bed.executor.restore(record)
    else:
        bed.want("pod/a")
    bed.executor.look_again()
    bed.run()
    assert bed.text(pod.cgroup, name) == before


@BOTH
def test_an_outside_write_into_a_container_is_never_its_original(profile: Profile) -> None:
    """The runtime may write there at any time; what kubelet requested is what is restored."""
    bed, name = Bed(profile), "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(PodLimits(cpu_request_milli=1000, cpu_limit_milli=2000))
    bed.want("container/c1", (container.cgroup, QUOTA, 150_000), requested={QUOTA: 200_000})
    bed.run()
    bed.set(container.cgroup, name, "170000", writer="agent")
    bed.run()
    assert bed.text(container.cgroup, name).split()[0] == "150000"
    bed.want("container/c1")
    bed.run()
    assert bed.text(container.cgroup, name).split()[0] == "200000"
    assert not len(bed.journal)


@BOTH
def test_a_group_that_ends_before_its_restore_leaves_neither_slot_nor_record(
    profile: Profile,
) -> None:
    bed = Bed(profile)
    pods = [bed.kubelet.add_pod(TWO_CORES) for _ in range(3)]
    for number, pod in enumerate(pods):
        bed.want(f"pod/{number}", (pod.cgroup, QUOTA, 150_000))
    bed.run()
    for number, pod in enumerate(pods):
        bed.want(f"pod/{number}")
        pod.remove()
    bed.run()
    assert not bed.executor.restoring()
    assert not bed.executor.directories()
    assert not len(bed.journal)
