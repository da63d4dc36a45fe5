"""Groups, tasks and hierarchies: what every controller's rules stand on.

A `Hierarchy` is one mounted tree of groups with the controllers attached to it: on v1 one for each
mounted set of controllers, on v2 a single one. A `CgroupFile` is a name and two functions: what
reading and writing does. The controllers (cpu.py, cpuset.py, memory.py ...) are lists of these.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from tests.simulated.profiles import Feature
from tests.simulated.values import refuse

if TYPE_CHECKING:
    from tests.simulated.kernel import SimulatedKernel

State = TypeVar("State")
_inodes = count(1000)


@dataclass(eq=False)
class Task:
    """A thread. A process is the tasks with its `tgid`; its first task has pid == tgid."""

    pid: int
    tgid: int
    ppid: int
    comm: str
    cmdline: tuple[str, ...]
    pgid: int
    oom_score_adj: int = 0
    cookie: int = 0
    anon_bytes: int = 0
    cpu_seconds: float = 0.0
    wait_seconds: float = 0.0
    closid: str = ""  # the resctrl group's path; "" is the default group
    namespace_pid: int | None = None

    @property
    def is_leader(self) -> bool:
        return self.pid == self.tgid


@dataclass(frozen=True, slots=True)
class CgroupFile:
    """One file of a group. No reader: reading is EINVAL; no writer: writing is EINVAL.

    since: the mainline version that brought it. feature: exists only with it.
    """

    name: str
    read: Callable[[Cgroup], str] | None = None
    write: Callable[[Cgroup, str], None] | None = None
    on_root: bool = True
    since: tuple[int, int] = (0, 0)
    feature: Feature | None = None
    only_root: bool = False
    backported: Feature | None = None  # has it before `since`


@dataclass(frozen=True, slots=True)
class Controller:
    """A controller's files and its say in the life of groups and tasks."""

    name: str
    v1: tuple[CgroupFile, ...] = ()
    v2: tuple[CgroupFile, ...] = ()
    created: Callable[[Cgroup], None] | None = None
    may_attach: Callable[[Cgroup, list[Task]], None] | None = None
    threaded: bool = False


