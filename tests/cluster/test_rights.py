"""The manager's rights: they suffice for all its work, and each right is used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.gates import GATES
from cluster.manager.manifests import CLUSTER_RULES, NAMESPACE_RULES, SECRET_NAME
from cluster.webhook.configuration import MUTATING_NAME
from kube.client import ApiError, Client, encode_object
from kube.resources import (
    DEVICES,
    ELASTIC_QUOTAS,
    MUTATING_WEBHOOKS,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODE_SLOS,
    NODES,
    PODS,
    PROFILES,
    QUOTA_PROFILES,
    SECRETS,
    Resource,
)
from tests.beds.apiserver import ApiServer, api_server, eventually
from tests.cluster.conftest import (
    NAMESPACE,
    install,
    manager,
    read,
    register_webhooks,
    set_config,
    write_report,
)

pytestmark = pytest.mark.apiserver

USER = "koord-manager"
_RBAC = "rbac.authorization.k8s.io"
_POLICY = f"""\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: [{USER}]
"""
Right = tuple[str, str, str]
"""(API group, resource or resource/subresource, verb)"""


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
    assert set(asked) == set(_granted((*CLUSTER_RULES, *NAMESPACE_RULES)))


def _granted(rules: Iterable[Mapping[str, Sequence[str]]]) -> Iterator[Right]:
    for rule in rules:
        for resource in rule["resources"]:
            for verb in rule["verbs"]:
                yield rule["apiGroups"][0], resource, verb


def _asked(log: Path) -> Iterator[tuple[Right, str]]:
    for line in log.read_text().splitlines():
        event = json.loads(line)
        about = event["objectRef"]
        parts = (about["resource"], about.get("subresource"))
        right = (about.get("apiGroup", ""), "/".join(filter(None, parts)), event["verb"])
        yield right, event["annotations"]["authorization.k8s.io/decision"]


async def _do_everything(fresh: ApiServer) -> None:
    gates = ",".join(f"{gate}=true" for gate in GATES if not gate.startswith("Disable"))
    flags = [f"--feature-gates={gates}", "--colocation-profile-reconcile-interval=300ms"]
    async with fresh.client() as client:
        await grant(client, USER)
        await register_webhooks(client)
        await set_config(client, {"colocation-config": '{"enable":true}', "system-config": "{"})
        await _create(client, NODES, {"metadata": {"name": "n", "labels": {"pool": "x"}}})
        async with manager(fresh, flags, user=USER, webhooks=True) as one:
            await eventually(lambda: one.leading)
            await _resources_are_offered(client)
            await _quotas_are_made_and_booked(client)
            # An event, and the same one again.
            for text in ("{", "{}", "{"):
                annotations = {"node.koordinator.sh/thirdPartyAllocations": text}
                await _patch(client, NODES, "n", {"metadata": {"annotations": annotations}})
                await asyncio.sleep(0.3)
            slo = await eventually(lambda: read(client, NODE_SLOS, "n"))
            await set_config(
                client,
                {
                    "colocation-config": '{"enable":true,"metricReportIntervalSeconds":30}',
                    "resource-threshold-config": '{"clusterStrategy":{"enable":true}}',
                },
            )

            async def followed() -> bool:
                stored = await read(client, NODE_SLOS, "n")
                return bool(stored["metadata"]["generation"] > slo["metadata"]["generation"])

            await eventually(followed)
            certificates = await read(client, SECRETS, SECRET_NAME, NAMESPACE)
            broken = {"data": {"cert.pem": "AAAA"}}
            await _patch(client, SECRETS, SECRET_NAME, broken, NAMESPACE)
            touch = {"metadata": {"annotations": {"touched": "1"}}}
            await _patch(client, MUTATING_WEBHOOKS, MUTATING_NAME, touch)

            async def renewed() -> bool:
                stored = await read(client, SECRETS, SECRET_NAME, NAMESPACE)
                return stored["data"]["cert.pem"] not in (
                    "AAAA",
                    certificates["data"]["cert.pem"],
                )

            await eventually(renewed)
            await client.delete(NODES, "n")

            async def gone() -> bool:
                return not any(
                    [await read(client, kind, "n") for kind in (NODE_SLOS, NODE_METRICS)]
                )

            await eventually(gone)


async def _resources_are_offered(client: Client) -> None:
    amounts = {"cpu": "16", "memory": "64Gi"}
    await _patch(
        client, NODES, "n", {"status": {"capacity": amounts, "allocatable": amounts}}, status=True
    )
    zone = {"name": "cpu", "capacity": "16", "allocatable": "16", "available": "16"}
    await _create(
        client,
        NODE_RESOURCE_TOPOLOGIES,
        {
            "metadata": {"name": "n"},
            "topologyPolicies": ["None"],
            "zones": [{"name": "node-0", "type": "Node", "resources": [zone]}],
        },
    )
    await _create(
        client,
        DEVICES,
        {
            "metadata": {"name": "n", "labels": {"node.koordinator.sh/gpu-model": "A100"}},
            "spec": {
                "devices": [
                    {
                        "type": "gpu",
                        "id": "0",
                        "minor": 0,
                        "health": True,
                        "resources": {"koordinator.sh/gpu-core": "100"},
                    }
                ]
            },
        },
    )
    await write_report(client, "n")

    async def offered() -> bool:
        node = await read(client, NODES, "n")
        zones = (await read(client, NODE_RESOURCE_TOPOLOGIES, "n"))["zones"]
        return (
            "kubernetes.io/batch-cpu" in node["status"]["allocatable"]
            and "node.koordinator.sh/gpu-model" in node["metadata"]["labels"]
            and any(amount["name"] == "kubernetes.io/batch-cpu" for amount in zones[0]["resources"])
        )

    await eventually(offered)


async def _quotas_are_made_and_booked(client: Client) -> None:
    await _create(
        client,
        QUOTA_PROFILES,
        {
            "metadata": {"name": "tree", "namespace": "default"},
            "spec": {"quotaName": "root", "nodeSelector": {"matchLabels": {"pool": "x"}}},
        },
    )
    await eventually(lambda: read(client, ELASTIC_QUOTAS, "root", "default"))
    await _create(
        client,
        ELASTIC_QUOTAS,
        {
            "metadata": {"name": "leaf", "namespace": "default"},
            "spec": {"min": {"cpu": "1"}, "max": {"cpu": "4"}},
        },
    )
    labels = {"team": "late", "quota.scheduling.koordinator.sh/name": "leaf"}
    container = {"name": "a", "image": "x", "resources": {"requests": {"cpu": "1"}}}

    async def booked() -> bool:
        await client.delete(PODS, "waits", namespace="default")
        metadata = {"name": "waits", "namespace": "default", "labels": labels}
        await _create(client, PODS, {"metadata": metadata, "spec": {"containers": [container]}})
        stored = await read(client, ELASTIC_QUOTAS, "leaf", "default")
        key = "quota.scheduling.koordinator.sh/child-request"
        return key in stored["metadata"]["annotations"]

    # The quota has to reach admission's cache first.
    await asyncio.sleep(0.3)
    await eventually(booked)
    await _create(
        client,
        PROFILES,
        {
            "metadata": {
                "name": "late",
                "labels": {"config.koordinator.sh/controller-managed": "true"},
            },
            "spec": {"selector": {"matchLabels": {"team": "late"}}, "labels": {"seen": "yes"}},
        },
    )

    async def profiled() -> bool:
        return "seen" in (await read(client, PODS, "waits", "default"))["metadata"]["labels"]

    await eventually(profiled)


async def _create(client: Client, resource: Resource, plain: dict[str, Any]) -> None:
    namespace = plain["metadata"].get("namespace", "")
    await client.create(resource, encode_object(resource, plain), namespace=namespace)


async def _patch(
    client: Client,
    resource: Resource,
    name: str,
    plain: dict[str, Any],
    namespace: str = "",
    *,
    status: bool = False,
) -> None:
    subresource = "status" if status else ""
    body = json.dumps(plain).encode()
    await client.patch(resource, name, body, namespace=namespace, subresource=subresource)


async def grant(client: Client, user: str) -> None:
    """Give `user` the manager's rights and no others."""
    subject = {"apiGroup": _RBAC, "kind": "User", "name": user}
    for kind, rules, namespace in (
        ("ClusterRole", CLUSTER_RULES, ""),
        ("Role", NAMESPACE_RULES, NAMESPACE),
    ):
        role = Resource(_RBAC, "v1", f"{kind.lower()}s", kind, bool(namespace))
        binding = Resource(
            _RBAC, "v1", f"{kind.lower()}bindings", f"{kind}Binding", bool(namespace)
        )
        metadata = {"name": "koord-manager-test"}
        body = encode_object(role, {"metadata": metadata, "rules": list(rules)})
        await client.create(role, body, namespace=namespace)
        bound = {
            "metadata": metadata,
            "subjects": [subject],
            "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": metadata["name"]},
        }
        await client.create(binding, encode_object(binding, bound), namespace=namespace)


