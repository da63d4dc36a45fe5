"""Which devices of every node fit a request, by columns.

What these functions decide is exact for devices by number, scope, partition or beside others;
`needs_allocation` names the requests for which only the allocation on a node decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.device import DeviceType
from apis.keys import GPU_MEMORY, GPU_MEMORY_RATIO
from apis.meta import LabelSelector, matches
from cluster.scheduler.exact.devices.candidates import Scoring
from cluster.scheduler.plugins.contract import percent_of, zeros
from cluster.scheduler.tables.amounts import Vector
from cluster.scheduler.tables.devices.columns import NO_SEGMENT, DeviceColumns
from cluster.scheduler.tables.devices.inventory import MOST_DEVICES
from cluster.scheduler.tables.devices.partitions import LARGEST_MINOR, PartitionRules
from cluster.scheduler.tables.devices.request import (
    WHOLE,
    DeviceRequest,
    Exclusive,
    Scope,
    TypeRequest,
)

Slots = NDArray[np.intp]
Flags = NDArray[np.bool_]
"""By slot, or by slot and device."""

_GPU: Final = str(DeviceType.GPU)


def needs_allocation(request: DeviceRequest, wanted: TypeRequest) -> bool:
    """Return whether only the allocation on a node decides if it can serve a request."""
    if wanted.functions is not None and not wanted.functions.is_empty():
        return True
    if not request.same_pcie or wanted.type not in request.joint[1:]:
        return False
    # Each switch of the primary has one device at least; for more of them the switches are tried.
    primary = request.types[request.joint[0]]
    return (wanted.count > 1 and primary.count > 1) or wanted.scope is not Scope.NONE


def selected(columns: DeviceColumns, slots: Slots, selector: LabelSelector | None) -> Flags:
    """Return the devices that a selector selects, without one all that exist."""
    present: Flags = columns.present[slots]
    if selector is None:
        return present
    by_number = np.array([matches(selector, labels) for labels in columns.label_sets])
    chosen: Flags = present & by_number[columns.labels[slots]]
    return chosen


def fitting(columns: DeviceColumns, slots: Slots, wanted: TypeRequest) -> Flags:
    """Return the devices that can give what is asked of one device."""
    fits: Flags = selected(columns, slots, wanted.selector) & (columns.closed[slots] == 0)
    if wanted.functions is not None:
        fits &= columns.free_functions[slots] > 0
    if wanted.exclusive is Exclusive.PCIE:
        fits &= ~_on_used_switch(columns, slots)
    free = columns.free[slots]
    for name, amount in wanted.each.items():
        fits &= free[..., columns.column[name]] >= amount
    if wanted.type == _GPU:
        # The other unit of GPU memory; as `with_gpu_memory`.
        memory, ratio = columns.column[GPU_MEMORY], columns.column[GPU_MEMORY_RATIO]
        has = columns.total[slots, :, memory]
        if wanted.by_bytes:
            needed = wanted.each[GPU_MEMORY] * WHOLE // np.maximum(has, 1)
            fits &= (has == 0) | (free[..., ratio] >= needed)
        elif GPU_MEMORY_RATIO in wanted.each:
            needed = wanted.each[GPU_MEMORY_RATIO] * has // WHOLE
            fits &= (has == 0) | (free[..., memory] >= needed)
    return fits


def _on_used_switch(columns: DeviceColumns, slots: Slots) -> Flags:
    """Return the devices of which, or of whose PCIe switch, a pod has a part."""
    used: Flags = columns.holders[slots] > 0
    switches = columns.pcie[slots]
    found = used.copy()
    for switch in range(int(switches.max(initial=-1)) + 1):
        there = switches == switch
        found |= there & (used & there).any(axis=1)[:, None]
    return found


def beside(
    columns: DeviceColumns, others: DeviceColumns, slots: Slots, fits: Flags, least: int
) -> Flags:
    """Return the devices of `columns` on whose PCIe switch are `least` fitting devices of `others`.

    fits: the devices of `others` that fit.
    """
    mine, theirs = columns.pcie[slots], others.pcie[slots]
    found: Flags = np.zeros(mine.shape, dtype=np.bool_)
    for switch in range(int(theirs.max(initial=-1)) + 1):
        enough = (fits & (theirs == switch)).sum(axis=1) >= least
        found |= (mine == switch) & enough[:, None]
    return found


def has_topology(columns: DeviceColumns, slots: Slots) -> Flags:
    """Return the slots of which every device says where it is attached."""
    known = ~columns.present[slots] | (columns.numa[slots] != NO_SEGMENT)
    every: Flags = np.logical_and.reduce(known, axis=1)
    return every


def most_together(columns: DeviceColumns, slots: Slots, fits: Flags, scope: Scope) -> Vector:
    """Return the largest number of fitting devices in one part of the node of that scope."""
    if scope <= Scope.NODE:
        all_of_node: Vector = fits.sum(axis=1, dtype=np.int64)
        return all_of_node
    segments = (columns.pcie if scope >= Scope.PCIE else columns.numa)[slots]
    most: Vector = zeros(len(fits))
    for segment in range(int(segments.max(initial=-1)) + 1):
        np.maximum(most, (fits & (segments == segment)).sum(axis=1), out=most)
    return most


def with_partition(
    columns: DeviceColumns,
    slots: Slots,
    fits: Flags,
    rules: Sequence[PartitionRules],
    wanted: TypeRequest,
    request: DeviceRequest,
) -> Flags:
    """Return the slots with a free partition that serves the request. rules: of each slot."""
    minors = columns.minor[slots]
    free = fits & (columns.holders[slots] == 0) & (minors <= LARGEST_MINOR)
    bits = np.where(free, np.uint64(1) << np.minimum(minors, LARGEST_MINOR).astype(np.uint64), 0)
    available = np.bitwise_or.reduce(bits.astype(np.uint64), axis=1)
    by_table: dict[int, list[int]] = {}
    for position, rule in enumerate(rules):
        by_table.setdefault(id(rule.table), []).append(position)
    found: Flags = np.zeros(len(slots), dtype=np.bool_)
    for positions in by_table.values():
        table = rules[positions[0]].table
        groups = table.get(wanted.count, ()) if table is not None else ()
        partition = request.partition
        if partition is not None and partition.restricted:
            groups = groups[:1]
        there = available[positions]
        for group in groups:
            for one in group:
                if partition is None or one.bandwidth >= partition.bandwidth:
                    needed = np.uint64(one.bits)
                    found[positions] |= there & needed == needed
    return found


def node_scores(
    columns: DeviceColumns, slots: Slots, wanted: TypeRequest, scoring: Scoring
) -> Vector:
    """Return 0..100 by slot: how full the node's devices of a type would be.

    The weighted mean over the resources that its devices have; used = total - free + requested,
    summed over the devices that the request's selector selects, for all requested devices.
    """
    considered = selected(columns, slots, wanted.selector)
    total = np.where(considered[..., None], columns.total[slots], 0).sum(axis=1)
    free = np.where(considered[..., None], columns.free[slots], 0).sum(axis=1)
    devices = np.maximum(considered.sum(axis=1), 1)
    count = considered.sum(axis=1) if wanted.every else min(wanted.count, MOST_DEVICES)
    score: Vector = zeros(len(slots))
    weights: Vector = zeros(len(slots))
    for name, weight in scoring.weights.items():
        if name not in columns.column:
            continue
        column = columns.column[name]
        capacity = total[:, column]
        each = wanted.each.get(name, 0)
        if each == 0:
            # The other unit of GPU memory, of the node's mean device. Devices of other types have
            # one resource, which is requested.
            mean = total[:, columns.column[GPU_MEMORY]] // devices
            if name == GPU_MEMORY and GPU_MEMORY_RATIO in wanted.each:
                each = wanted.each[GPU_MEMORY_RATIO] * mean // WHOLE
            elif name == GPU_MEMORY_RATIO and wanted.by_bytes:
                each = wanted.each[GPU_MEMORY] * WHOLE // np.maximum(mean, 1)
        used = capacity - free[:, column] + each * count
        within = (capacity > 0) & (used <= capacity)
        part = used if scoring.most else capacity - used
        score += weight * percent_of(part, capacity) * within
        weights += weight * (capacity > 0)
    result: Vector = score // np.maximum(weights, 1)
    return result
