"""Strategic merge of a patch into a plain pod, with the result that an API server would compute.

Objects merge member by member. Lists whose elements have a merge key (core/v1 declares one for the
lists in `MERGE_KEYS`) merge element by element; every other list is replaced. In a merged list the
elements of the patch keep the order of the patch, the others keep theirs, and one of the others
comes before an element of the patch only where it stood before it already. Init containers run in
list order, so the order is part of the result.

Directives: `$patch: replace|delete`, `$retainKeys`, `$setElementOrder/<list>` and
`$deleteFromPrimitiveList/<list>`. Fact: the API conventions of Kubernetes; the order was compared
with kubectl 1.36 (tests/cluster/test_strategic_merge.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Plain = dict[str, Any]

MERGE_KEYS: Final[Mapping[str, str | None]] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "ownerReferences": "uid",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "conditions": "type",
    "finalizers": None,
}
"""List in a pod that merges -> the member that identifies an element; None: a list of texts."""

_DIRECTIVE: Final = "$patch"
_RETAIN_KEYS: Final = "$retainKeys"
_SET_ORDER: Final = "$setElementOrder/"
_DELETE_TEXTS: Final = "$deleteFromPrimitiveList/"


class PatchError(ValueError):
    """The patch is not a strategic merge patch; the text names the member and what is wrong."""


def strategic_merge(original: Plain, patch: Plain, path: str = "") -> Plain:
    """Return `original` with `patch` merged in; neither is changed.

    path: where both stand, for errors. Raises PatchError.
    """
    if _DIRECTIVE in patch:
        return _directed(patch, path)
    merged = _retained(original, patch, path)
    orders = {key.removeprefix(_SET_ORDER) for key in patch if key.startswith(_SET_ORDER)}
    for name in orders:
        _merge_ordered(merged, patch, name, f"{path}.{name}")
    for key, value in patch.items():
        at = f"{path}.{key}"
        if key == _RETAIN_KEYS or key.startswith(_SET_ORDER) or key in orders:
            continue
        if key.startswith(_DELETE_TEXTS):
            _delete_texts(merged, key.removeprefix(_DELETE_TEXTS), value, at)
        elif value is None:
            merged.pop(key, None)
        elif key not in merged:
            if not _is_directive(value):
                merged[key] = _new_member(value)
        else:
            merged[key] = _merged_value(key, merged[key], value, at)
    return merged


def _directed(patch: Plain, path: str) -> Plain:
    match patch[_DIRECTIVE]:
        case "replace":
            content: Plain = _content(patch)
            return content
        case "delete":
            return {}
        case other:
            raise PatchError(f"{path or 'the patch'}: $patch is {other!r}, not replace or delete")


def _retained(original: Plain, patch: Plain, path: str) -> Plain:
    if _RETAIN_KEYS not in patch:
        return dict(original)
    kept = patch[_RETAIN_KEYS]
    if not isinstance(kept, list):
        raise PatchError(f"{path}.{_RETAIN_KEYS}: expected a list of member names")
    missing = sorted(key for key in patch if not key.startswith("$") and key not in kept)
    if missing:
        raise PatchError(f"{path}.{_RETAIN_KEYS}: does not list {', '.join(missing)}")
    return {key: value for key, value in original.items() if key in kept}


def _merged_value(name: str, original: Any, patch: Any, path: str) -> Any:
    if isinstance(original, dict) and isinstance(patch, dict):
        return strategic_merge(original, patch, path)
    if isinstance(original, list) and isinstance(patch, list) and name in MERGE_KEYS:
        return _merge_list(original, patch, MERGE_KEYS[name], path)
    return _content(patch)


def _merge_list(original: Sequence[Any], patch: Sequence[Any], key: str | None, path: str) -> Any:
    """Return two lists merged by `key`, in the order that the patch asks for."""
    if key is None:
        merged = list(dict.fromkeys([*_texts(original, path), *_texts(patch, path)]))
        return _in_order(merged, patch, original, None)
    kept = list(_elements(original, key, path))
    wanted: list[Plain] = []
    replaces = False
    for element in _elements(patch, key, path):
        match element.get(_DIRECTIVE):
            case None:
                wanted.append(element)
            case "delete" if key in element:
                kept = [other for other in kept if other[key] != element[key]]
            case "replace":
                replaces = True
            case other:
                raise PatchError(f"{path}: $patch {other!r} is not possible for an element")
    if replaces:
        return _in_order([_content(element) for element in wanted], wanted, [], key)
    merged_elements = list(kept)
    for element in wanted:
        found = _index(merged_elements, element, key)
        if found < 0:
            merged_elements.append(_content(element))
        else:
            merged_elements[found] = strategic_merge(merged_elements[found], element, path)
    return _in_order(merged_elements, wanted, kept, key)


def _merge_ordered(merged: Plain, patch: Plain, name: str, path: str) -> None:
    """Merge the list `name`, in the order that `$setElementOrder` of the patch asks for."""
    order = patch[_SET_ORDER + name]
    original, wanted = merged.get(name), patch.get(name)
    if name not in MERGE_KEYS or not isinstance(order, list):
        raise PatchError(f"{path}: {_SET_ORDER} must be a list and name a list that is merged")
    key = MERGE_KEYS[name]
    order = _texts(order, path) if key is None else list(_elements(order, key, path))
    places = [_index(order, one, key) for one in wanted or () if not _is_directive(one)]
    if -1 in places or places != sorted(places):
        raise PatchError(
            f"{path}: {_SET_ORDER} must contain the elements of the patch in their order"
        )
    if not isinstance(original, list):
        if isinstance(wanted, list):
            merged[name] = _in_order(_new_member(wanted), order, [], key)
        return
    both = _merge_list(original, wanted, key, path) if isinstance(wanted, list) else original
    merged[name] = _in_order(both, order, original, key)


def _in_order(
    merged: Sequence[Any], first: Sequence[Any], live: Sequence[Any], key: str | None
) -> list[Any]:
    """Return `merged` with the elements of `first` in that order, the others in their own.

    One of the others is placed before the first element that it stood before in `live`.
    """
    places = [_index(first, element, key) for element in merged]
    wanted = [
        element
        for _, element in sorted(
            ((place, element) for place, element in zip(places, merged, strict=True) if place >= 0),
            key=lambda pair: pair[0],
        )
    ]
    others = [element for place, element in zip(places, merged, strict=True) if place < 0]
    result: list[Any] = []
    for element in wanted:
        at = _index(live, element, key)
        while others and 0 <= _index(live, others[0], key) < at:
            result.append(others.pop(0))
        result.append(element)
    return result + others


def _index(elements: Sequence[Any], wanted: Any, key: str | None) -> int:
    """Return where the element of the same identity stands, -1 for nowhere."""
    identity = wanted if key is None else wanted.get(key)
    for index, element in enumerate(elements):
        if (element if key is None else element.get(key)) == identity:
            return index
    return -1


def _elements(elements: Sequence[Any], key: str, path: str) -> Sequence[Plain]:
    for element in elements:
        if not isinstance(element, dict):
            raise PatchError(f"{path}: expected objects with {key}, found {element!r}")
        if key not in element and element.get(_DIRECTIVE) != "replace":
            raise PatchError(f"{path}: an element does not name its {key}")
    return elements


def _texts(elements: Sequence[Any], path: str) -> Sequence[Any]:
    if any(isinstance(element, dict | list) for element in elements):
        raise PatchError(f"{path}: expected a list of texts")
    return elements


def _delete_texts(merged: Plain, name: str, unwanted: Any, path: str) -> None:
    if not isinstance(unwanted, list):
        raise PatchError(f"{path}: expected a list of texts")
    if isinstance(merged.get(name), list):
        merged[name] = [text for text in merged[name] if text not in unwanted]


def _new_member(value: Any) -> Any:
    """Return the value of a member that the original lacks: objects with `$patch` fall away."""
    if isinstance(value, dict):
        return {
            key: _new_member(member)
            for key, member in value.items()
            if member is not None and not key.startswith("$") and not _is_directive(member)
        }
    if isinstance(value, list):
        return [_new_member(member) for member in value if not _is_directive(member)]
    return value


def _is_directive(value: Any) -> bool:
    return isinstance(value, dict) and _DIRECTIVE in value


def _content(value: Any) -> Any:
    """Return a patch's value as content: without names of directives and null members."""
    if isinstance(value, dict):
        return {
            key: _content(member)
            for key, member in value.items()
            if member is not None and not key.startswith("$")
        }
    if isinstance(value, list):
        return [_content(member) for member in value]
    return value
