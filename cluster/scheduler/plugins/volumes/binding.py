"""VolumeBinding: nodes from which the pod's volumes can be reached, or where they can be made.

A bound claim's volume says from where it can be reached. A claim that waits for its pod gets a
volume that exists and fits, else one is made for the node: where the class allows it, and where
enough storage is left if the driver reports that. A claim that was given a node before stays
there. Source: kube-scheduler; docs/facts/scheduler.md, "Volumes".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.exact.volumes import match_claims
from cluster.scheduler.plugins.contract import Mask, Reason, Recorded, zeros
from cluster.scheduler.plugins.volumes.claims import claims_asked
from cluster.scheduler.tables.booking import Allocation, Booking, PlannedVolumes
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.volumes.objects import Claim, Volume
from cluster.scheduler.tables.volumes.places import Layer
from cluster.scheduler.tables.volumes.table import VolumeTable

_NOT_REACHED: Final = 1
_NO_VOLUME: Final = 2
_NO_STORAGE: Final = 4
_LOST: Final = 8
_REASONS: Final = (
    Reason("node(s) didn't match PersistentVolume's node affinity", resolvable=False),
    Reason("node(s) didn't find available persistent volumes to bind", resolvable=False),
    Reason("node(s) did not have enough free storage", resolvable=False),
    Reason(
        "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)",
        resolvable=False,
    ),
)
_NOTHING: Final = np.iinfo(np.int64).max
"""Rank of a volume that does not exist."""

Truth = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class VolumeBinding:
    """A filter, and the allocator that chooses the volumes on the node of the pod."""

    name: str = "VolumeBinding"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        if not pod.claims:
            return False
        claims_asked(pod, tables.volumes, self.name)
        return True

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        # Places of volumes follow the labels of all nodes.
        return tables.volumes.version

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _REASONS

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        asked = claims_asked(pod, tables.volumes, self.name)
        mask = _bound_mask(asked.bound, tables)
        if asked.waiting:
            mask |= _waiting_mask(asked.waiting, tables)
        return mask[rows]

    # --- on the node of the pod ----------------------------------------------------------------

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        volumes = tables.volumes
        waiting = claims_asked(pod, volumes, self.name).waiting
        if not waiting:
            return allocation
        node = tables.nodes.name(row)
        selected = [claim.key for claim in waiting if volumes.node_of(claim)]
        if any(volumes.node_of(claim) not in ("", node) for claim in waiting):
            return _REASONS[1]
        layers = [layer[row : row + 1] for layer in volumes.places.layers()]
        free = _in_order([claim for claim in waiting if not volumes.node_of(claim)])
        choices = {claim.key: _choices(claim, volumes, layers, row) for claim in free}
        binds, unmatched = match_claims(choices)
        provisions = (*selected, *unmatched)
        by_key = {claim.key: claim for claim in waiting}
        refused = int(_provision_mask([by_key[key] for key in provisions], tables)[row])
        for number, reason in enumerate(_REASONS):
            if refused >> number & 1:
                return reason
        planned = PlannedVolumes(binds=tuple(binds.items()), provisions=provisions)
        return replace(allocation, volumes=planned)

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        """Nothing stands on the pod: its claims say what they are bound to."""
        return Recorded({}, {})


def _bound_mask(claims: Sequence[Claim], tables: Tables) -> Mask:
    """Return the mask of bound claims; a node counts with its first claim that fails."""
    volumes = tables.volumes
    mask = zeros(len(tables.nodes))
    for claim in claims:
        volume = volumes.volume(claim.volume)
        if volume is None:
            mask[mask == 0] = _LOST
            break
        mask[(mask == 0) & ~volumes.rows_of(volume)] = _NOT_REACHED
    return mask


def _waiting_mask(claims: Sequence[Claim], tables: Tables) -> Mask:
    volumes = tables.volumes
    length = len(tables.nodes)
    away = np.zeros(length, dtype=np.bool_)
    to_provision: list[tuple[Claim, Truth]] = []
    free = []
    everywhere = np.ones(length, dtype=np.bool_)
    for claim in claims:
        node = volumes.node_of(claim)
        if not node:
            free.append(claim)
            continue
        at = np.zeros(length, dtype=np.bool_)
        row = tables.nodes.row(node)
        if row is not None:
            at[row] = True
        away |= ~at
        to_provision.append((claim, everywhere))
    taken: list[_Chosen] = []
    layers = volumes.places.layers() if free else []
    for claim in _in_order(free):
        chosen = _choose(claim, volumes, layers, length, taken)
        taken.append(chosen)
        to_provision.append((claim, chosen.ranks == _NOTHING))
    mask = zeros(length)
    for claim, at in to_provision:
        if at.any():
            open_rows = at & (mask == 0)
            mask[open_rows] = _provision_mask([claim], tables)[open_rows]
    mask[away] = _NO_VOLUME
    return mask


def _provision_mask(claims: Sequence[Claim], tables: Tables) -> Mask:
    """Return where volumes cannot be made for claims; a node counts with its first that fails."""
    volumes = tables.volumes
    length = len(tables.nodes)
    mask = zeros(length)
    for claim in claims:
        storage_class = volumes.class_of(claim)
        if storage_class is None or not storage_class.provisioner:
            mask[mask == 0] = _NO_VOLUME
            break
        allowed = volumes.rows_for_new(storage_class)
        mask[(mask == 0) & ~allowed] = _NO_VOLUME
        if claim.sized and volumes.reports_storage(storage_class):
            enough = volumes.rows_with_storage(storage_class, claim.size, length)
            mask[(mask == 0) & ~enough] = _NO_STORAGE
    return mask


def _in_order(claims: Sequence[Claim]) -> list[Claim]:
    """Return claims in the order in which they choose: the smallest first, then as the pod does."""
    return sorted(claims, key=lambda claim: claim.size)


# --- volumes that exist ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What a claim would get on each row. ranks: rank in its class, or _NOTHING; a volume that
    refers to the claim has rank 0 and belongs to no class' ranks."""

    class_name: str
    ranks: NDArray[np.int64]
    reserved: bool = field(default=False)


