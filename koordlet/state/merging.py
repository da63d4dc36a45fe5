"""Merges what the sources say about one pod, by the precedence that `koordlet.state` states. Pure.

A part that equals the one from before stays the same object: decisions are cached by identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from apis.qos import KubeQoS
from hooks.requested import overlay
from hooks.subject import (
    ContainerSubject,
    Pod,
    PodSubject,
    QosSubject,
    Requested,
    SandboxSubject,
)
from koordlet.state.pod_objects import PodObjects
from koordlet.state.podspec import KnownPod
from koordlet.state.records import ContainerRecord, PodRecords, SandboxRecord
from linux import cgroup_paths
from linux.cgroup_paths import Layout, PathError, Runtime

_T = TypeVar("_T")

_SCHEMES: Final = {runtime.value: runtime for runtime in Runtime}


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod, merged. Parts that did not change are the same objects as before.

    started: the containers whose processes run or ran. The others are not subjects yet.
    deleting: the pod's deletion has begun. described: by a Pod object, not by the runtime alone.
    addresses: as the Pod object's status lists them.
    """

    pod: Pod
    subject: PodSubject
    sandboxes: tuple[SandboxSubject, ...]
    containers: tuple[ContainerSubject, ...]
    started: tuple[ContainerSubject, ...]
    deleting: bool = False
    described: bool = True
    addresses: tuple[str, ...] = ()


def merge_pod(
    uid: str,
    records: PodRecords,
    objects: PodObjects,
    *,
    layout: Layout | None,
    gone: Collection[str],
    before: PodView | None,
) -> PodView | None:
    """Return the pod as all sources together show it; None while no source has it on this node.

    gone: ids of containers that ended, whatever a Pod object's status still says.
    before: the previous view of this pod.
    """
    running = sorted(records.containers.values(), key=lambda container: container.id)
    used = {container.sandbox_id for container in running}
    live = sorted(
        (each for each in records.sandboxes.values() if not each.stopped or each.id in used),
        key=lambda sandbox: sandbox.id,
    )
    newest = max(live, key=lambda sandbox: sandbox.seen, default=None)
    known = objects.find(uid, newest.pod if newest else None)
    if known is not None:
        if newest is None and not _stands_alone(uid, known, layout):
            return None
        pod, requested = _known_here(uid, known, newest, layout), known.requested
    elif newest is not None:
        pod, requested = _placed(newest.pod, newest.pod.cgroup, layout), newest.resources
        requested = _grown(requested, running)
    else:
        return None
    if before is not None and before.pod == pod:
        pod = before.pod
    old_sandboxes = {each.id: each for each in before.sandboxes} if before else {}
    old_containers = {each.id: each for each in before.containers} if before else {}
    containers = [container_of(pod, container, known) for container in running]
    if known is not None:
        containers += [
            each
            for each in _listed_in_status(pod, known, objects, layout)
            if each.id not in records.containers and each.id not in gone
        ]
    made = tuple(_same(old_containers.get(each.id), each) for each in containers)
    waiting = {container.id for container in running if not container.started}
    return PodView(
        pod=pod,
        subject=_same(before.subject if before else None, PodSubject(pod=pod, requested=requested)),
        sandboxes=tuple(
            _same(
                old_sandboxes.get(sandbox.id),
                SandboxSubject(pod=pod, id=sandbox.id, cgroup=sandbox.cgroup),
            )
            for sandbox in live
            if not sandbox.stopped
        ),
        containers=made,
        started=tuple(each for each in made if each.id not in waiting) if waiting else made,
        deleting=known is not None and known.deleting,
        described=known is not None,
        addresses=known.addresses if known is not None else (),
    )


def container_of(pod: Pod, record: ContainerRecord, known: KnownPod | None) -> ContainerSubject:
    """Return a container of a merged pod."""
    return ContainerSubject(
        pod=pod,
        name=record.name,
        id=record.id,
        cgroup=record.cgroup,
        requested=_requested(record, known),
    )


