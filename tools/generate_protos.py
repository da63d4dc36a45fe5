"""Regenerates the Python modules of every .proto file under protos/.

The generated modules are committed, so that a checkout and a package work without a
compiler; this program makes them and, with --check, proves that they still match:

    python -m tools.generate_protos           write protos/**/*_pb2.py, *_pb2.pyi
    python -m tools.generate_protos --check   write nothing, exit 1 if one differs

NRI and ttRPC speak no gRPC, so a file gets a *_pb2_grpc.py only if it is not one of
those: the rule is TTRPC_SERVICES below plus "does the file hold a service at all".
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = "protos"

# Folders under protos/ whose services travel over ttRPC, not gRPC.
TTRPC_SERVICES = frozenset({"nri", "ttrpc"})

_SERVICE = re.compile(r"^service\s+\w+", re.MULTILINE)
_GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def proto_files(root: Path) -> list[Path]:
    """All .proto files under root/protos, relative to root, in a fixed order."""
    return sorted(path.relative_to(root) for path in (root / PROTOS).rglob("*.proto"))


def speaks_grpc(root: Path, proto: Path) -> bool:
    """True for a file that holds a service which gRPC clients and servers use."""
    return proto.parts[1] not in TTRPC_SERVICES and bool(
        _SERVICE.search((root / proto).read_text(encoding="utf-8"))
    )


def generate(root: Path, destination: Path) -> dict[Path, bytes]:
    """Compiles every file into `destination` and returns what was made, by relative path.

    Raises RuntimeError with the compiler's exit status; the compiler itself prints why.
    """
    from grpc_tools import protoc

    include = str(resources.files("grpc_tools") / "_proto")
    for proto in proto_files(root):
        arguments = [
            "protoc",
            f"-I{root}",
            f"-I{include}",
            f"--python_out={destination}",
            f"--pyi_out={destination}",
        ]
        if speaks_grpc(root, proto):
            arguments.append(f"--grpc_python_out={destination}")
        status = protoc.main([*arguments, proto.as_posix()])
        if status != 0:
            raise RuntimeError(f"protoc ended with status {status} on {proto}")
    return generated_files(destination)


def generated_files(root: Path) -> dict[Path, bytes]:
    """The generated modules that lie under root/protos, by path relative to root."""
    return {
        path.relative_to(root): path.read_bytes()
        for pattern in _GENERATED
        for path in (root / PROTOS).rglob(pattern)
    }


def differences(made: dict[Path, bytes], committed: dict[Path, bytes]) -> list[str]:
    """One sentence for each module that is missing, left over or different."""
    found = [f"{path} is missing" for path in made.keys() - committed.keys()]
    found += [f"{path} has no .proto file" for path in committed.keys() - made.keys()]
    found += [
        f"{path} differs from what its .proto file gives"
        for path in made.keys() & committed.keys()
        if made[path] != committed[path]
    ]
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.generate_protos", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        made = generate(ROOT, Path(scratch))
    committed = generated_files(ROOT)
    found = differences(made, committed)
    if options.check:
        for sentence in found:
            print(sentence, file=sys.stderr)
        if found:
            print("run: python -m tools.generate_protos", file=sys.stderr)
        return 1 if found else 0
    for path, content in made.items():
        if committed.get(path) != content:
            (ROOT / path).write_bytes(content)
            print(f"wrote {path}")
    for path in committed.keys() - made.keys():
        (ROOT / path).unlink()
        print(f"removed {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