def _choose(
    claim: Claim, volumes: VolumeTable, layers: Sequence[Layer], length: int, taken: list[_Chosen]
) -> _Chosen:
    """Return what a claim gets on each row, after the choices in `taken`."""
    reserved = volumes.reserved_for(claim)
    if reserved is not None:
        ranks = np.where(volumes.rows_of(reserved), 0, _NOTHING)
        return _Chosen(claim.class_name, ranks, reserved=True)
    candidates = volumes.candidates(claim.class_name)
    found = candidates.for_claim(claim)
    others = [
        each.ranks for each in taken if each.class_name == claim.class_name and not each.reserved
    ]
    best = np.full(length, _NOTHING)
    # Each earlier claim takes at most one volume of a row, so as many are passed over at most.
    for ranks in _best_by_place(found, candidates.places, volumes.places.size, 1 + len(others)):
        for layer in layers:
            offered = ranks[layer]
            for other in others:
                offered = np.where(offered == other, _NOTHING, offered)
            np.minimum(best, offered, out=best)
    return _Chosen(claim.class_name, best)


def _best_by_place(
    found: NDArray[np.intp], places: NDArray[np.int64], size: int, depth: int
) -> list[NDArray[np.int64]]:
    """Return the best rank by place, the second best, and so on, `depth` of them.

    found: ranks that are to be had, ascending. The last index stands for nowhere.
    """
    of = places[found]
    order = np.argsort(of, kind="stable")
    sorted_places = of[order]
    first = np.searchsorted(sorted_places, sorted_places, side="left")
    depth_of = np.arange(len(order)) - first
    result = []
    for level in range(depth):
        ranks = np.full(size + 1, _NOTHING)
        at = depth_of == level
        ranks[sorted_places[at]] = found[order[at]]
        result.append(ranks)
    return result


def _choices(
    claim: Claim, volumes: VolumeTable, layers: Sequence[Layer], row: int
) -> tuple[str, ...]:
    """Return the names of the volumes that a claim can be bound to from one row, best first.

    layers: each with the place of this row alone.
    """
    reserved = volumes.reserved_for(claim)
    if reserved is not None:
        return (reserved.name,) if volumes.rows_of(reserved)[row] else ()
    candidates = volumes.candidates(claim.class_name)
    found = candidates.for_claim(claim)
    here = np.zeros(len(found), dtype=np.bool_)
    for layer in layers:
        here |= candidates.places[found] == layer[0]
    ordered: list[Volume] = [candidates.volumes[int(number)] for number in found[here]]
    return tuple(volume.name for volume in ordered)
