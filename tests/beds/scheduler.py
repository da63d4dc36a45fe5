"""`koord-scheduler` beside a bed's API server, as its Deployment runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.beds.packages import CHECKOUT, DIES_WITH_US
from tests.waiting import wait_until

_STOP_TIMEOUT_S = 20.0


class SchedulerBed:
    """One koord-scheduler. Between `stop` and `start` its folder stays."""

    def __init__(self, kubeconfig: str, folder: Path, configuration: Mapping[str, Any]) -> None:
        """kubeconfig: its text. configuration: a KubeSchedulerConfiguration without its client
        connection."""
        self._folder = folder
        (folder / "scheduler.kubeconfig").write_text(kubeconfig)
        client = {"kubeconfig": str(folder / "scheduler.kubeconfig")}
        # YAML is a superset of JSON.
        (folder / "scheduler.yaml").write_text(
            json.dumps({**configuration, "clientConnection": client})
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._folder / "scheduler.log"

    def start(self) -> None:
        """Start it and wait until it schedules."""
        begins = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = process = subprocess.Popen(
                [
                    *DIES_WITH_US,
                    sys.executable,
                    "-m",
                    "cluster.scheduler.main",
                    f"--config={self._folder / 'scheduler.yaml'}",
                    "--secure-port=0",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(CHECKOUT)},
                cwd=self._folder,
                start_new_session=True,
            )

        def leads() -> bool:
            assert process.poll() is None, self.log_tail()
            return b"read in" in self.log.read_bytes()[begins:]

        wait_until(leads, "koord-scheduler to have read the cluster", timeout_s=60)

    def stop(self) -> None:
        """End it as a Deployment does; SIGKILL if it does not follow."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill(process)

    def kill(self, process: subprocess.Popen[bytes] | None = None) -> None:
        """End it as a crash does."""
        process = process or self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()

    def log_tail(self, lines: int = 25) -> str:
        tail = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "koord-scheduler's log ends:\n" + "\n".join(tail)


@contextmanager
def scheduler(
    kubeconfig: str, folder: Path, configuration: Mapping[str, Any]
) -> Iterator[SchedulerBed]:
    """A running koord-scheduler; ended at the end. kubeconfig, configuration: as SchedulerBed's."""
    running = SchedulerBed(kubeconfig, folder, configuration)
    try:
        running.start()
        yield running
    finally:
        running.stop()
