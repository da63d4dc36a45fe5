"""GPUEnvInject: a container's GPUs as environment and device nodes, and HAMi-core where requested.

The scheduler's allocation becomes `NVIDIA_VISIBLE_DEVICES`. Devices are named by UUID where the
allocation carries one, because a minor number may differ from the driver's index; a compatibility
switch names them by minor number as upstream does.

NVIDIA's runtime opens the devices of that variable without systemd's knowledge, so a reload of
systemd takes them away from the container. The device nodes are therefore claimed too: the runtime
reports those to systemd. A compatibility switch leaves them out.

With the label `koordinator.sh/gpu-isolation-provider: HAMi-core` and a share below 100 %, the
container also gets HAMi-core's library, its limits and its lock directory, and, with the gate
HamiCoreVGPUMonitor, a directory that the monitor reads. Names and values: docs/facts/policies.md,
"GPU environment".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from apis.annotations import annotation_field
from apis.device import DeviceAllocation, DeviceType, parse_device_allocated
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_DEVICE_ALLOCATED,
    GPU_CORE,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    LABEL_GPU_ISOLATION_PROVIDER,
)
from hooks import compat
from hooks.claim import Claim, Claimed, Rank
from hooks.facts import NodeInputs
from hooks.policy import Policy
from hooks.subject import ContainerSubject, Level, Pod
from linux.resources import DeviceNode, Mount, Resource, Value

NAME: Final = "GPUEnvInject"
HAMI_CORE: Final = "HAMi-core"
HAMI_LOCK_DIRECTORY: Final = "/tmp/vgpulock"  # HAMi-core's own name for it

_SOURCE: Final = f"annotation {ANNOTATION_DEVICE_ALLOCATED}"
_FIELD: Final = f"{annotation_field(ANNOTATION_DEVICE_ALLOCATED)}.gpu"
_HAMI_SOURCE: Final = f"label {LABEL_GPU_ISOLATION_PROVIDER}"
_UUID_PREFIXES: Final = ("GPU-", "MIG-")
_WHOLE: Final = 100
"""Percent of a GPU's memory; less is a shared GPU."""
_OPEN_TO_ALL: Final = 0o777
"""Upstream's mode: the container writes its usage there as any user."""
_BIND: Final = ("rbind",)
_LONGEST_NAME: Final = 128
"""Chosen: a UUID of a GPU or pod has about 40 characters, a container's name at most 63."""


class Rule(msgspec.Struct, frozen=True):
    """library: host path of HAMi-core; the same path is used inside the container."""

    by_minor: bool
    devices: Mapping[int, DeviceNode]
    control: tuple[DeviceNode, ...]
    library: str
    monitor: bool

    @property
    def directory(self) -> str:
        return self.library.rpartition("/")[0]


def parse(inputs: NodeInputs) -> Rule:
    library = inputs.settings.hami_core_library
    parts = library.split("/")
    if parts[0] or len(parts) < 3 or not all(parts[1:]) or ".." in parts or "." in parts:
        raise InputError(
            obj="configuration",
            field="hami-core-library-directory-path",
            value=library,
            problem="expected an absolute, plain path of a library in a directory",
            hint="the default is /usr/local/vgpu/libvgpu.so",
        )
    kernel = inputs.kernel
    nodes = compat.GPU_WITHOUT_DEVICE_NODES not in inputs.settings.compat
    return Rule(
        by_minor=compat.GPU_MINOR_NUMBERS in inputs.settings.compat,
        devices=kernel.gpus if nodes else {},
        control=kernel.gpu_control if nodes else (),
        library=library,
        monitor=inputs.settings.gate("HamiCoreVGPUMonitor", default=False),
    )


def visible_devices(gpus: Sequence[DeviceAllocation], *, by_minor: bool) -> str:
    """Return the value of NVIDIA_VISIBLE_DEVICES, in the order of the allocation.

    UUIDs if every GPU has one, else minor numbers: the two must not be mixed.
    """
    if not by_minor and all(_is_uuid(gpu.id) for gpu in gpus):
        return ",".join(gpu.id for gpu in gpus)
    return ",".join(str(gpu.minor) for gpu in gpus)


def _is_uuid(text: str) -> bool:
    return text.startswith(_UUID_PREFIXES) and _is_plain_name(text)


def _is_plain_name(text: str) -> bool:
    """Return whether `text` is letters, digits and dashes only: safe in a list and in a path."""
    return 0 < len(text) <= _LONGEST_NAME and text.isascii() and text.replace("-", "").isalnum()


def _claim(
    resource: Resource, key: str, value: Value, reason: str, source: str = _HAMI_SOURCE
) -> Claim:
    return Claim(
        resource=resource,
        key=key,
        value=value,
        policy=NAME,
        reason=reason,
        source=source,
        rank=Rank.POD,
    )


