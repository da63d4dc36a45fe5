"""What the kernel says about limits and protection of memory: rows of the table."""

from __future__ import annotations

from errno import (
    EBUSY,
    EINVAL,
)

from tests.behaviours.steps import (
    Allocate,
    Ends,
    HasLine,
    Make,
    Outgrow,
    Reads,
    Start,
    Write,
    on_v1,
    on_v2,
)

LIMIT = "g/memory.limit_in_bytes"
UNLIMITED_V1 = "9223372036854771712"

MEMORY_V1 = (
    on_v1("a limit starts unlimited", Make("g"), Reads(LIMIT, UNLIMITED_V1)),
    on_v1("-1 is unlimited and reads as the largest number", Make("g"), Write(LIMIT, "1048576"),
          Write(LIMIT, "-1"), Reads(LIMIT, UNLIMITED_V1)),
    on_v1("other negative numbers are none", Make("g"), Write(LIMIT, "-2", EINVAL)),
    on_v1("v1 knows no max", Make("g"), Write(LIMIT, "max", EINVAL)),
    on_v1("a limit is rounded down to pages", Make("g"), Write(LIMIT, "4097"),
          Reads(LIMIT, "4096")),
    on_v1("less than a page is 0", Make("g"), Write(LIMIT, "4095"), Reads(LIMIT, "0")),
    on_v1("suffixes count", Make("g"), Write(LIMIT, "1m"), Reads(LIMIT, "1048576"),
          Write(LIMIT, "1G\n"), Reads(LIMIT, "1073741824")),
    on_v1("odd suffixes do not", Make("g"), Write(LIMIT, "1gb", EINVAL),
          Write(LIMIT, "1e3", EINVAL), Write(LIMIT, "1.5g", EINVAL)),
    on_v1("the largest number is unlimited", Make("g"), Write(LIMIT, "9223372036854775807"),
          Reads(LIMIT, UNLIMITED_V1)),
    on_v1(
        "a child may exceed its parent",
        Make("g"), Make("g/h"), Write(LIMIT, "1048576"),
        Write("g/h/memory.limit_in_bytes", "2097152"),
        Reads("g/h/memory.limit_in_bytes", "2097152"),
    ),
    on_v1(
        "a limit cannot fall below what is in use",
        Make("g"), Start(), Write("memory:g/cgroup.procs", "{pid}"), Allocate(64),
        Write(LIMIT, "33554432", EBUSY), Reads(LIMIT, UNLIMITED_V1),
    ),
    on_v1("usage cannot be set", Make("g"), Write("g/memory.usage_in_bytes", "0", EINVAL)),
    on_v1(
        "a refused limit leaves the former one, and the process",
        Make("g"), Write(LIMIT, "128m"), Start(), Write("memory:g/cgroup.procs", "{pid}"),
        Allocate(64), Write(LIMIT, "32m", EBUSY), Reads(LIMIT, "134217728"), Allocate(8),
    ),
    on_v1(
        "what is in use below counts too",
        Make("g"), Make("g/h"), Start(), Write("memory:g/h/cgroup.procs", "{pid}"), Allocate(64),
        Write(LIMIT, "32m", EBUSY), Write("g/h/memory.limit_in_bytes", "128m"),
        Write(LIMIT, "128m"),
    ),
    on_v1(
        "what is in use may stand above a limit only further down",
        Make("g"), Make("g/h"), Start(), Write("memory:g/cgroup.procs", "{pid}"), Allocate(64),
        Write("g/h/memory.limit_in_bytes", "32m"), Write(LIMIT, "32m", EBUSY),
    ),
    on_v1(
        "who grows beyond the limit is killed",
        Make("g"), Write(LIMIT, "32m"), Start(), Write("memory:g/cgroup.procs", "{pid}"),
        Outgrow(64), Ends(),
    ),
    on_v1(
        "a parent's limit kills below as well",
        Make("g"), Make("g/h"), Write(LIMIT, "32m"), Start(),
        Write("memory:g/h/cgroup.procs", "{pid}"), Outgrow(64), Ends(),
        Reads("g/h/memory.limit_in_bytes", UNLIMITED_V1),
    ),
)  # fmt: skip

MEMORY_V2 = (
    on_v2(
        "limits and protections start open",
        Make("g"), Reads("g/memory.max", "max"), Reads("g/memory.high", "max"),
        Reads("g/memory.min", "0"), Reads("g/memory.low", "0"),
    ),
    on_v2(
        "sizes are rounded down to pages",
        Make("g"), Write("g/memory.max", "10000"), Reads("g/memory.max", "8192"),
        Write("g/memory.min", "4097"), Reads("g/memory.min", "4096"),
        Write("g/memory.low", "4095"), Reads("g/memory.low", "0"),
        Write("g/memory.high", "1m"), Reads("g/memory.high", "1048576"),
    ),
    on_v2(
        "the largest number is max",
        Make("g"), Write("g/memory.high", "9223372036854775807"), Reads("g/memory.high", "max"),
        Write("g/memory.min", "max"), Reads("g/memory.min", "max"),
    ),
    on_v2(
        "-1 is not a size on v2",
        Make("g"), Write("g/memory.max", "-1", EINVAL), Write("g/memory.min", "-1", EINVAL),
        Write("g/memory.high", "-1", EINVAL),
    ),
    on_v2("words are not sizes", Make("g"), Write("g/memory.max", "much", EINVAL)),
    on_v2("a newline is 0 bytes", Make("g"), Write("g/memory.low", "1m"),
          Write("g/memory.low", "\n"), Reads("g/memory.low", "0")),
    on_v2(
        "a child may name more than its parent",
        Make("g"), Make("g/h"), Write("g/cgroup.subtree_control", "+memory"),
        Write("g/memory.min", "1048576"), Write("g/h/memory.min", "2097152"),
        Reads("g/h/memory.min", "2097152"),
        Write("g/memory.max", "1048576"), Write("g/h/memory.max", "2097152"),
    ),
    on_v2(
        "memory.oom.group is 0 or 1",
        Make("g"), Reads("g/memory.oom.group", "0"), Write("g/memory.oom.group", "1"),
        Reads("g/memory.oom.group", "1"), Write("g/memory.oom.group", "2", EINVAL),
        Write("g/memory.oom.group", "-1", EINVAL),
    ),
    on_v2(
        "a limit below what is in use kills",
        Make("g"), Start(), Write("g/cgroup.procs", "{pid}"), Allocate(64),
        Write("g/memory.max", "8m"), Reads("g/memory.max", "8388608"), Ends(),
        HasLine("g/memory.events", "oom_kill 1"),
    ),
    on_v2(
        "who grows beyond the limit is killed",
        Make("g"), Write("g/memory.max", "32m"), Start(), Write("g/cgroup.procs", "{pid}"),
        Outgrow(64), Ends(), HasLine("g/memory.events", "oom_kill 1"),
    ),
    on_v2("memory.current cannot be set", Make("g"), Write("g/memory.current", "0", EINVAL)),
)  # fmt: skip
