"""Pods, containers and host applications, from files whose content a test sets."""

from __future__ import annotations

import errno
from functools import partial
from itertools import pairwise

import pytest

from koordlet.measurement.collecting import (
    ContainerTarget,
    HostAppTarget,
    PodTarget,
    Round,
    Targets,
)
from koordlet.measurement.collectors.cgroups import PAGE_BYTES, PodCollector, memory_of
from koordlet.measurement.collectors.host_apps import HostAppCollector
from koordlet.measurement.series import Metric, Series
from linux.cgroup_paths import Driver, Layout
from tests.koordlet.measurement.collectors.rounds import Rounds, Stored
from tests.koordlet.measurement.collectors.scripted_files import ScriptedFiles

V1 = Layout(1, {name: f"/{name}" for name in ("cpu", "cpuacct", "memory")}, Driver.CGROUPFS, "k")
V2 = Layout(2, {"": "/v2"}, Driver.CGROUPFS, "k")
MEMORY_V1 = b"cache 1\ninactive_anon 9\nactive_anon 9\nunevictable 9\ninactive_file 9\n" + (
    b"active_file 9\ntotal_inactive_anon 10\ntotal_active_anon 200\ntotal_unevictable 3000\n"
    b"total_inactive_file 40000\ntotal_active_file 500000\n"
)
MEMORY_V2 = (
    b"anon 1\ninactive_anon 10\nactive_anon 200\nunevictable 3000\ninactive_file 40000\n"
    + (b"active_file 500000\n")
)


def group_v2(cgroup: str, usec: int = 0, throttling: bytes = b"") -> dict[str, bytes | int]:
    return {
        f"/v2/{cgroup}/cpu.stat": b"usage_usec %d\n%s" % (usec, throttling),
        f"/v2/{cgroup}/memory.stat": MEMORY_V2,
    }


def pod(name: str) -> PodTarget:
    return PodTarget(name, f"k/{name}")


@pytest.mark.parametrize(("version", "stat"), [(1, MEMORY_V1), (2, MEMORY_V2)])
def test_memory_is_anonymous_and_unevictable_pages_and_the_page_cache_comes_on_top(
    version: int, stat: bytes
) -> None:
    assert memory_of(stat, version) == (3210, 543_210)


@pytest.mark.parametrize(("version", "stat"), [(1, MEMORY_V1), (2, MEMORY_V2)])
def test_a_missing_field_of_memory_is_an_error(version: int, stat: bytes) -> None:
    lines = stat.splitlines(keepends=True)
    with pytest.raises(ValueError, match="active_file"):
        memory_of(b"".join(lines[:-1]), version)


def numa_v1(*nodes: int) -> bytes:
    """v1's file on these NUMA nodes: 10 pages of the group itself, 9 and more of its subtree."""
    own = "".join(f" N{node}=1" for node in nodes)
    kinds = {"total": 9, "file": 4, "anon": 3, "unevictable": 2}
    lines = [f"{kind}=10{own}\n" for kind in kinds]
    lines += [f"hierarchical_{kind}={pages}{own}\n" for kind, pages in kinds.items()]
    return "".join(lines).encode()


@pytest.mark.parametrize(
    ("numa", "memory", "with_page_cache"),
    [
        (numa_v1(0), 5 * PAGE_BYTES, 9 * PAGE_BYTES),
        (numa_v1(0, 1), 5 * PAGE_BYTES, 9 * PAGE_BYTES),
        (numa_v1(0, 1, 2), 3210, 543_210),  # memory.stat is cheaper
        (b"total=1 N0=1\nfile=1 N0=1\nanon=0 N0=0\nunevictable=0 N0=0\n", 3210, 543_210),
        (errno.ENOENT, 3210, 543_210),  # a kernel without NUMA
    ],
    ids=["one node", "two nodes", "three nodes", "without sums", "no file"],
)
def test_on_v1_memory_is_read_where_the_kernel_has_it_cheapest(
    numa: bytes | int, memory: int, with_page_cache: int
) -> None:
    files = ScriptedFiles(
        {
            "/cpuacct/k/a/cpuacct.usage": b"5\n",
            "/cpu/k/a/cpu.stat": b"nr_periods 0\nnr_throttled 0\n",
            "/memory/k/a/memory.stat": MEMORY_V1,
            "/memory/k/a/memory.numa_stat": numa,
        }
    )
    rounds = Rounds(PodCollector(4), files, Targets(V1, (pod("a"),)))
    found = rounds.next()
    assert found[Series(Metric.POD_MEMORY, "a")] == memory
    assert found[Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, "a")] == with_page_cache
    assert len(files.is_open) == 3
    rounds.collector.close()
    assert files.is_open == []


