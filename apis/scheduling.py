"""Reservations, and jobs that migrate pods.

Pod templates stay plain JSON: the CRD stores them without a schema and nothing of them may be lost.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, field

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.meta import (
    REQUIRED,
    AnyJson,
    Int64,
    LabelSelector,
    ObjectReference,
    Time,
)
from apis.quantity import ResourceList

# --- Reservation -------------------------------------------------------------------------------


class ReservationControllerReference(Wire, frozen=True, omit_defaults=False):
    """An owner reference with a namespace. An empty member matches anything.

    api_version: API version of the controller.
    kind: Kind of the controller.
    name: Name of the controller.
    uid: UID of the controller.
    controller: Whether it must be the managing controller.
    block_owner_deletion: Not compared.
    namespace: Namespace of the controller.
    """

    crd: ClassVar[dict[str, Any]] = {"x-kubernetes-map-type": "atomic"}

    api_version: Annotated[str, Meta(extra=REQUIRED)] = ""
    kind: Annotated[str, Meta(extra=REQUIRED)] = ""
    name: Annotated[str, Meta(extra=REQUIRED)] = ""
    uid: Annotated[str, Meta(extra=REQUIRED)] = ""
    controller: bool | None = None
    block_owner_deletion: bool | None = None
    namespace: str = ""


class ReservationOwner(Wire, frozen=True):
    """Pods that may use a reservation. All members that are set must match.

    object: One pod.
    controller: Pods of a controller.
    label_selector: Pods with these labels.
    """

    crd: ClassVar[dict[str, Any]] = {"minProperties": 1}

    object: ObjectReference | None = None
    controller: ReservationControllerReference | None = None
    label_selector: LabelSelector | None = None


class ReservationTaint(Wire, frozen=True):
    """A taint of a reservation.

    key: Key of the taint.
    effect: Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute.
    value: Value of the taint.
    time_added: When the taint was added.
    """

    key: str
    effect: str
    value: str = ""
    time_added: Time | None = None


class PreAllocationPolicy(Wire, frozen=True):
    """How pods are found whose resources are reserved in advance.

    mode: Default takes the pods that match the owners, Cluster those with the label
        pod.koordinator.sh/is-pre-allocatable.
    enable_multiple: Allows the resources of more than one pod.
    """

    mode: Annotated[
        str, Meta(extra_json_schema={"enum": ["Default", "Cluster"], "default": "Default"})
    ] = ""
    enable_multiple: Annotated[bool, Meta(extra_json_schema={"default": False})] = False


class ReservationSpec(Wire, frozen=True):
    """What is reserved, for whom, and for how long.

    template: Pod template: what the reserve pod looks like. Its spec.nodeName pins the node.
    owners: Pods that may use the reservation; one match is enough.
    ttl: How long the reservation lives, such as 24h; 0s is without end.
    expires: When the reservation ends, before ttl.
    pre_allocation: Reserves resources that running pods still use.
    pre_allocation_policy: How such pods are found.
    allocate_once: Lets only the first owner use the reservation.
    allocate_policy: Aligned lets a pod take what is missing from the node, Restricted does not for
        resources that are reserved.
    unschedulable: Keeps new owners away.
    taints: Taints that owners must tolerate.
    """

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
    """One observation about the state of a reservation.

    type: What is observed.
    status: True, False or Unknown.
    reason: Why the status is what it is, in CamelCase.
    message: The same for people.
    last_probe_time: When it was last looked at.
    last_transition_time: When the status last changed.
    """

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_probe_time: Time | None = None
    last_transition_time: Time | None = None


class ReservationStatus(Wire, frozen=True):
    """State of a reservation.

    phase: Pending, Available, Succeeded or Failed.
    conditions: Observations about the state.
    current_owners: Pods that use the reservation.
    node_name: Node that the resources are reserved on.
    allocatable: Amounts that are reserved, by resource name.
    allocated: Amounts that the owners use, by resource name.
    """

    phase: Annotated[str, Meta(extra_json_schema={"default": "Pending"})] = ""
    conditions: tuple[ReservationCondition, ...] = ()
    current_owners: tuple[ObjectReference, ...] = ()
    node_name: str = ""
    allocatable: ResourceList = field(default_factory=dict)
    allocated: ResourceList = field(default_factory=dict)


class ReservationPhase(StrEnum):
    """Values of `status.phase`.

    PENDING: no node yet. AVAILABLE: resources are kept on a node. SUCCEEDED: its only owner has
    them. FAILED: it expired, or its node is gone. WAITING: as AVAILABLE, named by upstream's API
    and never written.
    """

    PENDING = "Pending"
    AVAILABLE = "Available"
    WAITING = "Waiting"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


ENDED_PHASES: Final = frozenset({ReservationPhase.SUCCEEDED, ReservationPhase.FAILED})
"""Phases of a reservation that keeps nothing any more."""


class Reservation(Wire, frozen=True):
    """Resources of a node that are kept for certain pods.

    spec: What is reserved, for whom, and for how long.
    status: State of the reservation.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: ReservationSpec = ReservationSpec()
    status: ReservationStatus = ReservationStatus()


