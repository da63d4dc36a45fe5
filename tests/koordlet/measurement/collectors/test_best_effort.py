"""The CPU of best-effort pods, from files whose content a test sets."""

from __future__ import annotations

import errno

import pytest
from msgspec.structs import replace

from koordlet.measurement.collecting import ContainerTarget, PodTarget, Targets, Unavailable
from koordlet.measurement.collectors.best_effort import BestEffortCollector, cpu_mask
from koordlet.measurement.series import Metric, Series
from linux.cgroup_paths import Driver, Layout
from tests.koordlet.measurement.collectors.rounds import Rounds
from tests.koordlet.measurement.collectors.scripted_files import ScriptedFiles

V1 = Layout(
    1,
    {name: f"/{name}" for name in ("cpu", "cpuacct", "cpuset", "memory")},
    Driver.CGROUPFS,
    "kubepods",
)
V2 = Layout(2, {"": "/v2"}, Driver.CGROUPFS, "kubepods")
BE = "kubepods/besteffort"
LIMIT = Series(Metric.BE_CPU_LIMIT)
USED = Series(Metric.BE_CPU_USED)
REQUEST = Series(Metric.BE_CPU_REQUEST)


def boxes(*names: str) -> Targets:
    """Return a best-effort pod with these containers."""
    containers = tuple(ContainerTarget(name, f"{BE}/pod1/{name}") for name in names)
    return Targets(V2, (PodTarget("1", f"{BE}/pod1", containers, best_effort=True),))


def files_v2(**cpus_of: bytes | int) -> ScriptedFiles:
    """Return the files of the directory, which has the CPUs 0-3, and of the containers."""
    content: dict[str, bytes | int] = {
        f"/v2/{BE}/cpu.stat": b"usage_usec 0\n",
        f"/v2/{BE}/cpu.max": b"max 100000\n",
        f"/v2/{BE}/cpuset.cpus.effective": b"0-3\n",
    }
    for name, cpus in cpus_of.items():
        content[f"/v2/{BE}/pod1/{name}/cpuset.cpus.effective"] = cpus
    return ScriptedFiles(content)


def files_v1() -> ScriptedFiles:
    return ScriptedFiles(
        {
            f"/cpuacct/{BE}/cpuacct.usage": b"0\n",
            f"/cpuset/{BE}/cpuset.cpus": b"0-3\n",
            f"/cpu/{BE}/cpu.cfs_quota_us": b"-1\n",
            f"/cpu/{BE}/cpu.cfs_period_us": b"100000\n",
        }
    )


def over(files: ScriptedFiles, targets: Targets, cpus: int = 8) -> Rounds:
    return Rounds(BestEffortCollector(cpus), files, targets)


def test_a_list_of_cpus_is_a_mask() -> None:
    assert cpu_mask(b"0-2,8\n") == 0b1_0000_0111
    with pytest.raises(ValueError, match="x"):
        cpu_mask(b"0-x\n")


def test_the_use_is_in_milli_cores_on_both_versions() -> None:
    v1, v2 = files_v1(), files_v2()
    for files, layout, path, text in (
        (v1, V1, f"/cpuacct/{BE}/cpuacct.usage", b"2500000000\n"),
        (v2, V2, f"/v2/{BE}/cpu.stat", b"nr_periods 1\nusage_usec 2500000\n"),
    ):
        rounds = over(files, Targets(layout))
        assert USED not in rounds.next()
        files.content[path] = text
        assert rounds.next()[USED] == pytest.approx(2500)


def test_the_use_is_at_most_the_machine() -> None:
    files = files_v2()
    rounds = over(files, Targets(V2), cpus=2)
    rounds.next()
    files.content[f"/v2/{BE}/cpu.stat"] = b"usage_usec 2100000\n"
    assert rounds.next()[USED] == 2000


@pytest.mark.parametrize(
    ("containers", "limit"),
    [
        ({}, 4000),  # no container: the directory's
        ({"a": b"0\n", "b": b"2\n"}, 2000),
        ({"a": b"0-1\n", "b": b"1\n"}, 2000),
        ({"a": b"2-7\n"}, 2000),  # CPUs that the directory has lost do not count
        ({"a": b"6-7\n"}, 4000),
        ({"a": b"\n"}, 4000),
        ({"a": errno.ENOENT, "b": b"0\n"}, 1000),
    ],
)
def test_the_limit_is_the_cpus_that_any_container_may_use(
    containers: dict[str, bytes | int], limit: int
) -> None:
    rounds = over(files_v2(**containers), boxes(*containers))
    assert rounds.next()[LIMIT] == limit
    assert rounds.next()[LIMIT] == limit


def test_containers_are_not_read_once_all_cpus_are_found() -> None:
    files = files_v2(a=b"0-1\n", b=b"2-3\n", c=b"0\n")
    assert over(files, boxes("a", "b", "c")).next()[LIMIT] == 4000
    assert not [path for path, _ in files.opened if "/c/" in path]


def test_a_container_that_was_gone_counts_again_when_it_is_there() -> None:
    files = files_v2(a=b"0\n", b=b"1-2\n")
    rounds = over(files, boxes("a", "b"))
    assert rounds.next()[LIMIT] == 3000
    path = f"/v2/{BE}/pod1/b/cpuset.cpus.effective"
    files.content[path] = errno.ENODEV
    assert rounds.next()[LIMIT] == 1000
    assert path not in files.is_open
    files.content[path] = b"1\n"
    assert rounds.next()[LIMIT] == 2000


