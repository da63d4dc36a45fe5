"""A gang makes room on a real API server: its victims respect budgets, and it gets their nodes also
when the scheduler is killed while they end; in one rack, if it is gathered. About 4 s each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from cluster.scheduler.sources.disruption_budgets import DISRUPTION_BUDGETS
from kube.client import Client, encode_object
from kube.resources import CLUSTER_NETWORK_TOPOLOGIES, PODS, PRIORITY_CLASSES
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.scheduler.beds.on_api_server import (
    make_node,
    make_pod,
    nodes_of,
    play,
    pods,
    scheduler,
)

pytestmark = pytest.mark.apiserver

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    postFilter: {enabled: [{name: Coscheduling}]}
    permit: {enabled: [{name: Coscheduling}]}
  pluginConfig:
  - name: Coscheduling
    args: {enablePreemption: true, awareNetworkTopology: true}
"""
Scenario = Callable[[ApiServer, Client], Awaitable[None]]

_CLASSES = {"gang-low": 10, "gang-high": 1000}
_GANG = {
    "gang.scheduling.koordinator.sh/name": "g",
    "gang.scheduling.koordinator.sh/min-available": "2",
}
_IN_A_RACK = {
    "gang.scheduling.koordinator.sh/network-topology-spec": (
        '{"gatherStrategy":[{"layer":"RackLayer","strategy":"MustGather"}]}'
    )
}
_LAYERS = [
    {
        "topologyLayer": "RackLayer",
        "parentTopologyLayer": "ClusterTopologyLayer",
        "labelKey": ["rack"],
    },
    {"topologyLayer": "NodeTopologyLayer", "parentTopologyLayer": "RackLayer"},
]
_VICTIMS = ("n1-0", "n1-1", "n2-0", "n2-1")


async def _make_budget(client: Client) -> None:
    """Make a budget that allows no disruption, as its controller would find it."""
    selector = {"matchLabels": {"app": "kept"}}
    body = {"metadata": {"name": "kept"}, "spec": {"minAvailable": 2, "selector": selector}}
    raw = encode_object(DISRUPTION_BUDGETS, body)
    await client.create(DISRUPTION_BUDGETS, raw, namespace="default")
    status = {"currentHealthy": 2, "desiredHealthy": 2, "expectedPods": 2, "disruptionsAllowed": 0}
    await client.request(
        "PATCH",
        DISRUPTION_BUDGETS.path(namespace="default", name="kept", subresource="status"),
        body=msgspec.json.encode({"status": status}),
        content_type="application/merge-patch+json",
    )


async def _clear(client: Client) -> None:
    for name in _CLASSES:
        await client.delete(PRIORITY_CLASSES, name)
    await client.delete(CLUSTER_NETWORK_TOPOLOGIES, "default")
    path = DISRUPTION_BUDGETS.path(namespace="default")
    await client.request("DELETE", path)


async def _with_classes(server: ApiServer, client: Client, scenario: Scenario) -> None:
    await _clear(client)
    try:
        for name, value in _CLASSES.items():
            body = encode_object(PRIORITY_CLASSES, {"metadata": {"name": name}, "value": value})
            await client.create(PRIORITY_CLASSES, body)
        await scenario(server, client)
    finally:
        await _clear(client)


