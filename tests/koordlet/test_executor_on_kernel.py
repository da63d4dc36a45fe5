"""The executor and the reconciler's thread on this machine's own cgroup v1, with real processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from apis.qos import KubeQoS
from hooks.engine import Engine
from hooks.facts import NodeInputs
from hooks.subject import PodSubject, make_pod
from koordlet.executor import Executor
from koordlet.executor_slots import State, Want
from koordlet.journal import Journal
from koordlet.kernel import probe
from koordlet.reconciler import Reconciler
from koordlet.snapshot import Snapshot
from linux.cgroup_paths import Driver, Layout
from linux.cpuset import CpuSet
from linux.discovery import discover
from linux.local import LocalHost
from linux.resources import Resource, Value
from tests.koordlet.executor_bed import claim_of
from tests.koordlet.test_reconciler import POLICY

pytestmark = pytest.mark.cgroups
MOUNTS = {name: Path("/sys/fs/cgroup") / name for name in ("cpu", "cpuset", "memory")}
FILES = {
    Resource.CPU_SHARES: "cpu/{}/cpu.shares",
    Resource.CPU_CFS_QUOTA: "cpu/{}/cpu.cfs_quota_us",
    Resource.CPU_CFS_BURST: "cpu/{}/cpu.cfs_burst_us",
    Resource.CPU_IDLE: "cpu/{}/cpu.idle",
    Resource.CPUSET_CPUS: "cpuset/{}/cpuset.cpus",
    Resource.MEMORY_LIMIT: "memory/{}/memory.limit_in_bytes",
}


@dataclass
class Machine:
    """A pods' root of our own with one pod and one container that runs `sleep`."""

    root: str
    host: LocalHost
    layout: Layout
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def pod(self) -> str:
        return f"{self.root}/kubepods/podu1"

    @property
    def container(self) -> str:
        return f"{self.pod}/c1"

    def path(self, cgroup: str, resource: Resource) -> Path:
        return Path("/sys/fs/cgroup") / FILES[resource].format(cgroup)

    def text(self, cgroup: str, resource: Resource) -> str:
        return self.path(cgroup, resource).read_text().strip()

    def values(self) -> dict[tuple[str, str], str]:
        return {
            (cgroup, resource.value): self.text(cgroup, resource)
            for cgroup in (self.pod, self.container)
            for resource in FILES
            if self.path(cgroup, resource).exists()
        }

    def executor(self, journal: Journal) -> Executor:
        return Executor(self.host, self.layout, journal)


@pytest.fixture
def machine() -> Iterator[Machine]:
    root = f"koord-test-{os.getpid()}"
    made = Machine(root, LocalHost(), discover(LocalHost(), kubepods=f"{root}/kubepods"))
    groups = [root, f"{root}/kubepods", made.pod, made.container]
    try:
        for mount in MOUNTS.values():
            for group in groups:
                (mount / group).mkdir()
                if mount.name == "cpuset":
                    for kind in ("cpuset.cpus", "cpuset.mems"):
                        above = (mount / group).parent / kind
                        (mount / group / kind).write_text(above.read_text())
        (MOUNTS["cpu"] / made.pod / "cpu.cfs_quota_us").write_text("150000")
        (MOUNTS["cpu"] / made.container / "cpu.cfs_quota_us").write_text("150000")
        (MOUNTS["cpu"] / made.container / "cpu.shares").write_text("512")
        (MOUNTS["memory"] / made.container / "memory.limit_in_bytes").write_text("134217728")
        process = subprocess.Popen(["sleep", "600"])
        made.processes.append(process)
        for mount in MOUNTS.values():
            (mount / made.container / "cgroup.procs").write_text(str(process.pid))
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()
        for mount in MOUNTS.values():
            for group in reversed(groups):
                if (mount / group).exists():
                    _remove(mount / group)


def _remove(group: Path) -> None:
    # A killed process leaves its group a moment after it was reaped.
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.02)
    group.rmdir()


def _want(executor: Executor, subject: str, cgroup: str, **values: Value) -> None:
    wants = [
        Want(subject, cgroup, resource, "", value, claim_of(resource, value))
        for resource, value in ((Resource[name], value) for name, value in values.items())
    ]
    executor.want(subject, wants)


def _run(executor: Executor) -> int:
    for record in executor.orphans():
        executor.restore(record)
    report = executor.apply(executor.plan())
    assert report.failed == 0, [view for s in executor.subjects() for view in executor.views(s)]
    return report.written


