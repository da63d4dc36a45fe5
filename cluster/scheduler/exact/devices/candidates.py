"""The devices of one type that could serve a request, and their order.

A candidate can give everything that is asked of one device. Which of the candidates are taken is
the business of `choice`, `partition` and `topology`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from apis.device import DeviceType
from apis.keys import FPGA, GPU_MEMORY, GPU_MEMORY_RATIO, RDMA
from apis.meta import matches
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.devices.inventory import NO_NUMA_NODE
from cluster.scheduler.tables.devices.node import DeviceState, Switch, with_gpu_memory
from cluster.scheduler.tables.devices.request import Exclusive, TypeRequest

MAX_SCORE: Final = 100


@dataclass(frozen=True, slots=True)
class Scoring:
    """How full a device or a node is, as a score.

    weights: by resource. most: prefer what is fuller (MostAllocated), else what is emptier.
    """

    weights: Mapping[str, int] = field(
        default_factory=lambda: {GPU_MEMORY_RATIO: 1, GPU_MEMORY: 1, RDMA: 1, FPGA: 1}
    )
    most: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What a NUMA affinity, a reservation and a scheduling hint allow.

    numa: allowed NUMA nodes, None for all. preferred: minors to take first, by type. required: by
    type the only minors that may be used, and what of each; types that are missing are free.
    functions: by type and minor, the only virtual functions that may be given, by bus id; a device
    that is missing may give any.
    """

    numa: Set[int] | None = None
    preferred: Mapping[str, Set[int]] = field(default_factory=dict)
    required: Mapping[str, Mapping[int, Amounts]] = field(default_factory=dict)
    functions: Mapping[tuple[str, int], Set[str]] = field(default_factory=dict)


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that can serve one part of a request.

    amounts: what the pod takes of it, GPU memory in both units. score: by `Scoring`. function: the
    virtual function (bus id, minor) that comes with it, if one is requested.
    """

    state: DeviceState
    amounts: Amounts
    score: int = 0
    function: tuple[str, int] | None = None

    @property
    def minor(self) -> int:
        return self.state.unit.minor

    @property
    def switch(self) -> Switch | None:
        return self.state.unit.switch


def considered(
    states: Sequence[DeviceState], request: TypeRequest, limits: Limits
) -> list[DeviceState]:
    """Return the devices that the request's selector and the limits allow, free or not."""
    required = limits.required.get(request.type)
    return [
        state
        for state in states
        if (required is None or state.unit.minor in required)
        and _on_numa_nodes(state, limits.numa)
        and (request.selector is None or matches(request.selector, state.unit.labels))
    ]


def _on_numa_nodes(state: DeviceState, numa: Set[int] | None) -> bool:
    unit = state.unit
    return numa is None or (unit.has_topology and (unit.numa in numa or unit.numa == NO_NUMA_NODE))


def candidates(
    states: Sequence[DeviceState],
    request: TypeRequest,
    limits: Limits,
    scoring: Scoring,
    *,
    functions: bool = True,
) -> list[Candidate]:
    """Return the candidates by ascending minor.

    functions: whether a device without a free virtual function is left out, where one is requested.
    """
    taken = {state.unit.switch for state in states if state.used} - {None}
    required = limits.required.get(request.type)
    found = []
    for state in considered(states, request, limits):
        unit = state.unit
        if not unit.healthy or state.closed:
            continue
        if request.exclusive is Exclusive.PCIE and (state.used or unit.switch in taken):
            continue
        amounts = amounts_from(request, unit.total)
        free = state.free
        if required is not None:
            free = smaller(free, required[unit.minor])
        if any(amount > free.get(name, 0) for name, amount in amounts.items()):
            continue
        function = None
        if request.functions is not None:
            function = _free_function(state, request, limits.functions.get((unit.type, unit.minor)))
        if function is None and request.functions is not None and functions:
            continue
        score = fullness(unit.total, state.free, amounts, scoring)
        found.append(Candidate(state, amounts, score, function))
    return found


def amounts_from(request: TypeRequest, total: Amounts) -> dict[str, int]:
    """Return what the request takes of a device that has `total`."""
    if request.type == DeviceType.GPU:
        return with_gpu_memory(request.each, total)
    return dict(request.each)


def smaller(one: Amounts, other: Amounts) -> dict[str, int]:
    """Return the smaller amount of each resource of `one`; what `other` lacks is 0."""
    return {name: min(amount, other.get(name, 0)) for name, amount in one.items()}


def _free_function(
    state: DeviceState, request: TypeRequest, allowed: Set[str] | None
) -> tuple[str, int] | None:
    """Return the free virtual function with the lowest bus id, as text."""
    return min(
        (
            function
            for group in state.unit.function_groups
            if matches(request.functions, group.labels)
            for function in group.functions
            if function[0] not in state.functions_used
            and (allowed is None or function[0] in allowed)
        ),
        default=None,
    )


def fullness(total: Amounts, free: Amounts, requested: Amounts, scoring: Scoring) -> int:
    """Return 0..100: the weighted mean over the resources that `total` has.

    For each: used = total - free + requested; (total - used) * 100 // total, or with `most`
    used * 100 // total; 0 where more is used than there is.
    """
    score = weights = 0
    for name, weight in scoring.weights.items():
        capacity = total.get(name, 0)
        if capacity <= 0:
            continue
        used = capacity - free.get(name, 0) + requested.get(name, 0)
        if used <= capacity:
            score += weight * ((used if scoring.most else capacity - used) * MAX_SCORE // capacity)
        weights += weight
    return score // weights if weights else 0


def by_score(one: Candidate) -> tuple[int, int]:
    """Sort key: the highest score first, then the lowest minor."""
    return -one.score, one.minor


def in_order(
    found: Sequence[Candidate], *, preferred: Set[int], switches: Sequence[Switch | None] = ()
) -> list[Candidate]:
    """Return candidates in the order of preference.

    preferred: minors that come first. switches: without such minors, devices on these PCIe
    switches come first, one of each switch in turn.
    """
    if preferred:
        return sorted(found, key=lambda one: (one.minor not in preferred, by_score(one)))
    ordered = sorted(found, key=by_score)
    if not switches:
        return ordered
    queues = {switch: [one for one in ordered if one.switch == switch] for switch in switches}
    longest = max((len(queue) for queue in queues.values()), default=0)
    near = [
        queue[turn] for turn in range(longest) for queue in queues.values() if turn < len(queue)
    ]
    return near + [one for one in ordered if one.switch not in queues]
