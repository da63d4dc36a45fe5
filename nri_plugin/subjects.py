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
_MOST_PODS: Final = 8192
"""The daemon's state keeps as many sandboxes; a pod that is dropped is parsed again."""

_MOST_VALUES: Final = 2048
"""Different resources of containers whose parsed form is kept, about 1 MB; then all are dropped."""

_VALUES: Final[dict[tuple[bytes, int], Requested]] = {}
"""Resources by their encoding: replicas request the same, and one lookup replaces the reading of
a dozen fields while the runtime waits."""

_STATES: Final = {state.value: state for state in ContainerState}


class Pods:
    """The pods of one connection, each parsed once.

    A runtime keeps what kubelet said of a pod when its sandbox was made, and repeats that in every
    message about one of its containers.
    """

    def __init__(self) -> None:
        self._by_sandbox: dict[str, Pod] = {}

    def read(self, message: nri.PodSandbox) -> Pod:
        """Parse the message, and keep the pod."""
        pod = pod_of(message)
        # A leftover's message says nothing of its pod, and takes nothing away.
        if message.id and pod.uid and pod.cgroup:
            if len(self._by_sandbox) >= _MOST_PODS:
                self._by_sandbox.pop(next(iter(self._by_sandbox)))
            self._by_sandbox[message.id] = pod
        return pod

    def of(self, message: nri.PodSandbox) -> Pod:
        """Return the pod behind a sandbox, parsed now only if it has not been before."""
        pod = self._by_sandbox.get(message.id)
        return pod if pod is not None and pod.uid == message.uid else self.read(message)

    def forget(self, sandbox_id: str) -> None:
        """The sandbox is gone."""
        self._by_sandbox.pop(sandbox_id, None)


def sandbox(message: nri.PodSandbox, pod: Pod | None = None) -> Sandbox:
    """Return the sandbox that a message describes. pod: the pod behind it, if it is parsed."""
    linux = message.linux
    pod = pod or pod_of(message)
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


def created_container(pod: Pod, message: nri.Container, runtime: RuntimeKind) -> Container:
    """Return the container that is about to be created, with what kubelet requests for it."""
    linux = message.linux
    # What a creation requests is all that the container has so far.
    requested = values(linux.resources, linux.oom_score_adj.value)
    return Container(
        _subject(pod, message, linux, requested, runtime), message.pod_sandbox_id, requested
    )


def updated_container(
    pod: Pod, message: nri.Container, requested: nri.LinuxResources, runtime: RuntimeKind
) -> Container:
    """Return the container as it is now, with what this update requests for it."""
    return _container(pod, message, runtime, requested=values(requested))


def container_of_pod(pod: Pod, message: nri.Container, runtime: RuntimeKind) -> Container:
    """Return a container as it is now, with nothing requested."""
    return _container(pod, message, runtime)


def _container(
    pod: Pod,
    message: nri.Container,
    runtime: RuntimeKind,
    *,
    requested: Requested = NOTHING_REQUESTED,
) -> Container:
    linux = message.linux
    return Container(
        subject=_subject(pod, message, linux, requested, runtime),
        sandbox_id=message.pod_sandbox_id,
        current=values(linux.resources, linux.oom_score_adj.value),
        state=_STATES.get(message.state, ContainerState.UNKNOWN),
        pid=message.pid,
    )


def _subject(
    pod: Pod,
    message: nri.Container,
    linux: nri.LinuxContainer,
    requested: Requested,
    runtime: RuntimeKind,
) -> ContainerSubject:
    id_ = message.id
    return ContainerSubject(
        pod,
        message.name or message.labels.get(_LABEL_CONTAINER_NAME, ""),
        id_,
        directory_of(linux.cgroups_path, pod.cgroup, id_, _NAMED_BY[runtime]),
        requested,
    )


def values(resources: nri.LinuxResources, oom_score_adj: int = 0) -> Requested:
    """Return resources as canonical values. 0, "" and what cannot be read mean "not said"."""
    key = resources.SerializeToString(), oom_score_adj
    known = _VALUES.get(key)
    if known is None:
        if len(_VALUES) >= _MOST_VALUES:
            _VALUES.clear()
        known = _VALUES[key] = _values(resources, oom_score_adj)
    return known


def _values(resources: nri.LinuxResources, oom_score_adj: int) -> Requested:
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