async def _a_gang_evicts_waits_and_is_bound(server: ApiServer, client: Client) -> None:
    for node, app in (("n0", "kept"), ("n1", "any"), ("n2", "any")):
        await make_node(client, node, cpu=4)
        for number in range(2):
            await make_pod(
                client,
                f"{node}-{number}",
                cpu="2",
                metadata={"labels": {"app": app}},
                nodeName=node,
                priorityClassName="gang-low",
                terminationGracePeriodSeconds=600,
            )
    await _make_budget(client)

    async def by_name() -> dict[str, dict[str, Any]]:
        return {pod["metadata"]["name"]: pod for pod in await pods(client)}

    async def victims_end_and_members_are_nominated() -> bool:
        found = await by_name()
        nominated = {found[name]["status"].get("nominatedNodeName") for name in ("g-0", "g-1")}
        ending = {name for name, pod in found.items() if "deletionTimestamp" in pod["metadata"]}
        return nominated == {"n1", "n2"} and ending == set(_VICTIMS)

    async with scheduler(server.connection(), _CONFIGURATION):
        for number in range(2):
            await make_pod(
                client,
                f"g-{number}",
                cpu="4",
                metadata={"annotations": _GANG},
                priorityClassName="gang-high",
            )
        await eventually(victims_end_and_members_are_nominated, seconds=30)
    # A new process knows nominations and victims from the API server alone.
    async with scheduler(server.connection(), _CONFIGURATION) as process:
        assert len(process.scheduling.nominator) == 2
        for name in _VICTIMS[:3]:
            path = PODS.path(namespace="default", name=name)
            await client.request("DELETE", f"{path}?gracePeriodSeconds=0")

        async def three_are_gone() -> bool:
            return len(process.tables.bookings) == 3

        # One member has room by now. It is not bound without the other one.
        await eventually(three_are_gone)
        nodes = await nodes_of(client)
        assert not (nodes["g-0"] or nodes["g-1"])
        path = PODS.path(namespace="default", name=_VICTIMS[3])
        await client.request("DELETE", f"{path}?gracePeriodSeconds=0")

        async def bound() -> bool:
            nodes = await nodes_of(client)
            return {nodes["g-0"], nodes["g-1"]} == {"n1", "n2"}

        await eventually(bound, seconds=30)
        await eventually(lambda: len(process.scheduling.nominator) == 0)
    found = await by_name()
    assert Counter(pod["spec"]["nodeName"] for pod in found.values()) == {"n0": 2, "n1": 1, "n2": 1}
    assert not any("deletionTimestamp" in pod["metadata"] for pod in found.values())


async def _a_gathered_gang_frees_one_rack(server: ApiServer, client: Client) -> None:
    topology = {"metadata": {"name": "default"}, "spec": {"networkTopologySpec": _LAYERS}}
    body = encode_object(CLUSTER_NETWORK_TOPOLOGIES, topology)
    await client.create(CLUSTER_NETWORK_TOPOLOGIES, body)
    # Without the budget, rack A would cost less: its pods have no priority.
    for node, rack, app, priority in (
        ("n0", "A", "kept", ""),
        ("n1", "B", "any", "gang-low"),
        ("n2", "B", "any", "gang-low"),
        ("n3", "A", "any", ""),
    ):
        await make_node(client, node, cpu=4, labels={"rack": rack})
        for number in range(2):
            await make_pod(
                client,
                f"{node}-{number}",
                cpu="2",
                metadata={"labels": {"app": app}},
                nodeName=node,
                terminationGracePeriodSeconds=600,
                **({"priorityClassName": priority} if priority else {}),
            )
    await _make_budget(client)
    async with scheduler(server.connection(), _CONFIGURATION) as process:
        for number in range(2):
            await make_pod(
                client,
                f"g-{number}",
                cpu="4",
                metadata={"annotations": _GANG | _IN_A_RACK},
                priorityClassName="gang-high",
            )

        async def rack_b_is_being_freed() -> bool:
            found = {pod["metadata"]["name"]: pod for pod in await pods(client)}
            nominated = {found[g]["status"].get("nominatedNodeName") for g in ("g-0", "g-1")}
            ending = {name for name, pod in found.items() if "deletionTimestamp" in pod["metadata"]}
            return nominated == {"n1", "n2"} and ending == set(_VICTIMS)

        await eventually(rack_b_is_being_freed, seconds=30)
        for name in _VICTIMS:
            path = PODS.path(namespace="default", name=name)
            await client.request("DELETE", f"{path}?gracePeriodSeconds=0")

        async def bound() -> bool:
            nodes = await nodes_of(client)
            return {nodes["g-0"], nodes["g-1"]} == {"n1", "n2"}

        await eventually(bound, seconds=30)
        await eventually(lambda: len(process.scheduling.nominator) == 0)
    found = await pods(client)
    assert not any("deletionTimestamp" in pod["metadata"] for pod in found)


@pytest.mark.parametrize(
    "scenario", [_a_gang_evicts_waits_and_is_bound, _a_gathered_gang_frees_one_rack]
)
def test_a_gang_preempts_within_budgets(server: ApiServer, scenario: Scenario) -> None:
    async def play_it(server: ApiServer, client: Client) -> None:
        await _with_classes(server, client, scenario)

    play(server, play_it)