def test_groups_of_pods_and_of_other_classes_do_not_count() -> None:
    files = files_v2(a=b"0\n")
    files.content["/v2/kubepods/burstable/pod2/x/cpuset.cpus.effective"] = b"0-3\n"
    files.content[f"/v2/{BE}/pod1/cpuset.cpus.effective"] = b"0-3\n"
    other = PodTarget(
        "2", "kubepods/burstable/pod2", (ContainerTarget("x", "kubepods/burstable/pod2/x"),)
    )
    targets = boxes("a")
    rounds = over(files, replace(targets, pods=(*targets.pods, other)))
    assert rounds.next()[LIMIT] == 1000


@pytest.mark.parametrize(
    ("quota", "limit"),
    [
        (b"150000 100000\n", 1500),
        (b"33333 100000\n", 333),
        (b"500000 100000\n", 4000),
        (b"max 100000\n", 4000),
        (b"150000 0\n", 4000),
        (errno.ENOENT, 4000),  # the cpu controller is not enabled
    ],
)
def test_a_quota_limits_too(quota: bytes | int, limit: int) -> None:
    files = files_v2()
    files.content[f"/v2/{BE}/cpu.max"] = quota
    assert over(files, Targets(V2)).next()[LIMIT] == limit


@pytest.mark.parametrize(
    ("quota", "period", "limit"),
    [(b"-1\n", b"100000\n", 4000), (b"0\n", b"100000\n", 0), (b"90000\n", b"30000\n", 3000)],
)
def test_a_quota_of_v1(quota: bytes, period: bytes, limit: int) -> None:
    files = files_v1()
    files.content[f"/cpu/{BE}/cpu.cfs_quota_us"] = quota
    files.content[f"/cpu/{BE}/cpu.cfs_period_us"] = period
    assert over(files, Targets(V1)).next()[LIMIT] == limit


def test_without_a_cpuset_the_machine_is_the_limit() -> None:
    mounts = {name: path for name, path in V1.mounts.items() if name != "cpuset"}
    no_hierarchy = Layout(1, mounts, Driver.CGROUPFS, "kubepods")
    assert over(files_v1(), Targets(no_hierarchy)).next()[LIMIT] == 8000
    files = files_v2()
    files.content[f"/v2/{BE}/cpuset.cpus.effective"] = errno.ENOENT
    assert over(files, Targets(V2)).next()[LIMIT] == 8000


@pytest.mark.parametrize(
    "name", ["cpu.max", "cpuset.cpus.effective", "pod1/a/cpuset.cpus.effective"]
)
def test_a_file_that_fails_ends_the_round_and_the_next_one_begins_again(name: str) -> None:
    files = files_v2(a=b"0\n")
    rounds = over(files, boxes("a"))
    rounds.next()
    good = files.content[f"/v2/{BE}/{name}"]
    files.content[f"/v2/{BE}/{name}"] = errno.EIO
    with pytest.raises(OSError, match="scripted"):
        rounds.next()
    assert files.is_open == []
    files.content[f"/v2/{BE}/{name}"] = good
    assert rounds.next() == {LIMIT: 1000.0}
    assert rounds.next() == {LIMIT: 1000.0, USED: 0.0}


def test_the_requests_of_best_effort_pods_are_added_up() -> None:
    pods = (
        PodTarget("1", f"{BE}/1", best_effort=True, batch_cpu_request_milli=700),
        PodTarget("2", f"{BE}/2", best_effort=True, batch_cpu_request_milli=1),
        PodTarget("3", f"{BE}/3", best_effort=False, batch_cpu_request_milli=5000),
    )
    rounds = over(files_v2(), Targets(V2, pods))
    assert rounds.next()[REQUEST] == 701
    rounds.targets = Targets(V2, pods[2:])
    assert REQUEST not in rounds.next()


def test_before_the_directory_of_the_pods_is_known_nothing_is_read() -> None:
    files = files_v2()
    with pytest.raises(Unavailable, match="directory of the pods"):
        over(files, Targets(Layout(2, {"": "/v2"}, Driver.CGROUPFS, ""))).next()
    assert files.opened == []


def test_files_stay_open_until_the_directory_moves() -> None:
    files = files_v2(a=b"0\n")
    rounds = over(files, boxes("a"))
    rounds.next()
    opened = len(files.opened)
    rounds.targets = boxes("a")  # a new value with the same groups
    assert USED in rounds.next()
    assert len(files.opened) == opened
    moved = "other/besteffort"
    for path, text in list(files.content.items()):
        files.content[path.replace(BE, moved)] = text
    files.content[f"/v2/{moved}/cpu.stat"] = b"usage_usec 1000\n"
    rounds.targets = Targets(Layout(2, {"": "/v2"}, Driver.CGROUPFS, "other"))
    assert USED not in rounds.next(), "the counter is of another group"
    assert files.is_open and all(moved in path for path in files.is_open)
    rounds.collector.close()
    assert files.is_open == []


def test_files_are_opened_again_when_the_hierarchies_are_mounted_elsewhere() -> None:
    files = files_v2()
    rounds = over(files, Targets(V2))
    rounds.next()
    for path, text in list(files.content.items()):
        files.content[path.replace("/v2/", "/unified/")] = text
    rounds.targets = Targets(Layout(2, {"": "/unified"}, Driver.CGROUPFS, "kubepods"))
    rounds.next()
    assert files.is_open and all(path.startswith("/unified/") for path in files.is_open)


def test_a_container_that_ends_closes_its_file() -> None:
    files = files_v2(a=b"0\n", b=b"1\n")
    rounds = over(files, boxes("a", "b"))
    assert rounds.next()[LIMIT] == 2000
    rounds.targets = boxes("a")
    assert rounds.next()[LIMIT] == 1000
    assert not [path for path in files.is_open if "/b/" in path]
