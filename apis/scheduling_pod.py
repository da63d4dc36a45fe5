"""The parts of core/v1 that only a scheduler reads: affinity, spread, ports, gates, images.

They extend the types of `apis.core`, so that the programs on a node do not decode what they never
look at. Unknown fields are ignored, as there.
"""

from __future__ import annotations

from typing import Final

from msgspec import field

from apis.core import Container, Node, NodeStatus, Pod, PodSpec, PodStatus, Volume
from apis.decode import Wire, json_decoder
from apis.meta import LabelSelector

# --- affinity ----------------------------------------------------------------------------------


class NodeSelectorRequirement(Wire, frozen=True):
    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeSelectorTerm(Wire, frozen=True):
    """All expressions and fields must hold; a term without any matches no node."""

    match_expressions: tuple[NodeSelectorRequirement, ...] = ()
    match_fields: tuple[NodeSelectorRequirement, ...] = ()


class NodeSelector(Wire, frozen=True):
    """One of the terms must hold."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class PreferredSchedulingTerm(Wire, frozen=True):
    weight: int
    preference: NodeSelectorTerm


class NodeAffinity(Wire, frozen=True):
    required: NodeSelector | None = field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=None
    )
    preferred: tuple[PreferredSchedulingTerm, ...] = field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=()
    )


class PodAffinityTerm(Wire, frozen=True):
    topology_key: str
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] = ()
    mismatch_label_keys: tuple[str, ...] = ()


class WeightedPodAffinityTerm(Wire, frozen=True):
    weight: int
    pod_affinity_term: PodAffinityTerm


class PodAffinity(Wire, frozen=True):
    required: tuple[PodAffinityTerm, ...] = field(
        name="requiredDuringSchedulingIgnoredDuringExecution", default=()
    )
    preferred: tuple[WeightedPodAffinityTerm, ...] = field(
        name="preferredDuringSchedulingIgnoredDuringExecution", default=()
    )


class Affinity(Wire, frozen=True):
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class TopologySpreadConstraint(Wire, frozen=True):
    max_skew: int
    topology_key: str
    when_unsatisfiable: str = "DoNotSchedule"
    label_selector: LabelSelector | None = None
    min_domains: int | None = None
    node_affinity_policy: str = "Honor"
    node_taints_policy: str = "Ignore"
    match_label_keys: tuple[str, ...] = ()


# --- pod ---------------------------------------------------------------------------------------


class ContainerPort(Wire, frozen=True):
    container_port: int = 0
    host_port: int = 0
    host_ip: str = field(name="hostIP", default="")
    protocol: str = "TCP"


class ContainerRestartRule(Wire, frozen=True):
    """What happens when a container ends with certain exit codes; these are not looked at."""

    action: str = ""


class SchedulingContainer(Container, frozen=True):
    ports: tuple[ContainerPort, ...] = ()
    restart_policy_rules: tuple[ContainerRestartRule, ...] = ()


class PodSchedulingGate(Wire, frozen=True):
    name: str


class PodResourceClaim(Wire, frozen=True):
    """A claim of dynamic resource allocation; only its presence is looked at."""

    name: str


class SchedulingGroup(Wire, frozen=True):
    """Kubernetes' own gang of a pod; only its presence is looked at."""


class EphemeralVolumeSource(Wire, frozen=True):
    """A volume with a claim that is made for the pod; only its presence is looked at."""


class DiskVolumeSource(Wire, frozen=True):
    """A disk that stands in the pod itself; each kind has its own names for what it is.

    pd_name: of a GCE disk. volume_id: of an AWS disk. iqn: of an iSCSI target. monitors, pool and
    image: of a Ceph image.
    """

    pd_name: str = ""
    volume_id: str = field(name="volumeID", default="")
    iqn: str = ""
    monitors: tuple[str, ...] = ()
    pool: str = "rbd"
    image: str = ""
    read_only: bool = False


class ImageVolumeSource(Wire, frozen=True):
    """A volume with the files of an image; `reference` names it as a container would."""

    reference: str = ""


class SchedulingVolume(Volume, frozen=True):
    image: ImageVolumeSource | None = None
    ephemeral: EphemeralVolumeSource | None = None
    gce_persistent_disk: DiskVolumeSource | None = None
    aws_elastic_block_store: DiskVolumeSource | None = None
    iscsi: DiskVolumeSource | None = None
    rbd: DiskVolumeSource | None = None


class SchedulingPodSpec(PodSpec, frozen=True):
    volumes: tuple[SchedulingVolume, ...] = ()
    containers: tuple[SchedulingContainer, ...] = ()
    init_containers: tuple[SchedulingContainer, ...] = ()
    affinity: Affinity | None = None
    topology_spread_constraints: tuple[TopologySpreadConstraint, ...] = ()
    scheduling_gates: tuple[PodSchedulingGate, ...] = ()
    resource_claims: tuple[PodResourceClaim, ...] = ()
    scheduling_group: SchedulingGroup | None = None
    workload_ref: SchedulingGroup | None = None
    """The name of `scheduling_group` in Kubernetes 1.35."""
    host_users: bool | None = None
    """False: the pod has a user namespace of its own."""


class SchedulingPodStatus(PodStatus, frozen=True):
    nominated_node_name: str = ""


class SchedulingPod(Pod, frozen=True):
    spec: SchedulingPodSpec = SchedulingPodSpec()
    status: SchedulingPodStatus = SchedulingPodStatus()


decode_scheduling_pod: Final = json_decoder(SchedulingPod)
"""Decode the JSON of a Pod; raises msgspec.DecodeError or its ValidationError."""

# --- node --------------------------------------------------------------------------------------


class ContainerImage(Wire, frozen=True):
    names: tuple[str, ...] = ()
    size_bytes: int = 0


class SchedulingNodeStatus(NodeStatus, frozen=True):
    images: tuple[ContainerImage, ...] = ()
    declared_features: tuple[str, ...] = ()


class SchedulingNode(Node, frozen=True):
    status: SchedulingNodeStatus = SchedulingNodeStatus()


decode_scheduling_node: Final = json_decoder(SchedulingNode)
"""Decode the JSON of a Node; raises msgspec.DecodeError or its ValidationError."""
