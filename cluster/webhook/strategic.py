"""Strategic merge of a patch into a plain pod: lists of named things merge by their key.

The merge keys are those of core/v1 for what a pod holds. Directives `$patch: delete|replace` and
`$retainKeys`, `$deleteFromPrimitiveList/...` are understood. Fact: the Kubernetes API conventions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_MERGE_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
    "ownerReferences": ("uid",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "conditions": ("type",),
}
_PRIMITIVE_MERGE: Final = frozenset({"finalizers"})
_REMOVE_PRIMITIVES: Final = "$deleteFromPrimitiveList/"
_SET_ORDER: Final = "$setElementOrder/"


def strategic_merge(original: Any, patch: Any) -> Any:
    """Return `original` with `patch` merged in; neither is changed."""
    if not isinstance(patch, dict) or not isinstance(original, dict):
        return _clean(patch)
    directive = patch.get("$patch")
    if directive == "replace":
        return _clean({key: value for key, value in patch.items() if key != "$patch"})
    if directive == "delete":
        return {}
    merged = dict(original)
    retained = patch.get("$retainKeys")
    if isinstance(retained, list):
        merged = {key: value for key, value in merged.items() if key in retained}
    for key, value in patch.items():
        if key in ("$patch", "$retainKeys") or key.startswith(_SET_ORDER):
            continue
        if key.startswith(_REMOVE_PRIMITIVES):
            name = key.removeprefix(_REMOVE_PRIMITIVES)
            unwanted = value if isinstance(value, list) else []
            merged[name] = [item for item in merged.get(name) or [] if item not in unwanted]
        elif value is None:
            merged.pop(key, None)
        elif isinstance(value, list):
            merged[key] = _merge_list(key, merged.get(key), value)
        else:
            merged[key] = strategic_merge(merged.get(key), value)
    return merged


def _merge_list(name: str, original: Any, patch: list[Any]) -> list[Any]:
    old = original if isinstance(original, list) else []
    if any(isinstance(item, dict) and item.get("$patch") == "replace" for item in patch):
        return [_clean(item) for item in patch if item != {"$patch": "replace"}]
    if name in _PRIMITIVE_MERGE:
        return [*old, *(item for item in patch if item not in old)]
    keys = _MERGE_KEYS.get(name)
    if keys is None:
        return [_clean(item) for item in patch]
    merged = list(old)
    for item in patch:
        if not isinstance(item, dict):
            return [_clean(other) for other in patch]
        identity = tuple(item.get(key) for key in keys)
        found = next(
            (
                index
                for index, known in enumerate(merged)
                if isinstance(known, dict) and tuple(known.get(key) for key in keys) == identity
            ),
            None,
        )
        if item.get("$patch") == "delete":
            if found is not None:
                del merged[found]
        elif found is None:
            merged.append(_clean(item))
        else:
            merged[found] = strategic_merge(merged[found], item)
    return merged


def _clean(value: Any) -> Any:
    """Return a patch's value as content: without directives and null members."""
    if isinstance(value, dict):
        return {
            key: _clean(member)
            for key, member in value.items()
            if member is not None and not key.startswith("$")
        }
    if isinstance(value, list):
        return [_clean(member) for member in value]
    return value
