"""Controllers of which only a little is needed: pids, hugetlb, net_cls; and PSI."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulated.profiles import Feature
from tests.simulated.tree import Cgroup, CgroupFile, Controller, Task
from tests.simulated.values import refuse, unsigned


@dataclass
class SmallState:
    pids_max: int | None = None
    classid: int = 0


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
