"""A booted machine: QEMU as a child process, its console as text, its results as files.

QEMU emulates in software (no KVM), so a boot takes tens of seconds. The console is watched while it
grows: a kernel panic, an emergency shell or a silent boot ends the wait with the reason and the
console's end. A `Disk` keeps what a run wrote, for a machine that loses its power and comes back.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.beds.packages import DIES_WITH_US
from tests.vm.image import CACHE, Image, Kernel, built, write_payload
from tests.vm.topology import TOPOLOGIES, Topology

BOOT_TIMEOUT_S = 120.0
STILL_S = 240.0
"""Chosen: the session says every 20 s that it runs. A machine that said nothing for so long did not
recover within 15 minutes either; at twice the value a run loses four minutes more."""
_RESULT_BYTES = 64 << 20
_IO_DISKS = 2
_IO_BYTES = 64 << 20
"""/dev/vdd and /dev/vde, for tests of block I/O: they read as zeros and lose what is written, so
they answer at once, and what the host's disk does shows in no test."""
_TROUBLE = re.compile(
    r"Kernel panic|KOORD-VM: failed|emergency mode|You are in rescue mode"
    r"|Out of memory and no killable"
)
# Shows SMT and L3 to the guest, has what NumPy is built for (x86-64-v2), and asks little that
# software emulation lacks.
_CPU = "Nehalem,l3-cache=on"
# Feature 141 is cmpxchg16b, which x86-64-v2 includes. Emulated, it spoils the flags now and then,
# which ends the guest in a panic in the slab allocator; programs still find it.
_KERNEL_ARGUMENTS = (
    "console=ttyS0", "loglevel=4", "psi=1", "panic=-1", "mitigations=off", "nokaslr",
    "systemd.unit=koord.target", "systemd.unified_cgroup_hierarchy=1", "cgroup_no_v1=all",
    "systemd.show_status=1", "random.trust_cpu=on", "net.ifnames=0", "audit=0", "apparmor=0",
    "selinux=0", "nowatchdog", "no_timer_check", "clearcpuid=141",
)  # fmt: skip


class BootError(Exception):
    """The machine did not come up, or died; the text says why and shows the console's end."""


class StoodStillError(BootError):
    """The emulator stopped executing the guest: no line came, not even the sign of life."""


