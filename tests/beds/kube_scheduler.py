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
def kube_scheduler(
    server: ApiServer, folder: Path, *, secure_port: int = 0, elected: bool = False
) -> Iterator[None]:
    """Run kube-scheduler with its defaults; its log is `folder`/log.

    secure_port: on loopback, open to everyone; 0 for none. elected: it waits for its lease.
    """
    kubeconfig, configuration = folder / "kubeconfig", folder / "configuration"
    kubeconfig.write_text(server.kubeconfig())
    configuration.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "leaderElection": {"leaderElect": elected},
                "percentageOfNodesToScore": 100,
                "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 1000, "burst": 1000},
            }
        )
    )
    program = programs("kube-scheduler") / "kube-scheduler"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config={configuration}",
                f"--secure-port={secure_port}",
                "--bind-address=127.0.0.1",
                f"--cert-dir={folder / 'certificates'}",
                "--authorization-always-allow-paths=/*",
                f"--authentication-kubeconfig={kubeconfig}",
                f"--authorization-kubeconfig={kubeconfig}",
                "--authentication-tolerate-lookup-failure",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()
