"""The devices that a pod gets on one node.

Types that are allocated jointly come first: the primary, then the others near it. GPUs are chosen
by partition, by topology, or else like all other types by score and minor.
docs/facts/scheduler.md, "Device allocation".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from apis.device import (
    AllocatedFunction,
    DeviceAllocation,
    DeviceAllocationExtension,
    DeviceType,
)
from apis.keys import GPU_MEMORY
from apis.quantity import Quantity
from cluster.scheduler.exact.devices import failures
from cluster.scheduler.exact.devices.candidates import (
    NO_LIMITS,
    Candidate,
    Limits,
    Scoring,
    candidates,
    considered,
    in_order,
)
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.exact.devices.partition import choose_partition
from cluster.scheduler.exact.devices.templates import NO_TEMPLATES, SharedTemplates
from cluster.scheduler.exact.devices.topology import choose_close, has_tree, subtree_of
from cluster.scheduler.tables.devices.node import DeviceState, NodeDevices, Switch
from cluster.scheduler.tables.devices.partitions import LARGEST_MINOR
from cluster.scheduler.tables.devices.request import DeviceRequest, Scope, TypeRequest

Devices = Mapping[str, tuple[DeviceAllocation, ...]]
"""Device type -> allocated devices by ascending minor."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How the scheduler was configured to choose devices."""

    scoring: Scoring = field(default_factory=Scoring)
    templates: SharedTemplates = NO_TEMPLATES


DEFAULT_RULES: Final = Rules()


@dataclass(frozen=True, slots=True)
class _Chosen:
    devices: tuple[Candidate, ...]
    template: str = ""


@dataclass(frozen=True, slots=True)
class _Near:
    """What the primary of a joint allocation means for a type.

    toward: PCIe switches of the primary's devices, to prefer. only: the only switches that may be
    used, None for all.
    """

    toward: tuple[Switch | None, ...] = ()
    only: frozenset[Switch] | None = None


_ANYWHERE: Final = _Near()


def allocate(
    devices: NodeDevices,
    request: DeviceRequest,
    *,
    limits: Limits = NO_LIMITS,
    rules: Rules = DEFAULT_RULES,
) -> Devices | Failure:
    """Return the devices that a pod gets on a node, or why it cannot get them."""
    chosen = _joint(devices, request, limits, rules)
    if isinstance(chosen, Failure):
        return chosen
    for type_, wanted in request.types.items():
        if type_ not in chosen:
            alone = _of_type(devices, wanted, request, limits, rules)
            if isinstance(alone, Failure):
                return alone
            chosen[type_] = alone
    return MappingProxyType({type_: _allocations(type_, chosen[type_]) for type_ in request.types})


# --- types together ------------------------------------------------------------------------------


def _joint(
    devices: NodeDevices, request: DeviceRequest, limits: Limits, rules: Rules
) -> dict[str, _Chosen] | Failure:
    if not request.joint:
        return {}
    primary, *others = request.joint
    wanted = request.types[primary]
    near = _ANYWHERE
    if request.same_pcie and others:
        near = _Near(only=_switches_with_all(devices, request, limits, rules))
    first = _of_type(devices, wanted, request, limits, rules, near=near)
    if isinstance(first, Failure):
        # A type that the node cannot give alone says more than that it is not near the others.
        for type_ in request.joint:
            alone = _of_type(devices, request.types[type_], request, limits, rules)
            if isinstance(alone, Failure):
                return alone
        return failures.NOT_JOINT
    chosen = {primary: first}
    switches = tuple(dict.fromkeys(one.switch for one in first.devices))
    known = frozenset(switch for switch in switches if switch is not None)
    beside = _Near(switches, known if request.same_pcie else None)
    for type_ in others:
        other = _of_type(devices, request.types[type_], request, limits, rules, near=beside)
        if isinstance(other, Failure):
            return other
        if request.same_pcie and {one.switch for one in other.devices} != set(switches):
            return failures.NOT_JOINT
        chosen[type_] = other
    return chosen


