"""`python -m tests.beds.assets ARCHIVE FOLDER`: what the API server's bed needs, put into a folder.

ARCHIVE is a kube-apiserver packed with xz; etcd comes from Debian's package.
"""

from __future__ import annotations

import lzma
import os
import shutil
import sys
from pathlib import Path

from tests.beds.packages import unpacked


def provide(archive: Path, folder: Path) -> None:
    """Unpack kube-apiserver and etcd into `folder`. Raises BedError or OSError."""
    etcd = unpacked("etcd-server", ("bookworm",)) / "usr/bin/etcd"
    partial = folder / f"partial-{os.getpid()}"
    with lzma.open(archive) as packed, partial.open("wb") as target:
        shutil.copyfileobj(packed, target)
    partial.chmod(0o755)
    partial.rename(folder / "kube-apiserver")
    shutil.copy(etcd, folder / "etcd")


if __name__ == "__main__":
    provide(Path(sys.argv[1]), Path(sys.argv[2]))
