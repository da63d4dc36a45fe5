"""NRI messages as subjects: what the runtime tells, parsed once at the edge.

Nothing is trusted for being there: the pod, its `linux` part and any name may be missing or empty
(a leftover container is stopped after its sandbox is gone). A cgroup path that could lead out of
its hierarchy becomes "", which means "not known". In requests, 0 and "" mean "not given".
Source: nri.md sections 5.5, 5.8, 5.9.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from apis.qos import KubeQoS
from hooks.subject import (
    NOTHING_REQUESTED,
    ContainerSubject,
    Pod,
    Requested,
    SandboxSubject,
    make_pod,
)
from linux.cpuset import CpuSet
from linux.resources import UNLIMITED
from nri_plugin.capabilities import RuntimeKind
from nri_plugin.handler import Container, ContainerState, Sandbox
from protos.nri.v1alpha1 import nri_pb2 as nri

_LABEL_POD_NAME: Final = "io.kubernetes.pod.name"
_LABEL_POD_NAMESPACE: Final = "io.kubernetes.pod.namespace"
_LABEL_POD_UID: Final = "io.kubernetes.pod.uid"
_LABEL_CONTAINER_NAME: Final = "io.kubernetes.container.name"

_MAX_PATH: Final = 4096
_MAX_ELEMENT: Final = 255
_QOS_ELEMENT = re.compile(r"(?:^|[/-])(burstable|besteffort)(?=[/.-]|$)")
_STATES: Final = {state.value: state for state in ContainerState}


def sandbox(message: nri.PodSandbox) -> Sandbox:
    """Return the sandbox that a message describes."""
    linux = message.linux
    pod = pod_of(message)
    return Sandbox(
        subject=SandboxSubject(
            pod=pod, id=message.id, cgroup=scope_directory(linux.cgroups_path, pod.cgroup)
        ),
        resources=values(linux.pod_resources),
        pid=message.pid,
    )


def pod_of(message: nri.PodSandbox) -> Pod:
    """Return the pod behind a sandbox, as of RunPodSandbox."""
    labels = dict(message.labels)
    parent = message.linux.cgroup_parent
    return make_pod(
        namespace=message.namespace or labels.get(_LABEL_POD_NAMESPACE, ""),
        name=message.name or labels.get(_LABEL_POD_NAME, ""),
        uid=message.uid or labels.get(_LABEL_POD_UID, ""),
        labels=labels,
        annotations=dict(message.annotations),
        kube_qos=kube_qos_of(parent),
        cgroup=pod_directory(parent),
        runtime_handler=message.runtime_handler,
    )


def created_container(message: nri.CreateContainerRequest, runtime: RuntimeKind) -> Container:
    """Return the container that is about to be created, with what kubelet asks for it."""
    container = message.container
    requested = values(container.linux.resources, container.linux.oom_score_adj.value)
    return _container(message.pod, container, runtime, requested=requested)


def updated_container(message: nri.UpdateContainerRequest, runtime: RuntimeKind) -> Container:
    """Return the container as it is now, with what this update asks for it."""
    return _container(
        message.pod, message.container, runtime, requested=values(message.linux_resources)
    )


def existing_container(
    pod: nri.PodSandbox, message: nri.Container, runtime: RuntimeKind
) -> Container:
    """Return a container as it is now, with nothing asked for."""
    return _container(pod, message, runtime, requested=NOTHING_REQUESTED)


def container_of_pod(pod: Pod, message: nri.Container, runtime: RuntimeKind) -> Container:
    """Return a container as it is now, of a pod that is already parsed."""
    linux = message.linux
    return Container(
        subject=ContainerSubject(
            pod=pod,
            name=message.name or message.labels.get(_LABEL_CONTAINER_NAME, ""),
            id=message.id,
            cgroup=container_directory(linux.cgroups_path, pod.cgroup, message.id, runtime),
        ),
        sandbox_id=message.pod_sandbox_id,
        current=values(linux.resources, linux.oom_score_adj.value),
        state=_STATES.get(message.state, ContainerState.UNKNOWN),
        pid=message.pid,
        created_at_ns=message.created_at,
    )


def _container(
    pod_message: nri.PodSandbox,
    message: nri.Container,
    runtime: RuntimeKind,
    *,
    requested: Requested,
) -> Container:
    pod = pod_of(pod_message)
    linux = message.linux
    return Container(
        subject=ContainerSubject(
            pod=pod,
            name=message.name or message.labels.get(_LABEL_CONTAINER_NAME, ""),
            id=message.id,
            cgroup=container_directory(linux.cgroups_path, pod.cgroup, message.id, runtime),
            requested=requested,
        ),
        sandbox_id=message.pod_sandbox_id or pod_message.id,
        current=values(linux.resources, linux.oom_score_adj.value),
        state=_STATES.get(message.state, ContainerState.UNKNOWN),
        pid=message.pid,
        created_at_ns=message.created_at,
    )


def values(resources: nri.LinuxResources, oom_score_adj: int = 0) -> Requested:
    """Return resources as canonical values. 0, "" and what cannot be read mean "not said"."""
    cpu = resources.cpu
    quota_us = cpu.quota.value
    limit_bytes = resources.memory.limit.value
    cpus, mems = cpu.cpus, cpu.mems
    return Requested(
        cpu_shares=cpu.shares.value or None,
        cfs_quota_us=(quota_us if quota_us > 0 else UNLIMITED) if quota_us else None,
        cfs_period_us=cpu.period.value or None,
        memory_limit_bytes=(limit_bytes if limit_bytes > 0 else UNLIMITED) if limit_bytes else None,
        cpus=cpu_set(cpus) if cpus else None,
        mems=cpu_set(mems) if mems else None,
        oom_score_adj=oom_score_adj or None,
    )


def cpu_set(text: str) -> CpuSet | None:
    """Return the set that a kernel list names; None for the empty list and for no list at all."""
    try:
        return CpuSet.parse(text) or None
    except ValueError:
        return None


def kube_qos_of(cgroup_parent: str) -> KubeQoS:
    """Return the Kubernetes QoS class that a pod's parent directory stands for."""
    found = _QOS_ELEMENT.search(cgroup_parent)
    if found is None:
        return KubeQoS.GUARANTEED
    return KubeQoS.BURSTABLE if found.group(1) == "burstable" else KubeQoS.BESTEFFORT


