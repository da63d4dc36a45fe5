"""What a pod requests of devices: resource names and annotations as one validated value.

A pod names GPUs, RDMA and FPGA devices by several resource names. Only certain sets of names make
sense together; each becomes a number of devices and an amount for each of them. The table of sets
and the rules for counts: docs/facts/scheduler.md, "Device requests".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
from msgspec import field

from apis.annotations import annotation_field
from apis.decode import Embedded, decode_optional_field, field_decoder
from apis.device import DeviceType
from apis.errors import InputError, printable
from apis.keys import (
    AMD_GPU,
    ANNOTATION_DEVICE_ALLOCATE_HINT,
    ANNOTATION_DEVICE_JOINT_ALLOCATE,
    ANNOTATION_GPU_PARTITION_SPEC,
    FPGA,
    GPU,
    GPU_CORE,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    GPU_SHARED,
    HUAWEI_NPU_CORE,
    HUAWEI_NPU_CPU,
    HUAWEI_NPU_DVPP,
    HYGON_DCU,
    LABEL_GPU_ISOLATION_PROVIDER,
    NVIDIA_GPU,
    RDMA,
)
from apis.meta import LabelSelector, LabelSelectorRequirement, selector_problem
from apis.quantity import ZERO, Quantity
from cluster.scheduler.tables.amounts import Amounts, amount_of
from cluster.scheduler.tables.shapes import PodShape

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

WHOLE: Final = 100
"""Percent of one device."""

COUNTED_GPUS: Final = frozenset({NVIDIA_GPU, AMD_GPU, HYGON_DCU})
"""Names that count whole GPUs, as the vendors' device plugins of kubelet do."""

_GPU_NAMES: Final = COUNTED_GPUS | {
    GPU,
    GPU_SHARED,
    GPU_CORE,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    HUAWEI_NPU_CORE,
    HUAWEI_NPU_CPU,
    HUAWEI_NPU_DVPP,
}
_NAMES: Final[Mapping[str, frozenset[str]]] = {
    DeviceType.GPU: _GPU_NAMES,
    DeviceType.RDMA: frozenset({RDMA}),
    DeviceType.FPGA: frozenset({FPGA}),
}

DEVICE_RESOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    DeviceType.GPU: (
        GPU_CORE,
        GPU_MEMORY,
        GPU_MEMORY_RATIO,
        HUAWEI_NPU_CORE,
        HUAWEI_NPU_CPU,
        HUAWEI_NPU_DVPP,
    ),
    DeviceType.RDMA: (RDMA,),
    DeviceType.FPGA: (FPGA,),
}
"""Resources that a device of each type has, and that are allocated from it."""

_VNPU: Final = frozenset({GPU_SHARED, HUAWEI_NPU_CORE, HUAWEI_NPU_CPU, GPU_MEMORY})
_PERCENTAGES: Final[Mapping[frozenset[str], tuple[str, ...]]] = {
    frozenset({GPU}): (GPU,),
    frozenset({GPU_MEMORY}): (),
    frozenset({GPU_MEMORY_RATIO}): (GPU_MEMORY_RATIO,),
    frozenset({GPU_CORE, GPU_MEMORY}): (GPU_CORE,),
    frozenset({GPU_CORE, GPU_MEMORY_RATIO}): (GPU_CORE, GPU_MEMORY_RATIO),
    frozenset({HUAWEI_NPU_CORE, GPU_MEMORY_RATIO}): (GPU_MEMORY_RATIO,),
}
"""Sets of names without gpu.shared, and those among them that count in percent of a device."""
_SHARED: Final = frozenset(
    {
        frozenset({GPU_SHARED, GPU_MEMORY}),
        frozenset({GPU_SHARED, GPU_MEMORY_RATIO}),
        frozenset({GPU_SHARED, GPU_CORE, GPU_MEMORY}),
        frozenset({GPU_SHARED, GPU_CORE, GPU_MEMORY_RATIO}),
    }
)
_VNPUS: Final = frozenset({_VNPU, _VNPU | {HUAWEI_NPU_DVPP}})


