"""What the tests of koordctl share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.koordctl.simulated import Cluster


@pytest.fixture
def cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cluster:
    return Cluster(tmp_path, capsys)
