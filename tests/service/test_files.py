"""A file is replaced as a whole or stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.files import replacing


def test_the_new_file_comes_at_the_end_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    before = os.umask(0o077)
    try:
        with replacing(str(path), mode=0o644) as file:
            file.write(b"new")
            assert path.read_text() == "old"
    finally:
        os.umask(before)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["f"]


def test_after_a_failure_the_old_file_stands_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replacing(str(path)) as file:
        file.write(b"ne")
        raise OSError("full")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_link_in_the_scratch_files_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    (tmp_path / "f.new").symlink_to(target)
    with pytest.raises(OSError), replacing(str(tmp_path / "f")):
        pass
    assert target.read_text() == "kept"
