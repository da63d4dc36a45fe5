"""Debian packages without installing any: a private apt root that reads one suite.

It asks the mirror that this machine is already configured for, and apt itself finds dependencies.
Packages are unpacked with `dpkg -x`; no maintainer script runs, nothing outside the root changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.beds.errors import BedError

_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Mirror:
    """Where this machine gets Debian from, and the keyring that it trusts there, if it says so."""

    uri: str
    keyring: str | None


@dataclass(frozen=True, slots=True)
class Apt:
    """A private root that has read its suite's index. All methods raise BedError."""

    folder: Path
    environment: Mapping[str, str]

    def download(self, *packages: str) -> list[Path]:
        """Fetch these packages alone; answers their files."""
        self._run("apt-get", "-q", "download", *packages)
        return self._fetched(self.folder, packages)

    def download_with_dependencies(self, *packages: str) -> list[Path]:
        """Fetch the packages and all that they depend on; recommended packages never come."""
        command = ("apt-get", "-q", "-y", "--no-install-recommends", "--download-only", "install")
        self._run(*command, *packages)
        return self._fetched(self.folder / "cache/archives", packages)

    def depends(self, package: str) -> list[str]:
        """The names that a package depends on."""
        shown = self._run("apt-cache", "depends", package)
        return [line.split()[-1] for line in shown.splitlines() if "Depends: " in line]

    def unpack(self, archive: Path, into: Path) -> None:
        self._run("dpkg", "-x", str(archive), str(into))

    def _fetched(self, folder: Path, packages: tuple[str, ...]) -> list[Path]:
        archives = sorted(folder.glob("*.deb"))
        if not archives:
            raise BedError(f"apt-get fetched none of {' '.join(packages)}")
        return archives

    def _run(self, *command: str) -> str:
        return _run(command, environment=self.environment, cwd=self.folder)


@contextmanager
def apt_root(
    suite: str, *, beside: Path | None = None, architecture: str | None = None
) -> Iterator[Apt]:
    """A private apt root for a suite, gone afterwards. Raises BedError.

    beside: the folder to make it in; architecture: the machine's own unless it is given.
    """
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise BedError(f"{tool} is not installed: Debian packages are needed here")
    with tempfile.TemporaryDirectory(dir=beside, prefix="koord-apt-") as folder:
        root = Path(folder)
        configuration = _configure(root, suite, configured_mirror(), architecture)
        apt = Apt(root, {**os.environ, "APT_CONFIG": str(configuration), "LC_ALL": "C"})
        apt._run("apt-get", "-q", "update", "--error-on=any")
        yield apt


def _configure(root: Path, suite: str, mirror: Mirror, architecture: str | None) -> Path:
    for folder in ("state/lists/partial", "cache/archives/partial", "parts"):
        (root / folder).mkdir(parents=True)
    (root / "status").touch()
    signed_by = f"Signed-By: {mirror.keyring}\n" if mirror.keyring else ""
    (root / "suite.sources").write_text(
        f"Types: deb\nURIs: {mirror.uri}\nSuites: {suite}\nComponents: main\n{signed_by}"
    )
    # The machine's own ways to reach the mirror (proxies, certificates) stay; what it indexes and
    # its hooks do not.
    acquisition = [
        line
        for line in _run(("apt-config", "dump"), environment=os.environ, cwd=root).splitlines()
        if line.startswith("Acquire::")
        and not line.startswith(("Acquire::IndexTargets", "Acquire::Languages"))
    ]
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
        # Signatures are checked; age is not: an unchanging mirror serves a bed well.
        'Acquire::Check-Valid-Until "false";',
        # apt's own user may not enter a private folder.
        'APT::Sandbox::User "root";',
    ]
    if architecture is not None:
        lines.append(f'APT::Architecture "{architecture}";')
    configuration = root / "apt.conf"
    configuration.write_text("\n".join(lines) + "\n")
    return configuration


def _run(command: tuple[str, ...], *, environment: Mapping[str, str], cwd: Path) -> str:
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
        raise BedError(f"{' '.join(command[:4])}: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise BedError(f"{' '.join(command[:6])} failed ({done.returncode}):\n{tail}")
    return done.stdout


def configured_mirror(etc_apt: Path = Path("/etc/apt")) -> Mirror:
    """The mirror of the machine's own suite, from sources.list and sources.list.d.

    Raises BedError if no entry looks like a Debian archive (a `main` component, and a suite that
    is not one of the security or updates suites, which live in other archives).
    """
    files = [etc_apt / "sources.list"]
    if (folder := etc_apt / "sources.list.d").is_dir():
        files += sorted(folder.iterdir())
    for file in files:
        if not file.is_file():
            continue
        if file.suffix == ".sources":
            entries = _deb822_entries(file.read_text())
        elif file.suffix == ".list":
            entries = _one_line_entries(file.read_text())
        else:
            continue
        for uri, suite, components, keyring in entries:
            if suite in _DEBIAN_SUITES and "main" in components:
                return Mirror(uri, keyring)
    raise BedError(
        f"no Debian mirror among apt's sources in {etc_apt}: the beds need the Debian archive "
        "(an entry with a Debian suite and the component main)"
    )


_DEBIAN_SUITES = frozenset(
    {"bookworm", "trixie", "forky", "sid", "stable", "oldstable", "testing", "unstable"}
)

_Entry = tuple[str, str, tuple[str, ...], str | None]


def _deb822_entries(text: str) -> Iterator[_Entry]:
    for stanza in text.split("\n\n"):
        fields: dict[str, str] = {}
        for line in stanza.splitlines():
            if line.startswith("#") or ":" not in line or line[:1].isspace():
                continue
            name, _, value = line.partition(":")
            fields[name.strip().lower()] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled") == "no":
            continue
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                components = tuple(fields.get("components", "").split())
                yield uri, suite, components, fields.get("signed-by")


def _one_line_entries(text: str) -> Iterator[_Entry]:
    for line in text.splitlines():
        if not line.startswith("deb "):
            continue
        rest, keyring = line[4:].strip(), None
        if rest.startswith("["):
            options, _, rest = rest[1:].partition("]")
            for option in options.split():
                if option.startswith("signed-by="):
                    keyring = option.removeprefix("signed-by=")
        words = rest.split()
        if len(words) >= 3:
            yield words[0], words[1], tuple(words[2:]), keyring
