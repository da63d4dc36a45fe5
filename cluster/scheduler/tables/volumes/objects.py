"""Claims and persistent volumes as the tables keep them: parsed once, compared by value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from apis.meta import LabelSelector
from apis.quantity import Quantity
from apis.storage import (
    NO_PROVISIONER,
    STORAGE,
    WAIT_FOR_FIRST_CONSUMER,
    CSIStorageCapacity,
    PersistentVolume,
    PersistentVolumeClaim,
    StorageClass,
)
from cluster.scheduler.tables.volumes.places import Place, place_of_topologies

_ZONE: Final = "topology.kubernetes.io/zone"
_REGION: Final = "topology.kubernetes.io/region"
ZONE_LABELS: Final = {
    "failure-domain.beta.kubernetes.io/zone": _ZONE,
    "failure-domain.beta.kubernetes.io/region": _REGION,
    _ZONE: _ZONE,
    _REGION: _REGION,
}
"""Labels of volumes that say where their nodes have to be, and the present name of each."""
_ZONES_APART: Final = "__"
"""Between the zones of one label of a volume."""
MIGRATED: Final = {
    "kubernetes.io/aws-ebs": "ebs.csi.aws.com",
    "kubernetes.io/gce-pd": "pd.csi.storage.gke.io",
    "kubernetes.io/azure-disk": "disk.csi.azure.com",
    "kubernetes.io/cinder": "cinder.csi.openstack.org",
    "kubernetes.io/portworx-volume": "pxd.portworx.com",
}
"""In-tree plugin -> CSI driver that serves its volumes, of those that kube-scheduler counts."""


_MOST_BYTES: Final = 2**62
"""Sizes are cut to this; sums of two stay within 64 bits."""


class Attached(NamedTuple):
    """A volume that takes a place of a driver on a node.

    plugin: in-tree plugin that the volume was made for, or ""; such a volume counts on nodes where
    the driver serves that plugin.
    """

    driver: str
    handle: str
    plugin: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A persistent volume claim. key: namespace/name. size: bytes. volume: name of its volume, or
    "". owner: UID of the controlling owner, or ""."""

    key: str
    uid: str
    class_name: str
    modes: frozenset[str]
    volume_mode: str
    size: int
    sized: bool
    selector: LabelSelector | None
    volume: str
    bound: bool
    lost: bool
    deleting: bool
    selected_node: str
    owner: str


@dataclass(frozen=True, slots=True)
class Volume:
    """A persistent volume. size: bytes. claim: key of the claim that it is bound or reserved to, or
    "". claim_uid: UID of that claim, or "" if any claim of the name is meant. zones: (label,
    values) of the topology labels."""

    name: str
    class_name: str
    modes: frozenset[str]
    volume_mode: str
    size: int
    claim: str
    claim_uid: str
    available: bool
    deleting: bool
    labels: tuple[tuple[str, str], ...]
    place: Place
    zones: tuple[tuple[str, frozenset[str]], ...]
    attached: Attached | None

    def is_for(self, claim: Claim) -> bool:
        """Return whether the volume is bound or reserved to this claim."""
        return self.claim == claim.key and self.claim_uid in ("", claim.uid)


@dataclass(frozen=True, slots=True)
class Class:
    """A StorageClass. waits: its claims are bound when a pod that uses them has a node.
    provisioner: "" if volumes cannot be made. topologies: where they can be."""

    name: str
    waits: bool
    provisioner: str
    topologies: Place


def claim_of(claim: PersistentVolumeClaim) -> Claim:
    """Return what the tables keep of a claim."""
    meta, spec = claim.metadata, claim.spec
    request = spec.resources.requests.get(STORAGE)
    return Claim(
        key=f"{meta.namespace}/{meta.name}",
        uid=meta.uid,
        class_name=claim.class_name,
        modes=frozenset(spec.access_modes),
        volume_mode=spec.volume_mode,
        size=bytes_of(request),
        sized=request is not None,
        selector=spec.selector,
        volume=spec.volume_name,
        bound=claim.is_bound,
        lost=claim.status.phase == "Lost",
        deleting=meta.deletion_timestamp is not None,
        selected_node=claim.selected_node,
        owner=next((owner.uid for owner in meta.owner_references if owner.controller), ""),
    )


def volume_of(volume: PersistentVolume) -> Volume:
    """Return what the tables keep of a persistent volume."""
    meta, spec = volume.metadata, volume.spec
    reference = spec.claim_ref
    affinity = spec.node_affinity
    required = affinity.required if affinity is not None else None
    return Volume(
        name=meta.name,
        class_name=volume.class_name,
        modes=frozenset(spec.access_modes),
        volume_mode=spec.volume_mode,
        size=bytes_of(spec.capacity.get(STORAGE)),
        claim=f"{reference.namespace}/{reference.name}" if reference is not None else "",
        claim_uid=reference.uid if reference is not None else "",
        available=volume.status.phase == "Available",
        deleting=meta.deletion_timestamp is not None,
        labels=tuple(sorted(meta.labels.items())),
        place=required.node_selector_terms if required is not None else None,
        zones=tuple(
            (key, values)
            for key in ZONE_LABELS
            if (values := _zones(meta.labels.get(key))) is not None
        ),
        attached=_attached(volume),
    )


def class_of(storage_class: StorageClass) -> Class:
    """Return what the tables keep of a StorageClass."""
    provisioner = storage_class.provisioner
    return Class(
        name=storage_class.metadata.name,
        waits=storage_class.volume_binding_mode == WAIT_FOR_FIRST_CONSUMER,
        provisioner="" if provisioner == NO_PROVISIONER else provisioner,
        topologies=place_of_topologies(storage_class.allowed_topologies),
    )


def largest_volume(report: CSIStorageCapacity) -> int:
    """Return how large a new volume can be at most by one report, in bytes; -1 for none."""
    limit = report.maximum_volume_size
    if limit is None:
        limit = report.capacity
    return -1 if limit is None else bytes_of(limit)


def attached_by_provisioner(provisioner: str, claim: str) -> Attached:
    """Return what a volume that is not made yet will take of a node."""
    handle = f"claim:{claim}"
    driver = MIGRATED.get(provisioner)
    if driver is None:
        return Attached(provisioner, handle)
    return Attached(driver, handle, provisioner)


def bytes_of(size: Quantity | None) -> int:
    """Return a size in bytes, 0 for none."""
    return 0 if size is None else max(0, min(size.value(), _MOST_BYTES))


def _zones(text: str | None) -> frozenset[str] | None:
    """Return the zones of a volume's label; None if there is none or it cannot be read."""
    if text is None:
        return None
    zones = [zone.strip() for zone in text.split(_ZONES_APART)]
    return frozenset(zones) if all(zones) else None


def _attached(volume: PersistentVolume) -> Attached | None:
    spec = volume.spec
    if spec.csi is not None:
        return Attached(spec.csi.driver, spec.csi.volume_handle)
    for plugin, source in (
        ("kubernetes.io/aws-ebs", spec.aws_elastic_block_store),
        ("kubernetes.io/gce-pd", spec.gce_persistent_disk),
        ("kubernetes.io/azure-disk", spec.azure_disk),
        ("kubernetes.io/cinder", spec.cinder),
        ("kubernetes.io/portworx-volume", spec.portworx_volume),
    ):
        if source is not None:
            return Attached(MIGRATED[plugin], source.handle, plugin)
    return None
