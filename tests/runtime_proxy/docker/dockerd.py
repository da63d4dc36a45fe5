"""A private dockerd: Debian's own (20.10), on the containerd of a bed, without any network.

Everything it has lives in one folder that goes away with it; it makes no bridge and no firewall
rule. Its containers are removed over its API first, because containerd's shims outlive it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.beds.containerd import Containerd, containerd
from tests.beds.errors import BedError
from tests.beds.image import IMAGE, write_image
from tests.beds.packages import DIES_WITH_US, unpacked
from tests.runtime_proxy.docker.client import Docker

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Dockerd:
    """A running dockerd. `command` is the docker command line for another socket, or its own."""

    folder: Path
    programs: Path
    runtime: Containerd
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "docker.sock"

    def client(self, socket: Path | None = None) -> Docker:
        return Docker(socket or self.socket, image=IMAGE, timeout_s=60)

    def command(self, socket: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.programs / "usr/bin/docker"), "-H", f"unix://{socket}", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"HOME": str(self.folder), "PATH": os.environ.get("PATH", os.defpath)},
        )

    def start(self) -> None:
        folder = self.folder
        path = f"{self.runtime.binaries}:{self.runtime.runc.parent}"
        with (folder / "dockerd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *DIES_WITH_US, str(self.programs / "usr/sbin/dockerd"),
                    f"--config-file={folder}/daemon.json", f"--pidfile={folder}/dockerd.pid",
                    f"--data-root={folder}/data", f"--exec-root={folder}/exec",
                    f"--host=unix://{self.socket}", f"--containerd={self.runtime.socket}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": f"{path}:{os.environ.get('PATH', os.defpath)}"},
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = "\n".join((folder / "dockerd.log").read_text().splitlines()[-15:])
                raise BedError(f"dockerd did not start; its log ends:\n{tail}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            return self.client().ask("GET", "/_ping")[0] == 200
        except OSError:
            return False

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def remove_containers(self) -> None:
        client = self.client()
        for container in json.loads(client.ask("GET", "/containers/json?all=1")[1]):
            client.ask("DELETE", f"/containers/{container['Id']}?force=1&v=1")


@contextmanager
def dockerd() -> Iterator[Dockerd]:
    """A dockerd with the beds' image. Raises BedError with what was missing."""
    with ExitStack() as stack:
        programs = unpacked("docker.io", ("bookworm",))
        runtime = stack.enter_context(containerd("1.7"))
        folder = Path(tempfile.mkdtemp(prefix="koord-dockerd-"))
        stack.callback(_remove, folder)
        (folder / "daemon.json").write_text(
            json.dumps(
                {
                    # Beside the bed's kubepods: what is nobody's pod goes away with the bed too.
                    "cgroup-parent": f"{Path(runtime.groups.path).parent}/docker",
                    "bridge": "none",
                    "iptables": False,
                    "ip-forward": False,
                    "ip-masq": False,
                    "storage-driver": "vfs",
                    "exec-opts": ["native.cgroupdriver=cgroupfs"],
                }
            )
        )
        running = Dockerd(folder, programs, runtime)
        stack.callback(running.stop)
        running.start()
        stack.callback(_quietly_remove_containers, running)
        write_image(folder / "image.tar")
        loaded = running.command(running.socket, "load", "-i", str(folder / "image.tar"))
        if loaded.returncode != 0:
            raise BedError(f"dockerd refused the image: {loaded.stderr.strip()}")
        yield running


def _quietly_remove_containers(running: Dockerd) -> None:
    with suppress(OSError):
        running.remove_containers()


def _remove(folder: Path) -> None:
    """The folder, and the mounts that dockerd leaves in it (its network namespaces)."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed([each for each in mounts if each.startswith(f"{folder}/")]):
        subprocess.run(["umount", mount], check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
