"""`SimulatedKernel`: a machine's kernel in memory, behind the product's `Host` interface.

It mounts file systems at the paths where Linux has them, keeps tasks and time, lets faults happen
and records every write with its writer. The `Host` methods are the program under test; other actors
use `write_as`, `make` and the objects in kubelet.py and systemd.py.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.simulated import block_io, core, cpu, cpuset, memory, small
from tests.simulated.core_sched import CoreScheduling
from tests.simulated.faults import Crash, Faults, Operation
from tests.simulated.proc import make_proc
from tests.simulated.profiles import DEBIAN_12_V2, Feature, Profile
from tests.simulated.sysfs import make_sysfs
from tests.simulated.tree import Cgroup, CgroupFile, Controller, Hierarchy, Task
from tests.simulated.values import refuse
from tests.simulated.vfs import TMPFS_MAGIC, Device, FileSystem, Folder, Tree

CGROUP_ROOT = "/sys/fs/cgroup"
UNDER_TEST = "daemon"

V2_CONTROLLERS = (
    cpuset.CPUSET, cpu.CPU, block_io.IO, memory.MEMORY, small.HUGETLB, small.PIDS,
)  # fmt: skip
V1_MOUNTS: tuple[tuple[Controller, ...], ...] = (
    (cpuset.CPUSET,),
    (cpu.CPU, cpu.CPUACCT),
    (block_io.BLKIO,),
    (memory.MEMORY,),
    (small.DEVICES,),
    (small.FREEZER,),
    (small.NET_CLS,),
    (small.PERF_EVENT,),
    (small.HUGETLB,),
    (small.PIDS,),
)

_STATES: dict[str, tuple[type, ...]] = {
    "cpu": (cpu.CpuState,),
    "cpuset": (cpuset.CpusetState,),
    "memory": (memory.MemoryState,),
}


@dataclass(frozen=True, slots=True)
class Write:
    """One write that reached the kernel. `error` is its errno, 0 if it was accepted."""

    path: str
    data: bytes
    error: int
    writer: str
    at: float


@dataclass
class Clock:
    """Seconds since boot; only tests move it."""

    now: float = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


class SimulatedKernel:
    """See the module. `profile` says which machine."""

    def __init__(self, profile: Profile = DEBIAN_12_V2) -> None:
        self.profile = profile
        self.clock = Clock()
        self.boot_time = 1_700_000_000
        self.faults = Faults()
        self.writes: list[Write] = []
        self.tasks: dict[int, Task] = {}
        self.past_cpu_seconds = 0.0
        self.sysctls: dict[str, int] = {}
        self.switches: dict[str, int] = {}
        self.disks: set[str] = {"253:0"}
        self.bfq_disks: set[str] = set()
        self.iocost: dict[str, block_io.IOCost] = {}
        self.offline_cpus: set[int] = set()
        self.core_scheduling = CoreScheduling(self)
        self.own_pid = 0
        self._next_pid = 1
        self._places: dict[tuple[int, int], Cgroup] = {}
        self._lock = threading.RLock()
        self._crashed = False
        self.hierarchies: list[Hierarchy] = []
        self._mounts: dict[tuple[str, ...], FileSystem] = {}
        self._mount_everything()
        self._watchers: list[Callable[[Write], None]] = []
        self.node_group = self.hierarchies[0].root
        self.spawn_process("systemd")
        self.own_pid = self.spawn_process("koordlet").pid

    # Machine

    def _mount_everything(self) -> None:
        v1_psi = self.profile.has(Feature.ALIBABA) and self.profile.has(Feature.PSI)
        self.dev = Tree(TMPFS_MAGIC)
        self.root = Tree(TMPFS_MAGIC)
        self.sysfs = make_sysfs(self)
        self.mount("/", self.root)
        self.mount("/dev", self.dev)
        self.mount("/sys", self.sysfs)
        self.sysfs.put("fs/cgroup", Folder(closed=True))
        if self.profile.cgroup == 2:
            files = (*core.V2_FILES, cpu.CPU_STAT_V2, *small.PSI_FILES)
            self._add_hierarchy(2, V2_CONTROLLERS, files, CGROUP_ROOT)
        else:
            self.cgroup_tmpfs = Tree(TMPFS_MAGIC)
            self.mount(CGROUP_ROOT, self.cgroup_tmpfs)
            for controllers in V1_MOUNTS:
                names = [controller.name for controller in controllers]
                paths = [f"{CGROUP_ROOT}/{name}" for name in names]
                if len(names) > 1:
                    paths.append(f"{CGROUP_ROOT}/{','.join(names)}")
                # Alibaba's kernel shows PSI of v1 groups in cpuacct.
                psi = small.PSI_FILES if v1_psi and "cpuacct" in names else ()
                self._add_hierarchy(1, controllers, (*core.V1_FILES, *psi), *paths)
            self._add_hierarchy(1, (), core.V1_FILES, f"{CGROUP_ROOT}/systemd", name="systemd")
        self.proc = make_proc(self)
        self.mount("/proc", self.proc)
        self.resctrl = None
        if self.profile.rdt is not None:
            from tests.simulated.resctrl import Resctrl

            self.resctrl = Resctrl(self, self.profile.rdt)
            self.mount("/sys/fs/resctrl", self.resctrl)

    def _add_hierarchy(
        self,
        version: int,
        controllers: tuple[Controller, ...],
        files: tuple[CgroupFile, ...],
        *paths: str,
        name: str = "",
    ) -> None:
        hierarchy = Hierarchy(self, version, {c.name: c for c in controllers}, files, name)
        self.hierarchies.append(hierarchy)
        for path in paths:
            if self.profile.cgroup == 1:
                self.cgroup_tmpfs.put(path.removeprefix(CGROUP_ROOT), Folder(closed=True))
            self.mount(path, hierarchy)

    def mount(self, path: str, filesystem: FileSystem) -> None:
        """Make a file system appear at an absolute path."""
        self._mounts[tuple(part for part in path.split("/") if part)] = filesystem

    def mounts_text(self) -> str:
        """/proc/mounts."""
        kinds = {
            0x63677270: "cgroup2", 0x27E0EB: "cgroup", 0x9FA0: "proc", 0x62656572: "sysfs",
            TMPFS_MAGIC: "tmpfs", 0x7655821: "resctrl",
        }  # fmt: skip
        text = ""
        for parts, filesystem in self._mounts.items():
            kind = kinds[filesystem.magic]
            options = "rw"
            if isinstance(filesystem, Hierarchy) and filesystem.version == 1:
                options += "," + (",".join(filesystem.controllers) or f"name={filesystem.name}")
            if filesystem is self.resctrl and self.resctrl is not None and self.resctrl.mba_mbps:
                options += ",mba_MBps"
            text += f"{kind} /{'/'.join(parts)} {kind} {options} 0 0\n"
        return text

    def filesystems_text(self) -> str:
        """/proc/filesystems."""
        names = ["sysfs", "tmpfs", "proc", "cgroup", "cgroup2"]
        names += ["resctrl"] if self.profile.rdt is not None else []
        return "".join(f"nodev\t{name}\n" for name in names)

    @property
    def possible_cpus(self) -> int:
        return self.profile.topology.cpus

    @property
    def online_cpus(self) -> frozenset[int]:
        return frozenset(range(self.possible_cpus)) - self.offline_cpus

    @property
    def online_nodes(self) -> frozenset[int]:
        return frozenset(range(self.profile.topology.nodes))

    @property
    def memory_bytes(self) -> int:
        return self.profile.topology.memory_bytes_per_node * self.profile.topology.nodes

    def file_bytes(self) -> int:
        """Page cache of the whole machine, as far as it is charged to groups."""
        return memory.file_bytes(self.hierarchy("memory").root)

    @property
    def group_identity_enabled(self) -> bool:
        return bool(self.sysctls.get("kernel.sched_group_identity_enabled", 1))

    def set_online(self, cpu_number: int, *, online: bool) -> None:
        """Hotplug a CPU. v2 keeps the wish; v1 drops an offline CPU from every group's list for
        good, and moves the tasks of a group that has none left to the next one above that has."""
        if online:
            self.offline_cpus.discard(cpu_number)
            return
        if len(self.online_cpus) == 1:
            refuse(errno.EBUSY)
        self.offline_cpus.add(cpu_number)
        if self.profile.cgroup == 1:
            for group in self.hierarchy("cpuset").root.walk():
                state = group.state(cpuset.CpusetState)
                lost = state.cpus == {cpu_number}
                state.cpus -= {cpu_number}
                for task in list(group.tasks.values()) if lost else ():
                    above = next(one for one in group.ancestors() if cpuset.configured(one, "cpus"))
                    self.move(group.hierarchy, task, above)

    # Groups and tasks

    def hierarchy(self, controller: str) -> Hierarchy:
        """The hierarchy that has the controller."""
        for hierarchy in self.hierarchies:
            if controller in hierarchy.controllers or hierarchy.name == controller:
                return hierarchy
        raise LookupError(f"{self.profile.name} has no {controller} controller")

    def group(self, path: str, controller: str = "cpu") -> Cgroup:
        """The group at a path relative to the controller's hierarchy; LookupError if none."""
        parts = tuple(part for part in path.split("/") if part)
        found = self.hierarchy(controller).find(parts)
        if found is None:
            raise LookupError(f"no group {path!r} in {controller}")
        return found

    def states_of(self, controller: str) -> Iterator[type]:
        """The kinds of values that a controller keeps."""
        return iter(_STATES.get(controller, ()))

    def spawn_process(
        self,
        comm: str,
        *,
        cgroup: str = "",
        threads: int = 1,
        cmdline: tuple[str, ...] = (),
        parent: int = 1,
    ) -> Task:
        """Start a process in the group (in each hierarchy that has it); returns its first task."""
        leader = self._new_task(comm, 0, parent, cmdline)
        for _ in range(threads - 1):
            self._new_task(comm, leader.pid, parent, cmdline)
        parts = tuple(part for part in cgroup.split("/") if part)
        for hierarchy in self.hierarchies:
            group = hierarchy.find(parts) or hierarchy.root
            for task in self.threads_of(leader.pid):
                self.move(hierarchy, task, group)
        return leader

    def fork(self, parent: Task) -> Task:
        """Start a child of a task: same groups, cookie, resctrl group and oom_score_adj."""
        child = self._new_task(parent.comm, 0, parent.tgid, parent.cmdline)
        child.oom_score_adj, child.cookie, child.closid = (
            parent.oom_score_adj, parent.cookie, parent.closid,
        )  # fmt: skip
        for hierarchy in self.hierarchies:
            self.move(hierarchy, child, hierarchy.group_of(parent))
        return child

    def _new_task(self, comm: str, tgid: int, ppid: int, cmdline: tuple[str, ...]) -> Task:
        pid = self._next_pid
        self._next_pid += 1
        task = Task(pid, tgid or pid, ppid, comm, cmdline or (comm,), tgid or pid)
        self.tasks[pid] = task
        return task

    def threads_of(self, tgid: int) -> list[Task]:
        return [task for task in self.tasks.values() if task.tgid == tgid]

    def place_of(self, hierarchy: Hierarchy, task: Task) -> Cgroup:
        return self._places.get((id(hierarchy), task.pid), hierarchy.root)

    def move(self, hierarchy: Hierarchy, task: Task, group: Cgroup) -> None:
        """Put a task into a group, without asking the controllers."""
        self.place_of(hierarchy, task).tasks.pop(task.pid, None)
        group.tasks[task.pid] = task
        self._places[(id(hierarchy), task.pid)] = group

    def exit(self, pid: int) -> None:
        """End a task; ending a process's first task ends the process."""
        task = self.tasks.get(pid)
        if task is None:
            return
        doomed = self.threads_of(task.tgid) if task.is_leader else [task]
        for each in doomed:
            for hierarchy in self.hierarchies:
                place = self.place_of(hierarchy, each)
                place.tasks.pop(each.pid, None)
                for above in [place, *place.ancestors()]:
                    above.state(cpu.Accounting)
                place.state(cpu.Accounting).past_seconds += each.cpu_seconds
                self._places.pop((id(hierarchy), each.pid), None)
            self.past_cpu_seconds += each.cpu_seconds
            del self.tasks[each.pid]

    def use_memory(self, task: Task, anon_bytes: int) -> None:
        """Let a task have this much anonymous memory; limits act."""
        task.anon_bytes = anon_bytes
        memory.charge(self.hierarchy("memory").group_of(task))

    def use_page_cache(self, cgroup: str, file_bytes: int) -> None:
        """Let a group have this much page cache; limits act."""
        group = self.group(cgroup, "memory")
        group.state(memory.MemoryState).file_bytes = file_bytes
        memory.charge(group)

    def set_pressure(
        self, cgroup: str, resource: str, some: tuple[float, float, float, int]
    ) -> None:
        """Show these averages (percent) and total (µs) in `<resource>.pressure` of a group."""
        group = self.group(cgroup) if cgroup else self.node_group
        group.state(small.Pressure).some[resource] = some
        group.state(small.Pressure).full[resource] = some

    def add_device(self, path: str, kind: str, major: int, minor: int) -> None:
        """Make a device node appear below /dev."""
        self.dev.put(path.removeprefix("/dev"), Device(kind, major, minor))

    # Other actors

    def make(self, path: str) -> None:
        """Make a directory and those above it, as an actor that is not under test."""
        parts = [part for part in path.split("/") if part]
        for end in range(1, len(parts) + 1):
            folder = "/" + "/".join(parts[:end])
            if not self.is_dir(folder):
                filesystem, rest = self._locate(folder)
                filesystem.mkdir(rest, 0o755)

    def write_as(self, writer: str, path: str, data: str | bytes) -> None:
        """Write as another program: kubelet, the runtime, systemd or an operator."""
        self._write(path, data.encode() if isinstance(data, str) else data, writer)

    def text(self, path: str) -> str:
        """A file's content without the last newline, for a test to look at; no faults."""
        filesystem, rest = self._locate(path)
        return filesystem.read(rest).decode().rstrip("\n")

    def remove_group(self, cgroup: str) -> None:
        """Take a group away in every hierarchy, with its tasks and all below it."""
        parts = tuple(part for part in cgroup.split("/") if part)
        for hierarchy in self.hierarchies:
            group = hierarchy.find(parts)
            if group is None or group.parent is None:
                continue
            for below in list(group.walk()):
                for pid in list(below.tasks):
                    self.exit(pid)
            del group.parent.children[group.name]

    def on_write(self, watcher: Callable[[Write], None]) -> None:
        """Call `watcher` after each write: for invariants that hold at every moment."""
        self._watchers.append(watcher)

    def writes_of(self, writer: str = UNDER_TEST) -> list[Write]:
        """The accepted writes of one writer."""
        return [write for write in self.writes if write.writer == writer and not write.error]

    @contextmanager
    def recording(self) -> Iterator[list[Write]]:
        """The program's writes during a block, accepted and refused."""
        start = len(self.writes)
        found: list[Write] = []
        yield found
        found += [write for write in self.writes[start:] if write.writer == UNDER_TEST]

    def restart_program(self) -> None:
        """After a `Crash`: a new process of the program under test."""
        self._crashed = False

    # Host: the program under test

    def _locate(self, path: str) -> tuple[FileSystem, tuple[str, ...]]:
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is not absolute")
        parts: list[str] = []
        for part in path.split("/"):
            if part == "..":
                parts = parts[:-1]
            elif part not in ("", "."):
                if len(part.encode("utf-8", "surrogateescape")) > 255:
                    refuse(errno.ENAMETOOLONG)
                parts.append(part)
        for cut in range(len(parts), -1, -1):
            found = self._mounts.get(tuple(parts[:cut]))
            if found is not None:
                return found, tuple(parts[cut:])
        raise AssertionError("the root is always mounted")

    def _write(self, path: str, data: bytes, writer: str) -> None:
        error = 0
        try:
            filesystem, rest = self._locate(path)
            filesystem.write(rest, data)
        except OSError as refused:
            error = refused.errno or 0
            raise
        finally:
            write = Write(path, data, error, writer, self.clock.now)
            self.writes.append(write)
            for watcher in self._watchers:
                watcher(write)

    @contextmanager
    def _operation(self, operation: Operation, path: str) -> Iterator[None]:
        with self._lock:
            if self._crashed:
                raise Crash("the program under test has ended")
            try:
                self.faults.meet(operation, path, done=False)
                yield
                self.faults.meet(operation, path, done=True)
            except Crash:
                self._crashed = True
                raise
            except OSError as error:
                error.filename = path
                raise

    def read(self, path: str) -> bytes:
        with self._operation("read", path):
            filesystem, rest = self._locate(path)
            return filesystem.read(rest)

    def write(self, path: str, data: bytes) -> None:
        with self._operation("write", path):
            self._write(path, data, UNDER_TEST)

    def listdir(self, path: str) -> list[str]:
        with self._operation("listdir", path):
            filesystem, rest = self._locate(path)
            return filesystem.listdir(rest)

    def directories(self, path: str) -> list[str]:
        with self._operation("listdir", path):
            filesystem, rest = self._locate(path)
            names = filesystem.listdir(rest)
            return [name for name in names if filesystem.is_dir((*rest, name))]

    def gone(self, directory: str) -> None:
        """Nothing stays open here."""

    def is_dir(self, path: str) -> bool:
        with self._lock:
            try:
                filesystem, rest = self._locate(path)
            except OSError:
                return False
            return filesystem.is_dir(rest)

    def mkdir(self, path: str, mode: int = 0o755) -> None:
        with self._operation("mkdir", path):
            filesystem, rest = self._locate(path)
            filesystem.mkdir(rest, mode)

    def rmdir(self, path: str) -> None:
        with self._operation("rmdir", path):
            filesystem, rest = self._locate(path)
            filesystem.rmdir(rest)

    def filesystem_magic(self, path: str) -> int:
        filesystem, rest = self._locate(path)
        filesystem.inode(rest)
        return filesystem.magic

    def inode(self, path: str) -> int:
        with self._lock:
            filesystem, rest = self._locate(path)
            return filesystem.inode(rest)

    def readlink(self, path: str) -> str:
        filesystem, rest = self._locate(path)
        return filesystem.readlink(rest)

    def device_number(self, path: str) -> tuple[str, int, int]:
        filesystem, rest = self._locate(path)
        if not isinstance(filesystem, Tree):
            refuse(errno.ENODEV)
        node = filesystem.find(rest)
        if not isinstance(node, Device):
            refuse(errno.ENODEV, "not a device node")
        return node.kind, node.major, node.minor

    def core_sched_cookie(self, pid: int) -> int:
        return self.core_scheduling.get(pid)

    def core_sched_create(self, pid: int) -> None:
        self.core_scheduling.create(pid)

    def core_sched_copy(self, source_pid: int, target_pids: list[int]) -> list[int]:
        return self.core_scheduling.copy(source_pid, target_pids)
