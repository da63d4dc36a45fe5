"""Whether a pod fits into reservations, for many reservations at once.

With free = allocatable - requested of the node, where each reservation is counted in full, and
left = max(0, reserved - in use - reserved inside) of the reservation, for each resource:

- the node's part: request <= free + left, and one more pod is allowed there;
- the reservation's part, for resources that a RESTRICTED one restricts: request <= reserved -
  reserved inside - in use, and one more pod may use it if it reserves `pods`.

Source: docs/facts/scheduler.md, "Reservations".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.plugins.contract import Mask, Scores, percent_of, zeros
from cluster.scheduler.tables.reservations.table import NO_LIMIT, Slots
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

Requests = Sequence[tuple[str, int]]
"""Resource names and amounts above 0."""

MOST_NAMES: Final = 28
"""Resources with bits of their own; the last ones share. A mask has 62 bits, two for each."""

NO_PODS: Final = 1 << MOST_NAMES
"""Bit of a count of pods, behind those of resources."""

_NO_ORDER: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """What reservations lack for a pod. All arrays by slot, in the order of `slots`.

    rows: where each is. node, inside: bits of the requests that the node's and the reservation's
    part do not cover; bit k stands for the k-th request. considered: the reservation has to do with
    the pod at all.
    """

    slots: Slots
    rows: NDArray[np.int64]
    node: Mask
    inside: Mask
    considered: NDArray[np.bool_]

    @property
    def fits(self) -> NDArray[np.bool_]:
        result: NDArray[np.bool_] = self.considered & (self.node == 0) & (self.inside == 0)
        return result


def bit_of(number: int) -> int:
    """Return the bit of a request by its number."""
    return 1 << min(number, MOST_NAMES - 1)


def room_in(
    pod: PodShape, tables: Tables, slots: Slots, requests: Requests, *, required: bool
) -> Room:
    """Return what these reservations lack for a pod.

    requests: the pod's, as far as they are looked at. required: the pod has to use one of them;
    else those that reserve nothing that the pod requests are left out.
    """
    table, nodes = tables.reservations, tables.nodes
    rows = table.row[slots]
    node = zeros(len(slots))
    inside = zeros(len(slots))
    common = np.zeros(len(slots), dtype=np.bool_)
    for number, (name, request) in enumerate(requests):
        bit = bit_of(number)
        column = nodes.resources.find(name)
        if column is None:
            node |= bit
            continue
        reserved, used = table.own[slots, column], table.used[slots, column]
        kept = table.reserved[slots, column]
        left = np.maximum(reserved - used - kept, 0)
        free = nodes.allocatable[rows, column] - nodes.requested[rows, column]
        node |= np.where(request > free + left, bit, 0)
        short = request > table.allocatable[slots, column] - kept - used
        inside |= np.where(table.restricted[slots, column] & short, bit, 0)
        common |= table.named[slots, column]
    unused = (table.owners[slots] == 0).astype(np.int64)
    node |= np.where(nodes.pods[rows] - unused >= nodes.allowed_pods[rows], NO_PODS, 0)
    most = table.most_owners[slots]
    inside |= np.where((most != NO_LIMIT) & (table.owners[slots] >= most), NO_PODS, 0)
    return Room(slots, rows, node, inside, common | required)


def node_alone(tables: Tables, rows: NDArray[np.intp], requests: Requests) -> Mask:
    """Return the bits of what nodes lack without any reservation, for each of `rows`."""
    nodes = tables.nodes
    mask = np.where(nodes.pods[rows] >= nodes.allowed_pods[rows], NO_PODS, 0)
    for number, (name, request) in enumerate(requests):
        column = nodes.resources.find(name)
        if column is None:
            mask |= bit_of(number)
            continue
        free = nodes.allocatable[rows, column] - nodes.requested[rows, column]
        mask |= np.where(request > free, bit_of(number), 0)
    return mask


def scores_in(pod: PodShape, tables: Tables, slots: Slots) -> Scores:
    """Return how full each reservation would be: 0..100.

    The mean over everything that it reserves of (request + in use) * 100 // reserved, 0 where that
    exceeds 100. Source: docs/facts/scheduler.md, "Reservations".
    """
    table = tables.reservations
    capacity = table.allocatable[slots]
    request = tables.nodes.resources.vector(pod.requests)[: capacity.shape[1]]
    wanted = table.used[slots] + request
    parts = percent_of(wanted, capacity) * (wanted <= capacity)
    scores: Scores = parts.sum(axis=1) // np.maximum(np.count_nonzero(capacity, axis=1), 1)
    return scores


def best_first(tables: Tables, room: Room, scores: Scores) -> NDArray[np.intp]:
    """Return the places in `room` of the reservations that fit, by row and the best first.

    The lowest order other than 0 goes first, then the highest score, then the first name.
    """
    fitting = np.flatnonzero(room.fits)
    table = tables.reservations
    order = table.order[room.slots[fitting]]
    keys = np.where(order == 0, _NO_ORDER, order)
    # A sort by three columns; names decide only where a pod is placed, for one row.
    by = np.lexsort((-scores[fitting], keys, room.rows[fitting]))
    result: NDArray[np.intp] = fitting[by]
    return result
