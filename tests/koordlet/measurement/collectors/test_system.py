"""The system: differences of stored samples, and the memory of NUMA nodes from pods' files."""

from __future__ import annotations

import errno

import pytest

from koordlet.measurement.collecting import (
    ContainerTarget,
    HostAppTarget,
    PodTarget,
    Round,
    Targets,
    Unavailable,
)
from koordlet.measurement.collectors.cgroups import PAGE_BYTES
from koordlet.measurement.collectors.system import (
    SystemCollector,
    SystemNumaCollector,
    numa_memory_of_group,
)
from koordlet.measurement.series import Metric, Series
from linux.discovery import discover
from tests.koordlet.measurement.collectors.rounds import Rounds, Stored
from tests.koordlet.measurement.collectors.scripted_files import ScriptedFiles
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2, SimulatedKernel

TWO = Targets(
    None,
    (PodTarget("one", "kubepods/one"), PodTarget("two", "kubepods/two")),
    (HostAppTarget("app", "apps/app"),),
)

KINDS = {
    "cpu": (Metric.SYSTEM_CPU, Metric.NODE_CPU, Metric.POD_CPU, Metric.HOST_APP_CPU),
    "memory": (
        Metric.SYSTEM_MEMORY,
        Metric.NODE_MEMORY,
        Metric.POD_MEMORY,
        Metric.HOST_APP_MEMORY,
    ),
    "with page cache": (
        Metric.SYSTEM_MEMORY_WITH_PAGE_CACHE,
        Metric.NODE_MEMORY_WITH_PAGE_CACHE,
        Metric.POD_MEMORY_WITH_PAGE_CACHE,
        Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("node", "pods", "apps", "system"),
    [
        (100.0, {"one": 30.0, "two": 20.0}, {"app": 10.0}, 40.0),
        (100.0, {"one": 30.0, "gone": 50.0}, {"other": 10.0}, 70.0),
        (100.0, {}, {}, 100.0),
        (100.0, {"one": 130.0}, {}, 0.0),
        (0.0, {}, {}, 0.0),
    ],
)
def test_the_system_is_what_is_left(
    kind: str, node: float, pods: dict[str, float], apps: dict[str, float], system: float
) -> None:
    """Of objects that are not targets any more, samples do not count."""
    of_system, of_node, of_pod, of_app = KINDS[kind]
    stored = Stored(
        {
            Series(of_node): node,
            **{Series(of_pod, uid): value for uid, value in pods.items()},
            **{Series(of_app, name): value for name, value in apps.items()},
        }
    )
    rounds = Rounds(SystemCollector(), ScriptedFiles(), TWO, stored)
    assert rounds.next() == {Series(of_system): system}


@pytest.mark.parametrize(
    ("numa", "parts"),
    [((3.0, 1.0), (6.0, 2.0)), ((0.0, 0.0), (0.0, 0.0)), ((4.0,), (8.0,))],
)
def test_the_systems_cpu_is_shared_out_as_the_nodes_is(
    numa: tuple[float, ...], parts: tuple[float, ...]
) -> None:
    stored = Stored({Series(Metric.NODE_CPU): 8.0})
    stored.samples |= {Series(Metric.NODE_NUMA_CPU, str(n)): one for n, one in enumerate(numa)}
    found = Rounds(SystemCollector(), ScriptedFiles(), TWO, stored).next()
    assert found == {Series(Metric.SYSTEM_CPU): 8.0} | {
        Series(Metric.SYSTEM_NUMA_CPU, str(n)): one for n, one in enumerate(parts)
    }


def test_samples_are_at_most_ten_seconds_old() -> None:
    asked: set[float] = set()

    class Asked(Stored):
        def latest_of(self, metric: Metric, *, within_s: float) -> dict[tuple[str, str], float]:
            asked.add(within_s)
            return {("", ""): 1.0}

    rounds = Rounds(SystemCollector(), ScriptedFiles(), TWO, Asked())
    rounds.next()
    assert asked == {10.0}


def test_without_samples_of_the_node_there_is_no_system() -> None:
    stored = Stored({Series(Metric.POD_CPU, "one"): 1.0})
    with pytest.raises(Unavailable, match=r"^there are no samples of the node yet$"):
        Rounds(SystemCollector(), ScriptedFiles(), TWO, stored).next()


# -- NUMA nodes -----------------------------------------------------------------------------------

V1 = b"""total=100 N0=60 N1=40
file=7 N0=3 N1=4
anon=9 N0=5 N1=4
unevictable=1 N0=1 N1=0
hierarchical_total=200 N0=120 N1=80
hierarchical_anon=30 N0=20 N1=10
hierarchical_unevictable=5 N0=2 N1=3
"""
# 4 KiB of the inactive pages are an emptyDir in memory, which `anon` lacks.
V2 = b"""anon N0=4096 N1=8192
file N0=5000 N1=2
shmem N0=4096 N1=0
anon_thp N0=7 N1=7
inactive_anon N0=8100 N1=8000
active_anon N0=92 N1=192
inactive_file N0=1 N1=1
unevictable N0=3 N1=4
"""


@pytest.mark.parametrize(
    ("stat", "version", "expected"),
    [
        (V1, 1, {"0": 22 * PAGE_BYTES, "1": 13 * PAGE_BYTES}),
        (V2, 2, {"0": 8195, "1": 8196}),
        (V2, 1, {}),
        (V1, 2, {}),
        (b"", 2, {}),
        (b"active_anon N0=5 N0 x=3 N10=6\n", 2, {"0": 5, "10": 6}),
        (b"active_anon N0=5", 2, {"0": 5}),
    ],
)
def test_memory_that_is_no_page_cache(stat: bytes, version: int, expected: dict[str, int]) -> None:
    assert numa_memory_of_group(stat, version) == expected


def numa(*pods: PodTarget, version: int = 2) -> tuple[Rounds, ScriptedFiles]:
    """Return rounds whose node has 100,000 and 50,000 bytes on its two NUMA nodes."""
    kernel = SimulatedKernel(DEBIAN_12_V2 if version == 2 else DEBIAN_12_V1)
    files = ScriptedFiles()
    stored = Stored(
        {
            Series(Metric.NODE_NUMA_MEMORY, "0"): 100_000.0,
            Series(Metric.NODE_NUMA_MEMORY, "1"): 50_000.0,
        }
    )
    targets = Targets(discover(kernel), pods)
    return Rounds(SystemNumaCollector(), files, targets, stored), files


def stat_of(uid: str) -> str:
    return f"/sys/fs/cgroup/kubepods/{uid}/memory.numa_stat"


def pod(uid: str) -> PodTarget:
    return PodTarget(uid, f"kubepods/{uid}", (ContainerTarget("c", f"kubepods/{uid}/c"),))


def system(zero: float, one: float) -> dict[Series, float]:
    return {
        Series(Metric.SYSTEM_NUMA_MEMORY, "0"): zero,
        Series(Metric.SYSTEM_NUMA_MEMORY, "1"): one,
    }


def test_the_systems_memory_of_a_numa_node_is_what_pods_leave() -> None:
    rounds, files = numa(pod("a"), pod("b"))
    files.content = {
        stat_of("a"): b"active_anon N0=30000 N1=60000\n",
        stat_of("b"): b"active_anon N0=20000\n",
    }
    assert rounds.next() == system(50_000, 0)
    assert files.opened == [(stat_of("a"), 65_536), (stat_of("b"), 65_536)]
    files.content[stat_of("b")] = b"active_anon N0=10000\n"
    assert rounds.next() == system(60_000, 0)
    assert len(files.opened) == 2, "the files stay open"
    rounds.collector.close()
    assert files.is_open == []
    rounds.next()
    assert len(files.opened) == 4


def test_files_follow_the_pods() -> None:
    rounds, files = numa(pod("a"), pod("b"))
    files.content = {stat_of(uid): b"active_anon N0=10000\n" for uid in "abc"}
    rounds.next()
    rounds.targets = Targets(rounds.targets.layout, (pod("b"), pod("c")))
    assert rounds.next() == system(80_000, 50_000)
    assert files.is_open == [stat_of("b"), stat_of("c")]
    rounds.targets = Targets(rounds.targets.layout)
    assert rounds.next() == system(100_000, 50_000)
    assert files.is_open == []


@pytest.mark.parametrize("gone", [errno.ENOENT, errno.ENODEV])
def test_a_pod_that_is_gone_costs_nothing_and_is_found_again(gone: int) -> None:
    rounds, files = numa(pod("a"), pod("b"))
    files.content = {
        stat_of("a"): b"active_anon N0=10000\n",
        stat_of("b"): b"active_anon N0=5000\n",
    }
    rounds.next()
    files.content[stat_of("a")] = gone
    assert rounds.next() == system(95_000, 50_000)
    assert (rounds.problems, files.is_open) == ([], [stat_of("b")])
    files.content[stat_of("a")] = b"active_anon N0=20000\n"
    assert rounds.next() == system(75_000, 50_000)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (errno.EIO, f"kubepods/a: [Errno 5] scripted: '{stat_of('a')}'"),
        (b"active_anon N0=x\n", "kubepods/a: invalid literal for int() with base 10: b'x'"),
    ],
)
def test_a_pod_whose_file_is_broken_is_reported_alone(broken: bytes | int, problem: str) -> None:
    rounds, files = numa(pod("a"), pod("b"))
    files.content = {stat_of("a"): broken, stat_of("b"): b"active_anon N0=5000\n"}
    assert rounds.next() == system(95_000, 50_000)
    assert rounds.problems == [problem]
    assert files.is_open == [stat_of("b")]


