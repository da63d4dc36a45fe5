"""The memory controller: limits, protection, and what is charged.

Sizes are whole pages, rounded down. v1 `limit_in_bytes` below the usage reclaims page cache and
then refuses (EBUSY); v2 `memory.max` reclaims and then kills. Protection (`min`, `low`) counts only
as far as every ancestor has it too. Memory belongs to the group where it was first touched; a task
that moves or ends leaves page cache behind.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulated.profiles import Feature
from tests.simulated.tree import Cgroup, CgroupFile, Controller
from tests.simulated.values import PAGE_SIZE, PAGES_UNLIMITED, pages, refuse, signed, unsigned


@dataclass
class MemoryState:
    """Limits in pages, charges in bytes."""

    max: int = PAGES_UNLIMITED
    high: int = PAGES_UNLIMITED
    low: int = 0
    min: int = 0
    swap_max: int = PAGES_UNLIMITED
    memsw: int = PAGES_UNLIMITED
    soft: int = PAGES_UNLIMITED
    oom_group: int = 0
    swappiness: int = 60
    file_bytes: int = 0
    cold_bytes: int = 0  # of file_bytes: not used for 300 s
    peak_bytes: int = 0
    events: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("low", "high", "max", "oom", "oom_kill", "oom_group_kill"), 0
        )
    )
    wmark_ratio: int = 0
    wmark_scale_factor: int = 50
    wmark_min_adj: int = 0
    priority: int = 0
    use_priority_oom: int = 0
    pagecache_enable: int = 0
    pagecache_size: int = 0
    pagecache_sync: int = 0


def _state(group: Cgroup) -> MemoryState:
    return group.state(MemoryState)


def anon_bytes(group: Cgroup) -> int:
    return sum(task.anon_bytes for below in group.walk() for task in below.tasks.values())


def file_bytes(group: Cgroup) -> int:
    return sum(_state(below).file_bytes for below in group.walk())


def usage_bytes(group: Cgroup) -> int:
    """What is charged to the group and everything below it."""
    return anon_bytes(group) + file_bytes(group)


def _protected_file(group: Cgroup, room: int) -> int:
    """Bytes of this group's own page cache that `memory.min` keeps from reclaim.

    room: what the ancestors' protection leaves for it.
    """
    keep = min(_state(group).min * PAGE_SIZE, room)
    return min(_state(group).file_bytes, keep)


def reclaim(group: Cgroup, target_bytes: int) -> None:
    """Drop unprotected page cache below `group` until its usage is at most `target_bytes`."""
    excess = usage_bytes(group) - target_bytes
    for below in group.walk():
        if excess <= 0:
            return
        room = PAGES_UNLIMITED * PAGE_SIZE
        for above in [below, *below.ancestors()]:
            if above is group:
                break
            room = min(room, _state(above).min * PAGE_SIZE)
        protected = _protected_file(below, room) if below is not group else 0
        dropped = min(excess, _state(below).file_bytes - protected)
        _state(below).file_bytes -= dropped
        excess -= dropped


def _kill_until(group: Cgroup, target_bytes: int) -> None:
    while usage_bytes(group) > target_bytes:
        victims = [
            task
            for below in group.walk()
            for task in below.tasks.values()
            if task.oom_score_adj > -1000
        ]
        if not victims:
            return
        victim = max(victims, key=lambda task: (task.anon_bytes, task.oom_score_adj))
        home = group.hierarchy.group_of(victim)
        doomed = [victim]
        for above in [home, *home.ancestors()]:
            if _state(above).oom_group and not above.is_root:
                doomed = [t for b in above.walk() for t in b.tasks.values() if t in victims]
            if above is group:
                break
        events = _state(home).events
        events["oom_kill"] += len(doomed)
        events["oom_group_kill"] += int(len(doomed) > 1)
        for task in doomed:
            group.kernel.exit(task.pid)


def charge(group: Cgroup) -> None:
    """Apply the limits on the way up after usage grew in `group`."""
    for above in [group, *group.ancestors()]:
        state = _state(above)
        used = usage_bytes(above)
        state.peak_bytes = max(state.peak_bytes, used)
        if used > state.high * PAGE_SIZE:
            state.events["high"] += 1
            reclaim(above, state.high * PAGE_SIZE)
        if usage_bytes(above) > state.max * PAGE_SIZE:
            state.events["max"] += 1
            reclaim(above, state.max * PAGE_SIZE)
            if usage_bytes(above) > state.max * PAGE_SIZE:
                state.events["oom"] += 1
                _kill_until(above, state.max * PAGE_SIZE)


def _counter(field_name: str, unlimited: str) -> Callable[[Cgroup], str]:
    def read(group: Cgroup) -> str:
        number: int = getattr(_state(group), field_name)
        if unlimited == "max" and number == PAGES_UNLIMITED:
            return "max\n"
        return f"{number * PAGE_SIZE}\n"

    return read


def _setter(field_name: str) -> Callable[[Cgroup, str], None]:
    def write(group: Cgroup, text: str) -> None:
        setattr(_state(group), field_name, pages(text, "max"))

    return write


def _write_max(group: Cgroup, text: str) -> None:
    state = _state(group)
    state.max = pages(text, "max")
    if usage_bytes(group) > state.max * PAGE_SIZE:
        reclaim(group, state.max * PAGE_SIZE)
        if usage_bytes(group) > state.max * PAGE_SIZE:
            state.events["oom"] += 1
            _kill_until(group, state.max * PAGE_SIZE)


def _write_high(group: Cgroup, text: str) -> None:
    state = _state(group)
    state.high = pages(text, "max")
    reclaim(group, state.high * PAGE_SIZE)


def _write_limit_v1(group: Cgroup, text: str) -> None:
    if group.is_root:
        refuse(errno.EINVAL, "the root has no limit")
    wanted = pages(text, "-1")
    state = _state(group)
    if wanted > state.memsw:
        refuse(errno.EINVAL, "above memory.memsw.limit_in_bytes")
    reclaim(group, wanted * PAGE_SIZE)
    if usage_bytes(group) > wanted * PAGE_SIZE:
        refuse(errno.EBUSY, "more is in use than can be reclaimed")
    state.max = wanted


def _write_memsw(group: Cgroup, text: str) -> None:
    if group.is_root:
        refuse(errno.EINVAL, "the root has no limit")
    wanted = pages(text, "-1")
    state = _state(group)
    if wanted < state.max:
        refuse(errno.EINVAL, "below memory.limit_in_bytes")
    if usage_bytes(group) > wanted * PAGE_SIZE:
        refuse(errno.EBUSY)
    state.memsw = wanted


def _write_soft(group: Cgroup, text: str) -> None:
    if group.is_root:
        refuse(errno.EINVAL)
    _state(group).soft = pages(text, "-1")


def _write_oom_group(group: Cgroup, text: str) -> None:
    number = signed(text.strip())
    if number not in (0, 1):
        refuse(errno.EINVAL)
    _state(group).oom_group = number


def _write_reclaim(group: Cgroup, text: str) -> None:
    wanted = pages(text, "max") * PAGE_SIZE
    before = usage_bytes(group)
    reclaim(group, max(0, before - wanted))
    if before - usage_bytes(group) < wanted:
        refuse(errno.EAGAIN, "reclaimed less than asked")


def _stat_v2(group: Cgroup) -> str:
    anon, file = anon_bytes(group), file_bytes(group)
    return (
        f"anon {anon}\nfile {file}\nkernel 0\nslab 0\nsock 0\nshmem 0\nfile_mapped 0\n"
        f"file_dirty 0\nfile_writeback 0\n"
        f"inactive_anon {anon}\nactive_anon 0\ninactive_file {file}\nactive_file 0\n"
        "unevictable 0\npgfault 0\npgmajfault 0\n"
    )


def _stat_v1(group: Cgroup) -> str:
    own_anon = sum(task.anon_bytes for task in group.tasks.values())
    own_file = _state(group).file_bytes
    lines: list[str] = []
    sums = (
        ("", own_file, own_anon),
        ("total_", file_bytes(group), anon_bytes(group)),
    )
    for prefix, file, anon in sums:
        lines += [
            f"{prefix}cache {file}",
            f"{prefix}rss {anon}",
            f"{prefix}inactive_anon {anon}",
            f"{prefix}active_anon 0",
            f"{prefix}inactive_file {file}",
            f"{prefix}active_file 0",
            f"{prefix}unevictable 0",
        ]
        if not prefix:
            lines.append(f"hierarchical_memory_limit {_hierarchical(group) * PAGE_SIZE}")
    return "\n".join(lines) + "\n"


def _idle_page_stats(group: Cgroup) -> str:
    """kidled's statistics; all zero while it does not scan."""
    switches = group.kernel.switches
    period = switches["kernel/mm/kidled/scan_period_in_seconds"]
    hierarchy = switches["kernel/mm/kidled/use_hierarchy"]
    counted = list(group.walk()) if hierarchy or group.parent is None else [group]
    cold = sum(_state(one).cold_bytes for one in counted) if period else 0
    warm = sum(_state(one).file_bytes for one in counted) - cold if period else 0
    bounds = (1, 2, 5, 15, 30, 60, 120, 240)
    at = next((at for at, bound in enumerate(bounds) if bound * period >= 300), len(bounds) - 1)
    lines = [
        "# version: 1.0", "# page_scans: 9", "# slab_scans: 0",
        f"# scan_period_in_seconds: {period}", f"# use_hierarchy: {hierarchy}",
        f"# buckets: {','.join(map(str, bounds))}", *["#"] * 8,
    ]  # fmt: skip
    for name in (
        "csei", "dsei", "cfei", "dfei", "csui", "dsui", "cfui", "dfui", "csea", "dsea", "cfea",
        "dfea", "csua", "dsua", "cfua", "dfua", "slab",
    ):  # fmt: skip
        row = [0] * len(bounds)
        if name == "cfei":
            row[0] += warm
            row[at] += cold
        lines.append(f"  {name} " + " ".join(f"{number:>15}" for number in row))
    return "\n".join(lines) + "\n"


