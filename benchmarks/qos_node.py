"""What measuring and the strategies cost on a node with load, and what they do for a service.

A whole `koordlet run` with real cgroups: 220 containers in 110 best-effort pods, all default
collectors and strategies at one second. Needs root, and a machine without other load: that load
would count as the system's, and in the latencies. `--shares` gives the pods together that many CPU
shares beside it, 1024 being those of one other process.

    python -m benchmarks.qos_node --minutes 2

Cost: share of one core, resident memory and the time of a sampling round, while nothing runs.
Effect: a service in a burstable pod answers a request every 10 ms with 2 ms of work on each CPU, in
Python, beside two best-effort processes for each CPU that need all of it. Its latency alone, beside
them without koordlet, and beside them with koordlet and suppression by quota and by CPU set.
Reaction: from a load step of the service to the first smaller quota of best-effort pods, and from
the end of the load to the first larger quota and to 90 % of the quota before.
Overshoot: how far the whole node is above suppression's threshold after a load step, in percentage
points of its CPUs over half a second, and how long by more than 5 points; the same at rest before.

To reach: 3 % of one core, 120 MB, and a reaction within 2 s.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from benchmarks.nri_driver import Driver
from benchmarks.nri_messages import container, pod
from benchmarks.overshoot import NodeUse, watching
from benchmarks.quantiles import quantile
from benchmarks.running import run_main
from benchmarks.whole_daemon import cpu_seconds, koordlet, node, resident_mb
from koordctl.client import Client
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.beds.groups import Kubepods, kubepods
from tests.waiting import NotWithin, wait_until

_NODE = "bench-node"
_SERVICE = 9_000
"""The number of the service's pod and container, beyond those of the best-effort pods."""
_CPUS = os.cpu_count() or 1
_SPIN = "while True: pass"
_REQUESTS = """
import sys, time
seconds, work_s, every_s = map(float, sys.argv[1:])
at = time.monotonic()
end = at + seconds
while at < end:
    at = max(at + every_s, time.monotonic())
    time.sleep(max(at - time.monotonic(), 0))
    begun = time.thread_time()
    while time.thread_time() - begun < work_s:
        pass
    print(time.monotonic() - at)
"""
"""Latency counts from the moment at which a request is due, so a late start is part of it. A
request that comes while the one before is served is due when that one is answered."""
_WORK_S = 0.002
_EVERY_S = 0.01
_THRESHOLD = 65
"""Percent of the node that suppression aims at: upstream's default."""
_SETTLING_S = 5.0
"""Longer than suppression needs to find its level after a load step."""


@dataclass(frozen=True, slots=True)
class _Bed:
    folder: Path
    groups: Kubepods
    pods: list[nri.PodSandbox]
    containers: list[nri.Container]
    service: str  # the cgroup of the service's container

    @property
    def quota_us(self) -> int:
        """The CFS quota of all best-effort pods, -1 for none."""
        return int(self.groups.read(f"{self.groups.path}/besteffort", "cpu.cfs_quota_us"))

    def put(self, policy: str) -> None:
        spec = {
            "enable": bool(policy),
            "cpuSuppressPolicy": policy or "cfsQuota",
            "cpuSuppressThresholdPercent": _THRESHOLD,
        }
        slo = {
            "apiVersion": "slo.koordinator.sh/v1alpha1",
            "kind": "NodeSLO",
            "metadata": {"name": _NODE},
            "spec": {"resourceUsedThresholdWithBE": spec},
        }
        scratch = self.folder / "objects" / "nodeslo.tmp"
        scratch.write_text(yaml.safe_dump(slo))
        scratch.rename(scratch.with_suffix(".yaml"))


