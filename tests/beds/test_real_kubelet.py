"""What a kubelet sets for the whole machine is put back, also after a bed that was killed."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.beds import real_kubelet

PANIC = "kernel/panic"


@pytest.fixture
def panic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of one sysctl, in a tree that stands for /proc/sys."""
    file = tmp_path / PANIC
    file.parent.mkdir()
    file.write_text("1\n")
    monkeypatch.setattr(real_kubelet, "_PROC_SYS", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return file


def test_a_sysctl_is_put_back_when_the_bed_fails(panic: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), real_kubelet.kept_sysctls():
        panic.write_text("10\n")
        raise ZeroDivisionError
    assert panic.read_text() == "1"
    assert list(tmp_path.glob("koord-sysctls-*")) == []


def test_a_sysctl_that_a_killed_bed_left_is_put_back_by_the_next(
    panic: Path, tmp_path: Path
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f"koord-sysctls-{ended.pid}.json"
    left.write_text(json.dumps({PANIC: "5"}))
    with real_kubelet.kept_sysctls():
        assert panic.read_text() == "5"
    assert panic.read_text() == "5"
    assert not left.exists()
