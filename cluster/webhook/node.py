"""Nodes at admission: allocatable multiplied by the amplification ratio, conflicting entries named.

Only the kubelet is expected to change allocatable cpu and memory. Its value is kept in the
annotation `raw-allocatable`; the offered one is that times the ratio, in milli-units, truncated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from apis.core import Node
from apis.decode import canonical_json, decode_field, decode_object, field_decoder
from apis.errors import InputError, InputErrors
from apis.keys import (
    ANNOTATION_RAW_ALLOCATABLE,
    ANNOTATION_RESOURCE_AMPLIFICATION_RATIO,
    CPU,
    MEMORY,
)
from apis.meta import matches
from apis.quantity import Quantity, ResourceList
from apis.slo_config import SLOConfig
from cluster.ratios import hundredths
from cluster.webhook.plain import plain_object
from kube.patches import json_patch
from kube.webhook import ALLOWED, AdmissionRequest, Verdict, denied

_decode_ratios = field_decoder(dict[str, Any])
_decode_resources = field_decoder(ResourceList)

AMPLIFIED: Final = (CPU, MEMORY)
"""The resources of which a node offers more than it has; ratios of others have no effect."""
_LARGEST_RATIO: Final = 1000
"""Above any ratio between two CPU models; a node that offers more would be a typing error."""


def mutate_node_status(request: AdmissionRequest) -> Verdict:
    """Amplify allocatable cpu and memory in a status update of the kubelet.

    An unreadable annotation is a warning of the answer and never a refusal: a node whose status
    cannot be updated is taken for dead.
    """
    if request.resource.resource != "nodes" or request.sub_resource != "status":
        return ALLOWED
    if request.operation != "UPDATE":
        return ALLOWED
    before = plain_object(request)
    new = decode_object(before, Node, obj=request.ref)
    old = decode_object(bytes(request.old_object), Node, obj=request.ref)
    problems: list[InputError] = []
    after = amplified_node(before, new, old, obj=request.ref, report=problems.append)
    return Verdict(
        True,
        patch=tuple(json_patch(before, after)),
        warnings=tuple(str(problem) for problem in problems),
    )


def amplified_node(
    plain: Mapping[str, Any],
    new: Node,
    old: Node,
    *,
    obj: str,
    report: Callable[[InputError], None],
) -> dict[str, Any]:
    """Return the node with amplified allocatable and the kubelet's own value remembered.

    A value that differs from the stored (amplified) one comes from the kubelet and is the new raw
    value. report: called with each annotation or ratio that cannot be used; the rest has effect.
    """
    annotations = dict(new.metadata.annotations)
    text = annotations.get(ANNOTATION_RESOURCE_AMPLIFICATION_RATIO)
    metadata = dict(plain.get("metadata") or {})
    if not text:
        if ANNOTATION_RAW_ALLOCATABLE not in annotations:
            return dict(plain)
        del annotations[ANNOTATION_RAW_ALLOCATABLE]
        return {**plain, "metadata": {**metadata, "annotations": annotations}}
    percents = _percents(text, obj=obj, report=report)
    allocatable = new.status.allocatable
    stored = annotations.get(ANNOTATION_RAW_ALLOCATABLE)
    if stored is None or any(
        allocatable.get(name) != old.status.allocatable.get(name) for name in AMPLIFIED
    ):
        raw: ResourceList = {name: allocatable[name] for name in AMPLIFIED if name in allocatable}
        annotations[ANNOTATION_RAW_ALLOCATABLE] = canonical_json(raw)
    else:
        field = f'metadata.annotations["{ANNOTATION_RAW_ALLOCATABLE}"]'
        try:
            raw = decode_field(_decode_resources, stored, obj=obj, field=field)
        except InputError as error:
            # Allocatable may be amplified already. The kubelet's next report heals the annotation.
            report(error)
            raw = {}
    status = dict(plain.get("status") or {})
    offered = dict(status.get("allocatable") or {})
    for name, percent in percents.items():
        if name in raw:
            milli = raw[name].milli_value() * percent // 100
            offered[name] = str(Quantity(milli * 1_000_000, raw[name].notation))
    return {
        **plain,
        "metadata": {**metadata, "annotations": annotations},
        "status": {**status, "allocatable": offered},
    }


def _percents(text: str, *, obj: str, report: Callable[[InputError], None]) -> dict[str, int]:
    """Return the ratios of amplified resources in hundredths, at least 100.

    A ratio that cannot be used costs no other one.
    """
    where = f'metadata.annotations["{ANNOTATION_RESOURCE_AMPLIFICATION_RATIO}"]'
    try:
        ratios = decode_field(_decode_ratios, text, obj=obj, field=where)
    except InputError as error:
        report(error)
        return {}
    found: dict[str, int] = {}
    for name in AMPLIFIED:
        ratio = ratios.get(name, 1)
        if isinstance(ratio, bool) or not isinstance(ratio, int | float):
            problem = "expected a number"
        elif not 0 <= ratio <= _LARGEST_RATIO:
            problem = f"expected 0..{_LARGEST_RATIO}"
        else:
            found[name] = max(100, hundredths(ratio))
            continue
        report(InputError(obj=obj, field=f"{where}.{name}", value=ratio, problem=problem))
    return found


_CHECKED: Final = (
    ("colocation-config", "colocation"),
    ("resource-threshold-config", "threshold"),
    ("resource-qos-config", "resource_qos"),
    ("cpu-burst-config", "cpu_burst"),
    ("system-config", "system"),
)


def conflicts(config: SLOConfig, labels: Mapping[str, str]) -> list[tuple[str, Sequence[str]]]:
    """Return (key, names of entries) for every key in which more than one entry matches."""
    found: list[tuple[str, Sequence[str]]] = []
    for key, member in _CHECKED:
        names = [
            entry.name
            for entry in getattr(config, member).entries
            if matches(entry.selector, labels)
        ]
        if len(names) > 1:
            found.append((key, names))
    return found


def reason_text(reason: str, message: Any) -> str:
    """Return the error text whose shape tools look for."""
    body = json.dumps({"reason": reason, "message": message}, separators=(",", ":"))
    return f"___{body}___"


class NodeValidation:
    """Refuses label changes that make a node match several entries of one key."""

    def __init__(self, config: Callable[[], SLOConfig]) -> None:
        self._config = config

    def validate(self, request: AdmissionRequest) -> Verdict:
        if request.resource.resource != "nodes" or request.sub_resource:
            return ALLOWED
        if request.operation != "UPDATE":
            return ALLOWED
        try:
            new = decode_object(bytes(request.object), Node, obj=request.ref)
            old = decode_object(bytes(request.old_object), Node, obj=request.ref)
        except (InputErrors, msgspec.DecodeError):
            return ALLOWED
        if new.metadata.labels == old.metadata.labels:
            return ALLOWED
        config = self._config()
        before = dict(conflicts(config, old.metadata.labels))
        for key, names in conflicts(config, new.metadata.labels):
            # A conflict that stood before is not this change's fault.
            if before.get(key) != names:
                message = {"config": key, "strategies": names, "exampleNodes": [request.name]}
                return denied(reason_text("ExistNodeConfict", message), code=400)
        return ALLOWED
