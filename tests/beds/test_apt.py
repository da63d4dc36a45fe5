"""Where packages come from: the mirror that the machine is configured for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.beds.apt import configured_mirror
from tests.beds.errors import BedError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "debian.sources",
            "Types: deb\n# a remark\nURIs: http://one.test/debian\n"
            "Suites: bookworm bookworm-updates\nComponents: main\nSigned-By: /k.gpg\n",
        ),
        ("sources.list", "deb [arch=amd64 signed-by=/k.gpg] http://one.test/debian stable main\n"),
    ],
)
def test_the_mirror_is_the_machines_own(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path if name == "sources.list" else tmp_path / "sources.list.d"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    mirror = configured_mirror(tmp_path)
    assert (mirror.uri, mirror.keyring) == ("http://one.test/debian", "/k.gpg")


def test_the_error_says_that_no_debian_mirror_is_reachable(tmp_path: Path) -> None:
    with pytest.raises(BedError, match="no Debian mirror among apt's sources"):
        configured_mirror(tmp_path)