def _hierarchical(group: Cgroup) -> int:
    return min(_state(above).max for above in [group, *group.ancestors()])


def _numa_stat(group: Cgroup) -> str:
    nodes = sorted(group.kernel.online_nodes)
    anon, file = anon_bytes(group), file_bytes(group)
    own_anon = sum(task.anon_bytes for task in group.tasks.values())
    first = nodes[0]

    def line(number: int) -> str:
        return " ".join(f"N{node}={number if node == first else 0}" for node in nodes)

    if group.hierarchy.version == 2:
        return (
            f"anon {line(anon)}\nfile {line(file)}\ninactive_anon {line(anon)}\n"
            f"active_anon {line(0)}\nunevictable {line(0)}\n"
        )
    lines: list[str] = []
    for prefix, of_file, of_anon in (
        ("", _state(group).file_bytes, own_anon),
        ("hierarchical_", file, anon),
    ):
        counts = {"total": of_anon + of_file, "file": of_file, "anon": of_anon, "unevictable": 0}
        for name, number in counts.items():
            lines.append(f"{prefix}{name}={number // PAGE_SIZE} {line(number // PAGE_SIZE)}")
    return "\n".join(lines) + "\n"


def _events(group: Cgroup) -> str:
    total = dict.fromkeys(_state(group).events, 0)
    for below in group.walk():
        for name, number in _state(below).events.items():
            total[name] += number
    return "".join(f"{name} {number}\n" for name, number in total.items())


