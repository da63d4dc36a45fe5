"""Converts a Pod object to what the node needs of it: specification, requests, runtime ids.

Kubelet and the objects directory both supply Pod objects; only this file reads them. What kubelet
requests from the runtime follows from the specification; `hooks.amounts` computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from apis import core
from apis.keys import BATCH_CPU, BATCH_MEMORY, CPU, MEMORY, MID_CPU, MID_MEMORY
from apis.meta import parse_time
from apis.quantity import Quantity
from hooks.amounts import requested_of_container, requested_of_pod
from hooks.subject import Amounts, ContainerKind, ContainerSpec, Pod, Requested, make_pod

_CONFIG_HASH: Final = "kubernetes.io/config.hash"
"""Kubelet names a static pod's directory after this annotation, not after the mirror pod's UID."""


class KnownContainer(msgspec.Struct, frozen=True):
    """A container that a Pod object's status lists."""

    name: str
    id: str  # without its scheme
    runtime: str  # the scheme: "containerd", "cri-o", "docker"
    running: bool


class KnownPod(msgspec.Struct, frozen=True):
    """What a Pod object says.

    pod: without its cgroup, which a runtime or the node's layout supplies.
    requested: what kubelet requests for the pod as a whole; by_container: by container name.
    uids: every UID that the pod's directory may be named after; for a static pod also its
        configuration hash. Empty for a manifest without UID, which is matched by name.
    """

    pod: Pod
    requested: Requested
    by_container: Mapping[str, Requested]
    containers: tuple[KnownContainer, ...]
    uids: tuple[str, ...]
    terminated: bool
    deleting: bool = False  # its deletion has begun
    addresses: tuple[str, ...] = ()  # as its status lists them

    @property
    def name(self) -> tuple[str, str]:
        return self.pod.namespace, self.pod.name


def known_pod(pod: core.Pod) -> KnownPod:
    """Return what the object says about the pod."""
    meta = pod.metadata
    config_hash = meta.annotations.get(_CONFIG_HASH, "")
    uids = tuple(dict.fromkeys(uid for uid in (meta.uid, config_hash) if uid))
    specs = (
        *(_spec(container, ContainerKind.REGULAR) for container in pod.spec.containers),
        *(
            _spec(
                container,
                ContainerKind.SIDECAR if core.is_sidecar(container) else ContainerKind.INIT,
            )
            for container in pod.spec.init_containers
        ),
    )
    whole = pod.spec.resources
    view = make_pod(
        namespace=meta.namespace,
        name=meta.name,
        uid=uids[0] if uids else "",
        labels=meta.labels,
        annotations=meta.annotations,
        kube_qos=core.kube_qos(pod),
        priority=pod.spec.priority,
        runtime_handler=pod.spec.runtime_class_name or "",
        phase=pod.status.phase,
        host_network=pod.spec.host_network,
        created_at=_seconds(meta.creation_timestamp),
        specs=specs,
        resources=Amounts() if whole is None else _amounts(whole.requests, whole.limits),
        overhead=_amounts(pod.spec.overhead, pod.spec.overhead),
        restart_policy=pod.spec.restart_policy,
        status_reason=pod.status.reason,
    )
    return KnownPod(
        pod=view,
        requested=requested_of_pod(view),
        by_container={
            spec.name: requested_of_container(spec.amounts, view.resources) for spec in specs
        },
        containers=tuple(
            known
            for status in (
                *pod.status.container_statuses,
                *pod.status.init_container_statuses,
                *pod.status.ephemeral_container_statuses,
            )
            if (known := _known_container(status)) is not None
        ),
        uids=uids,
        terminated=core.is_terminated(pod),
        deleting=meta.deletion_timestamp is not None,
        addresses=_addresses(pod.status),
    )


def _spec(container: core.Container, kind: ContainerKind) -> ContainerSpec:
    resources = container.resources
    return ContainerSpec(container.name, kind, _amounts(resources.requests, resources.limits))


def _amounts(requests: Mapping[str, Quantity], limits: Mapping[str, Quantity]) -> Amounts:
    return Amounts(
        cpu_request_milli=_milli(requests.get(CPU)),
        cpu_limit_milli=_milli(limits.get(CPU)),
        memory_request_bytes=_units(requests.get(MEMORY)),
        memory_limit_bytes=_units(limits.get(MEMORY)),
        # The unit of batch-cpu and mid-cpu is the milli-core already.
        batch_cpu_request_milli=_units(requests.get(BATCH_CPU)),
        batch_cpu_limit_milli=_units(limits.get(BATCH_CPU)),
        batch_memory_request_bytes=_units(requests.get(BATCH_MEMORY)),
        batch_memory_limit_bytes=_units(limits.get(BATCH_MEMORY)),
        mid_cpu_request_milli=_units(requests.get(MID_CPU)),
        mid_cpu_limit_milli=_units(limits.get(MID_CPU)),
        mid_memory_request_bytes=_units(requests.get(MID_MEMORY)),
        mid_memory_limit_bytes=_units(limits.get(MID_MEMORY)),
    )


def _addresses(status: core.PodStatus) -> tuple[str, ...]:
    """Return the pod's addresses: podIPs has one of each family, podIP the first of them."""
    listed = (status.pod_ip, *(each.ip for each in status.pod_ips))
    return tuple(dict.fromkeys(ip for ip in listed if ip))


def _milli(quantity: Quantity | None) -> int | None:
    return None if quantity is None else quantity.milli_value()


def _units(quantity: Quantity | None) -> int | None:
    return None if quantity is None else quantity.value()


def _known_container(status: core.ContainerStatus) -> KnownContainer | None:
    runtime, separator, container_id = status.container_id.partition("://")
    if not separator or not container_id:
        return None
    return KnownContainer(
        name=status.name,
        id=container_id,
        runtime=runtime,
        running=status.state.terminated is None,
    )


def _seconds(timestamp: str | None) -> float:
    """Return an RFC 3339 time as seconds since the epoch; 0 when absent or unreadable."""
    if not timestamp:
        return 0.0
    try:
        return parse_time(timestamp).timestamp()
    except ValueError:
        return 0.0
