"""Programs from Debian packages, unpacked into a private folder and kept there.

The folder is cached under `.cache/` in the checkout; `tests.beds.apt` fetches what is not there.
Debian's containerd of later suites runs on Debian 12 as it is.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.beds.apt import apt_root
from tests.beds.errors import BedError

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / ".cache" / "beds"

# Put before a command: the kernel ends it when the bed's process is gone, however that went.
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


def unpacked(package: str, suites: tuple[str, ...]) -> Path:
    """The folder with the package's files, from the first of the suites that has it.

    The first call downloads (about 30 MB for containerd, besides one package index); later calls
    answer from the cache, also without a network. Safe to call from several processes at once.
    """
    target = CACHE / f"{package}-{suites[0]}"
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / f"{package}-{suites[0]}.lock"):
        if target.is_dir():
            return target
        print(f"bed: fetching {package} of Debian {suites[0]}", file=sys.stderr, flush=True)
        failures = []
        for suite in suites:
            try:
                # Beside the target, so that the finished folder is moved there in one step.
                with apt_root(suite, beside=CACHE) as apt:
                    (archive,) = apt.download(f"{package}/{suite}")
                    fresh = apt.folder / "unpacked"
                    apt.unpack(archive, fresh)
                    fresh.rename(target)
                    return target
            except BedError as error:
                failures.append(f"{suite}: {error}")
        raise BedError(f"{package} could not be fetched from Debian:\n" + "\n".join(failures))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes respect too, on a file made for it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
