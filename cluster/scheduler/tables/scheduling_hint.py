"""The annotation by which another component says where a pod is to be placed, read once a shape.

    internal.scheduling.koordinator.sh/scheduling-hint:
      {"nodeNames": ["n1", "n2"], "preferredNodeNames": ["n2"],
       "extensions": {"NodeNUMAResource": {}, "DeviceShare": {}}}

The same key without `internal.` counts where that one is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as attribute
from types import MappingProxyType
from typing import Any, Final

from msgspec import field

from apis.annotations import annotation_field
from apis.cpuset import NO_CPUS, CpuSet
from apis.decode import Embedded, decode_optional_field, field_decoder
from apis.device import DeviceAllocation, parse_device_allocated
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_SCHEDULING_HINT,
    ANNOTATION_SCHEDULING_HINT_OLD,
)
from cluster.scheduler.tables.numa.record import NumaAmounts, recorded_allocation
from cluster.scheduler.tables.shapes import PodShape

_KEYS: Final = (ANNOTATION_SCHEDULING_HINT, ANNOTATION_SCHEDULING_HINT_OLD)
_NUMA: Final = "NodeNUMAResource"
_DEVICES: Final = "DeviceShare"
_NO_DEVICES: Final[Mapping[str, tuple[DeviceAllocation, ...]]] = MappingProxyType({})


class _Wire(Embedded, frozen=True):
    node_names: tuple[str, ...] = ()
    preferred_node_names: tuple[str, ...] = ()
    extensions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulingHint:
    """nodes: the pod may go to these alone, if there are any. preferred: tried first, in order.

    cpus, numa: what the pod has to get on its node, where the hint asks for the allocation that is
    recorded on the pod; `recorded` says whether it does. devices: likewise, the only ones that the
    pod may get, by type; a type that is missing is free. error: an annotation cannot be used.
    """

    nodes: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ()
    recorded: bool = False
    cpus: CpuSet = NO_CPUS
    numa: NumaAmounts = ()
    devices: Mapping[str, tuple[DeviceAllocation, ...]] = attribute(
        default_factory=lambda: _NO_DEVICES
    )
    error: InputError | None = None


NO_HINT: Final = SchedulingHint()
_decode: Final = field_decoder(_Wire)


def has_hint(shape: PodShape) -> bool:
    """Return whether a pod carries a hint, usable or not."""
    return any(key in shape.annotations for key in _KEYS)


def hint_of(shape: PodShape) -> SchedulingHint:
    """Return a pod's hint; for `PodShape.derived`. Errors name the pod as "Pod"."""
    annotations = shape.annotations
    key = next((key for key in _KEYS if annotations.get(key)), None)
    if key is None:
        return NO_HINT
    try:
        wire = decode_optional_field(
            _decode, annotations[key], obj="Pod", field=annotation_field(key)
        )
        if wire is None:
            return NO_HINT
        asked = annotations if _NUMA in wire.extensions else {}
        cpus, numa = recorded_allocation(asked, obj="Pod")
        asked = annotations if _DEVICES in wire.extensions else {}
        text = asked.get(ANNOTATION_DEVICE_ALLOCATED, "")
        devices = parse_device_allocated(text, obj="Pod") if text.strip() else _NO_DEVICES
    except InputError as error:
        return SchedulingHint(error=error)
    return SchedulingHint(
        nodes=wire.node_names,
        preferred=wire.preferred_node_names,
        recorded=bool(cpus or numa),
        cpus=cpus,
        numa=numa,
        devices=devices,
    )
