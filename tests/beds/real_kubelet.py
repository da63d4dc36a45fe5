"""A real kubelet on a bed's containerd, directly or behind another CRI endpoint.

It registers with a bed's API server and puts pods into the bed's own groups. It runs in a mount
namespace of its own, where its fixed paths (/var/lib/kubelet, /var/log/containers) are private
folders. The sysctls that a kubelet sets for the whole machine are put back; those that a killed bed
left set are put back by the next one.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.beds.apiserver import ApiServer
from tests.beds.containerd import Containerd
from tests.beds.daemon import NODE_NAME
from tests.beds.errors import BedError
from tests.beds.kubernetes import KUBELET, programs
from tests.beds.packages import DIES_WITH_US
from tests.ports import free_ports

_PROC_SYS = Path("/proc/sys")
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
# What a kubelet sets unless it is told to refuse other values (protectKernelDefaults).
_SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
# A tmpfs hides the machine's own folder, which need not even exist; the bed's lies in its place.
_NAMESPACE = """
mount -t tmpfs none /var/lib && mkdir /var/lib/kubelet && mount --bind {folder}/lib /var/lib/kubelet
mount -t tmpfs none /var/log
exec {command}
"""


@dataclass(slots=True)
class KubeletProcess:
    """A kubelet. Between `stop` and `start` its pods go on, and its folder stays."""

    folder: Path
    port: int
    health_port: int
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def log(self) -> Path:
        return self.folder / "kubelet.log"

    def start(self) -> None:
        """Start it and wait until it says that it is healthy; BedError with the log's end."""
        command = [
            str(programs(*KUBELET) / "kubelet"),
            f"--config={self.folder / 'config.yaml'}",
            f"--kubeconfig={self.folder / 'kubeconfig'}",
            f"--root-dir={self.folder / 'root'}",
            f"--cert-dir={self.folder / 'pki'}",
            f"--hostname-override={NODE_NAME}",
        ]
        script = _NAMESPACE.format(folder=self.folder, command=shlex.join(command))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*DIES_WITH_US, "unshare", "--mount", "sh", "-ec", script],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while not self._healthy():
            if self._process.poll() is not None:
                raise BedError(f"kubelet ended: {self.log_tail()}")
            if time.monotonic() > deadline:
                self.stop(signal.SIGKILL)
                raise BedError(f"kubelet is not healthy: {self.log_tail()}")
            time.sleep(0.1)

    def _healthy(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.health_port}/healthz"
            with urllib.request.urlopen(url, timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it; its pods go on."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log_tail(self, lines: int = 25) -> str:
        if not self.log.exists():
            return "it left no log"
        tail = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "its log ends:\n" + "\n".join(tail)


@contextmanager
def real_kubelet(
    runtime: Containerd, server: ApiServer, *, endpoint: Path | None = None
) -> Iterator[KubeletProcess]:
    """A kubelet on the bed's containerd, ready; ended with its sysctls put back.

    endpoint: the CRI socket that it uses instead of containerd's. Its pods are removed with the
    containerd. Pods need `hostNetwork`, since the bed has no CNI, and images of the bed.
    """
    folder = runtime.folder / "kubelet"
    for part in ("lib", "logs", "pki", "root"):
        (folder / part).mkdir(parents=True)
    port, health_port = free_ports(2)
    (folder / "kubeconfig").write_text(server.kubeconfig("admin"))
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kubelet.config.k8s.io/v1beta1",
                "kind": "KubeletConfiguration",
                "containerRuntimeEndpoint": f"unix://{endpoint or runtime.socket}",
                "failCgroupV1": False,
                "cgroupDriver": "cgroupfs",
                "cgroupRoot": str(Path(runtime.groups.path).parent),
                "enforceNodeAllocatable": ["pods"],
                "failSwapOn": False,
                "oomScoreAdj": 0,  # a lower one needs CAP_SYS_RESOURCE
                "makeIPTablesUtilChains": False,
                "address": "127.0.0.1",
                "port": port,
                "readOnlyPort": 0,
                "healthzPort": health_port,
                "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}},
                # A right that a test grants or takes away counts within a second.
                "authorization": {
                    "mode": "Webhook",
                    "webhook": {"cacheAuthorizedTTL": "1s", "cacheUnauthorizedTTL": "1s"},
                },
                "resolvConf": "",
                "podLogsDir": str(folder / "logs"),
                "volumePluginDir": str(folder / "plugins"),
                # The machine's disk and memory are not the bed's to watch over.
                "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%"},
                "imageGCHighThresholdPercent": 100,
            }
        )
    )
    running = KubeletProcess(folder, port, health_port)
    with kept_sysctls():
        try:
            running.start()
            yield running
        except Exception as error:
            if not isinstance(error, BedError) or "log ends" not in str(error):
                error.add_note(f"kubelet: {running.log_tail()}")
            raise
        finally:
            running.stop()


@contextmanager
def kept_sysctls() -> Iterator[None]:
    """Put the sysctls back that a kubelet sets, also those of a bed that was killed."""
    folder = Path(tempfile.gettempdir())
    for left in folder.glob("koord-sysctls-*.json"):
        if not Path("/proc", left.stem.rpartition("-")[2]).exists():
            _set_sysctls(json.loads(left.read_text()))
            left.unlink()
    before = {name: text for name in _SYSCTLS if (text := _read_sysctl(name)) is not None}
    kept = folder / f"koord-sysctls-{os.getpid()}.json"
    kept.write_text(json.dumps(before))
    try:
        yield
    finally:
        _set_sysctls(before)
        kept.unlink()


def _read_sysctl(name: str) -> str | None:
    try:
        return (_PROC_SYS / name).read_text().strip()
    except OSError:
        return None


def _set_sysctls(values: dict[str, str]) -> None:
    for name, value in values.items():
        if _read_sysctl(name) != value:
            (_PROC_SYS / name).write_text(value)
