"""Claims, persistent volumes, their classes and CSI objects, as far as a scheduler reads them.

Unknown fields are ignored when decoding. Objects are patched, never rewritten from these types.
"""

from __future__ import annotations

from typing import Final

from msgspec import field

from apis.core import ObjectMeta, ResourceRequirements
from apis.decode import Wire, json_decoder
from apis.meta import LabelSelector, ObjectReference
from apis.quantity import Quantity, ResourceList
from apis.scheduling_pod import NodeSelector

STORAGE: Final = "storage"
"""Name of the resource that claims request and volumes have."""
READ_WRITE_ONCE_POD: Final = "ReadWriteOncePod"
WAIT_FOR_FIRST_CONSUMER: Final = "WaitForFirstConsumer"
NO_PROVISIONER: Final = "kubernetes.io/no-provisioner"
"""As the provisioner of a class: volumes are made by hand."""
ANNOTATION_CLASS: Final = "volume.beta.kubernetes.io/storage-class"
"""On a claim or volume; it replaces spec.storageClassName."""
ANNOTATION_SELECTED_NODE: Final = "volume.kubernetes.io/selected-node"
"""On a claim: its volume is to be made for this node."""
ANNOTATION_BIND_COMPLETED: Final = "pv.kubernetes.io/bind-completed"
"""On a claim: the controller has finished binding it."""
ANNOTATION_BOUND_BY_CONTROLLER: Final = "pv.kubernetes.io/bound-by-controller"
"""On a volume: the reference to its claim was not set by a user, so it may be taken back."""
ANNOTATION_MIGRATED_PLUGINS: Final = "storage.alpha.kubernetes.io/migrated-plugins"
"""On a CSINode: in-tree plugins whose volumes a CSI driver serves on the node, by commas."""


class PersistentVolumeClaimSpec(Wire, frozen=True):
    access_modes: tuple[str, ...] = ()
    selector: LabelSelector | None = None
    resources: ResourceRequirements = ResourceRequirements()
    volume_name: str = ""
    storage_class_name: str | None = None
    volume_mode: str = "Filesystem"


class PersistentVolumeClaimStatus(Wire, frozen=True):
    phase: str = ""


class PersistentVolumeClaim(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: PersistentVolumeClaimSpec = PersistentVolumeClaimSpec()
    status: PersistentVolumeClaimStatus = PersistentVolumeClaimStatus()

    @property
    def class_name(self) -> str:
        """Name of the StorageClass, or "" for a claim without one."""
        return self.metadata.annotations.get(ANNOTATION_CLASS, self.spec.storage_class_name or "")

    @property
    def is_bound(self) -> bool:
        """Whether the controller has finished binding the claim to a volume."""
        return bool(self.spec.volume_name) and (
            ANNOTATION_BIND_COMPLETED in self.metadata.annotations
        )

    @property
    def selected_node(self) -> str:
        """Name of the node that the claim's volume is to be made for, or ""."""
        return self.metadata.annotations.get(ANNOTATION_SELECTED_NODE, "")


class CSIVolumeSource(Wire, frozen=True):
    driver: str = ""
    volume_handle: str = ""


class InTreeVolumeSource(Wire, frozen=True):
    """A disk of a plugin that was part of Kubernetes; each kind has one of these names for it."""

    volume_id: str = field(name="volumeID", default="")
    pd_name: str = ""
    disk_uri: str = field(name="diskURI", default="")

    @property
    def handle(self) -> str:
        return self.volume_id or self.pd_name or self.disk_uri


class VolumeNodeAffinity(Wire, frozen=True):
    required: NodeSelector | None = None


class PersistentVolumeSpec(Wire, frozen=True):
    capacity: ResourceList = field(default_factory=dict)
    access_modes: tuple[str, ...] = ()
    claim_ref: ObjectReference | None = None
    storage_class_name: str = ""
    volume_mode: str = "Filesystem"
    node_affinity: VolumeNodeAffinity | None = None
    csi: CSIVolumeSource | None = None
    aws_elastic_block_store: InTreeVolumeSource | None = None
    gce_persistent_disk: InTreeVolumeSource | None = None
    azure_disk: InTreeVolumeSource | None = None
    cinder: InTreeVolumeSource | None = None
    portworx_volume: InTreeVolumeSource | None = None


class PersistentVolumeStatus(Wire, frozen=True):
    phase: str = ""


class PersistentVolume(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: PersistentVolumeSpec = PersistentVolumeSpec()
    status: PersistentVolumeStatus = PersistentVolumeStatus()

    @property
    def class_name(self) -> str:
        """Name of the StorageClass, or ""."""
        return self.metadata.annotations.get(ANNOTATION_CLASS, self.spec.storage_class_name)


class TopologySelectorLabelRequirement(Wire, frozen=True):
    key: str
    values: tuple[str, ...] = ()


class TopologySelectorTerm(Wire, frozen=True):
    """All expressions must hold; a term without any matches no node."""

    match_label_expressions: tuple[TopologySelectorLabelRequirement, ...] = ()


class StorageClass(Wire, frozen=True):
    """allowed_topologies: where volumes can be made; everywhere if empty."""

    metadata: ObjectMeta = ObjectMeta()
    provisioner: str = ""
    volume_binding_mode: str = "Immediate"
    allowed_topologies: tuple[TopologySelectorTerm, ...] = ()


class VolumeNodeResources(Wire, frozen=True):
    count: int | None = None


class CSINodeDriver(Wire, frozen=True):
    name: str
    allocatable: VolumeNodeResources | None = None


class CSINodeSpec(Wire, frozen=True):
    """drivers: the API server shows null for none."""

    drivers: tuple[CSINodeDriver, ...] | None = None


class CSINode(Wire, frozen=True):
    """The CSI drivers of the node of the same name, and how many volumes each can attach there."""

    metadata: ObjectMeta = ObjectMeta()
    spec: CSINodeSpec = CSINodeSpec()


class CSIDriverSpec(Wire, frozen=True):
    storage_capacity: bool = False


class CSIDriver(Wire, frozen=True):
    """storage_capacity of its spec: the driver reports how much storage is left."""

    metadata: ObjectMeta = ObjectMeta()
    spec: CSIDriverSpec = CSIDriverSpec()


class CSIStorageCapacity(Wire, frozen=True):
    """How much storage of a class is left for nodes that the topology selects."""

    metadata: ObjectMeta = ObjectMeta()
    storage_class_name: str = ""
    node_topology: LabelSelector | None = None
    capacity: Quantity | None = None
    maximum_volume_size: Quantity | None = None


class VolumeAttachmentSource(Wire, frozen=True):
    persistent_volume_name: str = ""


class VolumeAttachmentSpec(Wire, frozen=True):
    attacher: str = ""
    node_name: str = ""
    source: VolumeAttachmentSource = VolumeAttachmentSource()


class VolumeAttachment(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: VolumeAttachmentSpec = VolumeAttachmentSpec()


decode_claim: Final = json_decoder(PersistentVolumeClaim)
"""Decode the JSON of a claim; raises msgspec.DecodeError or its ValidationError."""
decode_volume: Final = json_decoder(PersistentVolume)
"""Decode the JSON of a volume; raises msgspec.DecodeError or its ValidationError."""
