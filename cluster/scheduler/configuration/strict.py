"""Plain data to typed values without guessing, with all problems of a file collected.

A field that no type knows is a problem as well: a misspelt argument is otherwise a default that
silently stays in force.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from apis.decode import dec_hook as quantity_hook
from apis.errors import InputError
from apis.expected import choices, type_info
from apis.fields import Path, below
from apis.lenient import convert_leniently
from apis.meta import parse_duration

T = TypeVar("T")

WHOLE: Final = "(whole object)"
"""The field of an error about a part as a whole, as `apis.lenient` writes it."""
_IS_MISSING: Final = " is missing"
"""How the problem of a required field ends, as `apis.expected` writes it."""
_LONGEST_COMPARED: Final = 64
"""Characters up to which an unknown name is compared with the known ones: no field's name is
longer than 50, and comparing takes time that grows with the length."""
_MOST_UNKNOWN: Final = 64
"""Unknown fields that are reported of one section; chosen: a person reads no more."""
MOST_PROBLEMS: Final = 1000
"""Problems of a file after which no further ones are looked for; chosen: ten for each of 100
profiles. Each takes about 0.2 ms to find and to describe (measured)."""
_LONGEST_DURATION: Final = 100 * 365 * 86400
"""Seconds; chosen: a hundred years is endless here, and nanoseconds still fit an int64."""


class Seconds(float):
    """A duration. The file has it as Go's text: 15s, 1m30s."""


class Section(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Base of the types that a file is read into: camelCase names, defaults filled in."""


class Problems:
    """Collects what is wrong with one file.

    at: where the part that is being read stands in the file: profiles[0].plugins.
    """

    def __init__(self, obj: str, at: str = "", errors: list[InputError] | None = None) -> None:
        self.obj = obj
        self.at = at
        self.errors: list[InputError] = [] if errors is None else errors

    @property
    def full(self) -> bool:
        """Whether so much is wrong that the rest of the file need not be checked."""
        return len(self.errors) >= MOST_PROBLEMS

    def below(self, *path: str | int) -> Problems:
        """Return a collector for what stands at `path` below, into the same list."""
        return Problems(self.obj, below(self.at, path), self.errors)

    def add(self, path: Path, value: object, problem: str, hint: str | None = None) -> None:
        """Note that `value`, which stands at `path`, cannot be used."""
        field = below(self.at, path)
        self.errors.append(
            InputError(obj=self.obj, field=field, value=value, problem=problem, hint=hint)
        )

    def take(self, error: InputError) -> None:
        """Note an error whose field is relative to this part."""
        field = self.at
        if error.field != WHOLE:
            separator = "." if field and not error.field.startswith("[") else ""
            field = f"{field}{separator}{error.field}"
        self.errors.append(
            InputError(
                obj=self.obj,
                field=field or "(whole file)",
                value=error.value,
                problem=error.problem,
                hint=error.hint,
            )
        )


def read(tree: Any, type_: type[T], problems: Problems) -> T | None:
    """Return `tree` as a `type_`; None where anything of it is wrong, which is then noted.

    Members that are null must have been left out of `tree`.
    """
    before = len(problems.errors)
    value, errors = convert_leniently(tree, type_, obj=problems.obj, dec_hook=_dec_hook)
    named = {error.field for error in errors}
    for error in errors:
        # A field that is left out because its value is bad is not missing.
        missing = error.problem.removesuffix(_IS_MISSING)
        if error.problem == missing or _inside(error.field, missing) not in named:
            problems.take(error)
    for path, names in islice(_unknown(tree, _describe(type_), ()), _MOST_UNKNOWN):
        problems.add(path, _value_at(tree, path), "unknown field", _meant(str(path[-1]), names))
    return None if len(problems.errors) > before else value


def _describe(type_: Any) -> inspect.Type:
    return type_info(type_)


def _inside(field: str, name: str) -> str:
    return below("" if field == WHOLE else field, (name,))


def _dec_hook(type_: type, value: Any) -> Any:
    if type_ is not Seconds:
        return quantity_hook(type_, value)
    if not isinstance(value, str):
        raise ValueError("expected a duration such as 15s or 1m30s")
    seconds = parse_duration(value) / 1e9
    if not math.isfinite(seconds) or not 0 <= seconds <= _LONGEST_DURATION:
        raise ValueError("a duration must not be negative nor longer than a hundred years")
    return Seconds(seconds)


def _unknown(tree: Any, type_: inspect.Type, path: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the place of each field that no type knows, and the names known there."""
    for choice in choices(type_):
        if isinstance(tree, dict) and isinstance(choice, inspect.StructType):
            known = {field.encode_name: field.type for field in choice.fields}
            for name, member in tree.items():
                if name in known:
                    yield from _unknown(member, known[name], (*path, name))
                else:
                    yield (*path, name), tuple(known)
        elif isinstance(tree, dict) and isinstance(choice, inspect.DictType):
            for name, member in tree.items():
                yield from _unknown(member, choice.value_type, (*path, name))
        elif isinstance(tree, list) and isinstance(choice, inspect.VarTupleType):
            for index, member in enumerate(tree):
                yield from _unknown(member, choice.item_type, (*path, index))


def _value_at(tree: Any, path: Path) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def _meant(name: str, known: tuple[str, ...]) -> str:
    close = get_close_matches(name, known, n=2) if len(name) <= _LONGEST_COMPARED else []
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known fields: {', '.join(known)}"
