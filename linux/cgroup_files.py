"""The cgroup files behind resources: name on v1 and v2, format, range, and rules among levels.

Pure. Values are compared in the file's own numbers (a weight on v2, whole pages of memory), never
as text, and a file that holds two values (`cpu.max`) is treated as two. Names, ranges and refusals:
docs/facts/kernel.md, "Cgroup files" and "What a write does".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from apis.cpuset import CpuSet
from linux.resources import UNLIMITED, Resource, Value
from linux.weights import MAX_SHARES, MIN_SHARES, Formula, weight_of_shares

INT64_MAX: Final = (1 << 63) - 1
"""The kernel parses these files' numbers as signed 64-bit integers."""
V1_UNLIMITED_BYTES: Final = 0x7FFFFFFFFFFFF000 - 0xFFFF
"""A v1 memory limit from here on means no limit. The kernel shows its largest page count in bytes,
which depends on the page size; this is below it for pages of 4 to 64 KiB."""
DEFAULT_PERIOD_US: Final = 100_000
"""The kernel's and kubelet's default CFS period. Canonical quotas count per this period."""
MIN_QUOTA_US: Final = 1000
"""The kernel refuses a smaller quota, and a smaller period."""
MAX_PERIOD_US: Final = 1_000_000
"""The kernel refuses a longer period."""


class Codec(Enum):
    """How the file spells the canonical value."""

    NUMBER = "number"
    SHARES = "shares"  # v2: a weight
    QUOTA = "quota"  # v2: first field of cpu.max
    PERIOD = "period"  # v2: second field of cpu.max
    BYTES = "bytes"  # whole pages; "max" and -1 mean no limit
    CPUS = "cpus"


class Levels(Enum):
    """What a value means for the directories above and below."""

    FREE = "free"
    """Nothing: weights and switches count among siblings."""
    ORDERED = "ordered"
    """A parent's value caps the children's effect: grow parents first, shrink children first."""
    ENFORCED = "enforced"
    """Like ORDERED, and the kernel refuses a child above its parent."""


@dataclass(frozen=True, slots=True)
class CgroupFile:
    """One resource's file. `v1` or `v2` is "" where that version has none.

    controller: the v1 hierarchy, and the v2 controller that must be enabled.
    low, high: the canonical range. unlimited: UNLIMITED is a value too, outside that range.
    """

    resource: Resource
    controller: str
    v1: str
    v2: str
    codec: Codec
    low: int = 0
    high: int = INT64_MAX
    unlimited: bool = False
    levels_v1: Levels = Levels.FREE
    levels_v2: Levels = Levels.FREE

    def name(self, version: int) -> str:
        return self.v1 if version == 1 else self.v2

    def levels(self, version: int) -> Levels:
        return self.levels_v1 if version == 1 else self.levels_v2


def _file(
    resource: Resource,
    controller: str,
    codec: Codec = Codec.NUMBER,
    *,
    v2: str | None = None,
    v1: str | None = None,
    low: int = 0,
    high: int = INT64_MAX,
    unlimited: bool = False,
    levels: Levels = Levels.FREE,
    levels_v1: Levels | None = None,
) -> CgroupFile:
    return CgroupFile(
        resource=resource,
        controller=controller,
        v1=resource.value if v1 is None else v1,
        v2=resource.value if v2 is None else v2,
        codec=codec,
        low=low,
        high=high,
        unlimited=unlimited,
        levels_v1=levels if levels_v1 is None else levels_v1,
        levels_v2=levels,
    )


_ORDERED, _ENFORCED = Levels.ORDERED, Levels.ENFORCED

