"""Evictions for memory by priority and by requests, without an API server, on a real containerd:
who ends, and who does not. How much is released is a matter of the machine's memory."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import pytest

from protos.cri.v1 import api_pb2 as cri
from tests.beds.containerd import Containerd
from tests.beds.daemon import Daemon, daemon
from tests.beds.kubelet import RunningPod, running_pod
from tests.e2e.manifests import CPUS, Manifest, batch_pod, node, nodeslo, pod
from tests.waiting import wait_until

pytestmark = pytest.mark.containerd

_HOLDS = ["/bin/sh", "-c", "x=$(yes | head -c {}); while :; do sleep 1; done"]
_SLEEP = ["/bin/sh", "-c", "while :; do sleep 1; done"]
_AGREES = {"koordinator.sh/eviction-enabled": "true"}
_BATCH_BAND = 5999
"""The highest priority of batch pods."""
_MIB = 1 << 20


def thresholds(**fields: Any) -> Manifest:
    slo = nodeslo()
    slo["spec"]["resourceUsedThresholdWithBE"] = {"enable": True, **fields}
    return slo


def config(bed: Containerd, **qos: Any) -> dict[str, Any]:
    """One round of evictions in the whole test, so that its order shows."""
    rounds = {"memoryEvictCoolDown": "10m", "evictStopGrace": "1s", **qos}
    return {"cri": {"socket": str(bed.socket)}, "qos": rounds}


def holding(mib: int) -> list[str]:
    return [*_HOLDS[:2], _HOLDS[2].format(mib * _MIB)]


def runs(bed: Containerd, running: RunningPod) -> bool:
    (container_id,) = running.containers.values()
    return bed.cri.container_status(container_id).status.state == cri.CONTAINER_RUNNING


def uses(koordlet: Daemon, running: RunningPod) -> float:
    """Bytes of a pod as they were measured; 0 before."""
    pods = koordlet.query("top")["pods"]
    return next((each["memory"] or 0.0 for each in pods if each["name"] == running.name), 0.0)


def evictions(koordlet: Daemon) -> list[dict[str, Any]]:
    """The history, oldest first."""
    return sorted(koordlet.query("status")["evictions"]["last"], key=lambda each: each["at"])


def wait(condition: Any, what: str) -> None:
    wait_until(condition, what, timeout_s=90, every_s=0.1)


def test_of_the_pods_that_agreed_the_one_of_least_priority_ends(bed: Containerd) -> None:
    """Not the one that uses most: its sub-priority is higher. Nor one above the priority limit."""
    slo = thresholds(
        memoryEvictThresholdPercent=1,
        memoryEvictLowerPercent=0,
        evictEnabledPriorityThreshold=_BATCH_BAND,
    )
    with ExitStack() as stack:
        koordlet = stack.enter_context(
            daemon(
                bed,
                [node(), nodeslo()],
                gates={"MemoryEvict": True},
                config=config(bed, evictMostPerRound=1),
            )
        )

        def start(manifest: Manifest) -> RunningPod:
            return stack.enter_context(running_pod(bed, manifest))

        prod = start(pod("prod", "LS", command=holding(24), labels=dict(_AGREES)))
        silent = start(batch_pod("silent", command=holding(24)))
        large = start(
            batch_pod(
                "large", command=holding(40), labels={**_AGREES, "koordinator.sh/priority": "2"}
            )
        )
        least = start(
            batch_pod(
                "least", command=holding(16), labels={**_AGREES, "koordinator.sh/priority": "1"}
            )
        )
        wait(
            lambda: all(uses(koordlet, each) > 14 * _MIB for each in (prod, silent, large, least)),
            "all hold their memory",
        )
        koordlet.put(slo)
        wait(lambda: not runs(bed, least), "the least important pod ended")
        wait(lambda: len(evictions(koordlet)) == 1, "it is reported")
        (last,) = evictions(koordlet)
        assert (last["pod"], last["gate"], last["outcome"]) == (
            "Pod default/least",
            "MemoryEvict",
            "evicted",
        )
        assert re.search(r"at least 1 %: release [\d.]+ GiB to reach 0 %", last["message"])
        assert all(runs(bed, each) for each in (prod, silent, large))


def test_a_dry_run_names_the_pods_that_request_more_memory_than_is_allocatable(
    bed: Containerd,
) -> None:
    small = node()
    allocatable = {"cpu": str(len(CPUS)), "kubernetes.io/batch-memory": "200Mi"}
    small["status"] = {"capacity": {"cpu": str(len(CPUS))}, "allocatable": allocatable}
    slo = thresholds(
        memoryAllocatableEvictThresholdPercent=100,
        memoryAllocatableEvictLowerPercent=50,
        allocatableEvictPriorityThreshold=_BATCH_BAND,
    )
    agreed: dict[str, Any] = {"labels": dict(_AGREES), "command": _SLEEP}
    with ExitStack() as stack:
        koordlet = stack.enter_context(
            daemon(
                bed,
                [small, nodeslo()],
                gates={"MemoryAllocatableEvict": True},
                config=config(bed, evictDryRun=True),
            )
        )
        pods = [
            stack.enter_context(running_pod(bed, manifest))
            for manifest in (
                batch_pod("less", memory="64Mi", **agreed),
                batch_pod("more", memory="128Mi", **agreed),
                batch_pod("silent", memory="96Mi", command=_SLEEP),
            )
        ]
        koordlet.put(slo)
        wait(lambda: len(evictions(koordlet)) >= 2, "two are named")
        last = evictions(koordlet)
        # 288 of 200 MiB are requested, and 100 may stay: both that agreed, the larger first.
        assert [each["pod"] for each in last] == ["Pod default/more", "Pod default/less"]
        requested, most = 288 * _MIB, 200 * _MIB
        assert all(
            f"request {requested} kubernetes.io/batch-memory of {most} allocatable = 144.0 %,"
            f" more than 100 %: release {requested - most // 2} to reach 50 %" in each["message"]
            for each in last
        ), last
        assert all(runs(bed, each) for each in pods)
