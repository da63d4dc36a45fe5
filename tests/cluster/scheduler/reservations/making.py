"""Reservations for the scheduler's tests."""

from __future__ import annotations

from typing import Any

import msgspec

from apis.core import Taint
from apis.keys import ANNOTATION_RESERVE_POD
from apis.quantity import parse_quantity
from apis.scheduling import ReservationOwner
from cluster.scheduler.tables.amounts import amounts_of
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.reservations.facts import AllocatePolicy, ReservationFacts
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.making import make_pod

OWNERS: tuple[dict[str, Any], ...] = ({"labelSelector": {"matchLabels": {"app": "a"}}},)
"""Of a reservation for the pods with the label app: a."""


def owners_of(*entries: dict[str, Any]) -> tuple[ReservationOwner, ...]:
    """Return owners from their JSON."""
    return tuple(msgspec.convert(entry, ReservationOwner) for entry in entries)


def make_facts(
    name: str,
    allocatable: dict[str, str] | None = None,
    *,
    owners: tuple[dict[str, Any], ...] = OWNERS,
    policy: AllocatePolicy = AllocatePolicy.RESTRICTED,
    once: bool = False,
    taints: tuple[tuple[str, str], ...] = (),
    reserved: dict[str, str] | None = None,
    **more: Any,
) -> ReservationFacts:
    """Return a reservation of 8 CPUs, named `name`, with the UID "uid-NAME"."""

    def amounts(of: dict[str, str]) -> dict[str, int]:
        return amounts_of({key: parse_quantity(text) for key, text in of.items()})

    return ReservationFacts(
        name=name,
        uid=f"uid-{name}",
        owners=owners_of(*owners),
        allocatable=amounts({"cpu": "8"} if allocatable is None else allocatable),
        policy=policy,
        once=once,
        taints=tuple(Taint(key=key, effect=effect) for key, effect in taints),
        reserved=amounts(reserved or {}),
        **more,
    )


def reserve_shape(
    shapes: Shapes, requests: dict[str, str], *, ports: tuple[int, ...] = ()
) -> PodShape:
    """Return the shape of a reserve pod."""
    return shapes.of(
        make_pod(
            "reserve",
            annotations={ANNOTATION_RESERVE_POD: "true"},
            containers=[container(requests, ports)],
        )
    )


def container(requests: dict[str, str], ports: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the JSON of a container with these requests and host ports."""
    return {
        "name": "c",
        "resources": {"requests": requests},
        "ports": [{"containerPort": port, "hostPort": port} for port in ports],
    }


def put(
    tables: Tables,
    shapes: Shapes,
    facts: ReservationFacts,
    node: str,
    requests: dict[str, str],
    *,
    allocation: Allocation | None = None,
    ports: tuple[int, ...] = (),
) -> None:
    """Make a reservation known, and book its reserve pod on a node."""
    tables.reservations.upsert(facts)
    tables.place(
        Booking(
            key=f"default/{facts.uid}",
            uid=facts.uid,
            shape=reserve_shape(shapes, requests, ports=ports),
            node=node,
            allocation=allocation or Allocation(),
        )
    )


def use(
    tables: Tables, shape: PodShape, name: str, node: str, reservation: str = "", **more: Any
) -> Booking:
    """Book a pod named `name`, perhaps inside a reservation of this name."""
    allocation = Allocation(reservation=f"uid-{reservation}" if reservation else "", **more)
    booking = Booking(f"default/{name}", f"uid-{name}", shape, node, allocation)
    tables.place(booking)
    return booking
