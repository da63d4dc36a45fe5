"""Copies of a pod whose number is asked for, each with claims of its own, as replicas have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from apis.errors import InputError
from apis.scheduling_pod import SchedulingPod
from apis.storage import PersistentVolumeClaim, decode_claim
from cluster.scheduler.simulation.objects import FileObject


def claims_by_name(claims: Iterable[FileObject]) -> dict[str, PersistentVolumeClaim]:
    """Return the claims that are made for one pod, by name. Raises InputError."""
    result: dict[str, PersistentVolumeClaim] = {}
    for each in claims:
        try:
            result[each.name] = decode_claim(each.raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InputError(obj=each.ref, field="", value="", problem=str(error)) from None
    return result


def copy_of(
    pod: SchedulingPod, number: int, claims: Mapping[str, PersistentVolumeClaim]
) -> tuple[SchedulingPod, tuple[PersistentVolumeClaim, ...]]:
    """Return a copy of a pod, and the claims that it has instead of the pod's.

    claims: those that are made for the pod, by name; it shares its other claims with its copies.
    The names have a "#", which no name in a cluster has.
    """
    replace = msgspec.structs.replace
    name, uid = f"{pod.metadata.name}#{number}", f"{pod.metadata.uid}-{number}"
    volumes = []
    made = []
    for volume in pod.spec.volumes:
        source = volume.persistent_volume_claim
        if source is not None and source.claim_name in claims:
            own = f"{source.claim_name}#{number}"
            made.append(_renamed(claims[source.claim_name], own, pod.metadata.uid, uid))
            volume = replace(volume, persistent_volume_claim=replace(source, claim_name=own))
        elif volume.ephemeral is not None:
            # Its claim has the names of the pod and of the volume.
            former = f"{pod.metadata.name}-{volume.name}"
            if former in claims:
                own = f"{name}-{volume.name}"
                made.append(_renamed(claims[former], own, pod.metadata.uid, uid))
        volumes.append(volume)
    copy = replace(
        pod,
        metadata=replace(pod.metadata, name=name, uid=uid),
        spec=replace(pod.spec, volumes=tuple(volumes)),
    )
    return copy, tuple(made)


def _renamed(
    claim: PersistentVolumeClaim, name: str, former_owner: str, owner: str
) -> PersistentVolumeClaim:
    replace = msgspec.structs.replace
    meta = claim.metadata
    owners = tuple(
        replace(each, uid=owner) if each.uid == former_owner else each
        for each in meta.owner_references
    )
    uid = f"simulated-{meta.namespace}-{name}"
    return replace(claim, metadata=replace(meta, name=name, uid=uid, owner_references=owners))
