"""What the caches keep of pods and nodes, in the form in which all plugins see them.

Fields that scheduling never reads are dropped. Old names of resources become the present ones. What
a node's annotation reserves is taken out of its allocatable, and a pod's label may name another
scheduler than its spec. docs/facts/scheduler.md, "Objects as plugins see them".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from apis.core import ContainerStatus, ResourceRequirements
from apis.keys import (
    ANNOTATION_REPLACE_RESOURCES,
    ANNOTATION_RESERVE_POD,
    DEPRECATED_RESOURCES,
    LABEL_PREEMPTION_POLICY,
    LABEL_PRIORITY,
    LABEL_SCHEDULER_NAME,
)
from apis.quantity import Quantity, ResourceList
from apis.replace_resources import Replacements, parse_replacements, replaced
from apis.scheduling_pod import (
    SchedulingContainer,
    SchedulingNode,
    SchedulingPod,
    SchedulingVolume,
)
from cluster.node_reservation import without_reserved

_LARGEST_ANNOTATION: Final = 64 * 1024
"""Characters. No plugin reads a larger annotation of a pod; it is dropped before it is kept."""

MOST_OF_A_NODE: Final = 128
"""Resources of one node. Chosen: nodes have some dozens; one that a fault gives thousands must not
take the columns of all (tables.amounts.MOST_RESOURCES)."""

_POLICIES: Final = ("Never", "PreemptLowerPriority")
_WHOLE: Final = re.compile(r"-?[0-9]{1,10}")


def kept_pod(pod: SchedulingPod) -> SchedulingPod:
    """Return what the cache keeps of a pod. The mark of a reserve pod is not a user's to set."""
    return _kept(pod, {})


def pod_keeper(gates: Mapping[str, bool]) -> Callable[[SchedulingPod], SchedulingPod]:
    """Return `kept_pod`, with what the gates change of pods.

    PriorityTransformer: the label koordinator.sh/priority, if it is a whole number, replaces the
    pod's priority. PreemptionPolicyTransformer: the label scheduling.koordinator.sh/
    preemption-policy replaces its preemption policy; without the label it is Never.
    ReplaceResourcesTransformer: the annotation pod.koordinator.sh/replace-resources renames what
    containers and overhead request.
    """
    priority = gates.get("PriorityTransformer", False)
    policy = gates.get("PreemptionPolicyTransformer", False)
    resources = gates.get("ReplaceResourcesTransformer", False)
    if not priority and not policy and not resources:
        return kept_pod

    def kept(pod: SchedulingPod) -> SchedulingPod:
        pod = kept_pod(pod)
        text = pod.metadata.annotations.get(ANNOTATION_REPLACE_RESOURCES)
        if resources and text:
            pod = _with_replaced_resources(pod, parse_replacements(text))
        labels = pod.metadata.labels
        changes: dict[str, Any] = {}
        if priority and (number := int32_of(labels.get(LABEL_PRIORITY, ""))) is not None:
            changes["priority"] = number
        if policy:
            named = labels.get(LABEL_PREEMPTION_POLICY, "")
            changes["preemption_policy"] = named if named in _POLICIES else "Never"
        return msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, **changes))

    return kept


def _with_replaced_resources(pod: SchedulingPod, replacements: Replacements) -> SchedulingPod:
    """Return a pod that requests its resources under other names.

    The status too: what was allocated to a running container counts beside what it requests.
    """

    def of_container(container: SchedulingContainer) -> SchedulingContainer:
        return msgspec.structs.replace(container, resources=required(container.resources))

    def required(resources: ResourceRequirements) -> ResourceRequirements:
        return ResourceRequirements(
            requests=replaced(resources.requests, replacements),
            limits=replaced(resources.limits, replacements),
        )

    def of_status(status: ContainerStatus) -> ContainerStatus:
        return msgspec.structs.replace(
            status,
            resources=None if status.resources is None else required(status.resources),
            allocated_resources=replaced(status.allocated_resources, replacements),
        )

    spec, status = pod.spec, pod.status
    return msgspec.structs.replace(
        pod,
        spec=msgspec.structs.replace(
            spec,
            containers=tuple(map(of_container, spec.containers)),
            init_containers=tuple(map(of_container, spec.init_containers)),
            overhead=replaced(spec.overhead, replacements),
        ),
        status=msgspec.structs.replace(
            status,
            container_statuses=tuple(map(of_status, status.container_statuses)),
            init_container_statuses=tuple(map(of_status, status.init_container_statuses)),
        ),
    )


