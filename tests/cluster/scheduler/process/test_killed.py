"""The scheduler is killed between two writes for a pod: nothing is given twice. About 5 s.

One pod each waits after its PATCH, before its Binding and after its Binding, at a proxy that holds
these requests; then the program gets SIGKILL. Another pod comes before it is started again.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from apis.cpuset import CpuSet
from kube.client import Client
from kube.resources import PODS
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.scheduler import SchedulerBed
from tests.beds.unkind_server import Held, UnkindServer, unkind
from tests.cluster.scheduler.beds.on_api_server import (
    make_cpus,
    make_node,
    make_pod,
    play,
    pods,
    refusal,
)

pytestmark = pytest.mark.apiserver

_PINS = {"enabled": [{"name": "NodeNUMAResource"}, {"name": "DeviceShare"}]}
_CONFIGURATION = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "leaderElection": {"leaderElect": False},
    "profiles": [
        {
            "schedulerName": "koord-scheduler",
            "plugins": {"filter": _PINS, "reserve": _PINS, "preBind": _PINS},
        }
    ],
}
_CPUS = 8
_EACH = 2
_BROUGHT = "scheduling.koordinator.sh/device-allocated"
"""An annotation that the pods bring. It is removed by a PATCH, which no Binding can do."""
_RECORDED = "scheduling.koordinator.sh/resource-status"


def _binding(name: str) -> tuple[str, str]:
    return "POST", PODS.path(namespace="default", name=name, subresource="binding")


_HELD = {
    ("PATCH", PODS.path(namespace="default", name="patched")): Held.AFTER,
    _binding("unbound"): Held.BEFORE,
    _binding("bound"): Held.AFTER,
}


async def _make_pinned_pod(client: Client, name: str) -> None:
    amounts = {"cpu": str(_EACH), "memory": "100Mi"}
    container = {"name": "c", "image": "x", "resources": {"requests": amounts, "limits": amounts}}
    metadata = {
        "labels": {"koordinator.sh/qosClass": "LSR"},
        "annotations": {_BROUGHT: '{"gpu":[{"minor":0}]}'},
    }
    await make_pod(
        client,
        name,
        cpu=str(_EACH),
        metadata=metadata,
        containers=[container],
        priorityClassName="koord-prod",
    )


async def _by_name(client: Client) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["name"]: pod for pod in await pods(client)}


async def _killed(client: Client, between: UnkindServer, program: SchedulerBed) -> None:
    between.holds.update(_HELD)
    names = ("patched", "unbound", "bound")
    for name in names:
        await _make_pinned_pod(client, name)
    await eventually(lambda: between.held == set(_HELD), seconds=30)
    program.kill()
    found = await _by_name(client)
    assert {name: found[name]["spec"].get("nodeName") for name in names} == {
        "patched": None,
        "unbound": None,
        "bound": "n",
    }
    # All patches were carried out.
    assert not [n for n in names if _BROUGHT in found[n]["metadata"].get("annotations", {})]
    between.release()
    # Of these two one has room.
    for name in ("late", "later"):
        await _make_pinned_pod(client, name)
    await asyncio.to_thread(program.start)

    async def full() -> bool:
        return sum(bool(pod["spec"].get("nodeName")) for pod in await pods(client)) == 4

    await eventually(full, seconds=30)

    async def waiting() -> dict[str, Any] | None:
        (pod,) = (each for each in await pods(client) if not each["spec"].get("nodeName"))
        return pod if "Insufficient cpu" in refusal(pod) else None

    waits = await eventually(waiting, seconds=30)
    found = await _by_name(client)
    bound = [pod for pod in found.values() if pod["spec"].get("nodeName")]
    given = [
        cpu
        for pod in bound
        for cpu in CpuSet.parse(json.loads(pod["metadata"]["annotations"][_RECORDED])["cpuset"])
    ]
    assert sorted(given) == list(range(_CPUS))
    for name, pod in found.items():
        assert between.carried_out[_binding(name)] == bool(pod["spec"].get("nodeName"))
    # What the killed process had booked is not booked any more: one that goes makes room.
    path = PODS.path(namespace="default", name=bound[0]["metadata"]["name"])
    await client.request("DELETE", f"{path}?gracePeriodSeconds=0")

    async def late_is_bound() -> bool:
        return bool((await _by_name(client))[waits["metadata"]["name"]]["spec"].get("nodeName"))

    await eventually(late_is_bound, seconds=30)


def test_a_kill_between_two_writes_gives_nothing_twice(server: ApiServer, tmp_path: Path) -> None:
    async def scenario(server: ApiServer, client: Client) -> None:
        await make_node(client, "n", cpu=_CPUS)
        await make_cpus(client, "n", _CPUS)
        async with unkind(server, seed=0, share=0.0) as between:
            program = SchedulerBed(between.kubeconfig(), tmp_path, _CONFIGURATION)
            try:
                # The proxy answers in this thread.
                await asyncio.to_thread(program.start)
                await _killed(client, between, program)
            finally:
                program.kill()

    play(server, scenario)
