"""CPU lists as the API writes them: "0-3,8". Bounded, sorted, printed in one canonical way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

LARGEST_CPU: Final = 8191
"""Linux's largest NR_CPUS is 8192."""
_LONGEST_TEXT: Final = 64 * 1024
_RANGE: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?\Z", re.ASCII)


@lru_cache(maxsize=1024)
def parse_cpuset(text: str) -> frozenset[int]:
    """Return the CPU numbers of a list such as "0-3,8"; an empty text is the empty set.

    Raises ValueError with a sentence that says what is wrong.
    """
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"a CPU list has at most {_LONGEST_TEXT} characters")
    if not text.strip():
        return frozenset()
    cpus: set[int] = set()
    for part in text.split(","):
        match = _RANGE.match(part.strip())
        if match is None:
            raise ValueError("not a CPU list; write numbers and ranges such as 0-3,8")
        first = int(match[1])
        last = int(match[2]) if match[2] is not None else first
        if last < first:
            raise ValueError(f"the range {first}-{last} runs backwards")
        if last > LARGEST_CPU:
            raise ValueError(f"CPU {last} is beyond {LARGEST_CPU}")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def format_cpuset(cpus: Iterable[int]) -> str:
    """Return the shortest list text, ascending: {0, 1, 2, 8} is "0-2,8"."""
    ordered = sorted(set(cpus))
    parts: list[str] = []
    start = 0
    while start < len(ordered):
        end = start
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        first, last = ordered[start], ordered[end]
        parts.append(str(first) if first == last else f"{first}-{last}")
        start = end + 1
    return ",".join(parts)
