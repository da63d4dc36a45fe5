"""The scheduler's rights: they suffice for all its work, and each right is used."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cluster.scheduler.binding.victims import Victim, evict_victim
from cluster.scheduler.configuration.flags import parse
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.manifests import config_map, rbac
from cluster.scheduler.plugins.quotas.overuse import Revoked
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.rights import CLUSTER_WIDE, FOLLOW, FOLLOWED, IN_NAMESPACE, NODE_LOCKS, Right
from cluster.scheduler.serving.endpoints import Endpoints
from kube.client import Client, Unreachable, encode_object
from kube.connection import Connection
from kube.kept_client import KeptClient
from kube.resources import (
    CLUSTER_NETWORK_TOPOLOGIES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    POD_GROUPS,
    PODS,
    RESERVATIONS,
    SCHEDULE_EXPLANATIONS,
    STORAGE_CLASSES,
)
from tests.beds.apiserver import ApiServer, api_server, eventually
from tests.cluster.conftest import grant, install, read
from tests.cluster.scheduler.beds.on_api_server import make_cpus, make_node
from tests.cluster.scheduler.configuration.files import chart_file
from tests.cluster.scheduler.configuration.files import load as load_configuration
from tests.cluster.scheduler.volumes.controller import volume_controller
from tests.cluster.scheduler.volumes.making import claim_json, volume_json
from tests.ports import free_ports

USER = "koord-scheduler"
_PAGE = Path(__file__).parents[4] / "docs" / "scheduler.md"
_POLICY = f"""\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: [{USER}]
"""
_RightKey = tuple[str, str, str]
"""(API group, resource or resource/subresource, verb)"""


def _shipped() -> str:
    text: str = config_map()["data"]["koord-scheduler-config"]
    return text


def test_each_cache_of_the_process_has_a_right_and_each_such_right_a_cache() -> None:
    nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
    process = SchedulerProcess(nowhere, read_configuration(_shipped(), obj="shipped"))
    caches = [cache.resource for cache in (*process.caches, process.pods, process.asked)]
    assert len(caches) == len(set(caches))
    followed = [*FOLLOWED, *(right for right in IN_NAMESPACE if right.verbs == FOLLOW)]
    assert {right.resource.path() for right in followed} == {each.path() for each in caches}
    assert {right.verbs for right in FOLLOWED} == {FOLLOW}


def test_the_shipped_configuration_is_that_of_upstreams_chart() -> None:
    assert read_configuration(_shipped(), obj="shipped") == load_configuration(chart_file())


def test_the_documentation_names_everything_that_is_written() -> None:
    written: dict[str, set[str]] = {}
    for right in (*CLUSTER_WIDE, *IN_NAMESPACE, *NODE_LOCKS):
        if verbs := set(right.verbs) - {"get", *FOLLOW}:
            written.setdefault(right.plural, set()).update(verbs)
    section = _PAGE.read_text().partition("\n## Installing\n")[2].partition("\n## ")[0]
    documented = {
        resource.strip(" `"): set(cells[2].strip().split(", "))
        for line in section.splitlines()
        if line.startswith("| `")
        for cells in (line.split("|"),)
        for resource in cells[1].split(",")
    }
    assert documented == written


@pytest.mark.apiserver
def test_every_right_is_used_and_none_is_missing(tmp_path: Path) -> None:
    policy, log = tmp_path / "policy.yaml", tmp_path / "audit.log"
    policy.write_text(_POLICY)
    flags = (f"--audit-policy-file={policy}", f"--audit-log-path={log}")
    with api_server(flags=(*flags, "--audit-log-mode=blocking")) as fresh:
        asyncio.run(install(fresh))
        asyncio.run(_do_everything(fresh))
    asked = dict(_asked(log))
    refused = {right for right, decision in asked.items() if decision != "allow"}
    assert refused == set()
    assert set(asked) == set(_granted((*CLUSTER_WIDE, *IN_NAMESPACE)))


def _granted(rights: Iterable[Right]) -> Iterator[_RightKey]:
    for right in rights:
        for verb in right.verbs:
            yield right.resource.group, right.plural, verb


def _asked(log: Path) -> Iterator[tuple[_RightKey, str]]:
    for line in log.read_text().splitlines():
        event = json.loads(line)
        if "objectRef" not in event:
            # Discovery, which every user may read.
            assert event["verb"] == "get"
            continue
        about = event["objectRef"]
        parts = (about["resource"], about.get("subresource"))
        right = (about.get("apiGroup", ""), "/".join(filter(None, parts)), event["verb"])
        yield right, event["annotations"]["authorization.k8s.io/decision"]


_LOST = ("/binding", "/persistentvolumes/by-hand", "/persistentvolumeclaims/made")
"""Ends of the paths whose first write has its answer lost."""


class _LosesAnswers(KeptClient):
    """Loses the answers to some writes after the server has carried them out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lost: set[str] = set()

    async def _once(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: bytes | None,
        content_type: str,
    ) -> bytes:
        answer = await super()._once(method, path, params, body, content_type)
        for end in _LOST:
            if method != "GET" and path.endswith(end) and end not in self.lost:
                self.lost.add(end)
                raise Unreachable("the test drops this answer")
        return answer


