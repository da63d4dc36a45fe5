"""RDMADeviceInject: the verbs devices of the RDMA functions that the scheduler allocated.

Each allocated function (its virtual functions where there are any, else the device itself) is
looked up by PCI address among the facts of this kernel; the connection manager's device comes with
the first. No file is read while a container is created. An address that this node does not have
is reported and costs that device alone. It is reported on a node without any RDMA device too,
because the container starts without a device that it was allocated. Rules: docs/facts/policies.md,
"RDMA devices".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from apis.annotations import annotation_field
from apis.device import DeviceAllocation, DeviceType, parse_device_allocated
from apis.errors import InputError
from apis.keys import ANNOTATION_DEVICE_ALLOCATED
from hooks.claim import Claim, Claimed, Rank
from hooks.facts import NodeInputs
from hooks.policy import Policy, never
from hooks.subject import ContainerSubject, Level
from linux.resources import DeviceNode, Resource

NAME: Final = "RDMADeviceInject"

_SOURCE: Final = f"annotation {ANNOTATION_DEVICE_ALLOCATED}"
_FIELD: Final = annotation_field(ANNOTATION_DEVICE_ALLOCATED)


class Rule(msgspec.Struct, frozen=True):
    devices: Mapping[str, DeviceNode]
    connection_manager: DeviceNode | None


def parse(inputs: NodeInputs) -> Rule:
    kernel = inputs.kernel
    return Rule(
        devices={address.lower(): node for address, node in kernel.rdma.items()},
        connection_manager=kernel.rdma_cm,
    )


def addresses_of(device: DeviceAllocation, index: int) -> list[tuple[str, str]]:
    """Return (PCI address, field of the annotation) of each function of an allocated device."""
    where = f"rdma[{index}]"
    if device.extension is not None and device.extension.vfs:
        return [
            (vf.bus_id, f"{where}.extension.vfs[{number}].busID")
            for number, vf in enumerate(device.extension.vfs)
        ]
    return [(device.id, f"{where}.id")]


def claim_container(rule: Rule, subject: ContainerSubject) -> Iterator[Claimed]:
    pod = subject.pod
    text = pod.annotations.get(ANNOTATION_DEVICE_ALLOCATED)
    if text is None:
        return
    allocated = parse_device_allocated(text, obj=pod.obj).get(DeviceType.RDMA)
    if not allocated:
        return
    missing: list[tuple[str, str]] = []
    first = True
    for index, device in enumerate(allocated):
        for address, where in addresses_of(device, index):
            node = rule.devices.get(address.lower())
            if node is None:
                missing.append((address, where))
                continue
            if first and rule.connection_manager is not None:
                yield _claim(rule.connection_manager, "the RDMA connection manager", _SOURCE)
            first = False
            yield _claim(node, f"RDMA device {address}", f"{_SOURCE}.{where}")
    if missing:
        address, where = missing[0]
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        yield InputError(
            obj=pod.obj,
            field=f"{_FIELD}.{where}",
            value=address,
            problem=f"this node has no RDMA device with verbs at this PCI address{others}",
            hint="compare with `ls -l /sys/class/infiniband_verbs/*/device` on the node",
        )


def _claim(node: DeviceNode, reason: str, source: str) -> Claim:
    return Claim(
        resource=Resource.DEVICE,
        key=node.path,
        value=node,
        policy=NAME,
        reason=reason,
        source=source,
        rank=Rank.POD,
    )


POLICY: Final = Policy(
    name=NAME,
    gate="RDMADeviceInject",
    gate_default=False,
    summary="device nodes of the RDMA functions that were allocated to a pod",
    parse=parse,
    claims={Level.CONTAINER: claim_container},
    degraded=lambda rule: "" if rule.devices else "this node has no RDMA device with verbs",
    individual=never,
)
