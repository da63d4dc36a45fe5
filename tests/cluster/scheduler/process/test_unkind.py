"""The scheduler between an unkind API server and hostile objects: each fault costs itself only."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial

import msgspec
import pytest

from cluster.scheduler.process import SchedulerProcess
from kube.client import Client, encode_object
from kube.resources import (
    DEVICES,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    POD_GROUPS,
    PODS,
)
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.unkind_server import unkind
from tests.cluster.scheduler.beds.on_api_server import (
    make_node,
    make_pod,
    nodes_of,
    play,
    pods,
    refusal,
    scheduler,
)

pytestmark = pytest.mark.apiserver

_CONFIGURATION = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
podMaxBackoffSeconds: 2
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    filter:
      enabled: [{name: LoadAwareScheduling}, {name: NodeNUMAResource}, {name: DeviceShare}]
    reserve:
      enabled: [{name: LoadAwareScheduling}, {name: NodeNUMAResource}, {name: DeviceShare}]
    permit: {enabled: [{name: Coscheduling}]}
    preBind: {enabled: [{name: NodeNUMAResource}, {name: DeviceShare}]}
"""
_GANG = "pod-group.scheduling.sigs.k8s.io"
_MEMBERS = 6


async def _everything_converges(server: ApiServer, client: Client, *, seed: int) -> None:
    """Gangs, plain pods, edits, deletions and a node that goes, over failing requests."""
    for number in range(4):
        await make_node(client, f"n{number}", cpu=10)
    for gang in ("g0", "g1"):
        group = {"metadata": {"name": gang}, "spec": {"minMember": _MEMBERS}}
        await client.create(POD_GROUPS, encode_object(POD_GROUPS, group), namespace="default")
    async with (
        unkind(server, seed=seed) as between,
        scheduler(between.connection, _CONFIGURATION) as process,
    ):
        for number in range(_MEMBERS):
            for gang in ("g0", "g1"):
                metadata = {"labels": {_GANG: gang}}
                await make_pod(client, f"{gang}-{number}", cpu="1", metadata=metadata)
        for number in range(24):
            await make_pod(client, f"p{number}", cpu="1")
            if number == 12:
                await make_pod(client, "large", cpu="64")
            if number % 6 == 0:
                label = msgspec.json.encode({"metadata": {"labels": {"edited": str(number)}}})
                await client.patch(PODS, f"p{number}", label, namespace="default")
        await client.delete(PODS, "p5", namespace="default")
        await client.delete(NODES, "n3")
        await asyncio.sleep(1.0)
        await make_node(client, "n4", cpu=10)
        await asyncio.sleep(1.0)
        assert {"lost", "late", "cut", "409", "429"} <= set(between.faults), between.faults
        between.kind = True
        # Pods on the node that went stay bound there: nothing here deletes them, as a cluster's
        # controllers do. With them all 35 pods have room.
        await eventually(lambda: _all_but_large_are_bound(client), seconds=60)
        message = await eventually(partial(_message, client, "large"), seconds=60)
        assert "Insufficient cpu" in message
        used = Counter(node for node in (await nodes_of(client)).values() if node)
        assert max(used.values()) <= 10 and sum(used.values()) == 35
        await eventually(partial(_is_settled, process, 35), seconds=20)
        assert dict(used) == Counter(booking.node for booking in process.tables.bookings.values())
        assert not process.attempts.faults.count, process.attempts.faults


async def _all_but_large_are_bound(client: Client) -> bool:
    return {name for name, node in (await nodes_of(client)).items() if not node} == {"large"}


def _is_settled(process: SchedulerProcess, count: int) -> bool:
    return len(process.tables.bookings) == count and not process.binder.in_flight


@pytest.mark.parametrize("seed", [1, 2])
def test_everything_converges_over_failing_requests(server: ApiServer, seed: int) -> None:
    play(server, partial(_everything_converges, seed=seed))


