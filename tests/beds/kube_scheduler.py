"""A real kube-scheduler beside an API server of a test. The program is found by beds.kubernetes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.beds.apiserver import ApiServer
from tests.beds.kubernetes import programs


@contextmanager
def kube_scheduler(server: ApiServer, folder: Path) -> Iterator[None]:
    """Run kube-scheduler with its defaults; its log is `folder`/log."""
    kubeconfig, configuration = folder / "kubeconfig", folder / "configuration"
    kubeconfig.write_text(server.kubeconfig())
    configuration.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "leaderElection": {"leaderElect": False},
                "percentageOfNodesToScore": 100,
                "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 1000, "burst": 1000},
            }
        )
    )
    program = programs("kube-scheduler") / "kube-scheduler"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, f"--config={configuration}", "--secure-port=0"], stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()