def _switches_with_all(
    devices: NodeDevices, request: DeviceRequest, limits: Limits, rules: Rules
) -> frozenset[Switch]:
    """Return the PCIe switches with candidates of every type beside the primary.

    A primary's device elsewhere could not have the others on its switch. A single one needs all
    devices of the other types on its own switch.
    """
    primary, *others = request.joint
    switches: frozenset[Switch] | None = None
    for type_ in others:
        wanted = request.types[type_]
        least = wanted.count if request.types[primary].count == 1 else 1
        counts = Counter(one.switch for one in _candidates(devices, wanted, limits, rules))
        enough = frozenset(
            switch for switch, count in counts.items() if switch is not None and count >= least
        )
        switches = enough if switches is None else switches & enough
    return switches if switches is not None else frozenset()


# --- one type ------------------------------------------------------------------------------------


def _candidates(
    devices: NodeDevices, wanted: TypeRequest, limits: Limits, rules: Rules
) -> list[Candidate]:
    return candidates(devices.states.get(wanted.type, ()), wanted, limits, rules.scoring)


def _of_type(
    devices: NodeDevices,
    wanted: TypeRequest,
    request: DeviceRequest,
    limits: Limits,
    rules: Rules,
    *,
    near: _Near = _ANYWHERE,
) -> _Chosen | Failure:
    type_ = wanted.type
    states = devices.states.get(type_, ())
    if not states:
        return failures.NO_DEVICES[type_]
    found = _candidates(devices, wanted, limits, rules)
    least = most = wanted.count
    if wanted.every:
        least = most = len(considered(states, wanted, limits))
        if least == 0:
            return failures.INSUFFICIENT[type_]
    elif near.toward:
        most = max(wanted.count, len(near.toward))
        least = wanted.count if near.only is None else most
    if len(found) - devices.unattributed.get(type_, 0) < least:
        return _shortage(devices, wanted, limits, rules, least)
    problem = _scope_problem(states, wanted)
    if problem is not None:
        return problem
    if near.only is not None:
        found = [one for one in found if one.switch in near.only]
        if len(found) - devices.unattributed.get(type_, 0) < least:
            return failures.NOT_JOINT
    template = _template(devices, wanted, rules)
    if template is None:
        return failures.NO_TEMPLATE
    preferred = limits.preferred.get(type_, frozenset())
    by_partition = devices.partitions.mandatory or request.partition is not None
    outcome: _Chosen | Failure = failures.INSUFFICIENT[type_]
    for usable in ([one for one in found if one.minor in preferred], found):
        if len(usable) < least:
            continue
        if near.toward and not wanted.scope and not (type_ == DeviceType.GPU and by_partition):
            near_ones = in_order(usable, preferred=preferred, switches=near.toward)
            outcome = _Chosen(tuple(near_ones[:most]))
        elif type_ == DeviceType.GPU:
            outcome = _gpus(devices, usable, wanted, request, preferred)
        elif wanted.scope:
            outcome = _close(states, usable, wanted, preferred)
        else:
            outcome = _Chosen(tuple(in_order(usable, preferred=preferred)[:most]))
        if isinstance(outcome, _Chosen):
            return replace(outcome, template=template)
    return outcome


def _template(devices: NodeDevices, wanted: TypeRequest, rules: Rules) -> str | None:
    """Return the template that a share of a device is, "" for one that needs none."""
    if wanted.type != DeviceType.GPU or not rules.templates.concern(wanted):
        return ""
    return rules.templates.of(wanted, vendor=devices.vendor, model=devices.model)


def _shortage(
    devices: NodeDevices, wanted: TypeRequest, limits: Limits, rules: Rules, least: int
) -> Failure:
    """Return why there are too few candidates."""
    states = devices.states.get(wanted.type, ())
    least += devices.unattributed.get(wanted.type, 0)
    if wanted.functions is not None:
        with_functions_in_use = candidates(states, wanted, limits, rules.scoring, functions=False)
        if len(with_functions_in_use) >= least:
            return failures.NO_FUNCTIONS[wanted.type]
    if limits.numa is not None:
        anywhere = replace(limits, numa=None)
        if len(candidates(states, wanted, anywhere, rules.scoring)) >= least:
            return failures.NOT_ON_NUMA_NODES
    return failures.INSUFFICIENT[wanted.type]


