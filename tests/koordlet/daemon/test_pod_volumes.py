"""Limits of block I/O for a volume of a pod, from the mounts of the node to the pod's cgroup."""

from __future__ import annotations

import json

from apis.keys import ANNOTATION_BLKIO_QOS
from tests.koordlet.daemon.bed import Node, events, node, run, until
from tests.simulated import DEBIAN_12_V2, Pod
from tests.simulated.devices import mount_line, put_disk, put_mountinfo


def test_a_volumes_disk_is_limited_once_the_pod_runs_and_a_missing_volume_is_reported() -> None:
    async def test() -> None:
        async with node(
            DEBIAN_12_V2,
            featureGates={"BlkIOReconcile": True},
            intervals={"reconcile": 0.5},
            measuring={"enabled": False},
        ) as n:
            n.kernel.disks = {"8:0", "8:16"}
            put_disk(n.kernel, "sda", "8:0")
            put_disk(n.kernel, "sdb", "8:16")
            mounts = Mounts(n)
            async with n.running() as daemon:
                pod = n.kubelet.add_pod()
                mounts.lines = line(pod, "data", "8:16")
                await n.run_pod(pod, annotations=named("data"))
                await until("the limit", lambda: limits(n, pod).startswith("8:16 rbps=7 "))
                mounts.lines = line(pod, "data", "8:0")
                await daemon.sweep()
                await until("another disk", lambda: limits(n, pod).startswith("8:0 rbps=7 "))
                mounts.lines = ""  # the pod ends
                await daemon.sweep()
                await daemon.parts.kernel.probe_again()
                other = n.kubelet.add_pod()
                mounts.lines = line(other, "data", "8:16")
                await n.run_pod(other, annotations=named("another"))
                await until("the error", lambda: len(events(n, "bad-input")) >= 1)
                assert "no CSI volume of this pod" in events(n, "bad-input")[-1]
                assert limits(n, other) == ""
                assert limits(n, pod).startswith("8:0 rbps=7 ")
                assert len(events(n, "bad-input")) == 1

    run(test)


def test_nothing_is_looked_at_while_the_gate_is_off_or_no_pod_names_a_volume() -> None:
    async def test() -> None:
        async with node(
            DEBIAN_12_V2, intervals={"reconcile": 0.5}, measuring={"enabled": False}
        ) as n:
            put_disk(n.kernel, "sda", "8:0")
            mounts = Mounts(n)
            async with n.running() as daemon:
                pod = n.kubelet.add_pod()
                mounts.lines = line(pod, "data", "8:0")
                await n.run_pod(pod, annotations=named("data"))
                await daemon.sweep()
                assert daemon.parts.kernel.probed is not None
                assert daemon.parts.kernel.probed.facts.pod_volumes == {}

    run(test)


def named(volume: str) -> dict[str, str]:
    block = {"name": volume, "type": "podvolume", "ioCfg": {"readBPS": 7}}
    return {ANNOTATION_BLKIO_QOS: json.dumps({"blocks": [block]})}


def line(pod: Pod, volume: str, device: str) -> str:
    point = f"/var/lib/kubelet/pods/{pod.uid}/volumes/kubernetes.io~csi/{volume}/mount"
    return mount_line(point, device)


class Mounts:
    """The mounts of a node's first process."""

    def __init__(self, n: Node) -> None:
        self.lines = ""
        put_mountinfo(n.kernel, lambda: self.lines)


def limits(n: Node, pod: Pod) -> str:
    return n.kernel.text(n.kubelet.path(pod.cgroup, "io.max")).strip()