class BadDeviceRequest(ValueError):
    """The pod cannot get devices on any node. The text says why, in upstream's words if it can."""


class Scope(IntEnum):
    """How close together the devices of one pod have to be; a higher number is closer."""

    NONE = 0
    NODE = 1
    NUMA_NODE = 2
    PCIE = 3
    DEVICE = 4


class Strategy(StrEnum):
    ONE = ""
    APPLY_FOR_ALL = "ApplyForAll"
    REQUESTS_AS_COUNT = "RequestsAsCount"


class Exclusive(StrEnum):
    NONE = ""
    DEVICE = "DeviceLevel"
    PCIE = "PCIeLevel"


class PartitionPolicy(StrEnum):
    BEST_EFFORT = "BestEffort"
    RESTRICTED = "Restricted"


_SCOPES: Final[Mapping[str, Scope]] = {
    "": Scope.NONE,
    "Node": Scope.NODE,
    "NUMANode": Scope.NUMA_NODE,
    "PCIe": Scope.PCIE,
    "Device": Scope.DEVICE,
}


@dataclass(frozen=True, slots=True)
class TypeRequest:
    """Devices of one type.

    count: how many devices. each: amounts from each of them, none 0.
    every: as many as the node has that `selector` selects, instead of `count`.
    shared: the pod gets a part of a device and not all of it. by_bytes: GPU memory is requested in
    bytes and not as a ratio. functions: selects the groups of virtual functions of which each
    device gives one; None where no virtual function is needed.
    """

    type: str
    count: int
    each: Amounts
    every: bool
    selector: LabelSelector | None
    functions: LabelSelector | None
    scope: Scope
    exclusive: Exclusive

    @property
    def shared(self) -> bool:
        return self.type == DeviceType.GPU and (
            self.by_bytes or self.each.get(GPU_MEMORY_RATIO, WHOLE) < WHOLE
        )

    @property
    def by_bytes(self) -> bool:
        return GPU_MEMORY in self.each and GPU_MEMORY_RATIO not in self.each


@dataclass(frozen=True, slots=True)
class PartitionRequest:
    """How the GPUs must be linked. bandwidth: of the ring bus, bytes per second, at least."""

    restricted: bool = False
    bandwidth: int = 0


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """All devices that a pod requests.

    types: by type, in the order gpu, rdma, fpga. joint: types to allocate together, the primary
    first; empty where each is allocated alone. same_pcie: the devices of all `joint` types must
    be on the same PCIe switches. counted: all GPUs are requested by a vendor's count, which
    kubelet's device plugin can serve too. isolation: the requested GPU isolation provider or "".
    """

    types: Mapping[str, TypeRequest]
    joint: tuple[str, ...]
    same_pcie: bool
    partition: PartitionRequest | None
    counted: bool
    isolation: str

    @property
    def shares_gpu(self) -> bool:
        gpu = self.types.get(DeviceType.GPU)
        return gpu is not None and gpu.shared


# --- annotations ---------------------------------------------------------------------------------


class _Requirement(LabelSelectorRequirement, Embedded, frozen=True):
    pass


class _Selector(Embedded, frozen=True):
    match_labels: dict[str, str] = field(default_factory=dict)
    match_expressions: tuple[_Requirement, ...] = ()


class _Hint(Embedded, frozen=True):
    selector: _Selector | None = None
    vf_selector: _Selector | None = None
    allocate_strategy: str = ""
    required_topology_scope: str = ""
    exclusive_policy: str = ""


class _Joint(Embedded, frozen=True):
    device_types: tuple[str, ...] = ()
    required_scope: str = ""


class _Partition(Embedded, frozen=True):
    allocate_policy: str = ""
    ring_bus_bandwidth: Quantity | None = None


_SAME_PCIE: Final = "SamePCIe"

_hints = field_decoder(dict[str, _Hint])
_joint = field_decoder(_Joint)
_partition = field_decoder(_Partition)


