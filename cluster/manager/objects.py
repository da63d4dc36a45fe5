"""What the caches keep of objects: NodeSLOs with a raw spec, others without unused fields.

The spec of a NodeSLO stays raw JSON, so that the comparison with the desired spec covers every
field, also unknown ones. Other objects are reduced to the fields that are read, because a large
cluster has 100,000 pods.
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
    """Copy the raw spec out of the listed page, so that the memory of the page is freed."""
    return msgspec.structs.replace(
        stored, spec=msgspec.Raw(_shared(bytes(stored.spec))), metadata=_bare(stored.metadata)
    )


# 256, here and below. Chosen: a cluster has as many different specs as combinations of node
# entries, usually fewer than ten. With more than 256, specs are only decoded more often.
@lru_cache(maxsize=256)
def _shared(data: bytes) -> bytes:
    # Most nodes store the same bytes, which are then kept once.
    return data


@lru_cache(maxsize=256)
def plain_spec(data: bytes) -> dict[str, Any]:
    """Return the decoded spec. It is shared: callers must not change it."""
    spec = msgspec.json.decode(data) if data else {}
    return spec if isinstance(spec, dict) else {}


@lru_cache(maxsize=256)
def conformed_spec(data: bytes) -> dict[str, Any]:
    """Return the stored spec in the spelling of computed specs. Callers must not change it."""
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
    """Drop what each heartbeat changes and nothing reads."""
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
    """Drop volumes, mounts, images and other fields that only kubelet needs."""
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
    """Drop percentiles and figures of NUMA nodes, which no formula reads."""
    info = metric.status.node_metric
    if info is None:
        return metric
    slim = msgspec.structs.replace(
        info, aggregated_node_usages=(), aggregated_system_usages=(), numa_usages=()
    )
    return msgspec.structs.replace(
        metric, status=msgspec.structs.replace(metric.status, node_metric=slim)
    )
