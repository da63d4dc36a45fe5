"""Creations answered by the whole daemon while it works: 200 pods reconciled every second, and the
NodeSLO changing ten times a second. Needs root: the pods' cgroups are real.

    python -m benchmarks.nri_under_load --count 100000
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import yaml

from benchmarks.nri_creations import measure_creations
from benchmarks.nri_driver import Driver
from benchmarks.running import run_main
from benchmarks.whole_daemon import cpu_seconds, koordlet, node, resident_mb
from tests.beds.groups import kubepods

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
        pods, containers = node(groups, _PODS)
        driver = Driver(str(folder / "nri.sock"))
        stop = threading.Event()
        changes = threading.Thread(
            target=_change_nodeslo, args=(objects, stop, options.nodeslo_seconds)
        )
        log = Path(options.keep_log or folder / "log")
        with koordlet(folder, config, log=log) as daemon:
            try:
                driver.accept()
                seconds, _, response = driver.synchronize(pods, containers)
                print(
                    f"Synchronize: {len(containers)} containers: {seconds * 1e3:.0f} ms,"
                    f" {len(response.update)} updates asked"
                )
                time.sleep(3)
                changes.start()
                busy = cpu_seconds(daemon)
                began = time.monotonic()
                parent = groups.pod_path("{uid}", "besteffort")
                measure_creations(driver, options.count, parent=parent, first=100_000)
                took = time.monotonic() - began
                busy = cpu_seconds(daemon) - busy
                print(
                    f"the daemon used {busy / took:.0%} of a core,"
                    f" {resident_mb(daemon):.0f} MB resident"
                )
            finally:
                stop.set()
                if changes.is_alive():
                    changes.join()
                driver.close()


if __name__ == "__main__":
    run_main(main)