@pytest.mark.parametrize("at_opening", [False, True])
def test_memory_that_cannot_be_read_by_numa_node_is_reported(at_opening: bool) -> None:
    path = "/memory/k/a/memory.numa_stat"
    files = ScriptedFiles(
        {
            "/cpuacct/k/a/cpuacct.usage": b"5\n",
            "/cpu/k/a/cpu.stat": b"nr_periods 0\nnr_throttled 0\n",
            "/memory/k/a/memory.stat": MEMORY_V1,
            path: numa_v1(0),
        }
    )
    rounds = Rounds(PodCollector(4), files, Targets(V1, (pod("a"),)))
    if not at_opening:
        assert rounds.next()
        files.content[path] = b"total=1 N0=1\n"
        files.content["/cpuacct/k/a/cpuacct.usage"] = b"6\n"
        assert rounds.next() == {}
        assert rounds.problems == ["k/a: no sums of the subtree in memory.numa_stat"]
    else:
        files.content[path] = errno.EIO
        assert rounds.next() == {}
        assert "scripted" in rounds.problems[0]
    assert files.is_open == []


def test_cpu_is_in_cores_on_both_versions() -> None:
    v1 = ScriptedFiles(
        {
            "/cpuacct/k/a/cpuacct.usage": b"5\n",
            "/cpu/k/a/cpu.stat": b"nr_periods 0\nnr_throttled 0\n",
            "/memory/k/a/memory.stat": MEMORY_V1,
        }
    )
    v2 = ScriptedFiles(group_v2("k/a", 5))
    for files, layout, path, text in (
        (v1, V1, "/cpuacct/k/a/cpuacct.usage", b"1500000005\n"),
        (v2, V2, "/v2/k/a/cpu.stat", b"usage_usec 1500005\n"),
    ):
        rounds = Rounds(PodCollector(4), files, Targets(layout, (pod("a"),)))
        first = rounds.next()
        assert Series(Metric.POD_CPU, "a") not in first
        assert first[Series(Metric.POD_MEMORY, "a")] == 3210
        assert first[Series(Metric.POD_MEMORY_WITH_PAGE_CACHE, "a")] == 543_210
        files.content[path] = text
        assert rounds.next()[Series(Metric.POD_CPU, "a")] == pytest.approx(1.5)


def test_a_group_uses_at_most_the_machine() -> None:
    files = ScriptedFiles(group_v2("k/a"))
    rounds = Rounds(PodCollector(2), files, Targets(V2, (pod("a"),)))
    rounds.next()
    files.content |= group_v2("k/a", 2_100_000)
    assert rounds.next()[Series(Metric.POD_CPU, "a")] == 2.0
    files.content |= group_v2("k/a", 9_000_000)
    assert Series(Metric.POD_CPU, "a") not in rounds.next()


@pytest.mark.parametrize(
    ("first", "second", "ratio"),
    [
        ((0, 0), (10, 4), 0.4),
        ((5, 5), (5, 5), 0.0),  # no period has passed
        ((5, 5), (6, 9), 1.0),
        ((5, 5), (4, 5), None),  # the counters of another group
        ((5, 5), (9, 4), None),
    ],
)
def test_the_share_of_periods_in_which_a_group_was_throttled(
    first: tuple[int, int], second: tuple[int, int], ratio: float | None
) -> None:
    throttling = b"nr_periods %d\nnr_throttled %d\n"
    files = ScriptedFiles(group_v2("k/a", 0, throttling % first))
    rounds = Rounds(PodCollector(4), files, Targets(V2, (pod("a"),)))
    series = Series(Metric.POD_CPU_THROTTLED, "a")
    assert series not in rounds.next()
    files.content |= group_v2("k/a", 0, throttling % second)
    assert rounds.next().get(series) == ratio


def group_v1(cgroup: str, *, ns: int, periods: int, memory: bytes) -> dict[str, bytes | int]:
    return {
        f"/cpuacct/{cgroup}/cpuacct.usage": b"%d\n" % ns,
        f"/cpu/{cgroup}/cpu.stat": b"nr_periods %d\nnr_throttled %d\n" % (periods, periods),
        f"/memory/{cgroup}/memory.stat": memory,
    }


