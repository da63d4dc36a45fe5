"""Turns decisions into NRI replies that hold only what changes.

The runtime's adaptation lets one plugin claim a field once per event and fails the event at a
second claim. So a field is sent only if it differs from what the request already holds: two
instances then agree instead of conflicting, and a decision that changes nothing gives no reply at
all. What the runtime would drop is not sent either; the reconciler repairs it.
Source: docs/facts/nri.md, "Merging replies".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Final, NamedTuple

from apis.cpuset import CpuSet
from hooks.decision import Decision, Outcome, ResourceKey
from hooks.requested import overlay
from hooks.subject import Requested
from linux.cgroup_files import quota_in_period
from linux.resources import UNLIMITED, DeviceNode, Mount, Resource, Value
from nri_plugin.capabilities import UNIFIED, RuntimeProfile
from nri_plugin.subjects import values
from protos.nri.v1alpha1 import nri_pb2 as nri

_MAX_INT64: Final = (1 << 63) - 1
_MOST_MADE: Final = 2048
"""Replies, and decisions of containers not started yet, that are kept; then all are dropped.
Chosen: above the containers of a full node, so that a restart of all of them finds its replies. A
reply has below 1 KB; twice the value keeps 2 MB more at most."""
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
    message: nri.Container,
    requested: Requested,
    decision: Decision,
    profile: RuntimeProfile,
    resctrl_groups: Collection[str],
) -> Adjustment:
    """Return the adjustment that carries `decision` out for a container about to be created.

    message, requested: the container in the request, and its values as `subjects` read them.
    """
    adjust = nri.ContainerAdjustment()
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
            if (field := _FIELDS.get(resource)) is not None:
                if resource is Resource.CPU_CFS_QUOTA:
                    value = _per_period(value, decision, requested)
                if value != field.given(requested):
                    field.write(target, value)
                    changed = True
            elif resource in UNIFIED:
                changed |= _write_unified(target, resource, value, (message.linux.resources,))
            elif resource is Resource.RESCTRL_GROUP:
                changed |= _write_rdt_class(adjust, value, message, resctrl_groups)
            elif resource is Resource.OOM_SCORE_ADJ:
                if value != (requested.oom_score_adj or 0):
                    adjust.linux.oom_score_adj.value = _number(value, -1000)
                    changed = True
            elif _lacks(message, resource, key, value):
                _INJECTORS[resource](adjust, key, value)
                changed = True
        except (TypeError, ValueError) as error:
            problems.append(_problem(resource, key, error))
    return Adjustment(adjust if changed else None, tuple(problems))


class Creations:
    """Encoded replies to creations, those of equal decisions for equal requests made once.

    The engine gives one mapping of outcomes to all containers of a shape, so the mapping's identity
    identifies a reply that was encoded before. What depends on more of the message than its values
    (environment, mounts, devices, files, groups) is encoded each time.
    """

    def __init__(self, profile: RuntimeProfile) -> None:
        self._profile = profile
        self._made: dict[int, _Made] = {}
        self.injected: dict[str, Decision] = {}
        """Decisions of containers that were given environment, mounts or devices and have not
        started since, by container id."""

    def reply(
        self,
        message: nri.Container,
        requested: Requested,
        decision: Decision,
        resctrl_groups: Callable[[], Collection[str]],
    ) -> tuple[bytes, tuple[str, ...]]:
        """Return the encoded response, b"" when nothing changes, and the problems of `Adjustment`.

        Arguments as `adjustment`'s; resctrl_groups: called only where the reply is made.
        """
        outcomes = decision.outcomes
        known = self._made.get(id(outcomes))
        if known is not None and known.outcomes is outcomes and known.requested == requested:
            return known.encoded, ()
        made = adjustment(message, requested, decision, self._profile, resctrl_groups())
        encoded = b""
        if made.message is not None:
            encoded = nri.CreateContainerResponse(adjust=made.message).SerializeToString()
        carried = (resource for resource, _ in outcomes if resource in self._profile.creation)
        if not made.problems and all(resource in _OF_VALUES for resource in carried):
            if len(self._made) >= _MOST_MADE:
                self._made.clear()
            self._made[id(outcomes)] = _Made(outcomes, requested, encoded)
        elif any(resource in _AT_CREATION_ONLY for resource, _ in outcomes):
            if len(self.injected) >= _MOST_MADE:
                self.injected.clear()
            self.injected[message.id] = decision
        return encoded, made.problems


class _Made(NamedTuple):
    """outcomes: kept, so that no other mapping can have its identity."""

    outcomes: Mapping[ResourceKey, Outcome]
    requested: Requested
    encoded: bytes


def update(
    message: nri.Container,
    current: Requested,
    decision: Decision,
    profile: RuntimeProfile,
    *,
    requested: nri.LinuxResources | None = None,
    ignore_failure: bool = False,
) -> Update:
    """Return the update that carries `decision` out for an existing container.

    message, current: the container, and its values as `subjects` read them.
    requested: the resources that kubelet requests in this very event. A value that it gives is what
        the container would get, so that is what the decision is compared with; a value that it does
        not give stays as the container has it.
    """
    made = nri.ContainerUpdate(container_id=message.id)
    target = made.linux.resources
    existing = message.linux.resources
    in_force = current if requested is None else overlay(values(requested), current)
    changed = False
    problems: list[str] = []
    for (resource, key), outcome in decision.outcomes.items():
        if resource not in profile.update:
            continue
        value = outcome.value
        try:
            if key:
                raise ValueError("it takes no key")
            if (field := _FIELDS.get(resource)) is not None:
                if resource is Resource.CPU_CFS_QUOTA:
                    value = _per_period(value, decision, in_force)
                if value != field.given(in_force):
                    field.write(target, value)
                    changed = True
            elif requested is not None:
                changed |= _write_unified(target, resource, value, (requested, existing))
            elif profile.nri >= (0, 10, 0):
                # Older runtimes do not report a container's unified values: sent blindly they
                # would update every container at every Synchronize.
                changed |= _write_unified(target, resource, value, (existing,))
        except (TypeError, ValueError) as error:
            problems.append(_problem(resource, key, error))
    if not changed or not message.id:
        return Update(None, tuple(problems))
    if ignore_failure:
        made.ignore_failure = True
    return Update(made, tuple(problems))


def in_place_of(requested: Requested, decision: Decision) -> Requested:
    """Return the values that a runtime gets in place of those of `requested`, as it keeps them.

    All values count here, also those that an older runtime would drop.
    """
    target = nri.LinuxResources()
    for (resource, key), outcome in decision.outcomes.items():
        field = None if key else _FIELDS.get(resource)
        if field is None:
            continue
        value = outcome.value
        if resource is Resource.CPU_CFS_QUOTA:
            value = _per_period(value, decision, requested)
        with suppress(TypeError, ValueError):  # the reply reports it
            field.write(target, value)
    return values(target)


def lacks_at_creation(container: nri.Container, decision: Decision) -> tuple[ResourceKey, ...]:
    """Return what the decision injects and the existing container was created without."""
    return tuple(
        (resource, key)
        for (resource, key), outcome in decision.outcomes.items()
        if resource in _AT_CREATION_ONLY and _lacks(container, resource, key, outcome.value)
    )


def _problem(resource: Resource, key: str, error: Exception) -> str:
    name = f"{resource} {key!r}" if key else str(resource)
    return f"{name} cannot be sent to the runtime: {error}"


# ---------------------------------------------------------------- fields of LinuxResources


class _Field(NamedTuple):
    """given: the canonical value that comes into force without us. write: sets another one."""

    given: Callable[[Requested], Value | None]
    write: Callable[[nri.LinuxResources, Value], None]


def _per_period(quota_us: Value, decision: Decision, in_force: Requested) -> Value:
    """A decided quota, which counts per 100 ms, in the period that the container will have."""
    period_us = decision.value(Resource.CPU_CFS_PERIOD) or in_force.cfs_period_us
    if not isinstance(period_us, int) or not isinstance(quota_us, int):
        return quota_us
    return quota_in_period(quota_us, period_us)


def _number(value: Value, lowest: int) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a number")
    # Checked before the field is touched: a refused assignment would leave a zero in the message.
    if not lowest <= value <= _MAX_INT64:
        raise ValueError(f"{value} is outside {lowest}..{_MAX_INT64}")
    return value


def _positive(value: Value) -> int:
    return _number(value, 1)


def _bounded(value: Value) -> int:
    """A limit: positive, or unlimited. To a runtime 0 means "not given"."""
    if value == 0:
        raise ValueError("0 is not a limit")
    return _number(value, UNLIMITED)


def _members(value: Value) -> str:
    if not isinstance(value, CpuSet) or not value:
        raise TypeError(f"{value!r} is not a set with members")
    return str(value)


def _write_shares(target: nri.LinuxResources, value: Value) -> None:
    target.cpu.shares.value = _positive(value)


def _write_quota(target: nri.LinuxResources, value: Value) -> None:
    target.cpu.quota.value = _bounded(value)


def _write_period(target: nri.LinuxResources, value: Value) -> None:
    target.cpu.period.value = _positive(value)


def _write_memory_limit(target: nri.LinuxResources, value: Value) -> None:
    target.memory.limit.value = _bounded(value)


def _write_cpus(target: nri.LinuxResources, value: Value) -> None:
    target.cpu.cpus = _members(value)


def _write_mems(target: nri.LinuxResources, value: Value) -> None:
    target.cpu.mems = _members(value)


_FIELDS: Final[Mapping[Resource, _Field]] = {
    Resource.CPU_SHARES: _Field(attrgetter("cpu_shares"), _write_shares),
    # A container that was never given a quota or a limit has none.
    Resource.CPU_CFS_QUOTA: _Field(lambda of: of.cfs_quota_us or UNLIMITED, _write_quota),
    Resource.CPU_CFS_PERIOD: _Field(attrgetter("cfs_period_us"), _write_period),
    Resource.MEMORY_LIMIT: _Field(
        lambda of: of.memory_limit_bytes or UNLIMITED, _write_memory_limit
    ),
    Resource.CPUSET_CPUS: _Field(attrgetter("cpus"), _write_cpus),
    Resource.CPUSET_MEMS: _Field(attrgetter("mems"), _write_mems),
}


_OF_VALUES: Final = frozenset({*_FIELDS, Resource.OOM_SCORE_ADJ})
"""What is decided and compared by values alone, whatever else a container's message holds."""


def _write_unified(
    target: nri.LinuxResources,
    file: Resource,
    value: Value,
    given: Sequence[nri.LinuxResources],
) -> bool:
    """Set a cgroup v2 file's text unless the first of `given` that names the file has it."""
    number = _number(value, UNLIMITED)
    wanted = "max" if number == UNLIMITED else str(number)
    in_force = next((of.unified[file.value] for of in given if file.value in of.unified), "")
    if wanted == in_force:
        return False
    target.unified[file.value] = wanted
    return True


# ---------------------------------------------------------------- other parts of a creation


def _write_rdt_class(
    adjust: nri.ContainerAdjustment,
    value: Value,
    message: nri.Container,
    resctrl_groups: Collection[str],
) -> bool:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a group's name")
    # The OCI runtime refuses to create a container in a group without a directory.
    if value not in resctrl_groups or value == message.linux.resources.rdt_class.value:
        return False
    adjust.linux.resources.rdt_class.value = value
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
