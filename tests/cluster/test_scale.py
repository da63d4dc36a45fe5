"""A few hundred nodes behind a real API server: every node is served, and nothing is written twice.

The same at full size, with figures: `python -m benchmarks.manager_scale`.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from benchmarks.manager_scale import fill, in_parallel, report
from cluster.manager.manager import Manager
from kube.client import Client
from kube.resources import NODE_METRICS
from tests.beds.apiserver import api_server, eventually
from tests.cluster.conftest import install, manager, set_config, settled

pytestmark = pytest.mark.apiserver

NODES, PODS = 300, 1200
ENABLED = {"colocation-config": json.dumps({"enable": True})}


def writes(one: Manager) -> dict[str, int]:
    return {name: getattr(each, "writes", 0) for name, each in one.controllers.items()}


async def send(client: Client, turn: int) -> None:
    """Have every node report."""

    async def of(number: int) -> None:
        body = report(number, NODES, PODS, turn)
        await client.patch(NODE_METRICS, f"node-{number:05d}", body, subresource="status")

    await in_parallel((partial(of, number) for number in range(NODES)), 16)


def test_every_node_is_served_once_for_each_change() -> None:
    async def run() -> None:
        await install(server)
        async with server.client() as client:
            await fill(client, NODES, PODS)
            await set_config(client, ENABLED)
            async with manager(server) as one:
                await eventually(lambda: len(one.caches.node_metrics.items) == NODES, seconds=60)
                await send(client, 0)
                await eventually(lambda: writes(one)["noderesource"] >= NODES, seconds=60)
                await settled(one)
                offers = [
                    node.status.allocatable["kubernetes.io/batch-cpu"].value()
                    for node in one.caches.nodes.items.values()
                ]
                assert len(offers) == NODES and len(set(offers)) == 1 and offers[0] > 0

                before = writes(one)
                await send(client, 1)  # usage moves by less than the threshold
                await settled(one)
                assert writes(one) == before

                qos = {"clusterStrategy": {"beClass": {"cpuQOS": {"enable": True}}}}
                await set_config(client, {**ENABLED, "resource-qos-config": json.dumps(qos)})
                await eventually(
                    lambda: writes(one)["nodeslo"] >= before["nodeslo"] + NODES, seconds=60
                )
                await settled(one)
                assert writes(one) == {**before, "nodeslo": before["nodeslo"] + NODES}

    with api_server() as server:
        asyncio.run(run())
