"""What a round of measurements costs: CPU time, its share of a core at one second, and memory.

Makes the groups of 110 pods with two containers each on this machine's cgroup v1 (or v2), each
container with a process, measures them with the collectors of CPU and memory, and removes all of it
afterwards. Prints the cost of each part for the median round. Needs root.

    python -m benchmarks.sampling_round --pods 110 --rounds 120
    python -m benchmarks.sampling_round --pressure

With --pressure the collector of pressure runs alone, on the cgroup v2 hierarchy, which has the
files without any controller, so also beside v1.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.running import run_main
from koordlet.measurement import saved
from koordlet.measurement.collecting import Collector, ContainerTarget, PodTarget, Targets
from koordlet.measurement.collectors.best_effort import BestEffortCollector
from koordlet.measurement.collectors.cgroups import PodCollector
from koordlet.measurement.collectors.host_apps import HostAppCollector
from koordlet.measurement.collectors.node import NodeCollector
from koordlet.measurement.collectors.psi import PressureCollector
from koordlet.measurement.collectors.system import SystemCollector, SystemNumaCollector
from koordlet.measurement.kernel_files import LocalFiles
from koordlet.measurement.sampler import Sampler
from koordlet.measurement.series import Metric
from koordlet.measurement.store import Store
from linux.cgroup_paths import Driver, Layout
from linux.discovery import discover
from linux.local import LocalHost
from service.open_files import raise_limit
from tests.beds.groups import Kubepods, QosClass, kubepods

CLASSES: tuple[QosClass, ...] = ("besteffort", "burstable", "guaranteed")
WARM_UP_ROUNDS = 5


@contextmanager
def pods(tree: Kubepods, count: int) -> Iterator[tuple[PodTarget, ...]]:
    """Pods with two containers each and one sleeping process a pod."""
    processes: list[subprocess.Popen[bytes]] = []
    targets: list[PodTarget] = []
    try:
        for number in range(count):
            path = tree.pod_path(f"bench-{number}", CLASSES[number % 3])
            containers = []
            for name in ("a", "b"):
                group = f"{path}/{name}"
                tree.make(group)
                containers.append(ContainerTarget(f"{number}-{name}", group.lstrip("/")))
            process = subprocess.Popen(["sleep", "3600"])
            processes.append(process)
            for hierarchy in tree.hierarchies:
                (hierarchy / path.lstrip("/") / "a" / "cgroup.procs").write_text(str(process.pid))
            targets.append(
                PodTarget(
                    f"bench-{number}",
                    path.lstrip("/"),
                    tuple(containers),
                    best_effort=number % 3 == 0,
                    batch_cpu_request_milli=500 if number % 3 == 0 else 0,
                )
            )
        yield tuple(targets)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def thread_ms() -> float:
    """CPU time of this thread; getrusage(2) counts whole ticks on some kernels."""
    return time.thread_time() * 1000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pods", type=int, default=110)
    arguments.add_argument("--rounds", type=int, default=120)
    arguments.add_argument("--interval", type=float, default=1.0, help="seconds between rounds")
    arguments.add_argument("--pressure", action="store_true", help="see above")
    options = arguments.parse_args()
    raise_limit()
    with kubepods() as tree, pods(tree, options.pods) as targets:
        if options.pressure:
            root = next(str(each) for each in tree.hierarchies if is_unified(each))
            layout = Layout(2, {"": root}, Driver.CGROUPFS, tree.path.lstrip("/"))
            measure_pressure(Targets(layout, targets), options.rounds, options.interval)
            return
        found = discover(LocalHost())
        layout = Layout(found.version, found.mounts, Driver.CGROUPFS, tree.path.lstrip("/"))
        measure(Targets(layout, targets), options.rounds, options.interval)


def is_unified(hierarchy: Path) -> bool:
    return (hierarchy / "cgroup.controllers").exists()


def measure_pressure(targets: Targets, rounds: int, interval_s: float) -> None:
    store = Store()
    sampler = Sampler(
        store, [PressureCollector(interval_s=interval_s)], LocalFiles(), lambda: targets
    )
    gc.collect()
    gc.freeze()
    cpu: list[float] = []
    for number in range(-WARM_UP_ROUNDS, rounds):
        at, used = time.monotonic(), thread_ms()
        sampler.round(at)
        if number >= 0:
            cpu.append(thread_ms() - used)
        time.sleep(max(at + interval_s - time.monotonic(), 0))
    (status,) = sampler.status(time.monotonic()).collectors
    print(f"  CPU a round  p50 {statistics.median(cpu):.2f} ms  p99 {percentile(cpu, 0.99):.2f} ms")
    print(f"  share        {statistics.fmean(cpu) / (interval_s * 10):.2f} % of a core")
    print(f"  store        {status.series} series, {status.bytes / 2**20:.1f} MiB")
    groups = len(targets.groups)
    if status.failures or status.series < 8 * groups:
        raise SystemExit(f"not everything was measured of {groups} groups: {status}")


def measure(targets: Targets, rounds: int, interval_s: float) -> None:
    cpus = os.cpu_count() or 1
    before = resident_bytes()
    collectors: list[Collector] = [
        NodeCollector(cpus),
        PodCollector(cpus),
        HostAppCollector(cpus),
        BestEffortCollector(cpus),
        SystemCollector(),
        SystemNumaCollector(),
    ]
    store, files = Store(), LocalFiles()
    sampler = Sampler(store, collectors, files, lambda: targets)
    cpu: list[float] = []
    wall: list[float] = []
    parts: dict[str, list[float]] = {one.name: [] for one in collectors}
    gc.collect()
    gc.freeze()
    begun = time.monotonic()
    for number in range(-WARM_UP_ROUNDS, rounds):
        time.sleep(max(begun + (number + WARM_UP_ROUNDS) * interval_s - time.monotonic(), 0))
        at, used = time.monotonic(), thread_ms()
        sampler.round(at)
        if number >= 0:
            cpu.append(thread_ms() - used)
            wall.append((time.monotonic() - at) * 1000)
            for one in sampler.status(at).collectors:
                parts[one.name].append(one.took_ms)
    containers = sum(len(pod.containers) for pod in targets.pods)
    print(f"{len(targets.pods)} pods, {containers} containers, {rounds} rounds at {interval_s:g} s")
    print(f"  open files   {files.kept}")
    print(f"  CPU a round  p50 {statistics.median(cpu):.2f} ms  p99 {percentile(cpu, 0.99):.2f} ms")
    print(f"  share        {statistics.fmean(cpu) / (interval_s * 10):.2f} % of a core")
    print(
        f"  time a round p50 {statistics.median(wall):.2f} ms  p99 {percentile(wall, 0.99):.2f} ms"
    )
    for name, times in parts.items():
        print(f"    {name:<18} p50 {statistics.median(times):.3f} ms")
    sizes = store.sizes()
    print(
        f"  store        {sum(one[0] for one in sizes.values())} series, "
        f"{sum(one[1] for one in sizes.values()) / 2**20:.1f} MiB"
    )
    print(f"  memory       {(resident_bytes() - before) / 2**20:.1f} MiB more than before")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "measurements")
        used = thread_ms()
        size = saved.save(store, path, boot="bench", now=time.monotonic())
        print(f"  saving       {thread_ms() - used:.1f} ms, {size / 2**20:.2f} MiB")
    view = store.view(time.monotonic())
    used = thread_ms()
    for metric in (Metric.POD_CPU, Metric.POD_MEMORY):
        view.averages(metric, within_s=300)
    print(f"  averages     {thread_ms() - used:.2f} ms for CPU and memory of all pods")
    used = thread_ms()
    view.statistics(Metric.POD_CPU, within_s=300)
    print(f"  statistics   {thread_ms() - used:.2f} ms for CPU of all pods")
    missing = [one.name for one in sampler.status(time.monotonic()).collectors if one.failures]
    if missing or len(view.averages(Metric.CONTAINER_CPU, within_s=300)) != containers:
        raise SystemExit(f"not everything was measured: {missing}")


if __name__ == "__main__":
    run_main(main)
