"""The whole disks of this node, by what settings of block I/O name them by.

A device is named by a path, a volume group by its name, and a CSI volume by its pod and its name.
Names of volumes come from pods: they are compared with the node's mount points, and no path is
built from them. Files: docs/facts/kernel.md, "Block devices".
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from apis.keys import ANNOTATION_BLKIO_QOS
from apis.nodeslo import BlockType
from hooks.facts import Disk
from hooks.subject import Pod
from linux.block_devices import BlockDevice, BlockDevices, read_block_devices
from linux.host import Host
from linux.procfs import Mounted, parse_mountinfo

log = logging.getLogger(__name__)

_CSI: Final = "kubernetes.io~csi"
"""Kubelet's directory for the volumes of CSI drivers, in the directory of each pod."""


def read_disks(host: Host) -> tuple[dict[str, tuple[Disk, ...]], dict[str, tuple[Disk, ...]]]:
    """Return path -> disks and volume group -> disks; empty where sysfs lists no block devices."""
    try:
        devices = read_block_devices(host)
    except OSError as error:
        log.debug("no block devices can be listed: %s", error)
        return {}, {}
    disks = _Disks(host, devices)
    by_path = {
        path: disks.of(devices.disks_below(device.name))
        for device in devices.by_name.values()
        for path in devices.paths_of(device)
    }
    groups = {
        group: disks.of(devices.volume_group_disks(group))
        for group in sorted(devices.volume_groups())
    }
    return by_path, groups


def with_volume_settings(pods: Iterable[Pod]) -> frozenset[str]:
    """Return the uids of the pods whose annotation may name one of their volumes."""
    return frozenset(
        pod.uid
        for pod in pods
        if BlockType.POD_VOLUME in pod.annotations.get(ANNOTATION_BLKIO_QOS, "")
    )


def read_pod_volumes(
    host: Host, uids: Iterable[str], *, kubelet_directory: str
) -> dict[str, dict[str, tuple[Disk, ...]]]:
    """Return uid -> name of a mounted CSI volume -> its disks; () where it is on no block device.

    Each of `uids` is in the answer. The name is the pod's own for an ephemeral volume, and the
    PersistentVolume's for a claim. Raises OSError.
    """
    found: dict[str, dict[str, tuple[Disk, ...]]] = {uid: {} for uid in uids}
    if not found:
        return {}
    devices = read_block_devices(host)
    disks = _Disks(host, devices)
    of_pods = f"{kubelet_directory}/pods/"
    for mount in parse_mountinfo(_mountinfo(host)):
        if not mount.point.startswith(of_pods):
            continue
        match mount.point[len(of_pods) :].split("/"):
            # Of mounts at one point the last one is in use.
            case [uid, "volumes", kind, name, "mount"] if kind == _CSI and uid in found:
                device = _device_of(mount, devices)
                found[uid][name] = disks.of(devices.disks_below(device.name)) if device else ()
    return found


def _mountinfo(host: Host) -> bytes:
    """Return the mounts of the node's first process, else our own. Raises OSError."""
    try:
        return host.read("/proc/1/mountinfo")
    except OSError:
        return host.read("/proc/self/mountinfo")


def _device_of(mount: Mounted, devices: BlockDevices) -> BlockDevice | None:
    """Return the block device of a mounted file system.

    Btrfs mounts have a number of their own. Its source is the kernel's word; that of network, FUSE
    and memory file systems may be any text.
    """
    return devices.find(mount.source if mount.type == "btrfs" else mount.device)


class _Disks:
    """Whole disks with their scheduler, each read once."""

    def __init__(self, host: Host, devices: BlockDevices) -> None:
        self._host = host
        self._devices = devices
        self._known: dict[str, Disk] = {}

    def of(self, names: Sequence[str]) -> tuple[Disk, ...]:
        """Return the disks of these names, each in `devices`."""
        for name in names:
            if name not in self._known:
                number = self._devices.by_name[name].number
                self._known[name] = Disk(number, bfq=self._bfq(name))
        return tuple(self._known[name] for name in names)

    def _bfq(self, name: str) -> bool:
        """Return whether the disk's scheduler, the one in brackets, is BFQ."""
        try:
            return b"[bfq]" in self._host.read(f"/sys/class/block/{name}/queue/scheduler")
        except OSError:
            return False
