"""systemd as another writer: it owns its units' attributes and puts its own view back.

A unit has properties; applying a unit writes, for every controller that one of its properties
needs, that controller's whole set of files, defaults included. So a value that somebody wrote
beside systemd lasts until the unit is applied again (`daemon-reload`, `set-property`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulated.kernel import SimulatedKernel

Properties = dict[str, int | str]
UNLIMITED = -1


def slice_path(name: str) -> str:
    """Where a slice lives: "a-b.slice" inside "a.slice"."""
    words = name.removesuffix(".slice").split("-")
    return "/".join("-".join(words[: end + 1]) + ".slice" for end in range(len(words)))


@dataclass
class Unit:
    name: str
    cgroup: str
    properties: Properties


@dataclass
class Systemd:
    """The units that it manages. Property names are systemd's, values plain numbers:

    CPUWeight (v2), CPUShares (v1), CPUQuotaUs and CPUPeriodUs, MemoryMax, MemoryMin, MemoryLow,
    MemoryHigh (bytes), AllowedCPUs and AllowedMemoryNodes (lists).
    """

    kernel: SimulatedKernel
    units: dict[str, Unit] = field(default_factory=dict)

    def start(self, name: str, *, parent: str = "", **properties: int | str) -> Unit:
        """Make a slice (its place follows from its name) or a scope in the slice `parent`."""
        path = slice_path(name) if name.endswith(".slice") else f"{slice_path(parent)}/{name}"
        unit = Unit(name, path, dict(properties))
        self.units[name] = unit
        self._make(unit)
        self._apply(unit)
        return unit

    def set_property(self, name: str, **properties: int | str) -> None:
        """`systemctl set-property`: changes the unit's view and applies it."""
        self.units[name].properties.update(properties)
        self._apply(self.units[name])

    def stop(self, name: str) -> None:
        """End the unit: its processes and its group."""
        unit = self.units.pop(name)
        self.kernel.remove_group(unit.cgroup)

    def daemon_reload(self) -> None:
        """`systemctl daemon-reload`: every unit is applied again."""
        for unit in list(self.units.values()):
            if self._exists(unit):
                self._apply(unit)

    def _bases(self) -> list[str]:
        if self.kernel.profile.cgroup == 2:
            return ["/sys/fs/cgroup"]
        return [f"/sys/fs/cgroup/{name}" for name in ("systemd", "cpu", "memory", "pids", "blkio")]

    def _exists(self, unit: Unit) -> bool:
        return self.kernel.is_dir(f"{self._bases()[0]}/{unit.cgroup}")

    def _make(self, unit: Unit) -> None:
        for base in self._bases():
            self.kernel.make(f"{base}/{unit.cgroup}")
        if self.kernel.profile.cgroup == 2:
            parts = unit.cgroup.split("/")
            for end in range(len(parts)):
                above = "/".join(["/sys/fs/cgroup", *parts[:end]])
                self._write(f"{above}/cgroup.subtree_control", "+cpuset +cpu +io +memory +pids")

    def _write(self, path: str, value: str) -> None:
        try:
            self.kernel.write_as("systemd", path, value)
        except OSError:
            # systemd logs and goes on; the next apply tries again.
            return

    def _apply(self, unit: Unit) -> None:
        wants = unit.properties
        if self.kernel.profile.cgroup == 2:
            base = f"/sys/fs/cgroup/{unit.cgroup}"
            if any(name.startswith("CPU") for name in wants):
                self._write(f"{base}/cpu.weight", str(wants.get("CPUWeight", 100)))
                quota = wants.get("CPUQuotaUs", UNLIMITED)
                period = wants.get("CPUPeriodUs", 100_000)
                self._write(f"{base}/cpu.max", f"{'max' if quota == UNLIMITED else quota} {period}")
            if any(name.startswith("Memory") for name in wants):
                for file, name in (("min", "MemoryMin"), ("low", "MemoryLow")):
                    self._write(f"{base}/memory.{file}", str(wants.get(name, 0)))
                for file, name in (("high", "MemoryHigh"), ("max", "MemoryMax")):
                    number = wants.get(name, UNLIMITED)
                    self._write(
                        f"{base}/memory.{file}", "max" if number == UNLIMITED else str(number)
                    )
            if "AllowedCPUs" in wants:
                self._write(f"{base}/cpuset.cpus", str(wants["AllowedCPUs"]))
            if "AllowedMemoryNodes" in wants:
                self._write(f"{base}/cpuset.mems", str(wants["AllowedMemoryNodes"]))
            return
        cpu, memory = f"/sys/fs/cgroup/cpu/{unit.cgroup}", f"/sys/fs/cgroup/memory/{unit.cgroup}"
        if any(name.startswith("CPU") for name in wants):
            self._write(f"{cpu}/cpu.shares", str(wants.get("CPUShares", 1024)))
            self._write(f"{cpu}/cpu.cfs_period_us", str(wants.get("CPUPeriodUs", 100_000)))
            self._write(f"{cpu}/cpu.cfs_quota_us", str(wants.get("CPUQuotaUs", UNLIMITED)))
        if "MemoryMax" in wants:
            self._write(f"{memory}/memory.limit_in_bytes", str(wants["MemoryMax"]))
