"""Parses NRI messages into subjects, once, at the edge.

Nothing is trusted for being there: the pod, its `linux` part and any name may be missing or empty
(a leftover container is stopped after its sandbox is gone). A cgroup path that could lead out of
its hierarchy becomes "", which means "not known". In requests, 0 and "" mean "not given".
Source: docs/facts/nri.md, "What messages say" and "What an update takes".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hooks.observed import Container, ContainerState, Sandbox
from hooks.places import directory_of, place_of
from hooks.requested import requested_of
from hooks.subject import (
    NOTHING_REQUESTED,
    ContainerSubject,
    Pod,
    Requested,
    SandboxSubject,
    make_pod,
)
from linux.cgroup_paths import Runtime
from nri_plugin.capabilities import RuntimeKind
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
    cgroup = directory_of(linux.cgroups_path, "", message.id, Runtime.CONTAINERD)
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
    message: nri.CreateContainerRequest, runtime: RuntimeKind, known: Pod | None = None
) -> Container:
    """Return the container that is about to be created, with what kubelet asks for it.

    known: the pod as its sandbox's event described it. The runtime never refreshes a pod, so
    it is not read a second time.
    """
    pod = known if known is not None and known.uid == message.pod.uid else pod_of(message.pod)
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
            cgroup=directory_of(linux.cgroups_path, pod.cgroup, message.id, _NAMED_BY[runtime]),
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
