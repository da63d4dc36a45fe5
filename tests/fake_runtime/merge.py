"""How the adaptation merges plugins' replies, and when it calls two of them a conflict.

Each set field is claimed for the plugin that set it; a second claim fails the event. What is taken
goes into the request at once, so that the next plugin sees it.
Source: docs/facts/nri.md, "Merging replies".
"""

from __future__ import annotations

from collections.abc import Callable

from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.fake_runtime.profiles import Profile

# subject in words (up to 0.9), name of the Field enum (since 0.10)
_ANNOTATION = ("annotation", "Annotations")
_MOUNT = ("mount", "Mounts")
_DEVICE = ("device", "Devices")
_ENV = ("env", "Env")
_MEM_LIMIT = ("memory limit", "MemLimit")
_MEM_RESERVATION = ("memory reservation", "MemReservation")
_SHARES = ("CPU shares", "CPUShares")
_QUOTA = ("CPU quota", "CPUQuota")
_PERIOD = ("CPU period", "CPUPeriod")
_CPUS = ("CPU pinning", "CPUSetCPUs")
_MEMS = ("memory pinning", "CPUSetMems")
_HUGEPAGES = ("hugepage limit of size", "HugepageLimits")
_UNIFIED = ("unified resource", "CgroupsUnified")
_BLOCKIO = ("block I/O class", "BlockioClass")
_RDT = ("RDT class", "RdtClass")
_OOM = ("oom score adj", "OomScoreAdj")
_CGROUPS_PATH = ("cgroups path", "CgroupsPath")


class Conflict(Exception):
    """Two claims of one field, in the words of the runtime's version."""


class Owners:
    """Who set what during one event."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._owner: dict[tuple[str, str, str], str] = {}

    def claim(self, container: str, field: tuple[str, str], plugin: str, key: str = "") -> None:
        before = self._owner.get((container, field[1], key))
        if before is not None:
            if self._profile.conflict_by_field:
                what = f"{field[1]} {key}"
            else:
                what = f"{field[0]} {key}" if key else field[0]
            raise Conflict(f'plugins "{plugin}" and "{before}" both tried to set {what}')
        self._owner[container, field[1], key] = plugin

    def release(self, container: str, field: tuple[str, str], key: str) -> None:
        self._owner.pop((container, field[1], key), None)


def merge_adjustment(
    request: nri.CreateContainerRequest,
    adjust: nri.ContainerAdjustment,
    merged: nri.ContainerAdjustment,
    owners: Owners,
    plugin: str,
) -> None:
    """Take one plugin's adjustment into `merged` and into the request."""
    container = request.container
    cid = container.id
    for key, value in adjust.annotations.items():
        if key.startswith("-"):
            owners.release(cid, _ANNOTATION, key[1:])
            container.annotations.pop(key[1:], None)
        else:
            owners.claim(cid, _ANNOTATION, plugin, key)
            container.annotations[key] = value
        merged.annotations[key] = value
    for mount in adjust.mounts:
        if mount.destination.startswith("-"):
            owners.release(cid, _MOUNT, mount.destination[1:])
            continue
        owners.claim(cid, _MOUNT, plugin, mount.destination)
        merged.mounts.append(mount)
        container.mounts.append(mount)
    for entry in adjust.env:
        if entry.key.startswith("-"):
            # Dropped on the way to the runtime, in every version.
            owners.release(cid, _ENV, entry.key[1:])
            _without_env(container, entry.key[1:])
            continue
        owners.claim(cid, _ENV, plugin, entry.key)
        merged.env.append(entry)
        _without_env(container, entry.key)
        container.env.append(f"{entry.key}={entry.value}")
    linux, merged_linux = adjust.linux, merged.linux
    for device in linux.devices:
        if device.path.startswith("-"):
            owners.release(cid, _DEVICE, device.path[1:])
            continue
        owners.claim(cid, _DEVICE, plugin, device.path)
        merged_linux.devices.append(device)
        container.linux.devices.append(device)
    merge_resources(
        linux.resources,
        [merged_linux.resources, container.linux.resources],
        lambda field, key: owners.claim(cid, field, plugin, key),
    )
    if linux.cgroups_path:
        owners.claim(cid, _CGROUPS_PATH, plugin)
        merged_linux.cgroups_path = linux.cgroups_path
    if linux.HasField("oom_score_adj"):
        owners.claim(cid, _OOM, plugin)
        merged_linux.oom_score_adj.CopyFrom(linux.oom_score_adj)
        container.linux.oom_score_adj.CopyFrom(linux.oom_score_adj)


def merge_resources(
    source: nri.LinuxResources,
    targets: list[nri.LinuxResources],
    claim: Callable[[tuple[str, str], str], None],
) -> None:
    """Claim and copy each set field of `source` into all `targets`."""
    for field, name in ((_MEM_LIMIT, "limit"), (_MEM_RESERVATION, "reservation")):
        if source.memory.HasField(name):
            claim(field, "")
            for target in targets:
                getattr(target.memory, name).CopyFrom(getattr(source.memory, name))
    for field, name in ((_SHARES, "shares"), (_QUOTA, "quota"), (_PERIOD, "period")):
        if source.cpu.HasField(name):
            claim(field, "")
            for target in targets:
                getattr(target.cpu, name).CopyFrom(getattr(source.cpu, name))
    for field, name in ((_CPUS, "cpus"), (_MEMS, "mems")):
        if getattr(source.cpu, name):
            claim(field, "")
            for target in targets:
                setattr(target.cpu, name, getattr(source.cpu, name))
    for limit in source.hugepage_limits:
        claim(_HUGEPAGES, limit.page_size)
        for target in targets:
            target.hugepage_limits.append(limit)
    for key, value in source.unified.items():
        claim(_UNIFIED, key)
        for target in targets:
            target.unified[key] = value
    for field, name in ((_BLOCKIO, "blockio_class"), (_RDT, "rdt_class")):
        if source.HasField(name):
            claim(field, "")
            for target in targets:
                getattr(target, name).CopyFrom(getattr(source, name))


def _without_env(container: nri.Container, name: str) -> None:
    kept = [entry for entry in container.env if not entry.startswith(name + "=")]
    del container.env[:]
    container.env.extend(kept)
