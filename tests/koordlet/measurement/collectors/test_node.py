"""The node and its NUMA nodes, from files whose content a test sets."""

from __future__ import annotations

import errno

import pytest

from koordlet.measurement.collectors.node import NodeCollector, busy_ticks, numa_memory
from koordlet.measurement.series import Metric, Series
from tests.koordlet.measurement.collectors.rounds import Rounds
from tests.koordlet.measurement.collectors.scripted_files import ScriptedFiles

NODES = "/sys/devices/system/node"
KIB = 1024


def stat(*user_ticks: int) -> bytes:
    """Return /proc/stat of CPUs that did nothing but run programs, for so many ticks each."""
    lines = [f"cpu  {sum(user_ticks)} 0 0 7 7 0 0 7 7 7"]
    lines += [f"cpu{cpu} {ticks} 0 0 7 7 0 0 7 7 7" for cpu, ticks in enumerate(user_ticks)]
    return "\n".join([*lines, "intr 99 98 97", "ctxt 5", ""]).encode()


def numa(number: int, total_kib: int, free_kib: int) -> bytes:
    fields = {"MemTotal": total_kib, "MemFree": free_kib, "MemUsed": 5, "Active(file)": 0}
    fields |= {"Active": 3, "Inactive(file)": 0, "SReclaimable": 0, "SUnreclaim": 3}
    return "".join(f"Node {number} {name}: {kib} kB\n" for name, kib in fields.items()).encode()


def machine() -> ScriptedFiles:
    """Four CPUs in two NUMA nodes."""
    return ScriptedFiles(
        {
            "/proc/stat": stat(0, 0, 0, 0),
            "/proc/meminfo": b"MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n",
            f"{NODES}/node0/cpulist": b"0-1\n",
            f"{NODES}/node0/meminfo": numa(0, 600, 100),
            f"{NODES}/node1/cpulist": b"2-3\n",
            f"{NODES}/node1/meminfo": numa(1, 400, 300),
            # What the kernel lists beside them.
            f"{NODES}/possible": b"0-1\n",
            f"{NODES}/nodes": b"\n",
            f"{NODES}/has_cpu": b"0-1\n",
        }
    )


def of_metric(samples: dict[Series, float], metric: Metric) -> dict[str, float]:
    return {series.of: value for series, value in samples.items() if series.metric is metric}


def test_time_that_is_idle_stolen_or_of_a_guest_is_not_busy() -> None:
    """The fields: user nice system idle iowait irq softirq steal guest guest_nice."""
    assert busy_ticks(b"cpu  1 2 4 8 16 32 64 128 256 512") == 1 + 2 + 4 + 32 + 64


@pytest.mark.parametrize(
    ("total", "free", "active", "inactive", "slabs", "used"),
    [(1000, 1, 20, 300, 400, 279), (1000, 1000, 0, 0, 0, 0), (1000, 900, 200, 0, 0, 0)],
)
def test_page_cache_and_reclaimable_slabs_of_a_numa_node_are_not_in_use(
    total: int, free: int, active: int, inactive: int, slabs: int, used: int
) -> None:
    meminfo = (
        f"Node 0 MemTotal: {total} kB\nNode 0 MemFree: {free} kB\nNode 0 Active: 7 kB\n"
        f"Node 0 Active(file): {active} kB\nNode 0 Inactive(file): {inactive} kB\n"
        f"Node 0 SReclaimable: {slabs} kB\n"
    )
    assert numa_memory(meminfo.encode()) == used * KIB


def test_cpu_is_in_cores_and_memory_in_bytes() -> None:
    files = machine()
    rounds = Rounds(NodeCollector(4), files)
    first = rounds.next()
    assert first == {
        Series(Metric.NODE_MEMORY): 600 * KIB,
        Series(Metric.NODE_MEMORY_WITH_PAGE_CACHE): 900 * KIB,
        Series(Metric.NODE_NUMA_MEMORY, "0"): 500 * KIB,
        Series(Metric.NODE_NUMA_MEMORY, "1"): 100 * KIB,
    }
    files.content["/proc/stat"] = stat(100, 50, 25, 0)  # of 100 ticks a second
    second = rounds.next()
    assert second.pop(Series(Metric.NODE_CPU)) == pytest.approx(1.75)
    assert second.pop(Series(Metric.NODE_NUMA_CPU, "0")) == pytest.approx(1.5)
    assert second.pop(Series(Metric.NODE_NUMA_CPU, "1")) == pytest.approx(0.25)
    assert second == first
    assert rounds.problems == []


def test_free_memory_above_the_total_is_no_negative_use() -> None:
    files = machine()
    files.content["/proc/meminfo"] = b"MemTotal: 10 kB\nMemFree: 11 kB\nMemAvailable: 12 kB\n"
    found = Rounds(NodeCollector(4), files).next()
    assert found[Series(Metric.NODE_MEMORY)] == 0
    assert found[Series(Metric.NODE_MEMORY_WITH_PAGE_CACHE)] == 0


