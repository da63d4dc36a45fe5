"""/proc: what is known of tasks and of the machine, and the sysctls that we write."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.simulated.profiles import Feature
from tests.simulated.small import pressure_text
from tests.simulated.tree import Task
from tests.simulated.values import refuse, signed
from tests.simulated.vfs import PROC_MAGIC, File, Folder, Node, Tree, text

if TYPE_CHECKING:
    from tests.simulated.kernel import SimulatedKernel

TICKS_PER_SECOND = 100


def _cgroup(kernel: SimulatedKernel, task: Task) -> str:
    lines: list[str] = []
    hierarchies = kernel.hierarchies
    for number, hierarchy in reversed(list(enumerate(hierarchies, 1))):
        path = "/" + hierarchy.group_of(task).path
        if hierarchy.version == 2:
            lines.append(f"0::{path}")
        else:
            names = ",".join(hierarchy.controllers) or f"name={hierarchy.name}"
            lines.append(f"{number}:{names}:{path}")
    return "\n".join(lines) + "\n"


def _write_oom_score_adj(kernel: SimulatedKernel, task: Task, content: str) -> None:
    number = signed(content.strip())
    if not -1000 <= number <= 1000:
        refuse(errno.EINVAL, "oom_score_adj is -1000..1000")
    # The value belongs to the process: all its threads share it.
    for thread in kernel.threads_of(task.tgid):
        thread.oom_score_adj = number


def _stat(task: Task) -> str:
    ticks = int(task.cpu_seconds * TICKS_PER_SECOND)
    fields = [task.ppid, task.pgid, task.pgid, 0, -1, 4194304, 0, 0, 0, 0, ticks, 0, 0, 0]
    fields += [20, 0, 1, 0, task.pid * 10, 0, task.anon_bytes // 4096]
    return f"{task.pid} ({task.comm}) S " + " ".join(map(str, fields)) + "\n"


def _status(kernel: SimulatedKernel, task: Task) -> str:
    threads = len(kernel.threads_of(task.tgid))
    inner = f"\t{task.namespace_pid}" if task.namespace_pid is not None else ""
    return (
        f"Name:\t{task.comm}\nState:\tS (sleeping)\nTgid:\t{task.tgid}\nPid:\t{task.pid}\n"
        f"PPid:\t{task.ppid}\nNSpid:\t{task.pid}{inner}\nThreads:\t{threads}\n"
        f"VmRSS:\t{task.anon_bytes // 1024} kB\n"
    )


def _schedstat(task: Task) -> str:
    return f"{int(task.cpu_seconds * 1e9)} {int(task.wait_seconds * 1e9)} 1\n"


def _task_folder(kernel: SimulatedKernel, task: Task, *, process: bool) -> Folder:
    cmdline = "".join(f"{word}\0" for word in task.cmdline)
    entries: dict[str, Node] = {
        "cgroup": File(lambda: _cgroup(kernel, task)),
        "oom_score_adj": File(
            lambda: f"{task.oom_score_adj}\n",
            lambda content: _write_oom_score_adj(kernel, task, content),
        ),
        "comm": text(task.comm + "\n"),
        "cmdline": text(cmdline),
        "stat": File(lambda: _stat(task)),
        "status": File(lambda: _status(kernel, task)),
        "schedstat": File(lambda: _schedstat(task)),
    }
    if process:
        entries["mounts"] = File(kernel.mounts_text)
        entries["task"] = Folder(
            dynamic=lambda: {
                str(thread.pid): _task_folder(kernel, thread, process=False)
                for thread in kernel.threads_of(task.tgid)
            },
            closed=True,
        )
    return Folder(entries, closed=True)


def _meminfo(kernel: SimulatedKernel) -> str:
    total = kernel.memory_bytes
    used = sum(task.anon_bytes for task in kernel.tasks.values())
    cache = kernel.file_bytes()
    free = total - used - cache

    def line(name: str, number: int) -> str:
        return f"{name + ':':<16}{number // 1024:>8} kB\n"

    return (
        line("MemTotal", total)
        + line("MemFree", free)
        + line("MemAvailable", free + cache)
        + line("Buffers", 0)
        + line("Cached", cache)
        + line("Active(file)", 0)
        + line("Inactive(file)", cache)
        + line("AnonPages", used)
        + line("SReclaimable", 0)
    )


def _cpuinfo(kernel: SimulatedKernel) -> str:
    profile = kernel.profile
    flags = ["fpu", "sse2"]
    if profile.rdt is not None:
        flags += ["rdt_a", "cat_l3", "mba"]
        if profile.rdt.monitoring:
            flags += ["cqm", "cqm_llc", "cqm_occup_llc", "cqm_mbm_total", "cqm_mbm_local"]
    if profile.topology.threads > 1:
        flags.append("ht")
    blocks: list[str] = []
    for cpu in sorted(kernel.online_cpus):
        lines = [f"processor\t: {cpu}"]
        if profile.machine == "aarch64":
            lines += ["BogoMIPS\t: 50.00", "Features\t: fp asimd", "CPU implementer\t: 0x41"]
        else:
            lines += [
                f"vendor_id\t: {profile.vendor}",
                f"model name\t: {profile.model}",
                f"physical id\t: {profile.topology.socket_of(cpu)}",
                f"core id\t\t: {profile.topology.core_id_of(cpu)}",
                f"flags\t\t: {' '.join(flags)}",
            ]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks) + "\n"


def _cpu_stat(kernel: SimulatedKernel) -> str:
    used = int(sum(task.cpu_seconds for task in kernel.tasks.values()) * TICKS_PER_SECOND)
    used += int(kernel.past_cpu_seconds * TICKS_PER_SECOND)
    cpus = sorted(kernel.online_cpus)
    whole = int(kernel.clock.now * TICKS_PER_SECOND) * len(cpus)
    lines = [f"cpu  {used} 0 0 {max(0, whole - used)} 0 0 0 0 0 0"]
    share = used // len(cpus)
    lines += [
        f"cpu{cpu} {share} 0 0 {max(0, whole - used) // len(cpus)} 0 0 0 0 0 0" for cpu in cpus
    ]
    lines.append(f"btime {kernel.boot_time}")
    return "\n".join(lines) + "\n"


def _sysctl(kernel: SimulatedKernel, name: str, low: int, high: int) -> File:
    def write(content: str) -> None:
        number = signed(content.strip())
        if not low <= number <= high:
            refuse(errno.EINVAL, f"{name} is {low}..{high}")
        kernel.sysctls[name] = number

    return File(lambda: f"{kernel.sysctls[name]}\n", write)


SYSCTLS: dict[str, tuple[int, int, int, Feature | None]] = {
    # name: default, lowest, highest, needed feature
    "vm.min_free_kbytes": (67584, 0, (1 << 31) - 1, None),
    "vm.watermark_scale_factor": (10, 1, 3000, None),
    "kernel.sched_group_identity_enabled": (1, 0, 1, Feature.GROUP_IDENTITY_SWITCH),
    "kernel.sched_core": (0, 0, 1, Feature.ALIBABA),
    "kernel.sched_idle_saver_wmark": (0, 0, (1 << 31) - 1, Feature.ALIBABA),
}


def _pressure(kernel: SimulatedKernel, resource: str) -> str:
    return pressure_text(kernel.node_group, resource)


def make_proc(kernel: SimulatedKernel) -> Tree:
    """The /proc of this kernel."""

    def processes() -> dict[str, Node]:
        folders: dict[str, Node] = {
            str(task.pid): _task_folder(kernel, task, process=True)
            for task in list(kernel.tasks.values())  # another thread may start or end one
            if task.is_leader
        }
        own = kernel.tasks.get(kernel.own_pid)
        if own is not None:
            folders["self"] = _task_folder(kernel, own, process=True)
        return folders

    tree = Tree(PROC_MAGIC, Folder(closed=True, dynamic=processes))
    machine: dict[str, Callable[[], str]] = {
        "meminfo": lambda: _meminfo(kernel),
        "cpuinfo": lambda: _cpuinfo(kernel),
        "stat": lambda: _cpu_stat(kernel),
        "uptime": lambda: f"{kernel.clock.now:.2f} 0.00\n",
        "cmdline": lambda: "BOOT_IMAGE=/boot/vmlinuz root=/dev/vda1\n",
        "sys/kernel/random/boot_id": lambda: "6a0c2f3e-1111-4222-8333-944445555666\n",
        "sys/kernel/osrelease": lambda: "{}.{}.0-simulated\n".format(*kernel.profile.kernel),
        "mounts": kernel.mounts_text,
        "filesystems": kernel.filesystems_text,
    }
    for path, read in machine.items():
        tree.put(path, File(read))
    for name, (default, low, high, feature) in SYSCTLS.items():
        if feature is None or kernel.profile.has(feature):
            kernel.sysctls[name] = default
            tree.put("sys/" + name.replace(".", "/"), _sysctl(kernel, name, low, high))
    if kernel.profile.has(Feature.PSI):
        for resource in ("cpu", "memory", "io"):
            tree.put(
                f"pressure/{resource}",
                File(partial(_pressure, kernel, resource)),
            )
    return tree
