"""The collectors on this machine's cgroups, with a spinner and a memory hog of the test's own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from koordlet.measurement.collecting import ContainerTarget, HostAppTarget, PodTarget, Targets
from koordlet.measurement.collectors.best_effort import BestEffortCollector
from koordlet.measurement.collectors.cgroups import PodCollector, memory_of
from koordlet.measurement.collectors.host_apps import HostAppCollector
from koordlet.measurement.collectors.node import NodeCollector
from koordlet.measurement.collectors.system import SystemCollector, SystemNumaCollector
from koordlet.measurement.kernel_files import GONE, HostFiles, KernelFiles, LocalFiles
from koordlet.measurement.sampler import Sampler
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store
from linux.cgroup_paths import Driver, Layout
from linux.discovery import discover
from linux.local import LocalHost
from tests.beds.errors import BedError
from tests.beds.groups import Kubepods, kubepods
from tests.conftest import require
from tests.waiting import wait_until

pytestmark = pytest.mark.root
CPUS = 4096
"""More than any machine has: the values are the kernel's, not capped ones."""
HOG_BYTES = 64 << 20
BATCHED_BYTES = 1 << 20
"""The kernel adds what a CPU has charged to a group's statistics in batches of 64 pages."""
INTERVAL_S = 0.4
SPIN = "while True: pass"
HOG = f"kept = bytearray(b'x') * {HOG_BYTES}; print('held', flush=True); input()"


@dataclass
class Bed:
    """A kubepods tree, processes in it, and a sampler of its pods."""

    tree: Kubepods
    stack: ExitStack
    layout: Layout = field(init=False)
    targets: Targets = field(init=False)
    sampler: Sampler = field(init=False)
    files: LocalFiles = field(default_factory=LocalFiles)

    def __post_init__(self) -> None:
        found = discover(LocalHost())
        self.layout = Layout(
            found.version, found.mounts, Driver.CGROUPFS, self.tree.path.lstrip("/")
        )
        self.targets = Targets(self.layout)
        self.sampler = Sampler(
            Store(),
            [
                NodeCollector(CPUS, interval_s=INTERVAL_S),
                PodCollector(CPUS, interval_s=INTERVAL_S),
                HostAppCollector(CPUS, interval_s=INTERVAL_S),
                BestEffortCollector(CPUS, interval_s=INTERVAL_S),
                SystemCollector(interval_s=INTERVAL_S),
                SystemNumaCollector(interval_s=INTERVAL_S),
            ],
            self.files,
            lambda: self.targets,
        )

    def run(self, group: str, script: str) -> subprocess.Popen[bytes]:
        """Run a Python script in a group, given by its absolute cgroup path."""
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.stack.callback(self.end, process)
        for hierarchy in self.tree.hierarchies:
            (hierarchy / group.lstrip("/") / "cgroup.procs").write_text(str(process.pid))
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.communicate()

    def round(self) -> None:
        """Measure once an interval has passed."""
        time.sleep(INTERVAL_S)
        self.measured_at = time.monotonic()
        self.sampler.round(self.measured_at)

    def rounds_until(self, metric: Metric, of: str, least: float) -> None:
        """Measure until a value is above `least`: others may hold the CPUs for a while."""

        def reached() -> bool:
            self.round()
            value = self.latest(metric, of)
            return value is not None and value > least

        wait_until(reached, f"{metric} of {of} above {least}")

    def latest(self, metric: Metric, of: str = "") -> float | None:
        """The value of the last round, None if that had none."""
        view = self.sampler.store.view(self.measured_at)
        return view.latest(Series(metric, of), within_s=INTERVAL_S / 2)


@pytest.fixture
def bed() -> Iterator[Bed]:
    with ExitStack() as stack:
        try:
            tree = stack.enter_context(kubepods())
        except BedError as error:
            require(None, str(error))
            raise
        bed = Bed(tree, stack)
        yield bed
        for collector in bed.sampler.collectors:
            collector.close()
        assert bed.files.kept == 0


def test_a_throttled_spinner_uses_its_quota(bed: Bed) -> None:
    pod = bed.tree.make_pod("spin", "besteffort", cpu_shares=2, cfs_quota_us=20_000)
    bed.tree.make(f"{pod}/c")
    bed.targets = Targets(
        bed.layout,
        (
            PodTarget(
                "spin",
                pod.lstrip("/"),
                (ContainerTarget("c", f"{pod}/c".lstrip("/")),),
                best_effort=True,
                batch_cpu_request_milli=700,
            ),
        ),
    )
    bed.run(f"{pod}/c", SPIN)
    bed.rounds_until(Metric.POD_CPU_THROTTLED, "spin", 0)
    used = bed.latest(Metric.POD_CPU, "spin")
    # 20 ms of every 100 ms; a busy machine may give less, and a period may begin in the window.
    assert used is not None and 0 < used < 0.35
    assert bed.latest(Metric.CONTAINER_CPU, "c") == pytest.approx(used, abs=0.1)
    assert bed.latest(Metric.BE_CPU_USED) == pytest.approx(used * 1000, abs=100)
    assert bed.latest(Metric.BE_CPU_REQUEST) == 700
    online = len(os.sched_getaffinity(0))
    assert bed.latest(Metric.BE_CPU_LIMIT) == online * 1000
    node = bed.latest(Metric.NODE_CPU)
    system = bed.latest(Metric.SYSTEM_CPU)
    assert node is not None and system is not None
    assert system <= node


