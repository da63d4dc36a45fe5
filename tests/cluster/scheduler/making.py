"""Nodes and pods for the scheduler's tests, decoded from JSON as from an API server."""

from __future__ import annotations

from typing import Any

import msgspec

from apis.scheduling_pod import (
    SchedulingNode,
    SchedulingPod,
    decode_scheduling_node,
    decode_scheduling_pod,
)


def make_node(
    name: str,
    *,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    taints: list[dict[str, str]] | None = None,
    unschedulable: bool = False,
    images: list[dict[str, Any]] | None = None,
    allocatable: dict[str, str] | None = None,
) -> SchedulingNode:
    """Return a node with 16 CPUs, 64 GiB and 110 pods; `allocatable` replaces or adds amounts."""
    amounts = {"cpu": "16", "memory": "64Gi", "pods": "110", **(allocatable or {})}
    return decode_scheduling_node(
        msgspec.json.encode(
            {
                "metadata": {
                    "name": name,
                    "labels": {"kubernetes.io/hostname": name, **(labels or {})},
                    "annotations": annotations or {},
                },
                "spec": {"taints": taints or [], "unschedulable": unschedulable},
                "status": {"allocatable": amounts, "images": images or []},
            }
        )
    )


def make_pod(
    name: str,
    *,
    namespace: str = "default",
    requests: dict[str, str] | None = None,
    limits: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    node: str = "",
    containers: list[dict[str, Any]] | None = None,
    **spec: Any,
) -> SchedulingPod:
    """Return a pod with one container, or with `containers`; `spec` holds other JSON members."""
    resources = {"requests": requests or {}, "limits": limits or {}}
    return decode_scheduling_pod(
        msgspec.json.encode(
            {
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "uid": f"uid-{namespace}-{name}",
                    "labels": labels or {},
                    "annotations": annotations or {},
                },
                "spec": {
                    "nodeName": node,
                    "containers": containers or [{"name": "c", "resources": resources}],
                    **spec,
                },
            }
        )
    )
