"""The pages: links, files that they name, and sections that docstrings cite, lead somewhere."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from koordctl.main import command_line

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_FILE = re.compile(r"`([a-z_]+(?:/[a-z_.]+)+\.(?:py|md|toml|yaml|proto))`")
_CITED = re.compile(r"(docs/facts/[a-z_-]+\.md)((?:, \"[^\"]+\"(?: and \"[^\"]+\")*)?)")
_COMMAND = re.compile(r"^    (?:\$ )?koordctl (.*)$", re.MULTILINE)
_SECTION = re.compile(r"\"([^\"]+)\"")


def headings(page: Path) -> list[str]:
    return _HEADING.findall(page.read_text())


def anchor(heading: str) -> str:
    """Return the anchor that a forge gives a heading."""
    plain = re.sub(r"[^\w\- ]", "", heading.lower())
    return plain.strip().replace(" ", "-")


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def citations() -> Iterator[tuple[Path, str, list[str]]]:
    """Yield (file, page, sections) for every citation of a page of facts in a source file."""
    for source in sources():
        if source == Path(__file__) or not source.is_file():
            continue
        # A citation may continue on the next line of a docstring or comment.
        text = re.sub(r"\s*\n\s*(?:# )?", " ", source.read_text())
        for page, rest in _CITED.findall(text):
            yield source.relative_to(ROOT), page, _SECTION.findall(rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target in _LINK.findall(page.read_text()):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{target}: no such file"
        if fragment:
            assert fragment in map(anchor, headings(found)), f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = {name for name in _FILE.findall(page.read_text()) if name.split("/")[0] in rooms}
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_koordctl_takes_the_commands_that_a_page_shows(page: Path) -> None:
    for arguments in _COMMAND.findall(page.read_text()):
        command_line().parse_args(shlex.split(arguments, comments=True))


def test_every_command_of_koordctl_stands_in_the_operators_table() -> None:
    rows = re.findall(
        r"^\| `koordctl (\w+)", (ROOT / "docs/operations.md").read_text(), re.MULTILINE
    )
    (commands,) = (
        each for each in command_line()._actions if isinstance(each, argparse._SubParsersAction)
    )
    assert set(rows) == set(commands.choices)


def test_sections_of_facts_that_the_code_cites_exist() -> None:
    cited = list(citations())
    assert len(cited) > 20
    for source, page, sections in cited:
        assert (ROOT / page).exists(), f"{source} cites {page}"
        known = headings(ROOT / page)
        for section in sections:
            assert section in known, f'{source} cites {page}, "{section}"'


def test_the_tables_of_rooms_name_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"`(\w+)/`", "\n".join(re.findall(r"^\|(.*)$", page, re.MULTILINE))))
    packages = {source.parent for source in sources() if source.name == "__init__.py"}
    rooms = {path.name for path in packages if path.parent in (ROOT, ROOT / "koordlet")}
    assert "daemon" in rooms
    assert rooms - listed == {"benchmarks", "demo", "tests", "tools"}
