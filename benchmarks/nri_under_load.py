"""Creations answered by the whole daemon while it works: 200 pods reconciled every second, and the
NodeSLO changing ten times a second. Needs root: the pods' cgroups are real.

    python -m benchmarks.nri_under_load --count 100000
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import yaml

from benchmarks.nri_driver import Driver
from benchmarks.nri_hook_latency import container, measure_creations, pod
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.beds.groups import kubepods

_KOORDLET = "import sys; from koordlet.main import main; sys.exit(main())"
_PODS = 200
_NODE = "bench-node"


def _nodeslo(turn: int) -> str:
    class_qos = {"cpuQOS": {"enable": True, "groupIdentity": -1 if turn % 2 else 0}}
    manifest = {
        "apiVersion": "slo.koordinator.sh/v1alpha1",
        "kind": "NodeSLO",
        "metadata": {"name": _NODE},
        "spec": {"resourceQOSStrategy": {"beClass": class_qos}},
    }
    return yaml.safe_dump(manifest)


def _change_nodeslo(objects: Path, until: threading.Event, every_s: float) -> None:
    turn = 0
    while not until.wait(every_s):
        scratch = objects / ".nodeslo"
        scratch.write_text(_nodeslo(turn))
        scratch.rename(objects / "nodeslo.yaml")
        turn += 1


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--reconcile-seconds", type=float, default=1.0)
    parser.add_argument("--nodeslo-seconds", type=float, default=0.1)
    parser.add_argument("--keep-log", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, kubepods() as groups:
        folder = Path(name)
        objects = folder / "objects"
        for part in ("objects", "run"):
            (folder / part).mkdir()
        (objects / "nodeslo.yaml").write_text(_nodeslo(0))
        config = {
            "nodeName": _NODE,
            "nri": {"socket": str(folder / "nri.sock")},
            "objectsDir": str(objects),
            "runDir": str(folder / "run"),
            "kubepodsRoot": groups.path.strip("/"),
            "http": {"address": ""},
            "intervals": {"reconcile": options.reconcile_seconds},
            "featureGates": {"CPUNormalization": True, "GPUEnvInject": True, "OOMScoreAdj": True},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        parent = groups.pod_path("{uid}", "besteffort")
        pods = [pod(number, parent) for number in range(_PODS)]
        containers: list[nri.Container] = []
        for number, a_pod in enumerate(pods):
            groups.make_pod(a_pod.uid, "besteffort", cpu_shares=2)
            for second in range(2):
                a_container = container(number * 2 + second, a_pod)
                a_container.state = nri.CONTAINER_RUNNING
                groups._make(a_container.linux.cgroups_path)
                containers.append(a_container)
        driver = Driver(str(folder / "nri.sock"))
        log = open(options.keep_log or folder / "log", "wb")  # noqa: SIM115 - ends with the block
        daemon = subprocess.Popen(
            [sys.executable, "-c", _KOORDLET, "run", "--config", str(folder / "config.yaml")],
            stdout=log,
            stderr=log,
        )
        stop = threading.Event()
        changes = threading.Thread(
            target=_change_nodeslo, args=(objects, stop, options.nodeslo_seconds)
        )
        try:
            driver.accept()
            seconds, _, response = driver.synchronize(pods, containers)
            print(
                f"Synchronize: {len(containers)} containers: {seconds * 1e3:.0f} ms,"
                f" {len(response.update)} updates asked"
            )
            time.sleep(3)
            changes.start()
            busy = _cpu_seconds(daemon.pid)
            began = time.monotonic()
            measure_creations(driver, options.count, parent=parent, first=100_000)
            took = time.monotonic() - began
            busy = _cpu_seconds(daemon.pid) - busy
            print(
                f"the daemon used {busy / took:.0%} of a core,"
                f" {_resident_mb(daemon.pid):.0f} MB resident"
            )
        finally:
            stop.set()
            if changes.is_alive():
                changes.join()
            driver.close()
            daemon.terminate()
            daemon.wait(20)
            log.close()


if __name__ == "__main__":
    main()
