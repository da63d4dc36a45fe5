"""A private containerd: everything it has lives in one folder that goes away with it.

Two generations, both of Debian's packages: "1.7" carries NRI 0.6 (off by default there, on here)
and "2.1" carries NRI 0.8. Instances stand side by side. At the end the pods are removed over CRI
first, because containerd's shims outlive it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc

from tests.beds.cri import Cri, connected
from tests.beds.errors import BedError
from tests.beds.groups import Kubepods, kubepods, owner_lives
from tests.beds.image import IMAGE, SANDBOX_IMAGE, write_image
from tests.beds.packages import DIES_WITH_US, unpacked

Generation = Literal["1.7", "2.1"]
GENERATIONS: tuple[Generation, ...] = ("1.7", "2.1")
_SUITES: dict[Generation, tuple[str, ...]] = {"1.7": ("trixie",), "2.1": ("forky", "sid")}
_RUNC_SUITES = ("bookworm",)  # later ones want a newer libc than Debian 12 has
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Containerd:
    """A running containerd. `restart` and `kill` are what a test does to it."""

    generation: Generation
    folder: Path
    groups: Kubepods
    binaries: Path
    runc: Path
    _process: subprocess.Popen[bytes] | None = field(default=None)
    _connection: ExitStack = field(default_factory=ExitStack)
    _client: Cri | None = field(default=None)

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def nri_socket(self) -> Path:
        return self.folder / "nri.sock"

    @property
    def logs(self) -> Path:
        """Where the pods' own logs go."""
        return self.folder / "pods"

    @property
    def cri(self) -> Cri:
        if self._client is None:
            raise BedError("containerd is not running")
        return self._client

    def start(self) -> None:
        environment = {
            "PATH": f"{self.binaries}:{self.runc.parent}:{os.environ.get('PATH', os.defpath)}",
            "TMPDIR": str(self.folder / "tmp"),
        }
        with self._log().open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *DIES_WITH_US,
                    str(self.binaries / "containerd"),
                    "--config",
                    str(self.folder / "config.toml"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # Its own session: a Ctrl-C at the terminal reaches the bed, which cleans up.
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (self.socket.exists() and self._answers()):
            if self._process.poll() is not None:
                raise self._failed(f"ended with status {self._process.returncode}")
            if time.monotonic() > deadline:
                raise self._failed(f"did not serve CRI within {_START_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    def _answers(self) -> bool:
        if self._client is None:
            try:
                self._client = self._connection.enter_context(connected(self.socket, timeout_s=1.0))
            except BedError:
                return False
        try:
            self._client.version()
        except grpc.RpcError:
            return False
        return True

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End containerd; its shims and the pods in them go on."""
        self._connection.close()
        self._client = None
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
        self._process = None

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.stop(how)
        self.socket.unlink(missing_ok=True)
        self.start()

    def log_tail(self, lines: int = 25) -> str:
        if not self._log().exists():
            return "(no log)"
        return "\n".join(self._log().read_text(errors="replace").splitlines()[-lines:])

    def _log(self) -> Path:
        return self.folder / "containerd.log"

    def _failed(self, what: str) -> BedError:
        return BedError(f"containerd {self.generation} {what}; its log ends:\n{self.log_tail()}")

    def import_image(self, archive: Path) -> None:
        command = [str(self.binaries / "ctr"), "-a", str(self.socket), "-n", "k8s.io"]
        done = subprocess.run(
            [*command, "images", "import", str(archive)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode != 0:
            raise self._failed(f"refused the image: {done.stderr.strip()}")
        deadline = time.monotonic() + 10
        while not all(self.cri.has_image(name) for name in (IMAGE, SANDBOX_IMAGE)):
            if time.monotonic() > deadline:
                raise self._failed("imported the image but does not show it over CRI")
            time.sleep(0.02)

    def remove_pods(self) -> None:
        for sandbox in self.cri.sandboxes():
            self.cri.remove_sandbox(sandbox.id)


def configuration(
    generation: Generation,
    folder: Path,
    runc: Path,
    *,
    nri_request_timeout: str = "2s",
) -> str:
    """containerd's config.toml with every path under `folder`."""
    common = f"""
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = [{", ".join(f'"{plugin}"' for plugin in _UNUSED_PLUGINS)}]

[grpc]
  address = "{folder}/containerd.sock"

[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"

[plugins."io.containerd.nri.v1.nri"]
  disable = false
  disable_connections = false
  socket_path = "{folder}/nri.sock"
  plugin_path = "{folder}/nri/plugins"
  plugin_config_path = "{folder}/nri/conf.d"
  plugin_registration_timeout = "5s"
  plugin_request_timeout = "{nri_request_timeout}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
"""
    runtime = f"""
      default_runtime_name = "runc"
      [{{table}}.containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"
        [{{table}}.containerd.runtimes.runc.options]
          BinaryName = "{runc}"
          Root = "{folder}/runc"
          SystemdCgroup = false
    [{{table}}.cni]
      bin_dir = "{folder}/cni/bin"
      conf_dir = "{folder}/cni/conf.d"
"""
    switches = f"""
    restrict_oom_score_adj = {str(not _may_lower_oom_score()).lower()}
    disable_apparmor = true
"""
    if generation == "1.7":
        table = 'plugins."io.containerd.grpc.v1.cri"'
        return (
            "version = 2\n"
            + common
            + f"""
[{table}]
    sandbox_image = "{SANDBOX_IMAGE}"
    stream_server_address = "127.0.0.1"
    stream_server_port = "0"
{switches}
    [{table}.containerd]
{runtime.format(table=table)}
"""
        )
    table = 'plugins."io.containerd.cri.v1.runtime"'
    return (
        "version = 3\n"
        + common
        + f"""
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{SANDBOX_IMAGE}"

[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"

[{table}]
{switches}
    [{table}.containerd]
{runtime.format(table=table)}
"""
    )


# Snapshotters and services that a bed has no use for; each costs time at start.
_UNUSED_PLUGINS = (
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.internal.v1.tracing",
    "io.containerd.tracing.processor.v1.otlp",
)


def _may_lower_oom_score() -> bool:
    """Whether this process has CAP_SYS_RESOURCE, without which oom_score_adj only goes up."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & 1 << 24)
    return False


@contextmanager
def containerd(
    generation: Generation = "2.1", *, nri_request_timeout: str = "2s"
) -> Iterator[Containerd]:
    """A containerd with the image, ready for pods, and the cgroups to put them in.

    Raises BedError, with what was missing or the end of containerd's log, if it cannot be had.
    """
    if os.geteuid() != 0:
        raise BedError("containerd needs root: run this with sudo")
    binaries = unpacked("containerd", _SUITES[generation]) / "usr" / "bin"
    runc = unpacked("runc", _RUNC_SUITES) / "usr" / "sbin" / "runc"
    _check_generation(binaries / "containerd", generation)
    _remove_what_dead_beds_left()
    with ExitStack() as stack:
        groups = stack.enter_context(kubepods())
        # Short: a unix socket's path has room for 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix=f"koord-bed-{os.getpid()}-"))
        stack.callback(_remove_folder, folder)
        for name in ("tmp", "pods", "nri/plugins", "nri/conf.d", "cni/bin", "cni/conf.d"):
            (folder / name).mkdir(parents=True)
        (folder / "config.toml").write_text(
            configuration(generation, folder, runc, nri_request_timeout=nri_request_timeout)
        )
        runtime = Containerd(generation, folder, groups, binaries, runc)
        stack.callback(_end, runtime)
        runtime.start()
        archive = folder / "image.tar"
        write_image(archive)
        runtime.import_image(archive)
        archive.unlink()
        yield runtime


def _check_generation(binary: Path, generation: Generation) -> None:
    done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False)
    version = done.stdout.split()[2].lstrip("v") if len(done.stdout.split()) > 2 else done.stderr
    if not version.startswith(f"{generation}."):
        raise BedError(
            f"Debian {'/'.join(_SUITES[generation])} has containerd {version} by now, "
            f"and this bed is for {generation}"
        )


def _end(runtime: Containerd) -> None:
    """Pods, then containerd, then whatever shims are left: ours alone, known by our address."""
    try:
        if runtime._client is None:
            with contextlib.suppress(BedError):
                runtime.stop()
                runtime.start()
        if runtime._client is not None:
            with contextlib.suppress(grpc.RpcError):
                runtime.remove_pods()
    finally:
        runtime.stop()
        _end_shims(runtime.socket)


def _remove_what_dead_beds_left() -> None:
    """A bed that was killed outright could not clean up; its containerd died with it."""
    for folder in Path(tempfile.gettempdir()).glob("koord-bed-*-*"):
        if not owner_lives(folder.name):
            _end_shims(folder / "containerd.sock")
            _remove_folder(folder)


def _end_shims(address: Path) -> None:
    for pid in _shims(address):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _shims(address: Path) -> list[int]:
    """Shims that were started for this socket, which no other containerd has."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"containerd-shim" in words[0] and os.fsencode(address) in words:
            found.append(int(folder.name))
    return found


def _remove_folder(folder: Path) -> None:
    """Detach what is still mounted below the folder (deepest first), then delete it."""
    with open("/proc/self/mounts") as mounts:
        below = [line.split()[1] for line in mounts if line.split()[1].startswith(f"{folder}/")]
    for mount in sorted(below, key=len, reverse=True):
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
    shutil.rmtree(folder)
