"""Decisions as NRI replies: what to change, and nothing else.

The runtime's adaptation lets one plugin claim a field once per event and fails the event at a
second claim. So a field is sent only if it differs from what the request already holds: two
instances then agree instead of conflicting, and a decision that changes nothing gives no reply at
all. What the runtime would drop is not sent either; the reconciler repairs it.
Source: nri.md sections 3.7, 5.1 to 5.5, 7.5, 7.6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

from hooks.decision import Decision, ResourceKey
from linux.cpuset import CpuSet
from linux.resources import UNLIMITED, DeviceNode, Mount, Resource, Value
from nri_plugin.capabilities import UNIFIED, RuntimeProfile
from nri_plugin.subjects import cpu_set
from protos.nri.v1alpha1 import nri_pb2 as nri

_MAX_INT64: Final = (1 << 63) - 1
_AT_CREATION_ONLY: Final = frozenset({Resource.ENV, Resource.MOUNT, Resource.DEVICE})


class Adjustment(NamedTuple):
    """What CreateContainer answers. message: None when nothing changes.

    problems: one sentence for each decided value that no message can carry.
    """

    message: nri.ContainerAdjustment | None
    problems: tuple[str, ...] = ()


class Update(NamedTuple):
    """What an update of one container answers; as Adjustment."""

    message: nri.ContainerUpdate | None
    problems: tuple[str, ...] = ()


def adjustment(
    container: nri.Container,
    decision: Decision,
    profile: RuntimeProfile,
    resctrl_groups: Collection[str],
) -> Adjustment:
    """Return the adjustment that carries `decision` out for a container about to be created."""
    adjust = nri.ContainerAdjustment()
    existing = container.linux.resources
    target = adjust.linux.resources
    changed = False
    problems: list[str] = []
    for (resource, key), outcome in decision.outcomes.items():
        if resource not in profile.creation:
            continue
        value = outcome.value
        try:
            if key and resource not in _AT_CREATION_ONLY:
                raise ValueError("it takes no key")
            if (write := _RESOURCE_WRITERS.get(resource)) is not None:
                changed |= write(target, value, existing, existing)
            elif resource is Resource.RESCTRL_GROUP:
                changed |= _write_rdt_class(adjust, value, existing, resctrl_groups)
            elif resource is Resource.OOM_SCORE_ADJ:
                changed |= _write_oom_score_adj(adjust, value, container)
            elif _lacks(container, resource, key, value):
                _INJECTORS[resource](adjust, key, value)
                changed = True
        except (TypeError, ValueError) as error:
            problems.append(_problem(resource, key, error))
    return Adjustment(adjust if changed else None, tuple(problems))


def update(
    container: nri.Container,
    decision: Decision,
    profile: RuntimeProfile,
    *,
    asked: nri.LinuxResources | None = None,
    ignore_failure: bool = False,
) -> Update:
    """Return the update that carries `decision` out for an existing container.

    asked: the resources that kubelet asks for in this very event. A value that it gives is what the
        container would get, so that is what the decision is compared with; a value that it does not
        give stays as the container has it.
    """
    message = nri.ContainerUpdate(container_id=container.id)
    existing = container.linux.resources
    base = existing if asked is None else asked
    target = message.linux.resources
    changed = False
    problems: list[str] = []
    for (resource, key), outcome in decision.outcomes.items():
        write = _RESOURCE_WRITERS.get(resource)
        if write is None or resource not in profile.update:
            continue
        # Before 0.10 the runtime does not tell a container's unified values: sent blindly they
        # would make it update every container at every Synchronize.
        if resource in UNIFIED and asked is None and profile.nri < (0, 10, 0):
            continue
        try:
            if key:
                raise ValueError("it takes no key")
            changed |= write(target, outcome.value, base, existing)
        except (TypeError, ValueError) as error:
            problems.append(_problem(resource, key, error))
    if not changed or not container.id:
        return Update(None, tuple(problems))
    if ignore_failure:
        message.ignore_failure = True
    return Update(message, tuple(problems))


def lacks_at_creation(container: nri.Container, decision: Decision) -> tuple[ResourceKey, ...]:
    """Return what the decision injects and the existing container was created without."""
    return tuple(
        (resource, key)
        for (resource, key), outcome in decision.outcomes.items()
        if resource in _AT_CREATION_ONLY and _lacks(container, resource, key, outcome.value)
    )


def _problem(resource: Resource, key: str, error: Exception) -> str:
    name = f"{resource} {key!r}" if key else str(resource)
    return f"{name} cannot be handed to the runtime: {error}"


# ---------------------------------------------------------------- fields of LinuxResources
#
# A writer sets one field of `target` and says whether it did. `first` holds the value that would
# come into force without us, if it is given there; else `second` does.

_Writer = Callable[[nri.LinuxResources, Value, nri.LinuxResources, nri.LinuxResources], bool]


def _number(value: Value, lowest: int = UNLIMITED) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a number")
    # Checked before the field is touched: a refused assignment would leave a zero in the message.
    if not lowest <= value <= _MAX_INT64:
        raise ValueError(f"{value} is outside {lowest}..{_MAX_INT64}")
    return value


def _write_shares(
    target: nri.LinuxResources, value: Value, first: nri.LinuxResources, second: nri.LinuxResources
) -> bool:
    wanted = _number(value, 0)
    if wanted == (first.cpu.shares.value or second.cpu.shares.value) or not wanted:
        return False
    target.cpu.shares.value = wanted
    return True


def _write_quota(
    target: nri.LinuxResources, value: Value, first: nri.LinuxResources, second: nri.LinuxResources
) -> bool:
    wanted = _number(value)
    # A container that was never given a quota has none.
    if wanted == (first.cpu.quota.value or second.cpu.quota.value or UNLIMITED) or not wanted:
        return False
    target.cpu.quota.value = wanted
    return True


def _write_period(
    target: nri.LinuxResources, value: Value, first: nri.LinuxResources, second: nri.LinuxResources
) -> bool:
    wanted = _number(value, 0)
    if wanted == (first.cpu.period.value or second.cpu.period.value) or not wanted:
        return False
    target.cpu.period.value = wanted
    return True


def _write_memory_limit(
    target: nri.LinuxResources, value: Value, first: nri.LinuxResources, second: nri.LinuxResources
) -> bool:
    wanted = _number(value)
    given = first.memory.limit.value or second.memory.limit.value or UNLIMITED
    if wanted == given or not wanted:
        return False
    target.memory.limit.value = wanted
    return True


def _nodes(value: Value) -> CpuSet:
    if not isinstance(value, CpuSet) or not value:
        raise TypeError(f"{value!r} is not a set with members")
    return value


def _write_cpus(
    target: nri.LinuxResources, value: Value, first: nri.LinuxResources, second: nri.LinuxResources
) -> bool:
    wanted = _nodes(value)
    if wanted == cpu_set(first.cpu.cpus or second.cpu.cpus):
        return False
    target.cpu.cpus = str(wanted)
    return True


def _write_mems(
    target: nri.LinuxResources, value: Value, first: nri.LinuxResources, second: nri.LinuxResources
) -> bool:
    wanted = _nodes(value)
    if wanted == cpu_set(first.cpu.mems or second.cpu.mems):
        return False
    target.cpu.mems = str(wanted)
    return True


def _unified(file: Resource) -> _Writer:
    name = file.value

    def write(
        target: nri.LinuxResources,
        value: Value,
        first: nri.LinuxResources,
        second: nri.LinuxResources,
    ) -> bool:
        number = _number(value)
        wanted = "max" if number == UNLIMITED else str(number)
        if wanted == first.unified.get(name, second.unified.get(name, "")):
            return False
        target.unified[name] = wanted
        return True

    return write


_RESOURCE_WRITERS: Final[Mapping[Resource, _Writer]] = {
    Resource.CPU_SHARES: _write_shares,
    Resource.CPU_CFS_QUOTA: _write_quota,
    Resource.CPU_CFS_PERIOD: _write_period,
    Resource.MEMORY_LIMIT: _write_memory_limit,
    Resource.CPUSET_CPUS: _write_cpus,
    Resource.CPUSET_MEMS: _write_mems,
    **{file: _unified(file) for file in UNIFIED},
}


# ---------------------------------------------------------------- other parts of a creation


def _write_rdt_class(
    adjust: nri.ContainerAdjustment,
    value: Value,
    existing: nri.LinuxResources,
    resctrl_groups: Collection[str],
) -> bool:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a group's name")
    # The OCI runtime refuses to create a container in a group without a directory.
    if value not in resctrl_groups or value == existing.rdt_class.value:
        return False
    adjust.linux.resources.rdt_class.value = value
    return True


def _write_oom_score_adj(
    adjust: nri.ContainerAdjustment, value: Value, container: nri.Container
) -> bool:
    wanted = _number(value, -1000)
    if wanted == container.linux.oom_score_adj.value:
        return False
    adjust.linux.oom_score_adj.value = wanted
    return True


def _lacks(container: nri.Container, resource: Resource, key: str, value: Value) -> bool:
    if resource is Resource.ENV:
        return _environment_value(container, key) != value
    if resource is Resource.MOUNT:
        return not any(
            (mount.destination, mount.source, mount.type)
            == (key, getattr(value, "source", None), getattr(value, "type", None))
            for mount in container.mounts
        )
    return not any(
        (device.path, device.type, device.major, device.minor)
        == (
            key,
            getattr(value, "type", None),
            getattr(value, "major", None),
            getattr(value, "minor", None),
        )
        for device in container.linux.devices
    )


def _environment_value(container: nri.Container, name: str) -> str | None:
    """The value that a process sees: of several entries the last."""
    start = name + "="
    found = None
    for entry in container.env:
        if entry.startswith(start):
            found = entry[len(start) :]
    return found


def _inject_env(adjust: nri.ContainerAdjustment, key: str, value: Value) -> None:
    # "-NAME" would be a removal mark.
    if not isinstance(value, str) or not key or key[0] == "-" or "=" in key:
        raise ValueError(f"{key!r} does not name an environment variable with a text")
    if "\0" in key or "\0" in value:
        raise ValueError("an environment entry cannot hold a NUL")
    adjust.env.append(nri.KeyValue(key=key, value=value))


def _inject_mount(adjust: nri.ContainerAdjustment, key: str, value: Value) -> None:
    if not isinstance(value, Mount) or not key.startswith("/"):
        raise ValueError(f"{key!r} does not name a mount with an absolute destination")
    adjust.mounts.add(destination=key, type=value.type, source=value.source, options=value.options)


def _inject_device(adjust: nri.ContainerAdjustment, key: str, value: Value) -> None:
    if not isinstance(value, DeviceNode) or not key.startswith("/"):
        raise ValueError(f"{key!r} does not name a device with an absolute path")
    adjust.linux.devices.append(
        nri.LinuxDevice(
            path=key,
            type=value.type,
            major=value.major,
            minor=value.minor,
            file_mode=nri.OptionalFileMode(value=value.file_mode),
        )
    )


_INJECTORS: Final[Mapping[Resource, Callable[[nri.ContainerAdjustment, str, Value], None]]] = {
    Resource.ENV: _inject_env,
    Resource.MOUNT: _inject_mount,
    Resource.DEVICE: _inject_device,
}
