"""The loop of co-location, closed by our programs: load, report, offer, pod, suppression, report.

koordlet reports to the NodeMetric; koord-manager makes the NodeMetric and the NodeSLO from its
ConfigMap, and the Node's batch resources from the report; kubelet runs a pod on them; koordlet
holds it back. The tests write the ConfigMap and the pods, and nothing else.

Other programs use the machine meanwhile, so amounts of the node are compared with each other. What
the node offers is computed from three times its CPUs: it is above 0 on a busy machine too.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from apis.explanation import ANNOTATION_RESOURCE_EXPLANATION, parse_explanation
from apis.quantity import parse_quantity
from koordctl.client import Client
from koordlet.manifests import files
from kube.resources import NODE_METRICS, NODE_SLOS, NODES
from tests.beds.apiserver import ApiServer, api_server
from tests.beds.apiserver import eventually as registered
from tests.beds.containerd import containerd
from tests.beds.daemon import NODE_NAME, daemon
from tests.beds.kubelet import RunningPod
from tests.beds.real_kubelet import real_kubelet
from tests.cluster.conftest import NAMESPACE, grant, install, manager, read, set_config
from tests.e2e.manifests import CPUS, Manifest, batch_pod, pod
from tests.e2e.node import Node, as_admin, in_touch, running, sources
from tests.waiting import wait_until

pytestmark = [pytest.mark.kubelet, pytest.mark.containerd]

_BATCH_CPU = "kubernetes.io/batch-cpu"
_SPIN = ["/bin/sh", "-c", "while :; do :; done"]
_CORES = 1 + len(CPUS) // 50
"""Of the batch pod: twice what suppression leaves it, at least; that is 1 % of a large node."""
_COLOCATION = {
    "enable": True,
    "cpuReclaimThresholdPercent": 300,
    "updateTimeThresholdSeconds": 1,
    "resourceDiffThreshold": 0.0001,
}
_LEAST_PERCENT = max(1, 20 // len(CPUS))
"""At most 0.2 cores up to 20 CPUs."""
_SUPPRESSION = {
    "enable": True,
    "cpuSuppressPolicy": "cfsQuota",
    "cpuSuppressThresholdPercent": 1,
    "cpuSuppressMinPercent": _LEAST_PERCENT,
}
_LEAST_US = len(CPUS) * 1000 * _LEAST_PERCENT
"""What `_SUPPRESSION` leaves best-effort pods in 100 ms, whatever the load is."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("loop")
    with ExitStack() as stack:
        server = stack.enter_context(api_server())
        asyncio.run(install(server))
        runtime = stack.enter_context(containerd("2.1", nri_request_timeout="20s"))
        kubelet = stack.enter_context(real_kubelet(runtime, server))
        asyncio.run(as_admin(server, _prepare))
        config = sources(server, kubelet, folder)
        koordlet = stack.enter_context(daemon(runtime, [], config=config))
        made = Node(server, runtime, kubelet, koordlet, None)
        wait(lambda: in_touch(made), "koordlet's sources")
        # The pods get CPU time on a machine that is busy with other programs.
        root = runtime.groups.path.rpartition("/")[0]
        runtime.groups.file(root, "cpu.shares").write_text(str(runtime.groups.weight(16_384)))
        stack.enter_context(managing(server))
        yield made


async def _prepare(client: Any) -> None:
    await registered(lambda: read(client, NODES, NODE_NAME), seconds=60)
    documents = files(NAMESPACE)
    await grant(client, "koordlet", *documents["rbac.yaml"], *documents["rbac-kubelet.yaml"])
    await set_config(client, configuration())


def configuration(**threshold: Any) -> dict[str, str]:
    """The manager's ConfigMap. threshold: the settings of suppression; off without them."""
    return {
        "colocation-config": json.dumps(_COLOCATION),
        "resource-threshold-config": json.dumps({"clusterStrategy": threshold}),
    }


@contextmanager
def managing(server: ApiServer) -> Iterator[None]:
    """Run koord-manager without webhooks in a thread of its own."""
    ready, over = threading.Event(), threading.Event()

    async def life() -> None:
        async with manager(server):
            ready.set()
            await asyncio.to_thread(over.wait)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(asyncio.run, life())
        try:
            wait(lambda: ready.is_set() or ended.done(), "the manager's start")
            if ended.done():
                ended.result()
            yield
        finally:
            over.set()
            ended.result(timeout=60)


def wait(condition: Any, what: str) -> None:
    wait_until(condition, what, timeout_s=180, every_s=0.1)


def service() -> Manifest:
    return pod("web", "LS", requests={"cpu": "100m"}, command=_SPIN)


