"""How long the whole daemon takes for a Synchronize of many containers on a machine without a free
CPU, and what memory it keeps. Needs root. The containers have no groups: the reply is measured.

    python -m benchmarks.nri_synchronize --containers 5000 10000 --burners 2

The runtime's limit is 2 s, over all slices of the list. Figures are printed, never asserted.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.nri_driver import Driver
from benchmarks.nri_messages import container, pod
from benchmarks.running import run_main
from benchmarks.whole_daemon import koordlet, resident_mb
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.beds.groups import kubepods

_CONTAINERS_PER_POD = 2


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Processes that use a CPU each, for the block."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def node(count: int, parent: str) -> tuple[list[nri.PodSandbox], list[nri.Container]]:
    pods = [pod(number, parent) for number in range(count // _CONTAINERS_PER_POD)]
    containers = []
    for number in range(count):
        made = container(number, pods[number // _CONTAINERS_PER_POD])
        made.state = nri.CONTAINER_RUNNING
        containers.append(made)
    return pods, containers


def measure(count: int, burners: int, turns: int, version: str, python: str) -> None:
    with tempfile.TemporaryDirectory() as name, kubepods() as groups:
        folder = Path(name)
        for part in ("objects", "run"):
            (folder / part).mkdir()
        config = {
            "nodeName": "bench-node",
            "nri": {"socket": str(folder / "nri.sock")},
            "objectsDir": str(folder / "objects"),
            "runDir": str(folder / "run"),
            "kubepodsRoot": groups.path.strip("/"),
            "http": {"address": ""},
            "featureGates": {"CPUNormalization": True, "GPUEnvInject": True, "OOMScoreAdj": True},
        }
        pods, containers = node(count, groups.pod_path("{uid}", "besteffort"))
        driver = Driver(str(folder / "nri.sock"), version=version)
        with koordlet(folder, config, log=folder / "log", python=python) as daemon:
            try:
                driver.accept()
                driver.synchronize([], [])
                time.sleep(3)
                before = resident_mb(daemon)
                took: list[float] = []
                updates: list[int] = []
                kept: list[float] = []
                for _ in range(turns):
                    driver.drop()
                    driver.accept()
                    with burning(burners):
                        time.sleep(0.5)
                        seconds, slices, response = driver.synchronize(pods, containers)
                    took.append(seconds)
                    updates.append(len(response.update))
                    time.sleep(20)
                    kept.append(resident_mb(daemon))
                driver.drop()
                driver.accept()
                driver.synchronize([], [])
                time.sleep(45)
                print(
                    f"{count} containers, {slices} slices, {burners} burners, {turns} turns: median"
                    f" {statistics.median(took):.2f} s, worst {max(took):.2f} s; updates"
                    f" {updates}; resident {before:.0f} MB before, "
                    f" {', '.join(f'{each:.0f}' for each in kept)} MB 20 s after each list,"
                    f" {resident_mb(daemon):.0f} MB after an empty one;"
                    f" peak {_peak_mb(daemon):.0f} MB",
                    flush=True,
                )
            finally:
                driver.close()


def _peak_mb(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(kilobytes) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--containers", type=int, nargs="+", default=[5000, 10000])
    parser.add_argument("--burners", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--version", default="v2.1.9", help="the runtime's, as it reports it")
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    for count in options.containers:
        measure(count, options.burners, options.turns, options.version, options.python)


if __name__ == "__main__":
    run_main(main)
