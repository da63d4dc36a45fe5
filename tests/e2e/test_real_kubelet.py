"""The whole node path under a real kubelet: values at creation, in-place resize, restarts.

An API server, a kubelet, containerd and `koordlet run` with the rights of its manifests, nothing in
its objects directory and no periodic pass: what is seen comes from replies and from triggers. The
kubelet reaches containerd directly, with koordlet on NRI, and through the runtime proxy, with
koordlet as the proxy's hook server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from apis.keys import ANNOTATION_NODE_RESERVATION
from koordlet.configuration.config import Kubelet as KubeletConfig
from koordlet.manifests import files
from koordlet.sources.kubelet import KubeletClient
from koordlet.sources.polling import SourceError
from kube.client import STRATEGIC_PATCH, Client, encode_object
from kube.resources import EVENTS, NODE_RESOURCE_TOPOLOGIES, NODE_SLOS, NODES, PODS, Resource
from protos.cri.v1 import api_pb2 as cri
from tests.beds.apiserver import ApiServer, api_server
from tests.beds.apiserver import eventually as registered
from tests.beds.containerd import Containerd, containerd
from tests.beds.daemon import NODE_NAME, Daemon, daemon
from tests.beds.image import IMAGE
from tests.beds.kubelet import RunningPod
from tests.beds.real_kubelet import KubeletProcess, real_kubelet
from tests.cluster.conftest import CLUSTER_ROLE_BINDINGS, NAMESPACE, grant, install, read
from tests.e2e.manifests import (
    BE_IDENTITY,
    FIRST,
    RATIO,
    SHARED,
    Manifest,
    batch_pod,
    ls_pod,
    nodeslo,
    pinned_pod,
    topology,
)
from tests.e2e.observe import container_value, eventually, values_seen
from tests.runtime_proxy.processes import Proxy, proxy
from tests.waiting import wait_until

pytestmark = [pytest.mark.kubelet, pytest.mark.containerd]

T = TypeVar("T")
PATIENCE = "20s"
"""How long runtime and proxy wait for koordlet; 2 s by default, which a busy machine may exceed."""
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", True)
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
        return asyncio.run(_as_admin(self.server, work))


async def _as_admin(server: ApiServer, work: Callable[[Client], Awaitable[T]]) -> T:
    async with server.client() as client:
        return await work(client)


@pytest.fixture(scope="module", params=["direct", "proxy"])
def here(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node")
    with ExitStack() as stack:
        server = stack.enter_context(api_server())
        asyncio.run(install(server))
        runtime = stack.enter_context(containerd("2.1", nri_request_timeout=PATIENCE))
        between = (
            stack.enter_context(proxy(runtime.socket, flags=[f"--hook-timeout={PATIENCE}"]))
            if request.param == "proxy"
            else None
        )
        endpoint = runtime.socket if between is None else between.socket
        kubelet = stack.enter_context(real_kubelet(runtime, server, endpoint=endpoint))
        asyncio.run(_as_admin(server, configure))
        one_at_a_time = {"qos": {"evictMostPerRound": 1, "memoryEvictCoolDown": "10m"}}
        config = {**sources(server, kubelet, folder), **transport(between), **one_at_a_time}
        objects: list[Manifest] = []
        gates = {"CPUNormalization": True, "BEMemoryEvict": True}
        koordlet = stack.enter_context(daemon(runtime, objects, gates=gates, config=config))
        made = Node(server, runtime, kubelet, koordlet, between)
        wait_until(lambda: in_touch(made), "koordlet's sources and transport")
        yield made


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


def transport(between: Proxy | None) -> dict[str, Any]:
    if between is None:
        return {}
    socket = str(between.folder / "koordlet.sock")
    return {
        "nri": {"enabled": False},
        "hookService": {
            "enabled": True,
            "socket": socket,
            "hostEndpoint": socket,
            "registrationDir": str(between.hook_dir),
        },
    }


def in_touch(here: Node) -> bool:
    status = here.koordlet.query("status")
    return not any(source["problem"] for source in status["sources"]) and (
        here.proxy is None or "hook server is registered" in here.proxy.log_text()
    )


def logs(here: Node) -> str:
    """Return the ends of the logs, for a failure that they explain."""
    of_proxy = [] if here.proxy is None else here.proxy.log_text().splitlines()[-25:]
    return "\n".join([here.koordlet.log_tail(), "the proxy's:", *of_proxy])


@contextmanager
def running(here: Node, manifest: Manifest) -> Iterator[RunningPod]:
    """Create a pod for kubelet to run; delete it and wait for its end."""
    name = f"{manifest['metadata']['name']}-{next(_numbers)}"
    container = {**manifest["spec"]["containers"][0], "image": IMAGE, "imagePullPolicy": "Never"}
    metadata = {**manifest["metadata"], "name": name}
    spec = {
        "nodeName": NODE_NAME,
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    body = encode_object(PODS, {"metadata": metadata, "spec": spec})
    here.ask(lambda client: client.create(PODS, body, namespace="default"))
    try:
        wait_until(lambda: is_running(here, name), f"{name} to run", timeout_s=40, every_s=0.1)
        yield as_running(here, stored(here, name))
    finally:
        here.ask(lambda client: client.delete(PODS, name, namespace="default"))
        wait_until(lambda: stored(here, name) is None, f"{name} to end", timeout_s=40, every_s=0.1)


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


# manifest, {container value}, {pod value}
CASES = [
    pytest.param(
        pinned_pod("pinned"),
        {"cpuset.cpus": FIRST, "cpu.cfs_quota_us": "-1"},
        {"cpu.cfs_quota_us": "-1"},
        id="LSR",
    ),
    pytest.param(
        ls_pod("shared"),
        {"cpuset.cpus": SHARED, "cpu.cfs_quota_us": "80000", "cpu.shares": "512"},
        {"cpu.cfs_quota_us": "100000"},
        id="LS",
    ),
    pytest.param(
        batch_pod("batch"),
        {
            "cpu.shares": "512",
            "cpu.cfs_quota_us": "80000",
            "memory.limit_in_bytes": str(128 << 20),
        },
        {
            "cpu.cfs_quota_us": "80000",
            "memory.limit_in_bytes": str(128 << 20),
            "cpu.idle": "1",  # which hides the group's shares
        },
        id="BE",
    ),
]


@pytest.mark.parametrize(("manifest", "container", "pod"), CASES)
def test_a_pod_has_its_values(
    here: Node, manifest: Manifest, container: Mapping[str, str], pod: Mapping[str, str]
) -> None:
    with running(here, manifest) as made:
        found = {name: container_value(here.runtime, made, name) for name in container}
        assert found == container
        for name, value in pod.items():
            eventually(here.runtime, made, name, value, level="pod")


def test_the_topology_has_kubelets_policy_the_cpus_and_the_zones(here: Node) -> None:
    """Over what the bed wrote into the object: pools of some CPUs, and no zones."""

    def annotations() -> dict[str, Any]:
        stored = here.ask(lambda client: read(client, NODE_RESOURCE_TOPOLOGIES, NODE_NAME))
        made: dict[str, Any] = {**stored["metadata"]["annotations"], "zones": stored["zones"]}
        return made

    wait_until(lambda: "node.koordinator.sh/cpu-topology" in annotations(), "koordlet's report")
    found = annotations()
    cpus = [each["id"] for each in json.loads(found["node.koordinator.sh/cpu-topology"])["detail"]]
    assert set(cpus) == os.sched_getaffinity(0)
    assert json.loads(found["kubelet.koordinator.sh/cpu-manager-policy"]) == {"policy": "none"}
    (zone,) = found["zones"]
    amounts = {each["name"]: each["capacity"] for each in zone["resources"]}
    assert (zone["name"], amounts["cpu"]) == ("node-0", str(len(cpus)))
    (kept,) = [
        each
        for each in here.koordlet.query("status")["reports"]["objects"]
        if each["kind"] == "NodeResourceTopology"
    ]
    assert kept["problem"] == ""


def test_kubelet_serves_an_account_with_the_rights_to_pods_and_configuration_alone(
    here: Node, tmp_path: Path
) -> None:
    """With a token of a service account and koordlet's manifests, over kubelet's webhooks."""
    documents = files("default")
    account = documents["rbac.yaml"][0]["metadata"]
    token = here.ask(lambda client: token_of(client, account["namespace"], account["name"]))
    (tmp_path / "token").write_text(token)
    config = KubeletConfig(port=here.kubelet.port, token_file=str(tmp_path / "token"))
    asked = KubeletClient(config, lambda *_: None)
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"
    neither = f'user "{user}" may get neither nodes/{{}} nor nodes/proxy: apply'
    with pytest.raises(SourceError, match=re.escape(neither.format("pods"))):
        asked.fetch()
    with pytest.raises(SourceError, match=re.escape(neither.format("configz"))):
        asked.fetch_settings()

    def served() -> bool:
        try:
            asked.fetch()
            return not asked.fetch_settings().static
        except SourceError:
            return False

    subject = {"kind": "ServiceAccount", **account}
    here.ask(lambda client: bind(client, "koordlet-kubelet-role", subject))
    with running(here, ls_pod("listed")) as pod:
        wait_until(served, "kubelet's answers")
        assert pod.uid in {uid for known in asked.fetch() for uid in known.uids}
    # What the right to nodes/proxy would open stays closed.
    assert asked._get("/containerLogs/default/listed/main")[0] == 403
    (tmp_path / "token").write_text("unknown")
    with pytest.raises(SourceError, match="answered 401 to /pods/: it does not accept"):
        asked.fetch()


async def token_of(client: Client, namespace: str, name: str) -> str:
    """Make a service account, and return a token of it."""
    made = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    path = SERVICE_ACCOUNTS.path(namespace=namespace)
    await client.request("POST", path, body=msgspec.json.encode(made))
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [], "expirationSeconds": 3600},
    }
    answer = await client.request("POST", f"{path}/{name}/token", body=msgspec.json.encode(request))
    token: str = msgspec.json.decode(answer)["status"]["token"]
    return token


async def bind(client: Client, role: str, subject: Mapping[str, Any]) -> None:
    """Bind a ClusterRole to an account."""
    binding = {
        "metadata": {"name": f"{role}-{subject['namespace']}"},
        "subjects": [subject],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
    }
    await client.create(CLUSTER_ROLE_BINDINGS, encode_object(CLUSTER_ROLE_BINDINGS, binding))


def test_an_in_place_resize_reaches_the_kernel_through_the_policies(here: Node) -> None:
    with (
        running(here, ls_pod("resized")) as made,
        values_seen(here.runtime, made, "cpu.cfs_quota_us") as seen,
    ):
        sizes = (("2", 256, "160000", "200000"), ("600m", 192, "48000", "60000"))
        for cpu, memory, quota, whole in sizes:
            resize(here, made.name, {"cpu": cpu, "memory": f"{memory}Mi"})
            size = str(memory << 20)
            eventually(here.runtime, made, "cpu.cfs_quota_us", quota, level="container")
            eventually(here.runtime, made, "memory.limit_in_bytes", size, level="container")
            eventually(here.runtime, made, "memory.limit_in_bytes", size, level="pod")
            eventually(here.runtime, made, "cpu.cfs_quota_us", whole, level="pod")
            wait_until(lambda: is_settled(here, made.name), "kubelet to count it as done")
            assert container_value(here.runtime, made, "cpu.cfs_quota_us") == quota
            assert container_value(here.runtime, made, "cpuset.cpus") == SHARED
        assert as_running(here, stored(here, made.name)).containers == made.containers
    # Kubelet resizes memory first, with the former CPUs. Through the proxy its pod list can show
    # the new ones to koordlet before that, and then the quota changes once more.
    if here.proxy is None:
        assert seen == ["80000", "160000", "48000"]


def resize(here: Node, name: str, limits: Mapping[str, str]) -> None:
    patch = {"spec": {"containers": [{"name": "main", "resources": {"limits": dict(limits)}}]}}
    body = msgspec.json.encode(patch)
    here.ask(
        lambda client: client.patch(
            PODS,
            name,
            body,
            content_type=STRATEGIC_PATCH,
            namespace="default",
            subresource="resize",
        )
    )


def is_settled(here: Node, name: str) -> bool:
    """Whether kubelet has acted on the newest specification and has no resize left to do."""
    plain = stored(here, name)
    metadata, status = plain["metadata"], plain["status"]
    return status.get("observedGeneration", 0) >= metadata["generation"] and not any(
        condition["type"].startswith("PodResize") for condition in status["conditions"]
    )


def test_a_daemon_that_was_killed_puts_values_back_and_serves_new_pods(here: Node) -> None:
    with running(here, ls_pod("before")) as before, running(here, batch_pod("batch")) as batch:
        here.koordlet.stop(signal.SIGKILL)
        group = before.container_cgroup("main")
        here.runtime.groups.file(group, "cpu.cfs_quota_us").write_text("-1")
        with running(here, ls_pod("meanwhile")) as meanwhile:
            assert container_value(here.runtime, meanwhile, "cpu.cfs_quota_us") == "100000"
            here.koordlet.start()
            for pod in (before, meanwhile, batch):
                eventually(here.runtime, pod, "cpu.cfs_quota_us", "80000", level="container")
            eventually(here.runtime, batch, "cpu.idle", "1", level="pod")
        wait_until(lambda: in_touch(here), "koordlet's sources and transport")
        with running(here, ls_pod("after")) as after:
            found = container_value(here.runtime, after, "cpu.cfs_quota_us")
            assert found == "80000", logs(here)


def test_a_kubelet_that_restarts_changes_no_value_and_finds_its_pods(here: Node) -> None:
    with running(here, ls_pod("before")) as before, running(here, batch_pod("batch")) as batch:
        eventually(here.runtime, batch, "cpu.idle", "1", level="pod")
        here.kubelet.stop()
        here.kubelet.start()
        with running(here, ls_pod("after")) as after:
            for pod in (before, after, batch):
                eventually(here.runtime, pod, "cpu.cfs_quota_us", "80000", level="container")
            eventually(here.runtime, batch, "cpu.idle", "1", level="pod")
        for pod in (before, batch):
            assert as_running(here, stored(here, pod.name)).containers == pod.containers


_HOG = ["/bin/sh", "-c", "x=$(yes | head -c 30000000); while true; do sleep 1; done"]


@contextmanager
def evicting(here: Node) -> Iterator[None]:
    """Let the node count as short of memory."""

    def patch(strategy: Mapping[str, Any] | None) -> None:
        body = msgspec.json.encode({"spec": {"resourceUsedThresholdWithBE": strategy}})
        here.ask(lambda client: client.patch(NODE_SLOS, NODE_NAME, body))

    patch({"enable": True, "memoryEvictThresholdPercent": 1, "memoryEvictLowerPercent": 0})
    try:
        yield
    finally:
        patch(None)


def evictions_of(here: Node, pod: RunningPod) -> list[Any]:
    """Return the events about the eviction of a pod."""
    body = here.ask(lambda client: client.request("GET", EVENTS.path(namespace="default")))
    return [
        each
        for each in msgspec.json.decode(body)["items"]
        if each["involvedObject"].get("uid") == pod.uid and each["reason"] == "evictPodSuccess"
    ]


def test_the_pod_that_uses_most_is_evicted_and_kubelet_ends_it(here: Node) -> None:
    def memory_of(pod: RunningPod) -> float:
        pods = here.koordlet.query("top").get("pods", ())
        return next((each["memory"] or 0 for each in pods if each["name"] == pod.name), 0)

    with (
        running(here, batch_pod("small")) as small,
        running(here, ls_pod("other")) as other,
        running(here, batch_pod("hog", command=_HOG)) as hog,
    ):
        wait_until(
            lambda: memory_of(hog) > 25_000_000 and memory_of(small) > 0,
            "both best-effort pods are measured",
            timeout_s=40,
        )
        with evicting(here):
            wait_until(lambda: stored(here, hog.name) is None, "the eviction", timeout_s=60)
        assert is_running(here, small.name) and is_running(here, other.name)
        wait_until(lambda: evictions_of(here, hog), "the event")
        (event,) = evictions_of(here, hog)
        assert "koordlet feature BEMemoryEvict" in event["message"]
        assert "at least 1 %: release" in event["message"]
        evictions = here.koordlet.query("status")["evictions"]
        assert [(each["pod"], each["means"]) for each in evictions["last"]] == [
            (f"Pod default/{hog.name}", "api")
        ]
