"""What the kernel says about shares, quotas, bursts and CPU sets: rows of the table."""

from __future__ import annotations

from errno import (
    EACCES,
    EBUSY,
    EINVAL,
    ENOSPC,
    EOVERFLOW,
    ERANGE,
)

from tests.behaviours.steps import (
    Make,
    Reads,
    Remove,
    Start,
    Write,
    WriteSoon,
    on_v1,
    on_v2,
)

SHARES, WEIGHT = "g/cpu.shares", "g/cpu.weight"
QUOTA, PERIOD, BURST = "g/cpu.cfs_quota_us", "g/cpu.cfs_period_us", "g/cpu.cfs_burst_us"
MAX, MAX_BURST = "g/cpu.max", "g/cpu.max.burst"

WEIGHTS = (
    on_v1("shares start at 1024", Make("g"), Reads(SHARES, "1024")),
    on_v1("shares below 2 become 2", Make("g"), Write(SHARES, "0"), Reads(SHARES, "2")),
    on_v1(
        "shares above 262144 become 262144", Make("g"), Write(SHARES, "999999"),
        Reads(SHARES, "262144"),
    ),
    on_v1("shares may be hexadecimal", Make("g"), Write(SHARES, "0x400"), Reads(SHARES, "1024")),
    on_v1("shares take a last newline", Make("g"), Write(SHARES, "512\n"), Reads(SHARES, "512")),
    on_v1("shares take no blanks", Make("g"), Write(SHARES, " 512", EINVAL)),
    on_v1("shares take no sign", Make("g"), Write(SHARES, "-1", EINVAL)),
    on_v1("shares take no words", Make("g"), Write(SHARES, "many", EINVAL)),
    on_v1("shares beyond 64 bits", Make("g"), Write(SHARES, "18446744073709551616", ERANGE)),
    on_v2("weight starts at 100", Make("g"), Reads(WEIGHT, "100")),
    on_v2("weight 0 is out of range", Make("g"), Write(WEIGHT, "0", ERANGE), Reads(WEIGHT, "100")),
    on_v2("weight 10001 is out of range", Make("g"), Write(WEIGHT, "10001", ERANGE)),
    on_v2(
        "every weight reads back as written",
        Make("g"),
        *(step for weight in (1, 2, 17, 39, 59, 79, 100, 174, 625, 942, 9999, 10000)
          for step in (Write(WEIGHT, str(weight)), Reads(WEIGHT, str(weight)))),
    ),
    on_v2("weight takes no words", Make("g"), Write(WEIGHT, "max", EINVAL)),
    on_v2("weight takes no blanks", Make("g"), Write(WEIGHT, " 5", EINVAL)),
    on_v2("nice and weight are one value", Make("g"), Write("g/cpu.weight.nice", "19"),
          Reads(WEIGHT, "1"), Reads("g/cpu.weight.nice", "19")),
)  # fmt: skip

