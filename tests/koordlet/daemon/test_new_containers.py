"""When a new container is looked at: soon if the reconciler has to write something, else later."""

from __future__ import annotations

import pytest

from koordlet.daemon.daemon import Daemon
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.koordlet.daemon.bed import ONE_CPU, SLO, node, node_object, run, until
from tests.simulated import ANOLIS_8, DEBIAN_12_V1, Profile


@pytest.mark.parametrize(
    ("profile", "urgency"),
    [(DEBIAN_12_V1, "complete"), (ANOLIS_8, "changed")],
    ids=["all in the reply", "group identity is not"],
)
def test_a_container_that_lacks_nothing_is_not_urgent(
    profile: Profile, urgency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with node(profile) as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                noted = _noted(daemon, monkeypatch)
                await n.run_pod(pod)
                await n.create(pod, "c1")
                await n.runtime.start_container("c1")
                assert noted == [(urgency, pod.uid)]

    run(test)


def test_a_container_that_no_hook_created_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with node(DEBIAN_12_V1) as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            async with n.running():
                await n.run_pod(pod)
                await n.create(pod, "c1")
            # The next daemon has it from the runtime's list.
            n.daemon = n.new_daemon()
            async with n.running() as daemon:
                await n.runtime.synchronized(2)  # the former connection is still listed
                noted = _noted(daemon, monkeypatch)
                await n.runtime.start_container("c1")
                assert noted == [("changed", pod.uid)]

    run(test)


def test_what_the_runtime_did_not_write_is_repaired() -> None:
    async def test() -> None:
        async with node(DEBIAN_12_V1) as n:
            n.put(SLO, node_object("1.25"))
            pod = n.kubelet.add_pod(ONE_CPU)
            assert pod.sandbox is not None
            async with n.running():
                await n.run_pod(pod)
                # With kubelet's own value, as if another plugin had put it back.
                container = pod.start(ONE_CPU)
                message = nri.Container(id=container.id, pod_sandbox_id=pod.sandbox.id, name="main")
                message.linux.cgroups_path = f"/{container.cgroup}"
                message.linux.resources.cpu.quota.value = 100_000
                created = await n.runtime.create_container(message)
                assert created.adjust.linux.resources.cpu.quota.value == 80_000
                quota = n.kubelet.path(container.cgroup, "cpu.cfs_quota_us")
                assert n.kernel.text(quota) == "100000"
                await n.runtime.start_container(container.id)
                await until("the decided quota", lambda: n.kernel.text(quota) == "80000")

    run(test)


def _noted(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Note what the reconciler is to look at from now on, urgent or not, and let it go on."""
    noted: list[tuple[str, str]] = []
    passes = daemon.parts.passes
    changed, complete = passes.pod_changed, passes.container_complete

    def note_changed(uid: str, *, can_wait: bool = False) -> None:
        if not can_wait:
            noted.append(("changed", uid))
        changed(uid, can_wait=can_wait)

    def note_complete(uid: str) -> None:
        noted.append(("complete", uid))
        complete(uid)

    monkeypatch.setattr(passes, "pod_changed", note_changed)
    monkeypatch.setattr(passes, "container_complete", note_complete)
    return noted
