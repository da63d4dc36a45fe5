"""Devices, nodes and pods for the tests of DeviceShare, decoded from JSON as from an API server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from apis.decode import decode_object
from apis.device import Device, parse_device_allocated
from apis.quantity import parse_quantity
from cluster.scheduler.exact.devices.allocate import Devices
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.tables.amounts import amounts_of
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.devices.inventory import read_inventory
from cluster.scheduler.tables.devices.node import NodeDevices, device_states, holding_of
from cluster.scheduler.tables.devices.partitions import NO_PARTITIONS, PartitionRules
from cluster.scheduler.tables.devices.request import DeviceRequest, parse_device_request
from cluster.scheduler.tables.shapes import PodShape, Shapes
from tests.cluster.scheduler.making import make_pod

GIB = 1 << 30
PREFIX = "koordinator.sh/"
HINT = "scheduling.koordinator.sh/device-allocate-hint"
JOINT = "scheduling.koordinator.sh/device-joint-allocate"
PARTITION = "scheduling.koordinator.sh/gpu-partition-spec"


def full(name: str) -> str:
    """Return a resource name; short ones but cpu and memory are Koordinator's."""
    return name if "/" in name or name in ("cpu", "memory") else PREFIX + name


def a_gpu(
    minor: int,
    *,
    memory: str = "80Gi",
    health: bool = True,
    at: tuple[int, str] | None = None,
    labels: dict[str, str] | None = None,
    resources: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return a GPU as a Device has it. at: NUMA node and PCIe id. resources: further ones."""
    amounts = {"gpu-core": "100", "gpu-memory": memory, "gpu-memory-ratio": "100"}
    amounts |= resources or {}
    return a_device("gpu", minor, amounts, health=health, at=at, labels=labels, id=f"GPU-{minor}")


def a_nic(minor: int, *, functions: Sequence[str] = (), **rest: Any) -> dict[str, Any]:
    """Return an RDMA device. functions: bus ids of its virtual functions."""
    nic = a_device("rdma", minor, {"rdma": "100"}, id=f"mlx-{minor}", **rest)
    if functions:
        nic["vfGroups"] = [
            {"labels": {"type": "fast"}, "vfs": [{"minor": -1, "busID": bus} for bus in functions]}
        ]
    return nic


def a_device(
    type_: str,
    minor: int,
    resources: Mapping[str, str],
    *,
    health: bool = True,
    at: tuple[int, str] | None = None,
    labels: dict[str, str] | None = None,
    id: str = "",  # noqa: A002 - the field's name
) -> dict[str, Any]:
    device: dict[str, Any] = {
        "type": type_,
        "minor": minor,
        "id": id,
        "health": health,
        "labels": labels or {},
        "resources": {full(name): amount for name, amount in resources.items()},
    }
    if at is not None:
        numa, pcie = at
        device["topology"] = {"socketID": -1, "nodeID": numa, "pcieID": pcie}
    return device


def a_device_object(
    name: str,
    devices: Sequence[Mapping[str, Any]],
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Device:
    return decode_object(
        json.dumps(
            {
                "metadata": {
                    "name": name,
                    "labels": dict(labels or {}),
                    "annotations": dict(annotations or {}),
                },
                "spec": {"devices": list(devices)},
            }
        ),
        Device,
        obj=f"Device {name}",
    )


def node_devices(
    devices: Sequence[Mapping[str, Any]],
    *,
    held: Mapping[str, Mapping[int, Mapping[str, str]]] | None = None,
    rules: PartitionRules = NO_PARTITIONS,
    vendor: str = "",
    model: str = "",
) -> NodeDevices:
    """Return the devices of a node. held: what pods have, by type, minor and resource."""
    inventory, errors = read_inventory(a_device_object("n1", devices))
    assert not errors, errors
    holdings = []
    if held:
        text = {
            type_: [
                {"minor": minor, "resources": {full(n): a for n, a in amounts.items()}}
                for minor, amounts in of_type.items()
            ]
            for type_, of_type in held.items()
        }
        holdings.append(holding_of(parsed_allocation(text), inventory))
    return NodeDevices(
        states=device_states(inventory, holdings, {}),
        vendor=vendor,
        model=model,
        partitions=rules,
    )


def parsed_allocation(text: Mapping[str, Any]) -> Devices:
    return parse_device_allocated(json.dumps(text), obj="Pod default/web")


def whole_gpus(*minors: int) -> dict[str, dict[int, dict[str, str]]]:
    """Return what pods hold that have these GPUs for themselves."""
    return {"gpu": {minor: {"gpu-core": "100", "gpu-memory-ratio": "100"} for minor in minors}}


def device_annotations(
    *,
    hint: Mapping[str, Any] | None = None,
    joint: Mapping[str, Any] | None = None,
    partition: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return the annotations of a pod that requests devices."""
    texts = {HINT: hint, JOINT: joint, PARTITION: partition}
    return {key: json.dumps(value) for key, value in texts.items() if value is not None}


def a_request(
    requests: Mapping[str, str | int], *, labels: Mapping[str, str] | None = None, **extra: Any
) -> DeviceRequest:
    """Return a request that must be valid. extra: see `device_annotations`."""
    amounts = amounts_of({full(name): parse_quantity(v) for name, v in requests.items()})
    request = parse_device_request(amounts, device_annotations(**extra), labels or {})
    assert request is not None
    return request


def minors(found: Devices | Failure, type_: str = "gpu") -> list[int] | str:
    """Return the minors of an allocation, or the text of the failure."""
    if isinstance(found, Failure):
        return found.text
    return [device.minor for device in found[type_]]


SHAPES = Shapes()


def a_shape(
    requests: Mapping[str, str | int], *, labels: dict[str, str] | None = None, **extra: Any
) -> PodShape:
    amounts = {full(name): str(amount) for name, amount in requests.items()}
    pod = make_pod("p", requests=amounts, labels=labels, annotations=device_annotations(**extra))
    return SHAPES.of(pod)


def a_booking(
    uid: str, shape: PodShape, node: str, devices: Devices, *, reservation: str = ""
) -> Booking:
    return Booking(
        key=f"default/{uid}",
        uid=uid,
        shape=shape,
        node=node,
        allocation=Allocation(devices=devices, reservation=reservation),
    )