def _alibaba(name: str, field_name: str, low: int, high: int) -> CgroupFile:
    def read(group: Cgroup) -> str:
        return f"{getattr(_state(group), field_name)}\n"

    def write(group: Cgroup, text: str) -> None:
        number = signed(text)
        if not low <= number <= high:
            refuse(errno.EINVAL, f"{name} is {low}..{high}")
        setattr(_state(group), field_name, number)

    return CgroupFile(name, read, write, feature=Feature.ALIBABA)


def _write_pagecache_size(group: Cgroup, text: str) -> None:
    wanted = pages(text, "max")
    if wanted > _state(group).max:
        refuse(errno.EINVAL, "above the memory limit")
    _state(group).pagecache_size = wanted


ALIBABA_FILES = (
    _alibaba("memory.wmark_ratio", "wmark_ratio", 0, 100),
    _alibaba("memory.wmark_scale_factor", "wmark_scale_factor", 1, 1000),
    _alibaba("memory.wmark_min_adj", "wmark_min_adj", -25, 50),
    _alibaba("memory.priority", "priority", 0, 12),
    _alibaba("memory.use_priority_oom", "use_priority_oom", 0, 1),
    _alibaba("memory.pagecache_limit.enable", "pagecache_enable", 0, 1),
    _alibaba("memory.pagecache_limit.sync", "pagecache_sync", 0, 1),
    CgroupFile(
        "memory.pagecache_limit.size",
        lambda group: f"{_state(group).pagecache_size * PAGE_SIZE}\n",
        _write_pagecache_size,
        feature=Feature.ALIBABA,
    ),
)


