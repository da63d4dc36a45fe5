"""GPU and RDMA resources and labels of a node, from its Device object.

They follow the devices whether co-location is on or off: a failed GPU must leave the node's
allocatable in both cases. Formulas: docs/facts/manager.md, "GPU and RDMA resources".
"""

from __future__ import annotations

from typing import Final

from apis.device import Device, DeviceType
from apis.keys import (
    GPU,
    GPU_CORE,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    GPU_SHARED,
    HUAWEI_NPU_CORE,
    HUAWEI_NPU_CPU,
    HUAWEI_NPU_DVPP,
    LABEL_GPU_DRIVER_OLD,
    LABEL_GPU_DRIVER_VERSION,
    LABEL_GPU_MODEL,
    LABEL_GPU_MODEL_OLD,
    LABEL_GPU_VENDOR,
    RDMA,
)
from apis.quantity import Quantity, ResourceList, add_resources

GPU_RESOURCES: Final = (
    GPU,
    GPU_CORE,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    GPU_SHARED,
    HUAWEI_NPU_CORE,
    HUAWEI_NPU_CPU,
    HUAWEI_NPU_DVPP,
)
"""Resources that the manager sets from the GPUs of a Device. One that no healthy GPU offers is
removed from the Node."""


def gpu_resources(device: Device | None, *, share_counts: bool) -> ResourceList:
    """Return the node's GPU resources; empty without a healthy GPU.

    share_counts: whether koordinator.sh/gpu.shared is offered, 100 (percent) for each GPU; gate
    EnableSyncGPUSharedResource.
    """
    healthy = (
        [info for info in device.spec.devices if info.type == DeviceType.GPU and info.health]
        if device is not None
        else []
    )
    if device is None or not healthy:
        return {}
    summed = add_resources(*(info.resources for info in healthy))
    resources: ResourceList = {name: summed[name] for name in GPU_RESOURCES if name in summed}
    vendor = device.metadata.labels.get(LABEL_GPU_VENDOR, "")
    if vendor in ("", "nvidia") and GPU_CORE in resources:
        resources[GPU] = resources[GPU_CORE]
    if share_counts:
        resources[GPU_SHARED] = Quantity.of(100 * len(healthy))
    return resources


def rdma_resources(device: Device | None) -> ResourceList:
    """Return 100 (percent of a device) for each healthy RDMA device; empty without a device."""
    healthy = (
        sum(info.type == DeviceType.RDMA and info.health for info in device.spec.devices)
        if device is not None
        else 0
    )
    return {RDMA: Quantity.of(100 * healthy)} if healthy else {}


_LABELS: Final = (
    (LABEL_GPU_VENDOR, ()),
    (LABEL_GPU_MODEL, (LABEL_GPU_MODEL_OLD,)),
    (LABEL_GPU_DRIVER_VERSION, (LABEL_GPU_DRIVER_OLD,)),
)


def gpu_labels(device: Device | None) -> dict[str, str]:
    """Return the labels that the node gets from its Device, each also under its older name.

    A label that the Device carries only under its older name is read from there.
    """
    if device is None:
        return {}
    labels: dict[str, str] = {}
    for name, older in _LABELS:
        value = next(
            (found for key in (name, *older) if (found := device.metadata.labels.get(key))), None
        )
        if value is not None:
            labels.update(dict.fromkeys((name, *older), value))
    return labels