async def _do_everything(fresh: ApiServer) -> None:
    ahead = 0.0

    def clock() -> float:
        return time.time() + ahead

    configuration = read_configuration(_shipped(), obj="shipped")
    stop = asyncio.Event()
    async with (
        fresh.client() as admin,
        _LosesAnswers(fresh.connection(USER)) as client,
    ):
        await grant(admin, USER, *rbac())
        await make_node(admin, "n", cpu=8)
        await make_cpus(admin, "n", 8)
        process = SchedulerProcess(client, configuration, seed=1, clock=clock, network_status=True)
        task = asyncio.create_task(process.run(stop))
        await eventually(lambda: process.ready or task.done(), seconds=30)
        assert process.ready
        await _make_pods(admin)

        async def condition() -> bool:
            pod = await read(admin, PODS, "large", "default")
            return any(c["type"] == "PodScheduled" for c in pod["status"].get("conditions", []))

        async def bound() -> bool:
            pods = [await read(admin, PODS, name, "default") for name in ("plain", "pinned")]
            return all(pod["spec"].get("nodeName") == "n" for pod in pods)

        await eventually(condition)
        await eventually(bound)
        await eventually(lambda: process.events.counts.written >= 3)
        await _make_topology(admin, process)
        group = encode_object(POD_GROUPS, {"metadata": {"name": "g"}, "spec": {"minMember": 2}})
        await admin.create(POD_GROUPS, group, namespace="default")
        statuses = process.pod_group_statuses
        assert statuses is not None
        await eventually(lambda: statuses.written)
        # The same failure again, later than the series of its event is written at the earliest.
        ahead = 40.0
        await admin.patch(PODS, "large", b'{"metadata":{"labels":{"a":"b"}}}', namespace="default")
        await eventually(lambda: process.events.counts.repeated and not process.events.waiting)
        await _ask_why(admin)
        await _bind_volumes(admin)
        await _read_the_secure_port(fresh, process)
        await _make_reservation(admin, "r", ttl="0s")
        await _make_reservation(admin, "bad", ttl="a while")

        async def refused() -> bool:
            status = (await read(admin, RESERVATIONS, "bad")).get("status", {})
            return any("spec.ttl" in one.get("message", "") for one in status.get("conditions", []))

        await eventually(refused)

        async def phase() -> str:
            status = (await read(admin, RESERVATIONS, "r")).get("status", {})
            return str(status.get("phase"))

        async def available() -> bool:
            return await phase() == "Available"

        await eventually(available)
        victim = Victim("default", "plain", (await _uid(admin, "plain")))
        assert (
            await evict_victim(client, victim, controller="koord-scheduler", now=time.time) is None
        )
        upkeep = process.quota_upkeep
        assert upkeep is not None
        pinned = process.tables.bookings[await _uid(admin, "pinned")]
        await upkeep.revoke(Revoked("q", (pinned,), {}, {}))
        await eventually(lambda: upkeep.statuses.written)
        # The reservation ends with its node, and is deleted a day later.
        await admin.delete(NODES, "n")

        async def failed() -> bool:
            return await phase() == "Failed"

        await eventually(failed)
        ahead = 2 * 24 * 3600.0
        await admin.patch(RESERVATIONS, "r", b'{"metadata":{"labels":{"a":"b"}}}')

        async def gone() -> bool:
            return await admin.find(RESERVATIONS, "r", bytes) is None

        await eventually(gone)
        stop.set()
        await task
        assert client.lost == set(_LOST)


async def _ask_why(admin: Client) -> None:
    for name, ttl in (("kept", "1h"), ("over", "1ms")):
        question = {
            "metadata": {"name": name},
            "spec": {"questionObjectKey": "default/large", "ttl": ttl},
        }
        body = encode_object(SCHEDULE_EXPLANATIONS, question)
        await admin.create(SCHEDULE_EXPLANATIONS, body, namespace="default")

    async def answered() -> bool:
        kept = await read(admin, SCHEDULE_EXPLANATIONS, "kept", "default")
        over = await read(admin, SCHEDULE_EXPLANATIONS, "over", "default")
        return bool(kept.get("status")) and over is None

    await eventually(answered)


async def _make_topology(admin: Client, process: SchedulerProcess) -> None:
    layer = {"topologyLayer": "NodeTopologyLayer", "parentTopologyLayer": "ClusterTopologyLayer"}
    plain = {"metadata": {"name": "default"}, "spec": {"networkTopologySpec": [layer]}}
    body = encode_object(CLUSTER_NETWORK_TOPOLOGIES, plain)
    await admin.create(CLUSTER_NETWORK_TOPOLOGIES, body)
    status = process.network_status
    assert status is not None
    await eventually(lambda: process.networks.get("default"))
    await status.write()
    assert status.written


