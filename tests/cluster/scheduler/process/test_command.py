"""The command koord-scheduler: what it prints when it cannot start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.scheduler.main import main
from tests.cluster.scheduler.configuration.files import file


def test_each_mistake_of_a_file_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scheduler.json"
    filters = {"filter": {"enabled": [{"name": "LoadAware"}]}}
    tree = file(profiles=[{"plugins": filters}], parallelism=0, podMaxBackoffSeconds=-1)
    path.write_text(json.dumps(tree))
    assert main([f"--config={path}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert all(line.startswith(f"koord-scheduler: {path}: ") for line in lines)
    assert sum("did you mean LoadAwareScheduling" in line for line in lines) == 1


def test_a_kubeconfig_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kubeconfig"
    assert main([f"--kubeconfig={path}"]) == 2
    assert f"No such file or directory: '{path}'" in capsys.readouterr().err
