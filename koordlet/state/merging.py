"""One pod out of all that sources told of it: pure functions that hold the stated precedence.

What is equal to before stays the same object, since decisions are cached by identity.
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
from koordlet.state.runtime_records import ContainerRecord, PodRecords, SandboxRecord
from linux import cgroup_paths
from linux.cgroup_paths import Layout, PathError, Runtime

_T = TypeVar("_T")

_ENDED: Final = frozenset({"Succeeded", "Failed"})
_SCHEMES: Final = {runtime.value: runtime for runtime in Runtime}


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod, merged. Parts that did not change are the same objects as before.

    started: the containers whose processes run, or ran: the others are no subjects yet.
    """

    pod: Pod
    subject: PodSubject
    sandboxes: tuple[SandboxSubject, ...]
    containers: tuple[ContainerSubject, ...]
    started: tuple[ContainerSubject, ...]


def merge_pod(
    uid: str,
    records: PodRecords,
    objects: PodObjects,
    *,
    layout: Layout | None,
    gone: Collection[str],
    before: PodView | None,
) -> PodView | None:
    """Return the pod as all sources together show it; None while nobody tells that it is here.

    gone: ids of containers that ended, whatever a Pod object's status still says.
    before: the view that this one replaces.
    """
    running = sorted(records.containers.values(), key=lambda container: container.id)
    used = {container.sandbox_id for container in running}
    live = sorted(
        (each for each in records.sandboxes.values() if not each.stopped or each.id in used),
        key=lambda sandbox: sandbox.id,
    )
    told = max(live, key=lambda sandbox: sandbox.seen, default=None)
    known = objects.find(uid, told.pod if told else None)
    if known is not None:
        if told is None and not _stands_alone(uid, known, layout):
            return None
        pod, requested = _known_here(uid, known, told, layout), known.requested
    elif told is not None:
        pod, requested = _placed(told.pod, told.pod.cgroup, layout), told.resources
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
            for each in _told_by_status(pod, known, objects, layout)
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

    before: what this replaces; a directory with the very same pods stays the same object.
    """
    if layout is None or not layout.kubepods:
        return {}
    pods = [pod for pod in pods if pod.phase not in _ENDED]
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
    """Tell whether a Pod object alone shows that the pod is on the node, and where."""
    return (
        layout is not None
        and bool(layout.kubepods)
        and uid == known.uids[-1]
        and not known.terminated
        and (known.pod.phase == "Running" or any(each.running for each in known.containers))
    )


def _known_here(
    uid: str, known: KnownPod, told: SandboxRecord | None, layout: Layout | None
) -> Pod:
    """Return the pod that an object describes, where the runtime has it."""
    handler = told.pod.runtime_handler if told is not None else ""
    pod = msgspec.structs.replace(
        known.pod, uid=uid, runtime_handler=handler or known.pod.runtime_handler
    )
    return _placed(pod, told.pod.cgroup if told is not None else "", layout)


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
    if record.hooked and record.asked is not None:
        return record.asked
    # What stands there at first sight was asked for, CPUs too: kubelet's static policy names them
    # when it makes a container, and does not say so again.
    specified = known.by_container.get(record.name) if known is not None else None
    base = record.first if specified is None else overlay(specified, record.first)
    # An update names what changes; the rest of the request went by before anybody listened.
    return base if record.asked is None else overlay(record.asked, base)


def _grown(told: Requested, containers: Iterable[ContainerRecord]) -> Requested:
    """Return a pod's values with a quota that its containers, as they are now, fit into.

    The runtime tells kubelet's sums at the pod's start, and not again when a container is resized.
    """
    if told.cfs_quota_us is None or told.cfs_quota_us <= 0:
        return told
    quotas = (each.request.cfs_quota_us or 0 for each in containers)
    together = sum(quota for quota in quotas if quota > 0)
    if together <= told.cfs_quota_us:
        return told
    return msgspec.structs.replace(told, cfs_quota_us=together)


def _told_by_status(
    pod: Pod, known: KnownPod, objects: PodObjects, layout: Layout | None
) -> list[ContainerSubject]:
    """Return the running containers that the Pod object's status tells of."""
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
    """Return the object from before when it is equal: decisions are cached by identity."""
    return before if before is not None and before == now else now
