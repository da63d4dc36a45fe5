"""The executor and the reconciler's thread on this machine's own cgroups, with real processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from hooks.claim import Claim, Op, Rank
from hooks.engine import Engine
from hooks.facts import NodeInputs
from hooks.standing import NOTHING_STANDS, Standing
from hooks.state import State
from hooks.subject import ContainerSubject, PodSubject, QosSubject, Requested, make_pod
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal
from koordlet.executor.slots import Want
from koordlet.node.probe import probe_kernel
from koordlet.reconciler.reconciler import Reconciler
from koordlet.state.snapshot import Snapshot
from linux.block_devices import read_block_devices
from linux.block_io import BLOCK_FILES
from linux.cgroup_files import FILES, field_text
from linux.cgroup_paths import Layout
from linux.discovery import discover
from linux.local import LocalHost
from linux.resources import Resource, Value
from tests.beds.errors import BedError
from tests.beds.groups import V2_CONTROLLERS, Kubepods, kubepods
from tests.conftest import require
from tests.koordlet.executor.bed import claim_of
from tests.koordlet.reconciler.bed import POLICY
from tests.waiting import wait_until

pytestmark = pytest.mark.root
MANAGED = (
    Resource.CPU_SHARES,
    Resource.CPU_CFS_QUOTA,
    Resource.CPU_CFS_BURST,
    Resource.CPU_IDLE,
    Resource.CPUSET_CPUS,
    Resource.MEMORY_LIMIT,
)


@dataclass
class Machine:
    """A pods' root of our own with one pod and one container that runs `sleep`."""

    tree: Kubepods
    host: LocalHost
    layout: Layout
    pod: str
    container: str
    process: subprocess.Popen[bytes]

    def directories(self, cgroup: str) -> list[Path]:
        return [hierarchy / cgroup for hierarchy in self.tree.hierarchies]

    def path(self, cgroup: str, resource: Resource) -> Path:
        file = FILES[resource]
        directory = self.layout.directory(file.controller, cgroup)
        return Path(directory, file.name(self.layout.version))

    def text(self, cgroup: str, resource: Resource) -> str:
        """The resource's field, unlimited as v1 writes it, a weight as it is."""
        raw = self.path(cgroup, resource).read_bytes()
        return field_text(FILES[resource], self.layout.version, raw).replace("max", "-1")

    def values(self) -> dict[tuple[str, str], str]:
        found = {
            (cgroup, resource.value): self.text(cgroup, resource)
            for cgroup in (self.pod, self.container)
            for resource in MANAGED
            if self.path(cgroup, resource).exists()
        }
        if self.layout.version == 2:
            # A v2 group with tasks cannot get its empty set back; all CPUs mean the same.
            everything = Path("/sys/devices/system/cpu/possible").read_text().strip()
            found = {key: "" if text == everything else text for key, text in found.items()}
        return found

    def executor(self, journal: Journal) -> Executor:
        return Executor(self.host, self.layout, journal)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with ExitStack() as stack:
        try:
            tree = stack.enter_context(kubepods())
        except BedError as error:
            require(None, str(error))
            raise
        host = LocalHost()
        layout = discover(host, kubepods=tree.path)
        pod = tree.make_pod("u1", "burstable", cpu_shares=512, cfs_quota_us=150_000).lstrip("/")
        container = f"{pod}/c1"
        process = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(process.kill)
        made = Machine(tree, host, layout, pod, container, process)
        for directory in made.directories(container):
            if layout.version == 2:
                wanted = " ".join(f"+{controller}" for controller in V2_CONTROLLERS)
                (directory.parent / "cgroup.subtree_control").write_text(wanted)
            directory.mkdir()
            for kind in ("cpuset.cpus", "cpuset.mems"):
                if layout.version == 1 and (directory / kind).exists():
                    (directory / kind).write_text((directory.parent / kind).read_text())
            (directory / "cgroup.procs").write_text(str(process.pid))
        for resource, text in (
            (Resource.CPU_CFS_QUOTA, "150000"),
            (Resource.CPU_SHARES, "512"),
            (Resource.MEMORY_LIMIT, "134217728"),
        ):
            made.path(container, resource).write_text(text)
        yield made
        process.kill()
        process.wait()


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
    journal = Journal()
    executor = machine.executor(journal)
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
    assert not len(journal)


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
    file = Path(f"/proc/{machine.process.pid}/oom_score_adj")
    before = int(file.read_text())
    executor = machine.executor(Journal())
    _want(executor, "container/c1", machine.container, OOM_SCORE_ADJ=min(before + 7, 1000))
    assert _run(executor) == 1
    assert int(file.read_text()) == min(before + 7, 1000)
    assert _run(executor) == 0


