"""Resources of a pod at admission: native to batch or mid, the node's annotation, GPU shares.

Everything works on plain JSON in place and is idempotent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from apis.annotations import parse_extended_resource_spec
from apis.decode import canonical_json
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_EXTENDED_RESOURCE_SPEC,
    BATCH_CPU,
    BATCH_MEMORY,
    CPU,
    GPU,
    GPU_CORE,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    GPU_SHARED,
    MEMORY,
    MID_CPU,
    MID_MEMORY,
)
from apis.qos import PriorityClass
from apis.quantity import Quantity, parse_quantity

Plain = dict[str, Any]

TRANSLATION: Final[Mapping[PriorityClass, Mapping[str, str]]] = {
    PriorityClass.BATCH: {CPU: BATCH_CPU, MEMORY: BATCH_MEMORY},
    PriorityClass.MID: {CPU: MID_CPU, MEMORY: MID_MEMORY},
}
"""Native resource -> extended resource of a class. Prod, free and none translate nothing."""

_EXTENDED: Final = (BATCH_CPU, BATCH_MEMORY, MID_CPU, MID_MEMORY)


def containers(pod: Mapping[str, Any], *kinds: str) -> Iterator[tuple[str, Plain]]:
    """Yield (where, container) of the given lists of a plain pod's spec."""
    spec = pod.get("spec") or {}
    for kind in kinds:
        for index, container in enumerate(spec.get(kind) or ()):
            yield f"spec.{kind}[{index}]", container


def quantity(value: Any, *, obj: str, where: str) -> Quantity:
    """Return the quantity of a plain value. Raises InputError."""
    try:
        if not isinstance(value, str | int | float):
            raise ValueError("expected a quantity")
        return parse_quantity(value)
    except ValueError as error:
        raise InputError(obj=obj, field=where, value=value, problem=str(error)) from None


def replace_resources(pod: Plain, cls: PriorityClass, *, obj: str) -> None:
    """Rename cpu and memory of a batch or mid pod to the class's resources. Raises InputError."""
    names = TRANSLATION.get(cls)
    if names is None:
        return
    for where, container in containers(pod, "initContainers", "containers"):
        resources = container.get("resources")
        if not resources:
            continue
        for part in ("requests", "limits"):
            if resources.get(part):
                _rename(resources[part], names, obj=obj, where=f"{where}.resources.{part}")
        limits = resources.get("limits") or {}
        for name in names.values():
            if name in limits and name not in (resources.get("requests") or {}):
                resources["requests"] = {**(resources.get("requests") or {}), name: limits[name]}
    overhead = (pod.get("spec") or {}).get("overhead")
    if overhead:
        _rename(overhead, names, obj=obj, where="spec.overhead")


def _rename(resources: Plain, names: Mapping[str, str], *, obj: str, where: str) -> None:
    for native, extended in names.items():
        if native not in resources:
            continue
        amount = quantity(resources.pop(native), obj=obj, where=f"{where}.{native}")
        # Extended CPU counts whole milli-cores.
        renamed = Quantity.of(amount.milli_value()) if native == CPU else amount
        resources[extended] = str(renamed)


def extended_resource_spec(pod: Plain, *, obj: str) -> None:
    """Write, correct or empty the annotation that node hooks read limits from. Raises InputError.

    It covers init containers and mid resources too, so that hooks can limit those containers.
    """
    described: dict[str, Any] = {}
    for where, container in containers(pod, "initContainers", "containers"):
        resources = container.get("resources") or {}
        parts: dict[str, dict[str, str]] = {}
        for part in ("limits", "requests"):
            found = {
                name: str(quantity(value, obj=obj, where=f"{where}.resources.{part}.{name}"))
                for name, value in (resources.get(part) or {}).items()
                if name in _EXTENDED
            }
            if found:
                parts[part] = found
        if parts:
            described[str(container.get("name", ""))] = parts
    metadata = pod["metadata"] = pod.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    current = annotations.get(ANNOTATION_EXTENDED_RESOURCE_SPEC)
    if current is None and not described:
        return
    text = canonical_json({"containers": described} if described else {})
    if current is not None:
        known = parse_extended_resource_spec(current, obj=obj)
        if known == parse_extended_resource_spec(text, obj=obj):
            return
    metadata["annotations"] = {**annotations, ANNOTATION_EXTENDED_RESOURCE_SPEC: text}


_GPU_NAMES: Final = (GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED)


def gpu_resources(pod: Plain, *, obj: str) -> None:
    """Spell out GPU short-hands and add the number of shared GPUs. Raises InputError."""
    for where, container in containers(pod, "containers"):
        resources = container.get("resources")
        if not resources:
            continue
        requests = resources.get("requests") or {}
        limits = resources.get("limits") or {}
        if not any(name in requests or name in limits for name in _GPU_NAMES):
            continue
        asked_for_shares = GPU_SHARED in requests
        if GPU in requests:
            whole = requests[GPU]
            for part in (requests, limits):
                part.pop(GPU, None)
                part[GPU_CORE] = whole
                part[GPU_MEMORY_RATIO] = whole
        if not asked_for_shares:
            shares = str(_shares(requests, obj=obj, where=f"{where}.resources.requests"))
            requests[GPU_SHARED] = shares
            limits[GPU_SHARED] = shares
        resources["requests"] = requests
        resources["limits"] = limits


def _shares(requests: Mapping[str, Any], *, obj: str, where: str) -> int:
    name = GPU_MEMORY_RATIO if GPU_MEMORY_RATIO in requests else GPU_CORE
    if name not in requests:
        return 1
    percent = quantity(requests[name], obj=obj, where=f"{where}.{name}").value()
    return percent // 100 if percent > 100 and percent % 100 == 0 else 1
