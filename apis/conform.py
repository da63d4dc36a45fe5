"""Plain JSON brought into the shape of a wire type without filling in what it does not say.

Configuration is merged sparse: a key that is absent must stay absent. `conform` keeps the members
that a type knows (their names match in any letter case, as Go's decoder matches them), drops the
rest and null, prints quantities canonically, and leaves everything else as it was written. An empty
text where one of some words is expected says nothing, as in Go, which leaves it out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

from apis.quantity import Quantity, parse_quantity


def conform(plain: dict[str, Any], type_: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the members of `plain` that `type_` knows, spelled as it spells them.

    Values are not checked here; decode the result to check it.
    """
    members = _members(type_)
    result: dict[str, Any] = {}
    for key, value in plain.items():
        if value is None:
            continue
        found = members.get(key) or members.get(key.lower())
        if found is not None:
            name, member = found
            if value == "" and _is_choice(member):
                continue
            # An exact name wins over one that matches only in another letter case.
            if key == name or name not in result:
                result[name] = _value(value, member)
    return result


@lru_cache(maxsize=256)
def _members(type_: type[msgspec.Struct]) -> dict[str, tuple[str, inspect.Type]]:
    info = inspect.type_info(type_)
    assert isinstance(info, inspect.StructType)
    members: dict[str, tuple[str, inspect.Type]] = {}
    for member in info.fields:
        members.setdefault(member.encode_name.lower(), (member.encode_name, member.type))
    for member in info.fields:
        members[member.encode_name] = (member.encode_name, member.type)
    return members


def _is_choice(type_: inspect.Type) -> bool:
    return isinstance(_bare(type_), inspect.EnumType)


def _bare(type_: inspect.Type) -> inspect.Type:
    while isinstance(type_, inspect.Metadata):
        type_ = type_.type
    return type_


def _value(value: Any, type_: inspect.Type) -> Any:
    type_ = _bare(type_)
    if isinstance(type_, inspect.UnionType):
        inner = [member for member in type_.types if not isinstance(member, inspect.NoneType)]
        return _value(value, inner[0]) if len(inner) == 1 else value
    if isinstance(type_, inspect.StructType) and isinstance(value, dict):
        return conform(value, type_.cls)
    if isinstance(type_, inspect.VarTupleType) and isinstance(value, list):
        return [_value(member, type_.item_type) for member in value]
    if isinstance(type_, inspect.DictType) and isinstance(value, dict):
        return {key: _value(member, type_.value_type) for key, member in value.items()}
    if isinstance(type_, inspect.CustomType) and type_.cls is Quantity:
        try:
            return str(parse_quantity(value))
        except (TypeError, ValueError):
            return value
    return value
