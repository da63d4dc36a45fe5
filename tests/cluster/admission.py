"""Caches and requests for admission tests, without an API server."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from apis.core import Namespace, PriorityClassObject
from apis.decode import Wire, dec_hook
from apis.profile import ClusterColocationProfile
from apis.quota import ElasticQuota, ElasticQuotaProfile
from cluster.gates import parse_gates
from cluster.quota_tree import QuotaTree
from cluster.webhook.enhanced import EnhancedRules
from cluster.webhook.pod import PodAdmission, PodCaches
from kube.cache import Cache
from kube.client import Client
from kube.connection import Connection
from kube.resources import (
    ELASTIC_QUOTAS,
    NAMESPACES,
    PRIORITY_CLASSES,
    PROFILES,
    QUOTA_PROFILES,
    Resource,
)
from kube.webhook import (
    AdmissionRequest,
    FollowUp,
    GroupVersionKind,
    GroupVersionResource,
    UserInfo,
    Verdict,
)

_uids = itertools.count()


def filled(resource: Resource, type_: type[Any], *objects: dict[str, Any]) -> Cache[Any]:
    """Return a cache that holds `objects`."""
    cache: Cache[Any] = Cache(Client(Connection("http://localhost")), resource, type_)
    for plain in objects:
        cache.put(msgspec.convert(plain, type_, dec_hook=dec_hook))
    return cache


def convert(plain: dict[str, Any], type_: type[Wire]) -> Any:
    return msgspec.convert(plain, type_, dec_hook=dec_hook)


def admission(
    *,
    profiles: list[dict[str, Any]] | None = None,
    quotas: list[dict[str, Any]] | None = None,
    quota_profiles: list[dict[str, Any]] | None = None,
    gates: str = "",
    rules: EnhancedRules | None = None,
) -> PodAdmission:
    stored = filled(ELASTIC_QUOTAS, ElasticQuota, *(quotas or ()))
    return PodAdmission(
        PodCaches(
            profiles=filled(PROFILES, ClusterColocationProfile, *(profiles or ())),
            namespaces=filled(
                NAMESPACES,
                Namespace,
                {"metadata": {"name": "default", "labels": {"tier": "app"}}},
                {"metadata": {"name": "ml", "labels": {"tier": "batch"}}},
            ),
            priority_classes=filled(
                PRIORITY_CLASSES,
                PriorityClassObject,
                {
                    "metadata": {"name": "koord-batch"},
                    "value": 5000,
                    "preemptionPolicy": "PreemptLowerPriority",
                },
                {"metadata": {"name": "koord-mid"}, "value": 7000},
            ),
            quotas=stored,
            quota_profiles=filled(QUOTA_PROFILES, ElasticQuotaProfile, *(quota_profiles or ())),
        ),
        parse_gates(gates),
        lambda: QuotaTree(stored.items.values()),
        lambda: rules or EnhancedRules(),
    )


def request(
    obj: dict[str, Any] | None,
    *,
    old: dict[str, Any] | None = None,
    kind: str = "Pod",
    resource: str = "pods",
    sub_resource: str = "",
    operation: str = "CREATE",
    namespace: str = "default",
    name: str = "",
    user: str = "",
    dry_run: bool | None = None,
) -> AdmissionRequest:
    shown = obj or old or {}
    return AdmissionRequest(
        uid=f"uid-{next(_uids)}",
        kind=GroupVersionKind(kind=kind),
        resource=GroupVersionResource(resource=resource),
        sub_resource=sub_resource,
        operation=operation,
        namespace=namespace,
        name=name or shown.get("metadata", {}).get("name", ""),
        user_info=UserInfo(username=user),
        object=msgspec.Raw(msgspec.json.encode(obj)),
        old_object=msgspec.Raw(msgspec.json.encode(old)),
        dry_run=dry_run,
    )


async def settled(judged: Verdict | FollowUp) -> Verdict:
    """Return the verdict, after the follow-up where there is one."""
    return judged if isinstance(judged, Verdict) else await judged()


def patched(obj: dict[str, Any], verdict: Verdict) -> Any:
    """Return `obj` after the verdict's JSON patch, applied independently of how it was made."""
    document: Any = msgspec.json.decode(msgspec.json.encode(obj))
    for operation in verdict.patch:
        steps = [
            step.replace("~1", "/").replace("~0", "~") for step in operation["path"].split("/")[1:]
        ]
        if not steps:
            document = operation["value"]
            continue
        target = document
        for step in steps[:-1]:
            target = target[int(step)] if isinstance(target, list) else target[step]
        key: Any = int(steps[-1]) if isinstance(target, list) else steps[-1]
        if operation["op"] == "remove":
            del target[key]
        else:
            target[key] = operation["value"]
    return document
