"""The claims of a pod as they are now: bound ones, and those that are bound with the pod."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.tables.shapes import PodClaim, PodShape
from cluster.scheduler.tables.volumes.objects import Claim
from cluster.scheduler.tables.volumes.table import VolumeTable


@dataclass(frozen=True, slots=True)
class Asked:
    """bound: claims that have a volume. waiting: claims that are bound when the pod has a node."""

    bound: tuple[Claim, ...]
    waiting: tuple[Claim, ...]


def claim_key(pod: PodShape, claim: PodClaim) -> str:
    """Return namespace/name of a pod's claim."""
    return f"{pod.namespace}/{claim.name}"


def claims_asked(pod: PodShape, volumes: VolumeTable, plugin: str) -> Asked:
    """Return the claims of a pod. Raises Refusal, in the name of `plugin`, if one is unusable."""
    bound, waiting, immediate = [], [], False
    for each in pod.claims:
        claim = _usable(pod, each, volumes, plugin)
        if claim.bound:
            bound.append(claim)
        elif volumes.waits(claim):
            waiting.append(claim)
        else:
            immediate = True
    if immediate:
        raise Refusal(plugin, "pod has unbound immediate PersistentVolumeClaims")
    return Asked(tuple(bound), tuple(waiting))


def missing(each: PodClaim) -> str:
    """Return the message about a claim that does not exist."""
    if each.pod:
        return (
            "waiting for ephemeral volume controller to create the persistentvolumeclaim "
            f'"{each.name}"'
        )
    return f'persistentvolumeclaim "{each.name}" not found'


def _usable(pod: PodShape, each: PodClaim, volumes: VolumeTable, plugin: str) -> Claim:
    claim = volumes.claim(claim_key(pod, each))
    if claim is None:
        raise Refusal(plugin, missing(each))
    if claim.lost:
        raise Refusal(
            plugin,
            f'persistentvolumeclaim "{each.name}" bound to non-existent persistentvolume '
            f'"{claim.volume}"',
        )
    if claim.deleting:
        raise Refusal(plugin, f'persistentvolumeclaim "{each.name}" is being deleted')
    if each.pod and claim.owner != each.pod_uid:
        raise Refusal(
            plugin,
            f"PVC {claim.key} was not created for pod {pod.namespace}/{each.pod} "
            "(pod is not owner)",
        )
    return claim
