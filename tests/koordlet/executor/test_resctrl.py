"""Control groups of resctrl: made, filled, corrected by id, and given back."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from hooks.state import State
from koordlet.executor.slots import Want
from linux.resources import Resource
from tests.koordlet.executor.bed import TWO_CORES, Bed, claim_of
from tests.simulated import DEBIAN_12_V2, INTEL_RDT, Crash

SCHEMATA, GROUP = Resource.RESCTRL_SCHEMATA, Resource.RESCTRL_GROUP
ROOT = "/sys/fs/resctrl"


def wants(bed: Bed, subject: str, groups: Sequence[tuple[str, str]]) -> None:
    bed.executor.want(
        subject,
        [Want(subject, "", SCHEMATA, name, text, claim_of(SCHEMATA, text, key=name))
         for name, text in groups],
    )  # fmt: skip


def test_a_group_is_made_filled_with_threads_and_removed_again() -> None:
    bed = Bed(INTEL_RDT)
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES, threads=3)
    wants(bed, "pod/a", [("koordlet-u1", "L3:0=f;1=ff\nMB:0=50;1=70\n")])
    bed.want("container/1", (container.cgroup, GROUP, "koordlet-u1"))
    assert bed.run().failed == 0
    text = bed.kernel.text(f"{ROOT}/koordlet-u1/schemata")
    assert "0=00f;1=0ff" in text or "0=f;1=ff" in text
    assert len(bed.kernel.text(f"{ROOT}/koordlet-u1/tasks").split()) == 3
    assert bed.run().written == 0
    late = bed.kernel.fork(container.task)
    late.closid = ""
    bed.run()
    assert str(late.pid) in bed.kernel.text(f"{ROOT}/koordlet-u1/tasks").split()
    # Another program narrows one domain: only that resource is written again.
    bed.kernel.write_as("operator", f"{ROOT}/koordlet-u1/schemata", b"L3:1=1\n")
    with bed.kernel.recording() as writes:
        bed.run()
    assert [write.data for write in writes] == [b"L3:1=ff\n"]
    wants(bed, "pod/a", [])
    bed.want("container/1")
    bed.run()
    bed.run()
    assert not bed.kernel.is_dir(f"{ROOT}/koordlet-u1")
    assert not len(bed.journal)


def test_too_many_groups_fail_with_the_reason_and_rest() -> None:
    bed = Bed(INTEL_RDT)
    names = [(f"koordlet-u{number}", "L3:0=f;1=f\n") for number in range(9)]
    wants(bed, "node", names)
    bed.run()
    states = [view.state for view in bed.executor.views("node")]
    assert states.count(State.APPLIED) == 7
    assert states.count(State.FAILED) == 2
    failed = next(v for v in bed.executor.views("node") if v.state is State.FAILED)
    assert "ENOSPC" in failed.detail
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes


def test_a_group_that_could_not_be_made_is_neither_filled_nor_entered() -> None:
    bed = Bed(INTEL_RDT)
    container = bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES)
    bed.kernel.faults.fail("mkdir", errno.ENOSPC)
    wants(bed, "node", [("koordlet-u1", "L3:0=f;1=f\nMB:0=50;1=50\n")])
    bed.want("container/1", (container.cgroup, GROUP, "koordlet-u1"))
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes
    (group,), (member,) = bed.executor.views("node"), bed.executor.views("container/1")
    assert group.state is State.FAILED and "CLOSID" in group.detail
    assert member.state is State.BLOCKED and "koordlet-u1" in member.detail
    bed.kernel.clock.advance(2)
    bed.run()
    assert container.task.closid == "koordlet-u1"


def test_a_mask_that_the_kernel_refuses_says_why() -> None:
    bed = Bed(INTEL_RDT)
    wants(bed, "node", [("LS", "L3:0=5;1=5\n")])
    bed.run()
    (view,) = bed.executor.views("node")
    assert view.state is State.FAILED and "EINVAL" in view.detail
    assert view.retry_in_s > 0


def test_what_the_machine_has_not_is_left_out_and_said() -> None:
    bed = Bed(INTEL_RDT)
    wants(bed, "node", [("LS", "L3:0=f;1=f;2=f\nMB:0=50;1=50\n")])
    assert bed.run().failed == 0
    (view,) = bed.executor.views("node")
    assert view.state is State.DEGRADED and "L3 domain 2" in view.detail
    assert bed.run().written == 0


def test_a_foreign_group_is_changed_but_never_removed() -> None:
    bed = Bed(INTEL_RDT)
    bed.kernel.make(f"{ROOT}/LS")
    before = bed.kernel.text(f"{ROOT}/LS/schemata")
    wants(bed, "node", [("LS", "L3:0=f;1=f\n")])
    bed.run()
    wants(bed, "node", [])
    bed.run()
    bed.run()
    assert bed.kernel.text(f"{ROOT}/LS/schemata") == before
    assert not len(bed.journal)


def test_a_group_that_an_earlier_daemon_left_is_ours_by_name() -> None:
    bed = Bed(INTEL_RDT)
    bed.kernel.make(f"{ROOT}/koordlet-u1")
    bed.kernel.write_as("daemon before", f"{ROOT}/koordlet-u1/schemata", b"L3:0=f;1=f\n")
    wants(bed, "pod/a", [("koordlet-u1", "L3:0=f;1=f\n")])
    bed.run()
    wants(bed, "pod/a", [])
    bed.run()
    bed.run()
    assert not bed.kernel.is_dir(f"{ROOT}/koordlet-u1")


def test_groups_of_pods_that_left_unobserved_are_removed() -> None:
    bed = Bed(INTEL_RDT)
    for name in ("koordlet-gone", "LS", "other"):
        bed.kernel.make(f"{ROOT}/{name}")
    bed.run()
    bed.run()
    assert not bed.kernel.is_dir(f"{ROOT}/koordlet-gone")
    assert bed.kernel.is_dir(f"{ROOT}/LS") and bed.kernel.is_dir(f"{ROOT}/other")


def test_a_group_that_is_made_again_under_a_name_of_ours_is_not_ours() -> None:
    bed = Bed(INTEL_RDT)
    wants(bed, "node", [("BE", "L3:0=f;1=f\n")])
    bed.run()
    wants(bed, "node", [])
    bed.run()
    assert not bed.kernel.is_dir(f"{ROOT}/BE")
    assert not len(bed.journal)
    bed.kernel.make(f"{ROOT}/BE")
    bed.run()
    bed.run()
    assert bed.kernel.is_dir(f"{ROOT}/BE")


def test_a_group_that_another_program_made_first_is_not_ours(
    tmp_path: Path,
) -> None:
    """It ended after it had put down that it would, and before it did."""
    bed = Bed(INTEL_RDT, journal_path=str(tmp_path / "journal"))
    wants(bed, "node", [("BE", "L3:0=f;1=f\n")])
    bed.kernel.faults.crash("mkdir")
    with pytest.raises(Crash):
        bed.run()
    bed.restart()
    bed.kernel.make(f"{ROOT}/BE")
    before = bed.kernel.text(f"{ROOT}/BE/schemata")
    wants(bed, "node", [("BE", "L3:0=f;1=f\n")])
    bed.run()
    assert bed.kernel.text(f"{ROOT}/BE/schemata") != before
    wants(bed, "node", [])
    bed.run()
    bed.run()
    assert bed.kernel.text(f"{ROOT}/BE/schemata") == before
    assert not len(bed.journal)


def test_threads_that_the_runtime_put_into_a_foreign_group_leave_it_again() -> None:
    """The reply to a creation named the group; it stays when no policy claims it any more."""
    bed = Bed(INTEL_RDT)
    bed.kernel.make(f"{ROOT}/BE")
    container = bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES)
    container.task.closid = "BE"
    bed.journal.note_delivered(container.id, GROUP, None, "BE", policy="RdtResctrl")
    bed.journal.update()
    bed.executor.adopt_deliveries(container.id, container.cgroup)
    for record in bed.executor.orphans():
        bed.executor.restore(record)
    bed.run()
    bed.run()
    assert container.task.closid == "" and bed.kernel.is_dir(f"{ROOT}/BE")
    assert not len(bed.journal)


@pytest.mark.parametrize(
    "file", ["schemata", "BE/schemata", "koordlet-u1/schemata", "koordlet-u1/tasks"]
)
def test_what_cannot_be_read_for_once_is_not_taken_for_gone(file: str) -> None:
    bed = Bed(INTEL_RDT)
    bed.kernel.make(f"{ROOT}/BE")
    before = bed.kernel.text(f"{ROOT}/BE/schemata")
    container = bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES)
    groups = [("BE", "L3:0=f;1=f\n"), ("koordlet-u1", "L3:0=f;1=f\n")]
    wants(bed, "node", groups)
    bed.want("container/1", (container.cgroup, GROUP, "koordlet-u1"))
    bed.run()
    bed.kernel.faults.fail("read", errno.EIO, path=f"{ROOT}/{file}")
    bed.executor.look_again()
    bed.run()
    bed.kernel.clock.advance(700)
    bed.run()
    bed.kernel.faults.fail("read", errno.EIO, path=f"{ROOT}/{file}")
    wants(bed, "node", [])
    bed.want("container/1")
    for _ in range(4):
        bed.run()
        bed.kernel.clock.advance(700)
    assert bed.kernel.resctrl is not None
    assert bed.kernel.resctrl.groups.keys() == {"", "BE"}
    assert bed.kernel.text(f"{ROOT}/BE/schemata") == before
    assert container.task.closid == ""
    assert not len(bed.journal)


def test_names_cannot_leave_the_file_system() -> None:
    bed = Bed(INTEL_RDT)
    wants(bed, "node", [("../cgroup/x", "L3:0=f;1=f\n"), ("info", "L3:0=f;1=f\n")])
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes
    assert {view.state for view in bed.executor.views("node")} == {State.BLOCKED}


def test_without_resctrl_it_is_unsupported() -> None:
    bed = Bed(DEBIAN_12_V2)
    wants(bed, "node", [("LS", "L3:0=f\n")])
    bed.run()
    assert bed.executor.views("node")[0].state is State.UNSUPPORTED


def test_a_class_group_that_an_operator_recreated_is_not_removed() -> None:
    bed = Bed(INTEL_RDT)
    wants(bed, "node", [("BE", "L3:0=f;1=f\n")])
    bed.run()
    bed.kernel.rmdir(f"{ROOT}/BE")
    bed.kernel.make(f"{ROOT}/BE")
    assert bed.run().failed == 0
    wants(bed, "node", [])
    bed.run()
    bed.run()
    assert bed.kernel.is_dir(f"{ROOT}/BE")
    assert not len(bed.journal)


def test_a_pods_group_that_an_earlier_daemon_left_is_used_and_removed() -> None:
    bed = Bed(INTEL_RDT)
    bed.kernel.make(f"{ROOT}/koordlet-u1")
    wants(bed, "pod/a", [("koordlet-u1", "L3:0=f;1=f\n")])
    assert bed.run().failed == 0
    wants(bed, "pod/a", [])
    bed.run()
    bed.run()
    assert not bed.kernel.is_dir(f"{ROOT}/koordlet-u1")


def test_while_resctrl_cannot_be_read_nothing_is_made_and_it_says_so() -> None:
    bed = Bed(INTEL_RDT)
    wants(bed, "node", [("BE", "L3:0=f;1=f\n")])
    bed.kernel.faults.fail("read", errno.EIO, path=f"{ROOT}/schemata", nth=0)
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes and not bed.kernel.is_dir(f"{ROOT}/BE")
    assert bed.view("node", SCHEMATA).state is State.FAILED


def test_a_thread_that_ends_while_it_is_moved_keeps_no_other_from_it() -> None:
    bed = Bed(INTEL_RDT)
    container = bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES, threads=3)
    wants(bed, "node", [("BE", "L3:0=f;1=f\n")])
    bed.want("container/1", (container.cgroup, GROUP, "BE"))
    bed.kernel.faults.fail("write", errno.ESRCH, path=f"{ROOT}/BE/tasks")
    assert bed.run().failed == 0
    assert len(bed.kernel.text(f"{ROOT}/BE/tasks").split()) == 2
