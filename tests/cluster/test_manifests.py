"""What is installed for the manager is what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.manager.manifests import files
from tools.generate_manifests import manifests


@pytest.mark.parametrize("name", sorted(files()))
def test_the_written_manifests_are_what_the_code_says(name: str) -> None:
    texts = {path.name: text for path, text in manifests().items()}
    path = Path(__file__).parent.parent.parent / "deploy" / "manager" / name
    assert path.read_text() == texts[name], "run tools/generate_manifests.py"