_NESTED = "[" * 100_000
_LARGE = json.dumps({"cpuset": "x" * 200_000})
_HOSTILE_POD = (
    {"scheduling.koordinator.sh/resource-spec": _NESTED},
    {"scheduling.koordinator.sh/resource-spec": '{"preferredCPUBindPolicy": 7}'},
    {"scheduling.koordinator.sh/device-allocate-hint": _LARGE},
    {"scheduling.koordinator.sh/device-joint-allocate": '{"deviceTypes": {"gpu": true}}'},
    {"gang.scheduling.koordinator.sh/groups": _NESTED},
    {
        "gang.scheduling.koordinator.sh/name": "g",
        "gang.scheduling.koordinator.sh/min-available": "x",
    },
)
"""Annotations of pods that ask for something that cannot be read."""
_HOSTILE_NODE = {
    "node.koordinator.sh/reservation": _NESTED,
    "node.koordinator.sh/raw-allocatable": '{"cpu": {}}',
    "node.koordinator.sh/resource-amplification-ratio": '{"cpu": "much"}',
    "scheduling.koordinator.sh/usage-thresholds": '{"usageThresholds": {"cpu": "high"}}',
}
_RECORDED = {
    "scheduling.koordinator.sh/resource-status": _LARGE,
    "scheduling.koordinator.sh/device-allocated": '{"gpu": [{"minor": "first"}]}',
}


async def _hostile_objects_cost_themselves_only(server: ApiServer, client: Client) -> None:
    # Room for all: the other node may be held back, because its NodeMetric was never reported.
    await make_node(client, "good", cpu=20)
    await make_node(client, "hostile", cpu=10, annotations=_HOSTILE_NODE)
    topology = {
        "metadata": {
            "name": "hostile",
            "annotations": {
                "node.koordinator.sh/cpu-topology": '{"detail": [{"id": -5}]}',
                "node.koordinator.sh/cpu-shared-pools": _NESTED,
                "kubelet.koordinator.sh/cpu-manager-policy": "none",
            },
        },
        "topologyPolicies": ["None"],
        "zones": [{"name": "node-x", "type": "Node", "resources": []}],
    }
    device = {
        "type": "gpu",
        "minor": 0,
        "health": True,
        "resources": {"koordinator.sh/gpu-core": "1"},
    }
    for resource, plain in (
        (NODE_RESOURCE_TOPOLOGIES, topology),
        (DEVICES, {"metadata": {"name": "hostile"}, "spec": {"devices": [device, device]}}),
        (NODE_METRICS, {"metadata": {"name": "hostile"}}),
    ):
        await client.create(resource, encode_object(resource, plain))
    await make_pod(
        client, "bound", cpu="1", metadata={"annotations": _RECORDED}, nodeName="hostile"
    )
    async with scheduler(server.connection(), _CONFIGURATION) as process:
        for number, annotations in enumerate(_HOSTILE_POD):
            await make_pod(
                client, f"h{number}", cpu="1", metadata={"annotations": dict(annotations)}
            )
        for number in range(10):
            await make_pod(client, f"p{number}", cpu="1")

        async def all_good_ones_are_bound() -> bool:
            nodes = await nodes_of(client)
            return all(nodes[f"p{number}"] for number in range(10))

        await eventually(all_good_ones_are_bound, seconds=30)
        # A pod that asks for what cannot be read is either refused with the field's name, or is
        # bound because no enabled plugin reads the field.
        for pod in await pods(client):
            if not pod["spec"].get("nodeName"):
                message = await eventually(partial(_message, client, pod["metadata"]["name"]))
                (annotation, *_) = pod["metadata"]["annotations"]
                assert annotation.partition("/")[2] in message, message
        assert process.tables.bookings
        assert not process.attempts.faults.count


async def _message(client: Client, name: str) -> str:
    raw = await client.request("GET", PODS.path(namespace="default", name=name))
    return refusal(msgspec.json.decode(raw))


def test_hostile_objects_cost_themselves_only(server: ApiServer) -> None:
    play(server, _hostile_objects_cost_themselves_only)