def test_a_group_that_ends_under_us_costs_nothing(machine: Machine) -> None:
    journal = Journal()
    executor = machine.executor(journal)
    _want(executor, "container/c1", machine.container, CPU_SHARES=700)
    _run(executor)
    machine.process.kill()
    machine.process.wait()
    for directory in machine.directories(machine.container):
        _remove(directory)
    assert _run(executor) == 0
    assert executor.views("container/c1")[0].state is State.PENDING
    executor.want("container/c1", ())
    _run(executor)
    assert not len(journal)


def test_lines_of_a_disk_are_taken_and_given_back(machine: Machine) -> None:
    """The kernel takes a throttle of a whole disk, refuses a weight without BFQ, and a number that
    is not a disk's."""
    devices = read_block_devices(machine.host)
    disks = [devices.by_name[name].number for name in devices.disks()]
    controller = "blkio" if machine.layout.version == 1 else "io"
    name = BLOCK_FILES[Resource.BLKIO_READ_BPS].name(machine.layout.version)
    has = machine.layout.has(controller)
    path = Path(machine.layout.directory(controller, machine.pod) if has else "/", name)
    require(disks and path.exists(), f"a disk and {path}", tier="block I/O")
    disk, bfq = disks[0], probe_kernel(machine.host, machine.layout).facts.disks
    with_bfq = any(one.bfq for found in bfq.values() for one in found if one.number == disk)
    before = path.read_text()
    journal = Journal(None, boot="b")
    executor = machine.executor(journal)
    wishes = [
        (Resource.BLKIO_READ_BPS, disk, 1 << 20),
        (Resource.BLKIO_BFQ_WEIGHT, disk, 50),
        (Resource.BLKIO_WRITE_IOPS, "4095:1048575", 100),
    ]
    executor.want(
        "pod/u1",
        [
            Want("pod/u1", machine.pod, resource, key, value, claim_of(resource, value, key=key))
            for resource, key, value in wishes
        ],
    )
    executor.apply(executor.plan())
    assert f"{disk} " in path.read_text() and str(1 << 20) in path.read_text()
    states = {view.resource: view.state for view in executor.views("pod/u1")}
    assert states[Resource.BLKIO_READ_BPS] is State.APPLIED
    assert states[Resource.BLKIO_BFQ_WEIGHT] is (State.APPLIED if with_bfq else State.UNSUPPORTED)
    assert states[Resource.BLKIO_WRITE_IOPS] is State.FAILED
    assert not executor.plan().writes
    executor.want("pod/u1", ())
    _run(executor)
    assert path.read_text() == before
    _run(executor)
    assert not len(journal)


def _stand(resource: Resource, value: Value, op: Op = Op.SET) -> tuple[Claim, ...]:
    return (
        Claim(
            resource=resource,
            value=value,
            policy="suppress",
            reason="r",
            source="s",
            op=op,
            rank=Rank.EMERGENCY,
        ),
    )