IDLE = (
    on_v1("idle starts at 0", Make("g"), Reads("g/cpu.idle", "0"), since=(5, 15)),
    on_v2("idle starts at 0", Make("g"), Reads("g/cpu.idle", "0"), since=(5, 15)),
    on_v1(
        "idle is 0 or 1", Make("g"), Write("g/cpu.idle", "2", EINVAL),
        Write("g/cpu.idle", "-1", EINVAL), since=(5, 15),
    ),
    on_v2(
        "idle is 0 or 1", Make("g"), Write("g/cpu.idle", "2", EINVAL),
        Write("g/cpu.idle", "-1", EINVAL), since=(5, 15),
    ),
    on_v1(
        "an idle group refuses shares and shows 3",
        Make("g"), Write("g/cpu.idle", "1"), Write(SHARES, "1024", EINVAL), Reads(SHARES, "3"),
        since=(5, 15),
    ),
    on_v2(
        "an idle group refuses a weight and shows 0",
        Make("g"), Write("g/cpu.idle", "1"), Write(WEIGHT, "100", EINVAL), Reads(WEIGHT, "0"),
        since=(5, 15), before=(6, 12),
    ),
    on_v2(
        "an idle group refuses a weight and shows 1",
        Make("g"), Write("g/cpu.idle", "1"), Write(WEIGHT, "100", EINVAL), Reads(WEIGHT, "1"),
        since=(6, 12),
    ),
    on_v1(
        "leaving idle brings the default shares, not the former ones",
        Make("g"), Write(SHARES, "2"), Write("g/cpu.idle", "1"), Write("g/cpu.idle", "0"),
        Reads(SHARES, "1024"), since=(5, 15),
    ),
    on_v2(
        "leaving idle brings the default weight, not the former one",
        Make("g"), Write(WEIGHT, "5"), Write("g/cpu.idle", "1"), Write("g/cpu.idle", "0"),
        Reads(WEIGHT, "100"), since=(5, 15),
    ),
    on_v2(
        "idle again changes nothing",
        Make("g"), Write(WEIGHT, "5"), Write("g/cpu.idle", "0"), Reads(WEIGHT, "5"),
        since=(5, 15),
    ),
)  # fmt: skip

BANDWIDTH_V1 = (
    on_v1("quota starts unlimited", Make("g"), Reads(QUOTA, "-1"), Reads(PERIOD, "100000")),
    on_v1("a quota below 1 ms", Make("g"), Write(QUOTA, "999", EINVAL), Write(QUOTA, "1000")),
    on_v1("a quota of 0", Make("g"), Write(QUOTA, "0", EINVAL)),
    on_v1(
        "any negative quota is unlimited",
        Make("g"), Write(QUOTA, "50000"), Write(QUOTA, "-5"), Reads(QUOTA, "-1"),
    ),
    on_v1("quota knows no max", Make("g"), Write(QUOTA, "max", EINVAL)),
    on_v1(
        "the largest quota has 44 bits",
        Make("g"), Write(QUOTA, "17592186044415"), Write(QUOTA, "17592186044416", EINVAL),
    ),
    on_v1(
        "a period is 1 ms to 1 s",
        Make("g"), Write(PERIOD, "999", EINVAL), Write(PERIOD, "1000"),
        Write(PERIOD, "1000000"), Write(PERIOD, "1000001", EINVAL), Reads(PERIOD, "1000000"),
    ),
    on_v1(
        "a child's quota above its parent's",
        Make("g"), Make("g/h"), Write(QUOTA, "50000"),
        Write("g/h/cpu.cfs_quota_us", "60000", EINVAL), Write("g/h/cpu.cfs_quota_us", "50000"),
    ),
    on_v1(
        "a parent's quota below its child's",
        Make("g"), Make("g/h"), Write("g/h/cpu.cfs_quota_us", "60000"),
        Write(QUOTA, "50000", EINVAL), Write(QUOTA, "60000"),
    ),
    on_v1(
        "a child may stay unlimited under a limited parent",
        Make("g"), Make("g/h"), Write(QUOTA, "50000"), Reads("g/h/cpu.cfs_quota_us", "-1"),
    ),
    on_v1(
        "a grandchild is bounded through an unlimited parent",
        Make("g"), Make("g/h"), Make("g/h/i"), Write(QUOTA, "50000"),
        Write("g/h/i/cpu.cfs_quota_us", "60000", EINVAL),
    ),
    on_v1(
        "children together may exceed their parent",
        Make("g"), Make("g/h"), Make("g/i"), Write(QUOTA, "50000"),
        Write("g/h/cpu.cfs_quota_us", "50000"), Write("g/i/cpu.cfs_quota_us", "50000"),
    ),
    on_v1(
        "what counts is quota over period",
        Make("g"), Make("g/h"), Write(QUOTA, "50000"),
        Write("g/h/cpu.cfs_period_us", "200000"), Write("g/h/cpu.cfs_quota_us", "100000"),
        Write("g/h/cpu.cfs_period_us", "100000", EINVAL),
    ),
    on_v1(
        "growing begins at the top",
        Make("g"), Make("g/h"), Write(QUOTA, "50000"), Write("g/h/cpu.cfs_quota_us", "50000"),
        Write("g/h/cpu.cfs_quota_us", "60000", EINVAL), Write(QUOTA, "60000"),
        Write("g/h/cpu.cfs_quota_us", "60000"),
    ),
    on_v1(
        "shrinking begins at the bottom",
        Make("g"), Make("g/h"), Write(QUOTA, "60000"), Write("g/h/cpu.cfs_quota_us", "60000"),
        Write(QUOTA, "50000", EINVAL), Write("g/h/cpu.cfs_quota_us", "50000"),
        Write(QUOTA, "50000"),
    ),
    on_v1(
        "a parent may become unlimited around its child, and a child inside its parent",
        Make("g"), Make("g/h"), Write(QUOTA, "50000"), Write("g/h/cpu.cfs_quota_us", "50000"),
        Write("g/h/cpu.cfs_quota_us", "-1"), Write("g/h/cpu.cfs_quota_us", "50000"),
        Write(QUOTA, "-1"), Reads("g/h/cpu.cfs_quota_us", "50000"),
    ),
    on_v1(
        "a grandchild holds its grandparent through an unlimited parent",
        Make("g"), Make("g/h"), Make("g/h/i"), Write("g/h/i/cpu.cfs_quota_us", "60000"),
        Write(QUOTA, "50000", EINVAL), Reads(QUOTA, "-1"), Write(QUOTA, "60000"),
    ),
    on_v1(
        "a group moves no further than every group below it allows",
        Make("g"), Make("g/h"), Make("g/i"), Write("g/h/cpu.cfs_quota_us", "20000"),
        Write("g/i/cpu.cfs_quota_us", "60000"), Write(QUOTA, "50000", EINVAL),
        Write("g/i/cpu.cfs_quota_us", "50000"), Write(QUOTA, "50000"),
    ),
    on_v1(
        "a group that is gone holds nobody, after a moment",
        Make("g"), Make("g/h"), Write("g/h/cpu.cfs_quota_us", "60000"),
        Write(QUOTA, "50000", EINVAL), Remove("g/h"), WriteSoon(QUOTA, "50000", EINVAL),
    ),
    on_v1(
        "a parent's longer period squeezes its child",
        Make("g"), Make("g/h"), Write(QUOTA, "50000"), Write("g/h/cpu.cfs_quota_us", "50000"),
        Write(PERIOD, "200000", EINVAL), Write(PERIOD, "100000"),
    ),
)  # fmt: skip

