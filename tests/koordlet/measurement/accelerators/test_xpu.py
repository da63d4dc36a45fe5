"""Accelerator files: what is bad is named and hides nothing else."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
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
from tests.simulated import DEBIAN_12_V2, SimulatedKernel

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


@settings(max_examples=50)
@given(st.lists(JSON, max_size=4))
def test_no_content_of_an_array_raises(elements: list[Any]) -> None:
    problems: list[str] = []
    content = json.dumps([*elements, NPU]).encode()
    assert parse_xpus(content, "file", problems)[-1].uuid == "u-0"


# -- limits, and the words for what is left out ---------------------------------------------------


def device(uuid: str, minor: int | str = 0, **more: Any) -> dict[str, Any]:
    return {"uuid": uuid, "minor": str(minor), **more}


@pytest.mark.parametrize("count", [64, 65])
def test_a_directory_has_at_most_64_files(tmp_path: Path, count: int) -> None:
    files = {f"f{number:02}": [device(f"u{number}", number)] for number in range(count)}
    xpus, problems = read(tmp_path, **files)
    assert [xpu.minor for xpu in xpus] == list(range(64))
    expected = f"{tmp_path} has 65 files: the first 64 are read"
    assert problems == ((expected,) if count == 65 else ())


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1])
def test_a_file_has_at_most_a_mebibyte(size: int) -> None:
    content = json.dumps([device("u")]).encode().ljust(size)
    problems: list[str] = []
    if size == 1 << 20:
        assert [xpu.uuid for xpu in parse_xpus(content, "file", problems)] == ["u"]
    else:
        with pytest.raises(ValueError, match=r"^longer than 1048576 bytes$"):
            parse_xpus(content, "file", problems)


def test_folders_are_passed_over_and_files_behind_them_are_read(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    xpus, problems = read(tmp_path, a=[device("one", 1)], c=[device("zero", 0)])
    assert [xpu.uuid for xpu in xpus] == ["zero", "one"], "by minor, not by file"
    assert problems == ()


def test_a_directory_that_cannot_be_listed_is_a_problem() -> None:
    kernel = SimulatedKernel(DEBIAN_12_V2)
    kernel.faults.fail("listdir", errno.EACCES, path="/sys")
    xpus, (problem,) = read_xpus(kernel, "/sys")
    assert xpus == ()
    assert problem.startswith("/sys: [Errno 13]")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"uuid": "u"}, "not a JSON array of devices"),
        ("[", "Input data was truncated"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: object, problem: str) -> None:
    _, problems = read(tmp_path, bad=content)
    assert problems == (f"{tmp_path}/bad: {problem}",)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (device(""), "uuid is missing"),
        (device("u", "x" * 40), f"minor '{'x' * 32}' is not a number from 0 to 2147483647"),
        (device("u", 2147483648), "minor '2147483648' is not a number from 0 to 2147483647"),
        (
            device("u", topology={"nodeID": "n" * 40}),
            f"topology.nodeID '{'n' * 32}' is not a number",
        ),
        (
            device("u", topology={"p2pLinks": [{"peerMinor": "1,-2"}]}),
            "minor '-2' is not a number from 0 to 2147483647",
        ),
    ],
)
def test_a_broken_device_is_named(tmp_path: Path, bad: object, problem: str) -> None:
    _, problems = read(tmp_path, npu=[device("good", 7), bad])
    assert problems == (f"{tmp_path}/npu: device 1: {problem}",)


def test_a_broken_amount_is_named(tmp_path: Path) -> None:
    _, problems = read(tmp_path, npu=[device("u", resources={"a": "lots"})])
    assert problems == (
        f"{tmp_path}/npu: device 0: resources.a: not a quantity; write a number with an optional"
        " suffix, 500m or 16Gi",
    )


@pytest.mark.parametrize("minor", ["0", " 5 ", "2147483647"])
def test_minors_have_31_bits_and_may_have_blanks(tmp_path: Path, minor: str) -> None:
    (xpu,), problems = read(tmp_path, npu=[device("u", minor)])
    assert (xpu.minor, problems) == (int(minor), ())


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ({}, XpuTopology(-1, "", "")),
        ({"nodeID": "", "p2pLinks": None}, XpuTopology(-1, "", "")),
        ({"nodeID": "-1"}, XpuTopology(-1, "", "")),
        ({"pcieID": "p", "busID": "b"}, XpuTopology(-1, "p", "b")),
        (
            {"p2pLinks": [{}, {"peerMinor": "1,,2,", "type": "x"}]},
            XpuTopology(-1, "", "", (PeerLink((), ""), PeerLink((1, 2), "x"))),
        ),
        ({"mustHonorPartition": True}, XpuTopology(-1, "", "", (), True)),
    ],
)
def test_a_topology_may_lack_everything(
    tmp_path: Path, topology: dict[str, Any], expected: XpuTopology
) -> None:
    (xpu,), problems = read(tmp_path, npu=[device("u", topology=topology)])
    assert (xpu.topology, problems) == (expected, ())


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, XpuStatus(False, "", "")),
        ({"healthy": True}, XpuStatus(True, "", "")),
        ({"errCode": "E", "errMessage": "m"}, XpuStatus(False, "E", "m")),
    ],
)
def test_a_status_may_lack_everything(
    tmp_path: Path, status: dict[str, Any], expected: XpuStatus
) -> None:
    (xpu,), _ = read(tmp_path, npu=[device("u", status=status)])
    assert xpu.status == expected


def test_devices_beside_others_are_named(tmp_path: Path) -> None:
    xpus, problems = read(
        tmp_path, a=[device("u", 1)], b=[device("u", 2), device("v", 1), device("w", 3)]
    )
    assert [xpu.uuid for xpu in xpus] == ["u", "w"]
    assert problems == (
        "device u (minor 2) is left out beside u (minor 1)",
        "device v (minor 1) is left out beside u (minor 1)",
    )
