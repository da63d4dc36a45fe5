"""The Device object's content from what the machine has: devices, labels and annotations. Pure.

Accelerators that files describe come before those that NVML knows, as upstream's do: a node has
one kind. The table of fields: docs/facts/koordlet.md, "Device". `lastTransitionTime` of a condition
is left to the reporter, which knows the last report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from apis import keys
from apis.device import (
    DeviceInfo,
    DeviceTopology,
    DeviceType,
    VirtualFunction,
    VirtualFunctionGroup,
)
from apis.meta import StatusCondition
from apis.quantity import Quantity
from koordlet.measurement.accelerators.nvml import Answer, Gpu
from koordlet.measurement.accelerators.xpu import Xpu
from linux.pci import Place
from linux.rdma import RdmaFunction

_WHOLE: Final = 100
"""A device's core and memory ratio in percent, and its RDMA share."""
_UNKNOWN_SOCKET: Final = -1
_PREFIXED: Final = frozenset({"gpu-core", "gpu-memory"})
"""Resources of accelerator files that get the prefix `koordinator.sh/`; upstream's list."""
_VENDOR_PREFIX: Final = "NVIDIA "
_REASON: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
"""What Kubernetes takes as the reason of a condition."""
_LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
"""What Kubernetes takes as the value of a label, less the empty text."""


class DeviceContent(NamedTuple):
    """What a Device object shall have."""

    devices: tuple[DeviceInfo, ...]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def device_content(
    gpus: Answer | None,
    xpus: Sequence[Xpu],
    rdma: Sequence[RdmaFunction],
    places: Mapping[str, Place],
    *,
    files_only: bool = False,
) -> DeviceContent:
    """Return the content. places: PCI address of each GPU -> where it is attached.

    files_only: upstream's flag xpu-enforce-collect-from-device-infos.
    """
    devices: list[DeviceInfo] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    if xpus:
        devices += [_xpu(xpu) for xpu in xpus]
        labels, annotations = _xpu_labels(xpus[0]), _partitions(xpus)
    elif gpus is not None and gpus.gpus and not files_only:
        devices += [_gpu(usage.gpu, places) for usage in gpus.gpus]
        labels = _gpu_labels(gpus)
    devices += [_rdma(function) for function in rdma]
    devices.sort(key=lambda device: (device.type, device.minor or 0))
    return DeviceContent(tuple(devices), labels, annotations)


def _healthy(healthy: bool, code: str, message: str) -> StatusCondition:
    if healthy:
        return StatusCondition(
            type="Healthy", status="True", reason="DeviceHealthy", message="device is healthy"
        )
    message = message or "device is unhealthy"
    if not _REASON.fullmatch(code):
        # The API server would refuse the whole object.
        code, message = "Unknown", f"{message} (code {code})" if code else message
    return StatusCondition(type="Healthy", status="False", reason=code, message=message)


def _gpu(gpu: Gpu, places: Mapping[str, Place]) -> DeviceInfo:
    place = places.get(gpu.bus_id, Place(0, ""))
    topology = None
    if place.root and gpu.bus_id:
        topology = DeviceTopology(_UNKNOWN_SOCKET, place.numa_node, place.root, gpu.bus_id)
    return DeviceInfo(
        type=DeviceType.GPU,
        id=gpu.uuid,
        minor=gpu.minor,
        health=gpu.healthy,
        resources={
            keys.GPU_CORE: Quantity.of(_WHOLE),
            keys.GPU_MEMORY: Quantity.of_bytes(gpu.memory_bytes),
            keys.GPU_MEMORY_RATIO: Quantity.of(_WHOLE),
        },
        topology=topology,
        conditions=() if gpu.healthy else (_healthy(False, gpu.error_code, gpu.error),),
    )


def _gpu_labels(gpus: Answer) -> dict[str, str]:
    labels = {keys.LABEL_GPU_VENDOR: "nvidia"}
    models = {usage.gpu.name.removeprefix(_VENDOR_PREFIX) for usage in gpus.gpus}
    if len(models) == 1:
        labels[keys.LABEL_GPU_MODEL] = models.pop()
    labels[keys.LABEL_GPU_DRIVER_VERSION] = gpus.driver_version
    return _valid(labels)


def _valid(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels whose value can be one, with dashes for blanks; "" is not a value here."""
    texts = {name: value.replace(" ", "-") for name, value in labels.items()}
    return {name: value for name, value in texts.items() if _LABEL.fullmatch(value)}


def _xpu(xpu: Xpu) -> DeviceInfo:
    resources = {keys.GPU_MEMORY_RATIO: Quantity.of(_WHOLE)}
    for name, amount in xpu.resources.items():
        resources[f"koordinator.sh/{name}" if name in _PREFIXED else name] = amount
    at, status = xpu.topology, xpu.status
    return DeviceInfo(
        type=DeviceType.GPU,
        id=xpu.uuid,
        minor=xpu.minor,
        health=status is None or status.healthy,
        resources=resources,
        topology=at and DeviceTopology(_UNKNOWN_SOCKET, at.numa_node, at.pcie_root, at.bus_id),
        conditions=()
        if status is None
        else (_healthy(status.healthy, status.error_code, status.error),),
    )


def _xpu_labels(first: Xpu) -> dict[str, str]:
    labels = {keys.LABEL_GPU_VENDOR: first.vendor, keys.LABEL_GPU_MODEL: first.model}
    if first.topology is not None and first.topology.links:
        honor = first.topology.must_honor_partition
        labels[keys.LABEL_GPU_PARTITION_POLICY] = "Honor" if honor else "Prefer"
    return _valid(labels)


def _partitions(xpus: Sequence[Xpu]) -> dict[str, str]:
    """Return the annotation of the groups of devices that are linked directly; none without."""
    seen: set[tuple[int, ...]] = set()
    table: dict[str, list[dict[str, object]]] = {}
    for xpu in sorted(xpus, key=lambda one: one.uuid):
        for link in xpu.topology.links if xpu.topology else ():
            minors = tuple(sorted({xpu.minor, *link.minors}))
            if minors not in seen:
                seen.add(minors)
                table.setdefault(str(len(minors)), []).append(
                    {"minors": minors, "gpuLinkType": link.type, "allocationScore": 1}
                )
    if not table:
        return {}
    return {keys.ANNOTATION_GPU_PARTITIONS: msgspec.json.encode(table, order="sorted").decode()}


def _rdma(function: RdmaFunction) -> DeviceInfo:
    virtual = tuple(VirtualFunction(-1, address) for address in sorted(function.virtual))
    place = function.place
    return DeviceInfo(
        type=DeviceType.RDMA,
        id=function.address,
        minor=function.minor,
        health=function.active,
        resources={keys.RDMA: Quantity.of(_WHOLE)},
        topology=DeviceTopology(_UNKNOWN_SOCKET, place.numa_node, place.root, function.address),
        vf_groups=(VirtualFunctionGroup(vfs=virtual),) if virtual else (),
    )
