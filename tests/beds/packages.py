"""Programs from Debian packages, unpacked into a private folder and kept there.

Nothing is installed: a private apt root reads one suite from the mirror that this machine is
already configured for, the package is unpacked with `dpkg -x`, and the folder is cached under
`.cache/` in the checkout. Debian's containerd of later suites runs on Debian 12 as it is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / ".cache" / "beds"
_DOWNLOAD_TIMEOUT_S = 300

# Put before a command: the kernel ends it when the bed's process is gone, however that went.
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


class BedError(Exception):
    """A bed cannot be made; the text says what was missing and what to do."""


@dataclass(frozen=True, slots=True)
class Mirror:
    """Where this machine gets Debian from, and the keyring that it trusts there, if it says so."""

    uri: str
    keyring: str | None


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


def unpacked(package: str, suites: tuple[str, ...]) -> Path:
    """The folder with the package's files, from the first of the suites that has it.

    The first call downloads (about 30 MB for containerd, besides one package index); later calls
    answer from the cache, also without a network. Safe to call from several processes at once.
    """
    target = CACHE / f"{package}-{suites[0]}"
    if target.is_dir():
        return target
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise BedError(f"{tool} is not installed: the beds unpack Debian packages")
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / f"{package}-{suites[0]}.lock"):
        if target.is_dir():
            return target
        print(f"bed: fetching {package} of Debian {suites[0]}", file=sys.stderr, flush=True)
        failures = []
        for suite in suites:
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="apt-") as scratch:
                try:
                    archive = _downloaded(package, suite, Path(scratch))
                    fresh = Path(scratch) / "unpacked"
                    _run(["dpkg", "-x", str(archive), str(fresh)])
                    fresh.rename(target)
                    return target
                except BedError as error:
                    failures.append(f"{suite}: {error}")
        raise BedError(f"{package} could not be fetched from Debian:\n" + "\n".join(failures))


def _downloaded(package: str, suite: str, root: Path) -> Path:
    """The package file, fetched through an apt root that lives in `root` alone."""
    mirror = configured_mirror()
    for folder in ("state/lists/partial", "cache/archives/partial", "parts"):
        (root / folder).mkdir(parents=True)
    (root / "status").touch()
    signed_by = f"Signed-By: {mirror.keyring}\n" if mirror.keyring else ""
    (root / "suite.sources").write_text(
        f"Types: deb\nURIs: {mirror.uri}\nSuites: {suite}\nComponents: main\n{signed_by}"
    )
    # The machine's own ways to reach the mirror (proxies, certificates) stay; its hooks do not.
    dump = _run(["apt-config", "dump"])
    acquisition = [
        line
        for line in dump.splitlines()
        if line.startswith("Acquire::")
        and not line.startswith(("Acquire::IndexTargets", "Acquire::Languages"))
    ]
    configuration = root / "apt.conf"
    configuration.write_text(
        "\n".join(
            [
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
        )
        + "\n"
    )
    environment = {**os.environ, "APT_CONFIG": str(configuration), "LC_ALL": "C"}
    _run(["apt-get", "-q", "update", "--error-on=any"], env=environment, cwd=root)
    _run(["apt-get", "-q", "download", f"{package}/{suite}"], env=environment, cwd=root)
    archives = list(root.glob("*.deb"))
    if len(archives) != 1:
        raise BedError(f"apt-get download {package} left {len(archives)} packages")
    return archives[0]


def _run(command: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BedError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise BedError(f"{' '.join(command)} failed ({done.returncode}):\n{tail}")
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
