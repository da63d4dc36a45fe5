"""NRI messages as subjects: what the runtime tells, parsed once at the edge.

Nothing is trusted for being there: the pod, its `linux` part and any name may be missing or empty
(a leftover container is stopped after its sandbox is gone). A cgroup path that could lead out of
its hierarchy becomes "", which means "not known". In requests, 0 and "" mean "not given".
Source: nri.md sections 5.5, 5.8, 5.9.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from linux import cgroup_paths
from linux.cgroup_paths import Driver, PathError, Runtime
from linux.cpuset import CpuSet
from linux.resources import UNLIMITED
from nri_plugin.capabilities import RuntimeKind
from nri_plugin.handler import Container, ContainerState, Sandbox
from protos.nri.v1alpha1 import nri_pb2 as nri

_LABEL_POD_NAME: Final = "io.kubernetes.pod.name"
_LABEL_POD_NAMESPACE: Final = "io.kubernetes.pod.namespace"
_LABEL_POD_UID: Final = "io.kubernetes.pod.uid"
_LABEL_CONTAINER_NAME: Final = "io.kubernetes.container.name"

_NAMED_BY: Final[Mapping[RuntimeKind, Runtime]] = {
    RuntimeKind.CONTAINERD: Runtime.CONTAINERD,
    RuntimeKind.CRIO: Runtime.CRIO,
    RuntimeKind.OTHER: Runtime.CONTAINERD,
}
_STATES: Final = {state.value: state for state in ContainerState}


def sandbox(message: nri.PodSandbox) -> Sandbox:
    """Return the sandbox that a message describes."""
    linux = message.linux
    pod = pod_of(message)
    cgroup = directory_of(linux.cgroups_path, "", message.id, RuntimeKind.OTHER)
    return Sandbox(
        subject=SandboxSubject(pod=pod, id=message.id, cgroup=cgroup),
        resources=values(linux.pod_resources),
        pid=message.pid,
    )


def pod_of(message: nri.PodSandbox) -> Pod:
    """Return the pod behind a sandbox, as of RunPodSandbox."""
    labels = dict(message.labels)
    directory, kube_qos = place_of(message.linux.cgroup_parent)
    return make_pod(
        namespace=message.namespace or labels.get(_LABEL_POD_NAMESPACE, ""),
        name=message.name or labels.get(_LABEL_POD_NAME, ""),
        uid=message.uid or labels.get(_LABEL_POD_UID, ""),
        labels=labels,
        annotations=dict(message.annotations),
        kube_qos=kube_qos,
        cgroup=directory,
        runtime_handler=message.runtime_handler,
    )


def created_container(
    message: nri.CreateContainerRequest, runtime: RuntimeKind, told: Pod | None = None
) -> Container:
    """Return the container that is about to be created, with what kubelet asks for it.

    told: the pod as its sandbox was told of. The runtime never refreshes what it tells of a pod, so
    it is not read a second time.
    """
    pod = told if told is not None and told.uid == message.pod.uid else pod_of(message.pod)
    return _container(pod, message.container, runtime, created=True)


def updated_container(message: nri.UpdateContainerRequest, runtime: RuntimeKind) -> Container:
    """Return the container as it is now, with what this update asks for it."""
    asked = values(message.linux_resources)
    return _container(pod_of(message.pod), message.container, runtime, asked=asked)


def existing_container(
    pod: nri.PodSandbox, message: nri.Container, runtime: RuntimeKind
) -> Container:
    """Return a container as it is now, with nothing asked for."""
    return _container(pod_of(pod), message, runtime)


def container_of_pod(pod: Pod, message: nri.Container, runtime: RuntimeKind) -> Container:
    """Return a container as it is now, of a pod that is already parsed."""
    return _container(pod, message, runtime)


def _container(
    pod: Pod,
    message: nri.Container,
    runtime: RuntimeKind,
    *,
    asked: Requested = NOTHING_REQUESTED,
    created: bool = False,
) -> Container:
    linux = message.linux
    current = values(linux.resources, linux.oom_score_adj.value)
    return Container(
        subject=ContainerSubject(
            pod=pod,
            name=message.name or message.labels.get(_LABEL_CONTAINER_NAME, ""),
            id=message.id,
            cgroup=directory_of(linux.cgroups_path, pod.cgroup, message.id, runtime),
            # What a creation asks for is all that the container has so far.
            requested=current if created else asked,
        ),
        sandbox_id=message.pod_sandbox_id,
        current=current,
        state=_STATES.get(message.state, ContainerState.UNKNOWN),
        pid=message.pid,
    )


def values(resources: nri.LinuxResources, oom_score_adj: int = 0) -> Requested:
    """Return resources as canonical values. 0, "" and what cannot be read mean "not said"."""
    cpu = resources.cpu
    return requested_of(
        shares=cpu.shares.value,
        quota_us=cpu.quota.value,
        period_us=cpu.period.value,
        limit_bytes=resources.memory.limit.value,
        cpus=cpu.cpus,
        mems=cpu.mems,
        oom_score_adj=oom_score_adj or None,
    )


def requested_of(
    *,
    shares: int | None,
    quota_us: int | None,
    period_us: int | None,
    limit_bytes: int | None,
    cpus: str,
    mems: str,
    oom_score_adj: int | None,
) -> Requested:
    """Return what runtimes' messages ask for: 0 and "" are "not said", any negative limit "none".

    The score alone is taken as it is: 0 is a score.
    """
    return Requested(
        cpu_shares=shares or None,
        cfs_quota_us=max(quota_us, UNLIMITED) if quota_us else None,
        cfs_period_us=period_us or None,
        memory_limit_bytes=max(limit_bytes, UNLIMITED) if limit_bytes else None,
        cpus=cpu_set(cpus) if cpus else None,
        mems=cpu_set(mems) if mems else None,
        oom_score_adj=oom_score_adj,
    )


def cpu_set(text: str) -> CpuSet | None:
    """Return the set that a kernel list names; None for the empty list and for no list at all."""
    try:
        return CpuSet.parse(text) or None
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def place_of(cgroup_parent: str) -> tuple[str, KubeQoS]:
    """Return a pod's directory, "" when it is not known, and the QoS class that it stands for.

    A bare slice name is expanded the way systemd nests slices.
    """
    try:
        path = cgroup_paths.check_relative(cgroup_parent)
        if path.endswith(".slice") and "/" not in path:
            path = cgroup_paths.expand_slice(path)
    except PathError:
        return "", KubeQoS.GUARANTEED
    parsed = cgroup_paths.parse(path)
    return path, KubeQoS.GUARANTEED if parsed is None else KubeQoS(parsed.qos)


def directory_of(
    cgroups_path: str, pod_cgroup: str, container_id: str, runtime: RuntimeKind
) -> str:
    """Return a container's directory: from its OCI cgroups path, else by the runtime's rule."""
    # What containerd says on nearly every node; reading it in full costs more than all the rest.
    if container_id.isalnum() and container_id.isascii() and len(container_id) <= 128:
        slice_name = pod_cgroup.rpartition("/")[2]
        if cgroups_path == f"{slice_name}:cri-containerd:{container_id}":
            return f"{pod_cgroup}/cri-containerd-{container_id}.scope"
    try:
        if cgroups_path:
            return cgroup_paths.of_runtime_path(cgroups_path)
        if pod_cgroup and container_id:
            driver = Driver.SYSTEMD if pod_cgroup.endswith(".slice") else Driver.CGROUPFS
            return cgroup_paths.container_dir(driver, _NAMED_BY[runtime], pod_cgroup, container_id)
    except PathError:
        pass
    return ""
