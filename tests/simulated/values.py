"""How the kernel reads numbers, sizes and lists that are written to its files.

Each function follows one kernel routine, with its errors: `kstrtoull` and `kstrtoll` (simple number
files take no blanks around the number, but one newline after it), `page_counter_memparse` (sizes),
`bitmap_parselist` (CPU and node lists). A text that a person would call the same number may well be
refused.
"""

from __future__ import annotations

import errno
import os
import re
from typing import NoReturn

U64_MAX = (1 << 64) - 1
S64_MAX = (1 << 63) - 1
S64_MIN = -(1 << 63)
U32_MAX = (1 << 32) - 1

PAGE_SIZE = 4096
PAGES_UNLIMITED = S64_MAX // PAGE_SIZE


def refuse(code: int, why: str = "") -> NoReturn:
    """Raise the OSError that the kernel would return. `why` is for the reader of a traceback."""
    raise OSError(code, os.strerror(code) + (f" ({why})" if why else ""))


def _magnitude(text: str) -> int:
    """Digits with C's prefixes: 0x hexadecimal, 0 octal."""
    if re.fullmatch(r"0[xX][0-9a-fA-F]+", text):
        return int(text, 16)
    if re.fullmatch(r"0[0-7]+", text):
        return int(text, 8)
    if re.fullmatch(r"(0|[1-9][0-9]*)", text):
        return int(text)
    refuse(errno.EINVAL, f"{text!r} is not a number")


def unsigned(text: str) -> int:
    """kstrtoull, base 0."""
    number = _magnitude(text.removesuffix("\n").removeprefix("+"))
    if number > U64_MAX:
        refuse(errno.ERANGE, "larger than 64 bits")
    return number


def signed(text: str) -> int:
    """kstrtoll, base 0."""
    text = text.removesuffix("\n")
    negative = text.startswith("-")
    number = _magnitude(text[1:] if negative or text.startswith("+") else text)
    if negative:
        number = -number
    if not S64_MIN <= number <= S64_MAX:
        refuse(errno.ERANGE, "larger than 63 bits")
    return number


_SUFFIX = {"k": 10, "m": 20, "g": 30, "t": 40, "p": 50, "e": 60}


def pages(text: str, unlimited: str) -> int:
    """page_counter_memparse: bytes with an optional suffix, as whole pages, rounded down.

    unlimited: the word for "no limit", "-1" on v1 and "max" on v2.
    """
    text = text.strip()
    if text == unlimited:
        return PAGES_UNLIMITED
    # simple_strtoull takes no digits for zero, so the empty text is 0 bytes.
    match = re.fullmatch(r"(0[xX][0-9a-fA-F]+|[0-9]*)([kKmMgGtTpPeE]?)", text)
    if match is None:
        refuse(errno.EINVAL, f"{text!r} is not a size")
    digits, suffix = match.groups()
    number = _magnitude(digits) if digits else 0
    if suffix:
        number <<= _SUFFIX[suffix.lower()]
    return min((number & U64_MAX) // PAGE_SIZE, PAGES_UNLIMITED)


def _list_number(text: str, bits: int) -> int:
    if text == "N":
        return bits - 1
    if not re.fullmatch("[0-9]+", text):
        refuse(errno.EINVAL, f"{text!r} is not a number of a list")
    number = int(text)
    if number > U32_MAX:
        refuse(errno.EOVERFLOW)
    return number


def bit_list(text: str, bits: int) -> frozenset[int]:
    """bitmap_parselist for a map of `bits` bits: "0-3,8", blanks as commas, strides, "all", "N"."""
    members: set[int] = set()
    for region in re.split(r"[\s,]+", text):
        if not region:
            continue
        span, _, stride = region.partition(":")
        if span == "all":
            first, last = 0, bits - 1
        else:
            low, dash, high = span.partition("-")
            first = _list_number(low, bits)
            last = _list_number(high, bits) if dash else first
        used, group = 1, 1
        if stride:
            taken, slash, of = stride.partition("/")
            if not slash:
                refuse(errno.EINVAL, "a stride needs a group size")
            used, group = _list_number(taken, bits), _list_number(of, bits)
        if first > last or group == 0 or used > group:
            refuse(errno.EINVAL, f"{region!r} runs backwards")
        if last >= bits:
            refuse(errno.ERANGE, f"{last} is not below {bits}")
        for start in range(first, last + 1, group):
            members.update(range(start, min(start + used, last + 1)))
    return frozenset(members)


def list_text(members: frozenset[int]) -> str:
    """A set as the kernel prints it: ascending, runs of two and more with a dash."""
    parts: list[str] = []
    rest = sorted(members)
    while rest:
        run = 1
        while run < len(rest) and rest[run] == rest[0] + run:
            run += 1
        parts.append(str(rest[0]) if run == 1 else f"{rest[0]}-{rest[run - 1]}")
        rest = rest[run:]
    return ",".join(parts)


def round_closest(dividend: int, divisor: int) -> int:
    """DIV_ROUND_CLOSEST for non-negative numbers."""
    return (dividend + divisor // 2) // divisor
