"""Evictions for CPU without an API server, on a real containerd with real load: who ends, and who
does not. How much is released is a matter of the machine's load; the order is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from protos.cri.v1 import api_pb2 as cri
from tests.beds.containerd import Containerd
from tests.beds.daemon import Daemon, daemon
from tests.beds.kubelet import RunningPod, running_pod
from tests.e2e.manifests import CPUS, Manifest, batch_pod, node, nodeslo, pod
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.containerd,
    # What other programs use would hold back the pods whose use decides.
    pytest.mark.alone,
    pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs: a service takes one"),
]

_SPIN = ["/bin/sh", "-c", "while :; do :; done"]
_SLEEP = ["/bin/sh", "-c", "while :; do sleep 1; done"]
_AGREES = {"koordinator.sh/eviction-enabled": "true"}
_BATCH_BAND = 5999
"""The highest priority of batch pods."""


def thresholds(**fields: Any) -> Manifest:
    slo = nodeslo()
    slo["spec"]["resourceUsedThresholdWithBE"] = {
        "enable": True,
        "cpuEvictTimeWindowSeconds": 3,
        **fields,
    }
    return slo


def config(bed: Containerd, **qos: Any) -> Mapping[str, Any]:
    """One round of evictions in the whole test, so that its order shows."""
    rounds = {"cpuEvictCoolDown": "10m", "evictStopGrace": "1s", **qos}
    return {"cri": {"socket": str(bed.socket)}, "qos": rounds}


def requested(name: str, milli: int, **more: Any) -> Manifest:
    """A best-effort pod that requests so much batch-cpu."""
    return batch_pod(name, cpu=str(2 * milli), **more)


def starting(bed: Containerd, stack: ExitStack) -> Callable[[Manifest], RunningPod]:
    """Return what starts a pod that ends with the stack."""
    return lambda manifest: stack.enter_context(running_pod(bed, manifest))


def runs(bed: Containerd, running: RunningPod) -> bool:
    (container_id,) = running.containers.values()
    return bed.cri.container_status(container_id).status.state == cri.CONTAINER_RUNNING


def uses(koordlet: Daemon, running: RunningPod) -> float:
    """Cores of a pod as they were measured; 0 before."""
    pods = koordlet.query("top")["pods"]
    return next((each["cpu"] or 0.0 for each in pods if each["name"] == running.name), 0.0)


def evictions(koordlet: Daemon) -> list[dict[str, Any]]:
    """The history, oldest first."""
    return sorted(koordlet.query("status")["evictions"]["last"], key=lambda each: each["at"])


def wait(condition: Any, what: str) -> None:
    wait_until(condition, what, timeout_s=90, every_s=0.1)


def test_of_unsatisfied_best_effort_pods_the_one_that_uses_most_of_its_request_ends(
    bed: Containerd,
) -> None:
    """Suppression leaves them less than a core of 5.2 requested ones; 61 % of what stays is met."""
    before = thresholds(cpuSuppressPolicy="cfsQuota", cpuSuppressThresholdPercent=95)
    slo = thresholds(
        cpuSuppressPolicy="cfsQuota",
        cpuSuppressThresholdPercent=95,
        cpuEvictBESatisfactionLowerPercent=60,
        cpuEvictBESatisfactionUpperPercent=61,
    )
    with ExitStack() as stack:
        koordlet = stack.enter_context(
            daemon(bed, [node(), before], gates={"BECPUEvict": True}, config=config(bed))
        )
        start = starting(bed, stack)
        web = start(pod("web", "LS", requests={"cpu": "500m"}, command=_SPIN))
        idle = start(requested("idle", 1000, command=_SLEEP))
        busy = start(requested("busy", 3200, command=_SPIN))
        refuses = start(
            requested(
                "refuses",
                1000,
                command=_SPIN,
                labels={"koordinator.sh/eviction-enabled": "false"},
            )
        )
        wait(lambda: uses(koordlet, busy) > 0.01 and uses(koordlet, web) > 0.3, "all have load")
        assert evictions(koordlet) == []
        koordlet.put(slo)
        wait(lambda: not runs(bed, busy), "the busy pod ended")
        wait(lambda: len(evictions(koordlet)) == 1, "it is reported")
        (last,) = evictions(koordlet)
        assert (last["pod"], last["gate"], last["means"], last["outcome"]) == (
            "Pod default/busy",
            "BECPUEvict",
            "cri",
            "evicted",
        )
        found = re.search(
            r"may use \d+ of (\d+) requested milli-cores = [\d.]+ % <= 60 %, and use \d+ over"
            r" 3 s: release (\d+) requested milli-cores to reach 61 %",
            last["message"],
        )
        assert found is not None, last["message"]
        # Of the means over the window and the newest samples, whichever ask for less.
        assert 3200 < int(found[1]) <= 5200, "in the window the last pod may have been new"
        assert 0 < int(found[2]) <= 0.61 * int(found[1])
        assert all(runs(bed, each) for each in (web, idle, refuses))
        koordlet.put(nodeslo())
        besteffort = f"{bed.groups.path}/besteffort"
        wait(
            lambda: bed.groups.read(besteffort, "cpu.cfs_quota_us").strip() == "-1",
            "nothing is suppressed any more",
        )


def test_on_a_busy_node_the_least_important_pod_that_agreed_ends(bed: Containerd) -> None:
    slo = thresholds(
        cpuEvictThresholdPercent=2,
        cpuEvictLowerPercent=0,
        evictEnabledPriorityThreshold=_BATCH_BAND,
    )
    with ExitStack() as stack:
        koordlet = stack.enter_context(
            daemon(
                bed,
                [node(), nodeslo()],
                gates={"CPUEvict": True},
                config=config(bed, evictMostPerRound=1),
            )
        )
        start = starting(bed, stack)
        prod = start(
            pod("prod", "LS", requests={"cpu": "500m"}, command=_SPIN, labels=dict(_AGREES))
        )
        silent = start(requested("silent", 1000, command=_SPIN))
        second = start(
            requested(
                "second", 1000, command=_SPIN, labels={**_AGREES, "koordinator.sh/priority": "2"}
            )
        )
        first = start(
            requested(
                "first", 1000, command=_SPIN, labels={**_AGREES, "koordinator.sh/priority": "1"}
            )
        )
        others = (prod, silent, second)
        wait(lambda: all(uses(koordlet, each) > 0.02 for each in (*others, first)), "all have load")
        koordlet.put(slo)
        wait(lambda: not runs(bed, first), "the least important pod ended")
        wait(lambda: len(evictions(koordlet)) == 1, "it is reported")
        (last,) = evictions(koordlet)
        assert (last["pod"], last["gate"], last["outcome"]) == (
            "Pod default/first",
            "CPUEvict",
            "evicted",
        )
        assert re.search(r"over 3 s, at least 2 %: release \d+ milli-cores", last["message"])
        assert all(runs(bed, each) for each in others)


def test_a_dry_run_names_the_pods_that_request_more_than_is_allocatable(bed: Containerd) -> None:
    small = node()
    small["status"] = {
        "capacity": {"cpu": str(len(CPUS))},
        "allocatable": {"cpu": str(len(CPUS)), "kubernetes.io/batch-cpu": "2000"},
    }
    slo = thresholds(
        cpuAllocatableEvictThresholdPercent=100,
        cpuAllocatableEvictLowerPercent=50,
        allocatableEvictPriorityThreshold=_BATCH_BAND,
    )
    agreed = {"labels": dict(_AGREES), "command": _SLEEP}
    with ExitStack() as stack:
        koordlet = stack.enter_context(
            daemon(
                bed,
                [small, nodeslo()],
                gates={"CPUAllocatableEvict": True},
                config=config(bed, evictDryRun=True),
            )
        )
        pods = [
            stack.enter_context(running_pod(bed, manifest))
            for manifest in (
                requested("least", 500, **agreed),
                requested("middle", 1000, **agreed),
                requested("most", 1500, **agreed),
                requested("silent", 1400, command=_SLEEP),
            )
        ]
        koordlet.put(slo)
        wait(lambda: len(evictions(koordlet)) >= 3, "three are named")
        last = evictions(koordlet)
        # 4,400 of 2,000 are requested, and 1,000 may stay: all that agreed, the largest first.
        assert [each["pod"] for each in last] == [
            "Pod default/most",
            "Pod default/middle",
            "Pod default/least",
        ]
        assert all(
            "request 4400 kubernetes.io/batch-cpu of 2000 allocatable = 220.0 %, more than 100 %:"
            " release 3400 to reach 50 %" in each["message"]
            for each in last
        ), last
        assert all(runs(bed, each) for each in pods)
