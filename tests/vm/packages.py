"""Sets of Debian packages with all they depend on, unpacked into one folder.

A private apt root with nothing installed asks the mirror that this machine is configured for, so
apt itself finds the dependencies; nothing is installed here and no maintainer script runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.beds.packages import Mirror, configured_mirror

_TIMEOUT_S = 600


class ImageError(Exception):
    """The image cannot be built; the text says what was missing and what to do."""


def fetch(packages: tuple[str, ...], suite: str, into: Path, *, dependencies: bool) -> list[str]:
    """Unpack the packages of a suite into `into`; answers the package files' names.

    dependencies: whether what they depend on comes too (recommended packages never do).
    Raises ImageError.
    """
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise ImageError(f"{tool} is not installed: the image is made of Debian packages")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="koord-apt-") as scratch:
        root = Path(scratch)
        environment = _private_apt(root, suite, configured_mirror())
        _run(["apt-get", "-q", "update", "--error-on=any"], environment, root)
        if dependencies:
            command = ["apt-get", "-q", "-y", "--no-install-recommends", "--download-only"]
            _run([*command, "install", *packages], environment, root)
            archives = sorted((root / "cache/archives").glob("*.deb"))
        else:
            _run(["apt-get", "-q", "download", *packages], environment, root)
            archives = sorted(root.glob("*.deb"))
        if not archives:
            raise ImageError(f"apt-get fetched none of {' '.join(packages)} of {suite}")
        for archive in archives:
            _run(["dpkg", "-x", str(archive), str(into)], environment, root)
        return [archive.name for archive in archives]


def newest_kernel_package(suite: str) -> str:
    """The real package behind linux-image-cloud-amd64, e.g. linux-image-6.1.0-40-cloud-amd64."""
    with tempfile.TemporaryDirectory(prefix="koord-apt-") as scratch:
        root = Path(scratch)
        environment = _private_apt(root, suite, configured_mirror())
        _run(["apt-get", "-q", "update", "--error-on=any"], environment, root)
        shown = _run(["apt-cache", "depends", "linux-image-cloud-amd64"], environment, root)
    names = [line.split()[-1] for line in shown.splitlines() if "Depends: linux-image" in line]
    if not names:
        raise ImageError(f"linux-image-cloud-amd64 of {suite} names no kernel")
    return names[0]


def _private_apt(root: Path, suite: str, mirror: Mirror) -> dict[str, str]:
    for folder in ("state/lists/partial", "cache/archives/partial", "parts"):
        (root / folder).mkdir(parents=True)
    (root / "status").touch()
    signed_by = f"Signed-By: {mirror.keyring}\n" if mirror.keyring else ""
    (root / "suite.sources").write_text(
        f"Types: deb\nURIs: {mirror.uri}\nSuites: {suite}\nComponents: main\n{signed_by}"
    )
    dump = _run(["apt-config", "dump"], dict(os.environ), root)
    # The machine's own ways to reach the mirror stay; what it indexes and its hooks do not.
    acquisition = [
        line
        for line in dump.splitlines()
        if line.startswith("Acquire::")
        and not line.startswith(("Acquire::IndexTargets", "Acquire::Languages"))
    ]
    configuration = root / "apt.conf"
    lines = [
        *acquisition,
        f'Dir::State "{root}/state";',
        f'Dir::State::status "{root}/status";',
        f'Dir::Cache "{root}/cache";',
        f'Dir::Etc::sourcelist "{root}/suite.sources";',
        f'Dir::Etc::sourceparts "{root}/parts";',
        f'Dir::Etc::parts "{root}/parts";',
        f'Dir::Etc::preferencesparts "{root}/parts";',
        'Acquire::Languages "none";',
        'Acquire::Check-Valid-Until "false";',
        'APT::Architecture "amd64";',
        'APT::Sandbox::User "root";',
    ]
    configuration.write_text("\n".join(lines) + "\n")
    return {**os.environ, "APT_CONFIG": str(configuration), "LC_ALL": "C"}


def _run(command: list[str], environment: dict[str, str], cwd: Path) -> str:
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(f"{' '.join(command[:4])}: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise ImageError(f"{' '.join(command[:6])} failed ({done.returncode}):\n{tail}")
    return done.stdout