OTHER_V1 = MEMORY_V1.replace(b"total_unevictable 3000", b"total_unevictable 4000")
OTHER_V2 = MEMORY_V2.replace(b"unevictable 3000", b"unevictable 4000")


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_group_in_which_nothing_ran_is_read_again_after_a_while(version: int) -> None:
    path = "/memory/k/a/memory.stat" if version == 1 else "/v2/k/a/memory.stat"
    files = ScriptedFiles(
        group_v1("k/a", ns=5, periods=0, memory=MEMORY_V1) if version == 1 else group_v2("k/a", 5)
    )
    rounds = Rounds(PodCollector(4), files, Targets(V1 if version == 1 else V2, (pod("a"),)))
    series = Series(Metric.POD_MEMORY, "a")
    assert rounds.next()[series] == 3210
    changed = OTHER_V1 if version == 1 else OTHER_V2
    for _ in range(2):  # the time until the first look differs by the group's name
        files.content[path] = changed
        found = [rounds.next()[series] for _ in range(11)]
        now = memory_of(changed, version)[0]
        assert found[-1] == now
        changed = MEMORY_V1 if version == 1 else MEMORY_V2
    before = memory_of(OTHER_V1 if version == 1 else OTHER_V2, version)[0]
    assert found == [before] * found.index(now) + [now] * (11 - found.index(now))
    assert found.index(now) > 0


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_group_in_which_something_ran_is_read_at_once(version: int) -> None:
    if version == 1:
        first = group_v1("k/a", ns=5, periods=0, memory=MEMORY_V1)
        second = group_v1("k/a", ns=6, periods=0, memory=OTHER_V1)
    else:
        first, second = group_v2("k/a", 5), group_v2("k/a", 6)
        second["/v2/k/a/memory.stat"] = OTHER_V2
    files = ScriptedFiles(first)
    rounds = Rounds(PodCollector(4), files, Targets(V1 if version == 1 else V2, (pod("a"),)))
    rounds.next()
    files.content |= second
    assert rounds.next()[Series(Metric.POD_MEMORY, "a")] == 4210


def test_a_group_that_waits_for_its_next_period_is_throttled_though_nothing_ran() -> None:
    files = ScriptedFiles(group_v1("k/a", ns=5, periods=0, memory=MEMORY_V1))
    rounds = Rounds(PodCollector(4), files, Targets(V1, (pod("a"),)))
    series = Series(Metric.POD_CPU_THROTTLED, "a")
    rounds.next()
    files.content |= group_v1("k/a", ns=9, periods=0, memory=MEMORY_V1)
    assert rounds.next()[series] == 0.0  # it ran, and its first period has not ended
    for periods in (10, 20):
        files.content |= group_v1("k/a", ns=9, periods=periods, memory=MEMORY_V1)
        assert rounds.next()[series] == 1.0
    assert rounds.next()[series] == 0.0
    files.content["/cpu/k/a/cpu.stat"] = errno.EIO  # not read while nothing runs
    assert rounds.next()[series] == 0.0
    files.content |= group_v1("k/a", ns=10, periods=30, memory=MEMORY_V1)
    assert rounds.next()[series] == 1.0


def test_a_group_that_is_missing_is_looked_for_after_1_to_11_intervals() -> None:
    files = ScriptedFiles()
    looks: list[float] = []
    rounds = Rounds(PodCollector(4), files, Targets(V2, (pod("a"),)))

    def look(path: str) -> bytes:
        looks.append(rounds.now)
        return ScriptedFiles.look(files, path)

    files.look = look  # type: ignore[method-assign]
    for _ in range(90):
        assert rounds.next() == {}
        assert rounds.problems == []
    gaps = [round(after - before) for before, after in pairwise(looks)]
    assert gaps == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11, 11]


def test_a_group_that_was_there_again_is_looked_for_at_once() -> None:
    files = ScriptedFiles()
    rounds = Rounds(PodCollector(4), files, Targets(V2, (pod("a"),)))
    for _ in range(4):  # looked for at the first, second and fourth
        rounds.next()
    files.content |= group_v2("k/a")
    assert [bool(rounds.next()) for _ in range(3)] == [False, False, True]
    files.content.clear()
    assert rounds.next() == {}
    files.content |= group_v2("k/a")
    assert rounds.next() != {}


@pytest.mark.parametrize("content", [errno.EIO, b"nonsense\n"])
def test_a_group_that_cannot_be_read_is_named_and_begins_again(content: bytes | int) -> None:
    files = ScriptedFiles(group_v2("k/a") | group_v2("k/b"))
    rounds = Rounds(PodCollector(4), files, Targets(V2, (pod("a"), pod("b"))))
    rounds.next()
    files.content |= group_v2("k/a", 1)
    files.content["/v2/k/a/memory.stat"] = content
    found = rounds.next()
    assert {series.of for series in found} == {"b"}
    (problem,) = rounds.problems
    assert problem.startswith("k/a: ")
    assert not [path for path in files.is_open if "/k/a/" in path]
    files.content |= group_v2("k/a", 700_000)
    assert Series(Metric.POD_CPU, "a") not in rounds.next(), "counters of before are forgotten"
    assert rounds.next()[Series(Metric.POD_CPU, "a")] == 0.0


