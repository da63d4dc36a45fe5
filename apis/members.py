"""Member names of JSON that stands as text inside an object, matched as Go's `encoding/json` does.

Upstream decodes annotations and the values of its ConfigMaps with that package, so
`{"cpuSet":"2-4"}` sets `cpuset` there, and some of upstream's own examples depend on it:

- a name that is spelt exactly belongs to its field; any other name belongs to the field that it
  equals in another letter case. Go folds letters by Unicode's simple folding, by which two letters
  outside of ASCII equal one inside: U+017F is an s and U+212A is a k;
- of several members of one field the last counts, however it is spelt;
- the keys of a map (resource names, container names, labels) are never folded.

Go also merges the objects of two members of one field; here the last one replaces the others.

Objects of the API server itself (NodeSLO, Pod, Device, ...) are not read like this: Kubernetes'
own clients decode them with `sigs.k8s.io/json`, which matches names exactly, and the API server
prunes what a CRD does not name before it stores an object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect

from apis.errors import printable
from apis.expected import choices, type_info
from apis.fields import Path, dotted

_FOLDED_INTO_ASCII: Final = str.maketrans({"\u017f": "s", "\u212a": "k"})
_MOST_NAMED: Final = 8
"""Unknown members that one message names; chosen so that the message stays one readable line."""
_LONGEST_COMPARED: Final = 64
"""Characters up to which an unknown name is compared with the known ones: no field's name is
longer than 50, and comparing takes time that grows with the length."""


class Respelt(NamedTuple):
    """Plain data with every known member spelt as its type spells it.

    unknown: the members that no type knows, which are left out of `tree`: a phrase that names the
    first eight of them and the fields that were perhaps meant, "" for none.
    """

    tree: Any
    unknown: str


class _Unknown:
    """Collects the members that no field of a type matches."""

    def __init__(self) -> None:
        self.described: list[str] = []
        self.count = 0

    def add(self, path: Path, known: Sequence[str]) -> None:
        self.count += 1
        if len(self.described) >= _MOST_NAMED:
            return
        name = str(path[-1])
        close = get_close_matches(name, known, n=2) if len(name) <= _LONGEST_COMPARED else []
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        self.described.append(printable(dotted(path)) + hint)

    def phrase(self) -> str:
        more = self.count - len(self.described)
        return ", ".join(self.described) + (f" and {more} more" if more else "")


def fold(name: str) -> str:
    """Return what names have in common that Go's decoder takes for the same field.

    Only names of ASCII letters are right keys to compare with: no field of ours has another.
    """
    if not name.isascii():
        name = name.translate(_FOLDED_INTO_ASCII)
        if not name.isascii():
            return name
    return name.lower()


def respell(tree: Any, type_: Any) -> Respelt:
    """Return plain data `tree` in the spelling of `type_`, a Struct or a container of Structs.

    Members that are null are left out: to Go's decoder they say nothing. Values are not checked,
    and `tree` is not changed; its mappings must be in the order of the text.
    """
    unknown = _Unknown()
    return Respelt(
        _respelt(tree, type_info(type_), (), unknown),
        unknown.phrase(),
    )


def unknown_phrase(names: Iterable[str], known: Sequence[str]) -> str:
    """Return a phrase about members that none of the `known` names matches, "" for none."""
    unknown = _Unknown()
    for name in names:
        unknown.add((name,), known)
    return unknown.phrase()


def named_members(tree: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """Return the members of `tree` that `names` match, by these names, and all other members."""
    by_fold = {fold(name): name for name in names}
    found: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in tree.items():
        name = key if key in names else by_fold.get(fold(key))
        if name is None:
            others[key] = value
        elif value is not None:
            found[name] = value
    return found, others


class _Members(NamedTuple):
    exact: Mapping[str, inspect.Type]
    folded: Mapping[str, str]
    names: tuple[str, ...]


@lru_cache(maxsize=256)
def _members(type_: type[msgspec.Struct]) -> _Members:
    info = type_info(type_)
    assert isinstance(info, inspect.StructType)
    folded: dict[str, str] = {}
    for member in info.fields:
        folded.setdefault(fold(member.encode_name), member.encode_name)
    exact = {member.encode_name: member.type for member in info.fields}
    return _Members(exact, folded, tuple(exact))


def _respelt(value: Any, type_: inspect.Type, path: Path, unknown: _Unknown) -> Any:
    if isinstance(value, dict):
        for choice in choices(type_):
            if isinstance(choice, inspect.StructType):
                return _respelt_members(value, _members(choice.cls), path, unknown)
            if isinstance(choice, inspect.DictType):
                inner = choice.value_type
                return {
                    key: _respelt(member, inner, (*path, key), unknown)
                    for key, member in value.items()
                }
    elif isinstance(value, list):
        for choice in choices(type_):
            if isinstance(choice, inspect.VarTupleType | inspect.ListType):
                inner = choice.item_type
                return [
                    _respelt(member, inner, (*path, index), unknown)
                    for index, member in enumerate(value)
                ]
    return value


def _respelt_members(
    value: Mapping[str, Any], members: _Members, path: Path, unknown: _Unknown
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, member in value.items():
        name = key if key in members.exact else members.folded.get(fold(key))
        if name is None:
            unknown.add((*path, key), members.names)
        elif member is not None:
            result[name] = _respelt(member, members.exact[name], (*path, name), unknown)
    return result
