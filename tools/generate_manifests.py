"""Write the manifests that are derived from code, or say where the written ones differ.

    python tools/generate_manifests.py           write them below deploy/
    python tools/generate_manifests.py --check   exit 1 and name every file that differs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from apis.crd import KINDS, custom_resource_definition

_HEADER = "# Generated from the API types by tools/generate_manifests.py; do not edit.\n"
_DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def manifests() -> dict[Path, str]:
    """Return the text of every generated file by its path."""
    texts: dict[Path, str] = {}
    for kind in KINDS:
        path = _DEPLOY / "crds" / f"{kind.group}_{kind.plural}.yaml"
        texts[path] = _HEADER + _yaml(custom_resource_definition(kind))
    return texts


class _Dumper(yaml.SafeDumper):
    """Writes shared parts out instead of pointing at them: kubectl reads anchors, people do not."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _yaml(*documents: object) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


def main() -> int:
    """Write or check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 on drift")
    check = parser.parse_args().check
    texts = manifests()
    folders = {path.parent for path in texts}
    generated = {
        path
        for folder in folders
        for path in folder.glob("*.yaml")
        if path.read_text().startswith(_HEADER)
    }
    drifted = sorted(
        {path for path, text in texts.items() if not path.exists() or path.read_text() != text}
        | (generated - set(texts))
    )
    for path in drifted:
        print(f"{path.relative_to(_DEPLOY.parent)}: {'differs' if check else 'written'}")
        if not check and path in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path])
        elif not check:
            path.unlink()
    return 1 if check and drifted else 0


if __name__ == "__main__":
    sys.exit(main())