def _gpus(
    devices: NodeDevices,
    found: Sequence[Candidate],
    wanted: TypeRequest,
    request: DeviceRequest,
    preferred: Set[int],
) -> _Chosen | Failure:
    if not wanted.shared:
        chosen = _partition(devices, found, wanted, request)
        if chosen is not None:
            return chosen
    return _close(devices.states[DeviceType.GPU], found, wanted, preferred)


def _partition(
    devices: NodeDevices,
    found: Sequence[Candidate],
    wanted: TypeRequest,
    request: DeviceRequest,
) -> _Chosen | Failure | None:
    """Return GPUs that are a partition; None where none is needed and none is free."""
    binds = devices.partitions.mandatory or request.partition is not None
    table = devices.partitions.table
    if table is None:
        return failures.NO_PARTITION_TABLE if binds else None
    if wanted.count not in table:
        return failures.UNSUPPORTED_COUNT if binds else None
    by_minor = {one.minor: one for one in found if one.minor <= LARGEST_MINOR}
    available = sum(1 << minor for minor, one in by_minor.items() if not one.state.used)

    def in_scope(minors: tuple[int, ...]) -> bool:
        return len({subtree_of(by_minor[minor].state, wanted.scope) for minor in minors}) == 1

    allowed = in_scope if demands_scope(wanted) else _anywhere
    minors = choose_partition(table, wanted.count, available, request.partition, allowed)
    if minors is None:
        return failures.NO_PARTITION if binds else None
    return _Chosen(tuple(by_minor[minor] for minor in minors))


def _anywhere(minors: tuple[int, ...]) -> bool:
    return True


def _scope_problem(states: Sequence[DeviceState], wanted: TypeRequest) -> Failure | None:
    """Return why the required scope cannot be kept on this node, whatever is free."""
    if not demands_scope(wanted):
        return None
    if wanted.shared and wanted.count > 1:
        return failures.SEVERAL_SHARES
    if wanted.scope is Scope.DEVICE:
        return failures.NOT_IN_SCOPE[wanted.type]
    return None if has_tree(states) else failures.NO_TOPOLOGY[wanted.type]


def demands_scope(wanted: TypeRequest) -> bool:
    """Return whether a scope is required that a choice could violate.

    A single device is always within one device.
    """
    one_device = wanted.scope is Scope.DEVICE and wanted.count == 1 and not wanted.every
    return wanted.scope is not Scope.NONE and not one_device


def _close(
    states: Sequence[DeviceState],
    found: Sequence[Candidate],
    wanted: TypeRequest,
    preferred: Set[int],
) -> _Chosen | Failure:
    """Return devices by topology; by score and minor where topology is unknown or of no use."""
    count = len(found) if wanted.every else wanted.count
    several_shares = wanted.shared and wanted.count > 1
    scope = wanted.scope if demands_scope(wanted) else Scope.NONE
    if not scope and (several_shares or not has_tree(states)):
        return _Chosen(tuple(in_order(found, preferred=preferred)[:count]))
    close = choose_close(
        found, states, count, scope=scope, shared=wanted.shared, preferred=preferred
    )
    return failures.NOT_IN_SCOPE[wanted.type] if close is None else _Chosen(close)


# --- the result ----------------------------------------------------------------------------------


def _allocations(type_: str, chosen: _Chosen) -> tuple[DeviceAllocation, ...]:
    return tuple(
        DeviceAllocation(
            minor=one.minor,
            id=one.state.unit.id,
            resources={name: _quantity(name, amount) for name, amount in one.amounts.items()},
            extension=_extension(one, chosen.template),
        )
        for one in sorted(chosen.devices, key=lambda one: one.minor)
    )


def _quantity(name: str, amount: int) -> Quantity:
    return Quantity.of_bytes(amount) if name == GPU_MEMORY else Quantity.of(amount)


def _extension(one: Candidate, template: str) -> DeviceAllocationExtension | None:
    if one.function is None and not template:
        return None
    functions: tuple[AllocatedFunction, ...] = ()
    if one.function is not None:
        bus_id, minor = one.function
        functions = (AllocatedFunction(minor=minor, bus_id=bus_id),)
    return DeviceAllocationExtension(vfs=functions, gpu_shared_resource_template=template)