async def _read_the_secure_port(fresh: ApiServer, process: SchedulerProcess) -> None:
    (port,) = free_ports(1)
    flags = ["--port=0", f"--secure-port={port}", "--authentication-skip-lookup=true"]
    async with AsyncExitStack() as stack:
        await Endpoints(process, parse(flags)).start(stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def status(path: str, token: str = "") -> int:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            url = f"https://127.0.0.1:{port}{path}"
            async with session.get(url, headers=headers, ssl=False) as answer:
                return answer.status

        assert await status("/readyz") == 200
        assert await status("/metrics") == 403
        assert await status("/metrics", "made-up") == 401
        assert await status("/metrics", fresh.tokens["nobody"]) == 403
        # An administrator, group system:masters.
        assert await status("/apis/v1/nodes/n", fresh.tokens["admin"]) == 200


async def _make_pods(admin: Client) -> None:
    # A pod that brings a resource-status has it removed before it is bound.
    brings = {"annotations": {"scheduling.koordinator.sh/resource-status": '{"cpuset":"0-7"}'}}
    pinned = {"labels": {"koordinator.sh/qosClass": "LSR"}}
    pods: Sequence[tuple[str, str, dict[str, Any]]] = (
        ("plain", "1", brings),
        ("pinned", "2", pinned),
        ("large", "64", {}),
    )
    for name, cpu, metadata in pods:
        amounts = {"cpu": cpu, "memory": "1Gi"}
        body = {
            "metadata": {"name": name, **metadata},
            "spec": {
                "schedulerName": "koord-scheduler",
                "priorityClassName": "koord-prod",
                "automountServiceAccountToken": False,
                "containers": [
                    {
                        "name": "main",
                        "image": "x",
                        "resources": {"requests": amounts, "limits": amounts},
                    }
                ],
            },
        }
        await admin.create(PODS, encode_object(PODS, body), namespace="default")


async def _make_reservation(admin: Client, name: str, *, ttl: str) -> None:
    """Make one that gets CPUs, which are recorded beside its status."""
    amounts = {"cpu": "1", "memory": "1Gi"}
    resources = {"requests": amounts, "limits": amounts}
    template = {
        "metadata": {"labels": {"koordinator.sh/qosClass": "LSR"}},
        "spec": {
            "schedulerName": "koord-scheduler",
            "priority": 9500,
            "containers": [{"name": "a", "image": "b", "resources": resources}],
        },
    }
    owners = [{"object": {"name": "pod", "namespace": "default"}}]
    body = {
        "metadata": {"name": name},
        "spec": {"template": template, "owners": owners, "ttl": ttl},
    }
    await admin.create(RESERVATIONS, encode_object(RESERVATIONS, body))


async def _bind_volumes(admin: Client) -> None:
    """Have a pod bound with a volume that exists and with one that is made for it."""
    await admin.patch(NODES, "n", b'{"metadata":{"labels":{"kubernetes.io/hostname":"n"}}}')
    for name, provisioner in (("hand", "kubernetes.io/no-provisioner"), ("made", "csi.test")):
        body = {
            "metadata": {"name": name},
            "provisioner": provisioner,
            "volumeBindingMode": "WaitForFirstConsumer",
        }
        await admin.create(STORAGE_CLASSES, encode_object(STORAGE_CLASSES, body))
    volume = volume_json("by-hand", class_name="hand", csi=("csi.test", "h"))
    await admin.create(PERSISTENT_VOLUMES, encode_object(PERSISTENT_VOLUMES, volume))
    available = b'{"status":{"phase":"Available"}}'
    await admin.patch(PERSISTENT_VOLUMES, "by-hand", available, subresource="status")
    volumes = []
    for name in ("hand", "made"):
        claim = encode_object(PERSISTENT_VOLUME_CLAIMS, claim_json(name, class_name=name))
        await admin.create(PERSISTENT_VOLUME_CLAIMS, claim, namespace="default")
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": name}})
    spec = {
        "schedulerName": "koord-scheduler",
        "automountServiceAccountToken": False,
        "containers": [{"name": "main", "image": "x"}],
        "volumes": volumes,
    }
    pod = encode_object(PODS, {"metadata": {"name": "claims"}, "spec": spec})
    await admin.create(PODS, pod, namespace="default")

    async def bound() -> bool:
        return bool((await read(admin, PODS, "claims", "default"))["spec"].get("nodeName"))

    async with volume_controller(admin):
        await eventually(bound, seconds=30)


async def _uid(admin: Client, name: str) -> Any:
    return (await read(admin, PODS, name, "default"))["metadata"]["uid"]
