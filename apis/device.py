"""The Device object of a node, and the devices that the scheduler allocated to a pod."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import (
    Decoded,
    Embedded,
    Wire,
    decode_text,
    field_decoder,
    remembered,
)
from apis.errors import InputError
from apis.keys import ANNOTATION_DEVICE_ALLOCATED
from apis.meta import REQUIRED, Int32, StatusCondition
from apis.quantity import ResourceList


class DeviceType(StrEnum):
    """Device classes that Koordinator knows; objects may carry others."""

    GPU = "gpu"
    FPGA = "fpga"
    RDMA = "rdma"


class DeviceTopology(Wire, frozen=True, omit_defaults=False):
    """Where a device is attached.

    socket_id: Number of the CPU socket.
    node_id: Number of the NUMA node.
    pcie_id: Identity of the PCIe switch or root.
    bus_id: PCI address.
    """

    socket_id: Int32 = field(name="socketID")
    node_id: Int32 = field(name="nodeID")
    pcie_id: str = field(name="pcieID")
    bus_id: str = field(name="busID", default="")


class VirtualFunction(Wire, frozen=True, omit_defaults=False):
    """One virtual function of a device.

    minor: Number of the function.
    bus_id: PCI address.
    """

    minor: Int32
    bus_id: str = field(name="busID", default="")


class VirtualFunctionGroup(Wire, frozen=True):
    """Virtual functions that share labels.

    labels: Labels that allocation hints select by.
    vfs: The virtual functions.
    """

    labels: dict[str, str] = field(default_factory=dict)
    vfs: tuple[VirtualFunction, ...] = ()


class DeviceInfo(Wire, frozen=True):
    """One device of the node.

    type: Type of the device: gpu, fpga, rdma or another.
    labels: Labels that allocation hints select by.
    id: UUID or PCI address.
    minor: Number of the device among those of its type.
    module_id: Physical slot on the machine.
    health: Whether the device can be used.
    resources: Amounts that the device has, by resource name.
    topology: Where the device is attached.
    vf_groups: Virtual functions of the device.
    conditions: What is known about the state of the device.
    """

    type: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    id: str = ""
    minor: Int32 | None = None
    module_id: Int32 | None = field(name="moduleID", default=None)
    # Not `= False`, which would leave false out of what is written; the CRD requires the field.
    health: Annotated[bool, Meta(extra=REQUIRED, extra_json_schema={"default": False})] = field(
        default_factory=bool
    )
    resources: ResourceList = field(default_factory=dict)
    topology: DeviceTopology | None = None
    vf_groups: tuple[VirtualFunctionGroup, ...] = ()
    conditions: tuple[StatusCondition, ...] = ()


class DeviceSpec(Wire, frozen=True):
    """The devices of the node.

    devices: The devices, sorted by type and number.
    """

    devices: tuple[DeviceInfo, ...] = ()


class DeviceAllocationEntry(Wire, frozen=True):
    """Devices that one pod has.

    name: Name of the pod.
    namespace: Namespace of the pod.
    uuid: UID of the pod.
    minors: Numbers of its devices.
    """

    name: str = ""
    namespace: str = ""
    uuid: str = ""
    minors: tuple[Int32, ...] = ()


class DeviceAllocationStatus(Wire, frozen=True):
    """Allocations of one device type.

    type: Type of the devices.
    entries: Devices of each pod.
    """

    type: str = ""
    entries: tuple[DeviceAllocationEntry, ...] = ()


class DeviceStatus(Wire, frozen=True):
    """Which devices are in use.

    allocations: Allocations by device type.
    """

    allocations: tuple[DeviceAllocationStatus, ...] = ()


class Device(Wire, frozen=True):
    """All devices of the node of the same name.

    spec: The devices of the node.
    status: Which devices are in use.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: DeviceSpec = DeviceSpec()
    status: DeviceStatus = DeviceStatus()


# --- the annotation device-allocated -----------------------------------------------------------


class AllocatedFunction(VirtualFunction, Embedded, frozen=True, omit_defaults=False):
    """`VirtualFunction` as an annotation has it."""


class DeviceAllocationExtension(Embedded, frozen=True):
    vfs: tuple[AllocatedFunction, ...] = ()
    gpu_shared_resource_template: str = ""


class DeviceAllocation(Embedded, frozen=True):
    """A device, or a share of a device, that a pod may use. `id` is a UUID or a PCI address."""

    minor: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    id: Annotated[str, Meta(max_length=256)] = ""
    resources: ResourceList = field(default_factory=dict)
    extension: DeviceAllocationExtension | None = None


DeviceAllocations = Mapping[str, tuple[DeviceAllocation, ...]]
"""Device type ("gpu", "rdma", ...) -> allocations in the order that they were written."""

_FIELD: Final = f'metadata.annotations["{ANNOTATION_DEVICE_ALLOCATED}"]'
_decoder = field_decoder(dict[str, tuple[DeviceAllocation, ...]])
_MOST_DEVICES: Final = 1024
"""Of one type; chosen: no machine has as many, and each costs work while a container is created."""


def _decode_allocations(text: str) -> Decoded[dict[str, tuple[DeviceAllocation, ...]]]:
    if text.strip() == "null":
        return Decoded({})
    return decode_text(_decoder, text, field=_FIELD)


def _bounded(devices: dict[str, tuple[DeviceAllocation, ...]]) -> DeviceAllocations:
    for kind, allocations in devices.items():
        if len(allocations) > _MOST_DEVICES:
            raise InputError(
                obj="",
                field=f"{_FIELD}.{kind}",
                value=len(allocations),
                problem=f"more than {_MOST_DEVICES} devices",
            )
    return MappingProxyType(devices)


_parse_allocations = remembered(_decode_allocations, _bounded, field=_FIELD)


def parse_device_allocated(text: str, *, obj: str) -> DeviceAllocations:
    """Return the devices of a pod from its `device-allocated` annotation.

    `obj` names the pod in errors. Raises InputError.
    """
    return _parse_allocations(text, obj)
