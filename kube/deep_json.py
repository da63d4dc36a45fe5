"""JSON in which one object nests deeper than Python's usual limit of recursion."""

from __future__ import annotations

import sys
from typing import Final, TypeVar

import msgspec

D = TypeVar("D", bound=msgspec.Struct)

_DEEPEST: Final = 25_000
"""Python frames; above the 10,000 levels of nesting at which an API server refuses JSON."""


def decode_deep(data: bytes | msgspec.Raw, type_: type[D]) -> D:
    """Decode JSON. Raises msgspec.DecodeError, and RecursionError beyond what an API server
    takes."""
    try:
        return msgspec.json.decode(data, type=type_)
    except RecursionError:
        usual = sys.getrecursionlimit()
        sys.setrecursionlimit(_DEEPEST)
        try:
            return msgspec.json.decode(data, type=type_)
        finally:
            sys.setrecursionlimit(usual)