@dataclass
class Machine:
    """A running machine. `console` grows while it runs."""

    process: subprocess.Popen[bytes]
    log: Path
    results_disk: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def console(self) -> str:
        return self.log.read_bytes().decode("utf-8", "replace").replace("\r", "")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.console.splitlines()[-lines:])

    def wait_for(
        self, pattern: str, timeout_s: float, *, still_s: float = math.inf
    ) -> re.Match[str]:
        """Wait until the console matches; BootError on trouble, an early end or the timeout.

        still_s: StoodStillError when the console has not grown for so long.
        """
        deadline = time.monotonic() + timeout_s
        size, grew = -1, time.monotonic()
        while True:
            ended = self.process.poll() is not None
            text = self.console
            if len(text) != size:
                size, grew = len(text), time.monotonic()
            if (match := re.search(pattern, text)) is not None:
                return match
            if (trouble := _TROUBLE.search(text)) is not None:
                time.sleep(1)
                raise self._failed(f"says {trouble.group()!r}")
            if ended:
                raise self._failed(f"ended with status {self.process.returncode}")
            if time.monotonic() - grew > still_s:
                raise StoodStillError(f"the machine stood still; its console ends:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise self._failed(f"did not say {pattern!r} within {timeout_s:.0f} s")
            time.sleep(0.1)

    def _failed(self, what: str) -> BootError:
        return BootError(f"the machine {what}; its console ends:\n{self.tail()}")

    def power_cut(self) -> None:
        """End the machine at once, as a lost power supply does."""
        self.process.kill()
        self.process.wait(10)

    def finish(self, timeout_s: float) -> int:
        """Wait for the session's end; its exit status. Raises StoodStillError and BootError."""
        match = self.wait_for(r"KOORD-VM: exit (\d+)", timeout_s, still_s=STILL_S)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.power_cut()
        return int(match.group(1))

    def fetch_results(self, into: Path) -> None:
        """Unpack what the session saved."""
        with tarfile.open(self.results_disk) as archive:
            archive.extractall(into, filter="data")


@dataclass(frozen=True, slots=True)
class Session:
    """What to run inside, and the environment that it gets."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def json(self) -> str:
        return json.dumps({"command": self.command, "environment": self.environment})


def pytest_session(*arguments: str) -> Session:
    """Run pytest with these arguments inside; its JUnit file comes back as junit.xml."""
    return Session(
        (
            "/usr/bin/python3", "-m", "pytest", "-p", "no:cacheprovider",
            "--junitxml=/run/koord-results/junit.xml", *arguments,
        )
    )  # fmt: skip


@contextmanager
def booted(
    session: Session,
    *,
    topology: Topology = TOPOLOGIES["2s2c2t"],
    kernel: Kernel = "bookworm",
    disk: Path | None = None,
) -> Iterator[Machine]:
    """Boot a machine that runs the session; it is gone at the end of the block.

    disk: a copy of the image's disk (see `private_disk`) that keeps what is written to it.
    """
    if shutil.which("qemu-system-x86_64") is None:
        raise BootError("qemu-system-x86_64 is not installed: apt-get install qemu-system-x86")
    image = built(kernel)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="run-") as scratch:
        folder = Path(scratch)
        write_payload(folder / "payload.ext4", session.json())
        results = folder / "results.tar"
        with results.open("wb") as file:
            file.truncate(_RESULT_BYTES)
        log = folder / "console.txt"
        log.touch()
        command = _qemu(image, topology, folder, log, disk)
        with (folder / "qemu.txt").open("wb") as errors:
            process = subprocess.Popen(
                [*DIES_WITH_US, *command],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        machine = Machine(process, log, results)
        try:
            try:
                machine.wait_for(r"KOORD-VM: session", BOOT_TIMEOUT_S)
            except BootError as error:
                said = (folder / "qemu.txt").read_text(errors="replace").strip()
                raise BootError(f"{error}\nQEMU said: {said[-1000:] or 'nothing'}") from None
            yield machine
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)


@contextmanager
def private_disk(kernel: Kernel = "bookworm") -> Iterator[Path]:
    """A copy of the image's disk that survives a power cut, for several boots in a row."""
    image = built(kernel)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="disk-") as scratch:
        copy = Path(scratch) / "disk.ext4"
        subprocess.run(
            ["cp", "--sparse=always", str(image.disk), str(copy)], check=True, timeout=120
        )
        yield copy


def _qemu(
    image: Image, topology: Topology, folder: Path, log: Path, disk: Path | None
) -> list[str]:
    snapshot = "on" if disk is None else "off"
    drives = (
        (disk or image.disk, snapshot),
        (folder / "payload.ext4", "off"),
        (folder / "results.tar", "off"),
    )
    command = [
        "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", _CPU,
        *topology.qemu(), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-serial", f"file:{log}", "-kernel", str(image.kernel), "-initrd", str(image.initramfs),
        "-append", " ".join(_KERNEL_ARGUMENTS), "-device", "virtio-rng-pci",
    ]  # fmt: skip
    for number, (path, keep) in enumerate(drives):
        # A power cut must lose what the guest had not flushed: no write-through.
        command += ["-drive", f"id=d{number},file={path},format=raw,if=none,snapshot={keep}"]
        command += ["-device", f"virtio-blk-pci,drive=d{number}"]
    for number in range(_IO_DISKS):
        disk_of_zeros = f"null-co,node-name=io{number},size={_IO_BYTES},read-zeroes=on"
        command += ["-blockdev", disk_of_zeros]
        command += ["-device", f"virtio-blk-pci,drive=io{number}"]
    return command