def test_the_kernel_takes_every_order_and_everything_goes_back(machine: Machine) -> None:
    before = machine.values()
    assert machine.layout.driver is Driver.CGROUPFS
    executor = machine.executor(Journal())
    wide, narrow = CpuSet.parse("0-1"), CpuSet.parse("1")
    for quota, burst, cpus, idle in (
        (80_000, 500_000, narrow, 0),
        (300_000, 100_000, wide, 1),
        (50_000, 50_000, CpuSet.parse("0"), 0),
        (-1, 70_000, narrow, 1),
    ):
        for subject, cgroup in (("pod/u1", machine.pod), ("container/c1", machine.container)):
            _want(
                executor,
                subject,
                cgroup,
                CPU_CFS_QUOTA=quota,
                CPU_CFS_BURST=burst,
                CPUSET_CPUS=cpus,
                CPU_IDLE=idle,
                MEMORY_LIMIT=(1 << 26) + 123,
            )
        assert _run(executor) > 0
        executor.look_again()
        assert _run(executor) == 0
        assert machine.text(machine.container, Resource.CPU_CFS_QUOTA) == str(quota)
        assert machine.text(machine.container, Resource.CPUSET_CPUS) == str(cpus)
        assert machine.text(machine.pod, Resource.CPU_IDLE) == str(idle)
    for subject in ("pod/u1", "container/c1"):
        executor.want(subject, ())
    for _ in range(4):
        executor.look_again()
        _run(executor)
    assert machine.values() == before
    assert not len(executor.journal)


def test_a_new_process_undoes_what_a_killed_one_did(machine: Machine, tmp_path: Path) -> None:
    before = machine.values()
    executor = machine.executor(Journal(f"{tmp_path}/journal", boot="b"))
    _want(executor, "container/c1", machine.container, CPU_SHARES=700, CPU_CFS_QUOTA=70_000)
    assert _run(executor) == 2
    again = machine.executor(Journal(f"{tmp_path}/journal", boot="b"))
    for _ in range(3):
        again.look_again()
        _run(again)
    assert machine.values() == before


def test_raising_an_oom_score_reaches_the_process_and_goes_back(machine: Machine) -> None:
    file = Path(f"/proc/{machine.processes[0].pid}/oom_score_adj")
    before = int(file.read_text())
    executor = machine.executor(Journal())
    _want(executor, "container/c1", machine.container, OOM_SCORE_ADJ=min(before + 7, 1000))
    assert _run(executor) == 1
    assert int(file.read_text()) == min(before + 7, 1000)
    assert _run(executor) == 0


def test_a_group_that_ends_under_us_costs_nothing(machine: Machine) -> None:
    executor = machine.executor(Journal())
    _want(executor, "container/c1", machine.container, CPU_SHARES=700)
    _run(executor)
    machine.processes[0].kill()
    machine.processes[0].wait()
    for mount in MOUNTS.values():
        _remove(mount / machine.container)
    assert _run(executor) == 0
    assert executor.views("container/c1")[0].state is State.PENDING
    executor.want("container/c1", ())
    _run(executor)
    assert not len(executor.journal)


def test_probing_leaves_nothing_behind(machine: Machine) -> None:
    probed = probe(machine.host, machine.layout)
    assert {Resource.CPU_SHARES, Resource.CPU_CFS_QUOTA, Resource.MEMORY_LIMIT} <= set(
        probed.facts.supported
    )
    assert Resource.CPU_BVT not in probed.facts.supported or "alibaba" in os.uname().release
    for mount in MOUNTS.values():
        assert sorted(path.name for path in (mount / machine.root / "kubepods").iterdir()
                      if path.is_dir()) == ["podu1"]  # fmt: skip


def test_a_foreign_write_is_noticed_and_undone_at_once(machine: Machine) -> None:
    pod = make_pod(
        namespace="default",
        name="p",
        uid="u1",
        labels={},
        annotations={},
        kube_qos=KubeQoS.BURSTABLE,
        cgroup=machine.pod,
    )
    snapshot = Snapshot(Engine.build([POLICY], NodeInputs()), (PodSubject(pod),))
    journal = Journal()
    reconciler = Reconciler(
        machine.executor(journal), journal, lambda: snapshot, interval_s=3600.0, watch=True
    )
    reconciler.start()
    try:
        _until(machine, "700")
        passes = reconciler.stats.passes
        time.sleep(0.3)
        # Our own write does not wake us.
        assert reconciler.stats.passes == passes
        machine.path(machine.pod, Resource.CPU_SHARES).write_text("333")
        _until(machine, "700")
        assert reconciler.stats.foreign_changes >= 1
        assert journal.records()[0].original == "333"
    finally:
        assert reconciler.stop()
        reconciler.close()


def _until(machine: Machine, shares: str) -> None:
    end = time.monotonic() + 5
    while machine.text(machine.pod, Resource.CPU_SHARES) != shares:
        assert time.monotonic() < end, "it did not happen in 5 s"
        time.sleep(0.01)
    time.sleep(0.1)