def test_a_qos_directory_takes_standing_claims_in_an_order_that_the_kernel_accepts(
    machine: Machine,
) -> None:
    """v1 refuses a directory's quota or CPU set below that of a group in it; v2 does not."""
    before = machine.values()
    cgroup = machine.pod.rpartition("/")[0]
    of_directory = [
        machine.text(cgroup, resource)
        for resource in (Resource.CPU_CFS_QUOTA, Resource.CPUSET_CPUS)
    ]
    pod = make_pod(
        namespace="default",
        name="p",
        uid="u1",
        labels={},
        annotations={},
        kube_qos=KubeQoS.BURSTABLE,
        cgroup=machine.pod,
    )
    asked = Requested(cfs_quota_us=150_000)
    directory = QosSubject(KubeQoS.BURSTABLE, cgroup, (pod,))
    below = (
        PodSubject(pod, asked),
        ContainerSubject(pod=pod, name="main", id="c1", cgroup=machine.container, requested=asked),
    )
    snapshot = Snapshot(Engine.build([], NodeInputs()), (directory, *below))
    journal = Journal()
    reconciler = Reconciler(machine.executor(journal), journal, lambda: snapshot)
    reconciler.run_once("start")

    def stand(resource: Resource, value: Value, *, all_below: bool) -> None:
        by_subject = {directory.key: _stand(resource, value)}
        if all_below:
            by_subject |= {each.key: _stand(resource, value, Op.WITHIN) for each in below}
        reconciler.standing_changed(Standing(by_subject))
        report = reconciler.update_once()
        assert report is not None and report.failed == 0

    def texts(resource: Resource) -> list[str]:
        groups = (cgroup, machine.pod, machine.container)
        return [machine.text(group, resource) for group in groups]

    stand(Resource.CPU_CFS_QUOTA, 120_000, all_below=False)
    kept = "150000" if machine.layout.version == 1 else "120000"
    assert texts(Resource.CPU_CFS_QUOTA) == [kept, "150000", "150000"]
    for quota in (120_000, 30_000, 140_000, 60_000):
        stand(Resource.CPU_CFS_QUOTA, quota, all_below=True)
        assert texts(Resource.CPU_CFS_QUOTA) == [str(quota)] * 3
    for cpus in ("0", "1", "0-1", "1"):
        stand(Resource.CPUSET_CPUS, CpuSet.parse(cpus), all_below=True)
        assert texts(Resource.CPUSET_CPUS) == [cpus] * 3
    reconciler.standing_changed(NOTHING_STANDS)
    reconciler.update_once()
    reconciler.run_once("timer")
    assert machine.values() == before
    if machine.layout.version == 1:
        found = (Resource.CPU_CFS_QUOTA, Resource.CPUSET_CPUS)
        assert [machine.text(cgroup, resource) for resource in found] == of_directory
    assert not len(journal)
    reconciler.close()


def test_probing_leaves_nothing_behind(machine: Machine) -> None:
    probed = probe_kernel(machine.host, machine.layout)
    assert {Resource.CPU_SHARES, Resource.CPU_CFS_QUOTA, Resource.MEMORY_LIMIT} <= set(
        probed.facts.supported
    )
    assert Resource.CPU_BVT not in probed.facts.supported or "alibaba" in os.uname().release
    for directory in machine.directories(machine.layout.kubepods):
        names = {path.name for path in directory.iterdir() if path.is_dir()}
        assert names == {"burstable", "besteffort"}


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
        _until(machine, 700)
        passes = reconciler.stats.passes
        time.sleep(0.3)
        # Our own write does not wake us.
        assert reconciler.stats.passes == passes
        machine.path(machine.pod, Resource.CPU_SHARES).write_text("333")
        _until(machine, 700)
        assert reconciler.stats.foreign_changes >= 1
        assert journal.records()[0].original == "333"
    finally:
        assert reconciler.stop()
        reconciler.close()


def _until(machine: Machine, shares: int) -> None:
    wanted = str(machine.tree.weight(shares))
    wait_until(
        lambda: machine.text(machine.pod, Resource.CPU_SHARES) == wanted, f"shares of {wanted}"
    )
    time.sleep(0.1)
