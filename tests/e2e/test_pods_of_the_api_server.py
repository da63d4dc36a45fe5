"""A node whose kubelet is not asked for its pods: they come from the API server.

An API server, a kubelet, containerd and `koordlet run`, connected over NRI, with
`kubernetes.pods: true` and no right to anything of kubelet's. The stand-in for kubelet's socket of
pod resources is tried here too, since it knows allocations from the Pod objects alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import msgspec
import pytest

from koordlet.manifests import files
from koordlet.transports.pod_resources import SERVICE, SOCKET
from kube.resources import PODS
from protos.podresources.v1 import podresources_pb2 as messages
from tests.beds.apiserver import api_server
from tests.beds.containerd import containerd
from tests.beds.daemon import daemon
from tests.beds.real_kubelet import real_kubelet
from tests.cluster.conftest import NAMESPACE, grant, install
from tests.e2e.manifests import FIRST, SHARED, ls_pod, pinned_pod
from tests.e2e.node import Node, as_admin, configure, in_touch, running, sources
from tests.e2e.observe import container_value, eventually
from tests.waiting import wait_until

pytestmark = [pytest.mark.kubelet, pytest.mark.containerd]

_CPUS = "scheduling.koordinator.sh/resource-status"
_DEVICES = "scheduling.koordinator.sh/device-allocated"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    with ExitStack() as stack:
        server = stack.enter_context(api_server())
        asyncio.run(install(server))
        runtime = stack.enter_context(containerd("2.1", nri_request_timeout="20s"))
        kubelet = stack.enter_context(real_kubelet(runtime, server))
        asyncio.run(as_admin(server, configure))
        config = sources(server, kubelet, folder)
        config["kubernetes"]["pods"] = True
        del config["kubelet"]
        config["podResources"] = {
            "directory": str(_proxy(runtime.folder)),
            "kubeletSocket": str(kubelet.folder / "root" / "pod-resources" / SOCKET),
        }
        gates = {"PodResourcesProxy": True}
        koordlet = stack.enter_context(daemon(runtime, [], gates=gates, config=config))
        yield Node(server, runtime, kubelet, koordlet, None)


def _proxy(folder: Path) -> Path:
    """The directory of the stand-in's socket."""
    return folder / "pod-resources"


@pytest.fixture(scope="module")
def allowed(here: Node) -> Node:
    """The node once koordlet has named the right that it misses, and got it."""

    def problem() -> str:
        (source,) = here.koordlet.query("status")["sources"]
        return str(source["problem"])

    wait_until(lambda: "rbac-pods.yaml" in problem(), "the missing right to be named")
    documents = files(NAMESPACE)["rbac-pods.yaml"]
    here.ask(lambda client: grant(client, "koordlet", *documents))
    wait_until(lambda: in_touch(here), "the list of pods", timeout_s=60)
    return here


def test_an_edited_pod_is_followed(allowed: Node) -> None:
    here = allowed
    with running(here, pinned_pod("edited")) as pod:
        assert container_value(here.runtime, pod, "cpuset.cpus") == FIRST
        # The runtime has the annotations of the pod's creation; only its object shows an edit.
        edited = {"metadata": {"annotations": {_CPUS: json.dumps({"cpuset": SHARED})}}}
        body = msgspec.json.encode(edited)
        here.ask(lambda client: client.patch(PODS, pod.name, body, namespace="default"))
        eventually(here.runtime, pod, "cpuset.cpus", SHARED, level="container")


def test_monitors_see_the_devices_that_the_scheduler_allocated(allowed: Node) -> None:
    """Through the stand-in, of a pod that kubelet's own answer lists without devices."""

    def devices(socket: Path, name: str) -> list[tuple[str, list[str]]] | None:
        with grpc.insecure_channel(f"unix://{socket}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/List", None, None)
            answer = messages.ListPodResourcesResponse.FromString(call(b"", timeout=10))
        for pod in answer.pod_resources:
            if pod.name == name:
                (main,) = pod.containers
                return [(each.resource_name, list(each.device_ids)) for each in main.devices]
        return None

    here = allowed
    allocated = {_DEVICES: json.dumps({"gpu": [{"minor": 1, "id": "GPU-b"}]})}
    kubelets = here.kubelet.folder / "root" / "pod-resources" / SOCKET
    with running(here, ls_pod("trains", annotations=allocated)) as pod:
        assert devices(kubelets, pod.name) == []
        stand_in = _proxy(here.runtime.folder) / SOCKET
        wait_until(
            lambda: devices(stand_in, pod.name) == [("nvidia.com/gpu", ["GPU-b"])],
            "the allocation in the stand-in's answer",
        )
