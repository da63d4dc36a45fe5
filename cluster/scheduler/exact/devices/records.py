"""What stands on a pod once its devices are chosen: annotations, labels and the node's lock.

`device-allocated` is read by koordlet. With the gate DevicePluginAdaption the keys of vendors'
device plugins are written too; docs/facts/scheduler.md, "Device records".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from apis.decode import canonical_json
from apis.device import DeviceAllocation, DeviceType
from apis.keys import (
    ANNOTATION_BIND_TIMESTAMP,
    ANNOTATION_CAMBRICON_ASSIGNED,
    ANNOTATION_CAMBRICON_LOCK,
    ANNOTATION_CAMBRICON_PROFILE,
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_GPU_MINORS,
    ANNOTATION_HAMI_LOCK,
    ANNOTATION_HUAWEI_ASCEND_310P,
    ANNOTATION_HUAWEI_NPU_CORE,
    ANNOTATION_METAX_GPU_ALLOCATED,
    ANNOTATION_PREDICATE_TIME,
    GPU_CORE,
    GPU_MEMORY,
    LABEL_HAMI_VGPU_NODE,
)
from cluster.scheduler.exact.devices.allocate import Devices
from cluster.scheduler.tables.devices.request import WHOLE

HAMI_CORE: Final = "HAMi-core"
CAMBRICON: Final = "cambricon"
ASCEND_310P_DUO: Final = "Ascend-310P3-300I-DUO"

_MIB: Final = 1 << 20
_CAMBRICON_MEMORY: Final = 256 * _MIB
"""Unit in which Cambricon's profile counts memory."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """What is written. lock: annotation of the Node that must be taken before, "" for none."""

    annotations: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""


def device_allocated(devices: Devices) -> str:
    """Return the text of the annotation device-allocated."""
    return canonical_json(
        {type_: [_plain(one) for one in allocations] for type_, allocations in devices.items()}
    )


def _plain(one: DeviceAllocation) -> dict[str, Any]:
    # Written member by member: a minor of 0 is a number that readers look for.
    plain: dict[str, Any] = {"minor": one.minor, "resources": one.resources}
    if one.id:
        plain["id"] = one.id
    if one.extension is not None:
        plain["extension"] = one.extension
    return plain


def device_record(devices: Devices) -> DeviceRecord:
    """Return what is written without DevicePluginAdaption."""
    return DeviceRecord({ANNOTATION_DEVICE_ALLOCATED: device_allocated(devices)})


def adapted_record(
    devices: Devices, *, node: str, vendor: str, model: str, isolation: str, now_ns: int
) -> DeviceRecord:
    """Return what is written with DevicePluginAdaption.

    vendor, model: of the node's Device. isolation: the pod's GPU isolation provider.
    now_ns: nanoseconds since 1970.
    """
    annotations = {
        ANNOTATION_DEVICE_ALLOCATED: device_allocated(devices),
        ANNOTATION_BIND_TIMESTAMP: str(now_ns),
    }
    gpus = devices.get(DeviceType.GPU, ())
    if not gpus:
        return DeviceRecord(annotations)
    minors = ",".join(str(gpu.minor) for gpu in gpus)
    annotations[ANNOTATION_GPU_MINORS] = minors
    labels = {LABEL_HAMI_VGPU_NODE: node} if isolation == HAMI_CORE else {}
    lock = ""
    match vendor:
        case "huawei":
            annotations[ANNOTATION_PREDICATE_TIME] = str(now_ns)
            if model == ASCEND_310P_DUO:
                names = ",".join(f"Ascend310P-{gpu.minor}" for gpu in gpus)
                annotations[ANNOTATION_HUAWEI_ASCEND_310P] = names
            else:
                annotations[ANNOTATION_HUAWEI_NPU_CORE] = ",".join(map(_npu, gpus))
        case "cambricon":
            gpu = gpus[0]  # the only one: see `supports`
            memory = _amount(gpu, GPU_MEMORY) // _CAMBRICON_MEMORY
            annotations[ANNOTATION_CAMBRICON_ASSIGNED] = "false"
            annotations[ANNOTATION_CAMBRICON_PROFILE] = (
                f"{gpu.minor}_{_amount(gpu, GPU_CORE)}_{memory}"
            )
            lock = ANNOTATION_CAMBRICON_LOCK
        case "metax":
            annotations[ANNOTATION_METAX_GPU_ALLOCATED] = canonical_json([list(map(_metax, gpus))])
            lock = ANNOTATION_HAMI_LOCK
    return DeviceRecord(annotations, labels, lock)


def supports(vendor: str, gpus: int) -> bool:
    """Return whether the vendor's device plugin can be given that many GPUs for one pod."""
    return vendor != CAMBRICON or gpus == 1


def _npu(gpu: DeviceAllocation) -> str:
    template = gpu.extension.gpu_shared_resource_template if gpu.extension is not None else ""
    return f"{gpu.minor}-{template}" if template else str(gpu.minor)


def _metax(gpu: DeviceAllocation) -> dict[str, Any]:
    return {
        "uuid": gpu.id,
        "compute": _amount(gpu, GPU_CORE),
        "vRam": _amount(gpu, GPU_MEMORY) // _MIB,
    }


def _amount(gpu: DeviceAllocation, name: str) -> int:
    quantity = gpu.resources.get(name)
    if quantity is not None:
        return quantity.value()
    return WHOLE if name == GPU_CORE else 0
