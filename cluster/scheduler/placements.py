"""What is written of a decision: the placement of a pod, or of a Reservation."""

from __future__ import annotations

from collections.abc import Mapping

from apis.decode import to_plain
from apis.meta import ObjectReference
from apis.quantity import ResourceList, add_resources
from cluster.scheduler.binding.events import pod_reference, reservation_reference
from cluster.scheduler.binding.placement import Placement
from cluster.scheduler.binding.reservations import ReservationPlacement, Seen, TakenPod
from cluster.scheduler.cycle.scheduling import Decision
from cluster.scheduler.sources.reserve_pods import ReservePod
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape

Annotations = Mapping[str, str | None]
"""None removes one."""


def of_pod(
    pod: PendingPod[PodShape], decision: Decision, annotations: Annotations, *, delegated: bool
) -> Placement:
    """Return what is written to a pod. delegated: an extender binds it."""
    namespace, _, name = pod.key.partition("/")
    present = pod.shape.annotations
    return Placement(
        namespace=namespace,
        name=name,
        uid=pod.uid,
        node=decision.booking.node,
        annotations={k: v for k, v in annotations.items() if v is not None},
        labels={k: v for k, v in decision.recorded.labels.items() if v is not None},
        removed_annotations=tuple(
            key for key, value in annotations.items() if value is None and key in present
        ),
        volumes=decision.booking.allocation.volumes,
        lock=decision.recorded.lock,
        delegated=delegated,
    )


def of_reservation(
    reserve_pod: ReservePod,
    decision: Decision,
    annotations: Annotations,
    takes: tuple[TakenPod, ...],
    *,
    resizes: bool,
) -> ReservationPlacement:
    """Return what is written to a Reservation. Labels of devices are for the pods that use it.

    resizes: it also keeps what its devices have, under the names that devices have it.
    """
    meta, status = reserve_pod.reservation.metadata, reserve_pod.reservation.status
    present = meta.annotations
    kept = dict(reserve_pod.allocatable)
    if resizes:
        kept |= _of_devices(decision.booking.allocation)
    return ReservationPlacement(
        name=reserve_pod.name,
        uid=reserve_pod.uid,
        node=decision.booking.node,
        allocatable={name: str(amount) for name, amount in kept.items()},
        annotations={k: v for k, v in annotations.items() if v is not None or k in present},
        takes=takes,
        # Pods are marked only for a Reservation that is known to wait still.
        seen=None if takes else Seen(meta.resource_version, present, to_plain(status.conditions)),
    )


def reference_of(placement: Placement | ReservationPlacement) -> ObjectReference:
    """Return what an event about a placement refers to."""
    if isinstance(placement, ReservationPlacement):
        return reservation_reference(placement.name, placement.uid)
    return pod_reference(placement.namespace, placement.name, placement.uid)


def _of_devices(allocation: Allocation) -> ResourceList:
    """Return what all allocated devices have together, such as koordinator.sh/gpu-core: 200."""
    return add_resources(*(one.resources for each in allocation.devices.values() for one in each))