def test_the_manager_does_all_its_work_under_its_own_rights(
    server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with server.client() as client:
            await grant(client, USER)
            await register_webhooks(client)
            config = {"colocation-config": '{"enable":true}', "cpu-burst-config": "{"}
            await set_config(client, config)
            await _create(client, NODES, {"metadata": {"name": "rights"}})
            gates = (
                "--feature-gates=NodeMutatingWebhook=true,ColocationProfileController=true,"
                "ConfigMapValidatingWebhook=true,ReservationMutatingWebhook=true"
            )
            async with manager(server, [gates], user=USER, webhooks=True) as one:
                await eventually(lambda: one.leading)
                await eventually(lambda: read(client, NODE_SLOS, "rights"))
                await eventually(lambda: read(client, NODE_METRICS, "rights"))
                registered = await read(
                    client, MUTATING_WEBHOOKS, "koordinator-mutating-webhook-configuration"
                )
                called = {hook["name"] for hook in registered["webhooks"]}
                assert called == {
                    "mpod-create.koordinator.sh",
                    "mpod-update.koordinator.sh",
                    "melasticquota.koordinator.sh",
                    "mnode-status.koordinator.sh",
                    "mreservation-create.koordinator.sh",
                }
                await client.delete(NODES, "rights")

                async def gone() -> bool:
                    return await read(client, NODE_SLOS, "rights") is None

                await eventually(gone)
        assert "Forbidden" not in caplog.text
        # It may not read what it does not need.
        async with server.client(USER) as client:
            for path in ("/api/v1/secrets", "/api/v1/namespaces/default/configmaps"):
                with pytest.raises(ApiError, match="forbidden"):
                    await client.request("GET", path)

    asyncio.run(run())
