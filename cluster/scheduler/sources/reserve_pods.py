"""A Reservation as a pod: what is reserved is found, booked and counted like a pod's resources.

The reserve pod is the template of the Reservation with the Reservation's labels and annotations on
top. Its UID is that of the Reservation. It exists in memory only. What it is allocated (CPUs,
devices) stands in the annotations of the Reservation itself: a template is often copied from a
running pod, and what that pod was allocated is not this reservation's. docs/facts/scheduler.md,
"Reservations".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from apis.annotations import annotation_field
from apis.core import Condition, ObjectMeta, ResourceRequirements, pod_requests
from apis.decode import Embedded, Wire, decode_field, decode_leniently, field_decoder
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_BIND_GANG_GROUP_ID,
    ANNOTATION_BIND_GANG_GROUP_ID_OLD,
    ANNOTATION_BIND_GANG_MEMBER_COUNT,
    ANNOTATION_BIND_GANG_MEMBER_COUNT_OLD,
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_EXACT_MATCH_RESERVATION,
    ANNOTATION_IS_PRE_ALLOCATION,
    ANNOTATION_RESERVATION_AFFINITY,
    ANNOTATION_RESERVATION_ALLOCATED,
    ANNOTATION_RESERVATION_NODE,
    ANNOTATION_RESERVATION_RESIZE_ALLOCATABLE,
    ANNOTATION_RESOURCE_STATUS,
    LABEL_PRE_ALLOCATION_REQUIRED,
    LABEL_PRIORITY,
)
from apis.meta import parse_duration, parse_time, selector_problem
from apis.quantity import ZERO, Quantity, ResourceList
from apis.scheduling import ENDED_PHASES, Reservation, ReservationOwner
from apis.scheduling_pod import (
    Affinity,
    NodeAffinity,
    NodeSelector,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    SchedulingContainer,
    SchedulingPod,
    SchedulingPodSpec,
    SchedulingPodStatus,
)
from cluster.scheduler.sources.label_keys import with_label_keys
from cluster.scheduler.sources.objects import int32_of, kept_reserve_pod, renamed
from cluster.scheduler.tables.reservations.pre_allocation import (
    ANNOTATION as ANNOTATION_PRE_ALLOCATION,
)
from cluster.scheduler.tables.reservations.pre_allocation import PreAllocation, text_of

DEFAULT_SCHEDULER: Final = "default-scheduler"
"""Kubernetes' default of spec.schedulerName; a template is stored without defaults."""
DEFAULT_NAMESPACE: Final = "default"
"""Of a template without a namespace; a Reservation itself belongs to none."""
HIGHEST_PRIORITY: Final = 2**31 - 1
"""Upstream's priority of a reserve pod whose template and label name none: it gives way to none."""

_NOT_OF_TEMPLATE: Final = frozenset(
    {
        ANNOTATION_RESOURCE_STATUS,
        ANNOTATION_DEVICE_ALLOCATED,
        ANNOTATION_BIND_GANG_GROUP_ID,
        ANNOTATION_BIND_GANG_MEMBER_COUNT,
        ANNOTATION_BIND_GANG_GROUP_ID_OLD,
        ANNOTATION_BIND_GANG_MEMBER_COUNT_OLD,
    }
)
"""Recorded by the binding of the pod that a template was copied from."""
_NOT_OF_RESERVE_POD: Final = frozenset(
    {
        ANNOTATION_RESERVATION_AFFINITY,
        ANNOTATION_RESERVATION_ALLOCATED,
        ANNOTATION_EXACT_MATCH_RESERVATION,
    }
)
"""They choose among reservations. A reserve pod uses none."""

_CLUSTER: Final = "Cluster"
"""Mode of `preAllocationPolicy`."""

_RESIZED_CONTAINER: Final = "__internal_fake_container__"
"""Upstream's name of the container that holds what a reservation keeps instead of what its template
requests."""


