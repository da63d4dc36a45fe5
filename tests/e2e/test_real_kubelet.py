"""The whole node path under a real kubelet: values at creation, in-place resize, restarts.

An API server, a kubelet, containerd and `koordlet run` with the rights of its manifests, nothing in
its objects directory and no periodic pass: what is seen comes from replies and from triggers. The
kubelet reaches containerd directly, with koordlet on NRI, and through the runtime proxy, with
koordlet as the proxy's hook server.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apis.keys import ANNOTATION_EVICTION_PRIORITY
from koordlet.configuration.config import Kubelet as KubeletConfig
from koordlet.manifests import files
from koordlet.sources.kubelet import KubeletClient
from koordlet.sources.polling import SourceError
from kube.client import STRATEGIC_PATCH, Client, encode_object
from kube.resources import NODE_RESOURCE_TOPOLOGIES, PODS, Resource
from tests.beds.apiserver import api_server
from tests.beds.containerd import containerd
from tests.beds.daemon import NODE_NAME, daemon
from tests.beds.kubelet import RunningPod
from tests.beds.real_kubelet import real_kubelet
from tests.cluster.conftest import CLUSTER_ROLE_BINDINGS, install, read
from tests.e2e.manifests import FIRST, SHARED, Manifest, batch_pod, ls_pod, pinned_pod
from tests.e2e.node import (
    Node,
    as_admin,
    as_running,
    configure,
    evictions_of,
    in_touch,
    is_running,
    running,
    sources,
    stored,
    threshold,
)
from tests.e2e.observe import container_value, eventually, values_seen
from tests.runtime_proxy.processes import Proxy, proxy
from tests.waiting import wait_until

pytestmark = [pytest.mark.kubelet, pytest.mark.containerd]

PATIENCE = "20s"
"""How long runtime and proxy wait for koordlet; 2 s by default, which a busy machine may exceed."""
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", True)


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
        asyncio.run(as_admin(server, configure))
        two_at_most = {"qos": {"evictMostPerRound": 2, "memoryEvictCoolDown": "10m"}}
        config = {**sources(server, kubelet, folder), **transport(between), **two_at_most}
        objects: list[Manifest] = []
        gates = {"CPUNormalization": True, "BEMemoryEvict": True}
        koordlet = stack.enter_context(daemon(runtime, objects, gates=gates, config=config))
        made = Node(server, runtime, kubelet, koordlet, between)
        wait_until(lambda: in_touch(made), "koordlet's sources and transport")
        yield made


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


def logs(here: Node) -> str:
    """Return the ends of the logs, for a failure that they explain."""
    of_proxy = [] if here.proxy is None else here.proxy.log_text().splitlines()[-25:]
    return "\n".join([here.koordlet.log_tail(), "the proxy's:", *of_proxy])


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


def hog(name: str, megabytes: int, **annotations: str) -> Manifest:
    """Return a best-effort pod that uses at least so much memory."""
    keep = f"x=$(yes | head -c {megabytes}000000); while true; do sleep 1; done"
    made = batch_pod(name, command=["/bin/sh", "-c", keep])
    made["metadata"]["annotations"] |= annotations
    return made


def is_gone(here: Node, pod: RunningPod) -> bool:
    return stored(here, pod.name) is None


def test_evictions_go_by_eviction_priority_and_by_use_and_kubelet_ends_the_pods(
    here: Node,
) -> None:
    def memory_of(pod: RunningPod) -> float:
        pods = here.koordlet.query("top").get("pods", ())
        return next((each["memory"] or 0 for each in pods if each["name"] == pod.name), 0)

    with (
        running(here, batch_pod("small")) as small,
        running(here, ls_pod("other")) as other,
        running(here, hog("most", 30)) as most,
        running(here, hog("chosen", 15, **{ANNOTATION_EVICTION_PRIORITY: "-1"})) as chosen,
    ):
        wait_until(
            lambda: memory_of(most) > memory_of(chosen) > 12_000_000 > memory_of(small) > 0,
            "the best-effort pods are measured",
            timeout_s=40,
        )
        # Far more than both use is short, so that the limit of a round spares the third.
        with threshold(here, memoryEvictThresholdPercent=1, memoryEvictLowerPercent=0):
            for pod in (chosen, most):
                wait_until(partial(is_gone, here, pod), f"{pod.name} to go", timeout_s=60)
        assert is_running(here, small.name) and is_running(here, other.name)
        versions = []
        for pod in (chosen, most):
            wait_until(partial(evictions_of, here, pod), f"the event of {pod.name}")
            (event,) = evictions_of(here, pod)
            assert event["type"] == "Warning"
            assert f"kill pod: {pod.name}; " in event["message"]
            assert "koordlet feature BEMemoryEvict" in event["message"]
            assert "at least 1 %: release" in event["message"]
            versions.append(int(event["metadata"]["resourceVersion"]))
        assert versions == sorted(versions)
        evictions = here.koordlet.query("status")["evictions"]
        assert [(each["pod"], each["means"]) for each in evictions["last"]] == [
            (f"Pod default/{chosen.name}", "api"),
            (f"Pod default/{most.name}", "api"),
        ]