def parse_device_request(
    requests: Amounts, annotations: Mapping[str, str], labels: Mapping[str, str]
) -> DeviceRequest | None:
    """Return what a pod requests of devices; None if it requests none.

    requests: of the pod as a whole. Raises BadDeviceRequest. Annotations are read only if the pod
    requests a device, so a bad one does no harm elsewhere.
    """
    requested = {
        type_: found
        for type_, names in _NAMES.items()
        if (found := {name: value for name, value in requests.items() if value and name in names})
    }
    if not requested:
        return None
    try:
        hints = _read(_hints, annotations, ANNOTATION_DEVICE_ALLOCATE_HINT) or {}
        joint = _read(_joint, annotations, ANNOTATION_DEVICE_JOINT_ALLOCATE) or _Joint()
        partition = _read(_partition, annotations, ANNOTATION_GPU_PARTITION_SPEC)
        types = {
            type_: _type_request(type_, found, hints.get(type_, _Hint()))
            for type_, found in requested.items()
        }
        together = _together(joint, types)
        return DeviceRequest(
            types=types,
            joint=together,
            same_pcie=bool(together) and joint.required_scope == _SAME_PCIE,
            partition=None if partition is None else _partition_request(partition),
            counted=requested.keys() == {DeviceType.GPU}
            and requested[DeviceType.GPU].keys() <= COUNTED_GPUS,
            isolation=labels.get(LABEL_GPU_ISOLATION_PROVIDER, ""),
        )
    except InputError as error:
        raise BadDeviceRequest(f"{error.field} = {error.value!r}: {error.problem}") from None


def device_request(pod: PodShape) -> DeviceRequest | BadDeviceRequest | None:
    """Return what a pod requests of devices; for `PodShape.derived`."""
    try:
        return parse_device_request(pod.requests, pod.annotations, pod.labels)
    except BadDeviceRequest as error:
        return error


def _read(decoder: msgspec.json.Decoder[T], annotations: Mapping[str, str], key: str) -> T | None:
    text = annotations.get(key, "")
    if not text.strip():
        return None
    return decode_optional_field(decoder, text, obj="", field=annotation_field(key))


def _invalid_annotation(key: str, member: str, value: object, problem: str) -> BadDeviceRequest:
    return BadDeviceRequest(f"{annotation_field(key)}.{member} = {printable(value)!r}: {problem}")


def _member(key: str, member: str, value: str, choices: type[E]) -> E:
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choice.value for choice in choices if choice.value)
        raise _invalid_annotation(key, member, value, f"expected one of {known}") from None


def _selector(read: _Selector | None, member: str) -> LabelSelector | None:
    if read is None:
        return None
    selector = LabelSelector(
        match_labels=read.match_labels, match_expressions=read.match_expressions
    )
    problem = selector_problem(selector)
    if problem is not None:
        raise _invalid_annotation(ANNOTATION_DEVICE_ALLOCATE_HINT, member, "selector", problem)
    return selector


def _partition_request(read: _Partition) -> PartitionRequest:
    key = ANNOTATION_GPU_PARTITION_SPEC
    policy = _member(key, "allocatePolicy", read.allocate_policy or "BestEffort", PartitionPolicy)
    return PartitionRequest(
        restricted=policy is PartitionPolicy.RESTRICTED,
        bandwidth=max(0, amount_of(GPU_MEMORY, read.ring_bus_bandwidth or ZERO)),
    )


def _together(joint: _Joint, types: Mapping[str, TypeRequest]) -> tuple[str, ...]:
    if joint.required_scope not in ("", _SAME_PCIE):
        raise _invalid_annotation(
            ANNOTATION_DEVICE_JOINT_ALLOCATE,
            "requiredScope",
            joint.required_scope,
            f"expected {_SAME_PCIE}",
        )
    if len(types) < 2:
        return ()
    listed = dict.fromkeys(joint.device_types)
    return tuple(type_ for type_ in listed if type_ in types and not types[type_].every)


# --- from names to devices ---------------------------------------------------------------------