BURST_V1 = (
    on_v1("burst starts at 0", Make("g"), Reads(BURST, "0"), since=(5, 14)),
    on_v1(
        "burst reaches up to the quota",
        Make("g"), Write(QUOTA, "50000"), Write(BURST, "50000"), Write(BURST, "50001", EINVAL),
        since=(5, 14),
    ),
    on_v1(
        "a quota cannot fall below the burst",
        Make("g"), Write(QUOTA, "50000"), Write(BURST, "20000"), Write(QUOTA, "10000", EINVAL),
        Write(BURST, "10000"), Write(QUOTA, "10000"), since=(5, 14),
    ),
    on_v1(
        "without a quota any burst is taken, and then bounds the quota",
        Make("g"), Write(BURST, "60000"), Write(QUOTA, "50000", EINVAL), Write(QUOTA, "60000"),
        since=(5, 14),
    ),
    on_v1("burst is not negative", Make("g"), Write(BURST, "-1", EINVAL), since=(5, 14)),
    on_v1(
        "lifting the quota keeps the burst, which bounds the next one",
        Make("g"), Write(QUOTA, "50000"), Write(BURST, "20000"), Write(QUOTA, "-1"),
        Reads(BURST, "20000"), Write(QUOTA, "10000", EINVAL), Write(QUOTA, "20000"),
        since=(5, 14),
    ),
    on_v1(
        "a refused quota leaves quota and burst as they were",
        Make("g"), Write(QUOTA, "50000"), Write(BURST, "20000"), Write(QUOTA, "10000", EINVAL),
        Reads(QUOTA, "50000"), Reads(BURST, "20000"), since=(5, 14),
    ),
    on_v1(
        "burst and quota compare in microseconds, whatever the period",
        Make("g"), Write(PERIOD, "200000"), Write(QUOTA, "50000"), Write(BURST, "50000"),
        Write(BURST, "50001", EINVAL), Write(PERIOD, "1000000"), Reads(BURST, "50000"),
        since=(5, 14),
    ),
    on_v1(
        "quota and burst together have 44 bits",
        Make("g"), Write(QUOTA, "17592186044415"), Write(BURST, "1", EINVAL),
        Write(QUOTA, "17592186044414"), Write(BURST, "1"), since=(5, 14),
    ),
    on_v1(
        "a burst may reach above what the parent has",
        Make("g"), Make("g/h"), Write(QUOTA, "50000"), Write("g/h/cpu.cfs_quota_us", "50000"),
        Write("g/h/cpu.cfs_burst_us", "50000"), since=(5, 14),
    ),
    on_v1(
        "a child's burst does not hold its parent's quota",
        Make("g"), Make("g/h"), Write(QUOTA, "50000"), Write("g/h/cpu.cfs_quota_us", "20000"),
        Write("g/h/cpu.cfs_burst_us", "20000"), Write(QUOTA, "20000"), since=(5, 14),
    ),
)  # fmt: skip

