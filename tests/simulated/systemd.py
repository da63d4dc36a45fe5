"""systemd as another writer: it owns its units' attributes and puts its own view back.

What systemd 252 does was watched in the virtual machine: `daemon-reload` writes, for every slice
and scope, also delegated ones, `cpu.idle`, `cpu.weight`, `cpu.max`, `memory.min`, `low`, `high`,
`max` and `oom.group`, with the defaults where the unit says nothing. It leaves `cpu.max.burst` and,
unless the unit names CPUs, `cpuset.cpus` alone. `set-property` of any property writes the same
files, of that unit alone. Starting a unit below a slice that has others writes nothing to that
slice. The first unit below a slice, and the end of the last one, reset the slice too, and with it
`cpuset.cpus`. That was watched on cgroup v2 only, and only there it is done here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulated.kernel import SimulatedKernel

Properties = dict[str, int | str]
UNLIMITED = -1
_CONTROLLERS = ("cpu", "memory", "cpuset")


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
        for above in self._without_units_below(path):
            self._reset(above)
        unit = Unit(name, path, dict(properties))
        self.units[name] = unit
        self._make(unit)
        for controller in _CONTROLLERS:
            self._apply(unit, controller)
        return unit

    def set_property(self, name: str, **properties: int | str) -> None:
        """`systemctl set-property`: changes the unit's view and applies all of it."""
        self.units[name].properties.update(properties)
        for controller in _CONTROLLERS:
            self._apply(self.units[name], controller)

    def stop(self, name: str) -> None:
        """End the unit and those below it: their processes and their groups."""
        cgroup = self.units[name].cgroup
        for other in list(self.units.values()):
            if other.cgroup == cgroup or other.cgroup.startswith(f"{cgroup}/"):
                del self.units[other.name]
        self.kernel.remove_group(cgroup)
        for above in self._without_units_below(cgroup)[:1]:
            self._reset(above)

    def daemon_reload(self) -> None:
        """`systemctl daemon-reload`: every unit is applied again."""
        for unit in list(self.units.values()):
            if self._exists(unit):
                for controller in _CONTROLLERS:
                    self._apply(unit, controller)

    def _without_units_below(self, cgroup: str) -> list[Unit]:
        """Return the units above a group that have no unit below them, the nearest one first."""
        cgroups = [unit.cgroup for unit in self.units.values()]
        return [
            unit
            for unit in sorted(self.units.values(), key=lambda unit: len(unit.cgroup), reverse=True)
            if cgroup.startswith(f"{unit.cgroup}/")
            and not any(one.startswith(f"{unit.cgroup}/") for one in cgroups)
        ]

    def _reset(self, unit: Unit) -> None:
        """What the first group below a slice does to it, and the end of the last one."""
        if self.kernel.profile.cgroup != 2 or not self._exists(unit):
            return
        for controller in _CONTROLLERS:
            self._apply(unit, controller)
        cpus = unit.properties.get("AllowedCPUs", "")
        self._write(f"/sys/fs/cgroup/{unit.cgroup}/cpuset.cpus", f"{cpus}\n")

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

    def _apply(self, unit: Unit, controller: str) -> None:
        if self.kernel.profile.cgroup == 2:
            values = _files_v2(unit.properties)[controller]
            base = f"/sys/fs/cgroup/{unit.cgroup}"
        else:
            values = _files_v1(unit.properties)[controller]
            base = f"/sys/fs/cgroup/{controller}/{unit.cgroup}"
        for file, value in values.items():
            self._write(f"{base}/{file}", str(value))


def _or_max(properties: Properties, name: str) -> int | str:
    value = properties.get(name, UNLIMITED)
    return "max" if value == UNLIMITED else value


def _files_v2(unit: Properties) -> dict[str, dict[str, int | str]]:
    """Controller -> file -> what systemd writes. A refused write is logged and left."""
    cpuset = {"cpuset.cpus": "AllowedCPUs", "cpuset.mems": "AllowedMemoryNodes"}
    return {
        "cpu": {
            "cpu.idle": 0,
            "cpu.weight": unit.get("CPUWeight", 100),
            "cpu.max": f"{_or_max(unit, 'CPUQuotaUs')} {unit.get('CPUPeriodUs', 100_000)}",
        },
        "memory": {
            "memory.min": unit.get("MemoryMin", 0),
            "memory.low": unit.get("MemoryLow", 0),
            "memory.high": _or_max(unit, "MemoryHigh"),
            "memory.max": _or_max(unit, "MemoryMax"),
            "memory.oom.group": 0,
        },
        "cpuset": {file: unit[name] for file, name in cpuset.items() if name in unit},
    }


def _files_v1(unit: Properties) -> dict[str, dict[str, int | str]]:
    return {
        "cpu": {
            "cpu.shares": unit.get("CPUShares", 1024),
            "cpu.cfs_period_us": unit.get("CPUPeriodUs", 100_000),
            "cpu.cfs_quota_us": unit.get("CPUQuotaUs", UNLIMITED),
        },
        "memory": {"memory.limit_in_bytes": unit.get("MemoryMax", UNLIMITED)},
        "cpuset": {},
    }
