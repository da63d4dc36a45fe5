"""Manager and node daemon together: what a cluster's operator configures, down to the kernel.

A real API server with the manager and its webhooks, a real containerd, and `koordlet run` as it is
installed on a node, with the rights of deploy/koordlet and nothing in its objects directory.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from koordlet.manifests import files
from kube.client import Client, encode_object
from kube.resources import NODES, PODS, PROFILES
from tests.beds.apiserver import ApiServer, eventually
from tests.beds.containerd import Containerd, containerd
from tests.beds.daemon import NODE_NAME, Daemon, daemon
from tests.beds.kubelet import RunningPod, running_pod
from tests.cluster.conftest import (
    NAMESPACE,
    grant,
    kubeconfig,
    manager,
    read,
    register_webhooks,
    set_config,
)
from tests.e2e.observe import container_value, pod_value
from tests.e2e.observe import eventually as eventually_has
from tests.waiting import wait_until

pytestmark = [pytest.mark.apiserver, pytest.mark.containerd]

COLOCATION = {"colocation-config": json.dumps({"enable": True})}
PROFILE = {
    "metadata": {"name": "batch"},
    "spec": {
        "selector": {"matchLabels": {"team": "ml"}},
        "qosClass": "BE",
        "priorityClassName": "koord-batch",
    },
}


@pytest.fixture(scope="module")
def bed() -> Iterator[Containerd]:
    with containerd("2.1") as running:
        yield running


async def prepare(server: ApiServer) -> None:
    """A node, co-location switched on, and the daemon's own rights for the user koordlet."""
    async with server.client() as client:
        await grant(client, "koordlet", *files(NAMESPACE)["rbac.yaml"])
        await client.create(NODES, encode_object(NODES, {"metadata": {"name": NODE_NAME}}))
        amounts = {"cpu": "16", "memory": "64Gi", "pods": "110"}
        patch = msgspec.json.encode({"status": {"capacity": amounts, "allocatable": amounts}})
        await client.patch(NODES, NODE_NAME, patch, subresource="status")
        await set_config(client, COLOCATION)
        await register_webhooks(client)
        await client.create(PROFILES, encode_object(PROFILES, PROFILE))


async def admitted(client: Client) -> dict[str, Any]:
    """Create a plain pod that a profile selects; return it as the API server stored it."""
    amounts = {"cpu": "1", "memory": "128Mi"}
    container = {"name": "main", "image": "x", "resources": {"requests": amounts}}
    container["resources"] = {"requests": {**amounts, "cpu": "500m"}, "limits": amounts}
    plain = {
        "metadata": {"name": "train", "namespace": "default", "labels": {"team": "ml"}},
        "spec": {"nodeName": NODE_NAME, "containers": [container]},
    }
    stored = await client.create(PODS, encode_object(PODS, plain), namespace="default")
    made: dict[str, Any] = msgspec.json.decode(stored)
    return made


def strategy(identity: int) -> dict[str, str]:
    qos = {"clusterStrategy": {"beClass": {"cpuQOS": {"enable": True, "groupIdentity": identity}}}}
    return {**COLOCATION, "resource-qos-config": json.dumps(qos)}


def test_from_the_config_map_to_the_kernel(
    server: ApiServer, bed: Containerd, tmp_path: Path
) -> None:
    config = {"kubernetes": {"kubeconfig": str(kubeconfig(server, tmp_path, "koordlet"))}}

    async def scenario(stack: ExitStack) -> None:
        await prepare(server)
        async with server.client() as client, manager(server, webhooks=True):
            # What koordlet measures -> NodeMetric -> batch-cpu on the node -> a pod that asks for
            # it at admission.
            koordlet = stack.enter_context(daemon(bed, [], config=config))
            # Start-up does not wait for an API server that answers late.
            await asyncio.to_thread(in_touch, koordlet)
            await eventually(lambda: _offers_batch(client), seconds=30)
            pod = await admitted(client)
            container = pod["spec"]["containers"][0]
            batch = {"kubernetes.io/batch-cpu": "1k", "kubernetes.io/batch-memory": "128Mi"}
            assert container["resources"]["limits"] == batch
            assert pod["metadata"]["labels"]["koordinator.sh/qosClass"] == "BE"
            del container["image"]  # the bed has one of its own

            running = stack.enter_context(running_pod(bed, pod))
            assert container_value(bed, running, "cpu.shares") == "512"
            assert container_value(bed, running, "cpu.cfs_quota_us") == "100000"
            assert container_value(bed, running, "memory.limit_in_bytes") == str(128 << 20)
            # A pod's own group gets its values after the runtime's reply.
            await asyncio.to_thread(has, running, "cpu.cfs_quota_us", "100000")

            # Config map -> NodeSLO -> policy -> kernel, and back.
            for data, idle in ((strategy(-1), "1"), (COLOCATION, "0"), (strategy(-1), "1")):
                await set_config(client, data)
                await asyncio.to_thread(has, running, "cpu.idle", idle)
        await asyncio.to_thread(outage, koordlet, running)

    def has(running: RunningPod, name: str, value: str) -> None:
        eventually_has(bed, running, name, value, level="pod")

    def outage(koordlet: Daemon, running: RunningPod) -> None:
        """The last state from the API server stays in force, also for a restarted daemon."""
        server.stop("kube-apiserver", how=signal.SIGKILL)  # in order it waits for open watches
        try:
            koordlet.stop()
            koordlet.start()
            assert pod_value(bed, running, "cpu.idle") == "1"
            wait_until(lambda: source(koordlet)["problem"], "the problem to be reported")
            wait_until(lambda: is_explained(koordlet), "the kept NodeSLO to be in force")
        finally:
            server.start_apiserver()
        in_touch(koordlet)

    with ExitStack() as stack:
        asyncio.run(scenario(stack))


def in_touch(koordlet: Daemon) -> None:
    wait_until(lambda: not source(koordlet)["problem"], "the API server's objects", timeout_s=60)


def is_explained(koordlet: Daemon) -> bool:
    explained = json.dumps(koordlet.query("explain", "pod", "default/train"))
    return "NodeSLO spec.resourceQOSStrategy.beClass" in explained


def source(koordlet: Daemon) -> dict[str, Any]:
    """How the daemon says its API server is doing."""
    sources: list[dict[str, Any]] = koordlet.query("status")["sources"]
    return next(each for each in sources if each["name"] == "kubernetes")


async def _offers_batch(client: Client) -> bool:
    node = await read(client, NODES, NODE_NAME)
    return int(node["status"]["allocatable"].get("kubernetes.io/batch-cpu", "0")) > 1000