BANDWIDTH_V2 = (
    on_v2("cpu.max starts unlimited", Make("g"), Reads(MAX, "max 100000")),
    on_v2(
        "one number sets the quota and keeps the period",
        Make("g"), Write(MAX, "50000 200000"), Write(MAX, "60000"), Reads(MAX, "60000 200000"),
    ),
    on_v2(
        "max alone keeps the period",
        Make("g"), Write(MAX, "50000 200000"), Write(MAX, "max"), Reads(MAX, "max 200000"),
    ),
    on_v2("-1 is not a quota on v2", Make("g"), Write(MAX, "-1", EINVAL),
          Write(MAX, "-1 100000", EINVAL)),
    on_v2("a quota below 1 ms", Make("g"), Write(MAX, "999", EINVAL), Write(MAX, "1000")),
    on_v2("a period above 1 s", Make("g"), Write(MAX, "max 1000001", EINVAL)),
    on_v2("a period below 1 ms", Make("g"), Write(MAX, "max 999", EINVAL)),
    on_v2("cpu.max takes no words", Make("g"), Write(MAX, "much", EINVAL)),
    on_v2("a newline is not a value", Make("g"), Write(MAX, "\n", EINVAL)),
    on_v2(
        "what follows the second number is not looked at",
        Make("g"), Write(MAX, "50000 100000 nonsense"), Reads(MAX, "50000 100000"),
    ),
    on_v2(
        "a number's tail is not looked at",
        Make("g"), Write(MAX, "50000us"), Reads(MAX, "50000 100000"),
    ),
    on_v2(
        "a child's quota may exceed its parent's",
        Make("g"), Make("g/h"), Write("g/cgroup.subtree_control", "+cpu"),
        Write(MAX, "50000"), Write("g/h/cpu.max", "60000"), Reads("g/h/cpu.max", "60000 100000"),
        Write(MAX, "40000"),
    ),
    on_v2(
        "burst reaches up to the quota",
        Make("g"), Write(MAX, "50000"), Write(MAX_BURST, "50000"),
        Write(MAX_BURST, "50001", EINVAL), since=(5, 14),
    ),
    on_v2(
        "a quota cannot fall below the burst",
        Make("g"), Write(MAX, "50000"), Write(MAX_BURST, "20000"), Write(MAX, "10000", EINVAL),
        Write(MAX_BURST, "10000"), Write(MAX, "10000"), since=(5, 14),
    ),
    on_v2(
        "without a quota any burst is taken, and then bounds the quota",
        Make("g"), Write(MAX_BURST, "60000"), Write(MAX, "50000", EINVAL), Write(MAX, "60000"),
        since=(5, 14),
    ),
    on_v2(
        "lifting the quota keeps the burst",
        Make("g"), Write(MAX, "50000"), Write(MAX_BURST, "20000"), Write(MAX, "max"),
        Reads(MAX_BURST, "20000"), since=(5, 14),
    ),
)  # fmt: skip

