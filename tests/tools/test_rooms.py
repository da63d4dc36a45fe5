"""How many rooms koordlet has, on how many floors, and how many arrows run between them.

An arrow says that a file of one room imports something of another; imports for type checkers alone
count too. The limits are what there is. Raise one only together with docs/architecture.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

REPOSITORY: Final = Path(__file__).parents[2]
MOST_ROOMS: Final = 19
MOST_FLOORS: Final = 6
MOST_ARROWS: Final = 50


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of what a file imports, each as `package.module` or longer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name


def rooms_of(package: Path) -> dict[str, set[str]]:
    """Return each room of a package, with the rooms that it imports from."""
    rooms = {
        path.stem
        for path in package.iterdir()
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    arrows: dict[str, set[str]] = {room: set() for room in rooms}
    for file in package.rglob("*.py"):
        room = file.relative_to(package).parts[0].removesuffix(".py")
        if room not in rooms:
            continue
        for name in _imported(ast.parse(file.read_text())):
            first, *rest = name.split(".")
            if first == package.name and rest and rest[0] in rooms - {room}:
                arrows[room].add(rest[0])
    return arrows


def floors_of(arrows: Mapping[str, set[str]]) -> int:
    """Return the length of the longest way down, in rooms."""

    def depth(room: str, above: tuple[str, ...]) -> int:
        assert room not in above, f"a circle: {' -> '.join((*above, room))}"
        return 1 + max((depth(below, (*above, room)) for below in arrows[room]), default=0)

    return max(depth(room, ()) for room in arrows)


def test_koordlet_has_no_more_rooms_floors_and_arrows_than_its_architecture_says() -> None:
    arrows = rooms_of(REPOSITORY / "koordlet")
    counts = len(arrows), floors_of(arrows), sum(map(len, arrows.values()))
    assert counts == (MOST_ROOMS, MOST_FLOORS, MOST_ARROWS), sorted(
        f"{room} -> {other}" for room, others in arrows.items() for other in others
    )
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    assert "{} rooms on {} floors with {} arrows".format(*counts) in text


def test_an_import_of_any_form_is_an_arrow_and_a_circle_is_found(tmp_path: Path) -> None:
    house = tmp_path / "house"
    (house / "hall").mkdir(parents=True)
    (house / "__init__.py").touch()
    (house / "hall" / "__init__.py").touch()
    (house / "hall" / "door.py").write_text("def f():\n    from house.attic import roof\n")
    (house / "attic.py").write_text("import os\nimport house.cellar\n")
    (house / "cellar.py").write_text("from house import __doc__\n")
    arrows = rooms_of(house)
    assert arrows == {"hall": {"attic"}, "attic": {"cellar"}, "cellar": set()}
    assert floors_of(arrows) == 3
    (house / "cellar.py").write_text("from house import hall\n")
    with pytest.raises(AssertionError, match="a circle"):
        floors_of(rooms_of(house))
