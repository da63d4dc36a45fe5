"""Claims and volumes as they are after a simulated binding.

The volume of a claim that would be provisioned is made at once. It is taken to be reachable from
the zone of its node, because what a driver's volume can be reached from is known only when it is
made.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from apis.core import ObjectMeta
from apis.meta import ObjectReference
from apis.scheduling_pod import NodeSelector, NodeSelectorRequirement, NodeSelectorTerm
from apis.storage import (
    ANNOTATION_BIND_COMPLETED,
    CSIVolumeSource,
    PersistentVolume,
    PersistentVolumeClaim,
    PersistentVolumeSpec,
    PersistentVolumeStatus,
    StorageClass,
    VolumeNodeAffinity,
)
from cluster.scheduler.binding.placement import Placement
from cluster.scheduler.core import SchedulerCore
from kube.cache import Cache
from kube.resources import STORAGE_CLASSES

_ZONE: Final = "topology.kubernetes.io/zone"


def confirm_volumes(core: SchedulerCore, placement: Placement) -> None:
    """Bind the claims of a pod as its placement plans."""
    claims, volumes = core.volumes.claims, core.volumes.volumes
    for key, name in placement.volumes.binds:
        claim, volume = claims.items.get(key), volumes.get(name)
        if claim is not None and volume is not None:
            _bind(core, claim, volume)
    for key in placement.volumes.provisions:
        claim = claims.items.get(key)
        if claim is not None:
            _bind(core, claim, _made(core, claim, placement.node))


def _bind(core: SchedulerCore, claim: PersistentVolumeClaim, volume: PersistentVolume) -> None:
    replace, meta = msgspec.structs.replace, claim.metadata
    reference = ObjectReference(
        api_version="v1",
        kind="PersistentVolumeClaim",
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
    )
    core.volumes.volumes.put(
        replace(
            volume,
            spec=replace(volume.spec, claim_ref=reference),
            status=PersistentVolumeStatus("Bound"),
        )
    )
    annotations = meta.annotations | {ANNOTATION_BIND_COMPLETED: "yes"}
    core.volumes.claims.put(
        replace(
            claim,
            metadata=replace(meta, annotations=annotations),
            spec=replace(claim.spec, volume_name=volume.metadata.name),
            status=replace(claim.status, phase="Bound"),
        )
    )


def _made(core: SchedulerCore, claim: PersistentVolumeClaim, node: str) -> PersistentVolume:
    found = core.nodes.get(node)
    zone = found.metadata.labels.get(_ZONE) if found is not None else None
    affinity = None
    if zone is not None:
        term = NodeSelectorTerm(match_expressions=(NodeSelectorRequirement(_ZONE, "In", (zone,)),))
        affinity = VolumeNodeAffinity(required=NodeSelector(node_selector_terms=(term,)))
    name = f"simulated-{claim.metadata.namespace}-{claim.metadata.name}"
    storage = _class_of(core, claim.class_name)
    return PersistentVolume(
        metadata=ObjectMeta(name=name, uid=name),
        spec=PersistentVolumeSpec(
            capacity=claim.spec.resources.requests,
            access_modes=claim.spec.access_modes,
            storage_class_name=claim.class_name,
            volume_mode=claim.spec.volume_mode,
            node_affinity=affinity,
            csi=CSIVolumeSource(storage.provisioner, name) if storage is not None else None,
        ),
    )


def _class_of(core: SchedulerCore, name: str) -> StorageClass | None:
    caches: tuple[Cache[Any], ...] = core.volumes.caches
    classes: Cache[StorageClass] = next(c for c in caches if c.resource == STORAGE_CLASSES)
    return classes.get(name)
