"""Where a field stands in plain data, as JSON and YAML give it: paths, and what is there.

A path has one step a level: a member's name or an element's index. People write
`spec.hostApplications[2].name`; a name that is not an identifier is
`labels["app.kubernetes.io"]`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

Path = tuple[str | int, ...]

ABSENT: Final = object()
"""What `get_field` may return for a field that is not there: null is a value."""

_STEP: Final = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]*)|\[(\d+)\]|\[\"([^\"]*)\"\]")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def dotted(path: Sequence[str | int]) -> str:
    """Write a path as people read it."""
    return below("", path)


def below(field: str, path: Sequence[str | int]) -> str:
    """Write a path that begins inside of `field`."""
    for step in path:
        if isinstance(step, int):
            field += f"[{step}]"
        elif _NAME.fullmatch(step):
            field += f".{step}" if field else step
        else:
            field += f'["{step}"]'
    return field


def parse_dotted(text: str) -> Path | None:
    """Read a path as `dotted` writes it; None when it is not one."""
    if text and not text.startswith("["):
        text = "." + text
    steps: list[str | int] = []
    position = 0
    while position < len(text):
        match = _STEP.match(text, position)
        if match is None:
            return None
        name, index, quoted = match.groups()
        steps.append(name or (int(index) if index else quoted))
        position = match.end()
    return tuple(steps)


def get_field(tree: Any, path: Sequence[str | int], default: Any = None) -> Any:
    """Return the value at `path`, or `default`."""
    for step in path:
        if isinstance(step, int):
            if not isinstance(tree, list) or step >= len(tree):
                return default
            tree = tree[step]
        else:
            if not isinstance(tree, Mapping) or step not in tree:
                return default
            tree = tree[step]
    return tree


def set_field(tree: Any, path: Sequence[str | int], value: Any) -> bool:
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


def remove_field(tree: Any, path: Sequence[str | int]) -> bool:
    """Remove the field at `path` from `tree`; return whether it was there."""
    *way, last = path
    parent = get_field(tree, way)
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
