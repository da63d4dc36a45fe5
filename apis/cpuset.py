"""Sets of CPUs (or NUMA nodes) as annotations and the kernel write them: "0-3,8".

One type for the node and for the cluster. A set is immutable and always canonical: two sets with
the same CPUs are equal and have the same text. The grammar is the kernel's list format without
strides ("0-9:2/4"), which no annotation and no kernel output uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

MAX_CPU: Final = 8191
"""The largest id that is accepted: Linux builds with at most 8192 CPUs (NR_CPUS)."""

_MAX_TEXT: Final = 64 * 1024
"""The longest text that is read. The longest canonical list (every second of 8192 CPUs) has 20 KiB;
a longer text repeats itself, and would only cost time and memory."""


class CpuSet:
    """An immutable set of small integers, kept as a bit mask."""

    __slots__ = ("mask",)

    mask: int

    def __init__(self, cpus: Iterable[int] = ()) -> None:
        mask = 0
        for cpu in cpus:
            if not 0 <= cpu <= MAX_CPU:
                raise ValueError(f"CPU {cpu} is outside 0..{MAX_CPU}")
            mask |= 1 << cpu
        object.__setattr__(self, "mask", mask)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("CpuSet is immutable")

    @classmethod
    def of_mask(cls, mask: int) -> CpuSet:
        """Return the set whose bit n is set in `mask` for each member n."""
        made = cls.__new__(cls)
        object.__setattr__(made, "mask", mask)
        return made

    @classmethod
    def union(cls, sets: Iterable[CpuSet]) -> CpuSet:
        """Return the CPUs of all sets together."""
        mask = 0
        for one in sets:
            mask |= one.mask
        return cls.of_mask(mask)

    @classmethod
    def parse(cls, text: str) -> CpuSet:
        """Parse a list, with or without blanks around its numbers. "" is the empty set.

        Raises ValueError with a sentence that says what is wrong.
        """
        return _parse(text)

    def __iter__(self) -> Iterator[int]:
        mask, cpu = self.mask, 0
        while mask:
            skip = (mask & -mask).bit_length() - 1
            cpu += skip
            yield cpu
            mask >>= skip + 1
            cpu += 1

    def __len__(self) -> int:
        return self.mask.bit_count()

    def __bool__(self) -> bool:
        return self.mask != 0

    def __contains__(self, cpu: int) -> bool:
        return cpu >= 0 and bool(self.mask >> cpu & 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuSet) and self.mask == other.mask

    def __hash__(self) -> int:
        return hash(self.mask)

    def __or__(self, other: CpuSet) -> CpuSet:
        return CpuSet.of_mask(self.mask | other.mask)

    def __and__(self, other: CpuSet) -> CpuSet:
        return CpuSet.of_mask(self.mask & other.mask)

    def __sub__(self, other: CpuSet) -> CpuSet:
        return CpuSet.of_mask(self.mask & ~other.mask)

    def __le__(self, other: CpuSet) -> bool:
        return self.mask & ~other.mask == 0

    def __str__(self) -> str:
        return _format(self.mask)

    def __repr__(self) -> str:
        return f"CpuSet({_format(self.mask)!r})"


def _number(text: str, whole: str) -> int:
    text = text.strip()
    # str.isdigit() also takes digits of other scripts; int() would too.
    if not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise ValueError(f"{whole[:64]!r} is not a CPU list: {text[:16]!r} is not a number")
    number = int(text)
    if number > MAX_CPU:
        raise ValueError(f"{whole[:64]!r} is not a CPU list: {number} is above {MAX_CPU}")
    return number


@lru_cache(maxsize=1024)
def _parse(text: str) -> CpuSet:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"a CPU list has at most {_MAX_TEXT} characters, this one {len(text)}")
    text = text.strip()
    if not text:
        return CpuSet.of_mask(0)
    mask = 0
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _number(first, text)
        high = _number(last, text) if dash else low
        if high < low:
            raise ValueError(f"{text[:64]!r} is not a CPU list: {part!r} runs backwards")
        mask |= (1 << (high + 1)) - (1 << low)
    return CpuSet.of_mask(mask)


NO_CPUS: Final = CpuSet()


@lru_cache(maxsize=1024)
def _format(mask: int) -> str:
    parts: list[str] = []
    cpu = 0
    while mask:
        skip = (mask & -mask).bit_length() - 1
        cpu += skip
        mask >>= skip
        run = (~mask & (mask + 1)).bit_length() - 1
        parts.append(str(cpu) if run == 1 else f"{cpu}-{cpu + run - 1}")
        cpu += run
        mask >>= run
    return ",".join(parts)
