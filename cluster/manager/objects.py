"""Objects that the manager writes, kept as it needs them: metadata typed, the spec as raw JSON.

Comparing what is stored with what should be must see every field, also those that we do not know.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from apis.core import Node, ObjectMeta, Pod
from apis.decode import Wire
from apis.node_strategy import conform_node_slo
from apis.nodemetric import NodeMetric


class StoredNodeSLO(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: msgspec.Raw = msgspec.Raw(b"{}")


def detach_node_slo(stored: StoredNodeSLO) -> StoredNodeSLO:
    """Copy the raw spec out of the page that it was read in, so that the page can go."""
    return msgspec.structs.replace(
        stored, spec=msgspec.Raw(_shared(bytes(stored.spec))), metadata=_bare(stored.metadata)
    )


@lru_cache(maxsize=256)
def _shared(data: bytes) -> bytes:
    # Most nodes store the same bytes.
    return data


@lru_cache(maxsize=256)
def plain_spec(data: bytes) -> dict[str, Any]:
    """Return the decoded spec; callers must not change it."""
    spec = msgspec.json.decode(data) if data else {}
    return spec if isinstance(spec, dict) else {}


@lru_cache(maxsize=256)
def conformed_spec(data: bytes) -> dict[str, Any]:
    """Return the stored spec in the spelling that computed specs have; not to be changed."""
    return conform_node_slo(plain_spec(data))


_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def _bare(meta: ObjectMeta) -> ObjectMeta:
    annotations = meta.annotations
    if _LAST_APPLIED in annotations:
        annotations = {key: text for key, text in annotations.items() if key != _LAST_APPLIED}
    return msgspec.structs.replace(
        meta, annotations=annotations, owner_references=(), finalizers=()
    )


def shrink_node(node: Node) -> Node:
    """Drop what changes with every heartbeat and is not looked at."""
    status = msgspec.structs.replace(
        node.status,
        conditions=tuple(
            msgspec.structs.replace(condition, last_transition_time=None, message="")
            for condition in node.status.conditions
            if condition.type == "Ready"
        ),
        addresses=(),
    )
    return msgspec.structs.replace(node, metadata=_bare(node.metadata), status=status)


def shrink_pod(pod: Pod) -> Pod:
    """Drop volumes, mounts and what only kubelets need."""
    spec = msgspec.structs.replace(
        pod.spec,
        volumes=(),
        tolerations=(),
        containers=tuple(
            msgspec.structs.replace(container, volume_mounts=(), image="")
            for container in pod.spec.containers
        ),
        init_containers=tuple(
            msgspec.structs.replace(container, volume_mounts=(), image="")
            for container in pod.spec.init_containers
        ),
    )
    return msgspec.structs.replace(pod, metadata=_bare(pod.metadata), spec=spec)


def shrink_node_metric(metric: NodeMetric) -> NodeMetric:
    """Drop percentiles, devices and per-NUMA figures, which no formula reads."""
    info = metric.status.node_metric
    if info is None:
        return metric
    slim = msgspec.structs.replace(
        info, aggregated_node_usages=(), aggregated_system_usages=(), numa_usages=()
    )
    return msgspec.structs.replace(
        metric, status=msgspec.structs.replace(metric.status, node_metric=slim)
    )
