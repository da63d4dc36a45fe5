"""Manifests for end-to-end tests: a node whose second CPU is shared, and pods of every class."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from typing import Any

from tests.beds.daemon import NODE_NAME

Manifest = dict[str, Any]

CPUS = sorted(os.sched_getaffinity(0))
FIRST, SHARED = str(CPUS[0]), ",".join(map(str, CPUS[1:] or CPUS))
RATIO = "node.koordinator.sh/cpu-normalization-ratio"


def node(*, ratio: str | None = None) -> Manifest:
    annotations = {} if ratio is None else {RATIO: ratio}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE_NAME, "annotations": annotations},
    }


def nodeslo(**classes: Mapping[str, Any]) -> Manifest:
    """A NodeSLO whose resourceQOSStrategy has the given classes, e.g. beClass={...}."""
    return {
        "apiVersion": "slo.koordinator.sh/v1alpha1",
        "kind": "NodeSLO",
        "metadata": {"name": NODE_NAME},
        "spec": {"resourceQOSStrategy": dict(classes)},
    }


BE_IDENTITY = {"cpuQOS": {"enable": True, "groupIdentity": -1}}


def topology(shared: str = SHARED) -> Manifest:
    pool = json.dumps([{"socket": 0, "node": 0, "cpuset": shared}])
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha1",
        "kind": "NodeResourceTopology",
        "metadata": {
            "name": NODE_NAME,
            "annotations": {
                "kubelet.koordinator.sh/cpu-manager-policy": '{"policy":"none"}',
                "node.koordinator.sh/cpu-shared-pools": pool,
                "node.koordinator.sh/be-cpu-shared-pools": pool,
            },
        },
        "topologyPolicies": ["None"],
        "zones": [],
    }


def pod(
    name: str,
    qos: str = "",
    *,
    requests: Mapping[str, str] | None = None,
    limits: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    command: list[str] | None = None,
) -> Manifest:
    """A pod with one container, "main". qos: the koordinator.sh/qosClass label, if any."""
    container: Manifest = {
        "name": "main",
        "resources": {"requests": dict(requests or {}), "limits": dict(limits or {})},
    }
    if command:
        container["command"] = command
    qos_label = {"koordinator.sh/qosClass": qos} if qos else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": str(uuid.uuid4()),
            "labels": {**qos_label, **(labels or {})},
            "annotations": dict(annotations or {}),
        },
        "spec": {"nodeName": NODE_NAME, "containers": [container]},
    }


def batch_pod(name: str, *, cpu: str = "1000", memory: str = "128Mi", **more: Any) -> Manifest:
    """A BE pod that requests half of its batch-cpu limit (in milli-CPU)."""
    limits = {"kubernetes.io/batch-cpu": cpu, "kubernetes.io/batch-memory": memory}
    requests = {**limits, "kubernetes.io/batch-cpu": str(int(cpu) // 2)}
    spec = json.dumps({"containers": {"main": {"requests": requests, "limits": limits}}})
    return pod(
        name,
        "BE",
        requests=requests,
        limits=limits,
        annotations={"node.koordinator.sh/extended-resource-spec": spec},
        **more,
    )


def pinned_pod(name: str, cpus: str = FIRST) -> Manifest:
    amounts = {"cpu": "1", "memory": "64Mi"}
    status = json.dumps({"cpuset": cpus})
    return pod(
        name,
        "LSR",
        requests=amounts,
        limits=amounts,
        annotations={"scheduling.koordinator.sh/resource-status": status},
    )


def ls_pod(name: str, **more: Any) -> Manifest:
    return pod(
        name,
        "LS",
        requests={"cpu": "500m", "memory": "64Mi"},
        limits={"cpu": "1", "memory": "128Mi"},
        **more,
    )


def gpu_pod(name: str, *minors: int) -> Manifest:
    devices = [
        {
            "minor": minor,
            "resources": {
                "koordinator.sh/gpu-core": "100",
                "koordinator.sh/gpu-memory": "16Gi",
                "koordinator.sh/gpu-memory-ratio": "100",
            },
        }
        for minor in minors
    ]
    allocated = json.dumps({"gpu": devices})
    return ls_pod(name, annotations={"scheduling.koordinator.sh/device-allocated": allocated})
