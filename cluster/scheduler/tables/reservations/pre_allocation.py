"""What a Reservation with `preAllocation` says about the running pods whose room it takes over.

It travels from the Reservation to the plugins as an annotation of the reserve pod, which is made in
memory, so that reserve pods of equal content still share one shape.
"""

from __future__ import annotations

from typing import Final

import msgspec

from apis.decode import Wire, canonical_json, json_decoder
from apis.keys import ANNOTATION_RESERVE_POD
from apis.scheduling import ReservationOwner, ReservationTaint
from cluster.scheduler.tables.shapes import PodShape

ANNOTATION: Final = "internal.scheduling.koordinator.sh/pre-allocation"
"""On reserve pods alone. A pod of a user that carries it has no effect by it."""


class PreAllocation(Wire, frozen=True):
    """name, owners, taints: of the Reservation. cluster: candidates are found by the label of the
    profile's arguments, instead of by the owners. multiple: several pods may be taken over.
    required: room that no pod has is not enough."""

    name: str = ""
    owners: tuple[ReservationOwner, ...] = ()
    taints: tuple[ReservationTaint, ...] = ()
    cluster: bool = False
    multiple: bool = False
    required: bool = False


_decode: Final = json_decoder(PreAllocation)


def text_of(demand: PreAllocation) -> str:
    """Return the annotation's value."""
    return canonical_json(demand)


def demand_of(shape: PodShape) -> PreAllocation | None:
    """Return what a reserve pod demands, None for any other pod; for `PodShape.derived`."""
    text = shape.annotations.get(ANNOTATION)
    if text is None or ANNOTATION_RESERVE_POD not in shape.annotations:
        return None
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return None