CPUSET_V1 = (
    on_v1(
        "a new cpuset is empty and takes no process",
        Make("g"), Reads("g/cpuset.cpus", ""), Reads("g/cpuset.mems", ""), Start(),
        Write("cpuset:g/cgroup.procs", "{pid}", ENOSPC),
    ),
    on_v1(
        "CPUs alone are not enough",
        Make("g"), Write("g/cpuset.cpus", "0"), Start(),
        Write("cpuset:g/cgroup.procs", "{pid}", ENOSPC), Write("g/cpuset.mems", "0"),
        Write("cpuset:g/cgroup.procs", "{pid}"),
    ),
    on_v1(
        "a list reads back in the kernel's form",
        Make("g"), Write("g/cpuset.cpus", "1,0"), Reads("g/cpuset.cpus", "0-1"),
        Write("g/cpuset.cpus", "0 1"), Reads("g/cpuset.cpus", "0-1"),
        Write("g/cpuset.cpus", "0-1:1/2"), Reads("g/cpuset.cpus", "0"),
        Write("g/cpuset.cpus", "0-1,"), Reads("g/cpuset.cpus", "0-1"),
        Write("g/cpuset.cpus", "all"), Reads("g/cpuset.cpus", "{all}"),
    ),
    on_v1(
        "lists that are none",
        Make("g"), Write("g/cpuset.cpus", "a", EINVAL), Write("g/cpuset.cpus", "0-", EINVAL),
        Write("g/cpuset.cpus", "1-0", EINVAL), Write("g/cpuset.cpus", "-1", EINVAL),
        Write("g/cpuset.cpus", "0x1", EINVAL), Write("g/cpuset.cpus", "0;1", EINVAL),
    ),
    on_v1("a CPU that is not there", Make("g"), Write("g/cpuset.cpus", "{beyond}", ERANGE)),
    on_v1("a CPU beyond 32 bits", Make("g"), Write("g/cpuset.cpus", "0-99999999999", EOVERFLOW)),
    on_v1("a node that is not there", Make("g"), Write("g/cpuset.mems", "1000", EINVAL)),
    on_v1("a node beyond all numbers", Make("g"), Write("g/cpuset.mems", "5000", ERANGE)),
    on_v1(
        "a child stays inside its parent",
        Make("g"), Make("g/h"), Write("g/cpuset.cpus", "0"),
        Write("g/h/cpuset.cpus", "0-1", EACCES), Write("g/h/cpuset.cpus", "0"),
    ),
    on_v1(
        "a parent stays around its child",
        Make("g"), Make("g/h"), Write("g/cpuset.cpus", "0-1"), Write("g/h/cpuset.cpus", "1"),
        Write("g/cpuset.cpus", "0", EBUSY), Write("g/h/cpuset.cpus", "0"),
        Write("g/cpuset.cpus", "0"),
    ),
    on_v1(
        "with processes it cannot become empty",
        Make("g"), Write("g/cpuset.cpus", "0"), Write("g/cpuset.mems", "0"), Start(),
        Write("cpuset:g/cgroup.procs", "{pid}"), Write("g/cpuset.cpus", "\n", ENOSPC),
        Reads("g/cpuset.cpus", "0"),
    ),
    on_v1(
        "without processes it can",
        Make("g"), Write("g/cpuset.cpus", "0"), Write("g/cpuset.cpus", "\n"),
        Reads("g/cpuset.cpus", ""),
    ),
    on_v1(
        "effective shows what counts",
        Make("g"), Write("g/cpuset.cpus", "0"), Reads("g/cpuset.effective_cpus", "0"),
    ),
    on_v1(
        "clone_children hands the lists down",
        Make("g"), Write("g/cpuset.cpus", "0"), Write("g/cpuset.mems", "0"),
        Write("cpuset:g/cgroup.clone_children", "1"), Make("g/h"), Reads("g/h/cpuset.cpus", "0"),
    ),
    on_v1(
        "an exclusive group needs an exclusive parent",
        Make("g"), Write("g/cpuset.cpus", "0"), Write("g/cpuset.cpu_exclusive", "1", EACCES),
    ),
)  # fmt: skip

