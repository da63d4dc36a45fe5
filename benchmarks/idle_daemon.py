"""What the daemon costs while nothing happens: memory, processor time and kernel writes of a whole
`koordlet run` with 200 pods and everything switched on. Needs root: the pods' cgroups are real.

    python -m benchmarks.idle_daemon --seconds 60

To reach (2-core machine): resident below 80 MB, below 1 % of a core, no write at all.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.nri_driver import Driver
from benchmarks.running import run_main
from benchmarks.whole_daemon import cpu_seconds, koordlet, node, resident_mb
from koordctl.client import Client, Unreachable
from tests.beds.groups import Kubepods, kubepods

_NODE = "bench-node"
_OBJECTS: tuple[dict[str, Any], ...] = (
    {
        "apiVersion": "slo.koordinator.sh/v1alpha1",
        "kind": "NodeSLO",
        "metadata": {"name": _NODE},
        "spec": {
            "resourceQOSStrategy": {
                "lsClass": {"memoryQOS": {"enable": True}, "cpuQOS": {"enable": True}},
                "beClass": {"memoryQOS": {"enable": True}, "cpuQOS": {"enable": True}},
            }
        },
    },
    {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": _NODE,
            "annotations": {"node.koordinator.sh/cpu-normalization-ratio": "1.25"},
        },
    },
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, kubepods() as groups:
        folder = Path(name)
        config = _config(folder, groups)
        pods, containers = node(groups, options.pods)
        driver = Driver(str(folder / "nri.sock"))
        with koordlet(folder, config, log=folder / "log") as daemon:
            try:
                driver.accept()
                driver.synchronize(pods, containers)
                _measure(daemon, Client(str(folder / "run")), options.seconds)
            finally:
                driver.close()


def _config(folder: Path, groups: Kubepods) -> dict[str, Any]:
    for part in ("objects", "run", "policies"):
        (folder / part).mkdir(mode=0o755)
    for number, manifest in enumerate(_OBJECTS):
        (folder / "objects" / f"{number}.yaml").write_text(yaml.safe_dump(manifest))
    return {
        "nodeName": _NODE,
        "nri": {"socket": str(folder / "nri.sock")},
        "objectsDir": str(folder / "objects"),
        "runDir": str(folder / "run"),
        "kubepodsRoot": groups.path.strip("/"),
        "http": {"address": "127.0.0.1:19316"},
        # No server answers there; the client with its gRPC library is loaded all the same.
        "cri": {"enabled": True, "socket": str(folder / "cri.sock")},
        "hookService": {
            "enabled": True,
            "socket": str(folder / "hooks.sock"),
            "registrationDir": str(folder / "hookserver.d"),
        },
        "sitePolicies": {"enabled": True, "directory": str(folder / "policies")},
        "featureGates": {"AllAlpha": True},
    }


def _measure(daemon: psutil.Process, client: Client, seconds: float) -> None:
    settled = _settled(client)
    busy, passes = cpu_seconds(daemon), settled["reconciler"]["passes"]
    time.sleep(seconds)
    busy = cpu_seconds(daemon) - busy
    after = client.get("/status")
    writes = after["reconciler"]["written"] - settled["reconciler"]["written"]
    print(
        f"{after['pods']} pods, {after['containers']} containers,"
        f" {sum(after['reconciler']['values'].values())} values,"
        f" {after['reconciler']['passes'] - passes} passes in {seconds:.0f} s"
    )
    print(f"resident {resident_mb(daemon):.1f} MB")
    print(f"processor {busy / seconds:.2%} of a core, {after['reconciler']['lastCpuMs']} ms a pass")
    print(f"kernel writes {writes}, refused {after['reconciler']['failed']}")


def _settled(client: Client) -> Any:
    """Wait until a whole interval passes without a write."""
    written = -1
    for _ in range(20):
        time.sleep(12)
        try:
            status = client.get("/status")
        except Unreachable:
            continue
        if status["reconciler"]["written"] == written:
            return status
        written = status["reconciler"]["written"]
    raise SystemExit("the daemon still writes after four minutes")


if __name__ == "__main__":
    run_main(main)