def qos_subjects(
    pods: Iterable[Pod], layout: Layout | None, before: Mapping[KubeQoS, QosSubject]
) -> dict[KubeQoS, QosSubject]:
    """Return the QoS directories with the pods below each; the root has all of them.

    before: the previous subjects; a directory whose pods are the same objects stays the same.
    """
    if layout is None or not layout.kubepods:
        return {}
    pods = [pod for pod in pods if not pod.ended]
    made = {}
    for qos in KubeQoS:
        of_class = tuple(pod for pod in pods if qos is KubeQoS.GUARANTEED or pod.kube_qos is qos)
        subject = before.get(qos)
        if (
            subject is None
            or len(subject.pods) != len(of_class)
            or any(old is not new for old, new in zip(subject.pods, of_class, strict=True))
        ):
            cgroup = cgroup_paths.qos_dir(layout.driver, layout.kubepods, qos)
            subject = QosSubject(kube_qos=qos, cgroup=cgroup, pods=of_class)
        made[qos] = subject
    return made


def _stands_alone(uid: str, known: KnownPod, layout: Layout | None) -> bool:
    """Return whether a Pod object alone shows that the pod is on the node, and where."""
    return (
        layout is not None
        and bool(layout.kubepods)
        and uid == known.uids[-1]
        and not known.terminated
        and (known.pod.phase == "Running" or any(each.running for each in known.containers))
    )


def _known_here(
    uid: str, known: KnownPod, newest: SandboxRecord | None, layout: Layout | None
) -> Pod:
    """Return the pod that an object describes, in the cgroup that the runtime reported."""
    handler = newest.pod.runtime_handler if newest is not None else ""
    pod = msgspec.structs.replace(
        known.pod, uid=uid, runtime_handler=handler or known.pod.runtime_handler
    )
    return _placed(pod, newest.pod.cgroup if newest is not None else "", layout)


def _placed(pod: Pod, cgroup: str, layout: Layout | None) -> Pod:
    """Return the pod with its directory, and the QoS class that the directory shows."""
    if cgroup:
        place = cgroup_paths.parse(cgroup)
        kube_qos = pod.kube_qos if place is None else KubeQoS(place.qos.value)
        if cgroup == pod.cgroup and kube_qos is pod.kube_qos:
            return pod
        return msgspec.structs.replace(pod, cgroup=cgroup, kube_qos=kube_qos)
    if layout is None or not layout.kubepods:
        return pod
    try:
        computed = cgroup_paths.pod_dir(layout.driver, layout.kubepods, pod.kube_qos, pod.uid)
    except PathError:
        return pod
    return msgspec.structs.replace(pod, cgroup=computed)


def _requested(record: ContainerRecord, known: KnownPod | None) -> Requested:
    if record.hooked and record.from_events is not None:
        return record.from_events
    # The values first reported were requested by kubelet, CPUs too: its static CPU policy names
    # them at the container's creation and does not repeat them.
    specified = known.by_container.get(record.name) if known is not None else None
    base = record.first_reported if specified is None else overlay(specified, record.first_reported)
    # An update names only what changes. The rest was requested before koordlet was connected.
    return base if record.from_events is None else overlay(record.from_events, base)


def _grown(reported: Requested, containers: Iterable[ContainerRecord]) -> Requested:
    """Return a pod's values with a quota of at least the sum of its containers' quotas.

    The runtime reports kubelet's sums at the pod's start, and not again when a container is
    resized.
    """
    if reported.cfs_quota_us is None or reported.cfs_quota_us <= 0:
        return reported
    quotas = (each.request.cfs_quota_us or 0 for each in containers)
    together = sum(quota for quota in quotas if quota > 0)
    if together <= reported.cfs_quota_us:
        return reported
    return msgspec.structs.replace(reported, cfs_quota_us=together)


def _listed_in_status(
    pod: Pod, known: KnownPod, objects: PodObjects, layout: Layout | None
) -> list[ContainerSubject]:
    """Return the running containers that the Pod object's status lists."""
    if layout is None or not pod.cgroup:
        return []
    found = []
    for each in known.containers:
        runtime = _SCHEMES.get(each.runtime)
        if not each.running or runtime is None:
            continue
        try:
            cgroup = cgroup_paths.container_dir(layout.driver, runtime, pod.cgroup, each.id)
        except PathError:
            continue
        found.append(
            ContainerSubject(
                pod=pod,
                name=each.name,
                id=each.id,
                cgroup=cgroup,
                requested=objects.requested(known, each.name, each.id),
            )
        )
    return found


def _same(before: _T | None, now: _T) -> _T:
    """Return the former object when it is equal: decisions are cached by identity."""
    return before if before is not None and before == now else now
