"""The Grafana boards: whole, and only with series that the programs have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
_SUFFIXES = ("_bucket", "_total")


def _sources() -> str:
    return "\n".join(
        path.read_text()
        for folder in ("koordlet", "cluster")
        for path in sorted((ROOT / folder).rglob("*.py"))
    )


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_every_series_of_a_board_is_one_of_ours(board: Path) -> None:
    text, sources = board.read_text(), _sources()
    names = set(re.findall(r"\bkoordlet_[a-z_]+", text))
    assert len(names) >= 10
    for name in names:
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        plain = name.removeprefix("koordlet_")
        # Families of one loop are named by their last part.
        parts = {plain, plain.removeprefix("reconcile_"), plain.removeprefix("nri_")}
        assert any(f'"{part}"' in sources or f'"koordlet_{part}"' in sources for part in parts), (
            name
        )


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.name)
def test_a_board_is_whole(board: Path) -> None:
    tree = json.loads(board.read_text())
    panels = tree["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(
            target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"]
        )


def test_there_is_a_board() -> None:
    assert BOARDS
