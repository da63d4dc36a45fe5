"""Codecs, ranges and comparison of cgroup files, as tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.cpuset import CpuSet
from linux.cgroup_files import (
    FILES,
    INT64_MAX,
    Codec,
    content,
    encode,
    field_text,
    in_range,
    number,
    quota_in_period,
    quota_per_100ms,
    same,
)
from linux.resources import UNLIMITED, Resource, Value

R = Resource


@pytest.mark.parametrize(
    ("resource", "v1", "v2"),
    [
        (R.CPU_SHARES, "cpu.shares", "cpu.weight"),
        (R.CPU_CFS_QUOTA, "cpu.cfs_quota_us", "cpu.max"),
        (R.CPU_CFS_PERIOD, "cpu.cfs_period_us", "cpu.max"),
        (R.CPU_CFS_BURST, "cpu.cfs_burst_us", "cpu.max.burst"),
        (R.CPUSET_CPUS, "cpuset.cpus", "cpuset.cpus"),
        (R.MEMORY_LIMIT, "memory.limit_in_bytes", "memory.max"),
        (R.MEMORY_MIN, "memory.min", "memory.min"),
        (R.CPU_BVT, "cpu.bvt_warp_ns", "cpu.bvt_warp_ns"),
    ],
)
def test_each_version_has_its_own_name_for_a_file(resource: Resource, v1: str, v2: str) -> None:
    assert (FILES[resource].name(1), FILES[resource].name(2)) == (v1, v2)


@pytest.mark.parametrize(
    ("resource", "version", "value", "text"),
    [
        (R.CPU_SHARES, 1, 512, "512"),
        (R.CPU_SHARES, 2, 512, "20"),
        (R.CPU_CFS_QUOTA, 1, UNLIMITED, "-1"),
        (R.CPU_CFS_QUOTA, 2, UNLIMITED, "max"),
        (R.CPU_CFS_QUOTA, 2, 150_000, "150000"),
        (R.MEMORY_LIMIT, 1, UNLIMITED, "-1"),
        (R.MEMORY_LIMIT, 2, UNLIMITED, "max"),
        (R.MEMORY_HIGH, 2, UNLIMITED, "max"),
        (R.MEMORY_MIN, 2, 4096, "4096"),
        (R.CPU_BVT, 1, -1, "-1"),
        (R.CPUSET_CPUS, 2, CpuSet.parse("0-2,5"), "0-2,5"),
    ],
)
def test_a_canonical_value_is_written_as_the_file_wants_it(
    resource: Resource, version: int, value: int | CpuSet, text: str
) -> None:
    assert encode(FILES[resource], version, value) == text


def test_a_quota_follows_the_period_and_never_gets_too_small() -> None:
    quota = FILES[R.CPU_CFS_QUOTA]
    assert encode(quota, 1, 150_000, period_us=10_000) == "15000"
    assert encode(quota, 1, 1_001, period_us=10_000) == "1000"
    assert encode(quota, 1, UNLIMITED, period_us=10_000) == "-1"
    assert encode(FILES[R.CPU_CFS_BURST], 1, 150_000, period_us=10_000) == "15000"


@given(st.integers(1000, 10**8), st.integers(1000, 100_000))
def test_a_quota_of_any_period_survives_the_way_through_ours(quota_us: int, period_us: int) -> None:
    assert quota_in_period(quota_per_100ms(quota_us, period_us), period_us) == quota_us


@pytest.mark.parametrize(
    ("resource", "version", "one", "other", "equal"),
    [
        (R.CPU_CFS_QUOTA, 2, "max", "max", True),
        (R.CPU_CFS_QUOTA, 1, "-1", "-1", True),
        (R.CPU_CFS_QUOTA, 1, "100000", "100001", False),
        (R.MEMORY_LIMIT, 1, "-1", "9223372036854771712", True),
        (R.MEMORY_LIMIT, 1, "-1", "9223372036854710272", True),  # 64 KiB pages
        (R.MEMORY_LIMIT, 1, "1000000001", "999997440", True),
        (R.MEMORY_LIMIT, 1, "1000000001", "999993344", False),
        (R.MEMORY_HIGH, 2, str(INT64_MAX), "max", True),
        (R.MEMORY_MIN, 2, str(INT64_MAX), "max", True),
        (R.CPUSET_CPUS, 1, "0,1,2", "0-2", True),
        (R.CPUSET_CPUS, 1, "0-2", "0-3", False),
        (R.CPU_SHARES, 1, "2", "junk", False),
    ],
)
def test_comparison_is_in_numbers(
    resource: Resource, version: int, one: str, other: str, equal: bool
) -> None:
    assert same(FILES[resource], one, other) is equal
    del version


def test_cpu_max_holds_two_values() -> None:
    quota, period = FILES[R.CPU_CFS_QUOTA], FILES[R.CPU_CFS_PERIOD]
    assert field_text(quota, 2, b"150000 10000\n") == "150000"
    assert field_text(period, 2, b"max 10000\n") == "10000"
    # The kernel takes a lone quota and keeps the period; a period needs its quota.
    assert content(quota, 2, "max", b"150000 10000\n") == b"max"
    assert content(period, 2, "50000", b"150000 10000\n") == b"150000 50000"
    with pytest.raises(ValueError, match=r"cpu\.max"):
        field_text(quota, 2, b"150000\n")


def test_an_empty_set_is_written_as_a_newline() -> None:
    assert content(FILES[R.CPUSET_CPUS], 2, "", b"0-3\n") == b"\n"


@pytest.mark.parametrize(
    ("resource", "value", "result", "noted"),
    [
        (R.CPU_SHARES, 1, 2, True),
        (R.CPU_SHARES, 1 << 20, 262144, True),
        (R.CPU_SHARES, 1024, 1024, False),
        (R.CPU_CFS_QUOTA, 500, 1000, True),
        (R.CPU_CFS_QUOTA, -7, UNLIMITED, False),
        (R.MEMORY_MIN, -1, 0, True),
        (R.MEMORY_PRIORITY, 13, 12, True),
        (R.CPU_BVT, -2, -1, True),
    ],
)
def test_values_are_brought_into_range(
    resource: Resource, value: int, result: int, noted: bool
) -> None:
    brought, note = in_range(FILES[resource], value)
    assert (brought, bool(note)) == (result, noted)


@pytest.mark.parametrize(
    ("resource", "value"),
    [(R.CPUSET_CPUS, CpuSet()), (R.CPUSET_CPUS, 3), (R.CPU_SHARES, "1024"), (R.CPU_SHARES, True)],
)
def test_values_of_another_kind_are_refused(resource: Resource, value: Value) -> None:
    with pytest.raises(ValueError, match=resource.value):
        in_range(FILES[resource], value)


@given(st.sampled_from(sorted(FILES)), st.sampled_from([1, 2]), st.integers(-5, 1 << 62))
def test_what_is_encoded_reads_back_the_same(resource: Resource, version: int, value: int) -> None:
    file = FILES[resource]
    if file.codec is Codec.CPUS:
        brought: int | CpuSet = CpuSet.of_mask(abs(value) % 4096 + 1)
    else:
        brought, _ = in_range(file, value)
    text = encode(file, version, brought)
    assert same(file, text, text)
    if not (file.codec is Codec.SHARES and version == 2):
        assert number(file, text) == brought or file.codec is Codec.BYTES


def test_every_file_has_a_controller_of_v1() -> None:
    assert {file.controller for file in FILES.values()} == {"cpu", "cpuset", "memory"}
