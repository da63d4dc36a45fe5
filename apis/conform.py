"""Plain JSON brought into the shape of a wire type without filling in what it does not say.

Configuration is merged sparse: a key that is absent must stay absent. `conform` keeps the members
that a type knows, drops the rest and null, prints quantities canonically, and leaves everything
else as it was written. An empty text where one of some words is expected says nothing, as in Go,
which leaves it out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from apis.expected import choices, type_info
from apis.members import respell
from apis.quantity import Quantity, parse_quantity


class Conformed(NamedTuple):
    """tree: the known members; unknown: names the others, "" for none (`members.Respelt`)."""

    tree: dict[str, Any]
    unknown: str


def conform(plain: dict[str, Any], type_: type[msgspec.Struct]) -> Conformed:
    """Return the members of `plain` that `type_` knows, spelt as it spells them.

    Names match as `apis.members` says. Values are not checked; decode the result to check them.
    """
    found = respell(plain, type_)
    return Conformed(_value(found.tree, type_info(type_)), found.unknown)


def _value(value: Any, type_: inspect.Type) -> Any:
    kinds = choices(type_)
    if isinstance(value, dict):
        for kind in kinds:
            if isinstance(kind, inspect.StructType):
                return _members(value, kind)
            if isinstance(kind, inspect.DictType):
                return {key: _value(each, kind.value_type) for key, each in value.items()}
    if isinstance(value, list):
        for kind in kinds:
            if isinstance(kind, inspect.VarTupleType):
                return [_value(each, kind.item_type) for each in value]
    if any(isinstance(kind, inspect.CustomType) and kind.cls is Quantity for kind in kinds):
        try:
            return str(parse_quantity(value))
        except (TypeError, ValueError):
            return value
    return value


def _members(value: dict[str, Any], type_: inspect.StructType) -> dict[str, Any]:
    types = {field.encode_name: field.type for field in type_.fields}
    return {
        name: _value(member, types[name])
        for name, member in value.items()
        if not (member == "" and _is_choice(types[name]))
    }


def _is_choice(type_: inspect.Type) -> bool:
    return any(isinstance(kind, inspect.EnumType) for kind in choices(type_))
