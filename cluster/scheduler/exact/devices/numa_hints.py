"""Which NUMA nodes a pod's devices would be on, for the NUMA topology policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

from cluster.scheduler.exact.devices.allocate import DEFAULT_RULES, Rules, allocate
from cluster.scheduler.exact.devices.candidates import NO_LIMITS, Limits
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.tables.device_inventory import NO_NUMA_NODE
from cluster.scheduler.tables.device_request import DeviceRequest
from cluster.scheduler.tables.node_devices import NodeDevices

SAME_DEVICES: Final = 500
"""Score of a hint with which the pod gets the devices that it would get without a NUMA affinity."""

_MOST_NODES: Final = 8
"""NUMA nodes with devices; more have too many subsets to try (2^8 = 256), and get no hints."""


@dataclass(frozen=True, slots=True)
class DeviceHint:
    """nodes: NUMA nodes. preferred: no fewer NUMA nodes would do."""

    nodes: frozenset[int]
    preferred: bool
    score: int


def device_hints(
    devices: NodeDevices,
    request: DeviceRequest,
    *,
    limits: Limits = NO_LIMITS,
    rules: Rules = DEFAULT_RULES,
) -> Mapping[str, tuple[DeviceHint, ...]] | Failure:
    """Return the hints for each requested type; a type without hints has no preference.

    Ordered by the number of NUMA nodes, then by their ids. An empty tuple would mean that no set of
    NUMA nodes can do; that is a Failure instead.
    """
    anywhere = allocate(devices, request, limits=limits, rules=rules)
    if isinstance(anywhere, Failure):
        return anywhere
    nodes = sorted(
        {
            state.unit.numa
            for type_ in request.types
            for state in devices.states.get(type_, ())
            if state.unit.has_topology and state.unit.numa != NO_NUMA_NODE
        }
    )
    if not nodes or len(nodes) > _MOST_NODES:
        return {}
    subsets = [
        frozenset(subset)
        for size in range(1, len(nodes) + 1)
        for subset in combinations(nodes, size)
    ]
    hints: dict[str, list[DeviceHint]] = {type_: [] for type_ in request.types}
    smallest: dict[str, int] = {}
    failure: Failure | None = None
    for subset in subsets:
        found = allocate(devices, request, limits=replace(limits, numa=subset), rules=rules)
        if isinstance(found, Failure):
            failure = found
            continue
        for type_, allocated in found.items():
            smallest.setdefault(type_, len(subset))
            minors = {one.minor for one in allocated}
            same = minors == {one.minor for one in anywhere[type_]}
            preferred = len(subset) == smallest[type_]
            hints[type_].append(DeviceHint(subset, preferred, SAME_DEVICES if same else 0))
    if failure is not None and not any(hints.values()):
        return failure
    return {type_: tuple(of_type) for type_, of_type in hints.items()}
