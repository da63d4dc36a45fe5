"""Patches between two plain objects: JSON patch (RFC 6902) and JSON merge patch (RFC 7386)."""

from __future__ import annotations

from typing import Any


def json_patch(before: Any, after: Any, path: str = "") -> list[dict[str, Any]]:
    """Return RFC 6902 operations that turn plain data `before` into `after`.

    Objects are compared member by member; lists of equal length item by item, others as a whole.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        operations: list[dict[str, Any]] = []
        for key in before:
            if key not in after:
                operations.append({"op": "remove", "path": f"{path}/{_pointer(key)}"})
        for key, value in after.items():
            where = f"{path}/{_pointer(key)}"
            if key not in before:
                operations.append({"op": "add", "path": where, "value": value})
            elif before[key] != value or type(before[key]) is not type(value):
                operations += json_patch(before[key], value, where)
        return operations
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        operations = []
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                operations += json_patch(old, new, f"{path}/{index}")
        return operations
    if before == after and type(before) is type(after):
        return []
    return [{"op": "replace", "path": path, "value": after}]


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def merge_patch(before: Any, after: Any) -> Any:
    """Return the RFC 7386 document that turns object `before` into `after`; {} if equal."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        if key not in before:
            patch[key] = value
        elif before[key] != value:
            patch[key] = merge_patch(before[key], value)
    return patch