def _type_request(type_: str, requested: Amounts, hint: _Hint) -> TypeRequest:
    key = ANNOTATION_DEVICE_ALLOCATE_HINT
    strategy = _member(key, f"{type_}.allocateStrategy", hint.allocate_strategy, Strategy)
    exclusive = _member(key, f"{type_}.exclusivePolicy", hint.exclusive_policy, Exclusive)
    scope = _SCOPES.get(hint.required_topology_scope)
    if scope is None:
        known = ", ".join(name for name in _SCOPES if name)
        raise _invalid_annotation(
            key,
            f"{type_}.requiredTopologyScope",
            hint.required_topology_scope,
            f"expected one of {known}",
        )
    every = False
    if type_ == DeviceType.GPU:
        count, each = _gpus(requested)
    else:
        ((name, amount),) = requested.items()
        count, each, every = _others(name, amount, strategy, exclusive)
    return TypeRequest(
        type=type_,
        count=count,
        each=MappingProxyType(each),
        every=every,
        selector=_selector(hint.selector, f"{type_}.selector"),
        functions=_selector(hint.vf_selector, f"{type_}.vfSelector"),
        scope=scope,
        exclusive=exclusive,
    )


def _gpus(requested: Amounts) -> tuple[int, dict[str, int]]:
    """Return the number of GPUs, and the amounts from each of them."""
    amounts = dict(requested)
    names = frozenset(amounts)
    if names in _PERCENTAGES:
        for name in _PERCENTAGES[names]:
            _require(_is_percentage(amounts[name]), name, amounts[name])
        if GPU in names:
            percent = amounts.pop(GPU)
            amounts = {GPU_CORE: percent, GPU_MEMORY_RATIO: percent}
    elif len(names) == 1 and names <= COUNTED_GPUS:
        ((name, count),) = amounts.items()
        _require(count > 0, name, count)
        return count, {GPU_CORE: WHOLE, GPU_MEMORY_RATIO: WHOLE}
    elif names in _SHARED:
        count = amounts[GPU_SHARED]
        for name in (GPU_CORE, GPU_MEMORY_RATIO):
            if name in amounts:
                value = amounts[name]
                sound = count > 0 and value % count == 0 and value // count <= WHOLE
                _require(sound, name, value)
    elif names in _VNPUS:
        _require(amounts[GPU_SHARED] <= 1, GPU_SHARED, amounts[GPU_SHARED])
        dvpp = amounts.get(HUAWEI_NPU_DVPP, 0)
        _require(dvpp <= WHOLE, HUAWEI_NPU_DVPP, dvpp)
    else:
        listed = " ".join(sorted(names))
        raise BadDeviceRequest(f"invalid resource device requests: [{listed}]")
    count = amounts.pop(GPU_SHARED, 0)
    if count == 0:
        count = max(1, amounts.get(GPU_MEMORY_RATIO, 0) // WHOLE)
    each = {}
    for name, value in amounts.items():
        # A share that rounds to nothing would fit on any device, also on one that is broken.
        _require(count > 0 and value >= count, name, value)
        each[name] = value // count
    return count, each


def _others(
    name: str, amount: int, strategy: Strategy, exclusive: Exclusive
) -> tuple[int, dict[str, int], bool]:
    """Return the number of devices, the amount from each, and whether every device is wanted."""
    _require(_is_percentage(amount), name, amount)
    if amount > WHOLE:
        return amount // WHOLE, {name: WHOLE}, False
    if strategy is Strategy.APPLY_FOR_ALL:
        return 0, {name: amount}, True
    if strategy is Strategy.REQUESTS_AS_COUNT:
        return amount, {name: WHOLE if exclusive is Exclusive.DEVICE else 1}, False
    return 1, {name: amount}, False


def _is_percentage(value: int) -> bool:
    return 0 < value <= WHOLE or (value > 0 and value % WHOLE == 0)


def _require(sound: bool, name: str, value: int) -> None:
    if not sound:
        raise BadDeviceRequest(f"invalid resource unit {name}: {value}")