FILES: Final[Mapping[Resource, CgroupFile]] = MappingProxyType(
    {
        file.resource: file
        for file in (
            _file(
                Resource.CPU_SHARES,
                "cpu",
                Codec.SHARES,
                v2="cpu.weight",
                low=MIN_SHARES,
                high=MAX_SHARES,
            ),
            _file(
                Resource.CPU_CFS_QUOTA,
                "cpu",
                Codec.QUOTA,
                v2="cpu.max",
                low=MIN_QUOTA_US,
                unlimited=True,
                levels=_ORDERED,
                levels_v1=_ENFORCED,
            ),
            _file(
                Resource.CPU_CFS_PERIOD,
                "cpu",
                Codec.PERIOD,
                v2="cpu.max",
                low=MIN_QUOTA_US,
                high=MAX_PERIOD_US,
            ),
            _file(Resource.CPU_CFS_BURST, "cpu", v2="cpu.max.burst"),
            _file(Resource.CPU_BVT, "cpu", low=-1, high=2),
            _file(Resource.CPU_IDLE, "cpu", high=1),
            _file(Resource.CPUSET_CPUS, "cpuset", Codec.CPUS, levels=_ORDERED, levels_v1=_ENFORCED),
            _file(Resource.CPUSET_MEMS, "cpuset", Codec.CPUS, levels=_ORDERED, levels_v1=_ENFORCED),
            _file(
                Resource.MEMORY_LIMIT,
                "memory",
                Codec.BYTES,
                v2="memory.max",
                unlimited=True,
                levels=_ORDERED,
            ),
            _file(Resource.MEMORY_MIN, "memory", Codec.BYTES, levels=_ORDERED),
            _file(Resource.MEMORY_LOW, "memory", Codec.BYTES, levels=_ORDERED),
            _file(Resource.MEMORY_HIGH, "memory", Codec.BYTES, unlimited=True, levels=_ORDERED),
            _file(Resource.MEMORY_WMARK_RATIO, "memory", high=100),
            _file(Resource.MEMORY_WMARK_SCALE_FACTOR, "memory", low=1, high=1000),
            _file(Resource.MEMORY_WMARK_MIN_ADJ, "memory", low=-25, high=50),
            _file(Resource.MEMORY_PRIORITY, "memory", high=12),
            _file(Resource.MEMORY_USE_PRIORITY_OOM, "memory", high=1),
            _file(Resource.MEMORY_OOM_GROUP, "memory", high=1),
            _file(Resource.MEMORY_PAGECACHE_LIMIT_ENABLE, "memory", high=1),
            _file(Resource.MEMORY_PAGECACHE_LIMIT_SIZE, "memory", Codec.BYTES),
            _file(Resource.MEMORY_PAGECACHE_LIMIT_SYNC, "memory", high=1),
        )
    }
)
"""Every resource that is a cgroup file."""

LIMITS: Final = frozenset(resource for resource, file in FILES.items() if file.unlimited)
"""Resources whose value may be UNLIMITED."""

Number = int | CpuSet
"""A value in the file's own unit: a weight on v2, bytes, µs, a set; UNLIMITED means no limit."""


def field_text(file: CgroupFile, version: int, content: bytes | str) -> str:
    """Return the part of the file's content that belongs to the resource.

    That part is what the journal keeps and what a restore writes back. Raises ValueError.
    """
    text = content.decode("ascii", "replace") if isinstance(content, bytes) else content
    text = text.strip()
    if version == 2 and file.codec in (Codec.QUOTA, Codec.PERIOD):
        fields = text.split()
        if len(fields) != 2:
            raise ValueError(f"{file.v2}: {text[:64]!r} is not a quota and a period")
        return fields[0 if file.codec is Codec.QUOTA else 1]
    return text


def number(file: CgroupFile, text: str) -> Number:
    """Parse `field_text` (or a text to be written) into the file's own unit; ValueError."""
    if file.codec is Codec.CPUS:
        return CpuSet.parse(text)
    if text == "max":
        return UNLIMITED if file.unlimited else INT64_MAX
    parsed = int(text)
    if file.codec is Codec.BYTES and file.unlimited and parsed >= V1_UNLIMITED_BYTES:
        return UNLIMITED
    if file.unlimited and parsed < 0:
        return UNLIMITED
    return parsed


def same(file: CgroupFile, wanted: str, found: str, *, page_size_bytes: int = 4096) -> bool:
    """Return whether a file shows `found` after `wanted` was written to it.

    Both are texts as `field_text` returns. Memory is compared in whole pages, since the kernel
    rounds down to them.
    """
    if wanted == found:
        return True
    try:
        one, other = number(file, wanted), number(file, found)
    except ValueError:
        return False
    if one == other:
        return True
    if file.codec is not Codec.BYTES or UNLIMITED in (one, other):
        return False
    assert isinstance(one, int) and isinstance(other, int)
    return one // page_size_bytes == other // page_size_bytes


