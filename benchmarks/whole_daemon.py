"""A whole `koordlet run` to measure, and the pods of its node, with real groups."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from benchmarks.nri_messages import container, pod
from benchmarks.running import ended_with_block, started_apart
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.beds.groups import Kubepods
from tests.beds.packages import DIES_WITH_US

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where a run directory belongs: on a tmpfs, as a node's /run is. On a disk's file system the first
store into a page of the staged requests waits for the disk's journal after each write-back."""

_SLEEPS: Final = ("sleep", "infinity")
_WORKS_A_LITTLE: Final = ("sh", "-c", "while :; do sleep 0.5; done")
"""Starts two processes a second: some milliseconds of CPU, page faults and ended threads."""
KOORDLET = "import sys; from koordlet.main import main; sys.exit(main())"


def node(groups: Kubepods, count: int) -> tuple[list[nri.PodSandbox], list[nri.Container]]:
    """Best-effort pods with two running containers each."""
    parent = groups.pod_path("{uid}", "besteffort")
    pods = [pod(number, parent) for number in range(count)]
    containers: list[nri.Container] = []
    for number, a_pod in enumerate(pods):
        groups.make_pod(a_pod.uid, "besteffort", cpu_shares=2)
        for second in range(2):
            a_container = container(number * 2 + second, a_pod)
            a_container.state = nri.CONTAINER_RUNNING
            groups.make(a_container.linux.cgroups_path)
            containers.append(a_container)
    return pods, containers


@contextmanager
def processes(
    groups: Kubepods, containers: Sequence[nri.Container], *, busy: int
) -> Iterator[None]:
    """A process in each container's group: the first `busy` ones work a little, others sleep."""
    started: list[psutil.Popen] = []
    try:
        for number, each in enumerate(containers):
            command = _WORKS_A_LITTLE if number < busy else _SLEEPS
            process = psutil.Popen([*DIES_WITH_US, *command], stdout=subprocess.DEVNULL)
            started.append(process)
            for hierarchy in groups.hierarchies:
                group = hierarchy / each.linux.cgroups_path.lstrip("/")
                (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def koordlet(
    folder: Path,
    config: Mapping[str, Any],
    *,
    log: Path,
    python: str = sys.executable,
    code: str = KOORDLET,
) -> Iterator[psutil.Process]:
    """The daemon, configured by a file in `folder`, ended with the block.

    python: the interpreter of an environment that has a koordlet, of this checkout or another one.
    code: the Python program that is the daemon.
    """
    config_file = str(folder / "config.yaml")
    Path(config_file).write_text(yaml.safe_dump(dict(config)))
    with log.open("wb") as file:
        program = [os.path.abspath(python), "-c", code, "run", "--config", config_file]
        with ended_with_block(
            started_apart(
                [*DIES_WITH_US, *program],
                stdout=file,
                stderr=file,
                cwd=folder,  # away from this checkout: the environment's own koordlet is imported
            )
        ) as daemon:
            yield daemon


def cpu_seconds(process: psutil.Process) -> float:
    """The processor time that a process has used."""
    times = process.cpu_times()
    return times.user + times.system


def resident_mb(process: psutil.Process) -> float:
    """The resident memory of a process, in MB as the aims count it."""
    return process.memory_info().rss / 1e6