def _write_swappiness(group: Cgroup, text: str) -> None:
    number = unsigned(text)
    if number > 200:
        refuse(errno.EINVAL)
    _state(group).swappiness = number


def _force_empty(group: Cgroup, text: str) -> None:
    reclaim(group, 0)


MEMORY = Controller(
    "memory",
    v1=(
        CgroupFile("memory.limit_in_bytes", _counter("max", "-1"), _write_limit_v1),
        CgroupFile("memory.soft_limit_in_bytes", _counter("soft", "-1"), _write_soft),
        CgroupFile("memory.usage_in_bytes", lambda group: f"{usage_bytes(group)}\n"),
        CgroupFile(
            "memory.max_usage_in_bytes",
            lambda group: f"{max(_state(group).peak_bytes, usage_bytes(group))}\n",
        ),
        CgroupFile(
            "memory.memsw.limit_in_bytes",
            _counter("memsw", "-1"),
            _write_memsw,
            feature=Feature.SWAP_ACCOUNTING,
        ),
        CgroupFile("memory.use_hierarchy", lambda group: "1\n"),
        CgroupFile("memory.force_empty", None, _force_empty),
        CgroupFile(
            "memory.swappiness", lambda group: f"{_state(group).swappiness}\n", _write_swappiness
        ),
        CgroupFile("memory.stat", _stat_v1),
        CgroupFile("memory.numa_stat", _numa_stat),
        CgroupFile("memory.idle_page_stats", _idle_page_stats, feature=Feature.ALIBABA),
        CgroupFile(
            "memory.oom_control", lambda group: "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n"
        ),
        # Alibaba's kernel offers the v2 protection files on v1.
        CgroupFile("memory.min", _counter("min", "max"), _setter("min"), feature=Feature.ALIBABA),
        CgroupFile("memory.low", _counter("low", "max"), _setter("low"), feature=Feature.ALIBABA),
        CgroupFile("memory.high", _counter("high", "max"), _write_high, feature=Feature.ALIBABA),
        _alibaba("memory.oom.group", "oom_group", 0, 1),
        *ALIBABA_FILES,
    ),
    v2=(
        CgroupFile("memory.current", lambda g: f"{usage_bytes(g)}\n", on_root=False),
        CgroupFile("memory.min", _counter("min", "max"), _setter("min"), on_root=False),
        CgroupFile("memory.low", _counter("low", "max"), _setter("low"), on_root=False),
        CgroupFile("memory.high", _counter("high", "max"), _write_high, on_root=False),
        CgroupFile("memory.max", _counter("max", "max"), _write_max, on_root=False),
        CgroupFile(
            "memory.swap.max", _counter("swap_max", "max"), _setter("swap_max"), on_root=False
        ),
        CgroupFile("memory.swap.current", lambda group: "0\n", on_root=False),
        CgroupFile(
            "memory.peak",
            lambda group: f"{max(_state(group).peak_bytes, usage_bytes(group))}\n",
            on_root=False,
            since=(5, 19),
        ),
        CgroupFile(
            "memory.oom.group",
            lambda group: f"{_state(group).oom_group}\n",
            _write_oom_group,
            on_root=False,
            since=(4, 19),
        ),
        CgroupFile("memory.events", _events, on_root=False),
        CgroupFile("memory.stat", _stat_v2),
        CgroupFile("memory.numa_stat", _numa_stat),
        CgroupFile("memory.reclaim", None, _write_reclaim, since=(5, 19)),
        *ALIBABA_FILES,
    ),
)
