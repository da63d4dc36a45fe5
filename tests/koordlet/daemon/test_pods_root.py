"""The pods' cgroup root: found, moved, gone, and locked against other daemons."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from koordlet.node.kubepods_lock import KubepodsLock
from linux.resources import Resource
from service.locks import LockHeld, lock_directory
from tests.koordlet.daemon.bed import (
    ONE_CPU,
    SLO,
    Node,
    ls_manifest,
    node,
    node_object,
    run,
    until,
)
from tests.simulated import ANOLIS_8, Kubelet
from tests.simulated.profiles import Driver

OTHER_DRIVER = Driver.CGROUPFS


def pods_directory(folder: Path) -> tuple[Path, KubepodsLock]:
    """A directory of our own in place of the simulated kernel's pods' root, and its lock."""
    path = folder / "kubepods"
    path.mkdir()
    return path, KubepodsLock(lambda _: str(path))


def test_beside_another_daemon_of_the_same_pods_it_does_not_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with node(runtime=False, nri={"enabled": False}) as n:
            path, n.lock = pods_directory(tmp_path)
            n.daemon = n.new_daemon()
            pod = n.kubelet.add_pod(ONE_CPU)
            n.put(SLO, node_object("1.25"), ls_manifest(pod.uid))
            before = len(n.kernel.writes)
            other = lock_directory(str(path))
            with pytest.raises(LockHeld, match=f"process {os.getpid()} holds {path}"):
                async with n.running():
                    pass
            assert len(n.kernel.writes) == before
            os.close(other)
            n.daemon = n.new_daemon()
            async with n.running():
                quota = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(quota) == "80000 100000")

    run(test)


def test_a_daemon_that_meets_another_at_recreated_kubepods_stops_and_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with node(runtime=False, nri={"enabled": False}) as n:
            path, n.lock = pods_directory(tmp_path)
            n.daemon = n.new_daemon()
            pod = n.kubelet.add_pod(ONE_CPU)
            n.put(SLO, ls_manifest(pod.uid))
            async with n.running() as daemon:
                (tmp_path / "new").mkdir()
                other = lock_directory(str(tmp_path / "new"))
                path.rename(tmp_path / "gone")
                (tmp_path / "new").rename(path)
                before = len(n.kernel.writes)
                n.put(node_object("1.25"))
                await until("the daemon gives way", lambda: daemon.failed)
            assert len(n.kernel.writes) == before
            assert (
                f"another daemon runs on this node, stopping: process {os.getpid()}" in caplog.text
            )
            os.close(other)

    run(test)


def forget_pods_root(n: Node) -> None:
    """As on a node that never had a pod."""
    for cgroup in (n.kubelet.qos_dir("Burstable"), n.kubelet.qos_dir("BestEffort")):
        n.kernel.remove_group(cgroup)
    n.kernel.remove_group(n.kubelet.root)


def test_on_a_fresh_node_the_first_pod_shows_where_pods_live() -> None:
    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            forget_pods_root(n)
            async with n.running() as daemon:
                assert daemon.parts.kernel.layout is not None
                assert daemon.parts.kernel.layout.kubepods == ""
                n.kubelet = Kubelet(n.kernel)
                pod = n.kubelet.add_pod(ONE_CPU)
                await n.run_pod(pod)
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")
                assert daemon.parts.kernel.layout.kubepods == n.kubelet.root
                assert daemon.parts.kernel.probed is not None
                assert Resource.CPU_CFS_QUOTA in daemon.parts.kernel.probed.facts.supported

    run(test)


def test_what_was_probed_with_the_first_pod_counts_for_what_is_written(tmp_path: Path) -> None:
    """Alibaba's kernel takes a burst above the quota; that can be tried where pods live only."""
    directory = tmp_path / "policies.d"
    directory.mkdir(mode=0o755)
    (directory / "burst.py").write_text(
        "from hooks.site import site_policy, want\n"
        "from linux.resources import Resource\n"
        "def pod(inputs, subject):\n"
        "    yield want(Resource.CPU_CFS_BURST, 300000, reason='the site says so')\n"
        "POLICY = site_policy(name='burst', summary='a burst', pod=pod)\n"
    )

    async def test() -> None:
        site = {"enabled": True, "directory": str(directory)}
        async with node(ANOLIS_8, sitePolicies=site) as n:
            n.put(SLO)
            forget_pods_root(n)
            async with n.running():
                n.kubelet = Kubelet(n.kernel)
                pod = n.kubelet.add_pod(ONE_CPU)
                await n.run_pod(pod)
                path = n.kubelet.path(pod.cgroup, "cpu.cfs_burst_us")
                await until("the burst above the quota", lambda: n.kernel.text(path) == "300000")

    run(test)


def test_another_cgroup_driver_is_noticed_when_more_pods_lie_in_its_root() -> None:
    """kubelet was restarted with another driver; the root of before stays, and so may its pods."""

    async def test() -> None:
        async with node() as n:
            n.put(SLO, node_object("1.25"))
            before = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                await n.run_pod(before)
                n.kubelet = Kubelet(n.kernel, driver=OTHER_DRIVER)
                assert not before.cgroup.startswith(f"{n.kubelet.root}/")
                for number in range(2):
                    pod = n.kubelet.add_pod(ONE_CPU, uid=f"moved-{number}")
                    await n.run_pod(pod)
                    await daemon.sweep()
                    assert daemon.parts.kernel.layout is not None
                    known = daemon.parts.kernel.layout.kubepods
                    assert (known == n.kubelet.root) is (number == 1)
                path = n.kubelet.path(pod.cgroup, "cpu.max")
                await until("the pod's quota", lambda: n.kernel.text(path) == "80000 100000")

    run(test)


def test_a_pods_root_that_is_gone_is_looked_for_again_and_kept_while_there_is_no_other() -> None:
    async def test() -> None:
        async with node() as n, n.running() as daemon:
            layout = daemon.parts.kernel.layout
            assert layout is not None
            forget_pods_root(n)
            await daemon.sweep()
            assert daemon.parts.kernel.layout is layout
            n.kubelet = Kubelet(n.kernel, driver=OTHER_DRIVER)
            await daemon.sweep()
            assert daemon.parts.kernel.layout.kubepods == n.kubelet.root

    run(test)