def test_no_cpu_is_busier_than_one_core_and_the_node_no_busier_than_its_cpus() -> None:
    """Readings of different moments may differ by a tenth; more is a defect and no sample."""
    files = machine()
    rounds = Rounds(NodeCollector(2), files)
    rounds.next()
    files.content["/proc/stat"] = stat(105, 105, 0, 0)
    found = rounds.next()
    assert found[Series(Metric.NODE_CPU)] == 2.0
    assert found[Series(Metric.NODE_NUMA_CPU, "0")] == 2.0
    files.content["/proc/stat"] = stat(105 + 300, 105 + 50, 0, 0)
    found = rounds.next()
    assert Series(Metric.NODE_CPU) not in found
    assert found[Series(Metric.NODE_NUMA_CPU, "0")] == pytest.approx(0.5)


def test_a_numa_node_without_cpus_has_a_use_of_0_and_its_memory() -> None:
    files = machine()
    files.content[f"{NODES}/node1/cpulist"] = b"\n"
    found = Rounds(NodeCollector(4), files).next()
    assert of_metric(found, Metric.NODE_NUMA_CPU) == {"1": 0.0}
    assert of_metric(found, Metric.NODE_NUMA_MEMORY) == {"0": 500 * KIB, "1": 100 * KIB}


@pytest.mark.parametrize(
    ("file", "content", "with_cpu"),
    [
        ("meminfo", errno.EIO, {"0", "1"}),
        ("meminfo", b"nothing\n", {"0", "1"}),
        ("cpulist", b"x-y\n", {"1"}),
        ("cpulist", errno.EIO, {"1"}),
    ],
)
def test_a_numa_node_that_cannot_be_read_is_named_and_leaves_the_others(
    file: str, content: bytes | int, with_cpu: set[str]
) -> None:
    files = machine()
    rounds = Rounds(NodeCollector(4), files)
    rounds.next()
    rounds.collector.close()
    if file == "cpulist":
        files.content[f"{NODES}/node0/cpulist"] = content
    rounds.next()
    problems = list(rounds.problems)
    files.content[f"{NODES}/node0/{file}"] = content
    found = rounds.next()
    assert set(of_metric(found, Metric.NODE_NUMA_CPU)) == with_cpu
    assert of_metric(found, Metric.NODE_NUMA_MEMORY) == {"1": 100 * KIB}
    (problem,) = problems or rounds.problems
    assert problem.startswith(("NUMA node 0: ", "NUMA node0: "))
    assert Series(Metric.NODE_CPU) in found


def test_a_kernel_without_numa_nodes_has_the_node_alone() -> None:
    files = machine()
    files.content = {path: text for path, text in files.content.items() if NODES not in path}
    rounds = Rounds(NodeCollector(4), files)
    rounds.next()
    assert {series.metric for series in rounds.next()} == {
        Metric.NODE_CPU,
        Metric.NODE_MEMORY,
        Metric.NODE_MEMORY_WITH_PAGE_CACHE,
    }
    assert rounds.problems == []


def test_numa_nodes_are_listed_once_a_minute() -> None:
    files = machine()
    rounds = Rounds(NodeCollector(4), files)
    rounds.next()
    files.content[f"{NODES}/node12/cpulist"] = b"\n"
    files.content[f"{NODES}/node12/meminfo"] = numa(12, 50, 0)
    assert set(of_metric(rounds.next(59.0), Metric.NODE_NUMA_MEMORY)) == {"0", "1"}
    assert set(of_metric(rounds.next(1.0), Metric.NODE_NUMA_MEMORY)) == {"0", "1", "12"}
    assert sorted(files.is_open) == [
        "/proc/meminfo",
        "/proc/stat",
        *(f"{NODES}/{node}/meminfo" for node in ("node0", "node1", "node12")),
    ]


def test_files_stay_open_from_round_to_round_and_a_failure_closes_them_all() -> None:
    files = machine()
    rounds = Rounds(NodeCollector(4), files)
    rounds.next()
    opened = len(files.opened)
    rounds.next()
    assert len(files.opened) == opened
    files.content["/proc/meminfo"] = errno.EIO
    with pytest.raises(OSError, match="scripted"):
        rounds.next()
    assert files.is_open == []
    files.content |= machine().content
    # What the counters did meanwhile is not known: the first reading gives no use of the CPU.
    found = rounds.next()
    assert Series(Metric.NODE_CPU) not in found
    assert of_metric(found, Metric.NODE_NUMA_CPU) == {}
    found = rounds.next()
    assert found[Series(Metric.NODE_CPU)] == 0.0
    assert of_metric(found, Metric.NODE_NUMA_CPU) == {"0": 0.0, "1": 0.0}
    rounds.collector.close()
    assert files.is_open == []