def test_anonymous_memory_and_page_cache_are_distinguished(bed: Bed) -> None:
    pod = bed.tree.make_pod("hog", "burstable", cpu_shares=100)
    bed.tree.make(f"{pod}/c")
    bed.targets = Targets(
        bed.layout,
        (PodTarget("hog", pod.lstrip("/"), (ContainerTarget("c", f"{pod}/c".lstrip("/")),)),),
        (HostAppTarget("app", f"{pod}/c".lstrip("/")),),
    )
    # Not below /tmp, which may be a tmpfs: its pages count as anonymous.
    folder = bed.stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
    file = Path(folder) / "cache"
    hog = bed.run(
        f"{pod}/c",
        # Starts in the group: the parent's write comes before the first line is read.
        f"input(); open({str(file)!r}, 'wb').write(bytes({HOG_BYTES})); {HOG}",
    )
    assert hog.stdin is not None and hog.stdout is not None
    hog.stdin.write(b"\n")
    hog.stdin.flush()
    assert hog.stdout.readline() == b"held\n"
    bed.round()
    memory = bed.latest(Metric.POD_MEMORY, "hog")
    with_cache = bed.latest(Metric.POD_MEMORY_WITH_PAGE_CACHE, "hog")
    assert memory is not None and with_cache is not None
    assert HOG_BYTES - BATCHED_BYTES <= memory < 1.5 * HOG_BYTES
    assert with_cache >= memory + HOG_BYTES * 0.9
    path = f"{bed.layout.directory('memory', pod.lstrip('/'))}/memory.stat"
    of_stat = memory_of(Path(path).read_bytes(), bed.layout.version)
    assert (memory, with_cache) == pytest.approx(of_stat, rel=0.01)
    assert bed.latest(Metric.CONTAINER_MEMORY, "c") == pytest.approx(memory, rel=0.1)
    assert bed.latest(Metric.HOST_APP_MEMORY, "app") == pytest.approx(memory, rel=0.1)


def test_a_group_that_is_replaced_gives_no_difference_of_two_counters(bed: Bed) -> None:
    group = f"{bed.tree.path}/burstable/app"
    bed.tree.make(group)
    bed.targets = Targets(bed.layout, (), (HostAppTarget("app", group.lstrip("/")),))
    first = bed.run(group, SPIN)
    bed.round()
    bed.round()
    assert bed.latest(Metric.HOST_APP_CPU, "app") is not None
    bed.end(first)
    bed.tree.remove(group)
    bed.round()
    assert bed.latest(Metric.HOST_APP_CPU, "app") is None
    bed.tree.make(group)
    wait_until(lambda: _again(bed), "the new group's first sample")
    assert bed.latest(Metric.HOST_APP_CPU, "app") == pytest.approx(0, abs=0.05)
    assert not [one.error for one in bed.sampler.status(0.0).collectors if one.failures]


def _again(bed: Bed) -> bool:
    bed.round()
    return bed.latest(Metric.HOST_APP_CPU, "app") is not None


@pytest.mark.parametrize("kind", ["kept", "fleeting", "of a host"])
def test_a_removed_group_answers_that_it_is_gone_and_its_successor_does_not_count(
    bed: Bed, kind: str
) -> None:
    group = f"{bed.tree.path}/burstable/g"
    bed.tree.make(group)
    path = f"{bed.layout.directory('memory', group.lstrip('/'))}/memory.stat"
    kinds: dict[str, KernelFiles] = {
        "kept": LocalFiles(),
        "fleeting": LocalFiles(most=0),
        "of a host": HostFiles(LocalHost()),
    }
    files = kinds[kind]
    file = files.open(path)
    assert b"inactive_anon" in file.read()
    bed.tree.remove(group)
    with pytest.raises(OSError) as gone:
        file.read()
    assert gone.value.errno in GONE
    bed.tree.make(group)
    with pytest.raises(OSError) as replaced:
        file.read()
    assert replaced.value.errno == errno.ENODEV
    file.close()
    successor = files.open(path)
    assert b"inactive_anon" in successor.read()
    successor.close()


def test_no_more_descriptors_are_kept_than_allowed(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(6)]
    for path in paths:
        path.write_text(path.name)
    files = LocalFiles(most=4)
    opened = [files.open(str(path)) for path in paths]
    assert files.kept == 4
    assert [file.read() for file in opened] == [path.name.encode() for path in paths]
    opened[0].close()
    opened[0].close()
    assert files.kept == 3
    again = files.open(str(paths[0]))
    assert files.kept == 4
    for file in [*opened, again]:
        file.close()
    assert files.kept == 0
