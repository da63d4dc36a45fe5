"""Pods that come and go leave nothing behind, wherever the daemon keeps something about them."""

from __future__ import annotations

from functools import partial

import pytest

from koordlet.daemon.daemon import Daemon
from koordlet.reconciler.reconciler import Reconciler
from tests.koordlet.daemon.bed import ONE_CPU, SLO, Node, node, node_object, run, until
from tests.simulated import ANOLIS_8, DEBIAN_12_V1, UBUNTU_24_04, Profile

_GATES = {"CPUNormalization": True, "CoreSched": True, "OOMScoreAdj": True}
_ENABLED = {"cpuQOS": {"enable": True}, "memoryQOS": {"enable": True}}
_STRATEGY = dict.fromkeys(("lsrClass", "lsClass", "beClass"), _ENABLED)
_LIVES = 12


@pytest.mark.parametrize("profile", [ANOLIS_8, DEBIAN_12_V1, UBUNTU_24_04], ids=lambda p: p.name)
def test_pods_that_come_and_go_leave_nothing_behind(profile: Profile) -> None:
    async def test() -> None:
        async with node(profile, featureGates=_GATES) as n:
            slo = {**SLO, "spec": {"resourceQOSStrategy": _STRATEGY}}
            n.put(slo, node_object("1.25"))
            stays = n.kubelet.add_pod(ONE_CPU)
            async with n.running() as daemon:
                await n.run_pod(stays)
                await one_life(n, daemon, "first")
                await passed(n, daemon)
                before = sizes(daemon)
                for number in range(_LIVES):
                    await one_life(n, daemon, f"c{number}")
                await passed(n, daemon)
                await until("as before", lambda: sizes(daemon) == before, timeout_s=5.0)

    run(test)


async def one_life(n: Node, daemon: Daemon, container_id: str) -> None:
    """Run a pod with one container; every value has been written before it ends."""
    pod = n.kubelet.add_pod(ONE_CPU)
    await n.run_pod(pod)
    await n.create(pod, container_id)
    pod.start(ONE_CPU)
    await n.runtime.start_container(container_id)
    await passed(n, daemon)
    assert any(place.startswith(pod.cgroup) for place in places(daemon))
    await n.runtime.remove_container(container_id)
    n.kubelet.remove_pod(pod)
    assert pod.sandbox is not None
    await n.runtime.remove_pod_sandbox(pod.sandbox.id)


async def passed(n: Node, daemon: Daemon) -> None:
    """Wait for a pass that begins after everything that was reported."""
    reconciler = daemon.parts.passes.reconciler
    assert reconciler is not None
    for _ in range(2):
        later = reconciler.stats.passes + 1
        reconciler.trigger("test")
        await until("a pass", partial(has_made, reconciler, later))


def has_made(reconciler: Reconciler, passes: int) -> bool:
    return reconciler.stats.passes >= passes


def places(daemon: Daemon) -> set[str]:
    executor = daemon.parts.passes.executor
    assert executor is not None
    return {place for place, _, _ in executor._table.slots}


def sizes(daemon: Daemon) -> dict[str, int]:
    """Return how much is kept, by what it is."""
    parts = daemon.parts
    executor, reconciler = parts.passes.executor, parts.passes.reconciler
    assert executor is not None and reconciler is not None
    slots = executor._table
    return {
        "slots": len(slots.slots),
        "slots by path": len(slots.by_path),
        "wishes": len(slots.by_subject),
        "released": len(slots.released),
        "explained": len(reconciler.explain_all()),
        "absent": len(reconciler._wishes._absent),
        "pods' subjects": len(reconciler._wishes._of_pod),
        "records": len(parts.journal),
        "deliveries": len(parts.journal.containers_with_deliveries()),
        "runtime values": len(parts.journal.all_runtime_values()),
        "pods": parts.state.counts[0],
        "containers": parts.state.counts[1],
        "requests": len(parts.state.all_remembered()),
        "subjects": len(parts.passes.snapshot.subjects),
        "events": len(parts.events.latest()),
    }