def test_groups_keep_their_files_while_others_come_and_go() -> None:
    files = ScriptedFiles(group_v2("k/a") | group_v2("k/b") | group_v2("k/a/box"))
    box = PodTarget("a", "k/a", (ContainerTarget("box", "k/a/box"),))
    rounds = Rounds(PodCollector(4), files, Targets(V2, (box, pod("b"))))
    rounds.next()
    assert len(files.opened) == 6
    rounds.targets = Targets(V2, (box,))
    found = rounds.next()
    assert found[Series(Metric.CONTAINER_CPU, "box")] == found[Series(Metric.POD_CPU, "a")] == 0.0
    assert len(files.opened) == 6
    assert not [path for path in files.is_open if "/k/b/" in path]
    rounds.collector.close()
    assert files.is_open == []


@pytest.mark.parametrize("kind", ["pods", "applications"])
def test_other_mounts_mean_other_files(kind: str) -> None:
    files = ScriptedFiles(group_v2("k/a"))
    files.content |= {path.replace("/v2/", "/new/"): text for path, text in files.content.items()}
    collector = PodCollector(4) if kind == "pods" else HostAppCollector(4)
    here, there = (
        Targets(layout, (pod("a"),), (HostAppTarget("app", "k/a"),))
        for layout in (V2, Layout(2, {"": "/new"}, Driver.CGROUPFS, "k"))
    )
    rounds = Rounds(collector, files, here)
    rounds.next()
    rounds.targets = there
    cpu = Metric.POD_CPU if kind == "pods" else Metric.HOST_APP_CPU
    assert cpu not in {series.metric for series in rounds.next()}
    assert files.is_open and all(path.startswith("/new/") for path in files.is_open)


def test_replies_get_their_turn_after_each_group() -> None:
    names = [f"pod{number}" for number in range(5)]
    files = ScriptedFiles()
    for name in names:
        files.content |= group_v2(f"k/{name}")
    aside: list[int] = []
    round_ = Round(
        now=1.0,
        targets=Targets(V2, tuple(map(pod, names))),
        files=files,
        measured=Stored(),
        clock=lambda: 1.0,
        step_aside=lambda: aside.append(len(files.opened)),
    )
    PodCollector(4).sample(round_)
    assert aside == [2, 4, 6, 8, 10]


def test_replies_get_their_turn_among_many_groups_at_rest() -> None:
    names = [f"pod{number}" for number in range(40)]
    files = ScriptedFiles()
    for name in names:
        files.content |= group_v2(f"k/{name}")
    collector = PodCollector(4)
    targets = Targets(V2, tuple(map(pod, names)))
    aside: list[float] = []
    for now in range(4):
        round_ = Round(
            now=now,
            targets=targets,
            files=files,
            measured=Stored(),
            clock=partial(float, now),
            step_aside=partial(aside.append, now),
        )
        samples = collector.sample(round_)
    assert samples[Series(Metric.POD_CPU, "pod0")] == 0.0
    assert aside.count(0) == 40
    assert 2 <= aside.count(3) < 10


def test_a_host_application_that_cannot_be_read_is_named_and_leaves_the_others() -> None:
    files = ScriptedFiles(group_v2("apps/one") | group_v2("apps/two"))
    apps = (HostAppTarget("one", "apps/one"), HostAppTarget("two", "apps/two"))
    rounds = Rounds(HostAppCollector(4), files, Targets(V2, (), apps))
    rounds.next()
    files.content["/v2/apps/one/cpu.stat"] = errno.EIO
    files.content |= {"/v2/apps/two/cpu.stat": b"usage_usec 500000\n"}
    assert rounds.next() == {
        Series(Metric.HOST_APP_CPU, "two"): pytest.approx(0.5),
        Series(Metric.HOST_APP_MEMORY, "two"): 3210,
        Series(Metric.HOST_APP_MEMORY_WITH_PAGE_CACHE, "two"): 543_210,
    }
    (problem,) = rounds.problems
    assert problem.startswith("one: ")
    rounds.targets = Targets(V2)
    assert rounds.next() == {}
    assert files.is_open == []


def test_host_applications_keep_their_files_until_they_are_closed() -> None:
    files = ScriptedFiles(group_v2("apps/one"))
    apps = (HostAppTarget("one", "apps/one"),)
    rounds = Rounds(HostAppCollector(4), files, Targets(V2, (), apps))
    rounds.next()
    rounds.targets = Targets(V2, (), apps)
    assert Series(Metric.HOST_APP_CPU, "one") in rounds.next()
    assert len(files.opened) == 2
    rounds.collector.close()
    assert files.is_open == []
    assert Series(Metric.HOST_APP_CPU, "one") not in rounds.next()
