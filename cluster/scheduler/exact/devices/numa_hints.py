"""Which sets of NUMA nodes could give a pod its devices, for the NUMA topology policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cluster.scheduler.exact.devices.allocate import DEFAULT_RULES, Devices, Rules, allocate
from cluster.scheduler.exact.devices.candidates import NO_LIMITS, Limits
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.exact.numa import Hint, Hints, subsets
from cluster.scheduler.tables.devices.inventory import NO_NUMA_NODE
from cluster.scheduler.tables.devices.node import DeviceState, NodeDevices
from cluster.scheduler.tables.devices.request import DeviceRequest

SAME_DEVICES: Final = 500
"""Score of a set with which the pod gets the devices that it would get without a NUMA policy;
upstream's. It outweighs every other provider's score, which is at most 100."""

_MOST_NODES: Final = 8
"""NUMA nodes with devices; chosen: more have too many sets to try, and the provider has no opinion.
An allocation for each of 255 sets takes about 10 ms."""


def device_hints(
    devices: NodeDevices,
    request: DeviceRequest,
    *,
    limits: Limits = NO_LIMITS,
    rules: Rules = DEFAULT_RULES,
) -> Hints | None:
    """Return the sets of NUMA nodes that could give all devices; None without an opinion.

    A set is preferred if no smaller one could do on this node when it is empty. Where the node does
    not say on which NUMA nodes its devices are, there is no opinion. limits: beside the sets.
    """
    ids = sorted(
        {
            state.unit.numa
            for type_ in request.types
            for state in devices.states.get(type_, ())
            if state.unit.has_topology and state.unit.numa != NO_NUMA_NODE
        }
    )
    if not ids or len(ids) > _MOST_NODES:
        return None
    masks = subsets(tuple(ids))
    empty = _emptied(devices)
    narrowest = next(
        (
            mask.bit_count()
            for mask in masks
            if _found(empty, request, mask, limits, rules) is not None
        ),
        0,
    )
    anywhere = allocate(devices, request, limits=limits, rules=rules)
    hints = {}
    for mask in masks:
        found = _found(devices, request, mask, limits, rules)
        if found is not None:
            same = not isinstance(anywhere, Failure) and _minors(found) == _minors(anywhere)
            preferred = mask.bit_count() == narrowest
            hints[mask] = Hint(preferred, SAME_DEVICES if same else 0)
    return hints


def _found(
    devices: NodeDevices, request: DeviceRequest, mask: int, limits: Limits, rules: Rules
) -> Devices | None:
    numa = frozenset(node for node in range(mask.bit_length()) if mask >> node & 1)
    found = allocate(devices, request, limits=replace(limits, numa=numa), rules=rules)
    return None if isinstance(found, Failure) else found


def _minors(found: Devices) -> dict[str, tuple[int, ...]]:
    return {type_: tuple(one.minor for one in of_type) for type_, of_type in found.items()}


def _emptied(devices: NodeDevices) -> NodeDevices:
    """Return the devices as they would be without pods."""
    states = {
        type_: tuple(DeviceState(state.unit, state.unit.total) for state in of_type)
        for type_, of_type in devices.states.items()
    }
    return replace(devices, states=states, unattributed={})