@lru_cache(maxsize=4096)
def pod_directory(cgroup_parent: str) -> str:
    """Return a pod's directory relative to a hierarchy's root; "" when it is not known.

    A bare slice name is expanded the way systemd nests slices.
    """
    path = relative_path(cgroup_parent)
    if path.endswith(".slice") and "/" not in path:
        parts = path.removesuffix(".slice").split("-")
        return "/".join("-".join(parts[: n + 1]) + ".slice" for n in range(len(parts)))
    return path


def scope_directory(cgroups_path: str, pod_cgroup: str) -> str:
    """Return the directory that an OCI cgroups path means, relative to a hierarchy's root.

    "slice:prefix:name" (systemd driver) is the scope prefix-name.scope below the slice; anything
    else is the path itself.
    """
    if ":" not in cgroups_path:
        return relative_path(cgroups_path)
    parts = cgroups_path.split(":")
    if len(parts) != 3 or not pod_cgroup or not parts[2]:
        return ""
    slice_name, prefix, name = parts
    if slice_name and pod_cgroup.rpartition("/")[2] != slice_name:
        pod_cgroup = pod_directory(slice_name)
    element = f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
    return relative_path(f"{pod_cgroup}/{element}") if pod_cgroup and "/" not in element else ""


def container_directory(
    cgroups_path: str, pod_cgroup: str, container_id: str, runtime: RuntimeKind
) -> str:
    """Return a container's directory: from its cgroups path, else by the runtime's rule."""
    if cgroups_path:
        return scope_directory(cgroups_path, pod_cgroup)
    if not pod_cgroup or not container_id or "/" in container_id:
        return ""
    prefix = "crio-" if runtime is RuntimeKind.CRIO else ""
    if pod_cgroup.endswith(".slice"):
        return relative_path(f"{pod_cgroup}/{prefix or 'cri-containerd-'}{container_id}.scope")
    return relative_path(f"{pod_cgroup}/{prefix}{container_id}")


def relative_path(path: str) -> str:
    """Return `path` without outer slashes if every element is a plain name, else ""."""
    path = path.strip("/")
    if not path or len(path) > _MAX_PATH or not path.isprintable():
        return ""
    for element in path.split("/"):
        if element in ("", ".", "..") or len(element) > _MAX_ELEMENT:
            return ""
    return path
