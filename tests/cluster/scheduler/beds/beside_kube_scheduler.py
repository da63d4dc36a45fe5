"""One API server for a kube-scheduler and our scheduler: objects, in the namespace default unless
they name another, and what kube-scheduler decides.

Ours has the same plugins, and no pods: those that are compared name kube-scheduler's profiles.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.scheduler.process import SchedulerProcess
from kube.client import Client, encode_object
from kube.resources import NODES, PODS, Resource
from tests.beds.apiserver import ApiServer, eventually
from tests.cluster.scheduler.beds.on_api_server import scheduler

Tree = dict[str, Any]

_DEFAULT_PROFILE: Final = ({"schedulerName": "koord-scheduler"},)
_SCORE: Final = re.compile(
    r'"Plugin scored node for pod" pod="([^"]+)" plugin="([^"]+)" node="([^"]+)" score=(\d+)'
)
_OF_PREEMPTION: Final = re.compile(
    r"\. (no new claims to deallocate, )?(preemption: .*|not found)", re.DOTALL
)
"""What kube-scheduler adds; "not found" for pods that preemption does not look at any node for."""
_LONGEST_S: Final = 40.0
"""Of a decision. kube-scheduler waits 1 s for the claims of a pod, and up to 10 s for its back-off
after a conflict."""


@asynccontextmanager
async def ours(
    server: ApiServer, profiles: Sequence[Mapping[str, Any]] = _DEFAULT_PROFILE
) -> AsyncIterator[SchedulerProcess]:
    """Run our scheduler until the block ends."""
    configuration = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "profiles": list(profiles),
    }
    async with scheduler(server.connection(), json.dumps(configuration)) as process:
        yield process


def _path(resource: Resource, namespace: str, name: str = "", subresource: str = "") -> str:
    within = namespace if resource.namespaced else ""
    return resource.path(namespace=within, name=name, subresource=subresource)


async def create(client: Client, resource: Resource, body: Tree, *, dry: bool = False) -> bytes:
    """Create an object and return it with the API server's defaults. dry: only return it."""
    path = _path(resource, body["metadata"].get("namespace", "default"))
    path += "?dryRun=All" if dry else ""
    return await client.request("POST", path, body=encode_object(resource, body))


async def set_status(
    client: Client, resource: Resource, name: str, status: Tree, *, namespace: str = "default"
) -> None:
    """Write members of an object's status."""
    await client.request(
        "PATCH",
        _path(resource, namespace, name, "status"),
        body=msgspec.json.encode({"status": status}),
        content_type="application/merge-patch+json",
    )


async def make_node(client: Client, node: Tree) -> None:
    """Create a node with its status, and with the taints of `node` alone."""
    name = node["metadata"]["name"]
    await create(client, NODES, node)
    await set_status(client, NODES, name, node["status"])
    # The API server marks a new node as not ready; a kubelet would take that off.
    spec = {"taints": None, **node.get("spec", {})}
    await client.patch(NODES, name, msgspec.json.encode({"spec": spec}))


async def delete(
    client: Client, resource: Resource, name: str = "", *, namespace: str = "default"
) -> None:
    """Delete an object, or all of a type in a namespace, without a grace period."""
    path = _path(resource, namespace, name)
    await client.request("DELETE", f"{path}?gracePeriodSeconds=0")


async def decided(client: Client, name: str, *, namespace: str = "default") -> tuple[str, str]:
    """Return the node that kube-scheduler gave a pod, or "", and the message of its refusal.

    What preemption adds to the message is left out.
    """

    async def look() -> tuple[str, str] | None:
        raw = await client.request("GET", PODS.path(namespace=namespace, name=name))
        found: Tree = msgspec.json.decode(raw)
        if node := found["spec"].get("nodeName"):
            return node, ""
        for condition in found["status"].get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return "", _OF_PREEMPTION.sub(".", condition["message"])
        return None

    answer: tuple[str, str] = await eventually(look, seconds=_LONGEST_S, every=0.03)
    return answer


def scores(log: Path, pod: str) -> dict[str, dict[str, int]]:
    """Return the weighted scores that kube-scheduler gave a pod: node -> plugin -> score.

    It gives none where one node alone is feasible. Scores of 0 are left out. log: its log. pod:
    namespace/name.
    """
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for named, plugin, node, score in _SCORE.findall(log.read_text()):
        if named == pod:
            found[node] |= {plugin: int(score)} if int(score) else {}
    return found
