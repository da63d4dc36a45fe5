"""`koordlet run` beside a bed's containerd, as systemd would run it.

Its folder holds the configuration, the objects directory and the run directory. Start-up is over
when the daemon says READY=1 on the notification socket, which is what systemd waits for too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.beds.containerd import Containerd
from tests.beds.errors import BedError
from tests.beds.packages import CHECKOUT, DIES_WITH_US

NODE_NAME = "example-node"
_READY_TIMEOUT_S = 60.0  # an emulated machine takes its time to import it all
_STOP_TIMEOUT_S = 15.0
_KOORDLET = "import sys; from koordlet.main import main; sys.exit(main())"
_KOORDCTL = "import sys; from koordctl.main import main; sys.exit(main())"


@dataclass(slots=True)
class Daemon:
    """A koordlet and what it is given. Between `stop` and `start` its folder stays."""

    folder: Path
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def objects(self) -> Path:
        return self.folder / "objects.d"

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BedError("koordlet is not running")
        return self._process.pid

    def put(self, *manifests: Mapping[str, Any]) -> None:
        """Write objects, one file each; a file appears whole or not at all."""
        for manifest in manifests:
            metadata = manifest["metadata"]
            name = f"{manifest['kind']}-{metadata.get('namespace', '')}-{metadata['name']}".lower()
            path = self.objects / f"{name}.yaml"
            scratch = path.with_suffix(".tmp")
            scratch.write_text(yaml.safe_dump(dict(manifest), sort_keys=False))
            scratch.rename(path)

    def delete(self, kind: str, name: str, *, namespace: str = "") -> None:
        (self.objects / f"{kind}-{namespace}-{name}.yaml".lower()).unlink()

    def start(self) -> None:
        """Start it and wait until it is ready; BedError with the log's end if it is not."""
        with _notifications(self.folder / "notify.sock") as notices:
            environment = {
                "PATH": os.environ.get("PATH", os.defpath),
                "PYTHONPATH": str(CHECKOUT),
                "NOTIFY_SOCKET": str(self.folder / "notify.sock"),
            }
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [
                        *DIES_WITH_US,
                        sys.executable,
                        "-c",
                        _KOORDLET,
                        "run",
                        "--config",
                        str(self.config),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    cwd=self.folder,
                    start_new_session=True,
                )
            self._wait_ready(notices)

    def _wait_ready(self, notices: socket.socket) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                if b"READY=1" in notices.recv(4096).split(b"\n"):
                    return
            except TimeoutError:
                pass
            if self._process.poll() is not None:
                status = self._process.returncode
                self._process = None
                raise BedError(f"koordlet ended with status {status}; {self.log_tail()}")
        self.stop()
        raise BedError(f"koordlet not ready after {_READY_TIMEOUT_S:.0f} s; {self.log_tail()}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it and answer its exit status; -9 after SIGKILL."""
        if self._process is None:
            return 0
        self._process.send_signal(how)
        try:
            status = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self._process.kill()
            self._process.wait()
            raise BedError(
                f"koordlet did not end within {_STOP_TIMEOUT_S:.0f} s of {how.name}; "
                f"{self.log_tail()}"
            ) from error
        finally:
            self._process = None
        return status

    @property
    def log(self) -> Path:
        return self.folder / "koordlet.log"

    def log_tail(self, lines: int = 25) -> str:
        if not self.log.exists():
            return "it left no log"
        tail = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "its log ends:\n" + "\n".join(tail)

    def run_koordlet(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another koordlet command in the same folder, e.g. "check-config" or a second "run"."""
        return self._command(_KOORDLET, [*arguments, "--config", str(self.config)])

    def koordctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._command(_KOORDCTL, ["--run-dir", str(self.run_dir), *arguments])

    def query(self, *arguments: str) -> Any:
        """What `koordctl ... -o json` answers; BedError with its words if it refuses."""
        done = self.koordctl(*arguments, "-o", "json")
        if done.returncode != 0:
            raise BedError(f"koordctl {' '.join(arguments)}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def _command(self, code: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(CHECKOUT)},
            cwd=self.folder,
            check=False,
        )


@contextmanager
def daemon(
    bed: Containerd,
    objects: Iterable[Mapping[str, Any]],
    *,
    gates: Mapping[str, bool] | None = None,
    name: str = "koordlet",
    config: Mapping[str, Any] | None = None,
) -> Iterator[Daemon]:
    """A running daemon on the bed's containerd; ended, and its values given back, at the end.

    gates: feature gates besides the defaults. config: more of the configuration file.
    name: what its folder in the bed is called after.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=bed.folder))
    for part in ("objects.d", "run"):
        (folder / part).mkdir(mode=0o700)
    running = Daemon(folder)
    running.config.write_text(
        yaml.safe_dump(
            {
                "nodeName": NODE_NAME,
                "nri": {"socket": str(bed.nri_socket)},
                "kubepodsRoot": bed.groups.path,
                "objectsDir": str(running.objects),
                "runDir": str(folder / "run"),
                "featureGates": dict(gates or {}),
                "http": {"address": ""},
                **(config or {}),
            }
        )
    )
    running.put(*objects)
    try:
        running.start()
        yield running
    except Exception as error:
        if not isinstance(error, BedError) or "log ends" not in str(error):
            error.add_note(f"koordlet: {running.log_tail()}")
        raise
    finally:
        running.stop()


@contextmanager
def _notifications(path: Path) -> Iterator[socket.socket]:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(path))
        notices.settimeout(0.1)
        yield notices
