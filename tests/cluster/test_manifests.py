"""The manifests in deploy/ are those that the code generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.manager import manifests as of_manager
from cluster.scheduler import manifests as of_scheduler
from koordlet import manifests as of_koordlet
from tools.generate_manifests import manifests


@pytest.mark.parametrize(
    "written",
    [
        *(f"manager/{name}" for name in of_manager.files()),
        *(f"scheduler/{name}" for name in of_scheduler.files()),
        *(f"koordlet/{name}" for name in of_koordlet.files()),
    ],
)
def test_the_written_manifests_are_what_the_code_says(written: str) -> None:
    path = Path(__file__).parent.parent.parent / "deploy" / written
    assert path.read_text() == manifests()[path], "run tools/generate_manifests.py"
