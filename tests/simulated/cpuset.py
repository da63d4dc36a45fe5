"""The cpuset controller.

v1: a new group has no CPUs and takes no tasks; a group stays inside its parent (EACCES) and around
its children (EBUSY); it cannot become empty while it has tasks (ENOSPC). v2: any list of possible
CPUs is taken; what counts is `effective`, the part that the parent has too, or all of the parent's;
but a list that was set cannot be cleared while there are tasks.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Literal

from tests.simulated.tree import Cgroup, CgroupFile, Controller, Task
from tests.simulated.values import bit_list, list_text, refuse, signed

Kind = Literal["cpus", "mems"]
EMPTY: frozenset[int] = frozenset()
POSSIBLE_NODES = 1024  # MAX_NUMNODES of distribution kernels


@dataclass
class CpusetState:
    cpus: frozenset[int] = EMPTY
    mems: frozenset[int] = EMPTY
    cpu_exclusive: int = 0
    flags: dict[str, int] = field(default_factory=dict)

    def of(self, kind: Kind) -> frozenset[int]:
        return self.cpus if kind == "cpus" else self.mems

    def put(self, kind: Kind, members: frozenset[int]) -> None:
        if kind == "cpus":
            self.cpus = members
        else:
            self.mems = members


def _top(group: Cgroup, kind: Kind) -> frozenset[int]:
    return group.kernel.online_cpus if kind == "cpus" else group.kernel.online_nodes


def configured(group: Cgroup, kind: Kind) -> frozenset[int]:
    """What the group's own file says; the root says what is online."""
    if group.is_root:
        return _top(group, kind)
    return group.state(CpusetState).of(kind)


def effective(group: Cgroup, kind: Kind) -> frozenset[int]:
    """What tasks of the group may use now."""
    if group.parent is None:
        return _top(group, kind)
    above = effective(group.parent, kind)
    if group.hierarchy.version == 2 and "cpuset" not in group.controllers:
        return above
    return (configured(group, kind) & above) or above


def _parse(group: Cgroup, kind: Kind, text: str) -> frozenset[int]:
    if kind == "mems":
        return bit_list(text, POSSIBLE_NODES)
    return bit_list(text, group.kernel.possible_cpus)


def _write(group: Cgroup, kind: Kind, text: str) -> None:
    if group.is_root:
        refuse(errno.EACCES, "the root's set is what is online")
    wanted = _parse(group, kind, text)
    state = group.state(CpusetState)
    if group.hierarchy.version == 1:
        known = _top(group, kind)
    elif kind == "mems":
        known = group.kernel.online_nodes
    else:
        known = frozenset(range(group.kernel.possible_cpus))
    if not wanted <= known:
        refuse(errno.EINVAL, "names something that is not there")
    if wanted == state.of(kind):
        return
    if group.hierarchy.version == 1:
        _check_v1(group, kind, wanted)
    if group.populated and state.of(kind) and not wanted:
        refuse(errno.ENOSPC, "the group has tasks")
    state.put(kind, wanted)


def _check_v1(group: Cgroup, kind: Kind, wanted: frozenset[int]) -> None:
    for child in group.children.values():
        if not configured(child, kind) <= wanted:
            refuse(errno.EBUSY, f"{child.path} has more")
    assert group.parent is not None
    if not wanted <= configured(group.parent, kind):
        refuse(errno.EACCES, "the parent has less")
    for sibling in group.parent.children.values():
        if sibling is group or kind == "mems":
            continue
        exclusive = (
            sibling.state(CpusetState).cpu_exclusive or group.state(CpusetState).cpu_exclusive
        )
        if exclusive and configured(sibling, kind) & wanted:
            refuse(errno.EINVAL, f"overlaps with {sibling.path}")


def _may_attach(group: Cgroup, tasks: list[Task]) -> None:
    if group.hierarchy.version == 1 and not (
        configured(group, "cpus") and configured(group, "mems")
    ):
        refuse(errno.ENOSPC, "the group has no CPUs or no memory nodes")


def _created(group: Cgroup) -> None:
    from tests.simulated.core import Flags

    if group.hierarchy.version == 1 and group.parent is not None:
        parent = group.parent
        clone = parent.state(Flags).clone_children
        group.state(Flags).clone_children = clone
        if clone:
            state = group.state(CpusetState)
            state.cpus, state.mems = configured(parent, "cpus"), configured(parent, "mems")


def _resmask(kind: Kind, *, on_root: bool) -> CgroupFile:
    def read(group: Cgroup) -> str:
        return list_text(configured(group, kind)) + "\n"

    def write(group: Cgroup, text: str) -> None:
        _write(group, kind, text)

    return CgroupFile(f"cpuset.{kind}", read, write, on_root=on_root)


def _effective(name: str, kind: Kind) -> CgroupFile:
    return CgroupFile(name, lambda group: list_text(effective(group, kind)) + "\n")


def _flag(name: str, default: int) -> CgroupFile:
    def read(group: Cgroup) -> str:
        return f"{group.state(CpusetState).flags.get(name, default)}\n"

    def write(group: Cgroup, text: str) -> None:
        group.state(CpusetState).flags[name] = int(bool(signed(text)))

    return CgroupFile(f"cpuset.{name}", read, write)


def _write_exclusive(group: Cgroup, text: str) -> None:
    wanted = int(bool(signed(text)))
    if wanted and group.parent is not None:
        if not group.parent.is_root and not group.parent.state(CpusetState).cpu_exclusive:
            refuse(errno.EACCES, "the parent is not exclusive")
        for sibling in group.parent.children.values():
            if sibling is not group and configured(sibling, "cpus") & configured(group, "cpus"):
                refuse(errno.EINVAL, f"overlaps with {sibling.path}")
    group.state(CpusetState).cpu_exclusive = wanted


def _partition_write(group: Cgroup, text: str) -> None:
    # Partitions beyond "member" are not simulated: nothing of ours makes one.
    if text.strip() != "member":
        refuse(errno.EINVAL)


CPUSET = Controller(
    "cpuset",
    v1=(
        _resmask("cpus", on_root=True),
        _resmask("mems", on_root=True),
        _effective("cpuset.effective_cpus", "cpus"),
        _effective("cpuset.effective_mems", "mems"),
        CgroupFile(
            "cpuset.cpu_exclusive",
            lambda group: f"{group.state(CpusetState).cpu_exclusive if not group.is_root else 1}\n",
            _write_exclusive,
        ),
        _flag("memory_migrate", 0),
        _flag("sched_load_balance", 1),
    ),
    v2=(
        _resmask("cpus", on_root=False),
        _resmask("mems", on_root=False),
        _effective("cpuset.cpus.effective", "cpus"),
        _effective("cpuset.mems.effective", "mems"),
        CgroupFile(
            "cpuset.cpus.partition", lambda group: "member\n", _partition_write, on_root=False
        ),
    ),
    created=_created,
    may_attach=_may_attach,
    threaded=True,
)
