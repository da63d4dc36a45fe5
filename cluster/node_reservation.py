"""What a node offers to pods: its allocatable without what its annotation reserves.

The scheduler gives pods no more than this, and the manager counts as much for a tree of quotas.
docs/facts/scheduler.md, "Objects as plugins see them".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from apis.errors import InputError
from apis.keys import ANNOTATION_NODE_RESERVATION, BATCH_CPU, BATCH_MEMORY
from apis.quantity import ZERO, Quantity, ResourceList
from apis.topology import parse_node_reservation

_NOT_RESERVED: Final = frozenset({BATCH_CPU, BATCH_MEMORY})
"""The manager has taken the reservation out of these already."""


def without_reserved(
    allocatable: ResourceList, annotations: Mapping[str, str], *, obj: str
) -> ResourceList:
    """Return what is left of a node's allocatable, never below 0. annotations: the node's.

    An annotation that cannot be read reserves nothing, and neither does one that reserves CPUs
    alone (`applyPolicy: ReservedCPUsOnly`).
    """
    text = annotations.get(ANNOTATION_NODE_RESERVATION)
    if not text:
        return allocatable
    try:
        reservation = parse_node_reservation(text, obj=obj)
    except InputError:
        return allocatable
    if reservation.apply_policy not in ("", "Default"):
        return allocatable
    reserved: Mapping[str, Quantity] = reservation.amounts()
    return {
        name: amount
        if name in _NOT_RESERVED or name not in reserved
        else max(ZERO, amount - reserved[name])
        for name, amount in allocatable.items()
    }
