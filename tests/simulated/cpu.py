"""The cpu controller: weight, bandwidth, idle; and cpuacct's accounting.

Bandwidth: quota and period at least 1 ms, period at most 1 s, burst at most the quota unless the
quota is unlimited. On v1 a child's quota/period may not exceed its parent's at any moment; on v2
the smaller one counts. Weight is one number inside, written as shares (v1) or weight (v2); a group
that is idle refuses to change it.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from tests.simulated.profiles import Feature
from tests.simulated.tree import Cgroup, CgroupFile, Controller
from tests.simulated.values import U64_MAX, refuse, round_closest, signed, unsigned

UNLIMITED = -1
MIN_QUOTA_US = 1000
MAX_PERIOD_US = 1_000_000
MAX_RUNTIME_US = (1 << 44) - 1
MAX_US = U64_MAX // 1000

DEFAULT_SHARES = 1024
IDLE_SHARES = 3
MIN_SHARES = 2
MAX_SHARES = 1 << 18


@dataclass
class CpuState:
    shares: int = DEFAULT_SHARES
    quota_us: int = UNLIMITED
    period_us: int = 100_000
    burst_us: int = 0
    idle: int = 0
    bvt: int = 0
    periods: int = 0
    throttled: int = 0
    throttled_us: int = 0
    bursts: int = 0
    burst_total_us: int = 0


def _set_shares(group: Cgroup, shares: int) -> None:
    state = group.state(CpuState)
    if group.is_root:
        refuse(errno.EINVAL, "the root has no weight")
    if state.idle:
        refuse(errno.EINVAL, "an idle group's weight is fixed")
    state.shares = max(MIN_SHARES, min(shares, MAX_SHARES))


def _write_weight(group: Cgroup, text: str) -> None:
    weight = unsigned(text)
    if not 1 <= weight <= 10_000:
        refuse(errno.ERANGE, "a weight is 1..10000")
    _set_shares(group, round_closest(weight * 1024, 100))


def _read_weight(group: Cgroup) -> str:
    weight = round_closest(group.state(CpuState).shares * 100, 1024)
    if group.kernel.profile.kernel >= (6, 12):
        weight = max(1, min(weight, 10_000))
    return f"{weight}\n"


# The weights of the nice levels -20..19.
NICE_WEIGHTS = (
    88761, 71755, 56483, 46273, 36291, 29154, 23254, 18705, 14949, 11916,
    9548, 7620, 6100, 4904, 3906, 3121, 2501, 1991, 1586, 1277,
    1024, 820, 655, 526, 423, 335, 272, 215, 172, 137,
    110, 87, 70, 56, 45, 36, 29, 23, 18, 15,
)  # fmt: skip


def _read_nice(group: Cgroup) -> str:
    shares = group.state(CpuState).shares
    best = min(range(40), key=lambda i: abs(NICE_WEIGHTS[i] - shares))
    return f"{best - 20}\n"


def _write_nice(group: Cgroup, text: str) -> None:
    nice = signed(text)
    if not -20 <= nice <= 19:
        refuse(errno.ERANGE)
    _set_shares(group, NICE_WEIGHTS[nice + 20])


def _write_idle(group: Cgroup, text: str) -> None:
    idle = signed(text)
    if group.is_root or idle not in (0, 1):
        refuse(errno.EINVAL, "cpu.idle is 0 or 1, and not of the root")
    state = group.state(CpuState)
    if idle != state.idle:
        state.idle = idle
        # Leaving idle brings the default weight back, not the one that was set before.
        state.shares = IDLE_SHARES if idle else DEFAULT_SHARES


def _ratio(quota_us: int, period_us: int) -> int | None:
    return None if quota_us == UNLIMITED else (quota_us << 20) // period_us


def _check_schedulable(
    group: Cgroup, limit: int | None, changed: Cgroup, ratio: int | None
) -> None:
    """v1: walk down with the inherited limit; no group may exceed it."""
    for child in group.children.values():
        if child is changed:
            own = ratio
        else:
            state = child.state(CpuState)
            own = _ratio(state.quota_us, state.period_us)
        if own is not None and limit is not None and own > limit:
            refuse(errno.EINVAL, f"{child.path} would exceed its parent's quota")
        _check_schedulable(child, limit if own is None else own, changed, ratio)


def _set_bandwidth(group: Cgroup, quota_us: int, period_us: int, burst_us: int) -> None:
    if group.is_root:
        refuse(errno.EINVAL, "the root has no quota")
    if period_us > MAX_US or burst_us > MAX_US or quota_us > MAX_US:
        refuse(errno.EINVAL)
    unlimited = quota_us == UNLIMITED
    if period_us < MIN_QUOTA_US or (not unlimited and quota_us < MIN_QUOTA_US):
        refuse(errno.EINVAL, "below 1 ms")
    if period_us > MAX_PERIOD_US:
        refuse(errno.EINVAL, "period above 1 s")
    if not unlimited:
        if quota_us > MAX_RUNTIME_US or burst_us + quota_us > MAX_RUNTIME_US:
            refuse(errno.EINVAL, "larger than the scheduler can count")
        if burst_us > quota_us and not group.kernel.profile.has(Feature.ALIBABA):
            refuse(errno.EINVAL, "burst above quota")
    if group.hierarchy.version == 1:
        _check_schedulable(group.hierarchy.root, None, group, _ratio(quota_us, period_us))
    state = group.state(CpuState)
    state.quota_us, state.period_us, state.burst_us = quota_us, period_us, burst_us


def _write_quota(group: Cgroup, text: str) -> None:
    quota_us = signed(text)
    state = group.state(CpuState)
    _set_bandwidth(group, UNLIMITED if quota_us < 0 else quota_us, state.period_us, state.burst_us)


def _write_period(group: Cgroup, text: str) -> None:
    state = group.state(CpuState)
    _set_bandwidth(group, state.quota_us, unsigned(text), state.burst_us)


def _write_burst(group: Cgroup, text: str) -> None:
    state = group.state(CpuState)
    burst_us = unsigned(text)
    if group.kernel.profile.has(Feature.ALIBABA) and burst_us > 100_000_000:
        refuse(errno.EINVAL, "above the range of this kernel")
    _set_bandwidth(group, state.quota_us, state.period_us, burst_us)


def _read_max(group: Cgroup) -> str:
    state = group.state(CpuState)
    quota = "max" if state.quota_us == UNLIMITED else str(state.quota_us)
    return f"{quota} {state.period_us}\n"


def _write_max(group: Cgroup, text: str) -> None:
    """`sscanf("%20s %llu")`: a word, an optional number; what follows is not looked at."""
    state = group.state(CpuState)
    words = text.split()
    if not words:
        refuse(errno.EINVAL)
    quota_word = words[0][:20]
    leading = re.match(r"[0-9]+", quota_word)
    if leading is not None:
        quota_us = int(leading.group())
    elif quota_word == "max":
        quota_us = UNLIMITED
    else:
        refuse(errno.EINVAL, f"{quota_word!r} is neither a number nor max")
    period_us = state.period_us
    if len(words) > 1 and (number := re.match(r"[0-9]+", words[1])) is not None:
        period_us = int(number.group())
    _set_bandwidth(group, quota_us, period_us, state.burst_us)


def _usage_seconds(group: Cgroup) -> float:
    return (
        sum(task.cpu_seconds for below in group.walk() for task in below.tasks.values())
        + group.state(Accounting).past_seconds
    )


@dataclass
class Accounting:
    """CPU time of tasks that have left or ended."""

    past_seconds: float = 0.0


def _stat_v1(group: Cgroup) -> str:
    state = group.state(CpuState)
    text = (
        f"nr_periods {state.periods}\nnr_throttled {state.throttled}\n"
        f"throttled_time {state.throttled_us * 1000}\n"
    )
    if group.kernel.profile.kernel >= (5, 14) or group.kernel.profile.has(Feature.ALIBABA):
        text += f"nr_bursts {state.bursts}\nburst_time {state.burst_total_us * 1000}\n"
    return text


def _base_stat(group: Cgroup) -> str:
    usage_us = int(_usage_seconds(group) * 1_000_000)
    return f"usage_usec {usage_us}\nuser_usec {usage_us}\nsystem_usec 0\n"


def _stat_v2(group: Cgroup) -> str:
    text = _base_stat(group)
    if group.is_root or "cpu" not in group.controllers:
        return text
    state = group.state(CpuState)
    return text + (
        f"nr_periods {state.periods}\nnr_throttled {state.throttled}\n"
        f"throttled_usec {state.throttled_us}\n"
        f"nr_bursts {state.bursts}\nburst_usec {state.burst_total_us}\n"
    )


CPU_STAT_V2 = CgroupFile("cpu.stat", _stat_v2)
"""On v2 a core file: it exists in every group, with or without the controller."""


def _write_bvt(group: Cgroup, text: str) -> None:
    bvt = signed(text)
    if not group.kernel.group_identity_enabled:
        refuse(errno.EINVAL, "kernel.sched_group_identity_enabled is 0")
    if not -1 <= bvt <= 2:
        refuse(errno.EINVAL, "group identity is -1..2")
    group.state(CpuState).bvt = bvt


_BVT = CgroupFile(
    "cpu.bvt_warp_ns",
    lambda group: f"{group.state(CpuState).bvt}\n",
    _write_bvt,
    feature=Feature.ALIBABA,
)


def _read_idle(group: Cgroup) -> str:
    return f"{group.state(CpuState).idle}\n"


def _write_shares(group: Cgroup, text: str) -> None:
    _set_shares(group, unsigned(text))


def _created(group: Cgroup) -> None:
    if group.parent is not None:
        group.state(CpuState).bvt = group.parent.state(CpuState).bvt


CPU = Controller(
    "cpu",
    v1=(
        CgroupFile("cpu.shares", lambda group: f"{group.state(CpuState).shares}\n", _write_shares),
        CgroupFile(
            "cpu.cfs_quota_us", lambda group: f"{group.state(CpuState).quota_us}\n", _write_quota
        ),
        CgroupFile(
            "cpu.cfs_period_us", lambda group: f"{group.state(CpuState).period_us}\n", _write_period
        ),
        CgroupFile(
            "cpu.cfs_burst_us",
            lambda group: f"{group.state(CpuState).burst_us}\n",
            _write_burst,
            since=(5, 14),
            backported=Feature.ALIBABA,
        ),
        CgroupFile("cpu.idle", _read_idle, _write_idle, since=(5, 15), backported=Feature.ALIBABA),
        CgroupFile("cpu.stat", _stat_v1),
        _BVT,
    ),
    v2=(
        CgroupFile("cpu.weight", _read_weight, _write_weight, on_root=False),
        CgroupFile("cpu.weight.nice", _read_nice, _write_nice, on_root=False),
        CgroupFile(
            "cpu.idle",
            _read_idle,
            _write_idle,
            on_root=False,
            since=(5, 15),
            backported=Feature.ALIBABA,
        ),
        CgroupFile("cpu.max", _read_max, _write_max, on_root=False),
        CgroupFile(
            "cpu.max.burst",
            lambda group: f"{group.state(CpuState).burst_us}\n",
            _write_burst,
            on_root=False,
            since=(5, 14),
            backported=Feature.ALIBABA,
        ),
        _BVT,
    ),
    created=_created,
    threaded=True,
)

CPUACCT = Controller(
    "cpuacct",
    v1=(
        CgroupFile("cpuacct.usage", lambda g: f"{int(_usage_seconds(g) * 1e9)}\n"),
        CgroupFile("cpuacct.stat", lambda g: f"user {int(_usage_seconds(g) * 100)}\nsystem 0\n"),
    ),
)