@contextmanager
def _bed(count: int) -> Iterator[_Bed]:
    with tempfile.TemporaryDirectory() as name, kubepods() as groups:
        folder = Path(name)
        for part in ("objects", "run"):
            (folder / part).mkdir(mode=0o755)
        pods, containers = node(groups, count)
        service = pod(_SERVICE, groups.pod_path("{uid}", "burstable"))
        service.labels["koordinator.sh/qosClass"] = "LS"
        service.labels["koordinator.sh/priority-class"] = "koord-prod"
        service.annotations.clear()
        groups.make_pod(service.uid, "burstable", cpu_shares=1024)
        running = container(_SERVICE, service)
        running.state = nri.CONTAINER_RUNNING
        running.linux.resources.cpu.shares.value = 1024
        groups.make(running.linux.cgroups_path)
        groups.file(running.linux.cgroups_path, "cpu.shares").write_text("1024")
        bed = _Bed(
            folder, groups, [*pods, service], [*containers, running], running.linux.cgroups_path
        )
        bed.put("")
        yield bed


@contextmanager
def _daemon(bed: _Bed, log: Path) -> Iterator[psutil.Process]:
    config = {
        "nodeName": _NODE,
        "nri": {"socket": str(bed.folder / "nri.sock")},
        "objectsDir": str(bed.folder / "objects"),
        "runDir": str(bed.folder / "run"),
        "kubepodsRoot": bed.groups.path.strip("/"),
        "http": {"address": ""},
    }
    driver = Driver(str(bed.folder / "nri.sock"))
    try:
        with koordlet(bed.folder, config, log=log) as process:
            driver.accept()
            driver.synchronize(bed.pods, bed.containers)
            yield process
    finally:
        driver.close()