def test_without_any_pods_file_there_is_no_system() -> None:
    rounds, _ = numa(pod("a"))
    with pytest.raises(Unavailable, match=r"^no pod has memory\.numa_stat$"):
        rounds.next()


def test_without_samples_of_numa_nodes_there_is_no_system() -> None:
    rounds, files = numa(pod("a"))
    rounds.stored = Stored()
    with pytest.raises(Unavailable, match=r"^there are no samples of NUMA nodes$"):
        rounds.next()
    assert files.opened == []


def test_hook_replies_get_a_turn_after_each_pod() -> None:
    for count in (1, 20, 41):
        pods = [pod(f"p{number}") for number in range(count)]
        rounds, files = numa(*pods)
        files.content = {stat_of(one.uid): b"active_anon N0=1\n" for one in pods}
        aside: list[int] = []
        round_ = Round(
            now=0.0,
            targets=rounds.targets,
            files=files,
            measured=rounds.stored,
            step_aside=lambda aside=aside: aside.append(1),  # type: ignore[misc]
        )
        rounds.collector.sample(round_)
        assert len(aside) == count


def test_a_v1_groups_numbers_are_pages_of_the_whole_subtree() -> None:
    rounds, files = numa(pod("a"), version=1)
    path = "/sys/fs/cgroup/memory/kubepods/a/memory.numa_stat"
    files.content = {path: b"hierarchical_anon=3 N0=2 N1=1\n"}
    assert rounds.next() == system(100_000 - 2 * PAGE_BYTES, 50_000 - PAGE_BYTES)
