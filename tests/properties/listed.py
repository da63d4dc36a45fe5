"""Kubelet's list of its pods: what their objects say now, edits included."""

from __future__ import annotations

from typing import Any

from apis.core import Pod as CorePod
from apis.decode import decode_object
from koordlet.state.podspec import KnownPod, known_pod
from tests.properties.node import CONTAINERS
from tests.properties.pods import Running, batch_of, metadata
from tests.simulated.kubelet import Limits


def _resources(limits: Limits) -> dict[str, Any]:
    requests = {"cpu": f"{limits.cpu_request_milli}m", "memory": str(limits.memory_request_bytes)}
    bounds = {"cpu": f"{limits.cpu_limit_milli}m", "memory": str(limits.memory_limit_bytes)}
    drop = ("0m", "0")
    return {
        "requests": {key: value for key, value in requests.items() if value not in drop},
        "limits": {key: value for key, value in bounds.items() if value not in drop},
    }


def listed(pod: Running) -> KnownPod:
    """The pod as kubelet lists it."""
    labels, annotations = metadata(pod, pod.kind)
    running = {container.name: container.limits for container in pod.containers}
    containers = []
    for name in CONTAINERS:
        made = _resources(running.get(name, pod.kind.limits))
        if pod.kind.batch_milli:
            made["requests"] |= batch_of(pod.kind)
            made["limits"] |= batch_of(pod.kind)
        containers.append({"name": name, "resources": made})
    manifest = {
        "metadata": {
            "name": pod.name,
            "namespace": "default",
            "uid": pod.here.uid,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {"containers": containers},
        "status": {"phase": "Running", "qosClass": pod.kind.kube_qos},
    }
    return known_pod(decode_object(manifest, CorePod, obj=pod.name))
