"""From a pod without a node to its values in the kernel, by our programs and a real kubelet.

koordlet reports the node's CPUs; koord-scheduler chooses CPUs and devices and binds; kubelet and
containerd run the pod; koordlet gives its containers exactly what was chosen. Nothing but the pods,
the NodeSLO and the Device object (this machine has no GPU) is written by the tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from koordlet.manifests import files
from kube.client import encode_object
from kube.resources import DEVICES, NODE_RESOURCE_TOPOLOGIES, NODE_SLOS, NODES, PODS
from tests.beds.apiserver import api_server, eventually
from tests.beds.containerd import containerd
from tests.beds.daemon import NODE_NAME, daemon
from tests.beds.image import IMAGE
from tests.beds.kubelet import RunningPod
from tests.beds.real_kubelet import real_kubelet
from tests.beds.scheduler import SchedulerBed, scheduler
from tests.cluster.conftest import NAMESPACE, grant, install, read
from tests.cluster.scheduler.configuration.files import chart_file
from tests.cluster.scheduler.devices.making import a_gpu
from tests.e2e.manifests import CPUS, Manifest, nodeslo
from tests.e2e.manifests import pod as pod_manifest
from tests.e2e.node import Node, as_admin, as_running, is_running, sources, stored
from tests.e2e.observe import container_value
from tests.waiting import wait_until

pytestmark = [pytest.mark.kubelet, pytest.mark.containerd]

GPUS = {"koordinator.sh/gpu-core": "200", "koordinator.sh/gpu-memory-ratio": "200"}
GATES = {"GPUEnvInject": True}


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, SchedulerBed]]:
    folder = tmp_path_factory.mktemp("node")
    with ExitStack() as stack:
        server = stack.enter_context(api_server())
        asyncio.run(install(server))
        runtime = stack.enter_context(containerd("2.1", nri_request_timeout="20s"))
        kubelet = stack.enter_context(real_kubelet(runtime, server))
        asyncio.run(as_admin(server, _configure))
        config = sources(server, kubelet, folder)
        koordlet = stack.enter_context(daemon(runtime, [], gates=GATES, config=config))
        here = Node(server, runtime, kubelet, koordlet, None)
        wait_until(lambda: _reported_cpus(here) == set(CPUS), "koordlet's report of the CPUs")
        yield here, stack.enter_context(scheduler(server.kubeconfig(), folder, _configuration()))


def _configuration() -> dict[str, Any]:
    """The chart's file, with a lease that ends soon after its holder was killed."""
    tree = chart_file()
    lease = {"leaseDuration": "4s", "renewDeadline": "3s", "retryPeriod": "1s"}
    return {**tree, "leaderElection": {**tree["leaderElection"], **lease}}


async def _configure(client: Any) -> None:
    """What a manager writes for the node, and koordlet on a machine with two GPUs."""
    await eventually(lambda: read(client, NODES, NODE_NAME), seconds=60)
    status = json.dumps({"status": {"capacity": GPUS, "allocatable": GPUS}}).encode()
    await client.patch(NODES, NODE_NAME, status, subresource="status")
    # No controller runs that removes the taint of a new node.
    await client.patch(NODES, NODE_NAME, b'{"spec":{"taints":null}}')
    await client.create(NODE_SLOS, encode_object(NODE_SLOS, nodeslo()))
    gpus = {"metadata": {"name": NODE_NAME}, "spec": {"devices": [_gpu(0), _gpu(1)]}}
    await client.create(DEVICES, encode_object(DEVICES, gpus))
    documents = files(NAMESPACE)
    await grant(client, "koordlet", *documents["rbac.yaml"], *documents["rbac-kubelet.yaml"])


def _gpu(minor: int) -> dict[str, Any]:
    return a_gpu(minor) | {"id": f"GPU-0000000{minor}-aaaa-bbbb-cccc-dddddddddddd"}


def _reported_cpus(here: Node) -> set[int]:
    plain = here.ask(lambda client: read(client, NODE_RESOURCE_TOPOLOGIES, NODE_NAME))
    annotations = {} if plain is None else plain["metadata"].get("annotations", {})
    report = json.loads(annotations.get("node.koordinator.sh/cpu-topology", "{}"))
    return {each["id"] for each in report.get("detail", ())}


@contextmanager
def pods(here: Node, *manifests: Manifest) -> Iterator[list[str]]:
    """Create pods without a node; delete them and wait for their end. Gives their names."""
    names = [manifest["metadata"]["name"] for manifest in manifests]
    try:
        for manifest in manifests:
            _create(here, manifest)
        yield names
    finally:
        for name in names:
            _delete(here, name)
        wait_until(
            lambda: all(stored(here, name) is None for name in names),
            f"{', '.join(names)} to end",
            timeout_s=40,
        )