# --- what the programs write ----------------------------------------------------------------------


def reported(here: Node, *pods: RunningPod) -> dict[str, int]:
    """Have the node report; return the milli-cores that the report has for these pods, by name.

    A report is due each half minute, and after a start of koordlet, which keeps its samples.
    """
    client = Client(str(here.koordlet.run_dir))

    def measured() -> bool:
        seen = {each["uid"]: each["cpu"] for each in client.get("/top").get("pods", ())}
        return all(seen.get(each.uid) for each in pods)

    wait(measured, "samples of the pods")
    before = _report(here).get("updateTime")
    here.koordlet.stop(signal.SIGTERM)
    here.koordlet.start()
    wait(lambda: _report(here).get("updateTime") != before, "a report")
    wanted = {each.name for each in pods}
    found: dict[str, int] = {}

    def complete() -> bool:
        found.clear()
        found.update(used(here))
        return wanted <= found.keys()

    wait(complete, f"a report of {wanted or 'the node'}")
    return found


def _report(here: Node) -> Any:
    found = here.ask(lambda client: read(client, NODE_METRICS, NODE_NAME)) or {}
    return found.get("status") or {}


def used(here: Node) -> dict[str, int]:
    """Milli-cores of the pods of the last report, by name."""
    return {
        each["name"]: parse_quantity(each["podUsage"]["resources"]["cpu"]).milli_value()
        for each in _report(here).get("podsMetric", ())
    }


def offer(here: Node) -> tuple[int, Mapping[str, int]]:
    """The Node's batch-cpu in milli-cores, -1 for none, and the terms that explain it."""
    node = here.ask(lambda client: read(client, NODES, NODE_NAME))
    text = node["metadata"].get("annotations", {}).get(ANNOTATION_RESOURCE_EXPLANATION)
    if text is None:
        return -1, {}
    explained = parse_explanation(text, obj="Node").resources[_BATCH_CPU]
    amount = parse_quantity(node["status"]["allocatable"][_BATCH_CPU]).value()
    return amount, {term.name: term.value for term in explained.terms}


def offered_beside(here: Node, *pods: RunningPod) -> int:
    """Wait until the offer is computed from what the report has for these pods; return it.

    A later report has other amounts, so each is read again.
    """

    def agrees() -> bool:
        seen = used(here)
        return all(each.name in seen for each in pods) and (
            abs(offer(here)[1].get("hp_used", -9) - sum(seen[each.name] for each in pods)) <= 1
        )

    wait(agrees, f"an offer beside {[each.name for each in pods]}")
    amount, terms = offer(here)
    assert amount == terms["capacity"] - terms["margin"] - terms["system_used"] - terms["hp_used"]
    return amount


def quota(here: Node) -> int:
    groups = here.runtime.groups
    return int(groups.read(f"{groups.path}/besteffort", "cpu.cfs_quota_us"))


# --- the loop -------------------------------------------------------------------------------------


def test_load_is_reported_offered_less_suppressed_and_reported_again(here: Node) -> None:
    with running(here, service()) as web:
        assert reported(here, web)[web.name] > 200, "the service takes a CPU"
        assert offered_beside(here, web) > 0
    # The load has gone from the next report, and from what it takes from the offer.
    assert web.name not in reported(here)
    offered_beside(here)

    spin = [*_SPIN[:2], " & ".join([_SPIN[2]] * _CORES)]
    spinner = batch_pod("batch", cpu=str(_CORES * 1000), command=spin)
    with running(here, spinner) as batch:
        assert quota(here) == -1
        before = reported(here, batch)[batch.name]
        assert before * 0.7 > _LEAST_US / 100, "it uses more than suppression will leave"
        here.ask(lambda client: set_config(client, configuration(**_SUPPRESSION)))
        wait(lambda: _enabled(here), "the manager's NodeSLO")
        wait(lambda: quota(here) == _LEAST_US, "suppression")
        with running(here, service()) as web:
            # A mean of the last minute: it falls with each report.
            wait(lambda: reported(here, batch)[batch.name] < before * 0.7, "a report of less use")
            offered_beside(here, web)
            assert quota(here) == _LEAST_US
            explained = here.koordlet.koordctl("explain", "subject", "kubeqos/BestEffort").stdout
            assert "node 1 % x" in explained
        here.ask(lambda client: set_config(client, configuration()))
        wait(lambda: quota(here) == -1, "the original quota")


def _enabled(here: Node) -> bool:
    slo = here.ask(lambda client: read(client, NODE_SLOS, NODE_NAME))
    return bool(slo and slo["spec"]["resourceUsedThresholdWithBE"]["enable"])