class _Template(Wire, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: SchedulingPodSpec = SchedulingPodSpec()


class _Spec(Wire, frozen=True):
    template: _Template = _Template()


class _WithTemplate(Wire, frozen=True):
    """As much of a Reservation as stands around the template, so that errors name whole paths."""

    spec: _Spec = _Spec()


class _Resized(Embedded, frozen=True):
    resources: ResourceList = msgspec.field(default_factory=dict)


_RESIZE_FIELD: Final = annotation_field(ANNOTATION_RESERVATION_RESIZE_ALLOCATABLE)
_resize_decoder: Final = field_decoder(_Resized)


@dataclass(frozen=True, slots=True)
class ReservePod:
    """A Reservation and its reserve pod.

    pod: has a node if the Reservation keeps resources there, and a phase if it ended.
    allocatable: what is reserved, for `status.allocatable` when it gets a node.
    problems: why it must not be given a node. One that has a node keeps it nevertheless.
    """

    reservation: Reservation
    pod: SchedulingPod
    allocatable: ResourceList
    problems: tuple[InputError, ...] = ()

    @property
    def name(self) -> str:
        return self.reservation.metadata.name

    @property
    def uid(self) -> str:
        return self.reservation.metadata.uid


def read_reserve_pod(reservation: Reservation) -> ReservePod:
    """Return the reserve pod of a Reservation, as far as the Reservation can be read."""
    problems: list[InputError] = []
    template = _template(reservation, problems)
    _check(reservation, problems)
    pod = _pod(reservation, template, _priority(reservation, template, problems))
    in_template = renamed(pod_requests(pod))
    requested = _at_least_zero(reservation, "spec.template.spec", in_template, problems)
    resized = _resized(reservation, problems)
    status = reservation.status
    allocatable = held = {**requested, **resized}
    if status.node_name and status.allocatable:
        field = "status.allocatable"
        shown = _at_least_zero(reservation, field, renamed(status.allocatable), problems)
        held = {**requested, **shown}
    pod = _holding(pod, in_template, held)
    kept = kept_reserve_pod(pod, _pre_allocation(reservation))
    return ReservePod(reservation, kept, allocatable, tuple(problems))


def _at_least_zero(
    reservation: Reservation, field: str, amounts: ResourceList, problems: list[InputError]
) -> ResourceList:
    """Return the amounts, with 0 for each one below zero, which becomes a problem.

    The API server does not validate a template. A negative amount would count by itself, and as 0
    beside the pods that use the Reservation.
    """
    result: dict[str, Quantity] = {}
    for name, amount in amounts.items():
        result[name] = max(amount, ZERO)
        if amount < ZERO:
            problem = f"expected 0 or more {name} in total"
            problems.append(_error(reservation, field, str(amount), problem))
    return result


def _pre_allocation(reservation: Reservation) -> dict[str, str]:
    """Return the marks of a Reservation that takes over room of running pods."""
    spec, policy = reservation.spec, reservation.spec.pre_allocation_policy
    if not spec.pre_allocation or reservation.status.node_name:
        return {}
    cluster = policy is not None and policy.mode == _CLUSTER
    demand = PreAllocation(
        name=reservation.metadata.name,
        owners=(ReservationOwner(),) if cluster else spec.owners,
        taints=spec.taints,
        cluster=cluster,
        multiple=policy is not None and policy.enable_multiple,
        required=reservation.metadata.labels.get(LABEL_PRE_ALLOCATION_REQUIRED) == "true",
    )
    return {ANNOTATION_IS_PRE_ALLOCATION: "true", ANNOTATION_PRE_ALLOCATION: text_of(demand)}


def _template(reservation: Reservation, problems: list[InputError]) -> _Template:
    template = reservation.spec.template
    if not isinstance(template, dict):
        problem = "expected a pod template"
        problems.append(_error(reservation, "spec.template", template, problem))
        return _Template()
    ref = _ref(reservation)
    try:
        plain = {"spec": {"template": template}}
        read, errors = decode_leniently(plain, _WithTemplate, obj=ref)
    except RecursionError:
        problems.append(_error(reservation, "spec.template", "", "nested too deep"))
        return _Template()
    problems += errors
    return _Template() if read is None else read.spec.template


def _pod(reservation: Reservation, template: _Template, priority: int) -> SchedulingPod:
    meta, status, spec = reservation.metadata, reservation.status, template.spec
    pinned = spec.node_name
    labels = {**template.metadata.labels, **meta.labels}
    affinity = spec.affinity and with_label_keys(spec.affinity, labels)
    annotations = {
        **{k: v for k, v in template.metadata.annotations.items() if k not in _NOT_OF_TEMPLATE},
        **meta.annotations,
        **({ANNOTATION_RESERVATION_NODE: pinned} if pinned else {}),
    }
    return SchedulingPod(
        metadata=ObjectMeta(
            name=meta.uid,
            namespace=template.metadata.namespace or DEFAULT_NAMESPACE,
            uid=meta.uid,
            resource_version=meta.resource_version,
            creation_timestamp=meta.creation_timestamp,
            deletion_timestamp=meta.deletion_timestamp,
            labels=labels,
            annotations={k: v for k, v in annotations.items() if k not in _NOT_OF_RESERVE_POD},
            owner_references=template.metadata.owner_references,
        ),
        spec=msgspec.structs.replace(
            spec,
            node_name=status.node_name,
            # They say where it may go. It mounts none, so its owners may have them.
            volumes=() if status.node_name else spec.volumes,
            priority=priority,
            scheduler_name=spec.scheduler_name or DEFAULT_SCHEDULER,
            affinity=_pinned(affinity, pinned) if pinned else affinity,
        ),
        status=SchedulingPodStatus(
            phase=status.phase if status.phase in ENDED_PHASES else "",
            conditions=_conditions(reservation),
        ),
    )


def _ref(reservation: Reservation) -> str:
    """Return how errors name a Reservation."""
    return f"Reservation {reservation.metadata.name}"


def _error(reservation: Reservation, field: str, value: object, problem: str) -> InputError:
    return InputError(obj=_ref(reservation), field=field, value=value, problem=problem)


def _check(reservation: Reservation, problems: list[InputError]) -> None:
    """Add what is wrong with the Reservation beside its template."""
    spec = reservation.spec

    def bad(field: str, value: object, problem: str) -> None:
        problems.append(_error(reservation, field, value, problem))

    if not spec.owners:
        bad("spec.owners", "[]", "expected at least one owner")
    for index, owner in enumerate(spec.owners):
        selector = owner.label_selector
        problem = None if selector is None else selector_problem(selector)
        if problem is not None:
            bad(f"spec.owners[{index}].labelSelector", selector, problem)
    if spec.pre_allocation and spec.allocate_policy != "Restricted":
        bad("spec.allocatePolicy", spec.allocate_policy, "preAllocation needs Restricted")
    mode = "" if spec.pre_allocation_policy is None else spec.pre_allocation_policy.mode
    if mode not in ("", "Default", _CLUSTER):
        bad("spec.preAllocationPolicy.mode", mode, "expected Default or Cluster")
    if spec.ttl is None and spec.expires is None:
        bad("spec", "", "expected ttl or expires")
    for field, text, parse in (
        ("spec.ttl", spec.ttl, parse_duration),
        ("spec.expires", spec.expires, parse_time),
    ):
        if text is not None:
            try:
                parse(text)
            except ValueError as error:
                bad(field, text, str(error))


def _priority(reservation: Reservation, template: _Template, problems: list[InputError]) -> int:
    if template.spec.priority is not None:
        return template.spec.priority
    text = reservation.metadata.labels.get(LABEL_PRIORITY)
    if not text:
        text = template.metadata.labels.get(LABEL_PRIORITY)
    if not text:
        return HIGHEST_PRIORITY
    number = int32_of(text)
    if number is None:
        problem = "expected a priority, a whole number of 32 bits"
        field = f'metadata.labels["{LABEL_PRIORITY}"]'
        problems.append(_error(reservation, field, text, problem))
        return HIGHEST_PRIORITY
    return number


def _resized(reservation: Reservation, problems: list[InputError]) -> ResourceList:
    text = reservation.metadata.annotations.get(ANNOTATION_RESERVATION_RESIZE_ALLOCATABLE)
    if not text:
        return {}
    ref = _ref(reservation)
    try:
        resized = decode_field(_resize_decoder, text, obj=ref, field=_RESIZE_FIELD).resources
    except InputError as error:
        problems.append(error)
        return {}
    return _at_least_zero(reservation, f"{_RESIZE_FIELD}.resources", renamed(resized), problems)


def _pinned(affinity: Affinity | None, node: str) -> Affinity:
    """Return the affinity with the demand for one node, as a DaemonSet's pods have it."""
    field = NodeSelectorRequirement(key="metadata.name", operator="In", values=(node,))
    affinity = affinity or Affinity()
    own = affinity.node_affinity or NodeAffinity()
    # A pod without required terms may go anywhere; one whose list is empty may go nowhere.
    terms = (NodeSelectorTerm(),) if own.required is None else own.required.node_selector_terms
    required = NodeSelector(
        node_selector_terms=tuple(
            NodeSelectorTerm(
                match_expressions=term.match_expressions, match_fields=(*term.match_fields, field)
            )
            for term in terms
            if own.required is None or term.match_expressions or term.match_fields
        )
    )
    return msgspec.structs.replace(
        affinity, node_affinity=msgspec.structs.replace(own, required=required)
    )


def _holding(
    pod: SchedulingPod, requested: ResourceList, allocatable: ResourceList
) -> SchedulingPod:
    """Return the pod with `allocatable` as its requests, if its containers request otherwise."""
    if requested == allocatable:
        return pod
    spec = pod.spec
    nothing = ResourceRequirements()
    held = ResourceRequirements(requests=allocatable, limits=allocatable)
    return msgspec.structs.replace(
        pod,
        spec=msgspec.structs.replace(
            spec,
            overhead={},
            resources=None,
            containers=(
                *(msgspec.structs.replace(each, resources=nothing) for each in spec.containers),
                SchedulingContainer(name=_RESIZED_CONTAINER, resources=held),
            ),
            init_containers=tuple(
                msgspec.structs.replace(each, resources=nothing) for each in spec.init_containers
            ),
        ),
    )


def _conditions(reservation: Reservation) -> tuple[Condition, ...]:
    """Return when the reservation got its node, as a pod's condition says it."""
    return tuple(
        Condition(
            type="PodScheduled", status="True", last_transition_time=each.last_transition_time
        )
        for each in reservation.status.conditions
        if each.type == "Scheduled" and each.status == "True"
    )
