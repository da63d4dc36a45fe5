"""Whatever the kernel's counters do, no sample is negative, not a number or above the machine's."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koordlet.measurement.collecting import (
    Collector,
    ContainerTarget,
    HostAppTarget,
    PodTarget,
    Round,
    Targets,
)
from koordlet.measurement.collectors.cgroups import PodCollector
from koordlet.measurement.collectors.host_apps import HostAppCollector
from koordlet.measurement.collectors.node import NodeCollector
from koordlet.measurement.counters import Rate, number_after, within
from koordlet.measurement.kernel_files import PAGE, KernelFile
from koordlet.measurement.series import Metric
from koordlet.measurement.store import Store
from linux.cgroup_paths import Driver, Layout
from tests.koordlet.measurement.collectors.simulated_node import GIB, SimulatedNode
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2
from tests.simulated.kernel import Clock
from tests.simulated.kubelet import Limits

CPUS = 4
QOS: tuple[Literal["BestEffort", "Burstable", "Guaranteed"], ...] = (
    "BestEffort", "Burstable", "Guaranteed",
)  # fmt: skip
COUNTER = st.one_of(st.integers(0, 1 << 63), st.integers(0, 1000))
RATIOS = {Metric.POD_CPU_THROTTLED, Metric.CONTAINER_CPU_THROTTLED}
CORES = {
    Metric.NODE_CPU, Metric.NODE_NUMA_CPU, Metric.SYSTEM_CPU, Metric.SYSTEM_NUMA_CPU,
    Metric.POD_CPU, Metric.CONTAINER_CPU, Metric.HOST_APP_CPU,
}  # fmt: skip


def check(store: Store, now: float, cpus: int) -> None:
    """Every stored sample is one that the machine can have."""
    for metric in Metric:
        highest = 1.0 if metric in RATIOS else cpus if metric in CORES else float("inf")
        if metric in (Metric.BE_CPU_USED, Metric.BE_CPU_LIMIT):
            highest = cpus * 1000
        for _, _, values in store.windows(metric, now, 1e9):
            samples = values[values == values]
            assert (samples >= 0).all()
            assert (samples <= highest + 1e-9).all(), (metric, samples)


@given(st.lists(st.tuples(COUNTER, st.floats(0, 100)), max_size=30))
def test_a_rate_is_never_negative_and_never_across_a_reset(
    readings: list[tuple[int, float]],
) -> None:
    rate = Rate(1.0)
    at = 0.0
    highest = 0
    for value, step in readings:
        at += step
        highest = max(highest, value)
        found = rate.per_second(value, at)
        assert found is None or 0 <= found <= highest / 0.2


def test_a_rate_after_a_gap_of_twenty_intervals_begins_again() -> None:
    rate = Rate(1.0)
    assert rate.per_second(0, 0.0) is None
    assert rate.per_second(100, 20.0) == 5
    assert rate.per_second(200, 40.1) is None
    assert rate.per_second(210, 41.1) == 10


@pytest.mark.parametrize(
    ("rate", "most", "kept"),
    [(None, 4, None), (0.0, 4, 0.0), (4.0, 4, 4.0), (4.3, 4, 4.0), (4.5, 4, None), (1e9, 4, None)],
)
def test_a_rate_above_the_machine_is_cut_or_left_out(
    rate: float | None, most: float, kept: float | None
) -> None:
    assert within(rate, most) == kept


def test_two_readings_that_are_close_are_one() -> None:
    rate = Rate(1.0)
    rate.per_second(0, 0.0)
    assert rate.per_second(90, 0.1) is None
    assert rate.per_second(100, 1.0) == 100


def test_a_field_is_found_anywhere_and_only_whole() -> None:
    text = b"nr_periods 7\nx_nr_throttled 1\nnr_throttled 3\nMemFree:   12 kB\nlast 9"
    assert number_after(text, b"\nnr_periods ") == 7
    assert number_after(text, b"\nnr_throttled ") == 3
    assert number_after(text, b"\nMemFree:") == 12 * 1024
    assert number_after(text, b"\nlast ") == 9


class _Script:
    """Files whose content or error a test sets."""

    def __init__(self) -> None:
        self.content: dict[str, bytes | int] = {}

    def open(self, path: str, size: int = PAGE) -> KernelFile:
        self._read(path)
        return _Scripted(self, path)

    def listdir(self, path: str) -> list[str]:
        return ["node0"]

    def _read(self, path: str) -> bytes:
        found = self.content.get(path.rpartition("/")[2], errno.ENOENT)
        if isinstance(found, int):
            raise OSError(found, "scripted", path)
        return found


class _Scripted:
    def __init__(self, script: _Script, path: str) -> None:
        self._script = script
        self._path = path

    def read(self) -> bytes:
        return self._script._read(self._path)

    def close(self) -> None:
        pass


ERRORS = st.sampled_from([errno.ENODEV, errno.ENOENT, errno.EIO])
TEXTS = st.one_of(ERRORS, st.binary(max_size=40))


def _lines(**fields: int) -> bytes:
    return "".join(f"{name} {value}\n" for name, value in fields.items()).encode()


@dataclass(frozen=True)
class _Reading:
    """What the kernel shows in one round. broken: files with another content, or an errno."""

    counter: int
    periods: int
    throttled: int
    memory: int
    free: int
    step: float
    broken: Mapping[str, bytes | int]


BREAKABLE = ("cpuacct.usage", "cpu.stat", "memory.stat", "stat", "meminfo", "cpulist")
READINGS = st.builds(
    _Reading,
    counter=COUNTER,
    periods=COUNTER,
    throttled=COUNTER,
    memory=COUNTER,
    free=COUNTER,
    step=st.floats(0.001, 40),
    broken=st.dictionaries(st.sampled_from(BREAKABLE), TEXTS, max_size=2),
)


@given(version=st.sampled_from([1, 2]), readings=st.lists(READINGS, max_size=12))
def test_no_counter_text_or_error_gives_an_absurd_sample(
    version: int, readings: list[_Reading]
) -> None:
    mounts = {name: f"/{name}" for name in ("cpu", "cpuacct", "memory", "")}
    targets = Targets(
        Layout(version, mounts, Driver.CGROUPFS, "kubepods"),
        (PodTarget("p", "kubepods/podp", (ContainerTarget("c", "kubepods/podp/c"),)),),
        (HostAppTarget("app", "app"),),
    )
    script, store = _Script(), Store()
    collectors: list[Collector] = [PodCollector(CPUS), HostAppCollector(CPUS), NodeCollector(CPUS)]
    for collector in collectors:
        store.add_table(collector.name, interval_s=0.001, retention_s=1.0)
    clock = Clock()
    for reading in readings:
        clock.advance(reading.step)
        script.content = _files(reading)
        round_ = Round(clock.now, targets, script, store.view(clock.now), clock=lambda: clock.now)
        for collector in collectors:
            try:
                samples = collector.sample(round_)
            except (OSError, ValueError):
                continue
            store.record(collector.name, clock.now, samples)
            # The store leaves negative samples out; there must be none to leave out.
            assert all(value >= 0 for value in samples.values())
    check(store, clock.now, CPUS)


def _files(reading: _Reading) -> dict[str, bytes | int]:
    kinds = ("inactive_anon", "active_anon", "unevictable", "inactive_file", "active_file")
    stat = _lines(
        **dict.fromkeys(kinds, reading.memory),
        **dict.fromkeys((f"total_{kind}" for kind in kinds), reading.memory),
    )
    free, counter = reading.free, reading.counter
    meminfo = f"MemTotal: 1000 kB\nMemFree: {free} kB\nMemAvailable: {free} kB\n" + "".join(
        f"Node 0 {name}: {free} kB\n"
        for name in ("MemTotal", "MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    )
    return {
        "cpuacct.usage": f"{counter}\n".encode(),
        "cpu.stat": _lines(
            usage_usec=counter, nr_periods=reading.periods, nr_throttled=reading.throttled
        ),
        "memory.stat": b"first 0\n" + stat,
        "stat": f"cpu  {counter} 0 0 5 5 0 0 0\ncpu0 {counter} 0 0 5 5 0 0 0\n".encode(),
        "meminfo": meminfo.encode(),
        "cpulist": b"0-3\n",
        **reading.broken,
    }


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_lives_of_pods_give_no_absurd_sample(data: st.DataObject) -> None:
    node = SimulatedNode(data.draw(st.sampled_from([DEBIAN_12_V1, DEBIAN_12_V2])))
    for _ in range(data.draw(st.integers(1, 25))):
        pods = list(node.kubelet.pods.values())
        action = data.draw(
            st.sampled_from(["start", "remove", "work", "restart", "fail", "follow"])
        )
        if action == "start" and len(pods) < 5:
            qos = data.draw(st.sampled_from(QOS))
            pod = node.kubelet.add_pod(Limits(), qos=qos)
            if qos == "BestEffort":
                node.batch_cpu_milli[pod.uid] = data.draw(st.integers(0, 4000))
            container = pod.start()
            container.task.cpu_seconds = data.draw(st.floats(0, 1e6))
            node.kernel.use_memory(container.task, data.draw(st.integers(0, GIB)))
        elif action == "remove" and pods:
            data.draw(st.sampled_from(pods)).remove()
        elif action == "work":
            for pod in pods:
                for container in pod.containers:
                    container.task.cpu_seconds += data.draw(st.floats(0, 2))
        elif action == "restart" and pods:
            pod = data.draw(st.sampled_from(pods))
            for container in list(pod.containers):
                node.kernel.remove_group(container.cgroup)
                node.kubelet._make(container.cgroup, 2, -1, 0)
                container.task = node.kernel.spawn_process("app", cgroup=container.cgroup)
                container.task.cpu_seconds = data.draw(st.floats(0, 1e6))
        elif action == "fail":
            node.kernel.faults.fail("read", data.draw(ERRORS), nth=data.draw(st.integers(1, 20)))
        if data.draw(st.booleans()):
            node.retarget()
        node.round(data.draw(st.sampled_from([1.0, 0.01, 0.5, 3.0, 30.0])))
    check(node.sampler.store, node.kernel.clock.now, node.cpus)
