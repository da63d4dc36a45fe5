"""Builders of nodes, reports and pods, as short as the examples of docs/facts/manager.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from apis.core import Node, Pod
from apis.decode import dec_hook
from apis.nodemetric import NodeMetric, NodeMetricStatus
from apis.slo_config import ColocationStrategy
from cluster.manager.node_inputs import NodeInputs, pod_facts


def strategy(**members: Any) -> ColocationStrategy:
    return msgspec.convert({"enable": True, **members}, ColocationStrategy)


def node(
    *,
    capacity: tuple[str, str] = ("16", "64Gi"),
    allocatable: tuple[str, str] | None = None,
    name: str = "n1",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Node:
    allocatable = allocatable or capacity
    return msgspec.convert(
        {
            "metadata": {"name": name, "labels": labels or {}, "annotations": annotations or {}},
            "status": {
                "capacity": {"cpu": capacity[0], "memory": capacity[1]},
                "allocatable": {"cpu": allocatable[0], "memory": allocatable[1]},
            },
        },
        Node,
        dec_hook=dec_hook,
    )


def pod(
    name: str,
    request: tuple[str, str] | None,
    *,
    qos: str = "",
    priority: int | None = 9500,
    phase: str = "Running",
    annotations: dict[str, str] | None = None,
) -> Pod:
    resources = (
        {"requests": {"cpu": request[0], "memory": request[1]}} if request is not None else {}
    )
    return msgspec.convert(
        {
            "metadata": {
                "name": name,
                "namespace": "default",
                "labels": {"koordinator.sh/qosClass": qos} if qos else {},
                "annotations": annotations or {},
            },
            "spec": {
                "nodeName": "n1",
                "priority": priority,
                "containers": [{"name": "main", "resources": resources}],
            },
            "status": {"phase": phase},
        },
        Pod,
        dec_hook=dec_hook,
    )


def usage(cpu: str, memory: str) -> dict[str, Any]:
    return {"resources": {"cpu": cpu, "memory": memory}}


def report(
    *,
    system: tuple[str, str] = ("0", "0"),
    total: tuple[str, str] | None = None,
    pods: dict[str, tuple[str, str]] | None = None,
    dangling: Iterable[tuple[str, str, str]] = (),
    hosts: Iterable[tuple[str, str, str]] = (),
    reclaimable: tuple[str, str] | None = None,
    at: str = "2026-01-01T00:00:00Z",
) -> NodeMetricStatus:
    """dangling, hosts: (priority, cpu, memory)."""
    info: dict[str, Any] = {"systemUsage": usage(*system)}
    if total is not None:
        info["nodeUsage"] = usage(*total)
    plain: dict[str, Any] = {
        "updateTime": at,
        "nodeMetric": info,
        "podsMetric": [
            *(
                {"name": name, "namespace": "default", "podUsage": usage(*used)}
                for name, used in (pods or {}).items()
            ),
            *(
                {
                    "name": f"gone-{index}",
                    "namespace": "default",
                    "priority": priority,
                    "podUsage": usage(cpu, memory),
                }
                for index, (priority, cpu, memory) in enumerate(dangling)
            ),
        ],
        "hostApplicationMetric": [
            {"name": f"host-{index}", "priority": priority, "usage": usage(cpu, memory)}
            for index, (priority, cpu, memory) in enumerate(hosts)
        ],
    }
    if reclaimable is not None:
        plain["prodReclaimableMetric"] = {"resource": usage(*reclaimable)}
    return msgspec.convert({"status": plain}, NodeMetric, dec_hook=dec_hook).status


def inputs(
    of: Node, metric: NodeMetricStatus | None = None, pods: Iterable[Pod] = ()
) -> NodeInputs:
    return NodeInputs(
        node=of,
        metric=metric,
        pods=tuple(facts for one in pods if (facts := pod_facts(one)) is not None),
    )