# --- PodMigrationJob ---------------------------------------------------------------------------


class PreemptionOptions(Wire, frozen=True):
    """Reserved; it has no members yet."""


class MigrateReservationOptions(Wire, frozen=True):
    """Reservation for the pod that replaces the moved one.

    reservation_ref: Reservation to use, or that was created.
    template: Template of the reservation to create.
    preemption_options: Reserved.
    """

    reservation_ref: ObjectReference | None = None
    template: AnyJson = None
    preemption_options: PreemptionOptions | None = None


class Preconditions(Wire, frozen=True):
    """What must hold for a deletion.

    uid: UID that the object must have.
    resource_version: Version that the object must have.
    """

    uid: str | None = None
    resource_version: str | None = None


class DeleteOptions(Wire, frozen=True):
    """Options of a deletion, as in the Kubernetes API.

    kind: Kind of the options.
    api_version: API version of the options.
    grace_period_seconds: Seconds until the pod is ended by force.
    preconditions: What must hold for the deletion.
    orphan_dependents: Keeps dependents; propagationPolicy replaces it.
    propagation_policy: What becomes of dependents: Orphan, Background or Foreground.
    dry_run: All, to try without effect.
    ignore_store_read_error_with_cluster_breaking_potential: Deletes what the store cannot read.
    """

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
    """Which pod is moved, and how.

    pod_ref: Pod to move.
    paused: Holds the job.
    ttl: Time limit of the job, such as 5m.
    mode: ReservationFirst or EvictDirectly; the controller's default if not set.
    reservation_options: Reservation for the pod that replaces the moved one.
    delete_options: Options of the eviction.
    """

    pod_ref: Annotated[ObjectReference | None, Meta(extra=REQUIRED)] = None
    paused: bool = False
    ttl: str | None = None
    mode: str = ""
    reservation_options: MigrateReservationOptions | None = None
    delete_options: DeleteOptions | None = None


class PodMigrationJobCondition(Wire, frozen=True):
    """One observation about the state of a job.

    type: What is observed.
    status: True, False or Unknown.
    reason: Why the status is what it is, in CamelCase.
    message: The same for people.
    last_probe_time: When it was last looked at.
    last_transition_time: When the status last changed.
    """

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_probe_time: Annotated[Time | None, Meta(extra_json_schema={"nullable": True})] = None
    last_transition_time: Annotated[Time | None, Meta(extra_json_schema={"nullable": True})] = None


class PreemptedReservation(Wire, frozen=True):
    """A reservation that gave way.

    namespace: Namespace of the reservation's pod.
    name: Name of the reservation.
    node_name: Node of the reservation.
    phase: Phase of the reservation.
    preempted_pod_ref: Pod that gave way.
    pods_ref: Pods that used the reservation.
    """

    namespace: str = ""
    name: str = ""
    node_name: str = ""
    phase: str = ""
    preempted_pod_ref: ObjectReference | None = None
    pods_ref: tuple[ObjectReference, ...] = ()


class PodMigrationJobStatus(Wire, frozen=True):
    """State of a job.

    phase: Pending, Running, Succeeded, Failed or Aborted.
    status: Step that the job is at: the type of a condition.
    reason: Why the phase is what it is, in CamelCase.
    message: The same for people.
    conditions: Observations about the state.
    node_name: Node that the pod leaves.
    pod_ref: Pod that replaces the moved one.
    preempted_pods_ref: Pods that gave way.
    preempted_pods_reservation: Reservations that gave way.
    """

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
    """Moves one pod to another node.

    spec: Which pod is moved, and how.
    status: State of the job.
    """

    metadata: ObjectMeta = ObjectMeta()
    spec: PodMigrationJobSpec = PodMigrationJobSpec()
    status: PodMigrationJobStatus = PodMigrationJobStatus()
