"""What koordlet measures and does while pods run, on cgroup v2 with NUMA nodes, PSI and a disk.

On an emulated machine each spinner takes a CPU from all the others. So processes are stopped except
in the test that needs them, and every test waits for a state. The pods live for the whole module.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from koordctl.client import Client
from koordlet.measurement.series import Metric
from tests.e2e.manifests import Manifest, nodeslo, pod
from tests.e2e.samples import Samples
from tests.vm.inside.node import CGROUPS, Node, Pod
from tests.vm.inside.service import BE_IDLE, GATES, LS_PROTECTED, RUN, Service
from tests.waiting import wait_until

_MIB = 1 << 20
_SPIN = "while :; do :; done"
_HELD = 16 * _MIB
_HIGH = 10 * _MIB
_LEAST = 128 * _MIB
"""What pressure control leaves each best-effort pod, see docs/qos.md."""
_CACHED = 192 * _MIB
_CACHE = (
    f"dd if=/dev/zero of=/data bs=1M count={_CACHED // _MIB} conv=fsync 2> /dev/null;"
    " while :; do sleep 1; done"
)
"""Writes a file, and keeps its page cache unless the kernel reclaims it."""
_STARVED = f"x=$(yes | head -c {_HELD}); while :; do y=$(yes | head -c 1000000); done"
"""Holds memory that cannot be reclaimed, and takes and frees more without a pause."""
_BEST_EFFORT = CGROUPS / "kubepods.slice/kubepods-besteffort.slice"
_BUSY = (
    f"x=$(yes | head -c {_HELD}); while :; do sleep 0.2; y=$(yes | head -c 1000000);"
    " dd if=/dev/zero of=/dirty bs=64k count=4 oflag=direct 2> /dev/null; done"
)


@dataclass(frozen=True, slots=True)
class Pods:
    """web: two latency-sensitive spinners. batch: two best-effort ones. busy: best-effort, holds
    memory, takes and frees more, and writes past the page cache. limited: spins at its limit."""

    web: Pod
    batch: Pod
    busy: Pod
    limited: Pod


def wait(condition: Callable[[], object], what: str) -> None:
    wait_until(condition, what, timeout_s=120, every_s=0.2)


def shell(name: str, qos: str, script: str, **fields: Any) -> Manifest:
    return pod(name, qos, command=["/bin/sh", "-c", script], **fields)


def slo(**spec: Mapping[str, Any]) -> Manifest:
    made = nodeslo(beClass=BE_IDLE, lsClass=LS_PROTECTED)
    for name, value in spec.items():
        made["spec"][name] = value
    return made


@pytest.fixture(scope="module")
def pods(machine: Node, service: Service) -> Iterator[Pods]:
    def started(manifest: Manifest) -> Pod:
        made = machine.run_pod(manifest)
        wait(lambda: len(made.pids("main")) >= script_of(manifest).count("while"), "it runs")
        signal_to(made, signal.SIGSTOP)
        return made

    further = ("PSICollector", "PressureSuppress", "BlkIOReconcile")
    service.gates(GATES | dict.fromkeys(further, True))
    little = {"cpu": "100m"}
    limits = {"cpu": "200m", "memory": "64Mi"}
    limited = shell("limited", "LS", _SPIN, requests=little, limits=limits)
    with service.knowing(limited):
        made = Pods(
            web=started(shell("web", "LS", f"{_SPIN} & {_SPIN}", requests=little)),
            batch=started(shell("batch", "BE", f"{_SPIN} & {_SPIN}")),
            busy=started(shell("busy", "BE", _BUSY)),
            limited=started(limited),
        )
        try:
            yield made
        finally:
            service.put(slo())
            service.gates(GATES)
            for each in (made.web, made.batch, made.busy, made.limited):
                machine.remove(each)


def script_of(manifest: Manifest) -> str:
    return str(manifest["spec"]["containers"][0]["command"][2])


@contextmanager
def going(*pods: Pod) -> Iterator[None]:
    """Let the processes of some pods go on until the block ends."""
    for each in pods:
        signal_to(each, signal.SIGCONT)
    try:
        yield
    finally:
        for each in pods:
            signal_to(each, signal.SIGSTOP)


def signal_to(of: Pod, what: signal.Signals) -> None:
    for pid in of.pids("main"):
        with suppress(ProcessLookupError):
            os.kill(pid, what)


def together(of: Pod) -> None:
    """Let all processes of a container wait for one CPU."""
    pids = of.pids("main")
    for pid in pids:
        os.sched_setaffinity(pid, {min(os.sched_getaffinity(pids[0]))})


def top(of: Pod) -> dict[str, Any]:
    """What `koordctl top` shows of a pod; {} while it has nothing."""
    found = Client(str(RUN)).get("/top").get("pods", ())
    return next((each for each in found if each["uid"] == of.uid), {})


def pressure(of: Pod, name: str) -> float:
    return float(top(of).get("pressure", {}).get(name, 0.0))


def summary(name: str) -> str:
    strategies = Client(str(RUN)).get("/status")["strategies"]
    return next(str(each["summary"]) for each in strategies if each["name"] == name)


def text(file: str) -> str:
    """A file of the besteffort slice."""
    return (_BEST_EFFORT / file).read_text().strip()


def quota() -> int | None:
    """The quota of the besteffort slice in µs for each 100 ms; None for none."""
    most, period = text("cpu.max").split()
    return None if most == "max" else int(most) * 100_000 // int(period)


def test_figures_of_known_loads(pods: Pods) -> None:
    web, busy = pods.web, pods.busy
    os.kill(web.pids("main")[0], signal.SIGCONT)
    wait(lambda: 0.8 < (top(web).get("cpu") or 0) < 1.1, "one spinner uses one CPU")
    assert (top(web).get("memory") or 0) < 8 * _MIB
    signal_to(web, signal.SIGSTOP)
    with going(busy):
        wait(lambda: _HELD < (top(busy).get("memory") or 0) < _HELD + 24 * _MIB, "its memory")
    wait(lambda: (top(web)["cpu"] or 0) < 0.1, "a stopped spinner uses nothing")


def test_memory_pressure_is_seen_where_memory_is_held_back(pods: Pods) -> None:
    """Anonymous memory above memory.high without swap makes its process wait."""
    high = CGROUPS / pods.busy.container_cgroup("main") / "memory.high"
    before = high.read_text()
    high.write_text(str(_HIGH))
    try:
        with going(pods.busy):
            wait(lambda: pressure(pods.busy, "mem.some.avg10") > 1, "the pod waits for memory")
        assert pressure(pods.web, "mem.some.avg10") < 1
    finally:
        high.write_text(before)


def test_suppression_by_quota_and_by_cpu_set(service: Service, pods: Pods) -> None:
    def suppressing(policy: str, percent: int, *, enable: bool = True) -> None:
        fields = {"cpuSuppressPolicy": policy, "cpuSuppressThresholdPercent": percent}
        service.put(slo(resourceUsedThresholdWithBE={"enable": enable, **fields}))

    def throttled() -> int:
        return int(re.findall(r"nr_throttled (\d+)", text("cpu.stat"))[0])

    def allowed() -> set[int]:
        return set().union(*(os.sched_getaffinity(pid) for pid in pods.batch.pids("main")))

    cpus = os.cpu_count() or 1
    before = allowed()
    assert quota() is None
    with going(pods.batch):
        suppressing("cfsQuota", 20)
        wait(lambda: 0 < (quota() or 0) <= cpus * 20_000, "best-effort pods have a quota")
        times = throttled()
        wait(lambda: throttled() > times, "the quota holds the spinners")
    suppressing("cpuset", 20)
    wait(lambda: quota() is None and allowed() < before, "they have a CPU set instead")
    found = re.match(r"best-effort pods on (\d+) CPUs", summary("BECPUSuppress"))
    assert found is not None and len(allowed()) <= int(found[1]) < cpus
    suppressing("cpuset", 20, enable=False)
    wait(lambda: allowed() == before and quota() is None, "all CPUs are back")


def test_a_throttled_container_gets_more_quota_and_gives_it_back(
    service: Service, pods: Pods
) -> None:
    def quotas() -> list[str]:
        of_pod = (CGROUPS / pods.limited.cgroup / "cpu.max").read_text()
        return [each.split()[0] for each in (pods.limited.read("main", "cpu.max"), of_pod)]

    def bursting(policy: str) -> None:
        service.put(slo(cpuBurstStrategy={"policy": policy, "sharePoolThresholdPercent": 100}))

    assert quotas() == ["20000", "20000"]
    with going(pods.limited):
        bursting("auto")
        wait(lambda: min(map(int, quotas())) > 20_000, "both quotas are raised")
        assert max(map(int, quotas())) <= 60_000
    bursting("none")
    wait(lambda: quotas() == ["20000", "20000"], "the limits are back")


def test_best_effort_pods_yield_while_a_service_waits_for_cpu(service: Service, pods: Pods) -> None:
    def grows() -> bool:
        now = quota() or 10**9
        seen.append(now)
        return now > min(seen)

    assert quota() is None
    together(pods.web)
    seen: list[int] = []
    with going(pods.batch):
        with going(pods.web):
            wait(lambda: quota() is not None, "best-effort pods yield")
            assert "default/web" in summary("PressureSuppress")
        wait(grows, "nothing waits any more, and they get CPU back")
    service.gates(GATES | {"BlkIOReconcile": True, "PSICollector": True})
    wait(lambda: quota() is None, "they have all again without the gate")


@contextmanager
def started(machine: Node, manifest: Manifest) -> Iterator[Pod]:
    """A pod for one test."""
    made = machine.run_pod(manifest)
    try:
        yield made
    finally:
        machine.remove(made)


def test_best_effort_pods_yield_memory_while_a_service_waits_for_memory(
    machine: Node, service: Service, pods: Pods
) -> None:
    """The kernel reclaims their page cache, down to the floor at most, and the bound goes again."""

    def current() -> int:
        return int((CGROUPS / cache.cgroup / "memory.current").read_text())

    def bound() -> int | None:
        """memory.high of the best-effort pod, noted; None for none."""
        text = (CGROUPS / cache.cgroup / "memory.high").read_text().strip()
        found = None if text == "max" else int(text)
        if found != seen[-1]:
            seen.append(found)
        return found

    seen: list[int | None] = [None]
    squeezing = GATES | dict.fromkeys(("PSICollector", "PressureSuppress", "BlkIOReconcile"), True)
    with (
        started(machine, shell("cache", "BE", _CACHE)) as cache,
        started(machine, shell("starved", "LS", _STARVED, requests={"cpu": "100m"})) as starved,
    ):
        wait(lambda: current() > _CACHED, "the best-effort pod has its page cache")
        wait(lambda: len(starved.pids("main")) > 0, "the service runs")
        service.gates(squeezing)
        (CGROUPS / starved.container_cgroup("main") / "memory.high").write_text(str(_HIGH))
        wait(lambda: bound() is not None, "best-effort pods yield")
        assert "default/starved waits for memory" in summary("PressureSuppress")
        wait(lambda: (bound() or 0) < _LEAST + (_CACHED - _LEAST) // 2, "they yield more")
        wait(lambda: current() <= (bound() or 0), "the kernel reclaims what is above the bound")
        down = [each for each in seen if each is not None]
        assert down == sorted(down, reverse=True), down
        assert _LEAST <= down[-1] <= down[0] < 2 * _CACHED, down
        for other in (starved, pods.web):
            high = (CGROUPS / other.cgroup / "memory.high").read_text().strip()
            assert high == "max", "a latency-sensitive pod is bounded"
        signal_to(starved, signal.SIGSTOP)
        least = min(down)
        wait(lambda: (bound() or 2 * _CACHED) > least, "nothing waits, and they get memory back")
        wait(lambda: bound() is None, "the bound is gone")
        up = [each for each in seen[seen.index(min(each for each in seen if each)) :] if each]
        assert up == sorted(up) and len(up) > 2, up
    service.gates(GATES | {"BlkIOReconcile": True, "PSICollector": True})


def test_a_limited_disk_shows_as_pressure(service: Service, pods: Pods) -> None:
    disk = Path("/sys/class/block/vda/dev").read_text().strip()
    assert text("io.max") == ""
    block = {"name": "/dev/vda", "type": "device", "ioCfg": {"writeBPS": 128 << 10}}
    best_effort = {**BE_IDLE, "blkioQOS": {"enable": True, "blocks": [block]}}
    with going(pods.busy):
        service.put(nodeslo(beClass=best_effort, lsClass=LS_PROTECTED))
        wait(lambda: text("io.max").startswith(f"{disk} rbps=max wbps=131072"), "a limit")
        wait(lambda: pressure(pods.busy, "io.some.avg10") > 10, "the writer waits for the disk")
    service.put(slo())
    wait(lambda: text("io.max") == "", "the limit is gone")


def test_numa_nodes_and_disks_have_the_load_that_they_had(pods: Pods) -> None:
    def saved() -> bool:
        """Once a minute."""
        file = RUN / "measurements"
        return file.exists() and max(Samples(RUN).values(disk, "vda"), default=0) > 64 << 10

    disk = Metric.NODE_DISK_WRITE
    wait(saved, "what was written to the disk is among the saved samples")
    samples = Samples(RUN)
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    cores = [samples.values(Metric.NODE_NUMA_CPU, each.name[4:]) for each in nodes]
    total = samples.values(Metric.NODE_CPU)
    assert len(total) > 10
    for *parts, whole in zip(*cores, total, strict=True):
        assert sum(parts) == pytest.approx(whole, abs=0.2)
    for each in nodes:
        held = samples.values(Metric.NODE_NUMA_MEMORY, each.name[4:])[-1]
        assert 16 * _MIB < held < 640 * _MIB
