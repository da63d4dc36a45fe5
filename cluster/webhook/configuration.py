"""The webhook configuration objects: what is registered, and how the manager keeps it true.

The table below is the one place that names webhooks; manifests are made from it. At run time the
manager puts its CA and address into the objects. It works on what the annotation `template` holds
(the list as applied), so webhooks whose gate is off can come back when it is switched on; a newly
applied manifest resets the annotation and thereby wins. Names and paths are upstream's.

A configuration is made true in this order: certificates stored, CA trusted (old and new), and only
then served, so that no call meets a certificate that it cannot trust.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from apis.keys import ANNOTATION_WEBHOOK_TEMPLATE, LABEL_CONFIGMAP_TYPE, LABEL_CONTROL_PLANE
from cluster.gates import Gates
from kube.client import Client, retry_on_conflict
from kube.resources import MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS, Resource

_log = logging.getLogger(__name__)

MUTATING_NAME: Final = "koordinator-mutating-webhook-configuration"
VALIDATING_NAME: Final = "koordinator-validating-webhook-configuration"
SERVICE_NAME: Final = "koordinator-webhook-service"


@dataclass(frozen=True, slots=True)
class Webhook:
    """One registered webhook. gates: all must be on for it to be called."""

    name: str
    path: str
    mutating: bool
    gate: str
    operations: tuple[str, ...]
    group: str
    version: str
    resource: str
    failure_policy: str
    exempt_control_plane: bool = False
    object_selector: tuple[str, str] | None = None
    """(label, value) that an object must carry."""


_QUOTAS: Final = ("scheduling.sigs.k8s.io", "v1alpha1", "elasticquotas")

WEBHOOKS: Final = (
    Webhook(
        "mpod-create.koordinator.sh",
        "/mutate-pod",
        True,
        "PodMutatingWebhook",
        ("CREATE",),
        "",
        "v1",
        "pods",
        "Fail",
        exempt_control_plane=True,
    ),
    Webhook(
        "mpod-update.koordinator.sh",
        "/mutate-pod",
        True,
        "PodMutatingWebhook",
        ("UPDATE",),
        "",
        "v1",
        "pods",
        "Fail",
        exempt_control_plane=True,
        object_selector=("pod.koordinator.sh/mutating-update", "true"),
    ),
    Webhook(
        "melasticquota.koordinator.sh",
        "/mutate-scheduling-sigs-k8s-io-v1alpha1-elasticquota",
        True,
        "ElasticMutatingWebhook",
        ("CREATE",),
        *_QUOTAS,
        "Fail",
    ),
    Webhook(
        "mnode-status.koordinator.sh",
        "/mutate-node-status",
        True,
        "NodeMutatingWebhook",
        ("CREATE", "UPDATE"),
        "",
        "v1",
        "nodes/status",
        "Ignore",
    ),
    Webhook(
        "mreservation-create.koordinator.sh",
        "/mutate-reservation",
        True,
        "ReservationMutatingWebhook",
        ("CREATE",),
        "scheduling.koordinator.sh",
        "v1alpha1",
        "reservations",
        "Fail",
    ),
    Webhook(
        "vpod.koordinator.sh",
        "/validate-pod",
        False,
        "PodValidatingWebhook",
        ("CREATE", "UPDATE"),
        "",
        "v1",
        "pods",
        "Fail",
        exempt_control_plane=True,
    ),
    Webhook(
        "vpodbinding.koordinator.sh",
        "/validate-pod-binding",
        False,
        "BindingAdmissionWebhook",
        ("CREATE",),
        "",
        "v1",
        "pods/binding",
        "Ignore",
    ),
    Webhook(
        "velasticquota.koordinator.sh",
        "/validate-scheduling-sigs-k8s-io-v1alpha1-elasticquota",
        False,
        "ElasticValidatingWebhook",
        ("CREATE", "UPDATE", "DELETE"),
        *_QUOTAS,
        "Fail",
    ),
    Webhook(
        "vnode.koordinator.sh",
        "/validate-node",
        False,
        "NodeValidatingWebhook",
        ("CREATE", "UPDATE"),
        "",
        "v1",
        "nodes",
        "Ignore",
    ),
    Webhook(
        "vconfigmap.koordinator.sh",
        "/validate-configmap",
        False,
        "ConfigMapValidatingWebhook",
        ("CREATE", "UPDATE", "DELETE"),
        "",
        "v1",
        "configmaps",
        "Fail",
        object_selector=(LABEL_CONFIGMAP_TYPE, "slo-controller-config"),
    ),
)


def webhook_manifest(webhook: Webhook, *, namespace: str) -> dict[str, Any]:
    """Return the entry of a webhook configuration as it is installed."""
    entry: dict[str, Any] = {
        "name": webhook.name,
        "admissionReviewVersions": ["v1", "v1beta1"],
        "clientConfig": {
            "service": {"namespace": namespace, "name": SERVICE_NAME, "path": webhook.path}
        },
        "failurePolicy": webhook.failure_policy,
        "matchPolicy": "Equivalent",
        "rules": [
            {
                "apiGroups": [webhook.group],
                "apiVersions": [webhook.version],
                "operations": list(webhook.operations),
                "resources": [webhook.resource],
            }
        ],
        "sideEffects": "None",
        # The default of Kubernetes; a longer one would delay pods while a replica hangs.
        "timeoutSeconds": 10,
    }
    if webhook.exempt_control_plane:
        entry["namespaceSelector"] = {
            "matchExpressions": [{"key": LABEL_CONTROL_PLANE, "operator": "DoesNotExist"}]
        }
    if webhook.object_selector is not None:
        key, value = webhook.object_selector
        entry["objectSelector"] = {
            "matchExpressions": [{"key": key, "operator": "In", "values": [value]}]
        }
    return entry


def configuration_manifest(*, mutating: bool, namespace: str) -> dict[str, Any]:
    """Return one of the two configuration objects as it is installed."""
    resource = MUTATING_WEBHOOKS if mutating else VALIDATING_WEBHOOKS
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {
            "name": MUTATING_NAME if mutating else VALIDATING_NAME,
            # Applying this file resets the annotation, so the list below takes effect.
            "annotations": {ANNOTATION_WEBHOOK_TEMPLATE: ""},
        },
        "webhooks": [
            webhook_manifest(webhook, namespace=namespace)
            for webhook in WEBHOOKS
            if webhook.mutating is mutating
        ],
    }


def active_paths(gates: Gates) -> frozenset[str]:
    """Return the paths that are served under these gates."""
    if not gates.on("WebhookFramework"):
        return frozenset()
    return frozenset(webhook.path for webhook in WEBHOOKS if gates.on(webhook.gate))


@dataclass(frozen=True, slots=True)
class Address:
    """Where the API server reaches us: a Service, or a host outside the cluster."""

    namespace: str
    service: str = SERVICE_NAME
    host: str = ""
    port: int = 9876

    @property
    def dns_names(self) -> tuple[str, ...]:
        """Return the names that the certificate must carry."""
        if self.host:
            return (self.host, "localhost")
        base = f"{self.service}.{self.namespace}"
        return (f"{base}.svc", base, f"{base}.svc.cluster.local", "localhost")


class ConfigurationMissing(Exception):
    """A webhook configuration object is not installed."""


class _Stored(msgspec.Struct, rename="camel"):
    metadata: dict[str, Any]
    webhooks: list[dict[str, Any]] = msgspec.field(default_factory=list)


_decode = msgspec.json.Decoder(_Stored).decode


def wanted_webhooks(
    template: list[dict[str, Any]],
    *,
    ca_bundle: bytes,
    address: Address,
    active: frozenset[str],
) -> list[dict[str, Any]]:
    """Return the webhooks of `template` that are served, with CA and address filled in."""
    result = []
    for entry in template:
        path = _path(entry)
        if path not in active:
            continue
        config: dict[str, Any] = {"caBundle": base64.b64encode(ca_bundle).decode()}
        if address.host:
            config["url"] = f"https://{address.host}:{address.port}{path}"
        else:
            given = (entry.get("clientConfig") or {}).get("service") or {}
            config["service"] = {
                "namespace": address.namespace,
                "name": address.service,
                "path": path,
                **({"port": given["port"]} if "port" in given else {}),
            }
        result.append({**entry, "clientConfig": config})
    return result


def _path(entry: Mapping[str, Any]) -> str:
    config = entry.get("clientConfig") or {}
    service = config.get("service") or {}
    if service.get("path"):
        return str(service["path"])
    # A live entry for a host outside the cluster has a URL instead.
    _, _, rest = str(config.get("url", "")).partition("://")
    return "/" + rest.partition("/")[2]


async def sync_configuration(
    client: Client,
    resource: Resource,
    name: str,
    *,
    ca_bundle: bytes,
    address: Address,
    active: frozenset[str],
) -> bool:
    """Make one configuration object true; return whether it was written.

    Raises ConfigurationMissing, ApiError, Unreachable.
    """

    async def write() -> bool:
        stored = await client.find(resource, name, _decode)
        if stored is None:
            raise ConfigurationMissing(
                f"{resource.kind} {name} does not exist; apply deploy/manager/50-webhooks.yaml"
            )
        annotations = stored.metadata.get("annotations") or {}
        text = annotations.get(ANNOTATION_WEBHOOK_TEMPLATE) or ""
        template = _template(text)
        if template is None:
            text, template = "", _without_bundles(stored.webhooks)
        wanted = wanted_webhooks(template, ca_bundle=ca_bundle, address=address, active=active)
        if text and _comparable(stored.webhooks) == _comparable(wanted):
            return False
        kept = text or msgspec.json.encode(template).decode()
        patch = {
            "metadata": {
                "resourceVersion": stored.metadata.get("resourceVersion"),
                "annotations": {ANNOTATION_WEBHOOK_TEMPLATE: kept},
            },
            "webhooks": wanted,
        }
        await client.patch(resource, name, msgspec.json.encode(patch))
        return True

    return await retry_on_conflict(write)


def _template(text: str) -> list[dict[str, Any]] | None:
    """Return the list that the annotation holds, None if it holds none that can be used."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=list[dict[str, Any]])
    except (msgspec.DecodeError, RecursionError):
        _log.warning(
            "annotation %s is not a list of webhooks; the live list is used",
            ANNOTATION_WEBHOOK_TEMPLATE,
        )
        return None


def _without_bundles(webhooks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            **entry,
            "clientConfig": {
                key: value
                for key, value in (entry.get("clientConfig") or {}).items()
                if key != "caBundle"
            },
        }
        for entry in webhooks
    ]


_DEFAULTS: Final[Mapping[str, Any]] = {
    "matchPolicy": "Equivalent",
    "failurePolicy": "Fail",
    "timeoutSeconds": 10,
    "namespaceSelector": {},
    "objectSelector": {},
    "reinvocationPolicy": "Never",
}


def _comparable(webhooks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    result = []
    for entry in webhooks:
        config = dict(entry.get("clientConfig") or {})
        if "service" in config:
            config["service"] = {"port": 443, **config["service"]}
        rules = [{"scope": "*", **rule} for rule in entry.get("rules") or ()]
        result.append({**_DEFAULTS, **entry, "clientConfig": config, "rules": rules})
    return result
