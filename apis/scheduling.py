"""Kinds of scheduling.koordinator.sh besides Device: reservations, migrations, topologies.

Pod templates stay plain JSON: the CRD stores them without a schema and nothing of them may be lost.
Sources: api.md sections 7, 8, 13 and 14.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire, json_decoder
from apis.meta import (
    REQUIRED,
    AnyJson,
    Int32,
    Int64,
    LabelSelector,
    ObjectReference,
    Time,
)
from apis.quantity import ResourceList

# --- Reservation -------------------------------------------------------------------------------


class ReservationControllerReference(Wire, frozen=True, omit_defaults=False):
    """An owner reference with a namespace; an empty member matches anything."""

    crd: ClassVar[dict[str, Any]] = {"x-kubernetes-map-type": "atomic"}

    api_version: Annotated[str, Meta(extra=REQUIRED)] = ""
    kind: Annotated[str, Meta(extra=REQUIRED)] = ""
    name: Annotated[str, Meta(extra=REQUIRED)] = ""
    uid: Annotated[str, Meta(extra=REQUIRED)] = ""
    controller: bool | None = None
    block_owner_deletion: bool | None = None
    namespace: str = ""


class ReservationOwner(Wire, frozen=True):
    """Members are ANDed; the items of a list are ORed."""

    crd: ClassVar[dict[str, Any]] = {"minProperties": 1}

    object: ObjectReference | None = None
    controller: ReservationControllerReference | None = None
    label_selector: LabelSelector | None = None


class ReservationTaint(Wire, frozen=True):
    key: str
    effect: str
    value: str = ""
    time_added: Time | None = None


class PreAllocationPolicy(Wire, frozen=True):
    mode: Annotated[
        str, Meta(extra_json_schema={"enum": ["Default", "Cluster"], "default": "Default"})
    ] = ""
    enable_multiple: Annotated[bool, Meta(extra_json_schema={"default": False})] = False


class ReservationSpec(Wire, frozen=True):
    template: Annotated[AnyJson, Meta(extra={"required": True, "schemaless": True})] = None
    owners: Annotated[
        tuple[ReservationOwner, ...], Meta(extra=REQUIRED, extra_json_schema={"minItems": 1})
    ] = ()
    ttl: Annotated[str | None, Meta(extra_json_schema={"default": "24h"})] = None
    expires: Time | None = None
    pre_allocation: bool = False
    pre_allocation_policy: PreAllocationPolicy | None = None
    allocate_once: Annotated[bool | None, Meta(extra_json_schema={"default": True})] = None
    allocate_policy: Annotated[str, Meta(extra_json_schema={"enum": ["Aligned", "Restricted"]})] = (
        ""
    )
    unschedulable: bool = False
    taints: tuple[ReservationTaint, ...] = ()


class ReservationCondition(Wire, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_probe_time: Time | None = None
    last_transition_time: Time | None = None


class ReservationStatus(Wire, frozen=True):
    phase: Annotated[str, Meta(extra_json_schema={"default": "Pending"})] = ""
    conditions: tuple[ReservationCondition, ...] = ()
    current_owners: tuple[ObjectReference, ...] = ()
    node_name: str = ""
    allocatable: ResourceList = field(default_factory=dict)
    allocated: ResourceList = field(default_factory=dict)


class Reservation(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: ReservationSpec = ReservationSpec()
    status: ReservationStatus = ReservationStatus()


# --- PodMigrationJob ---------------------------------------------------------------------------


class PreemptionOptions(Wire, frozen=True):
    """Reserved by the API; empty so far."""


class MigrateReservationOptions(Wire, frozen=True):
    reservation_ref: ObjectReference | None = None
    template: AnyJson = None
    preemption_options: PreemptionOptions | None = None


class Preconditions(Wire, frozen=True):
    uid: str | None = None
    resource_version: str | None = None


class DeleteOptions(Wire, frozen=True):
    kind: str = ""
    api_version: str = ""
    grace_period_seconds: Int64 | None = None
    preconditions: Preconditions | None = None
    orphan_dependents: bool | None = None
    propagation_policy: str | None = None
    dry_run: Annotated[
        tuple[str, ...], Meta(extra_json_schema={"x-kubernetes-list-type": "atomic"})
    ] = ()
    ignore_store_read_error_with_cluster_breaking_potential: bool | None = None


class PodMigrationJobSpec(Wire, frozen=True):
    pod_ref: Annotated[ObjectReference | None, Meta(extra=REQUIRED)] = None
    paused: bool = False
    ttl: str | None = None
    mode: str = ""
    reservation_options: MigrateReservationOptions | None = None
    delete_options: DeleteOptions | None = None


class PodMigrationJobCondition(Wire, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_probe_time: Annotated[Time | None, Meta(extra_json_schema={"nullable": True})] = None
    last_transition_time: Annotated[Time | None, Meta(extra_json_schema={"nullable": True})] = None


class PreemptedReservation(Wire, frozen=True):
    namespace: str = ""
    name: str = ""
    node_name: str = ""
    phase: str = ""
    preempted_pod_ref: ObjectReference | None = None
    pods_ref: tuple[ObjectReference, ...] = ()


class PodMigrationJobStatus(Wire, frozen=True):
    phase: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[PodMigrationJobCondition, ...] = ()
    node_name: str = ""
    pod_ref: ObjectReference | None = None
    preempted_pods_ref: tuple[ObjectReference, ...] = ()
    preempted_pods_reservation: tuple[PreemptedReservation, ...] = ()


class PodMigrationJob(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: PodMigrationJobSpec = PodMigrationJobSpec()
    status: PodMigrationJobStatus = PodMigrationJobStatus()


# --- ClusterNetworkTopology --------------------------------------------------------------------


class NetworkTopologyLayer(Wire, frozen=True):
    topology_layer: str
    parent_topology_layer: str = ""
    label_key: tuple[str, ...] = ()


class ClusterNetworkTopologySpec(Wire, frozen=True):
    network_topology_spec: Annotated[tuple[NetworkTopologyLayer, ...], Meta(extra=REQUIRED)] = ()


class TopologyInfo(Wire, frozen=True, omit_defaults=False):
    topology_layer: str
    topology_name: str


class NetworkTopologyDetail(Wire, frozen=True):
    topology_info: TopologyInfo
    node_num: Int32
    parent_topology_info: TopologyInfo | None = None
    child_topology_layer: str = ""
    child_topology_names: tuple[str, ...] = ()


class ClusterNetworkTopologyStatus(Wire, frozen=True):
    detail_status: tuple[NetworkTopologyDetail, ...] = ()


class ClusterNetworkTopology(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: ClusterNetworkTopologySpec = ClusterNetworkTopologySpec()
    status: ClusterNetworkTopologyStatus = ClusterNetworkTopologyStatus()


# --- ScheduleExplanation -----------------------------------------------------------------------


class PossibleVictim(Wire, frozen=True):
    namespace: str = ""
    name: str = ""
    uid: str = ""
    is_nominated_pod: bool = False


class NodePossibleVictims(Wire, frozen=True):
    node_name: str = ""
    possible_victims: tuple[PossibleVictim, ...] = ()


class FeasibleSchedulingResult(Wire, frozen=True):
    namespace: str = ""
    name: str = ""
    uid: str = ""
    node_name: str = ""


class NodeFailedDetail(Wire, frozen=True):
    failed_plugin: str = ""
    reason: str = ""
    preempt_might_help: bool = False
    failed_nodes: tuple[str, ...] = ()


class SchedulingAttempt(Wire, frozen=True):
    schedulable: bool = False
    failed_message: str = ""
    feasible_scheduling_result: tuple[FeasibleSchedulingResult, ...] = ()
    node_failed_details: tuple[NodeFailedDetail, ...] = ()


class DetailedExplanation(Wire, frozen=True):
    topology_domain: str = ""
    schedulable: bool = False
    schedulable_after_preemption: bool = False
    failed_message: str = ""
    schedule_explanation: SchedulingAttempt | None = None
    node_possible_victims: tuple[NodePossibleVictims, ...] = ()
    preempt_explanation: SchedulingAttempt | None = None


class ScheduleExplanationSpec(Wire, frozen=True):
    question_object_key: str = ""
    question_object_template: AnyJson = None
    ttl: Annotated[str | None, Meta(extra_json_schema={"default": "24h"})] = None


class ScheduleExplanationStatus(Wire, frozen=True):
    schedulable: bool = False
    schedulable_after_preemption: bool = False
    failed_message: str = ""
    last_update_time: Time | None = None
    detailed_explanation: tuple[DetailedExplanation, ...] = ()


class ScheduleExplanation(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: ScheduleExplanationSpec = ScheduleExplanationSpec()
    status: ScheduleExplanationStatus = ScheduleExplanationStatus()


decode_reservation: Final = json_decoder(Reservation)
decode_pod_migration_job: Final = json_decoder(PodMigrationJob)
