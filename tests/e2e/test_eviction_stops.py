"""Evictions without an API server, on a real containerd: all containers of the right pod end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from hooks.subject import ContainerSubject
from koordlet.qos.eviction.evictor import EvictionOptions, Evictor
from koordlet.qos.strategy import Note, PodOnNode, Shortage, Victim
from koordlet.sources.cri_stop import ContainerStopper
from protos.cri.v1 import api_pb2 as cri
from service.events import Events
from tests.beds.containerd import Containerd
from tests.beds.daemon import daemon
from tests.beds.kubelet import RunningPod, running_pod
from tests.e2e.manifests import node, nodeslo, pod
from tests.koordlet.qos.eviction.making import nothing_kept
from tests.koordlet.qos.eviction_making import a_pod, a_situation
from tests.waiting import until, wait_until

pytestmark = pytest.mark.containerd

_STUBBORN = "trap '' TERM; touch /tmp/ready; while true; do sleep 1; done"
_POLITE = "trap 'exit 0' TERM; touch /tmp/ready; while true; do sleep 0.1; done"


def scripted(name: str, *scripts: str) -> dict[str, object]:
    manifest = pod(name)
    manifest["spec"]["containers"] = [
        {"name": f"c{index}", "command": ["/bin/sh", "-c", script]}
        for index, script in enumerate(scripts)
    ]
    return manifest


@pytest.fixture
def pods(bed: Containerd) -> Iterator[tuple[RunningPod, RunningPod]]:
    with ExitStack() as stack:
        made = (
            stack.enter_context(running_pod(bed, scripted("victim", _STUBBORN, _POLITE))),
            stack.enter_context(running_pod(bed, scripted("spared", _STUBBORN))),
        )
        for running in made:
            for container_id in running.containers.values():
                wait_until(partial(has_traps, bed, container_id), "the script's traps")
        yield made


def has_traps(bed: Containerd, container_id: str) -> bool:
    """Whether a script has come to its traps: before, the kernel drops SIGTERM to process 1."""
    return bed.cri.execute(container_id, ["test", "-e", "/tmp/ready"]).exit_code == 0


def seen(running: RunningPod) -> PodOnNode:
    subject = a_pod(running.name, qos="BE", uid=running.uid, restart_policy="Never")
    return PodOnNode(
        subject,
        tuple(
            ContainerSubject(pod=subject, name=name, id=container_id)
            for name, container_id in running.containers.items()
        ),
    )


def status_of(bed: Containerd, container_id: str) -> cri.ContainerStatus:
    return bed.cri.container_status(container_id).status


def test_a_container_that_ignores_sigterm_ends_after_the_grace(
    bed: Containerd, pods: tuple[RunningPod, RunningPod]
) -> None:
    victim, spared = pods
    notes: list[Note] = []

    async def test() -> Evictor:
        stopper = ContainerStopper(str(bed.socket))
        evictor = Evictor(
            EvictionOptions(stop_grace_s=2.0),
            api=lambda: None,
            stopper=stopper,
            events=Events(),
            note=notes.append,
            keep=nothing_kept,
        )
        on_node = (seen(victim), seen(spared))
        short = Shortage(
            gate="BEMemoryEvict",
            resource="memory",
            of_requests=False,
            needed=5,
            numbers="the node uses 79.3 %",
            victims=tuple(Victim(each.pod, 10) for each in on_node),
            cool_down_s=4.0,
        )
        running = asyncio.create_task(evictor.run())
        evictor.submit([short], a_situation(on_node, now=time.monotonic()))
        await until(lambda: evictor.reports.evictions == 1)
        running.cancel()
        stopper.close()
        return evictor

    asyncio.run(test())
    ended = [status_of(bed, each) for each in victim.containers.values()]
    assert [each.state for each in ended] == [cri.CONTAINER_EXITED] * 2
    stubborn, polite = ended
    assert (stubborn.exit_code, polite.exit_code) == (128 + 9, 0)
    (kept,) = spared.containers.values()
    assert status_of(bed, kept).state == cri.CONTAINER_RUNNING
    assert [note.obj for note in notes] == ["default/victim"]
    assert "stopped its containers" in notes[0].message


def test_errors_name_the_container_and_a_missing_one_is_stopped(
    bed: Containerd, tmp_path: Path
) -> None:
    async def test() -> tuple[str, str]:
        gone = ContainerStopper(str(bed.socket))
        nobody = ContainerStopper(str(tmp_path / "nothing.sock"))
        try:
            return (
                await gone.stop(["0" * 64], grace_s=1),
                await nobody.stop(["1" * 64], grace_s=0),
            )
        finally:
            gone.close()
            nobody.close()

    missing, unserved = asyncio.run(test())
    assert missing == ""
    assert unserved.startswith("container 111111111111: UNAVAILABLE")


_HOG = "trap '' TERM; x=$(yes | head -c 30000000); while true; do sleep 1; done"


def test_the_daemon_ends_the_best_effort_pod_that_uses_most_memory(bed: Containerd) -> None:
    slo = nodeslo()
    slo["spec"]["resourceUsedThresholdWithBE"] = {
        "enable": True,
        "memoryEvictThresholdPercent": 1,
        "memoryEvictLowerPercent": 0,
    }
    qos = {"evictMostPerRound": 1, "memoryEvictCoolDown": "10m", "evictStopGrace": "1s"}
    config = {"cri": {"socket": str(bed.socket)}, "qos": qos}
    with ExitStack() as stack:
        koordlet = stack.enter_context(
            daemon(bed, [node(), nodeslo()], gates={"BEMemoryEvict": True}, config=config)
        )
        small = stack.enter_context(running_pod(bed, pod("small", "BE")))
        hog = stack.enter_context(
            running_pod(bed, pod("hog", "BE", command=["/bin/sh", "-c", _HOG]))
        )
        other = stack.enter_context(
            running_pod(bed, pod("other", "LS", command=["/bin/sh", "-c", _HOG]))
        )

        def uses(running: RunningPod) -> float:
            pods = koordlet.query("top")["pods"]
            return next((each["memory"] or 0 for each in pods if each["name"] == running.name), 0)

        wait_until(
            lambda: uses(hog) > 25_000_000 and uses(small) > 0,
            "both best-effort pods are measured",
            timeout_s=30,
        )
        koordlet.put(slo)

        def state(running: RunningPod) -> int:
            (container_id,) = running.containers.values()
            return status_of(bed, container_id).state

        wait_until(lambda: state(hog) == cri.CONTAINER_EXITED, "the hog ended", timeout_s=30)
        assert state(small) == state(other) == cri.CONTAINER_RUNNING
        wait_until(
            lambda: koordlet.query("status")["evictions"]["evictions"] == 1, "it is reported"
        )
        status = koordlet.query("status")["evictions"]
        (last,) = status["last"]
        assert (last["pod"], last["gate"], last["means"]) == (
            "Pod default/hog",
            "BEMemoryEvict",
            "cri",
        )
        assert "at least 1 %: release" in last["message"]
