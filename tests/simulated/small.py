"""Controllers of which only a little is needed: pids, io and blkio, hugetlb, net_cls; and PSI."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulated.profiles import Feature
from tests.simulated.tree import Cgroup, CgroupFile, Controller, Task
from tests.simulated.values import U64_MAX, refuse, unsigned


@dataclass
class SmallState:
    pids_max: int | None = None
    classid: int = 0
    io_max: dict[str, dict[str, int]] = field(default_factory=dict)
    io_weight: dict[str, int] = field(default_factory=lambda: {"default": 100})
    throttle: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Pressure:
    """Totals in microseconds and averages in percent, set by a test."""

    some: dict[str, tuple[float, float, float, int]] = field(default_factory=dict)
    full: dict[str, tuple[float, float, float, int]] = field(default_factory=dict)


def pressure_text(group: Cgroup, resource: str) -> str:
    """One PSI file. Before 5.13 `cpu` has no `full` line."""
    zero = (0.0, 0.0, 0.0, 0)
    state = group.state(Pressure)
    kinds = [("some", state.some)]
    if resource != "cpu" or group.kernel.profile.kernel >= (5, 13):
        kinds.append(("full", state.full))
    text = ""
    for name, values in kinds:
        avg10, avg60, avg300, total = values.get(resource, zero)
        text += f"{name} avg10={avg10:.2f} avg60={avg60:.2f} avg300={avg300:.2f} total={total}\n"
    return text


def _psi_reader(resource: str) -> Callable[[Cgroup], str]:
    return lambda group: pressure_text(group, resource)


PSI_FILES = tuple(
    CgroupFile(f"{resource}.pressure", _psi_reader(resource), feature=Feature.PSI)
    for resource in ("cpu", "memory", "io")
)


def _write_pids(group: Cgroup, text: str) -> None:
    text = text.strip()
    if text == "max":
        group.state(SmallState).pids_max = None
        return
    number = unsigned(text)
    if number > 1 << 22:
        refuse(errno.EINVAL)
    group.state(SmallState).pids_max = number


def _read_pids(group: Cgroup) -> str:
    limit = group.state(SmallState).pids_max
    return "max\n" if limit is None else f"{limit}\n"


def _count_pids(group: Cgroup) -> str:
    return f"{sum(len(below.tasks) for below in group.walk())}\n"


def _pids_attach(group: Cgroup, tasks: list[Task]) -> None:
    """Moving a task over the limit is allowed; only fork is refused."""


_PIDS_FILES = (
    CgroupFile("pids.max", _read_pids, _write_pids, on_root=False),
    CgroupFile("pids.current", _count_pids, on_root=False),
)
PIDS = Controller("pids", v1=_PIDS_FILES, v2=_PIDS_FILES, may_attach=_pids_attach, threaded=True)


def _device(group: Cgroup, name: str) -> str:
    if not re.fullmatch(r"[0-9]+:[0-9]+", name):
        refuse(errno.EINVAL, f"{name!r} is not a device number")
    if name not in group.kernel.disks:
        refuse(errno.ENODEV, f"no whole disk {name}")
    return name


IO_MAX_KEYS = ("rbps", "wbps", "riops", "wiops")


def _write_io_max(group: Cgroup, text: str) -> None:
    words = text.split()
    if not words:
        refuse(errno.EINVAL)
    device = _device(group, words[0])
    limits = dict(group.state(SmallState).io_max.get(device, {}))
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key not in IO_MAX_KEYS:
            refuse(errno.EINVAL, f"{key!r} is not a limit of io.max")
        number = U64_MAX if value == "max" else unsigned(value)
        if number == 0:
            refuse(errno.ERANGE)
        if number == U64_MAX:
            limits.pop(key, None)
        else:
            limits[key] = number
    group.state(SmallState).io_max[device] = limits
    if not limits:
        del group.state(SmallState).io_max[device]


def _read_io_max(group: Cgroup) -> str:
    text = ""
    for device, limits in group.state(SmallState).io_max.items():
        parts = [f"{key}={limits.get(key, 'max')}" for key in IO_MAX_KEYS]
        text += f"{device} {' '.join(parts)}\n"
    return text


def _write_io_weight(group: Cgroup, text: str) -> None:
    words = text.split()
    weights = group.state(SmallState).io_weight
    if len(words) == 1:
        words = ["default", words[0]]
    if len(words) != 2:
        refuse(errno.EINVAL)
    target = words[0] if words[0] == "default" else _device(group, words[0])
    if words[1] == "default" and target != "default":
        weights.pop(target, None)
        return
    weight = unsigned(words[1])
    if not 1 <= weight <= 10_000:
        refuse(errno.ERANGE)
    weights[target] = weight


def _read_io_weight(group: Cgroup) -> str:
    weights = group.state(SmallState).io_weight
    return "".join(f"{target} {weight}\n" for target, weight in weights.items())


IO = Controller(
    "io",
    v2=(
        CgroupFile("io.max", _read_io_max, _write_io_max, on_root=False),
        CgroupFile("io.weight", _read_io_weight, _write_io_weight, on_root=False),
        CgroupFile("io.stat", lambda group: ""),
    ),
)


def _throttle(name: str) -> CgroupFile:
    def write(group: Cgroup, text: str) -> None:
        words = text.split()
        if len(words) != 2:
            refuse(errno.EINVAL)
        device = _device(group, words[0])
        number = unsigned(words[1])
        table = group.state(SmallState).throttle.setdefault(name, {})
        if number:
            table[device] = number
        else:
            table.pop(device, None)

    def read(group: Cgroup) -> str:
        table = group.state(SmallState).throttle.get(name, {})
        return "".join(f"{device} {number}\n" for device, number in table.items())

    return CgroupFile(f"blkio.throttle.{name}_device", read, write)


BLKIO = Controller(
    "blkio",
    v1=tuple(_throttle(name) for name in ("read_bps", "write_bps", "read_iops", "write_iops")),
)


def _write_classid(group: Cgroup, text: str) -> None:
    number = unsigned(text)
    group.state(SmallState).classid = number & 0xFFFFFFFF


NET_CLS = Controller(
    "net_cls",
    v1=(
        CgroupFile(
            "net_cls.classid", lambda group: f"{group.state(SmallState).classid}\n", _write_classid
        ),
    ),
)
HUGETLB = Controller("hugetlb")
PERF_EVENT = Controller("perf_event")
FREEZER = Controller("freezer")
DEVICES = Controller("devices")