def _create(here: Node, manifest: Manifest) -> None:
    container = {**manifest["spec"]["containers"][0], "image": IMAGE, "imagePullPolicy": "Never"}
    spec = {
        "schedulerName": "koord-scheduler",
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
    }
    body = encode_object(PODS, {"metadata": manifest["metadata"], "spec": spec})
    here.ask(lambda client: client.create(PODS, body, namespace="default"))


def _delete(here: Node, name: str) -> None:
    here.ask(lambda client: client.delete(PODS, name, namespace="default"))


def _run(here: Node, name: str) -> RunningPod:
    """Wait until a pod runs. What the API server says of it is part of a failure."""
    try:
        wait_until(lambda: is_running(here, name), f"{name} to run", timeout_s=60)
    except AssertionError as error:
        error.add_note(json.dumps(stored(here, name)["status"], indent=1))
        raise
    return as_running(here, stored(here, name))


def _pinned(name: str, qos: str, **metadata: Any) -> Manifest:
    amounts = {"cpu": "1", "memory": "64Mi"}
    return pod_manifest(name, qos, requests=amounts, limits=amounts, **metadata)


def _recorded_cpus(here: Node, name: str) -> str:
    annotations = stored(here, name)["metadata"]["annotations"]
    cpus: str = json.loads(annotations["scheduling.koordinator.sh/resource-status"])["cpuset"]
    return cpus


def test_an_lsr_pod_runs_on_exactly_the_cpus_that_the_scheduler_chose(
    scheduled: tuple[Node, SchedulerBed],
) -> None:
    here, _ = scheduled
    with pods(here, _pinned("lsr", "LSR")) as (name,):
        running = _run(here, name)
        cpus = _recorded_cpus(here, name)
        assert cpus in {str(cpu) for cpu in CPUS}
        assert container_value(here.runtime, running, "cpuset.cpus") == cpus
        assert container_value(here.runtime, running, "cpu.cfs_quota_us") == "-1"


def test_lse_pods_never_share_a_core_also_after_the_scheduler_was_killed(
    scheduled: tuple[Node, SchedulerBed],
) -> None:
    here, scheduler = scheduled
    if len(CPUS) < 2:
        pytest.skip("needs two CPUs")
    with pods(here, *(_pinned(f"lse-{number}", "LSE") for number in range(len(CPUS) - 1))) as some:
        before = [_run(here, name) for name in some]
        scheduler.kill()
        with pods(here, _pinned("lse-last", "LSE")) as (last,):
            scheduler.start()
            found = [*before, _run(here, last)]
            given = [container_value(here.runtime, each, "cpuset.cpus") for each in found]
            assert sorted(given) == sorted(str(cpu) for cpu in CPUS)
            assert given == [_recorded_cpus(here, name) for name in (*some, last)]
            with pods(here, _pinned("lse-more", "LSE")) as (more,):
                wait_until(lambda: _refusal(here, more), "the condition of the pod without room")
                assert "0/1 nodes are available" in _refusal(here, more)
                _delete(here, last)
                given_again = container_value(here.runtime, _run(here, more), "cpuset.cpus")
                assert given_again == given[-1]


def _refusal(here: Node, name: str) -> str:
    """Return the message of a pod's condition PodScheduled while it is false, else ""."""
    for condition in stored(here, name)["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message: str = condition.get("message", "")
            return message
    return ""


def test_the_minors_that_the_scheduler_chose_reach_the_environment(
    scheduled: tuple[Node, SchedulerBed],
) -> None:
    here, _ = scheduled
    one = {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100"}
    manifests = [
        pod_manifest(name, "LS", requests={**one, "cpu": "100m"}, limits={**one, "cpu": "200m"})
        for name in ("gpu-a", "gpu-b")
    ]
    with pods(here, *manifests) as names:
        seen = []
        for name in names:
            running = _run(here, name)
            annotations = stored(here, name)["metadata"]["annotations"]
            devices = json.loads(annotations["scheduling.koordinator.sh/device-allocated"])
            (minor,) = [each["minor"] for each in devices["gpu"]]
            environment = here.runtime.cri.execute(running.containers["main"], ["env"]).stdout
            assert f"NVIDIA_VISIBLE_DEVICES={_gpu(minor)['id']}" in environment.splitlines()
            seen.append(minor)
        assert sorted(seen) == [0, 1]
