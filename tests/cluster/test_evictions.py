"""The node's evictor on a real API server, with the rights of deploy/koordlet and no others."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import msgspec
import pytest

from hooks.subject import Pod
from koordlet.manifests import files
from koordlet.qos.eviction.api import ApiEvictions
from koordlet.qos.eviction.evictor import EvictionOptions, Evictor
from koordlet.qos.eviction.means import Answered
from koordlet.qos.strategy import Shortage, Victim
from kube.client import ApiError, Client, encode_object
from kube.resources import EVENTS, PODS, Resource
from service.events import Events
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.conftest import NAMESPACE, grant, read
from tests.koordlet.qos.eviction.making import nothing_kept
from tests.koordlet.qos.eviction_making import a_pod, a_situation

pytestmark = pytest.mark.apiserver

BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True)


async def run_pod(client: Client, name: str, **labels: str) -> Pod:
    """Create a pod that runs on the node n1; return it as the node sees it."""
    plain = {
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "x"}]},
    }
    stored = await client.create(PODS, encode_object(PODS, plain), namespace="default")
    ready = [{"type": "Ready", "status": "True"}]
    status = msgspec.json.encode({"status": {"phase": "Running", "conditions": ready}})
    await client.patch(PODS, name, status, namespace="default", subresource="status")
    uid = msgspec.json.decode(stored)["metadata"]["uid"]
    return a_pod(name, qos="BE", labels=labels, uid=uid)


async def forbid(client: Client, name: str, **labels: str) -> None:
    """Create a disruption budget that allows nothing, with the status its controller gives it."""
    plain = {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}},
    }
    stored = msgspec.json.decode(
        await client.create(BUDGETS, encode_object(BUDGETS, plain), namespace="default")
    )
    counted = {
        "disruptionsAllowed": 0,
        "currentHealthy": 1,
        "desiredHealthy": 1,
        "expectedPods": 1,
        "observedGeneration": stored["metadata"]["generation"],
    }
    status = msgspec.json.encode({"status": counted})
    await client.patch(BUDGETS, name, status, namespace="default", subresource="status")


async def written(client: Client, pod: Pod) -> list[dict[str, Any]]:
    body = await client.request("GET", EVENTS.path(namespace="default"))
    items = msgspec.json.decode(body)["items"]
    return [item for item in items if item["involvedObject"].get("uid") == pod.uid]


def test_a_budget_refuses_the_next_pod_goes_and_events_are_written(server: ApiServer) -> None:
    async def test() -> None:
        async with server.client() as admin, server.client("koordlet") as client:
            await grant(admin, "koordlet", *files(NAMESPACE)["rbac.yaml"])
            guarded = await run_pod(admin, "guarded", app="guarded")
            plain = await run_pod(admin, "plain")
            spared = await run_pod(admin, "spared")
            await forbid(admin, "guard", app="guarded")
            # The authorizer hears of a role a little after it was stored.
            api = ApiEvictions(client, "n1")
            other = msgspec.structs.replace(plain, uid="another")

            async def authorized() -> bool:
                return (await api.evict(other)).answered is Answered.GONE

            await eventually(authorized)

            evictor = Evictor(
                EvictionOptions(),
                api=lambda: api,
                stopper=None,
                events=Events(),
                note=lambda note: None,
                keep=nothing_kept,
            )
            pods = (guarded, plain, spared)
            short = Shortage(
                gate="BEMemoryEvict",
                resource="memory",
                of_requests=False,
                needed=5,
                numbers="the node uses 79.3 %",
                victims=tuple(Victim(pod, 10) for pod in pods),
                cool_down_s=0.0,
            )
            await evictor.round([short], a_situation(pods, now=time.monotonic()))
            leaving = {
                pod.name: "deletionTimestamp"
                in (await read(admin, PODS, pod.name, "default"))["metadata"]
                for pod in pods
            }
            assert leaving == {"guarded": False, "plain": True, "spared": False}

            (success,) = await eventually(partial(written, admin, plain))
            assert (success["type"], success["reason"]) == ("Warning", "evictPodSuccess")
            assert success["source"] == {"component": "koordlet-qosManager", "host": "n1"}
            assert success["message"] == (
                "evict Pod:default/plain, reason: evicted, message: trigger by koordlet feature"
                " BEMemoryEvict, kill pod: plain; the node uses 79.3 %"
            )
            (failure,) = await eventually(partial(written, admin, guarded))
            assert failure["reason"] == "evictPodFail"
            assert "disruption budget" in failure["message"]
            assert evictor.reports.evictions == 1
            # The refused pod repeats its event, which needs the right to patch.
            api.warn(guarded, "evictPodFail", failure["message"])

            async def counted() -> bool:
                return [each["count"] for each in await written(admin, guarded)] == [2]

            await eventually(counted)
            await api.close()

    asyncio.run(test())


def test_a_pod_of_the_same_name_is_not_evicted_in_its_place(server: ApiServer) -> None:
    async def test() -> None:
        async with server.client() as admin:
            pod = await run_pod(admin, "reborn")
            api = ApiEvictions(admin, "n1")
            answer = await api.evict(msgspec.structs.replace(pod, uid="of-the-pod-before"))
            assert answer.answered is Answered.GONE
            stored = await read(admin, PODS, "reborn", "default")
            assert "deletionTimestamp" not in stored["metadata"]
            assert (await api.evict(a_pod("never-was"))).answered is Answered.GONE

    asyncio.run(test())


def test_the_evictors_rights_are_no_more_than_evictions_and_events(server: ApiServer) -> None:
    async def test() -> None:
        async with server.client() as admin, server.client("koordlet") as client:
            await run_pod(admin, "kept")
            for refused in (
                client.delete(PODS, "kept", namespace="default"),
                client.get(PODS, "kept", msgspec.json.decode, namespace="default"),
                client.delete(EVENTS, "any", namespace="default"),
            ):
                with pytest.raises(ApiError, match="403"):
                    await refused

    asyncio.run(test())
