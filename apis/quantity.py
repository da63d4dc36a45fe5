"""Kubernetes quantities: exact numbers with a unit suffix and one canonical text.

A quantity is an integer count of 10^-9 units plus the notation that it was written in. All
arithmetic is exact; only `value()` and `milli_value()` round, upwards (away from zero), as the API
machinery does. Texts are bounded, finer digits than 10^-9 are rounded away from zero, and numbers
beyond +-(2^63 - 1) are capped, again as the API machinery does. docs/facts/apis.md, "Text
formats".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Final, final

_NANO: Final = 1_000_000_000
_MAX: Final = (2**63 - 1) * _NANO
_LONGEST_TEXT: Final = 64
"""Characters; chosen: amounts up to 2^63 - 1 with nine decimals have 30."""
_KEPT: Final = 8192
"""Texts whose amounts are kept, and amounts whose texts are. Chosen: pods of a cluster request far
fewer different amounts; both take about 2 MiB."""
_LARGEST_EXPONENT: Final = 128
"""The digits before an exponent (at most 64) shift an amount by less than this; a larger exponent
gives an amount that is capped, or rounded to 10^-9, all the same."""

_TEXT: Final = re.compile(
    r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?[0-9]+))?\Z", re.ASCII
)
_BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_BINARY_SUFFIX: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_DECIMAL_SUFFIX: Final = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")


class Notation(Enum):
    """How a quantity prints."""

    DECIMAL_SI = "DecimalSI"
    BINARY_SI = "BinarySI"
    DECIMAL_EXPONENT = "DecimalExponent"


@final
class Quantity:
    """An exact, immutable amount. Equality and order are numeric; the notation does not count."""

    __slots__ = ("_nano", "_notation")
    _nano: int
    _notation: Notation

    def __init__(self, nano: int, notation: Notation = Notation.DECIMAL_SI) -> None:
        object.__setattr__(self, "_nano", nano)
        object.__setattr__(self, "_notation", notation)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Quantity does not change")

    def __reduce__(self) -> tuple[type[Quantity], tuple[int, Notation]]:
        return Quantity, (self._nano, self._notation)

    @classmethod
    def of(cls, units: int, notation: Notation = Notation.DECIMAL_SI) -> Quantity:
        """Return `units` whole units: cores, bytes, a count."""
        return cls(units * _NANO, notation)

    @classmethod
    def of_milli(cls, milli: int) -> Quantity:
        """Return `milli` thousandths of a unit in DecimalSI."""
        return cls(milli * 1_000_000)

    @classmethod
    def of_bytes(cls, count: int) -> Quantity:
        """Return `count` bytes in BinarySI."""
        return cls(count * _NANO, Notation.BINARY_SI)

    @property
    def notation(self) -> Notation:
        return self._notation

    @property
    def nano(self) -> int:
        """The exact amount in 10^-9 units."""
        return self._nano

    def value(self) -> int:
        """Return the amount in whole units, rounded away from zero."""
        return _away_from_zero(self._nano, _NANO)

    def milli_value(self) -> int:
        """Return the amount in thousandths of a unit, rounded away from zero."""
        return _away_from_zero(self._nano, 1_000_000)

    def __add__(self, other: Quantity) -> Quantity:
        # The sum of 0 and x reads like x: adding to an empty total keeps Gi as Gi.
        notation = self._notation if self._nano else other._notation
        return Quantity(self._nano + other._nano, notation)

    def __sub__(self, other: Quantity) -> Quantity:
        notation = self._notation if self._nano else other._notation
        return Quantity(self._nano - other._nano, notation)

    def __neg__(self) -> Quantity:
        return Quantity(-self._nano, self._notation)

    def __mul__(self, factor: int) -> Quantity:
        return Quantity(self._nano * factor, self._notation)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantity) and self._nano == other._nano

    def __hash__(self) -> int:
        return hash(self._nano)

    def __lt__(self, other: Quantity) -> bool:
        return self._nano < other._nano

    def __le__(self, other: Quantity) -> bool:
        return self._nano <= other._nano

    def __gt__(self, other: Quantity) -> bool:
        return self._nano > other._nano

    def __ge__(self, other: Quantity) -> bool:
        return self._nano >= other._nano

    def __bool__(self) -> bool:
        return self._nano != 0

    def __str__(self) -> str:
        return _canonical(self._nano, self._notation)

    def __repr__(self) -> str:
        return f"Quantity({str(self)!r})"


ResourceList = dict[str, Quantity]
"""Resource name -> amount."""

ZERO: Final = Quantity(0)


def parse_quantity(text: str | int | float) -> Quantity:
    """Return the quantity that `text` or a JSON number spells.

    Raises ValueError with a sentence that says what is wrong; callers add object and field.
    """
    if isinstance(text, bool):
        raise ValueError("a quantity is a number or a text such as 500m or 16Gi, not a boolean")
    if isinstance(text, int):
        return _capped(text * _NANO, Notation.DECIMAL_SI)
    if isinstance(text, float):
        text = repr(text)
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"a quantity has at most {_LONGEST_TEXT} characters")
    return _parse_text(text)


@lru_cache(maxsize=_KEPT)
def _parse_text(text: str) -> Quantity:
    if text.isascii() and text.isdigit():
        return _capped(int(text) * _NANO, Notation.DECIMAL_SI)
    match = _TEXT.match(text)
    if match is None:
        raise ValueError("not a quantity; write a number with an optional suffix, 500m or 16Gi")
    sign, whole, fraction, binary, decimal, exponent = match.groups()
    fraction = fraction or ""
    if not whole and not fraction:
        raise ValueError("not a quantity: it has no digits")
    digits = int(whole + fraction)
    # digits * numerator / denominator is the amount in 10^-9 units.
    scale = 9 - len(fraction)
    numerator = 1
    if binary:
        notation = Notation.BINARY_SI
        numerator = 1024 ** _BINARY[binary]
    elif exponent is not None:
        notation = Notation.DECIMAL_EXPONENT
        scale += max(-_LARGEST_EXPONENT, min(_LARGEST_EXPONENT, int(exponent)))
    else:
        notation = Notation.DECIMAL_SI
        scale += _DECIMAL[decimal] if decimal else 0
    if scale >= 0:
        nano = digits * numerator * 10**scale
    else:
        nano = _away_from_zero(digits * numerator, 10**-scale)
    return _capped(-nano if sign == "-" else nano, notation)


def _away_from_zero(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor) if dividend > 0 else dividend // divisor


def _capped(nano: int, notation: Notation) -> Quantity:
    return Quantity(max(-_MAX, min(_MAX, nano)), notation)


@lru_cache(maxsize=_KEPT)
def _canonical(nano: int, notation: Notation) -> str:
    if nano == 0:
        return "0"
    if notation is Notation.BINARY_SI:
        units, rest = divmod(nano, _NANO)
        # Below 1024 and with fractions the decimal suffixes say it without loss.
        if rest == 0 and abs(units) >= 1024:
            power = 0
            while units % 1024 == 0 and power < len(_BINARY_SUFFIX) - 1:
                units //= 1024
                power += 1
            return f"{units}{_BINARY_SUFFIX[power]}"
        notation = Notation.DECIMAL_SI
    thousands = 0
    largest = len(_DECIMAL_SUFFIX) - 1
    while nano % 1000 == 0 and (thousands < largest or notation is Notation.DECIMAL_EXPONENT):
        nano //= 1000
        thousands += 1
    if notation is Notation.DECIMAL_SI:
        return f"{nano}{_DECIMAL_SUFFIX[thousands]}"
    exponent = thousands * 3 - 9
    return f"{nano}e{exponent}" if exponent else str(nano)


def add_resources(*lists: Mapping[str, Quantity]) -> ResourceList:
    """Return the sum of resource lists, name by name."""
    total: ResourceList = {}
    for resources in lists:
        for name, amount in resources.items():
            total[name] = total[name] + amount if name in total else amount
    return total


def max_resources(lists: Iterable[Mapping[str, Quantity]]) -> ResourceList:
    """Return the larger amount of each name."""
    largest: ResourceList = {}
    for resources in lists:
        for name, amount in resources.items():
            if name not in largest or amount > largest[name]:
                largest[name] = amount
    return largest
