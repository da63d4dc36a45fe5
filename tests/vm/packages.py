"""Sets of Debian packages with all they depend on, unpacked into one folder."""

from __future__ import annotations

from pathlib import Path

from tests.beds.apt import apt_root
from tests.beds.errors import BedError

_ARCHITECTURE = "amd64"  # of the emulated machine, whatever this one is


class ImageError(BedError):
    """The image cannot be built; the text says what was missing and what to do."""


def fetch(packages: tuple[str, ...], suite: str, into: Path, *, dependencies: bool) -> list[str]:
    """Unpack the packages of a suite into `into`; answers the package files' names.

    dependencies: whether what they depend on comes too (recommended packages never do).
    Raises BedError.
    """
    into.mkdir(parents=True, exist_ok=True)
    with apt_root(suite, architecture=_ARCHITECTURE) as apt:
        download = apt.download_with_dependencies if dependencies else apt.download
        archives = download(*packages)
        for archive in archives:
            apt.unpack(archive, into)
        return [archive.name for archive in archives]


def newest_kernel_package(suite: str) -> str:
    """The real package behind linux-image-cloud-amd64, e.g. linux-image-6.1.0-40-cloud-amd64."""
    with apt_root(suite, architecture=_ARCHITECTURE) as apt:
        names = apt.depends("linux-image-cloud-amd64")
    kernels = [name for name in names if name.startswith("linux-image")]
    if not kernels:
        raise ImageError(f"linux-image-cloud-amd64 of {suite} names no kernel")
    return kernels[0]
