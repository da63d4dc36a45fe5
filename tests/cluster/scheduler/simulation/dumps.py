"""Dumps of small clusters, as kubectl writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Tree = dict[str, Any]

KOORDINATOR = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    filter: {enabled: [{name: LoadAwareScheduling}, {name: DeviceShare}]}
    score: {enabled: [{name: LoadAwareScheduling, weight: 1}, {name: DeviceShare, weight: 1}]}
    reserve: {enabled: [{name: LoadAwareScheduling}, {name: DeviceShare}]}
    preEnqueue: {enabled: [{name: Coscheduling}]}
    permit: {enabled: [{name: Coscheduling}]}
"""
PACKED = """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: default-scheduler
  pluginConfig:
  - name: NodeResourcesFit
    args:
      scoringStrategy:
        type: MostAllocated
        resources: [{name: cpu, weight: 1}, {name: memory, weight: 1}]
"""


def node(name: str, cpu: int = 8, *, more: dict[str, str] | None = None) -> Tree:
    amounts = {"cpu": str(cpu), "memory": "32Gi", "pods": "110", **(more or {})}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"allocatable": amounts},
    }


def pod(
    name: str, cpu: str = "1", *, on: str = "", metadata: Tree | None = None, **spec: Any
) -> Tree:
    requests = {"cpu": cpu, "memory": "1Gi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **(metadata or {}),
        },
        "spec": {
            **({"nodeName": on} if on else {}),
            "schedulerName": "default-scheduler",
            "containers": [{"name": "c", "image": "x", "resources": {"requests": requests}}],
            **spec,
        },
    }


def workload(kind: str, name: str, replicas: int, cpu: str = "1", **spec: Any) -> Tree:
    member = "parallelism" if kind == "Job" else "replicas"
    return {
        "apiVersion": "batch/v1" if kind == "Job" else "apps/v1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": {
            member: replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {
                    "containers": [
                        {"name": "c", "image": "x", "resources": {"limits": {"cpu": cpu}}}
                    ],
                    **spec,
                },
            },
        },
    }


def write(path: Path, *objects: Tree) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))
    return path
