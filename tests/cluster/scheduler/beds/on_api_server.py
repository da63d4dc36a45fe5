"""A scheduler process in the test's own process, on an API server, and objects for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, Final

import msgspec

from cluster.scheduler.configuration.auditing import AuditorSettings
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.process import SchedulerProcess
from kube.client import Client, encode_object
from kube.connection import Connection
from kube.kept_client import KeptClient
from kube.resources import (
    CLUSTER_NETWORK_TOPOLOGIES,
    DEVICES,
    EVENTS,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    POD_GROUPS,
    PODS,
    RESERVATIONS,
)
from tests.beds.apiserver import ApiServer, eventually

_NO_GATES: Final[Mapping[str, bool]] = MappingProxyType({})


@asynccontextmanager
async def scheduler(
    connection: Connection,
    configuration: str,
    *,
    network_status: bool = False,
    gates: Mapping[str, bool] = _NO_GATES,
    auditor: AuditorSettings | None = None,
) -> AsyncIterator[SchedulerProcess]:
    """Run a scheduler until the block ends. configuration: the text of its file."""
    read = read_configuration(configuration, obj="test")
    stop = asyncio.Event()
    async with KeptClient(connection, user_agent="koord-scheduler") as client:
        process = SchedulerProcess(
            client,
            msgspec.structs.replace(read, gates=dict(gates)),
            seed=1,
            network_status=network_status,
            auditor=auditor,
        )
        task = asyncio.create_task(process.run(stop))
        try:
            await eventually(lambda: process.ready or task.done(), seconds=60)
            assert process.ready
            yield process
        finally:
            stop.set()
            await task


async def make_node(client: Client, name: str, *, cpu: int, **metadata: Any) -> None:
    """Create a node that is ready, without the taint that the API server gives a new one."""
    amounts = {"cpu": str(cpu), "memory": "32Gi", "pods": "110"}
    body = {"metadata": {"name": name, **metadata}}
    await client.create(NODES, encode_object(NODES, body))
    status = msgspec.json.encode({"status": {"capacity": amounts, "allocatable": amounts}})
    await client.patch(NODES, name, status, subresource="status")
    await client.patch(NODES, name, b'{"spec":{"taints":null}}')


async def make_cpus(client: Client, node: str, count: int) -> None:
    """Have a node report CPUs, two to a core, all of one socket and NUMA node."""
    detail = [{"id": i, "core": i // 2, "socket": 0, "node": 0} for i in range(count)]
    annotations = {"node.koordinator.sh/cpu-topology": json.dumps({"detail": detail})}
    body = {
        "metadata": {"name": node, "annotations": annotations},
        "topologyPolicies": ["None"],
        "zones": [],
    }
    await client.create(NODE_RESOURCE_TOPOLOGIES, encode_object(NODE_RESOURCE_TOPOLOGIES, body))


async def make_pod(
    client: Client, name: str, *, cpu: str, metadata: dict[str, Any] | None = None, **spec: Any
) -> None:
    """Create a pod for koord-scheduler that requests `cpu` and 100 MiB."""
    resources = {"requests": {"cpu": cpu, "memory": "100Mi"}}
    body = {
        "metadata": {"name": name, **(metadata or {})},
        "spec": {
            "schedulerName": "koord-scheduler",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": "x", "resources": resources}],
            **spec,
        },
    }
    await client.create(PODS, encode_object(PODS, body), namespace="default")


async def pods(client: Client) -> list[dict[str, Any]]:
    raw = await client.request("GET", PODS.path(namespace="default"))
    items: list[dict[str, Any]] = msgspec.json.decode(raw)["items"]
    return items


async def nodes_of(client: Client) -> dict[str, str]:
    """Return pod -> its node, or ""."""
    return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in await pods(client)}


def refusal(pod: dict[str, Any]) -> str:
    """Return the message of the pod's condition PodScheduled while it is false, else ""."""
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return ""


def play(server: ApiServer, scenario: Callable[[ApiServer, Client], Awaitable[None]]) -> None:
    """Run a scenario on a server without objects of earlier ones."""

    async def run() -> None:
        async with server.client() as client:
            await _clear(client)
            await scenario(server, client)

    asyncio.run(run())


async def _clear(client: Client) -> None:
    for resource, namespace in (
        (PODS, "default"),
        (POD_GROUPS, "default"),
        (EVENTS, "default"),
        (NODES, ""),
        (NODE_METRICS, ""),
        (NODE_RESOURCE_TOPOLOGIES, ""),
        (DEVICES, ""),
        (RESERVATIONS, ""),
        (CLUSTER_NETWORK_TOPOLOGIES, ""),
    ):
        path = f"{resource.path(namespace=namespace)}?gracePeriodSeconds=0"
        await client.request("DELETE", path)