def claim_container(rule: Rule, subject: ContainerSubject) -> Iterator[Claimed]:
    pod = subject.pod
    text = pod.annotations.get(ANNOTATION_DEVICE_ALLOCATED)
    if text is None:
        return
    gpus = parse_device_allocated(text, obj=pod.obj).get(DeviceType.GPU)
    if not gpus:
        return
    yield _claim(
        Resource.ENV,
        "NVIDIA_VISIBLE_DEVICES",
        visible_devices(gpus, by_minor=rule.by_minor),
        "GPUs allocated to the pod",
        f"{_SOURCE}.gpu",
    )
    yield from _devices(rule, gpus)
    if pod.labels.get(LABEL_GPU_ISOLATION_PROVIDER) == HAMI_CORE:
        try:
            # Either all of it or nothing: the library without its limits would not isolate.
            isolation = list(_hami(rule, pod, subject.name, gpus))
        except InputError as error:
            yield error
        else:
            yield from isolation


def _devices(rule: Rule, gpus: Sequence[DeviceAllocation]) -> Iterator[Claim]:
    # Another vendor's device has no node of that name.
    nodes = {gpu.minor: rule.devices[gpu.minor] for gpu in gpus if gpu.minor in rule.devices}
    source = f"{_SOURCE}.gpu"
    for node in nodes.values():
        yield _claim(Resource.DEVICE, node.path, node, "a GPU allocated to the pod", source)
    if nodes:
        for node in rule.control:
            yield _claim(Resource.DEVICE, node.path, node, "every user of a GPU needs it", source)


def _hami(
    rule: Rule, pod: Pod, container: str, gpus: Sequence[DeviceAllocation]
) -> Iterator[Claim]:
    ratios = [
        _amount(pod, gpus, index, GPU_MEMORY_RATIO)
        for index, gpu in enumerate(gpus)
        if index == 0 or GPU_MEMORY_RATIO in gpu.resources
    ]
    if min(ratios) >= _WHOLE:
        return
    memory = [_amount(pod, gpus, index, GPU_MEMORY) for index in range(len(gpus))]
    cores = [gpu.resources[GPU_CORE].value() for gpu in gpus if GPU_CORE in gpu.resources]
    yield _claim(
        Resource.ENV,
        "CUDA_DEVICE_MEMORY_LIMIT",
        str(min(memory)),
        "GPU memory in bytes" + (", the smallest share" if len(set(memory)) > 1 else ""),
        f"{_SOURCE}.gpu[].resources.{GPU_MEMORY}",
    )
    if cores:
        yield _claim(
            Resource.ENV,
            "CUDA_DEVICE_SM_LIMIT",
            str(min(cores)),
            "GPU cores in percent" + (", the smallest share" if len(set(cores)) > 1 else ""),
            f"{_SOURCE}.gpu[].resources.{GPU_CORE}",
        )
    reason = "GPU isolation by HAMi-core"
    yield _claim(Resource.ENV, "LD_PRELOAD", rule.library, reason)
    yield _bind(rule.library, rule.library, f"{reason}: its library")
    yield _bind(HAMI_LOCK_DIRECTORY, HAMI_LOCK_DIRECTORY, f"{reason}: its locks")
    if rule.monitor:
        yield from _monitor(rule, pod, container)


def _monitor(rule: Rule, pod: Pod, container: str) -> Iterator[Claim]:
    """Claim the directory in which the vGPU monitor finds a container's usage."""
    for field, name in (("metadata.uid", pod.uid), ("spec.containers[].name", container)):
        if not _is_plain_name(name):
            raise InputError(
                obj=pod.obj,
                field=field,
                value=name,
                problem="expected letters, digits and dashes: it becomes part of a path",
            )
    reason, source = "usage for the vGPU monitor", "gate HamiCoreVGPUMonitor"
    own = f"{pod.uid}_{container}"
    directory = f"{rule.directory}/containers/{own}"
    yield _claim(
        Resource.ENV,
        "CUDA_DEVICE_MEMORY_SHARED_CACHE",
        f"{rule.directory}/{own}.cache",
        reason,
        source,
    )
    yield _claim(Resource.HOST_DIRECTORY, directory, _OPEN_TO_ALL, reason, source)
    yield _bind(directory, rule.directory, reason, source)


def _bind(origin: str, destination: str, reason: str, source: str = _HAMI_SOURCE) -> Claim:
    mount = Mount(destination=destination, type="bind", source=origin, options=_BIND)
    return _claim(Resource.MOUNT, destination, mount, reason, source)


def _amount(pod: Pod, gpus: Sequence[DeviceAllocation], index: int, resource: str) -> int:
    amount = gpus[index].resources.get(resource)
    if amount is None or amount.nano <= 0:
        raise InputError(
            obj=pod.obj,
            field=f"{_FIELD}[{index}].resources.{resource}",
            value="(absent)" if amount is None else str(amount),
            problem="HAMi-core isolation needs an amount above 0",
            hint=f"request {resource} together with the other GPU resources of the container",
        )
    return amount.value()


POLICY: Final = Policy(
    name=NAME,
    gate="GPUEnvInject",
    gate_default=False,
    summary="a container's GPUs: environment, device nodes, and HAMi-core's limits on its share",
    parse=parse,
    claims={Level.CONTAINER: claim_container},
    individual=lambda pod: LABEL_GPU_ISOLATION_PROVIDER in pod.labels,
)
