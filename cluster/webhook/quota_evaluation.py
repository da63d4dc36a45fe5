"""Quota evaluation: what a new pod asks for is booked on its quota before the pod exists.

Requests of one quota are answered one after the other; the sum is written with an optimistic
lock, so two replicas cannot both grant the last CPU. A booking is not taken back when a later
admission step refuses the pod: the scheduler rewrites the sum from the pods that exist.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from apis.core import Pod, pod_requests
from apis.decode import canonical_json, decode_object
from apis.keys import (
    ANNOTATION_QUOTA_ADMISSION,
    ANNOTATION_QUOTA_CHILD_REQUEST,
    ANNOTATION_REPLACE_RESOURCES,
    BATCH_CPU,
    BATCH_MEMORY,
    DEFAULT_QUOTA,
    GPU,
    GPU_MEMORY_RATIO,
    GPU_SHARED,
    MID_CPU,
    MID_MEMORY,
    NVIDIA_GPU,
    ROOT_QUOTA,
    SYSTEM_QUOTA,
)
from apis.quantity import ZERO, Quantity, ResourceList, add_resources
from apis.quota import ElasticQuota, decode_elastic_quota
from cluster.gates import Gates
from cluster.quota_tree import QuotaTree, quota_ref, resource_annotation
from cluster.webhook.plain import plain_object
from cluster.webhook.pod import PodAdmission
from cluster.webhook.replace_resources import with_replaced_resources
from kube.client import ApiError, Client, Unreachable
from kube.resources import ELASTIC_QUOTAS
from kube.webhook import ALLOWED, AdmissionRequest, FollowUp, Verdict, denied

_COUNTED: Final = frozenset(
    {
        "cpu",
        "memory",
        "ephemeral-storage",
        "requests.cpu",
        "requests.memory",
        "requests.ephemeral-storage",
        BATCH_CPU,
        BATCH_MEMORY,
        MID_CPU,
        MID_MEMORY,
        GPU,
        NVIDIA_GPU,
        GPU_SHARED,
        GPU_MEMORY_RATIO,
    }
)
_UNCOUNTED_QUOTAS: Final = frozenset({"", DEFAULT_QUOTA, SYSTEM_QUOTA, ROOT_QUOTA})
_PATIENCE_SECONDS: Final = 8.0
"""Below the 10 s that the API server waits for a webhook by default."""


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How a booking that met another writer is repeated."""

    max_retries: int = 3
    jitter_seconds: float = 0.0
    max_total_jitter_seconds: float = 1.0


