"""Lines of block I/O files: read, write, ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linux.block_io import (
    BLOCK_FILES,
    Form,
    check_block_value,
    cost_model,
    cost_qos,
    line_to_write,
    read_line,
    same_as_none,
)
from linux.resources import Resource

_QOS_LINE = "8:0 enable=1 ctrl=user rpct=95.00 rlat=3000 wpct=90.00 wlat=5000 min=50.00 max=150.00"
_QOS = "enable=1 ctrl=user rpct=95.00 rlat=3000 wpct=90.00 wlat=5000"
_SIX = {"rbps": 1, "rseqiops": 2, "rrandiops": 3, "wbps": 4, "wseqiops": 5, "wrandiops": 6}
_MODEL = "ctrl=user rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5 wrandiops=6"


@pytest.mark.parametrize(
    ("resource", "version", "content", "value"),
    [
        (Resource.BLKIO_READ_BPS, 1, "8:0 1048576\n8:16 7\n", "1048576"),
        (Resource.BLKIO_READ_BPS, 1, "8:16 7\n", ""),
        (Resource.BLKIO_READ_BPS, 2, "8:0 rbps=10 wbps=max riops=max wiops=4\n", "10"),
        (Resource.BLKIO_WRITE_BPS, 2, "8:0 rbps=10 wbps=max riops=max wiops=4\n", ""),
        (Resource.BLKIO_WRITE_IOPS, 2, "8:0 rbps=10 wbps=max riops=max wiops=4\n", "4"),
        (Resource.BLKIO_COST_WEIGHT, 2, "default 100\n8:0 50\n", "50"),
        (Resource.BLKIO_COST_WEIGHT, 2, "default 100\n8:01 50\n", ""),
        (Resource.BLKIO_BFQ_WEIGHT, 1, "default 100\n8:0 50\n", "50"),
        (Resource.BLKIO_LATENCY, 2, "8:0 target=75\n", "75"),
        (Resource.BLKIO_COST_QOS, 2, _QOS_LINE + "\n", _QOS),
        (Resource.BLKIO_COST_QOS, 2, "8:0 enable=0 ctrl=auto rpct=0.00\n", "enable=0 ctrl=auto"),
        (
            Resource.BLKIO_COST_MODEL,
            1,
            "8:0 ctrl=user model=linear rbps=1 rseqiops=2 rrandiops=3 wbps=4 wseqiops=5"
            " wrandiops=6\n",
            _MODEL,
        ),
        (Resource.BLKIO_COST_MODEL, 2, "", ""),
    ],
)
def test_the_value_of_a_disk_is_read_from_its_line(
    resource: Resource, version: int, content: str, value: str
) -> None:
    assert read_line(resource, version, "8:0", content) == value


@pytest.mark.parametrize(
    ("resource", "version", "value", "line"),
    [
        (Resource.BLKIO_READ_IOPS, 1, "9", "8:0 9"),
        (Resource.BLKIO_READ_IOPS, 1, "", "8:0 0"),
        (Resource.BLKIO_READ_IOPS, 2, "9", "8:0 riops=9"),
        (Resource.BLKIO_READ_IOPS, 2, "", "8:0 riops=max"),
        (Resource.BLKIO_COST_WEIGHT, 1, "", "8:0 default"),
        (Resource.BLKIO_BFQ_WEIGHT, 2, "10", "8:0 10"),
        (Resource.BLKIO_LATENCY, 2, "", "8:0 target=max"),
        (Resource.BLKIO_COST_QOS, 2, "", "8:0 enable=0 ctrl=auto"),
        (Resource.BLKIO_COST_MODEL, 2, "", "8:0 ctrl=auto"),
        (Resource.BLKIO_COST_QOS, 2, _QOS, f"8:0 {_QOS}"),
    ],
)
def test_a_value_and_its_absence_have_a_line(
    resource: Resource, version: int, value: str, line: str
) -> None:
    assert line_to_write(resource, version, "8:0", value) == line


def test_iocosts_texts_are_canonical() -> None:
    assert cost_qos(rpct=95, rlat=3000, wpct=90, wlat=5000) == _QOS
    assert cost_model(_SIX) == _MODEL
    assert same_as_none(Resource.BLKIO_COST_MODEL, "ctrl=auto")
    assert not same_as_none(Resource.BLKIO_COST_MODEL, _MODEL)
    assert same_as_none(Resource.BLKIO_READ_BPS, "")
    assert not same_as_none(Resource.BLKIO_READ_BPS, "5")


@pytest.mark.parametrize(
    ("resource", "key", "value"),
    [
        (Resource.BLKIO_READ_BPS, "8:0", 0),
        (Resource.BLKIO_READ_BPS, "8:0", True),
        (Resource.BLKIO_READ_BPS, "8:0", "5"),
        (Resource.BLKIO_READ_BPS, "sda", 5),
        (Resource.BLKIO_READ_BPS, "8:0 9", 5),
        (Resource.BLKIO_READ_BPS, "", 5),
        (Resource.BLKIO_BFQ_WEIGHT, "8:0", 1001),
        (Resource.BLKIO_COST_QOS, "8:0", "enable=1\n8:16 enable=1"),
        (Resource.BLKIO_COST_QOS, "8:0", 5),
        (Resource.BLKIO_COST_MODEL, "8:0", "ctrl=user rbps=1"),
    ],
)
def test_a_value_that_the_file_does_not_take_is_refused(
    resource: Resource, key: str, value: int | str
) -> None:
    with pytest.raises((TypeError, ValueError)):
        check_block_value(resource, key, value)


@given(st.sampled_from(list(BLOCK_FILES)), st.sampled_from([1, 2]), st.text(max_size=200))
def test_no_content_of_a_file_gives_more_than_a_line_or_an_error(
    resource: Resource, version: int, content: str
) -> None:
    try:
        value = read_line(resource, version, "8:0", content)
    except ValueError:
        assert BLOCK_FILES[resource].form in (Form.QOS, Form.MODEL)
    else:
        assert len(value.splitlines()) <= 1


@given(st.sampled_from([1, 2]), st.integers(1, (1 << 63) - 1), st.sampled_from(list(BLOCK_FILES)))
def test_a_written_line_reads_as_the_value(version: int, number: int, resource: Resource) -> None:
    file = BLOCK_FILES[resource]
    if not file.name(version) or file.form in (Form.QOS, Form.MODEL):
        return
    line = line_to_write(resource, version, "8:0", str(number))
    assert read_line(resource, version, "8:0", line) == str(number)
