"""What a field accepts, in words for the author of the object, from the type that reads it.

The decoder's own messages speak of its types and name one bound at a time; here a person learns all
that a field takes at once, and what stands there instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from msgspec import inspect

from apis.quantity import Quantity

_DECODERS_OWN: Final = re.compile(r"Expected `|Invalid enum value|Integer value out of range")
_MISSING: Final = re.compile(r"Object missing required field `([^`]*)`")
_TEXT: Final = "text"
_KINDS: Final[Sequence[tuple[type, str]]] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a number"),
    (str, _TEXT),
    (dict, "an object"),
    (list, "a list"),
)


def problem_of(message: str, root: Any, steps: Sequence[str | int], value: Any) -> str:
    """Return what is wrong with `value`, which stands at `steps` of a `root`.

    message: the decoder's, without the place. What our own readers said in it stays as it is.
    """
    missing = _MISSING.match(message)
    if missing is None and not _DECODERS_OWN.match(message):
        return message
    if missing is not None:
        return f"{missing[1]} is missing"
    wanted = _at(type_info(root), steps)
    taken = () if wanted is None else choices(wanted)
    words = " or ".join(dict.fromkeys(_words(each) for each in taken)) or "another value"
    kind = _kind(value)
    same = not kind or any(_words(each).startswith(kind) for each in taken)
    if kind == _TEXT and any(isinstance(each, inspect.EnumType) for each in taken):
        same = True
    return f"expected {words}" + ("" if same else f", got {kind}")


def members_of(root: Any, steps: Sequence[str | int]) -> list[str]:
    """Return the names of the fields of what stands at `steps` of a `root`, none if not known."""
    found = _at(type_info(root), steps)
    return [
        field.encode_name
        for each in (() if found is None else choices(found))
        if isinstance(each, inspect.StructType)
        for field in each.fields
    ]


type_info = lru_cache(maxsize=256)(inspect.type_info)
"""Describe a type; 256 is above the number of types in `apis` and `cluster`."""


def _kind(value: Any) -> str:
    return next((words for type_, words in _KINDS if isinstance(value, type_)), "")


def _at(type_: inspect.Type | None, steps: Sequence[str | int]) -> inspect.Type | None:
    """Return the type of what stands at `steps`, None where that is not known."""
    for step in steps:
        if type_ is None:
            return None
        type_ = next(
            (inner for each in choices(type_) if (inner := _member(each, step)) is not None), None
        )
    return type_


def choices(type_: inspect.Type) -> tuple[inspect.Type, ...]:
    """Return the types that a value of `type_` may have, without null and without constraints."""
    while isinstance(type_, inspect.Metadata):
        type_ = type_.type
    if isinstance(type_, inspect.UnionType):
        return tuple(
            choice
            for each in type_.types
            if not isinstance(each, inspect.NoneType)
            for choice in choices(each)
        )
    return (type_,)


def _member(type_: inspect.Type, step: str | int) -> inspect.Type | None:
    if isinstance(type_, inspect.StructType):
        return next((each.type for each in type_.fields if each.encode_name == step), None)
    if isinstance(type_, inspect.DictType):
        return type_.value_type
    if isinstance(type_, inspect.ListType | inspect.VarTupleType):
        return type_.item_type
    return None


def _words(type_: inspect.Type) -> str:
    match type_:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return f"a whole number{_bounds(type_)}"
        case inspect.FloatType():
            return f"a number{_bounds(type_)}"
        case inspect.StrType():
            longest = type_.max_length
            return "text" if longest is None else f"text of at most {longest} characters"
        case inspect.EnumType():
            return _one_of(type_.cls)
        case inspect.StructType() | inspect.DictType():
            return "an object"
        case inspect.ListType() | inspect.VarTupleType():
            longest = type_.max_length
            return "a list" if longest is None else f"a list of at most {longest}"
        case inspect.CustomType() if type_.cls is Quantity:
            return "a quantity such as 500m or 16Gi"
    return "another value"


def _bounds(type_: inspect.IntType | inspect.FloatType) -> str:
    low, high = type_.ge, type_.le
    if low is not None and high is not None:
        return f", {_spelled(low)} to {_spelled(high)}"
    return "" if low is None else f", {_spelled(low)} or more"


def _spelled(bound: float) -> str:
    for bits in (31, 63):
        if bound == 2**bits - 1:
            return f"2^{bits}-1"
        if bound == -(2**bits):
            return f"-2^{bits}"
    return f"{bound}"


@lru_cache(maxsize=64)
def _one_of(cls: Any) -> str:
    """The empty text is left out: it stands for "not set"."""
    return "one of " + ", ".join(str(member.value) for member in cls if member.value != "")
