"""Pods at admission: brought into co-location, and refused where they contradict themselves.

Both handlers answer from caches only. A new pod is changed in four steps: profiles, the annotation
that node hooks read limits from, the node selector of its quota tree, and GPU shares. A pod is
refused for the first of these: the scheduler's own annotation, a QoS class that its priority or its
resources contradict, a parent quota, contradicting GPU requests, a missing required label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from apis.core import Namespace, Pod, PriorityClassObject, pod_priority_class_with_default
from apis.core import pod_requests as requests_of
from apis.decode import decode_object
from apis.errors import InputErrors
from apis.keys import (
    ANNOTATION_RESERVE_POD,
    BATCH_CPU,
    BATCH_MEMORY,
    CPU,
    GPU,
    GPU_CORE,
    GPU_MEMORY,
    GPU_MEMORY_RATIO,
    GPU_SHARED,
    HUAWEI_NPU_CORE,
    LABEL_PREEMPTIBLE,
    LABEL_PRIORITY,
    LABEL_QUOTA_NAME,
    LABEL_QUOTA_TREE_ID,
    LABEL_SKIP_ENHANCED_VALIDATION,
)
from apis.profile import ClusterColocationProfile
from apis.qos import PriorityClass, QoSClass, priority_class, qos_class
from apis.quantity import ZERO, Quantity
from apis.quota import ElasticQuota, ElasticQuotaProfile
from cluster.gates import Gates
from cluster.quota_tree import QuotaTree, quota_of_pod
from cluster.webhook.colocation_profile import (
    BadProfiles,
    apply_profile,
    drawn_profiles,
    labels_of,
    matching_profiles,
    pod_identity,
    skips_resources,
)
from cluster.webhook.enhanced import EnhancedRules
from cluster.webhook.plain import PodShape, shaped_object
from cluster.webhook.pod_resources import (
    extended_resource_spec,
    gpu_resources,
    replace_resources,
)
from kube.cache import Cache
from kube.patches import json_patch
from kube.webhook import ALLOWED, AdmissionRequest, Verdict, denied


@dataclass(slots=True)
class PodCaches:
    """What pod admission looks up."""

    profiles: Cache[ClusterColocationProfile]
    namespaces: Cache[Namespace]
    priority_classes: Cache[PriorityClassObject]
    quotas: Cache[ElasticQuota]
    quota_profiles: Cache[ElasticQuotaProfile]


@dataclass(slots=True)
class PodAdmission:
    """Mutates and validates pods."""

    caches: PodCaches
    gates: Gates
    tree: Callable[[], QuotaTree]
    enhanced: Callable[[], EnhancedRules]
    _report: BadProfiles = field(default_factory=BadProfiles)

    # --- mutating ------------------------------------------------------------------------------

    def mutate(self, request: AdmissionRequest) -> Verdict:
        """Bring a new pod into co-location where a profile says so."""
        if not _is_pod(request) or request.operation != "CREATE":
            return ALLOWED
        before = shaped_object(request, PodShape)
        after = self.mutated(before, namespace=request.namespace, request_uid=request.uid)
        return Verdict(True, patch=tuple(json_patch(before, after)))

    def mutated(
        self, pod: Mapping[str, Any], *, namespace: str, request_uid: str
    ) -> dict[str, Any]:
        """Return the pod as admission wants it. Raises InputError."""
        result: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(pod))
        metadata = result.get("metadata") or {}
        obj = f"Pod {namespace}/{metadata.get('name') or metadata.get('generateName', '')}"
        result = self._apply_profiles(result, namespace, request_uid, obj)
        if not self.gates.on("DisableExtendedResourceSpec"):
            extended_resource_spec(result, obj=obj)
        if self.gates.on("MultiQuotaTree"):
            self._apply_quota_tree(result, namespace)
        if not self.gates.on("DisableDeviceResourceSpec"):
            gpu_resources(result, obj=obj)
        return result

    def _apply_profiles(
        self, pod: dict[str, Any], namespace: str, request_uid: str, obj: str
    ) -> dict[str, Any]:
        known = self.caches.namespaces.get(namespace)
        matched = matching_profiles(
            tuple(self.caches.profiles.items.values()),
            labels=labels_of(pod),
            namespace_labels=known.metadata.labels if known is not None else None,
            report=self._report,
        )
        identity = pod_identity(pod, namespace, request_uid)
        applied = drawn_profiles(matched, identity, report=self._report)
        for profile in applied:
            pod = apply_profile(pod, profile, self._priority)
        if (
            applied
            and not skips_resources(applied)
            and not self.gates.on("ColocationProfileSkipMutatingResources")
        ):
            typed = decode_object(pod, Pod, obj=obj)
            replace_resources(pod, pod_priority_class_with_default(typed), obj=obj)
        return pod

    def _priority(self, name: str) -> tuple[int, str | None] | None:
        found = self.caches.priority_classes.get(name)
        return (found.value, found.preemption_policy) if found is not None else None

    def _apply_quota_tree(self, pod: dict[str, Any], namespace: str) -> None:
        tree = self.tree()
        name = quota_of_pod(
            labels_of(pod),
            namespace,
            label=LABEL_QUOTA_NAME,
            exists=self.caches.quotas.items,
            of_namespace=tree.of_namespace,
            default="",
        )
        node = tree.nodes.get(name or namespace) or tree.nodes.get(
            tree.of_namespace.get(namespace, "")
        )
        if node is None or not node.tree_id:
            return
        profiles = sorted(self.caches.quota_profiles.items.items(), key=lambda item: item[0])
        for _, profile in profiles:
            if profile.metadata.labels.get(LABEL_QUOTA_TREE_ID) != node.tree_id:
                continue
            selector = profile.spec.node_selector
            if selector is not None:
                expressions: list[dict[str, Any]] = [
                    {"key": key, "operator": "In", "values": [value]}
                    for key, value in sorted(selector.match_labels.items())
                ]
                expressions += [
                    {
                        "key": one.key,
                        "operator": one.operator,
                        **({"values": list(one.values)} if one.values else {}),
                    }
                    for one in selector.match_expressions
                ]
                require_nodes(pod, expressions)
            return

    # --- validating ----------------------------------------------------------------------------

    def validate(self, request: AdmissionRequest) -> Verdict:
        """Refuse a pod that contradicts itself or the rules of its quota."""
        if not _is_pod(request) or request.operation not in ("CREATE", "UPDATE"):
            return ALLOWED
        obj = request.ref
        pod = _typed(request, obj)
        old = _typed_old(request, obj) if request.operation == "UPDATE" else None
        problem = self._changed(pod, old) if old is not None else None
        problem = problem or self._problem(pod, request.namespace)
        if problem and old is not None and problem == self._problem(old, request.namespace):
            # It stands already. Refusing now would only keep finalizers and labels from changing,
            # so that the pod could not even end.
            return ALLOWED
        return denied(f"{obj}: {problem}", code=400) if problem else ALLOWED

    def _problem(self, pod: Pod, namespace: str) -> str | None:
        labels = pod.metadata.labels
        return (
            _reserved(pod)
            or qos_problem(pod, qos_class(labels), priority_class(labels, pod.spec.priority))
            or self._quota(pod, namespace)
            or (_devices(pod) if self.gates.on("ValidatePodDeviceResource") else None)
            or self._enhanced(pod, namespace)
        )

    def _changed(self, pod: Pod, old: Pod) -> str | None:
        """Return what an update changes that must stay as it was created, or None."""
        labels, before = pod.metadata.labels, old.metadata.labels
        qos = qos_class(labels)
        if qos_class(before) is not qos:
            return f"the QoS class cannot change from {qos_class(before).value!r} to {qos.value!r}"
        cls = priority_class(labels, pod.spec.priority)
        if priority_class(before, old.spec.priority) is not cls:
            return "the priority class cannot change"
        if before.get(LABEL_PRIORITY, "") != labels.get(LABEL_PRIORITY, "") and not self.gates.on(
            "ColocationProfileSkipValidatingPriority"
        ):
            return f"label {LABEL_PRIORITY} cannot change"
        if before.get(LABEL_PREEMPTIBLE, "") != labels.get(LABEL_PREEMPTIBLE, ""):
            return f"label {LABEL_PREEMPTIBLE} cannot change"
        return None

    def _quota(self, pod: Pod, namespace: str) -> str | None:
        if self.gates.on("SupportParentQuotaSubmitPod"):
            return None
        tree = self.tree()
        name = self.quota_name(pod, namespace, tree)
        node = tree.nodes.get(name)
        if node is not None and node.is_parent:
            return f"quota {name} is a parent quota; pods use its leaves"
        return None

    def quota_name(self, pod: Pod, namespace: str, tree: QuotaTree) -> str:
        """Return the name of the quota that a pod counts against, "" for none."""
        labels = pod.metadata.labels
        if not labels.get(LABEL_QUOTA_NAME) and self.gates.on("DisableDefaultQuota"):
            return ""
        return quota_of_pod(
            labels,
            namespace,
            label=LABEL_QUOTA_NAME,
            exists=self.caches.quotas.items,
            of_namespace=tree.of_namespace,
        )

    def _enhanced(self, pod: Pod, namespace: str) -> str | None:
        if not self.gates.on("EnablePodEnhancedValidator"):
            return None
        if pod.metadata.labels.get(LABEL_SKIP_ENHANCED_VALIDATION) == "true":
            return None
        return self.enhanced().problem(pod.metadata.labels, namespace)


def _is_pod(request: AdmissionRequest) -> bool:
    return request.resource.resource == "pods" and not request.sub_resource


def _typed(request: AdmissionRequest, obj: str) -> Pod:
    return decode_object(bytes(request.object), Pod, obj=obj)


def _typed_old(request: AdmissionRequest, obj: str) -> Pod | None:
    try:
        return decode_object(bytes(request.old_object), Pod, obj=obj)
    except InputErrors:
        # What is stored was accepted once; a new object is judged alone then.
        return None


def _reserved(pod: Pod) -> str | None:
    if ANNOTATION_RESERVE_POD in pod.metadata.annotations:
        return f"annotation {ANNOTATION_RESERVE_POD} marks pods that only the scheduler makes"
    return None


_FORBIDDEN: Final[Mapping[QoSClass, frozenset[PriorityClass]]] = {
    QoSClass.BE: frozenset({PriorityClass.NONE, PriorityClass.PROD}),
    QoSClass.LSR: frozenset(
        {PriorityClass.NONE, PriorityClass.MID, PriorityClass.BATCH, PriorityClass.FREE}
    ),
    QoSClass.LSE: frozenset({PriorityClass.MID, PriorityClass.BATCH, PriorityClass.FREE}),
}
"""QoS class -> priority classes that it excludes. LSE without a priority passes, as upstream."""


def qos_problem(pod: Pod, qos: QoSClass, cls: PriorityClass) -> str | None:
    """Return why QoS, priority and resources of a pod do not go together, or None."""
    requests = requests_of(pod)
    for name in (BATCH_CPU, BATCH_MEMORY):
        if requests.get(name, ZERO) > ZERO and qos is not QoSClass.BE:
            return (
                f"{name} is for pods of QoS class BE, this one is {qos.value or 'without a class'}"
            )
    if cls in _FORBIDDEN.get(qos, frozenset()):
        return (
            f"QoS class {qos.value} does not go with priority class "
            f"{cls.value or 'none'} (label or spec.priority)"
        )
    if qos in (QoSClass.LSR, QoSClass.LSE):
        cpu = requests.get(CPU, ZERO)
        if cpu <= ZERO or cpu.milli_value() % 1000:
            return f"QoS class {qos.value} needs a whole number of CPUs, requested: {cpu}"
    return None


def _devices(pod: Pod) -> str | None:
    for container in pod.spec.containers:
        requests = container.resources.requests
        problem = device_problem(requests)
        if problem:
            return f"container {container.name}: {problem}"
    return None


def device_problem(requests: Mapping[str, Quantity]) -> str | None:
    """Return why the GPU requests of a container contradict each other, or None."""
    if GPU in requests and GPU_SHARED in requests:
        return f"{GPU} and {GPU_SHARED} exclude each other"
    if GPU in requests:
        percent = requests[GPU].value()
        if percent <= 0 or (percent > 100 and percent % 100):
            return f"{GPU} is 1..100 or a multiple of 100, not {percent}"
    if GPU_SHARED not in requests:
        return None
    shares = requests[GPU_SHARED].value()
    if shares <= 0:
        return f"{GPU_SHARED} is above 0, not {shares}"
    if HUAWEI_NPU_CORE in requests:
        return None
    memory = requests.get(GPU_MEMORY, ZERO)
    ratio = requests.get(GPU_MEMORY_RATIO, ZERO)
    if bool(memory) == bool(ratio):
        return f"exactly one of {GPU_MEMORY} and {GPU_MEMORY_RATIO} goes with {GPU_SHARED}"
    for name in (GPU_CORE, GPU_MEMORY_RATIO):
        amount = requests.get(name, ZERO).value()
        if amount % shares:
            return f"{name} {amount} is not divisible by {GPU_SHARED} {shares}"
    return None


def require_nodes(pod: dict[str, Any], expressions: list[dict[str, Any]]) -> None:
    """Add node selector requirements to every required term of the pod's node affinity."""
    if not expressions:
        return
    spec = pod["spec"] = pod.get("spec") or {}
    affinity = spec["affinity"] = dict(spec.get("affinity") or {})
    node = affinity["nodeAffinity"] = dict(affinity.get("nodeAffinity") or {})
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    required = node[key] = dict(node.get(key) or {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {
            **term,
            "matchExpressions": [
                *(term.get("matchExpressions") or ()),
                *(one for one in expressions if one not in (term.get("matchExpressions") or ())),
            ],
        }
        for term in terms
    ]
