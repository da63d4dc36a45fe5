"""Decoding of a plain tree (from YAML) into a typed value, with every error of it at once.

msgspec stops at the first error; a person who edits a file wants all of them, and one bad field of
a NodeSLO must cost only that field. So: decode, and as long as it fails, name the field that is at
fault, take it out, decode again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final, TypeVar

import msgspec

from apis.errors import InputError
from apis.expected import problem_of

T = TypeVar("T")

MAX_ERRORS: Final = 64
"""After so many bad fields nobody wants the rest; the object as a whole is called bad."""

_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MOST_TRIED: Final = 1000
_AT: Final = re.compile(r" - at `(?P<path>\$.*|key in .*)`$", re.DOTALL)
_STEP: Final = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[(\d+)\]|\[(\.\.\.)\]|\[\"([^\"]*)\"\]")

Path = tuple[str | int, ...]


def decode_collecting(
    tree: Any, type_: type[T], *, obj: str, dec_hook: Callable[[type, Any], Any] | None = None
) -> tuple[T | None, list[InputError]]:
    """Convert `tree` to `type_`, leaving out each field that cannot be used.

    Returns the value of what is good (None when nothing is left to decode) and the errors. `tree`
    is not changed. Field names in errors are as the file writes them.
    """
    errors: list[InputError] = []
    left = copy_tree(tree)
    while len(errors) < MAX_ERRORS:
        try:
            return msgspec.convert(left, type_, dec_hook=dec_hook), errors
        except msgspec.ValidationError as error:
            problem, path = _read(str(error))
            if path is None:
                errors.append(InputError(obj=obj, field="", value=left, problem=problem))
                return None, errors
            if " - at `" in str(error) and "[...]" in str(error):
                path = _entry(left, path, type_, dec_hook)
            value = get_field(left, path)
            problem = problem_of(problem, type_, path, value)
            problem, hint = problem[:1].lower() + problem[1:], None
            unknown = _UNKNOWN_FIELD.search(str(error))
            if unknown is not None:
                problem = "unknown field"
                hint = _close_field(type_, path)
            errors.append(
                InputError(obj=obj, field=dotted(path), value=value, problem=problem, hint=hint)
            )
            if not path or not remove_field(left, path):
                return None, errors
    return None, errors


def dotted(path: Path) -> str:
    """Write a path as people read it: `spec.hostApplications[2].name`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", step):
            text += f".{step}" if text else step
        else:
            text += f'["{step}"]'
    return text


def parse_dotted(text: str) -> Path | None:
    """Read a path as `dotted` writes it; None when it is not one."""
    return _steps("." + text if text and not text.startswith("[") else text)


def set_field(tree: Any, path: Path, value: Any) -> bool:
    """Put `value` at `path` of nested mappings; False when the way there is no mapping."""
    *way, last = path
    for step in way:
        if not isinstance(tree, dict):
            return False
        tree = tree.setdefault(step, {})
    if not isinstance(tree, dict):
        return False
    tree[last] = value
    return True


def _read(message: str) -> tuple[str, Path | None]:
    """Split msgspec's message into what is wrong and where."""
    at = _AT.search(message)
    problem = message[: at.start()] if at else message
    path: Path | None = ()
    if at:
        where = at.group("path")
        path = _steps(where.rpartition("$")[2])
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown is not None and path is not None:
        path = (*path, unknown.group("name"))
    # msgspec writes [...] for a key or an item that it does not name.
    if path is not None and "..." in path:
        path = path[: path.index("...")]
    return problem, path


def _entry(tree: Any, path: Path, type_: Any, dec_hook: Callable[[type, Any], Any] | None) -> Path:
    """Return the path of the entry of a mapping that is at fault, which msgspec does not name."""
    entries = get_field(tree, path)
    if not isinstance(entries, Mapping) or len(entries) > _MOST_TRIED:
        return path
    for key, value in entries.items():
        alone = copy_tree(tree)
        if not isinstance(key, str) or not set_field(alone, (*path, key), value):
            return path
        for other in entries:
            if other != key:
                remove_field(alone, (*path, other))
        try:
            msgspec.convert(alone, type_, dec_hook=dec_hook)
        except msgspec.ValidationError:
            return (*path, key)
    return path


def _steps(text: str) -> Path | None:
    steps: list[str | int] = []
    position = 0
    while position < len(text):
        match = _STEP.match(text, position)
        if match is None:
            return None
        name, index, anything, key = match.groups()
        steps.append(name or (int(index) if index else anything or key))
        position = match.end()
    return tuple(steps)


def get_field(tree: Any, path: Path) -> Any:
    """Return the value at `path`, or None."""
    for step in path:
        if isinstance(step, int):
            if not isinstance(tree, list) or step >= len(tree):
                return None
            tree = tree[step]
        else:
            if not isinstance(tree, Mapping):
                return None
            tree = tree.get(step)
    return tree


def remove_field(tree: Any, path: Path) -> bool:
    """Take the field at `path` out of `tree`; tells whether there was one."""
    *way, last = path
    parent = get_field(tree, tuple(way))
    if isinstance(parent, dict) and last in parent:
        del parent[last]
        return True
    if isinstance(parent, list) and isinstance(last, int) and last < len(parent):
        del parent[last]
        return True
    return False


def copy_tree(tree: Any) -> Any:
    """Copy the mappings and lists of a tree; the leaves are shared."""
    if isinstance(tree, Mapping):
        return {key: copy_tree(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copy_tree(value) for value in tree]
    return tree


def _close_field(type_: Any, path: Path) -> str | None:
    """Say which field was perhaps meant."""
    *way, last = path
    for step in way:
        if isinstance(step, int):
            return None
        field = next((f for f in msgspec.structs.fields(type_) if f.encode_name == step), None)
        if field is None or not isinstance(field.type, type):
            return None
        type_ = field.type
        if not issubclass(type_, msgspec.Struct):
            return None
    names = [field.encode_name for field in msgspec.structs.fields(type_)]
    close = get_close_matches(str(last), names, n=2)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known fields: {', '.join(names)}"
