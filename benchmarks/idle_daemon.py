"""What the daemon costs while nothing happens: memory, processor time and kernel writes of a whole
`koordlet run` with 200 pods and everything switched on. Needs root: the pods' cgroups are real.

    python -m benchmarks.idle_daemon --seconds 60

To reach (2-core machine): resident below 80 MB, below 1 % of a core, no write at all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.nri_driver import Driver
from benchmarks.nri_hook_latency import container, pod
from koordctl.client import Client, Unreachable
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.beds.groups import Kubepods, kubepods

_KOORDLET = "import sys; from koordlet.main import main; sys.exit(main())"
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
        _configure(folder, groups)
        pods, containers = _node(groups, options.pods)
        driver = Driver(str(folder / "nri.sock"))
        with open(folder / "log", "wb") as log:
            daemon = subprocess.Popen(
                [sys.executable, "-c", _KOORDLET, "run", "--config", str(folder / "config.yaml")],
                stdout=log,
                stderr=log,
            )
            try:
                driver.accept()
                driver.synchronize(pods, containers)
                _measure(daemon.pid, Client(str(folder / "run")), options.seconds)
            finally:
                driver.close()
                daemon.terminate()
                daemon.wait(20)


def _configure(folder: Path, groups: Kubepods) -> None:
    for part in ("objects", "run", "policies"):
        (folder / part).mkdir(mode=0o755)
    for number, manifest in enumerate(_OBJECTS):
        (folder / "objects" / f"{number}.yaml").write_text(yaml.safe_dump(manifest))
    config = {
        "nodeName": _NODE,
        "nri": {"socket": str(folder / "nri.sock")},
        "objectsDir": str(folder / "objects"),
        "runDir": str(folder / "run"),
        "kubepodsRoot": groups.path.strip("/"),
        "http": {"address": "127.0.0.1:19316"},
        # Nobody answers there; the client with its gRPC library is loaded all the same.
        "cri": {"enabled": True, "socket": str(folder / "cri.sock")},
        "hookService": {
            "enabled": True,
            "socket": str(folder / "hooks.sock"),
            "registrationDir": str(folder / "hookserver.d"),
        },
        "sitePolicies": {"enabled": True, "directory": str(folder / "policies")},
        "featureGates": {"AllAlpha": True},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def _node(groups: Kubepods, count: int) -> tuple[list[nri.PodSandbox], list[nri.Container]]:
    """Pods with two containers each, with real groups."""
    parent = groups.pod_path("{uid}", "besteffort")
    pods = [pod(number, parent) for number in range(count)]
    containers: list[nri.Container] = []
    for number, a_pod in enumerate(pods):
        groups.make_pod(a_pod.uid, "besteffort", cpu_shares=2)
        for second in range(2):
            a_container = container(number * 2 + second, a_pod)
            a_container.state = nri.CONTAINER_RUNNING
            groups._make(a_container.linux.cgroups_path)
            containers.append(a_container)
    return pods, containers


def _measure(pid: int, client: Client, seconds: float) -> None:
    settled = _settled(client)
    busy, passes = _cpu_seconds(pid), settled["reconciler"]["passes"]
    time.sleep(seconds)
    busy = _cpu_seconds(pid) - busy
    after = client.get("/status")
    writes = after["reconciler"]["written"] - settled["reconciler"]["written"]
    print(
        f"{after['pods']} pods, {after['containers']} containers,"
        f" {sum(after['reconciler']['values'].values())} values,"
        f" {after['reconciler']['passes'] - passes} passes in {seconds:.0f} s"
    )
    print(f"resident {after['memoryBytes'] / 1e6:.1f} MB")
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


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
