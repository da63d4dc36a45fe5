"""The part of a kubelet that a bed needs: a Pod manifest becomes a sandbox and its containers.

It follows what a kubelet does with the cgroupfs driver: QoS class from cpu and memory alone (batch
resources do not count, so a batch pod is BestEffort to it), shares and quota from milli-CPU,
oom_score_adj by class, and the labels by which a runtime's containers are found again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.cri.v1 import api_pb2 as cri
from tests.beds.containerd import Containerd
from tests.beds.groups import QosClass
from tests.beds.image import IMAGE

CFS_PERIOD_US = 100_000
_MEMORY_SUFFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True)
class RunningPod:
    """A pod as the runtime has it. `cgroup` and container cgroups are absolute cgroup paths."""

    name: str
    uid: str
    qos: QosClass
    cgroup: str
    sandbox_id: str
    sandbox_config: cri.PodSandboxConfig
    containers: Mapping[str, str]  # name -> container id

    def container_cgroup(self, name: str) -> str:
        return f"{self.cgroup}/{self.containers[name]}"


def milli_cpu(quantity: str | int | float) -> int:
    text = str(quantity)
    return int(text[:-1]) if text.endswith("m") else round(float(text) * 1000)


def memory_bytes(quantity: str | int) -> int:
    text = str(quantity)
    for suffix, factor in _MEMORY_SUFFIXES.items():
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * factor
    return int(text)


def qos_class(pod: Mapping[str, Any]) -> QosClass:
    amounts = [_amounts(container) for container in pod["spec"]["containers"]]
    if all(not requests and not limits for requests, limits in amounts):
        return "besteffort"
    if all(
        limits.keys() == {"cpu", "memory"}
        and all(requests.get(k, v) == v for k, v in limits.items())
        for requests, limits in amounts
    ):
        return "guaranteed"
    return "burstable"


def _amounts(container: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """(requests, limits) of cpu in milli-CPU and memory in bytes; a limit implies a request."""
    parse = {"cpu": milli_cpu, "memory": memory_bytes}
    resources = container.get("resources", {})
    limits = {k: parse[k](v) for k, v in resources.get("limits", {}).items() if k in parse}
    requests = {k: parse[k](v) for k, v in resources.get("requests", {}).items() if k in parse}
    return {**limits, **requests}, limits


def cpu_shares(request_milli: int) -> int:
    return min(262_144, max(2, request_milli * 1024 // 1000))


def cfs_quota_us(limit_milli: int) -> int:
    """0 means "no limit", as CRI has it."""
    return max(1000, limit_milli * CFS_PERIOD_US // 1000) if limit_milli else 0


def container_resources(container: Mapping[str, Any], qos: QosClass) -> cri.LinuxContainerResources:
    requests, limits = _amounts(container)
    return cri.LinuxContainerResources(
        cpu_period=CFS_PERIOD_US,
        cpu_quota=cfs_quota_us(limits.get("cpu", 0)),
        cpu_shares=cpu_shares(requests.get("cpu", 0)),
        memory_limit_in_bytes=limits.get("memory", 0),
        oom_score_adj=_oom_score_adj(requests.get("memory", 0), qos),
    )


def _oom_score_adj(memory_request_bytes: int, qos: QosClass) -> int:
    if qos == "guaranteed":
        return -997
    if qos == "besteffort":
        return 1000
    capacity = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(999, max(3, 1000 - 1000 * memory_request_bytes // capacity))


def sandbox_config(pod: Mapping[str, Any], cgroup_parent: str, logs: Path) -> cri.PodSandboxConfig:
    metadata = pod["metadata"]
    uid, name, namespace = metadata["uid"], metadata["name"], metadata.get("namespace", "default")
    host = cri.NamespaceOption(network=cri.NODE)  # no CNI on a bed
    return cri.PodSandboxConfig(
        metadata=cri.PodSandboxMetadata(name=name, uid=uid, namespace=namespace),
        # No hostname: with the host's network a pod has the host's name, and runc insists.
        log_directory=str(logs / f"{namespace}_{name}_{uid}"),
        labels={
            **metadata.get("labels", {}),
            "io.kubernetes.pod.name": name,
            "io.kubernetes.pod.namespace": namespace,
            "io.kubernetes.pod.uid": uid,
        },
        annotations={
            **metadata.get("annotations", {}),
            "kubernetes.io/config.source": "api",
        },
        linux=cri.LinuxPodSandboxConfig(
            cgroup_parent=cgroup_parent,
            security_context=cri.LinuxSandboxSecurityContext(namespace_options=host),
        ),
    )


def container_config(
    pod: Mapping[str, Any], container: Mapping[str, Any], qos: QosClass
) -> cri.ContainerConfig:
    metadata = pod["metadata"]
    name = container["name"]
    return cri.ContainerConfig(
        metadata=cri.ContainerMetadata(name=name),
        image=cri.ImageSpec(image=container.get("image", IMAGE)),
        command=container.get("command", ()),
        args=container.get("args", ()),
        envs=[
            cri.KeyValue(key=entry["name"], value=entry["value"].encode())
            for entry in container.get("env", ())
        ],
        labels={
            "io.kubernetes.container.name": name,
            "io.kubernetes.pod.name": metadata["name"],
            "io.kubernetes.pod.namespace": metadata.get("namespace", "default"),
            "io.kubernetes.pod.uid": metadata["uid"],
        },
        annotations={"io.kubernetes.container.restartCount": "0"},
        log_path=f"{name}/0.log",
        linux=cri.LinuxContainerConfig(
            resources=container_resources(container, qos),
            security_context=cri.LinuxContainerSecurityContext(
                namespace_options=cri.NamespaceOption(network=cri.NODE)
            ),
        ),
    )


def run_pod(bed: Containerd, pod: Mapping[str, Any]) -> RunningPod:
    """Make the pod's group, run its sandbox, create and start its containers."""
    metadata, containers = pod["metadata"], pod["spec"]["containers"]
    qos = qos_class(pod)
    amounts = [_amounts(container) for container in containers]
    limits = [limits for _, limits in amounts]
    cpu_limited = all("cpu" in limit for limit in limits)
    memory_limited = all("memory" in limit for limit in limits)
    cgroup = bed.groups.make_pod(
        metadata["uid"],
        qos,
        cpu_shares=cpu_shares(sum(requests.get("cpu", 0) for requests, _ in amounts)),
        cfs_quota_us=cfs_quota_us(sum(limit["cpu"] for limit in limits)) if cpu_limited else None,
        memory_limit_bytes=sum(limit["memory"] for limit in limits) if memory_limited else None,
    )
    sandbox = sandbox_config(pod, cgroup, bed.logs)
    sandbox_id = bed.cri.run_sandbox(sandbox)
    ids = {}
    for container in containers:
        config = container_config(pod, container, qos)
        container_id = bed.cri.create_container(sandbox_id, config, sandbox)
        bed.cri.start_container(container_id)
        ids[container["name"]] = container_id
    return RunningPod(metadata["name"], metadata["uid"], qos, cgroup, sandbox_id, sandbox, ids)


def remove_pod(bed: Containerd, pod: RunningPod) -> None:
    bed.cri.remove_sandbox(pod.sandbox_id)
    bed.groups.remove_pod(pod.uid, pod.qos)


@contextmanager
def running_pod(bed: Containerd, pod: Mapping[str, Any]) -> Iterator[RunningPod]:
    running = run_pod(bed, pod)
    try:
        yield running
    finally:
        remove_pod(bed, running)