class Cgroup:
    """One directory of a hierarchy."""

    def __init__(self, hierarchy: Hierarchy, name: str, parent: Cgroup | None) -> None:
        self.hierarchy = hierarchy
        self.name = name
        self.parent = parent
        self.children: dict[str, Cgroup] = {}
        self.tasks: dict[int, Task] = {}
        self.subtree_control: set[str] = set()
        self.inode = next(_inodes)
        self._states: dict[type, object] = {}

    @property
    def kernel(self) -> SimulatedKernel:
        return self.hierarchy.kernel

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def path(self) -> str:
        """Relative to the hierarchy's root: "" for the root, else "a/b"."""
        if self.parent is None:
            return ""
        above = self.parent.path
        return f"{above}/{self.name}" if above else self.name

    def state(self, kind: type[State]) -> State:
        """This group's values of one controller, the kernel's defaults when first used."""
        found = self._states.get(kind)
        if found is None:
            found = self._states[kind] = kind()
        assert isinstance(found, kind)
        return found

    def forget(self, kinds: Iterator[type]) -> None:
        """Drop values: a controller that is disabled on v2 loses what was set."""
        for kind in kinds:
            self._states.pop(kind, None)

    def walk(self) -> Iterator[Cgroup]:
        """This group and all below it, parents first."""
        yield self
        for child in list(self.children.values()):
            yield from child.walk()

    def ancestors(self) -> Iterator[Cgroup]:
        """Parent, grandparent, and so on up to the root."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    @property
    def populated(self) -> bool:
        return any(group.tasks for group in self.walk())

    @property
    def controllers(self) -> set[str]:
        """What is available here (v2: what the parent hands down)."""
        if self.hierarchy.version == 1 or self.parent is None:
            return set(self.hierarchy.controllers)
        return self.parent.subtree_control

    def files(self) -> dict[str, CgroupFile]:
        """The files that exist here now."""
        return self.hierarchy.files_of(self)


@dataclass
class Hierarchy:
    """A tree of groups under one mount point (`mounts` may name it twice, as links do)."""

    kernel: SimulatedKernel
    version: int
    controllers: dict[str, Controller]
    core: tuple[CgroupFile, ...]
    name: str = ""  # of a named v1 hierarchy, as in name=systemd
    root: Cgroup = field(init=False)

    def __post_init__(self) -> None:
        self.root = Cgroup(self, "", None)
        self._present: dict[tuple[bool, frozenset[str]], dict[str, CgroupFile]] = {}

    @property
    def magic(self) -> int:
        return 0x63677270 if self.version == 2 else 0x27E0EB

    def files_of(self, group: Cgroup) -> dict[str, CgroupFile]:
        """The files of a group: those of every group, and those of its controllers."""
        kind = (group.is_root, frozenset(group.controllers))
        found = self._present.get(kind)
        if found is None:
            files = [*self.core]
            for name in group.controllers:
                files += self._controller_files(name)
            found = {file.name: file for file in files if self._exists(file, group)}
            self._present[kind] = found
        return found

    def _controller_files(self, name: str) -> tuple[CgroupFile, ...]:
        controller = self.controllers[name]
        return controller.v1 if self.version == 1 else controller.v2

    def _exists(self, file: CgroupFile, group: Cgroup) -> bool:
        if group.is_root and not file.on_root:
            return False
        if file.only_root and not group.is_root:
            return False
        profile = self.kernel.profile
        if file.feature is not None and not profile.has(file.feature):
            return False
        if profile.kernel < file.since:
            return file.backported is not None and profile.has(file.backported)
        return True

    def find(self, parts: tuple[str, ...]) -> Cgroup | None:
        """The group at the path, or None."""
        group = self.root
        for part in parts:
            child = group.children.get(part)
            if child is None:
                return None
            group = child
        return group

    def group_of(self, task: Task) -> Cgroup:
        """Where the task is in this hierarchy."""
        return self.kernel.place_of(self, task)

    # The file system's view.

    def _split(self, parts: tuple[str, ...]) -> tuple[Cgroup, CgroupFile | None]:
        """The group at the path, or the group and its file; ENOENT, ENOTDIR."""
        group = self.find(parts)
        if group is not None:
            return group, None
        for end in range(1, len(parts)):
            above = self.find(parts[: end - 1])
            if above is not None and parts[end - 1] in above.files():
                refuse(errno.ENOTDIR)
        above = self.find(parts[:-1])
        if above is None or (file := above.files().get(parts[-1])) is None:
            refuse(errno.ENOENT)
        return above, file

    def read(self, parts: tuple[str, ...]) -> bytes:
        group, file = self._split(parts)
        if file is None:
            refuse(errno.EISDIR)
        if file.read is None:
            refuse(errno.EINVAL, "not readable")
        return file.read(group).encode()

    def write(self, parts: tuple[str, ...], data: bytes) -> None:
        group, file = self._split(parts)
        if file is None:
            refuse(errno.EISDIR)
        if file.write is None:
            # root passes the open whatever the mode says; the write finds no handler.
            refuse(errno.EINVAL, "read-only")
        if not data:
            return  # the kernel's file layer does not pass on a write of nothing
        if len(data) > 4096:
            refuse(errno.E2BIG)
        text = data.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")
        file.write(group, text)

    def listdir(self, parts: tuple[str, ...]) -> list[str]:
        group, file = self._split(parts)
        if file is not None:
            refuse(errno.ENOTDIR)
        return [*group.files(), *group.children]

    def is_dir(self, parts: tuple[str, ...]) -> bool:
        return self.find(parts) is not None

    def mkdir(self, parts: tuple[str, ...], mode: int) -> None:
        if not parts or self.find(parts) is not None:
            refuse(errno.EEXIST)
        above = self.find(parts[:-1])
        if above is None:
            self._split(parts[:-1])
            refuse(errno.ENOTDIR)
        name = parts[-1]
        if name in above.files():
            refuse(errno.EEXIST)
        if "\n" in name:
            refuse(errno.EINVAL, "a group's name has no newline")
        self._check_depth(above)
        group = Cgroup(self, name, above)
        above.children[name] = group
        for controller in group.controllers:
            hook = self.controllers[controller].created
            if hook is not None:
                hook(group)

    def _check_depth(self, above: Cgroup) -> None:
        from tests.simulated.core import Limits  # core's files need this module

        depth, group = 1, above
        while True:
            limits = group.state(Limits)
            below = sum(1 for _ in group.walk()) - 1
            if limits.depth is not None and depth > limits.depth:
                refuse(errno.EAGAIN, "cgroup.max.depth")
            if limits.descendants is not None and below >= limits.descendants:
                refuse(errno.EAGAIN, "cgroup.max.descendants")
            if group.parent is None:
                return
            depth, group = depth + 1, group.parent

    def rmdir(self, parts: tuple[str, ...]) -> None:
        group, file = self._split(parts)
        if file is not None:
            refuse(errno.ENOTDIR)
        if group.parent is None:
            refuse(errno.EBUSY)
        if group.children or group.tasks:
            refuse(errno.EBUSY, "the group has children or tasks")
        del group.parent.children[group.name]

    def inode(self, parts: tuple[str, ...]) -> int:
        group, file = self._split(parts)
        if file is None:
            return group.inode
        return group.inode * 4096 + sorted(group.files()).index(file.name)

    def readlink(self, parts: tuple[str, ...]) -> str:
        self._split(parts)
        refuse(errno.EINVAL, "not a link")