@contextmanager
def _processes(
    bed: _Bed, group: str, code: str, arguments: Sequence[str], count: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Python processes in a cgroup, ended with the block if they have not ended by then."""
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            # The shell moves itself first: no work is done outside the group.
            files = [str(h / group.lstrip("/") / "cgroup.procs") for h in bed.groups.hierarchies]
            moves = "".join(f"echo $$ > {file}; " for file in files)
            command = ["/bin/sh", "-c", f'{moves}exec "$@"', "sh", sys.executable, "-c", code]
            started.append(
                subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
            )
        yield started
    finally:
        for each in started:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
            each.wait()
            if each.stdout is not None:
                each.stdout.close()


@contextmanager
def _hogs(bed: _Bed) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for number in range(2 * _CPUS):
            group = bed.containers[number].linux.cgroups_path
            stack.enter_context(_processes(bed, group, _SPIN, (), 1))
        yield


def _latencies(bed: _Bed, seconds: float) -> list[float]:
    """Seconds of each request, in order of the answer."""
    arguments = [str(seconds), str(_WORK_S), str(_EVERY_S)]
    with _processes(bed, bed.service, _REQUESTS, arguments, _CPUS) as running:
        return [float(line) for each in running for line in each.communicate()[0].split()]


def _best_effort_seconds(bed: _Bed) -> float:
    return int(bed.groups.read(f"{bed.groups.path}/besteffort", "cpuacct.usage")) / 1e9


def _print_latency(name: str, bed: _Bed, lasting_s: float) -> None:
    before, began = _best_effort_seconds(bed), time.monotonic()
    seconds = _latencies(bed, lasting_s)
    used = (_best_effort_seconds(bed) - before) / (time.monotonic() - began)
    p50, p99, p999 = (quantile(seconds, part) * 1000 for part in (0.5, 0.99, 0.999))
    times = f"p50 {p50:6.2f} p99 {p99:6.2f} p99.9 {p999:6.2f} ms"
    print(f"{name:32}: {times}, best effort {used:.2f} cores", flush=True)


def _cost(bed: _Bed, process: psutil.Process, minutes: float) -> None:
    client = Client(str(bed.folder / "run"))
    time.sleep(10)  # the start is not part of it
    rounds: list[float] = []
    most = 0.0
    busy, began = cpu_seconds(process), time.monotonic()
    while time.monotonic() - began < minutes * 60:
        time.sleep(5)
        rounds.append(client.get("/status")["measuring"]["lastRoundMs"])
        most = max(most, resident_mb(process))
    share = (cpu_seconds(process) - busy) / (time.monotonic() - began)
    print(
        f"cost over {minutes:g} min: {share:.2%} of a core, {resident_mb(process):.1f} MB", end=""
    )
    print(f" (most {most:.1f} MB), round p50 {quantile(rounds, 0.5):.1f}", end="")
    print(f" p99 {quantile(rounds, 0.99):.1f} ms", flush=True)


def _reaction(bed: _Bed, times: int, use: NodeUse) -> None:
    down, up, whole = [], [], []
    rest, excess = [], []
    for _ in range(times):
        settling = time.monotonic()
        time.sleep(_SETTLING_S)
        before = bed.quota_us
        rest.append(use.above(_THRESHOLD, settling + _SETTLING_S / 2, time.monotonic()))
        with _processes(bed, bed.service, _SPIN, (), 1):
            began = time.monotonic()
            # Where other programs left the least quota already, there is nothing to take.
            with contextlib.suppress(NotWithin):
                wait_until(lambda: 0 < bed.quota_us < 0.75 * before, "suppression", timeout_s=20)  # noqa: B023
                down.append(time.monotonic() - began)
            time.sleep(_SETTLING_S)
            low = bed.quota_us
            excess.append(use.above(_THRESHOLD, began, time.monotonic()))
        began = time.monotonic()
        # Where other programs took the CPU meanwhile, there is less to release.
        with contextlib.suppress(NotWithin):
            wait_until(lambda: bed.quota_us > low, "release", timeout_s=20)  # noqa: B023
            up.append(time.monotonic() - began)
            wait_until(lambda: bed.quota_us >= 0.9 * before, "the quota before", timeout_s=30)  # noqa: B023
            whole.append(time.monotonic() - began)
    for name, seconds in (("suppressed", down), ("first release", up), ("90 % released", whole)):
        if seconds:
            median, longest = statistics.median(seconds), max(seconds)
            print(f"{name:14} after {median:.2f} s (longest {longest:.2f} s)", end="")
        print(f"{'' if seconds else name} in {len(seconds)} of {times} load steps", flush=True)
    for name, found in (("before a step", rest), ("overshoot", excess)):
        points, above = ([each[part] for each in found] for part in (0, 1))
        print(
            f"{name:14} at most {statistics.median(points):.1f} points above {_THRESHOLD} %"
            f" (largest {max(points):.1f}), for {statistics.median(above):.1f} s"
            f" (longest {max(above):.1f} s)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=110)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each latency")
    parser.add_argument("--steps", type=int, default=5, help="load steps of the reaction")
    parser.add_argument("--shares", type=int, default=1024, help="CPU shares of all pods")
    options = parser.parse_args()
    with _bed(options.pods) as bed:
        root = bed.groups.path.rpartition("/")[0]
        bed.groups.file(root, "cpu.shares").write_text(str(bed.groups.weight(options.shares)))
        load = os.getloadavg()[0]
        print(f"{options.pods} pods, {len(bed.containers) - 1} containers; {_CPUS} CPUs, ", end="")
        print(f"load {load:.1f} before")
        _print_latency("service alone", bed, options.seconds)
        with _hogs(bed):
            _print_latency("with hogs, without koordlet", bed, options.seconds)
        with _daemon(bed, bed.folder / "log") as process:
            _cost(bed, process, options.minutes)
            for policy in ("cfsQuota", "cpuset"):
                bed.put(policy)
                with _hogs(bed):
                    time.sleep(_SETTLING_S)
                    _print_latency(f"with hogs, koordlet, {policy}", bed, options.seconds)
            bed.put("cfsQuota")
            with _hogs(bed):
                wait_until(lambda: bed.quota_us > 0, "suppression begins", timeout_s=60)
                with watching() as use:
                    _reaction(bed, options.steps, use)


if __name__ == "__main__":
    run_main(main)
