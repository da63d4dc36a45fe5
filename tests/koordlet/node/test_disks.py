"""On which disks the CSI volumes of pods lie, by the node's mount points."""

from __future__ import annotations

import pytest

from apis.keys import ANNOTATION_BLKIO_QOS
from hooks.facts import Disk
from koordlet.node.disks import read_pod_volumes, with_volume_settings
from tests.hooks.making import a_pod
from tests.simulated import DEBIAN_12_V2, SimulatedKernel
from tests.simulated.devices import mount_line, put_disk, put_mountinfo
from tests.simulated.vfs import text

_KUBELET = "/var/lib/kubelet"
_VOLUME = f"{_KUBELET}/pods/u-1/volumes/kubernetes.io~csi/data/mount"
_SDA, _SDB = Disk("8:0"), Disk("8:16", bfq=True)


def _kernel(*lines: str) -> SimulatedKernel:
    """Two disks, one with a partition, the other with BFQ, and a volume group on both."""
    kernel = SimulatedKernel(DEBIAN_12_V2)
    put_disk(kernel, "sda", "8:0")
    put_disk(kernel, "sda1", "8:1", disk="sda")
    put_disk(kernel, "sdb", "8:16")
    put_disk(kernel, "dm-0", "252:0", slaves=("sda1", "sdb"), mapper="vg-data", lvm=True)
    kernel.sysfs.put("devices/virtual/block/sdb/queue/scheduler", text("none [bfq] kyber\n"))
    put_mountinfo(kernel, lambda: "".join(lines))
    return kernel


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        # a disk, a partition, a logical volume on two disks
        ([mount_line(_VOLUME, "8:16")], {"data": (_SDB,)}),
        ([mount_line(_VOLUME, "8:1")], {"data": (_SDA,)}),
        ([mount_line(_VOLUME, "252:0")], {"data": (_SDA, _SDB)}),
        # a claim's directory has the name of its PersistentVolume
        (
            [mount_line(_VOLUME.replace("/data/", "/pvc-4f1e-90/"), "8:1")],
            {"pvc-4f1e-90": (_SDA,)},
        ),
        # btrfs has a number of its own, and the kernel names its device
        ([mount_line(_VOLUME, "0:45", "btrfs", "/dev/sdb")], {"data": (_SDB,)}),
        # the text of other sources is not the kernel's
        ([mount_line(_VOLUME, "0:46", "tmpfs", "/dev/sda")], {"data": ()}),
        ([mount_line(_VOLUME, "0:47", "fuse.s3", "/dev/sda")], {"data": ()}),
        ([mount_line(_VOLUME, "0:48", "nfs4", "8:0")], {"data": ()}),
        # the mount on top is the one in use
        ([mount_line(_VOLUME, "8:1"), mount_line(_VOLUME, "8:16")], {"data": (_SDB,)}),
        # other pods, kinds of volumes, and places
        ([mount_line(_VOLUME.replace("u-1", "u-2"), "8:1")], {}),
        ([mount_line(_VOLUME.replace("~csi", "~empty-dir"), "8:1")], {}),
        ([mount_line(_VOLUME.removesuffix("/mount"), "8:1")], {}),
        ([mount_line(f"{_VOLUME}/below", "8:1")], {}),
        ([mount_line(f"/elsewhere{_VOLUME}", "8:1")], {}),
        ([mount_line(_VOLUME.replace("/data/", "/a/b/"), "8:1")], {}),
        ([mount_line(_VOLUME.replace("/u-1/", "/u-1/../u-1/"), "8:1")], {}),
        # a line that is none
        (["36 35\n", mount_line(_VOLUME, "8:16")], {"data": (_SDB,)}),
        ([], {}),
    ],
)  # fmt: skip
def test_a_volume_is_found_at_its_pods_mount_point_only(
    lines: list[str], found: dict[str, tuple[Disk, ...]]
) -> None:
    kernel = _kernel(*lines)
    assert read_pod_volumes(kernel, ["u-1"], kubelet_directory=_KUBELET) == {"u-1": found}


def test_kubelets_directory_may_lie_elsewhere() -> None:
    kernel = _kernel(mount_line(_VOLUME.replace(_KUBELET, "/data/pods/kubelet"), "8:1"))
    found = read_pod_volumes(kernel, ["u-1"], kubelet_directory="/data/pods/kubelet")
    assert found == {"u-1": {"data": (_SDA,)}}


def test_the_own_mounts_count_where_those_of_the_first_process_cannot_be_read() -> None:
    kernel = _kernel()
    kernel.proc.root.dynamic = None
    kernel.proc.put("self/mountinfo", text(mount_line(_VOLUME, "8:1")))
    found = read_pod_volumes(kernel, ["u-1"], kubelet_directory=_KUBELET)
    assert found == {"u-1": {"data": (_SDA,)}}


def test_without_pods_nothing_is_read() -> None:
    assert read_pod_volumes(SimulatedKernel(DEBIAN_12_V2), [], kubelet_directory=_KUBELET) == {}


@pytest.mark.parametrize(
    ("annotation", "wanted"),
    [
        ('{"blocks":[{"name":"data","type":"podvolume"}]}', True),
        ('{"blocks":[{"name":"/dev/sdb","type":"device"}]}', False),
        (None, False),
    ],
)
def test_pods_whose_annotation_names_volumes_are_looked_at(
    annotation: str | None, wanted: bool
) -> None:
    annotations = {} if annotation is None else {ANNOTATION_BLKIO_QOS: annotation}
    pod = a_pod("BE", annotations=annotations, uid="u-1")
    assert with_volume_settings([pod]) == ({"u-1"} if wanted else set())