class QuotaEvaluator:
    """Books the requests of admitted pods on their quotas."""

    def __init__(
        self,
        client: Client,
        admission: PodAdmission,
        gates: Gates,
        tree: Callable[[], QuotaTree],
        rules: RetryRules = RetryRules(),
    ) -> None:
        self._client = client
        self._admission = admission
        self._gates = gates
        self._tree = tree
        self._rules = rules
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By quota, while a booking holds it or waits for it."""
        self._written: dict[str, ElasticQuota] = {}

    def validate(self, request: AdmissionRequest) -> Verdict | FollowUp:
        """Validate a pod; return the booking on its quota where it needs one."""
        verdict = self._admission.validate(request)
        if not verdict.allowed or not self._concerns(request):
            return verdict
        pod = decode_object(bytes(request.object), Pod, obj=request.ref)
        tree = self._tree()
        name = self._admission.quota_name(pod, request.namespace, tree)
        if name in _UNCOUNTED_QUOTAS:
            return verdict
        if request.operation == "UPDATE":
            old = decode_object(bytes(request.old_object), Pod, obj=request.ref)
            if self._admission.quota_name(old, request.namespace, tree) == name:
                return verdict
        node = tree.nodes.get(name)
        if node is None:
            return denied(f"{request.ref}: elastic quota {name} not found", code=400)
        if name in tree.ambiguous:
            problem = f"several elastic quotas are named {name}; names must be unique"
            return denied(f"{request.ref}: {problem}", code=400)
        requested = self._requested(request, pod)
        if not requested:
            return verdict
        return partial(
            self._booked,
            request.ref,
            node.namespace,
            name,
            requested,
            book=request.dry_run is not True,
        )

    async def _booked(
        self, ref: str, namespace: str, name: str, requested: ResourceList, *, book: bool
    ) -> Verdict:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                return await self._book(namespace, name, requested, book=book)
        except TimeoutError:
            return denied(f"{ref}: elastic quota evaluation timed out", code=500)
        except (ApiError, Unreachable) as error:
            return denied(f"{ref}: elastic quota {name}: {error}", code=500)

    def _concerns(self, request: AdmissionRequest) -> bool:
        if request.resource.resource != "pods" or request.sub_resource:
            return False
        if not self._gates.on("EnableQuotaAdmission"):
            return False
        if request.operation == "UPDATE":
            return self._gates.on("EnableQuotaAdmissionOnUpdate")
        return request.operation == "CREATE"

    def _requested(self, request: AdmissionRequest, pod: Pod) -> ResourceList:
        text = pod.metadata.annotations.get(ANNOTATION_REPLACE_RESOURCES)
        if (
            text
            and self._gates.on("ElasticQuotaEvaluationTransformPod")
            and self._gates.on("ReplaceResourcesTransformer")
        ):
            counted = with_replaced_resources(plain_object(request), text, obj=request.ref)
            pod = decode_object(counted, Pod, obj=request.ref)
        return {name: amount for name, amount in pod_requests(pod).items() if amount}

    async def _book(
        self, namespace: str, name: str, requested: ResourceList, *, book: bool
    ) -> Verdict:
        key = f"{namespace}/{name}"
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        async with lock:
            jitter_left = self._rules.max_total_jitter_seconds
            for _ in range(max(3, self._rules.max_retries) + 1):
                remembered = self._written.pop(key, None)
                if remembered is not None:
                    quota = remembered
                else:
                    quota = await self._client.get(
                        ELASTIC_QUOTAS, name, decode_elastic_quota, namespace=namespace
                    )
                masked = masked_request(quota, requested)
                if not masked:
                    return ALLOWED
                problem = exceeded(quota, masked)
                if problem and remembered is not None:
                    # Pods may have ended since: read the quota again before refusing.
                    continue
                if problem:
                    return denied(problem)
                if not book:
                    return ALLOWED
                try:
                    await self._write(key, quota, masked)
                except ApiError as error:
                    if not error.conflict:
                        raise
                else:
                    return ALLOWED
                pause = random.uniform(0.5, 1.0) * self._rules.jitter_seconds
                if 0 < pause <= jitter_left:
                    jitter_left -= pause
                    await asyncio.sleep(pause)
            return denied(f"elastic quota {key}: too many writers, try again", code=500)

    async def _write(self, key: str, quota: ElasticQuota, masked: ResourceList) -> None:
        used = add_resources(resource_annotation(quota, ANNOTATION_QUOTA_CHILD_REQUEST), masked)
        patch = {
            "metadata": {
                "resourceVersion": quota.metadata.resource_version,
                "annotations": {ANNOTATION_QUOTA_CHILD_REQUEST: canonical_json(used)},
            }
        }
        stored = await self._client.patch(
            ELASTIC_QUOTAS,
            quota.metadata.name,
            msgspec.json.encode(patch),
            namespace=quota.metadata.namespace,
        )
        self._written[key] = decode_elastic_quota(stored)
        # Chosen: a bound for the memory; without its entry a booking may meet one conflict more.
        if len(self._written) > 1000:
            self._written.clear()


def masked_request(quota: ElasticQuota, requested: ResourceList) -> ResourceList:
    """Return the part of a request that a quota counts; empty if no requested resource counts."""
    if not _COUNTED & set(quota.spec.max):
        return {}
    return {name: amount for name, amount in requested.items() if name in quota.spec.max}


def exceeded(quota: ElasticQuota, requested: Mapping[str, Quantity]) -> str | None:
    """Return how a request exceeds what a quota has left, or None."""
    limit = resource_annotation(quota, ANNOTATION_QUOTA_ADMISSION) or quota.spec.max
    used = resource_annotation(quota, ANNOTATION_QUOTA_CHILD_REQUEST)
    over = sorted(
        name
        for name, amount in requested.items()
        if name in limit and used.get(name, ZERO) + amount > limit[name]
    )
    if not over:
        return None
    ref = quota_ref(quota).removeprefix("ElasticQuota ")

    def shown(resources: Mapping[str, Quantity]) -> str:
        return ",".join(f"{name}={resources.get(name, ZERO)}" for name in over)

    return (
        f"exceeded quota: {ref}, requested: {shown(requested)}, "
        f"used: {shown(used)}, limited: {shown(limit)}"
    )
