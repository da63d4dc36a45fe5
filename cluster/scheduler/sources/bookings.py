"""A bound pod as a booking: its allocation is read from the annotations that binding it wrote.

An annotation that cannot be read costs only its own part of the allocation, and is named: the pod
still counts with its requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from apis.annotations import annotation_field
from apis.core import Condition
from apis.decode import Embedded, decode_text, field_decoder, remembered
from apis.device import parse_device_allocated
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_RESERVATION_ALLOCATED,
    ANNOTATION_RESOURCE_STATUS,
)
from apis.meta import unix_seconds
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.binding.victims import PREEMPTED
from cluster.scheduler.tables.booking import NO_ALLOCATION, Allocation, Booking
from cluster.scheduler.tables.numa.record import recorded_allocation
from cluster.scheduler.tables.shapes import PodShape

_RECORDED: Final = (
    ANNOTATION_RESOURCE_STATUS,
    ANNOTATION_DEVICE_ALLOCATED,
    ANNOTATION_RESERVATION_ALLOCATED,
)


class ReservationAllocated(Embedded, frozen=True):
    """The reservation that a pod uses."""

    name: str = ""
    uid: str = ""


_RESERVATION_FIELD: Final = annotation_field(ANNOTATION_RESERVATION_ALLOCATED)
_reservation_decoder: Final = field_decoder(ReservationAllocated)
_parse_reservation: Final = remembered(
    lambda text: decode_text(_reservation_decoder, text, field=_RESERVATION_FIELD),
    lambda value: value,
    field=_RESERVATION_FIELD,
)


def reservation_of(pod: SchedulingPod) -> str:
    """Return the UID of the reservation that a bound pod uses; "" if it uses or names none."""
    text = pod.metadata.annotations.get(ANNOTATION_RESERVATION_ALLOCATED)
    if not text or not pod.spec.node_name:
        return ""
    try:
        return _parse_reservation(text, pod.ref).uid
    except InputError:
        return ""


@dataclass(frozen=True, slots=True)
class ReadBooking:
    """A booking, and why parts of its allocation are missing."""

    booking: Booking
    problems: tuple[InputError, ...]


def booking_of(pod: SchedulingPod, shape: PodShape) -> ReadBooking:
    """Return the booking of a pod that has a node."""
    problems: list[InputError] = []
    return ReadBooking(
        Booking(
            key=f"{pod.metadata.namespace}/{pod.metadata.name}",
            uid=pod.metadata.uid,
            shape=shape,
            node=pod.spec.node_name,
            allocation=_allocation(pod, problems),
            start=_moment_of(pod, "PodScheduled") or unix_seconds(pod.metadata.creation_timestamp),
            initialized=_moment_of(pod, "Initialized"),
            terminating=pod.metadata.deletion_timestamp is not None,
            ends=unix_seconds(pod.metadata.deletion_timestamp),
            preempted=_is_preempted(pod),
        ),
        tuple(problems),
    )


def _allocation(pod: SchedulingPod, problems: list[InputError]) -> Allocation:
    annotations = pod.metadata.annotations
    if not any(key in annotations for key in _RECORDED):
        return NO_ALLOCATION
    cpus, numa, devices = NO_ALLOCATION.cpus, NO_ALLOCATION.numa, NO_ALLOCATION.devices
    try:
        cpus, numa = recorded_allocation(annotations, obj=pod.ref)
    except InputError as error:
        problems.append(error)
    if text := annotations.get(ANNOTATION_DEVICE_ALLOCATED):
        try:
            devices = parse_device_allocated(text, obj=pod.ref)
        except InputError as error:
            problems.append(error)
    reservation = ""
    if text := annotations.get(ANNOTATION_RESERVATION_ALLOCATED):
        try:
            reservation = _parse_reservation(text, pod.ref).uid
        except InputError as error:
            problems.append(error)
    return Allocation(cpus, numa, devices, reservation)


def _is_preempted(pod: SchedulingPod) -> bool:
    return pod.metadata.deletion_timestamp is not None and any(
        condition.type == "DisruptionTarget"
        and condition.status == "True"
        and condition.reason == PREEMPTED
        for condition in pod.status.conditions
    )


def _moment_of(pod: SchedulingPod, kind: str) -> float:
    """Return when a condition became true, in seconds since 1970; 0 if it is not true."""
    condition: Condition
    for condition in pod.status.conditions:
        if condition.type == kind and condition.status == "True":
            return unix_seconds(condition.last_transition_time)
    return 0.0
