"""koordlet as a process of its own, on a machine of plain files."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

import yaml

from tests.beds.packages import CHECKOUT, DIES_WITH_US
from tests.koordlet.daemon.bed import NODE, SLO, node_object

_PROGRAM = "import sys; from koordlet.main import main; sys.exit(main())"


def plain_machine(folder: Path, container: Path, port: int) -> Path:
    """Make a machine of plain files, with the daemon's configuration, whose path is returned."""
    container.mkdir(parents=True)
    for name, value in (("cpu.cfs_quota_us", 200_000), ("cpu.cfs_period_us", 100_000)):
        (container / name).write_text(f"{value}\n")
    boot = folder / "proc" / "sys" / "kernel" / "random" / "boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("b1\n")
    mounts = folder / "proc" / "1" / "mounts"
    mounts.parent.mkdir(parents=True)
    mounts.write_text("cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n")
    for name in ("run", "objects.d"):
        (folder / name).mkdir(mode=0o700)
    (folder / "objects.d" / "objects.yaml").write_text(
        yaml.safe_dump_all([SLO, node_object("1.25")])
    )
    path = folder / "config.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "nodeName": NODE,
                "nri": {"socket": str(folder / "nri.sock"), "backoff": 0.1},
                "objectsDir": str(folder / "objects.d"),
                "runDir": str(folder / "run"),
                "cgroupRoot": str(folder / "cgroup"),
                "procRoot": str(folder / "proc"),
                "featureGates": {"CPUNormalization": True},
                "http": {"address": f"127.0.0.1:{port}"},
                "intervals": {"reconcile": 1},
            }
        )
    )
    return path


@contextmanager
def running(
    config: Path, log: Path, *, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon until the block ends. An error in the block gets its log as a note.

    prefix: the beginning of the command line, of a program that executes the rest.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *DIES_WITH_US,
                *prefix,
                sys.executable,
                "-c",
                _PROGRAM,
                "run",
                "--config",
                str(config),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(CHECKOUT)},
        )
    try:
        yield process
    except BaseException as error:
        error.add_note(log.read_text())
        raise
    finally:
        process.terminate()
        process.wait(20)


def readiness(port: int) -> str:
    """Return what /readyz answers; "" while there is no answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return str(answer.read().decode()).strip()
    except HTTPError as error:
        return error.read().decode()
    except (OSError, HTTPException):
        return ""
