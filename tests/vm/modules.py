"""Kernel modules of a package: which ones a module needs, in the order to load them."""

from __future__ import annotations

import lzma
import re
from pathlib import Path

from tests.vm.packages import ImageError


def ordered_modules(tree: Path, wanted: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """(name, uncompressed content) of the wanted modules and what they need, needed ones first.

    Modules that are built into the kernel are left out. tree: the folder that holds lib/modules.
    """
    files: dict[str, Path] = {}
    for path in tree.rglob("*.ko*"):
        files[path.name.split(".ko")[0].replace("-", "_")] = path
    built_in = {
        Path(line.strip()).name.split(".ko")[0].replace("-", "_")
        for listing in tree.rglob("modules.builtin")
        for line in listing.read_text().splitlines()
    }
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in found or name in built_in:
            return
        path = files.get(name)
        if path is None:
            raise ImageError(f"the kernel package has no module {name}")
        content = path.read_bytes()
        if path.suffix == ".xz":
            content = lzma.decompress(content)
        for needed in _needs(content):
            add(needed)
        found[name] = content

    for name in wanted:
        add(name)
    return list(found.items())


def _needs(content: bytes) -> list[str]:
    match = re.search(rb"\0depends=([^\0]*)\0", content)
    if match is None:
        return []
    return [name.replace("-", "_") for name in match.group(1).decode().split(",") if name]
