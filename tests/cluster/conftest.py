"""An API server with the project's CRDs, shared by the tests of a module, and running managers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from apis.crd import KINDS, custom_resource_definition
from apis.meta import format_time
from cluster.manager.flags import parse
from cluster.manager.manager import Manager
from cluster.webhook.configuration import configuration_manifest
from kube.client import ApiError, Client, encode_object
from kube.resources import (
    CONFIG_MAPS,
    CRDS,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    NODE_METRICS,
    PODS,
    PRIORITY_CLASSES,
    VALIDATING_WEBHOOKS,
    Resource,
)
from tests.beds.apiserver import ApiServer, api_server, eventually

NAMESPACE = "koordinator-system"
_RBAC = "rbac.authorization.k8s.io"
CLUSTER_ROLE_BINDINGS = Resource(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", False)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server() as running:
        asyncio.run(install(running))
        yield running


async def install(running: ApiServer) -> None:
    async with running.client() as client:
        await asyncio.gather(
            *(
                client.create(CRDS, msgspec.json.encode(custom_resource_definition(kind)))
                for kind in KINDS
            )
        )
        await client.create(
            NAMESPACES,
            encode_object(
                NAMESPACES,
                {"metadata": {"name": NAMESPACE, "labels": {"control-plane": "koordinator"}}},
            ),
        )
        for name, value in (
            ("koord-prod", 9000),
            ("koord-mid", 7000),
            ("koord-batch", 5000),
            ("koord-free", 3000),
        ):
            await client.create(
                PRIORITY_CLASSES,
                encode_object(
                    PRIORITY_CLASSES,
                    {
                        "metadata": {"name": name},
                        "value": value,
                        "preemptionPolicy": "PreemptLowerPriority",
                    },
                ),
            )
        for kind in KINDS:

            async def served(kind: Any = kind) -> bool:
                version = kind.versions[0].name
                await client.request("GET", f"/apis/{kind.group}/{version}/{kind.plural}", tries=1)
                return True

            await eventually(lambda: _true(served()), seconds=30)


def kubeconfig(server: ApiServer, folder: Path, user: str = "admin") -> Path:
    path = folder / "kubeconfig"
    path.write_text(server.kubeconfig(user))
    return path


async def _true(work: Any) -> bool:
    try:
        return bool(await work)
    except Exception:  # noqa: BLE001 - asked again
        return False


async def grant(client: Client, user: str, *documents: Mapping[str, Any]) -> None:
    """Give a user of the bed the Roles and ClusterRoles among the documents of a manifest."""
    for document in documents:
        kind = document["kind"]
        if kind not in ("ClusterRole", "Role"):
            continue
        namespace = document["metadata"].get("namespace", "")
        role = Resource(_RBAC, "v1", f"{kind.lower()}s", kind, bool(namespace))
        await client.create(role, encode_object(role, dict(document)), namespace=namespace)
        name = document["metadata"]["name"]
        bound = {
            "metadata": {"name": name},
            "subjects": [{"apiGroup": _RBAC, "kind": "User", "name": user}],
            "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": name},
        }
        binding = Resource(
            _RBAC, "v1", f"{kind.lower()}bindings", f"{kind}Binding", bool(namespace)
        )
        await client.create(binding, encode_object(binding, bound), namespace=namespace)


async def register_webhooks(client: Client) -> None:
    for resource, mutating in ((MUTATING_WEBHOOKS, True), (VALIDATING_WEBHOOKS, False)):
        manifest = configuration_manifest(mutating=mutating, namespace=NAMESPACE)
        await client.delete(resource, manifest["metadata"]["name"])
        await client.create(resource, msgspec.json.encode(manifest))


async def unregister_webhooks(client: Client) -> None:
    """Without them pods are created unasked again; with failure policy Fail they could not be."""
    for resource, mutating in ((MUTATING_WEBHOOKS, True), (VALIDATING_WEBHOOKS, False)):
        manifest = configuration_manifest(mutating=mutating, namespace=NAMESPACE)
        await client.delete(resource, manifest["metadata"]["name"])


async def reaches_webhooks(client: Client) -> bool:
    """Whether the API server calls what is registered for pods: it sees a new address late."""
    container = {"name": "main", "image": "x"}
    plain = {"metadata": {"name": "probe"}, "spec": {"containers": [container]}}
    path = f"{PODS.path(namespace='default')}?dryRun=All"
    try:
        await client.request("POST", path, body=encode_object(PODS, plain), tries=1)
    except ApiError as error:
        if "failed calling webhook" in str(error):
            return False
        raise
    return True


async def set_config(client: Client, data: Mapping[str, str]) -> None:
    name = "slo-controller-config"
    body = {"metadata": {"name": name, "namespace": NAMESPACE}, "data": dict(data)}
    await client.delete(CONFIG_MAPS, name, namespace=NAMESPACE)
    await client.create(CONFIG_MAPS, encode_object(CONFIG_MAPS, body), namespace=NAMESPACE)


async def read(client: Client, resource: Resource, name: str, namespace: str = "") -> Any:
    return await client.find(resource, name, msgspec.json.decode, namespace=namespace)


async def write_report(
    client: Client, name: str, *, age: timedelta = timedelta(), system: str = "1"
) -> None:
    """Write a NodeMetric's status as a node would."""
    await eventually(lambda: read(client, NODE_METRICS, name))
    status = {
        "updateTime": format_time(datetime.now(UTC) - age),
        "nodeMetric": {
            "nodeUsage": {"resources": {"cpu": "3", "memory": "9Gi"}},
            "systemUsage": {"resources": {"cpu": system, "memory": "1Gi"}},
        },
        "prodReclaimableMetric": {"resource": {"resources": {"cpu": "2", "memory": "4Gi"}}},
    }
    await client.patch(
        NODE_METRICS, name, msgspec.json.encode({"status": status}), subresource="status"
    )


@asynccontextmanager
async def manager(
    running: ApiServer,
    flags: Sequence[str] = (),
    *,
    user: str = "admin",
    webhooks: bool = False,
    environment: Mapping[str, str] | None = None,
    qps: float = 0,
) -> AsyncIterator[Manager]:
    """Run a manager in this process until the block ends. qps: its requests a second, 0 any."""
    gates = "" if webhooks else "WebhookFramework=false"
    settings = parse(
        [
            "--metrics-addr=0",
            "--health-probe-addr=0",
            *([f"--feature-gates={gates}"] if gates else []),
            *flags,
        ],
        {"WEBHOOK_HOST": "127.0.0.1", "WEBHOOK_CERT_WRITER": "secret", **(environment or {})},
    )
    stop = asyncio.Event()
    async with running.client(user, qps=qps) as client:
        one = Manager(client, settings, webhook_port=0)
        running_task = asyncio.create_task(one.run(stop))
        try:
            await eventually(lambda: one.ready or running_task.done(), seconds=30)
            if running_task.done():
                running_task.result()
            if webhooks:
                async with running.client() as admin:
                    await eventually(lambda: reaches_webhooks(admin), seconds=30)
            yield one
        finally:
            stop.set()
            await asyncio.wait_for(running_task, 20)
            if webhooks:
                async with running.client() as admin:
                    await unregister_webhooks(admin)


async def settled(one: Manager) -> None:
    """Wait until no controller has had anything to do for a second, as far as its caches know."""
    quiet = 0
    while quiet < 10:
        await asyncio.sleep(0.1)
        idle = all(each.queue.idle for each in one.controllers.values())
        quiet = quiet + 1 if idle else 0
