"""Objects as large as an API server takes, of most kinds: each costs itself only. About 10 s.

etcd takes requests of 1.5 MiB (its --max-request-bytes), the API server 256 KiB of annotations.
Each object is made with a little less, and is refused with a little more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cluster.scheduler.sources.objects import MOST_OF_A_NODE
from cluster.scheduler.tables.numa.facts import MOST_NUMA_RESOURCES
from kube.client import ApiError, Client, encode_object
from kube.resources import (
    CSI_NODES,
    ELASTIC_QUOTAS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    POD_GROUPS,
    PODS,
    RESERVATIONS,
    STORAGE_CLASSES,
    Resource,
)
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.scheduler.beds.on_api_server import (
    make_node,
    make_pod,
    nodes_of,
    play,
    scheduler,
)
from tests.cluster.scheduler.configuration.files import chart_file
from tests.cluster.scheduler.volumes.controller import clear_volumes
from tests.cluster.scheduler.volumes.making import HOST, claim_json, on, volume_json

pytestmark = pytest.mark.apiserver

Tree = dict[str, Any]

_MOST = 1536 * 1024
"""Bytes of a request to etcd."""
_MOST_ANNOTATIONS = 256 * 1024
_STEP = 0.1
"""The size at which an object is taken is found to a tenth."""


def _named(count: int, value: Any) -> Tree:
    """Return members with names of 60 characters: of shorter ones the API server takes longer."""
    return {f"example.com/{number:048}": value for number in range(count)}


def _padded(annotations: Tree) -> Tree:
    """Return annotations of the largest size that the API server takes."""
    used = sum(len(key) + len(value) for key, value in annotations.items())
    return {**annotations, "a": "[" * (_MOST_ANNOTATIONS - used - 1)}


async def _create(client: Client, resource: Resource, body: Tree) -> None:
    namespace = "default" if resource.namespaced else ""
    await client.create(resource, encode_object(resource, body), namespace=namespace)


async def _largest(client: Client, resource: Resource, made: Callable[[int], Tree]) -> int:
    """Create the object as large as the server takes it; return how many parts it has.

    made: parts -> the object.
    """
    per_part = (len(json.dumps(made(2000))) - len(json.dumps(made(1000)))) / 1000
    # With the names of its fields and who wrote them, an object is stored in more bytes than sent.
    parts = int(_MOST / per_part)
    while True:
        try:
            await _create(client, resource, made(parts))
            return parts
        except ApiError as error:
            assert error.status in (400, 413, 422, 500), error
            text = error.message
            assert any(word in text for word in ("too large", "larger than", "limit")), text
        parts -= int(parts * _STEP)
        assert parts * per_part > _MOST / 3


def _pod(count: int) -> Tree:
    """Return a pod that demands a node by very many names, none of which exists."""
    names = [f"node-{number:06}" for number in range(count)]
    term = {"matchExpressions": [{"key": HOST, "operator": "In", "values": names}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return _plain_pod("large", affinity={"nodeAffinity": required})


def _plain_pod(name: str, *, resources: Tree | None = None, **spec: Any) -> Tree:
    container = {"name": "c", "image": "x", "resources": {"limits": resources or {}}}
    return {
        "metadata": {"name": name},
        "spec": {
            "schedulerName": "koord-scheduler",
            "automountServiceAccountToken": False,
            "containers": [container],
            **spec,
        },
    }


def _reservation(count: int) -> Tree:
    owners = [{"object": {"name": f"owner-{number:094}"}} for number in range(count)]
    template = {"spec": _plain_pod("x")["spec"]}
    return {
        "metadata": {"name": "large"},
        "spec": {"template": template, "owners": owners, "ttl": "1h"},
    }


def _quota(count: int) -> Tree:
    amounts = _named(count, "1")
    return {"metadata": {"name": "large"}, "spec": {"min": {}, "max": amounts}}


def _group(count: int) -> Tree:
    return {
        "metadata": {"name": "large"},
        "spec": {"minMember": 2, "minResources": _named(count, "1")},
    }


def _volume(count: int) -> Tree:
    names = [f"node-{number:06}" for number in range(count)]
    return volume_json("large", terms=on(HOST, *names), csi=("csi.test", "large"))


def _class(count: int) -> Tree:
    values = [f"zone-{number:06}" for number in range(count)]
    terms = [{"matchLabelExpressions": [{"key": "zone", "values": values}]}]
    return {
        "metadata": {"name": "large"},
        "provisioner": "csi.test",
        "volumeBindingMode": "WaitForFirstConsumer",
        "allowedTopologies": terms,
    }


def _csi_node(count: int) -> Tree:
    drivers = [
        {"name": f"driver-{number:06}", "nodeID": "n", "allocatable": {"count": 1}}
        for number in range(count)
    ]
    return {"metadata": {"name": "large"}, "spec": {"drivers": drivers}}


def _topology(count: int) -> Tree:
    resources = [
        {"name": name, "capacity": "1", "allocatable": "1", "available": "1"}
        for name in _named(count, "1")
    ]
    zone = {"name": "node-0", "type": "Node", "resources": resources}
    return {"metadata": {"name": "large"}, "topologyPolicies": ["None"], "zones": [zone]}


_LARGE: tuple[tuple[Resource, Callable[[int], Tree]], ...] = (
    (PODS, _pod),
    (RESERVATIONS, _reservation),
    (ELASTIC_QUOTAS, _quota),
    (POD_GROUPS, _group),
    (PERSISTENT_VOLUMES, _volume),
    (STORAGE_CLASSES, _class),
    (CSI_NODES, _csi_node),
    (NODE_RESOURCE_TOPOLOGIES, _topology),
)


def _annotated(resource: Resource, annotations: Tree, body: Tree) -> tuple[Resource, Tree]:
    metadata = {
        "name": "annotated",
        "annotations": _padded(annotations),
        **body.pop("metadata", {}),
    }
    return resource, {"metadata": metadata, **body}


_NESTED = "[" * 100_000
_GANG = "gang.scheduling.koordinator.sh"
_ANNOTATED = (
    _annotated(
        NODES,
        {
            "node.koordinator.sh/reservation": _NESTED,
            "scheduling.koordinator.sh/usage-thresholds": _NESTED,
        },
        {},
    ),
    _annotated(
        PODS,
        {"scheduling.koordinator.sh/resource-spec": _NESTED, f"{_GANG}/groups": _NESTED},
        {"spec": _plain_pod("x")["spec"]},
    ),
    _annotated(
        RESERVATIONS,
        {"scheduling.koordinator.sh/resource-status": _NESTED},
        {"spec": _reservation(1)["spec"]},
    ),
    _annotated(
        ELASTIC_QUOTAS,
        {"quota.scheduling.koordinator.sh/shared-weight": _NESTED},
        {"spec": {"min": {"cpu": "1"}, "max": {"cpu": "2"}}},
    ),
    _annotated(POD_GROUPS, {f"{_GANG}/groups": _NESTED}, {"spec": {"minMember": 2}}),
    _annotated(
        PERSISTENT_VOLUME_CLAIMS,
        {"volume.kubernetes.io/selected-node": _NESTED},
        {"spec": claim_json("x")["spec"]},
    ),
)


async def _large_objects_cost_themselves_only(server: ApiServer, client: Client) -> None:
    await clear_volumes(client)
    for number in range(3):
        await make_node(client, f"n{number}", cpu=8, labels={HOST: f"n{number}"})
    await make_node(client, "large", cpu=8, labels={HOST: "large"})
    async with scheduler(server.connection(), json.dumps(_configuration())) as process:
        names = 20_000
        while True:
            try:
                amounts = msgspec.json.encode({"status": {"allocatable": _named(names, "1")}})
                await client.patch(NODES, "large", amounts, subresource="status")
                break
            except ApiError as error:
                assert "too large" in error.message, error
            names -= 1_000
        await asyncio.gather(*(_largest(client, resource, made) for resource, made in _LARGE))
        for resource, body in _ANNOTATED:
            await _create(client, resource, body)
        in_a_quota = {"labels": {"quota.scheduling.koordinator.sh/name": "large"}}
        in_a_gang = {"labels": {"pod-group.scheduling.sigs.k8s.io": "large"}}
        for number in range(3):
            await make_pod(client, f"plain-{number}", cpu="1")
            await make_pod(client, f"quota-{number}", cpu="1", metadata=in_a_quota)
            await make_pod(client, f"gang-{number}", cpu="1", metadata=in_a_gang)
        await make_pod(client, "last", cpu="15", nodeSelector={HOST: "last"})
        # What comes after all of that is decided with all of that.
        await make_node(client, "last", cpu=16, labels={HOST: "last"})

        async def bound() -> bool:
            nodes = await nodes_of(client)
            good = ("plain", "quota", "gang", "last")
            placed = all(node for name, node in nodes.items() if name.startswith(good))
            return placed and bool(process.plugins.numa.total)

        await eventually(bound, seconds=60)
        assert not (await nodes_of(client))["large"]
        resources = len(process.tables.nodes.resources)
        assert resources < 2 * MOST_OF_A_NODE, resources
        assert len(process.plugins.numa.total) <= MOST_NUMA_RESOURCES
        assert not process.attempts.faults.count, process.attempts.faults
        caches = (*process.caches, process.pods)
        assert not [each.resource.plural for each in caches if each.faults.count]


def _configuration() -> Tree:
    """Return the chart's file, for a scheduler that needs no lease."""
    return chart_file() | {"leaderElection": {"leaderElect": False}}


def test_large_objects_cost_themselves_only(server: ApiServer) -> None:
    play(server, _large_objects_cost_themselves_only)
