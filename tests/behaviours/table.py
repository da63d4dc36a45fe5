"""The table of behaviours: what the kernel says to each write, and what reads back.

A row that fails on a real kernel is wrong here; a row that fails on the simulated one is a bug of
the simulation. Rows were written from the kernel's sources' known rules and corrected by real
kernels.
"""

from __future__ import annotations

from errno import (
    EBUSY,
    EEXIST,
    EINVAL,
    ENOENT,
    EOPNOTSUPP,
    ERANGE,
    ESRCH,
)

from tests.behaviours.cpu import (
    BANDWIDTH_V1,
    BANDWIDTH_V2,
    BURST_V1,
    CPUSET_V1,
    CPUSET_V2,
    IDLE,
    SHARES,
    WEIGHT,
    WEIGHTS,
)
from tests.behaviours.memory import MEMORY_V1, MEMORY_V2
from tests.behaviours.steps import (
    Behaviour,
    Ends,
    Exists,
    HasLine,
    Make,
    Missing,
    ReadFails,
    Reads,
    Remove,
    Start,
    Write,
    on_v1,
    on_v2,
)

GROUPS = (
    on_v1("a group is made once", Make("g"), Make("g", EEXIST)),
    on_v2("a group is made once", Make("g"), Make("g", EEXIST)),
    on_v1("a group needs its parent", Make("g/h", ENOENT)),
    on_v2("a group needs its parent", Make("g/h", ENOENT)),
    on_v1("a group with a child stays", Make("g"), Make("g/h"), Remove("g", EBUSY)),
    on_v2("a group with a child stays", Make("g"), Make("g/h"), Remove("g", EBUSY)),
    on_v1(
        "a group with a process stays",
        Make("g"), Start(), Write("g/cgroup.procs", "{pid}"), Remove("g", EBUSY),
    ),
    on_v2(
        "a group with a process stays",
        Make("g"), Start(), Write("g/cgroup.procs", "{pid}"), Remove("g", EBUSY),
    ),
    on_v1("a removed group's files are gone", Make("g"), Remove("g"), Write(SHARES, "2", ENOENT)),
    on_v2("a removed group's files are gone", Make("g"), Remove("g"), Write(WEIGHT, "2", ENOENT)),
    on_v1("no file can be added", Make("g"), Write("g/cpu.nonsense", "1", ENOENT)),
    on_v2("no file can be added", Make("g"), Write("g/cpu.nonsense", "1", ENOENT)),
    on_v1("a read-only file refuses at the write", Make("g"), Write("g/cpu.stat", "1", EINVAL)),
    on_v2("a read-only file refuses at the write", Make("g"), Write("g/cpu.stat", "1", EINVAL)),
    on_v1("a write-only file cannot be read", Make("g"), ReadFails("g/memory.force_empty", EINVAL)),
    on_v2("a write-only file cannot be read", Make("g"), ReadFails("g/cgroup.kill", EINVAL)),
    on_v1("a write of nothing changes nothing", Make("g"), Write(SHARES, ""),
          Reads(SHARES, "1024")),
    on_v2("a write of nothing changes nothing", Make("g"), Write(WEIGHT, ""), Reads(WEIGHT, "100")),
)  # fmt: skip

TASKS = (
    on_v1(
        "a process moves and is listed",
        Make("g"), Start(), Write("g/cgroup.procs", "{pid}"),
        Reads("g/cgroup.procs", "{pid}"), Reads("g/tasks", "{pid}"),
    ),
    on_v2(
        "a process moves and is listed",
        Make("g"), Start(), Write("g/cgroup.procs", "{pid}\n"),
        Reads("g/cgroup.procs", "{pid}"), Reads("g/cgroup.threads", "{pid}"),
        HasLine("g/cgroup.events", "populated 1"),
    ),
    on_v1("a pid that nobody has", Make("g"), Write("g/cgroup.procs", "4194303", ESRCH)),
    on_v2("a pid that nobody has", Make("g"), Write("g/cgroup.procs", "4194303", ESRCH)),
    on_v1(
        "a pid must be a number",
        Make("g"), Write("g/cgroup.procs", "abc", EINVAL), Write("g/tasks", "-1", EINVAL),
    ),
    on_v2(
        "a pid must be a number",
        Make("g"), Write("g/cgroup.procs", "abc", EINVAL), Write("g/cgroup.procs", "-1", EINVAL),
    ),
    on_v2(
        "a thread does not leave its process's domain",
        Make("g"), Start(), Write("g/cgroup.threads", "{pid}", EOPNOTSUPP),
    ),
    on_v2(
        "cgroup.kill ends the processes",
        Make("g"), Start(), Write("g/cgroup.procs", "{pid}"), Write("g/cgroup.kill", "1"), Ends(),
        since=(5, 14),
    ),
)  # fmt: skip

