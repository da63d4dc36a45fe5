"""ElasticQuotas at admission: defaults on creation, the rules of the tree on every change.

Defaults: the parent is the root quota, the tree id is the parent's, and the shared weight has the
keys of `spec.max`, with its amounts where none was given. The rules are in cluster/quota_tree.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from apis.core import Pod
from apis.decode import canonical_json, decode_object
from apis.errors import InputErrors
from apis.keys import (
    ANNOTATION_QUOTA_SHARED_WEIGHT,
    LABEL_QUOTA_NAME,
    LABEL_QUOTA_PARENT,
    LABEL_QUOTA_TREE_ID,
    ROOT_QUOTA,
)
from apis.quantity import ResourceList
from apis.quota import ElasticQuota
from cluster.gates import Gates
from cluster.metrics import ManagerMetrics
from cluster.quota_tree import (
    QuotaRefused,
    QuotaRules,
    QuotaTree,
    bound_namespaces,
    check_create,
    check_delete,
    check_update,
    quota_node,
    quota_ref,
    resource_annotation,
)
from cluster.webhook.pending_quotas import PendingQuotas, with_pending
from cluster.webhook.plain import plain_object
from kube.cache import Index
from kube.patches import json_patch
from kube.webhook import ALLOWED, AdmissionRequest, Verdict, denied


class QuotaAdmission:
    """Mutates and validates ElasticQuotas."""

    def __init__(
        self,
        tree: Callable[[], QuotaTree],
        pods_by_quota: Index[str, Pod],
        unlabelled_pods: Index[str, Pod],
        gates: Gates,
        metrics: ManagerMetrics,
    ) -> None:
        """pods_by_quota: pods by their quota label. unlabelled_pods: the others by namespace."""
        self._tree = tree
        self._pods = pods_by_quota
        self._unlabelled = unlabelled_pods
        self._metrics = metrics
        self._pending = PendingQuotas()
        self._one_at_a_time = threading.Lock()
        """Large reviews are answered in threads, and a review counts what the former admitted."""
        self._rules = QuotaRules(
            guarantee_usage=gates.on("ElasticQuotaGuaranteeUsage"),
            update_resource_key=gates.on("ElasticQuotaEnableUpdateResourceKey"),
        )

    def mutate(self, request: AdmissionRequest) -> Verdict:
        """Fill in parent, tree-id and shared weight of a new quota."""
        if request.resource.resource != "elasticquotas" or request.operation != "CREATE":
            return ALLOWED
        before = plain_object(request)
        quota = decode_object(before, ElasticQuota, obj=request.ref)
        try:
            after = self._defaulted(before, quota)
        except QuotaRefused as error:
            return denied(str(error), code=400)
        return Verdict(True, patch=tuple(json_patch(before, after)))

    def _defaulted(self, plain: Mapping[str, Any], quota: ElasticQuota) -> dict[str, Any]:
        if quota.metadata.name == ROOT_QUOTA:
            return dict(plain)
        labels = dict(quota.metadata.labels)
        annotations = dict(quota.metadata.annotations)
        if not labels.get(LABEL_QUOTA_PARENT):
            labels[LABEL_QUOTA_PARENT] = ROOT_QUOTA
        parent = labels[LABEL_QUOTA_PARENT]
        if not labels.get(LABEL_QUOTA_TREE_ID) and parent != ROOT_QUOTA:
            above = self._tree().nodes.get(parent)
            if above is None:
                raise QuotaRefused(f"{quota_ref(quota)}: parent {parent} does not exist")
            if above.tree_id:
                labels[LABEL_QUOTA_TREE_ID] = above.tree_id
        weight = resource_annotation(quota, ANNOTATION_QUOTA_SHARED_WEIGHT)
        wanted: ResourceList = {
            name: weight.get(name, amount) for name, amount in quota.spec.max.items()
        }
        if not weight or set(weight) != set(wanted):
            annotations[ANNOTATION_QUOTA_SHARED_WEIGHT] = canonical_json(wanted)
            for name, amount in wanted.items():
                self._metrics.quota_shared_weight.labels(quota.metadata.name, name).set(
                    amount.value()
                )
        metadata = {**(plain.get("metadata") or {}), "labels": labels}
        if annotations:
            metadata["annotations"] = annotations
        return {**plain, "metadata": metadata}

    def validate(self, request: AdmissionRequest) -> Verdict:
        """Refuse a change that breaks the tree."""
        if request.resource.resource != "elasticquotas" or request.sub_resource:
            return ALLOWED
        try:
            with self._one_at_a_time:
                self._check(request)
        except (QuotaRefused, InputErrors) as error:
            return denied(str(error), code=400)
        return ALLOWED

    def _check(self, request: AdmissionRequest) -> None:
        match request.operation:
            case "CREATE":
                new = _quota(bytes(request.object), request.ref)
                check_create(self._tree_besides(new), new, self._rules)
                self._admit(request, new)
            case "UPDATE":
                new = _quota(bytes(request.object), request.ref)
                old = _quota(bytes(request.old_object), request.ref)
                tree = self._tree_besides(new)
                check_update(tree, old, new, self._rules, pods=self._using(old))
                self._admit(request, new)
            case "DELETE":
                old = _quota(bytes(request.old_object), request.ref)
                tree = self._tree_besides(old)
                pods = (
                    f"{pod.metadata.namespace}/{pod.metadata.name}"
                    for pod in self._pods.get(old.metadata.name)
                )
                check_delete(tree, old, pods=pods)
            case _:
                return

    def _tree_besides(self, quota: ElasticQuota) -> QuotaTree:
        """Return the tree in which all other quotas count that were admitted."""
        tree, meta = self._tree(), quota.metadata
        pending = self._pending.besides(tree, namespace=meta.namespace, name=meta.name)
        for other in pending:
            if other.name == meta.name:
                raise QuotaRefused(
                    f"{quota_ref(quota)}: quota names must be unique in the cluster, and "
                    f"ElasticQuota {other.namespace}/{other.name} is being created"
                )
        return with_pending(tree, pending)

    def _admit(self, request: AdmissionRequest, quota: ElasticQuota) -> None:
        node = quota_node(quota)
        if request.dry_run is not True and self._tree().nodes.get(node.name) != node:
            self._pending.note(node)

    def _using(self, quota: ElasticQuota) -> int:
        """Return how many pods name the quota, or use it because of where they live."""
        name = quota.metadata.name
        namespaces = {name, *bound_namespaces(quota)}
        return self._pods.count(name) + sum(map(self._unlabelled.count, namespaces))


def quota_topology(tree: QuotaTree) -> bytes:
    """Return the JSON of `GET /elasticQuota`: upstream's summary of quotas and their children."""
    summary = {
        node.name: {
            "name": node.name,
            "parentName": node.parent,
            "isParent": node.is_parent,
            "allowLentResource": node.lends,
            "max": node.max,
            "min": node.min,
        }
        for node in tree.nodes.values()
    }
    below = {
        name: sorted(child.name for child in tree.children.get(name, ()))
        for name in {ROOT_QUOTA, *tree.nodes}
    }
    return canonical_json({"quotaInfoMap": summary, "quotaHierarchyInfo": below}).encode()


def by_quota(pod: Pod) -> tuple[str, ...]:
    """Return the quota that a pod's label names; for an index."""
    name = pod.metadata.labels.get(LABEL_QUOTA_NAME)
    return (name,) if name else ()


def unlabelled(pod: Pod) -> tuple[str, ...]:
    """Return the namespace of a pod whose label names no quota; for an index."""
    return () if pod.metadata.labels.get(LABEL_QUOTA_NAME) else (pod.metadata.namespace,)


def _quota(raw: bytes, obj: str) -> ElasticQuota:
    return decode_object(raw, ElasticQuota, obj=obj)