def int32_of(text: str) -> int | None:
    """Return a whole number of 32 bits, which a priority is; None for any other text."""
    if not _WHOLE.fullmatch(text):
        return None
    number = int(text)
    return number if -(2**31) <= number < 2**31 else None


def kept_reserve_pod(pod: SchedulingPod, marks: Mapping[str, str]) -> SchedulingPod:
    """Return a reserve pod in the form in which plugins see pods, with the mark of one.

    marks: further annotations, for plugins.
    """
    return _kept(pod, {**marks, ANNOTATION_RESERVE_POD: "true"})


def _kept(pod: SchedulingPod, mark: Mapping[str, str]) -> SchedulingPod:
    spec, meta = pod.spec, pod.metadata
    annotations = {
        key: text
        for key, text in meta.annotations.items()
        if len(text) <= _LARGEST_ANNOTATION and key != ANNOTATION_RESERVE_POD
    }
    annotations |= mark
    return msgspec.structs.replace(
        pod,
        metadata=msgspec.structs.replace(meta, annotations=annotations, finalizers=()),
        spec=msgspec.structs.replace(
            spec,
            scheduler_name=meta.labels.get(LABEL_SCHEDULER_NAME) or spec.scheduler_name,
            containers=tuple(map(_kept_container, spec.containers)),
            init_containers=tuple(map(_kept_container, spec.init_containers)),
            overhead=renamed(spec.overhead),
            volumes=tuple(filter(_is_looked_at, spec.volumes)),
        ),
        status=msgspec.structs.replace(pod.status, message="", host_ip="", pod_ip="", pod_ips=()),
    )


def _is_looked_at(volume: SchedulingVolume) -> bool:
    sources = (
        volume.persistent_volume_claim,
        volume.image,
        volume.ephemeral,
        volume.gce_persistent_disk,
        volume.aws_elastic_block_store,
        volume.iscsi,
        volume.rbd,
    )
    return any(source is not None for source in sources)


def _kept_container(container: SchedulingContainer) -> SchedulingContainer:
    resources = container.resources
    requests, limits = renamed(resources.requests), renamed(resources.limits)
    if requests is not resources.requests or limits is not resources.limits:
        resources = ResourceRequirements(requests=requests, limits=limits)
    return msgspec.structs.replace(container, volume_mounts=(), resources=resources)


def kept_node(node: SchedulingNode) -> SchedulingNode:
    """Return what the cache keeps of a node.

    A reservation that cannot be read reserves nothing, and of too many resources the first
    MOST_OF_A_NODE are kept; `sources.node_facts` names both. `capacity` has the first resource that
    was left out, and nothing else.
    """
    status = node.status
    counted, left_out = _first(renamed(status.allocatable))
    return msgspec.structs.replace(
        node,
        status=msgspec.structs.replace(
            status,
            capacity=left_out,
            allocatable=without_reserved(
                counted,
                node.metadata.annotations,
                obj=f"Node {node.metadata.name}",
            ),
            conditions=(),
            addresses=(),
        ),
    )


def _first(resources: ResourceList) -> tuple[ResourceList, ResourceList]:
    """Return the first MOST_OF_A_NODE resources, and the next one if there are more.

    Those of Kubernetes itself come first, then the others by name.
    """
    if len(resources) <= MOST_OF_A_NODE:
        return resources, {}
    names = sorted(resources, key=lambda name: ("/" in name, name))
    following = names[MOST_OF_A_NODE]
    counted = {name: resources[name] for name in names[:MOST_OF_A_NODE]}
    return counted, {following: resources[following]}


def renamed(resources: ResourceList) -> ResourceList:
    """Return the amounts under the present names of their resources.

    An amount under the present name counts if both are there.
    """
    if not DEPRECATED_RESOURCES.keys() & resources.keys():
        return resources
    result: dict[str, Quantity] = {}
    for name, amount in resources.items():
        present = DEPRECATED_RESOURCES.get(name, name)
        if present == name or present not in resources:
            result[present] = amount
    return result