DELEGATION = (
    on_v2("a new group hands nothing down", Make("g"), Reads("g/cgroup.subtree_control", "")),
    on_v2(
        "a child has the files of what its parent hands down",
        Make("g"), Make("g/h"), Missing("g/h/cpu.weight"), Missing("g/h/memory.max"),
        Write("g/cgroup.subtree_control", "+cpu"), Exists("g/h/cpu.weight"),
        Missing("g/h/memory.max"), Reads("g/h/cgroup.controllers", "cpu"),
    ),
    on_v2("cpu.stat exists without the controller", Make("g"), Make("g/h"), Exists("g/h/cpu.stat")),
    on_v2(
        "pressure exists without the controllers",
        Make("g"), Make("g/h"), Exists("g/h/cpu.pressure"), Exists("g/h/memory.pressure"),
    ),
    on_v2(
        "a word that is not a controller",
        Make("g"), Write("g/cgroup.subtree_control", "+nonsense", EINVAL),
        Write("g/cgroup.subtree_control", "cpu", EINVAL),
    ),
    on_v2(
        "what the parent lacks cannot be handed down",
        Make("g"), Make("g/h"), Write("g/h/cgroup.subtree_control", "+cpu", ENOENT),
    ),
    on_v2(
        "several words count all or none",
        Make("g"), Write("g/cgroup.subtree_control", "+cpu +nonsense", EINVAL),
        Reads("g/cgroup.subtree_control", ""),
        Write("g/cgroup.subtree_control", "+memory +cpu"),
        Reads("g/cgroup.subtree_control", "cpu memory"),
    ),
    on_v2(
        "a controller that a child hands down stays",
        Make("g"), Make("g/h"), Write("g/cgroup.subtree_control", "+cpu"),
        Write("g/h/cgroup.subtree_control", "+cpu"),
        Write("g/cgroup.subtree_control", "-cpu", EBUSY),
    ),
    on_v2(
        "a group with processes hands nothing down",
        Make("g"), Start(), Write("g/cgroup.procs", "{pid}"),
        Write("g/cgroup.subtree_control", "+memory", EBUSY),
    ),
    on_v2(
        "a group that hands memory down takes no process",
        Make("g"), Write("g/cgroup.subtree_control", "+memory"), Start(),
        Write("g/cgroup.procs", "{pid}", EBUSY),
    ),
    on_v2(
        "a group that hands only cpu down takes processes",
        Make("g"), Write("g/cgroup.subtree_control", "+cpu"), Start(),
        Write("g/cgroup.procs", "{pid}"),
    ),
    on_v2(
        "but it takes none when its children have some",
        Make("g"), Make("g/h"), Write("g/cgroup.subtree_control", "+cpu"), Start(),
        Write("g/h/cgroup.procs", "{pid}"), Start(), Write("g/cgroup.procs", "{pid}", EBUSY),
    ),
    on_v2(
        "a group with processes may begin to hand only cpu down",
        Make("g"), Start(), Write("g/cgroup.procs", "{pid}"),
        Write("g/cgroup.subtree_control", "+cpu"),
    ),
    on_v2(
        "but not when its children have processes too",
        Make("g"), Make("g/h"), Start(), Write("g/cgroup.procs", "{pid}"), Start(),
        Write("g/h/cgroup.procs", "{pid}"), Write("g/cgroup.subtree_control", "+cpu", EBUSY),
    ),
    on_v2(
        "disabling a controller forgets what was set",
        Make("g"), Make("g/h"), Write("g/cgroup.subtree_control", "+cpu"),
        Write("g/h/cpu.weight", "50"), Write("g/cgroup.subtree_control", "-cpu"),
        Write("g/cgroup.subtree_control", "+cpu"), Reads("g/h/cpu.weight", "100"),
    ),
)  # fmt: skip

OTHERS = (
    on_v2(
        "pids.max is a number or max",
        Make("g"), Reads("g/pids.max", "max"), Write("g/pids.max", "10"), Reads("g/pids.max", "10"),
        Write("g/pids.max", "-1", EINVAL), Write("g/pids.max", "max"), Reads("g/pids.max", "max"),
    ),
    on_v2(
        "freezing is 0 or 1",
        Make("g"), Write("g/cgroup.freeze", "2", ERANGE), Write("g/cgroup.freeze", "0"),
    ),
    on_v2(
        "depth is bounded on request",
        Make("g"), Write("g/cgroup.max.depth", "0"), Make("g/h", 11),
        Write("g/cgroup.max.depth", "max"), Make("g/h"),
    ),
)  # fmt: skip

PROC = (
    on_v1("oom_score_adj has a range", Start(), Write("/proc/{pid}/oom_score_adj", "1001", EINVAL),
          Write("/proc/{pid}/oom_score_adj", "1000"), Reads("/proc/{pid}/oom_score_adj", "1000")),
    on_v2("oom_score_adj has a range", Start(), Write("/proc/{pid}/oom_score_adj", "-1001", EINVAL),
          Write("/proc/{pid}/oom_score_adj", "-1000"), Reads("/proc/{pid}/oom_score_adj", "-1000")),
    on_v2("oom_score_adj takes blanks", Start(), Write("/proc/{pid}/oom_score_adj", " 5\n"),
          Reads("/proc/{pid}/oom_score_adj", "5"),
          Write("/proc/{pid}/oom_score_adj", "five", EINVAL)),
    on_v1("a process that ended has no files", ReadFails("/proc/4194303/oom_score_adj", ENOENT),
          Write("/proc/4194303/oom_score_adj", "0", ENOENT)),
    on_v2("a process that ended has no files", ReadFails("/proc/4194303/oom_score_adj", ENOENT),
          Write("/proc/4194303/oom_score_adj", "0", ENOENT)),
)  # fmt: skip

TABLE: tuple[Behaviour, ...] = (
    *GROUPS,
    *TASKS,
    *DELEGATION,
    *WEIGHTS,
    *IDLE,
    *BANDWIDTH_V1,
    *BURST_V1,
    *BANDWIDTH_V2,
    *CPUSET_V1,
    *CPUSET_V2,
    *MEMORY_V1,
    *MEMORY_V2,
    *OTHERS,
    *PROC,
)
