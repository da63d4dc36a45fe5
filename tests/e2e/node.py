"""A node of real programs: API server, containerd, kubelet and koordlet, perhaps a runtime proxy.

The fixtures of the tests start the programs; this module prepares them, and runs pods on the node.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from apis.keys import ANNOTATION_NODE_RESERVATION
from koordlet.manifests import files
from kube.client import Client, encode_object
from kube.resources import EVENTS, NODE_RESOURCE_TOPOLOGIES, NODE_SLOS, NODES, PODS
from protos.cri.v1 import api_pb2 as cri
from tests.beds.apiserver import ApiServer
from tests.beds.apiserver import eventually as registered
from tests.beds.containerd import Containerd
from tests.beds.daemon import NODE_NAME, Daemon
from tests.beds.image import IMAGE
from tests.beds.kubelet import RunningPod
from tests.beds.real_kubelet import KubeletProcess
from tests.cluster.conftest import NAMESPACE, grant, read
from tests.e2e.manifests import BE_IDENTITY, FIRST, RATIO, SHARED, Manifest, nodeslo, topology
from tests.runtime_proxy.processes import Proxy
from tests.waiting import wait_until

T = TypeVar("T")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of real programs; `endpoint` is the CRI socket that its kubelet uses."""

    server: ApiServer
    runtime: Containerd
    kubelet: KubeletProcess
    koordlet: Daemon
    proxy: Proxy | None

    def ask(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Run a request, or some, as the cluster's administrator."""
        return asyncio.run(as_admin(self.server, work))


async def as_admin(server: ApiServer, work: Callable[[Client], Awaitable[T]]) -> T:
    async with server.client() as client:
        return await work(client)


# --- the node -----------------------------------------------------------------------------------


async def configure(client: Client) -> None:
    """Once kubelet has registered: what a manager and an operator write for the node."""
    await registered(lambda: read(client, NODES, NODE_NAME), seconds=60)
    annotations = {RATIO: "1.25"}
    if FIRST != SHARED:
        # The pools that koordlet reports are then those of the object that is written below.
        annotations[ANNOTATION_NODE_RESERVATION] = json.dumps({"reservedCPUs": FIRST})
    body = msgspec.json.encode({"metadata": {"annotations": annotations}})
    await client.patch(NODES, NODE_NAME, body)
    batch = {"kubernetes.io/batch-cpu": "2000", "kubernetes.io/batch-memory": "2Gi"}
    status = {"status": {"capacity": batch, "allocatable": batch}}
    await client.patch(NODES, NODE_NAME, msgspec.json.encode(status), subresource="status")
    for resource, manifest in (
        (NODE_SLOS, nodeslo(beClass=BE_IDENTITY)),
        (NODE_RESOURCE_TOPOLOGIES, topology()),
    ):
        await client.create(resource, encode_object(resource, manifest))
    documents = files(NAMESPACE)
    await grant(client, "koordlet", *documents["rbac.yaml"], *documents["rbac-kubelet.yaml"])


def sources(server: ApiServer, kubelet: KubeletProcess, folder: Path) -> dict[str, Any]:
    """The sections of koordlet's configuration that name where objects and pods come from."""
    (folder / "kubeconfig").write_text(server.kubeconfig("koordlet"))
    (folder / "token").write_text(server.tokens["koordlet"])
    return {
        "kubernetes": {"kubeconfig": str(folder / "kubeconfig")},
        "kubelet": {
            "enabled": True,
            "port": kubelet.port,
            "tokenFile": str(folder / "token"),
            "interval": "1s",
        },
        "intervals": {"reconcile": 3600},
    }


def in_touch(here: Node) -> bool:
    """Whether koordlet is connected with all its sources, and with the proxy if there is one."""
    status = here.koordlet.query("status")
    return not any(source["problem"] for source in status["sources"]) and (
        here.proxy is None or "hook server is registered" in here.proxy.log_text()
    )


@contextmanager
def threshold(here: Node, **fields: Any) -> Iterator[None]:
    """Switch strategies on in the NodeSLO, and off again."""

    def patch(strategy: Mapping[str, Any] | None) -> None:
        body = msgspec.json.encode({"spec": {"resourceUsedThresholdWithBE": strategy}})
        here.ask(lambda client: client.patch(NODE_SLOS, NODE_NAME, body))

    patch({"enable": True, **fields})
    try:
        yield
    finally:
        patch(None)


# --- its pods -----------------------------------------------------------------------------------


@contextmanager
def running(here: Node, manifest: Manifest) -> Iterator[RunningPod]:
    """Create a pod for kubelet to run; delete it and wait for its end."""
    name = create(here, manifest, grace_s=0)
    try:
        wait_until(lambda: is_running(here, name), f"{name} to run", timeout_s=40, every_s=0.1)
        yield as_running(here, stored(here, name))
    finally:
        here.ask(lambda client: client.delete(PODS, name, namespace="default"))
        wait_until(lambda: stored(here, name) is None, f"{name} to end", timeout_s=40, every_s=0.1)


def create(here: Node, manifest: Manifest, *, grace_s: int) -> str:
    """Create a pod; return its name, which no other pod has."""
    name = f"{manifest['metadata']['name']}-{next(_numbers)}"
    container = {**manifest["spec"]["containers"][0], "image": IMAGE, "imagePullPolicy": "Never"}
    metadata = {**manifest["metadata"], "name": name}
    spec = {
        "nodeName": NODE_NAME,
        "hostNetwork": True,
        "terminationGracePeriodSeconds": grace_s,
        "containers": [container],
    }
    body = encode_object(PODS, {"metadata": metadata, "spec": spec})
    here.ask(lambda client: client.create(PODS, body, namespace="default"))
    return name


def stored(here: Node, name: str) -> Any:
    return here.ask(lambda client: read(client, PODS, name, "default"))


def is_running(here: Node, name: str) -> bool:
    states = stored(here, name)["status"].get("containerStatuses", ())
    return bool(states) and all("running" in one["state"] for one in states)


def as_running(here: Node, plain: Mapping[str, Any]) -> RunningPod:
    metadata, status = plain["metadata"], plain["status"]
    qos = status["qosClass"].lower()
    ids = {
        one["name"]: one["containerID"].rpartition("/")[2] for one in status["containerStatuses"]
    }
    path = here.runtime.groups.pod_path(metadata["uid"], qos)
    name, uid = metadata["name"], metadata["uid"]
    return RunningPod(name, uid, qos, path, "", cri.PodSandboxConfig(), ids)


def evictions_of(here: Node, pod: RunningPod) -> list[Any]:
    """Return the events about the eviction of a pod."""
    body = here.ask(lambda client: client.request("GET", EVENTS.path(namespace="default")))
    return [
        each
        for each in msgspec.json.decode(body)["items"]
        if each["involvedObject"].get("uid") == pod.uid and each["reason"] == "evictPodSuccess"
    ]
