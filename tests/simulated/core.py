"""The files that every group has, whatever its controllers: tasks, and v2's delegation of
controllers.

Rules: writing a pid moves the process (`cgroup.procs`) or the thread (`tasks`); on v2 a group with
tasks hands no controllers down and a group that hands controllers down takes no tasks (the root is
excepted); a controller is enabled only where the parent has it and disabled only where no child
uses it.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from tests.simulated.tree import Cgroup, CgroupFile, Task
from tests.simulated.values import refuse, signed


@dataclass
class Limits:
    """`cgroup.max.depth` and `cgroup.max.descendants`; None is "max"."""

    depth: int | None = None
    descendants: int | None = None


@dataclass
class Flags:
    clone_children: int = 0
    notify_on_release: int = 0
    frozen: int = 0
    threaded: bool = False


def _pid(text: str) -> int:
    text = text.strip()
    if not re.fullmatch(r"\+?[0-9]+", text):
        refuse(errno.EINVAL, f"{text!r} is not a pid")
    number = int(text)
    if number >= 1 << 31:
        refuse(errno.EINVAL, "larger than 31 bits")
    return number


def _target(group: Cgroup, text: str) -> Task:
    pid = _pid(text)
    kernel = group.kernel
    task = kernel.tasks.get(pid if pid else kernel.own_pid)
    if task is None:
        refuse(errno.ESRCH, f"no task {pid}")
    return task


def _takes_processes(group: Cgroup) -> bool:
    """v2's "no internal processes": what a group hands down its own processes cannot share.

    Threaded controllers alone do not count, unless a child has processes already.
    """
    if group.hierarchy.version == 1 or group.is_root or not group.subtree_control:
        return True
    if not all(group.hierarchy.controllers[name].threaded for name in group.subtree_control):
        return False
    return not any(child.populated for child in group.children.values())


def _may_hand_down(group: Cgroup, enable: set[str]) -> bool:
    """Whether a group with processes of its own may enable these for its children."""
    if group.is_root:
        return True
    if not all(group.hierarchy.controllers[name].threaded for name in enable):
        return False
    return not any(child.populated for child in group.children.values())


def _attach(group: Cgroup, tasks: list[Task]) -> None:
    if not _takes_processes(group):
        refuse(errno.EBUSY, "no internal processes")
    for name in group.controllers:
        check = group.hierarchy.controllers[name].may_attach
        if check is not None:
            check(group, tasks)
    for task in tasks:
        group.kernel.move(group.hierarchy, task, group)


def _write_procs(group: Cgroup, text: str) -> None:
    leader = _target(group, text)
    _attach(group, group.kernel.threads_of(leader.tgid))


def _write_task(group: Cgroup, text: str) -> None:
    _attach(group, [_target(group, text)])


def _write_thread(group: Cgroup, text: str) -> None:
    task = _target(group, text)
    here = group.hierarchy.group_of(task)
    if here is not group:
        # Threads of one process may part only inside a threaded subtree.
        refuse(errno.EOPNOTSUPP, "not in a threaded subtree")


def _lines(numbers: list[int]) -> str:
    return "".join(f"{number}\n" for number in sorted(numbers))


def _read_procs(group: Cgroup) -> str:
    if group.hierarchy.version == 2 and group.state(Flags).threaded:
        refuse(errno.EOPNOTSUPP, "threaded")
    return _lines(list({task.tgid for task in group.tasks.values()}))


def _read_tasks(group: Cgroup) -> str:
    return _lines(list(group.tasks))


def _boolean(name: str) -> CgroupFile:
    def read(group: Cgroup) -> str:
        return f"{getattr(group.state(Flags), name)}\n"

    def write(group: Cgroup, text: str) -> None:
        setattr(group.state(Flags), name, int(bool(signed(text))))

    file_name = "cgroup.clone_children" if name == "clone_children" else name
    return CgroupFile(file_name, read, write)


V1_FILES = (
    CgroupFile("cgroup.procs", _read_procs, _write_procs),
    CgroupFile("tasks", _read_tasks, _write_task),
    _boolean("clone_children"),
    _boolean("notify_on_release"),
    CgroupFile("cgroup.sane_behavior", lambda group: "0\n", only_root=True),
    CgroupFile("release_agent", lambda group: "\n", only_root=True),
)


def _names(group: Cgroup, names: set[str]) -> str:
    ordered = [name for name in group.hierarchy.controllers if name in names]
    return " ".join(ordered) + "\n"


def _write_subtree_control(group: Cgroup, text: str) -> None:
    enable: set[str] = set()
    disable: set[str] = set()
    for word in text.split():
        sign, name = word[0], word[1:]
        if name not in group.hierarchy.controllers or sign not in "+-":
            refuse(errno.EINVAL, f"{word!r} names no controller")
        (enable if sign == "+" else disable).add(name)
        (disable if sign == "+" else enable).discard(name)
    enable -= group.subtree_control
    disable &= group.subtree_control
    for name in enable:
        if name not in group.controllers:
            refuse(errno.ENOENT, f"{name} is not available here")
    for name in disable:
        if any(name in child.subtree_control for child in group.children.values()):
            refuse(errno.EBUSY, f"a child hands {name} down")
    if enable and group.tasks and not _may_hand_down(group, enable):
        refuse(errno.EBUSY, "no internal processes")
    group.subtree_control |= enable
    group.subtree_control -= disable
    for child in group.children.values():
        for name in disable:
            child.forget(group.kernel.states_of(name))
        for name in enable:
            hook = group.hierarchy.controllers[name].created
            if hook is not None:
                hook(child)


def _limit(text: str) -> int | None:
    text = text.strip()
    if text == "max":
        return None
    number = signed(text)
    if number < 0 or number >= 1 << 31:
        refuse(errno.ERANGE)
    return number


def _limit_text(limit: int | None) -> str:
    return "max\n" if limit is None else f"{limit}\n"


def _set_depth(group: Cgroup, text: str) -> None:
    group.state(Limits).depth = _limit(text)


def _set_descendants(group: Cgroup, text: str) -> None:
    group.state(Limits).descendants = _limit(text)


def _freeze(group: Cgroup, text: str) -> None:
    number = signed(text.strip())
    if number not in (0, 1):
        refuse(errno.ERANGE)
    group.state(Flags).frozen = number


def _kill(group: Cgroup, text: str) -> None:
    if signed(text.strip()) != 1:
        refuse(errno.ERANGE)
    for below in group.walk():
        for pid in list(below.tasks):
            group.kernel.exit(pid)


def _events(group: Cgroup) -> str:
    return f"populated {int(group.populated)}\nfrozen {group.state(Flags).frozen}\n"


def _stat(group: Cgroup) -> str:
    return f"nr_descendants {sum(1 for _ in group.walk()) - 1}\nnr_dying_descendants 0\n"


def _set_type(group: Cgroup, text: str) -> None:
    if text.strip() != "threaded":
        refuse(errno.EINVAL)
    group.state(Flags).threaded = True


V2_FILES = (
    CgroupFile("cgroup.procs", _read_procs, _write_procs),
    CgroupFile("cgroup.threads", _read_tasks, _write_thread),
    CgroupFile("cgroup.controllers", lambda group: _names(group, group.controllers)),
    CgroupFile(
        "cgroup.subtree_control",
        lambda group: _names(group, group.subtree_control),
        _write_subtree_control,
    ),
    CgroupFile(
        "cgroup.type",
        lambda group: "threaded\n" if group.state(Flags).threaded else "domain\n",
        _set_type,
        on_root=False,
    ),
    CgroupFile("cgroup.events", _events, on_root=False),
    CgroupFile("cgroup.max.depth", lambda g: _limit_text(g.state(Limits).depth), _set_depth),
    CgroupFile(
        "cgroup.max.descendants",
        lambda g: _limit_text(g.state(Limits).descendants),
        _set_descendants,
    ),
    CgroupFile("cgroup.stat", _stat),
    CgroupFile("cgroup.freeze", lambda g: f"{g.state(Flags).frozen}\n", _freeze, on_root=False),
    CgroupFile("cgroup.kill", None, _kill, on_root=False, since=(5, 14)),
)
