"""From plain data to typed values, with every mistake on the way, not the first one alone.

msgspec stops at the first error, and names neither the member of a map that is at fault nor what
else the field takes. A person who edits a file wants all errors at once, and one bad field of an
object must cost that field alone. So: convert; as long as it fails, find the field that is at
fault, take it out, convert again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from apis.errors import InputError
from apis.expected import members_of, problem_of
from apis.fields import ABSENT, Path, copy_tree, dotted, get_field, remove_field

T = TypeVar("T")

MAX_ERRORS: Final = 64
"""Bad fields after which the object as a whole is called bad; chosen: a person reads no more, and
each costs one more conversion of the object."""
_MOST_TRIED: Final = 1000
"""Members of one map that are converted one by one to find the bad one; chosen: some 10 ms."""

_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `([^`]*)`")


class Fault(NamedTuple):
    """What is wrong with plain data. value: what stands at `path`, `ABSENT` for nothing."""

    path: Path
    value: Any
    problem: str
    hint: str | None


def convert_leniently(
    tree: Any, type_: type[T], *, obj: str, dec_hook: Callable[[type, Any], Any] | None = None
) -> tuple[T | None, list[InputError]]:
    """Convert `tree` to `type_`, leaving out each field that cannot be used.

    Returns the value of what is good and the errors; None where nothing can be saved (a required
    field is missing, or too much is wrong). `tree` is not changed; errors name fields as it has
    them.
    """
    errors: list[InputError] = []
    left = tree
    left_out: dict[Path, set[int]] = {}

    def convert(part: Any) -> T:
        return msgspec.convert(part, type_, dec_hook=dec_hook)

    while True:
        try:
            return convert(left), errors
        except msgspec.ValidationError as error:
            fault = fault_of(error, left, type_, convert)
        given = _as_given(fault.path, left_out)
        errors.append(
            InputError(
                obj=obj,
                field=dotted(given) or "(whole object)",
                value="(absent)" if fault.value is ABSENT else fault.value,
                problem=fault.problem,
                hint=fault.hint,
            )
        )
        if left is tree:
            left = copy_tree(tree)
        if not fault.path or len(errors) >= MAX_ERRORS or not remove_field(left, fault.path):
            return None, errors
        if isinstance(index := given[-1], int):
            left_out.setdefault(given[:-1], set()).add(index)


def fault_of(
    error: msgspec.ValidationError,
    tree: Any,
    type_: Any,
    convert: Callable[[Any], object] | None,
) -> Fault:
    """Return what `error` says of `tree`, which was to become a `type_`.

    convert: raises the error again; None where members shall not be tried one by one: the map or
    list that holds the one at fault is named then.
    """
    message, _, where = str(error).rpartition(" - at `")
    if not message:
        message, where = str(error), ""
    steps = _steps(where.partition("$")[2].rstrip("`"))
    if convert is not None:
        steps = _pin_down(tree, steps, convert, str(error))
    known: list[str | int] = []
    for step in steps:
        if step is None:
            break
        known.append(step)
    unknown = _UNKNOWN_FIELD.match(message)
    if unknown is not None:
        path = (*known, unknown[1])
        return Fault(path, get_field(tree, path), "unknown field", _meant(type_, path))
    value = get_field(tree, known, ABSENT)
    return Fault(tuple(known), value, problem_of(message, type_, known, value), None)


def _steps(where: str) -> list[str | int | None]:
    """Read a place as msgspec writes it; None is some member, which it does not name."""
    steps: list[str | int | None] = []
    for match in _STEP.finditer(where):
        name, index = match.groups()
        steps.append(int(index) if index else name)
    return steps


def _pin_down(
    tree: Any,
    steps: Sequence[str | int | None],
    convert: Callable[[Any], object],
    message: str,
) -> list[str | int | None]:
    """Replace each "some member" by the member that really fails."""
    if None not in steps:
        return list(steps)
    position = steps.index(None)
    way = [step for step in steps[:position] if step is not None]
    members = get_field(tree, way)
    if not isinstance(members, Mapping) or len(members) > _MOST_TRIED:
        return [*way]
    for key, value in members.items():
        try:
            convert(_with(tree, way, {key: value}))
        except msgspec.ValidationError as error:
            if str(error) == message:
                return _pin_down(tree, [*way, key, *steps[position + 1 :]], convert, message)
    return [*way]


def _with(tree: Any, way: Sequence[str | int], value: Any) -> Any:
    if not way:
        return value
    copy = tree.copy()
    copy[way[0]] = _with(tree[way[0]], way[1:], value)
    return copy


def _as_given(path: Path, left_out: Mapping[Path, set[int]]) -> Path:
    """Return where `path` led before elements of lists were left out: the others moved up."""
    given: Path = ()
    for step in path:
        if isinstance(step, int):
            for gone in sorted(left_out.get(given, ())):
                step += gone <= step
        given = (*given, step)
    return given


def _meant(type_: Any, path: Path) -> str | None:
    """Say which field was perhaps meant."""
    *way, last = path
    names = members_of(type_, way)
    close = get_close_matches(str(last), names, n=2)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known fields: {', '.join(names)}" if names else None