CPUSET_V2 = (
    on_v2(
        "a new cpuset is empty and has its parent's CPUs",
        Make("g"), Reads("g/cpuset.cpus", ""), Reads("g/cpuset.cpus.effective", "{all}"),
        Start(), Write("g/cgroup.procs", "{pid}"),
    ),
    on_v2(
        "a list reads back in the kernel's form",
        Make("g"), Write("g/cpuset.cpus", "1,0"), Reads("g/cpuset.cpus", "0-1"),
        Reads("g/cpuset.cpus.effective", "0-1"),
    ),
    on_v2("a CPU that is not there", Make("g"), Write("g/cpuset.cpus", "{beyond}", ERANGE)),
    on_v2("a list that is none", Make("g"), Write("g/cpuset.cpus", "x", EINVAL)),
    on_v2("a node that is not there", Make("g"), Write("g/cpuset.mems", "1000", EINVAL)),
    on_v2(
        "a child may name more than its parent, and gets the common part",
        Make("g"), Make("g/h"), Write("g/cgroup.subtree_control", "+cpuset"),
        Write("g/cpuset.cpus", "0"), Write("g/h/cpuset.cpus", "0-1"),
        Reads("g/h/cpuset.cpus", "0-1"), Reads("g/h/cpuset.cpus.effective", "0"),
    ),
    on_v2(
        "nothing in common: all of the parent's",
        Make("g"), Make("g/h"), Write("g/cgroup.subtree_control", "+cpuset"),
        Write("g/cpuset.cpus", "0"), Write("g/h/cpuset.cpus", "1"),
        Reads("g/h/cpuset.cpus", "1"), Reads("g/h/cpuset.cpus.effective", "0"),
    ),
    on_v2(
        "a parent may shrink below its child",
        Make("g"), Make("g/h"), Write("g/cgroup.subtree_control", "+cpuset"),
        Write("g/cpuset.cpus", "0-1"), Write("g/h/cpuset.cpus", "1"), Write("g/cpuset.cpus", "0"),
        Reads("g/h/cpuset.cpus", "1"), Reads("g/h/cpuset.cpus.effective", "0"),
        Write("g/cpuset.cpus", "0-1"), Reads("g/h/cpuset.cpus.effective", "1"),
    ),
    on_v2(
        "without processes a list is cleared by a newline",
        Make("g"), Write("g/cpuset.cpus", "0"), Write("g/cpuset.cpus", "\n"),
        Reads("g/cpuset.cpus", ""), Reads("g/cpuset.cpus.effective", "{all}"),
    ),
    on_v2(
        "with processes a list cannot be cleared",
        Make("g"), Write("g/cpuset.cpus", "0"), Start(), Write("g/cgroup.procs", "{pid}"),
        Write("g/cpuset.cpus", "\n", ENOSPC), Reads("g/cpuset.cpus", "0"),
    ),
    on_v2(
        "with processes below, neither",
        Make("g"), Make("g/h"), Write("g/cgroup.subtree_control", "+cpuset"),
        Write("g/cpuset.cpus", "0"), Start(), Write("g/h/cgroup.procs", "{pid}"),
        Write("g/cpuset.cpus", "\n", ENOSPC),
    ),
    on_v2("a group is a member", Make("g"), Reads("g/cpuset.cpus.partition", "member")),
)  # fmt: skip
