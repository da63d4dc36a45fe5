"""Schemata and masks: parsed, compared by id, and never illegal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linux.resctrl import (
    bounded,
    check_group,
    differing,
    format_schemata,
    mask_of_range,
    missing,
    parse_schemata,
    with_cdp,
)


@pytest.mark.parametrize(
    ("mask", "start", "end", "result"),
    [(0xFFF, 0, 30, 0xF), (0x7FF, 0, 30, 0xF), (0x7FF, 10, 50, 0x3C), (0x3FF, 10, 80, 0xFE),
     (0xFFF, 20, 80, 0x3F8), (0xFFFFF, 0, 100, 0xFFFFF)],
)  # fmt: skip
def test_masks_of_ranges(mask: int, start: int, end: int, result: int) -> None:
    assert mask_of_range(mask, start, end, 1) == result


@given(st.integers(1, 32), st.integers(0, 99), st.integers(1, 100), st.integers(1, 4))
def test_a_mask_is_never_illegal(ways: int, start: int, width: int, least: int) -> None:
    least = min(least, ways)
    mask = mask_of_range((1 << ways) - 1, start, min(start + width, 100), least)
    text = bin(mask)[2:].rstrip("0")
    assert mask.bit_count() >= least and "0" not in text and mask < 1 << ways


@pytest.mark.parametrize(("start", "end"), [(-1, 10), (50, 50), (60, 50), (0, 101)])
def test_bad_ranges_are_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="range"):
        mask_of_range(0xFFF, start, end, 1)


def test_the_kernels_text_and_ours_mean_the_same() -> None:
    kernel = parse_schemata("    MB:0=100;1=100\n    L3:0=fff;1=0ff\n")
    assert kernel == {"MB": {0: 100, 1: 100}, "L3": {0: 0xFFF, 1: 0xFF}}
    ours = format_schemata({"L3": {1: 0xFF, 0: 0xFFF}})
    assert ours == "L3:0=fff;1=ff\n"
    assert not differing(parse_schemata(ours), kernel)


def test_domains_are_compared_by_id_and_resource_by_resource() -> None:
    found = parse_schemata("L3:0=fff;8=fff\nMB:0=100;8=100\n")
    wanted = parse_schemata("L3:8=f;0=fff;\nMB:0=100;8=100;\nL2:0=1\n")
    assert differing(wanted, found) == {"L3": {8: 0xF}}
    assert missing(wanted, found) == ["L2"]
    assert missing({"MB": {3: 10}}, found) == ["MB domain 3"]


@pytest.mark.parametrize(
    ("bound", "result"),
    [
        ("MB:0=40\n", "L3:0=fff;1=f\nMB:0=40;1=20\n"),
        ("MB:1=40\n", "L3:0=fff;1=f\nMB:0=100;1=20\n"),
        ("MB:0=40;2=30\n", "L3:0=fff;1=f\nMB:0=40;1=20;2=30\n"),
        ("L3:0=1\n", "L3:0=fff;1=f\nMB:0=100;1=20\n"),
        ("SMBA:0=5\n", "L3:0=fff;1=f\nMB:0=100;1=20\nSMBA:0=5\n"),
    ],
)
def test_a_bound_counts_for_bandwidth_alone(bound: str, result: str) -> None:
    assert bounded("L3:0=fff;1=f\nMB:0=100;1=20\n", bound) == result


def test_code_and_data_get_the_same_with_cdp() -> None:
    assert with_cdp({"L3": {0: 15}, "MB": {0: 10}}) == {
        "L3CODE": {0: 15},
        "L3DATA": {0: 15},
        "MB": {0: 10},
    }


@pytest.mark.parametrize(
    "text", ["L3", "L3:0", "L3:a=1", "L3:0=xyz", "MB:0=ff", "l3:0=1", "x" * 70000]
)
def test_bad_schemata_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"schemata|domain"):
        parse_schemata(text)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "info", "mon_data", "mon_groups", "-x", "x" * 200]
)
def test_group_names_stay_inside(name: str) -> None:
    with pytest.raises(ValueError, match="group"):
        check_group(name)