def in_range(file: CgroupFile, value: Value) -> tuple[Number, str]:
    """Return the canonical `value` brought into the file's range, and a note on the change.

    The note is "" for an unchanged value. Raises ValueError for another type or an empty set.
    """
    if file.codec is Codec.CPUS:
        if not isinstance(value, CpuSet):
            raise ValueError(f"{file.resource} needs a CPU set, not {type(value).__name__}")
        if not value:
            raise ValueError(f"{file.resource} cannot be set to the empty set")
        return value, ""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{file.resource} needs a number, not {type(value).__name__}")
    if file.unlimited and value < 0:
        return UNLIMITED, ""
    if value < file.low:
        return file.low, f"{value} raised to {file.low}, the smallest that the kernel accepts"
    if value > file.high:
        return file.high, f"{value} lowered to {file.high}, the largest that the kernel accepts"
    return value, ""


def encode(
    file: CgroupFile,
    version: int,
    value: Number,
    *,
    formula: Formula = Formula.LINEAR,
    period_us: int = DEFAULT_PERIOD_US,
) -> str:
    """Return the field's text for a canonical value in range.

    formula: how shares become a weight on v2. period_us: the group's actual period; a canonical
    quota or burst is per 100 ms and is scaled to it, rounded up.
    """
    if isinstance(value, CpuSet):
        return str(value)
    if file.codec is Codec.SHARES and version == 2:
        return str(weight_of_shares(value, formula))
    if value == UNLIMITED and file.unlimited:
        return "-1" if version == 1 and file.codec is not Codec.NUMBER else "max"
    if file.codec is Codec.QUOTA:
        return str(quota_in_period(value, period_us))
    if file.resource is Resource.CPU_CFS_BURST:
        return str(-(-value * period_us // DEFAULT_PERIOD_US))
    return str(value)


def quota_in_period(quota_us: int, period_us: int) -> int:
    """Return a quota per 100 ms as a quota per `period_us`, rounded up.

    period_us 0 means that the period is unknown: the quota stays.
    """
    if quota_us <= 0 or period_us in (0, DEFAULT_PERIOD_US):
        return quota_us
    return max(-(-quota_us * period_us // DEFAULT_PERIOD_US), MIN_QUOTA_US)


def quota_per_100ms(quota_us: int, period_us: int) -> int:
    """Return a quota per `period_us` as a quota per 100 ms, rounded down.

    `quota_in_period` rounds up, so both together give the first quota again.
    """
    if quota_us <= 0 or period_us in (0, DEFAULT_PERIOD_US):
        return quota_us
    return quota_us * DEFAULT_PERIOD_US // period_us


def content(file: CgroupFile, version: int, text: str, current: bytes) -> bytes:
    """Return the bytes to write so that the resource's field becomes `text`.

    current: the file's present content; it matters for the period of `cpu.max`, which cannot be
    written without its quota. An empty set is written as a newline, because the kernel does not
    see a write of no bytes.
    """
    if version == 2 and file.codec is Codec.PERIOD:
        quota = current.split()[0].decode("ascii")
        return f"{quota} {text}".encode("ascii")
    return text.encode("ascii") or b"\n"


DEFAULTS: Final[Mapping[Resource, tuple[str, str]]] = MappingProxyType(
    {
        Resource.CPU_SHARES: ("1024", "100"),
        Resource.CPU_CFS_QUOTA: ("-1", "max"),
        Resource.CPU_CFS_PERIOD: ("100000", "100000"),
        Resource.CPU_CFS_BURST: ("0", "0"),
        Resource.CPU_IDLE: ("0", "0"),
        Resource.MEMORY_LIMIT: ("-1", "max"),
        Resource.MEMORY_MIN: ("0", "0"),
        Resource.MEMORY_LOW: ("0", "0"),
        Resource.MEMORY_HIGH: (str(INT64_MAX), "max"),
        Resource.MEMORY_OOM_GROUP: ("0", "0"),
    }
)
"""What a new group shows on (v1, v2): the original of a value that kubelet did not request."""
