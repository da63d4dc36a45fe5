"""Accelerator files: what is bad is named and hides nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis.quantity import parse_quantity
from koordlet.measurement.accelerators.xpu import (
    PeerLink,
    Xpu,
    XpuStatus,
    XpuTopology,
    parse_xpus,
    read_xpus,
)
from linux.local import LocalHost

NPU: dict[str, Any] = {
    "vendor": "huawei", "model": "Ascend-910B", "uuid": "u-0", "minor": "0",
    "resources": {"gpu-memory": "64Gi", "huawei.com/npu-core": 20},
    "topology": {
        "socketID": "0", "nodeID": "1", "pcieID": "pci0000:3a", "busID": "0000:3b:00.0",
        "p2pLinks": [{"peerMinor": "1, 2", "type": "HCCS"}], "mustHonorPartition": True,
    },
    "status": {"healthy": False, "errCode": "E100", "errMessage": "fan"},
}  # fmt: skip


def read(directory: Path, **files: object) -> tuple[tuple[Xpu, ...], tuple[str, ...]]:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name).write_text(text)
    return read_xpus(LocalHost(), str(directory))


def test_a_device_with_everything(tmp_path: Path) -> None:
    assert read(tmp_path, npu=[NPU]) == (
        (
            Xpu(
                "huawei", "Ascend-910B", "u-0", 0,
                {"gpu-memory": parse_quantity("64Gi"), "huawei.com/npu-core": parse_quantity(20)},
                XpuTopology(1, "pci0000:3a", "0000:3b:00.0", (PeerLink((1, 2), "HCCS"),), True),
                XpuStatus(False, "E100", "fan"),
            ),
        ),
        (),
    )  # fmt: skip


def test_a_device_with_the_least(tmp_path: Path) -> None:
    xpus, problems = read(tmp_path, npu=[{"uuid": "u", "minor": "3", "unknown": 1}])
    assert xpus == (Xpu("", "", "u", 3, {}),)
    assert problems == ()


@pytest.mark.parametrize("bad", ["", "{}", "[", "nonsense", '{"uuid": "u"}', "x" * (1 << 21)])
def test_a_broken_file_hides_no_other(tmp_path: Path, bad: str) -> None:
    (tmp_path / "folder").mkdir()
    xpus, problems = read(tmp_path, a_bad=bad, b_good=[NPU])
    assert [xpu.uuid for xpu in xpus] == ["u-0"]
    assert len(problems) == 1 and "a_bad" in problems[0]


@pytest.mark.parametrize(
    "bad",
    [{"uuid": "", "minor": "1"}, {"uuid": "u", "minor": ""}, {"uuid": "u", "minor": "-1"},
     {"uuid": "u", "minor": "4294967296"}, {"uuid": "u", "minor": 1}, 5, None,
     {"uuid": "u", "minor": "1", "topology": {"nodeID": "x"}},
     {"uuid": "u", "minor": "1", "topology": {"p2pLinks": [{"peerMinor": "x"}]}}],
)  # fmt: skip
def test_a_broken_device_hides_no_other(tmp_path: Path, bad: object) -> None:
    xpus, problems = read(tmp_path, npu=[bad, NPU])
    assert [xpu.uuid for xpu in xpus] == ["u-0"]
    assert len(problems) == 1 and "device 0" in problems[0]


def test_a_bad_amount_is_left_out_alone(tmp_path: Path) -> None:
    device = {"uuid": "u", "minor": "1", "resources": {"a": "lots", "b": "1", "c": None}}
    (xpu,), problems = read(tmp_path, npu=[device])
    assert xpu.resources == {"b": parse_quantity(1)}
    assert [("resources.a" in one or "resources.c" in one) for one in problems] == [True, True]


def test_the_first_of_two_devices_with_one_minor_counts(tmp_path: Path) -> None:
    xpus, problems = read(tmp_path, a=[NPU], b=[{**NPU, "uuid": "u-1"}, {**NPU, "minor": "1"}])
    assert [xpu.uuid for xpu in xpus] == ["u-0"]
    assert len(problems) == 2 and "u-1" in problems[0]


def test_no_directory_is_no_device(tmp_path: Path) -> None:
    assert read_xpus(LocalHost(), str(tmp_path / "none")) == ((), ())


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*NPU, "nodeID", "p2pLinks", "peerMinor"]), inner)
    ),
    max_leaves=20,
)


@given(st.lists(JSON, max_size=4))
def test_no_content_of_an_array_raises(elements: list[Any]) -> None:
    problems: list[str] = []
    content = json.dumps([*elements, NPU]).encode()
    assert parse_xpus(content, "file", problems)[-1].uuid == "u-0"
