"""A real kube-scheduler beside an API server of a test. The program is found by beds.kubernetes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.beds.apiserver import ApiServer
from tests.beds.kubernetes import programs


@contextmanager
def kube_scheduler(
    server: ApiServer,
    folder: Path,
    *,
    secure_port: int = 0,
    elected: bool = False,
    profiles: Sequence[Mapping[str, Any]] = (),
) -> Iterator[None]:
    """Run kube-scheduler with its defaults; its log, with all scores, is `folder`/log.

    secure_port: on loopback, open to everyone; 0 for none. elected: it waits for its lease.
    profiles: of its configuration; the default one if there are none.
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
                **({"profiles": list(profiles)} if profiles else {}),
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
                "--vmodule=schedule_one=10",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()
