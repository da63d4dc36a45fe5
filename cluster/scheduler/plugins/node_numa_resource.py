"""NodeNUMAResource: CPUs of a pod's own, and alignment to NUMA nodes.

A node passes if it has enough free CPUs of the kind that the bind policy needs, and a set of NUMA
nodes that the NUMA policy accepts. Counts of free CPUs by NUMA node decide that for all nodes at
once; which CPUs and which NUMA nodes is worked out for the chosen node (`exact`). Where all cores
of a machine have equally many threads the counts are exact. The score is the share of the node, or
of the chosen NUMA nodes, that stays free (or is in use). docs/scheduler.md, "NodeNUMAResource".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from msgspec.structs import replace as struct_replace

from apis.cpuset import CpuSet
from apis.keys import (
    ANNOTATION_RESOURCE_SPEC,
    ANNOTATION_RESOURCE_STATUS,
    CPU,
    MEMORY,
)
from apis.numa import (
    CPUBindPolicy,
    NodeCPUBindPolicy,
    NUMAAllocateStrategy,
    NUMAExclusive,
    NUMATopologyPolicy,
    ResourceSpec,
    resource_spec_text,
)
from cluster.scheduler.exact.cpus import NOT_ENOUGH
from cluster.scheduler.exact.numa import (
    INVALID_TOPOLOGY,
    MISSING,
    NO_NUMA_NODES,
    UNALIGNED,
    Hints,
    NumaDemand,
    Placement,
    Scoring,
    allocate,
)
from cluster.scheduler.exact.unfit import Unfit
from cluster.scheduler.plugins.contract import Mask, Reason, Recorded, Refusal, Scores, as_is
from cluster.scheduler.plugins.numa_room import (
    FULL_PREFERRED,
    FULL_REQUIRED,
    SPREAD_PREFERRED,
    SPREAD_REQUIRED,
    UNBOUND,
    Asked,
    Bools,
    Ints,
    chosen_sets,
    groups,
    lacks_in_total,
    needs,
    scores_of_sets,
    usable_counts,
)
from cluster.scheduler.plugins.resource_scores import capacity_and_use
from cluster.scheduler.tables.amounts import CPU_COLUMN
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.numa import BIND_POLICIES, POLICIES, WHOLE_NODE, NumaTable
from cluster.scheduler.tables.numa_demand import (
    FULL,
    SPREAD,
    CpuDemand,
    PodSpecs,
    own_bind_policy,
    pod_specs,
)
from cluster.scheduler.tables.numa_facts import NO_RATIO, NumaFacts
from cluster.scheduler.tables.numa_record import resource_status
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

NAME: Final = "NodeNUMAResource"

NOT_INTEGER: Final = "the requested CPUs must be integer"

_REASONS: Final = (
    Reason("node(s) NUMA Topology policy not match", resolvable=False),
    Reason(NOT_INTEGER, resolvable=False),
    Reason(INVALID_TOPOLOGY, resolvable=False),
    Reason("node(s) cpu bind policy conflicts with pod's required cpu bind policy", False),
    Reason("node(s) requested cpus not multiple cpus per core", resolvable=False),
    Reason("Insufficient amplified cpu"),
    Reason(NOT_ENOUGH),
    Reason(MISSING, resolvable=False),
    Reason(NO_NUMA_NODES),
    Reason(UNALIGNED),
)
(
    _MISMATCH,
    _FRACTION,
    _INVALID,
    _CONFLICT,
    _MULTIPLE,
    _AMPLIFIED,
    _CPUS,
    _NO_ZONES,
    _NO_ROOM,
    _NOT_ALIGNED,
) = range(len(_REASONS))
_FIRST_RESOURCE: Final = len(_REASONS)
_MOST_RESOURCES: Final = 48
"""Resources of a pod that have a reason of their own; a mask has 62 bits."""

_ROOM_BITS: Final = ~sum(1 << n for n, reason in enumerate(_REASONS) if not reason.resolvable)

_NODE_FULL: Final = BIND_POLICIES.index(NodeCPUBindPolicy.FULL_PCPUS_ONLY)
_NODE_SPREAD: Final = BIND_POLICIES.index(NodeCPUBindPolicy.SPREAD_BY_PCPUS)

_DEFAULT_SCORING: Final = Scoring(most_allocated=False, weights={CPU: 1, MEMORY: 1})


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of the plugin.

    default_bind_policy: FULL, SPREAD or UNSET (pods without a policy are not bound).
    scoring: of nodes. numa_scoring: of NUMA nodes within a node; its kind is also the order in
    which NUMA nodes are filled where the node has no strategy of its own.
    wider_restricted: see NumaDemand.
    """

    default_bind_policy: CPUBindPolicy = FULL
    scoring: Scoring = _DEFAULT_SCORING
    numa_scoring: Scoring = _DEFAULT_SCORING
    wider_restricted: bool = False


class HintProvider(Protocol):
    """Another plugin whose allocations lie on NUMA nodes."""

    def hints(self, pod: PodShape, tables: Tables, row: int) -> Hints | None:
        """Return the sets of NUMA nodes that the pod could use; None without an opinion."""
        ...


class Matched(Protocol):
    """Knows which reservations a pod may use."""

    def reservations(self, pod: PodShape, tables: Tables) -> Mapping[int, Sequence[str]]:
        """Return row -> UIDs of the reservations there."""
        ...


@dataclass(frozen=True, slots=True)
class NodeNUMAResource:
    """Filter, Score and Allocator. others: aligned together with CPUs and memory."""

    table: NumaTable
    settings: Settings = Settings()
    others: tuple[HintProvider, ...] = ()
    matched: Matched | None = None
    name: str = NAME

    # --- pod -------------------------------------------------------------------------------------

    def check(self, pod: PodShape, tables: Tables) -> None:
        """Refuse a pod whose annotations cannot be used, or that is to be bound to part of a CPU.

        Raises Refusal.
        """
        specs = pod.derived(pod_specs)
        if specs.error is not None:
            raise Refusal(NAME, str(specs.error))
        policy, _ = self._own_policy(pod)
        if policy and pod.requests.get(CPU, 0) % 1000:
            raise Refusal(NAME, NOT_INTEGER)

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        """Return whether pod or a node asks something. Raises Refusal."""
        self.check(pod, tables)
        policy, _ = self._own_policy(pod)
        specs = pod.derived(pod_specs)
        return bool(policy or specs.numa.numa_topology_policy or self.table.any_policy)

    def cluster_version(self, pod: PodShape, tables: Tables) -> int:
        return 0

    def _own_policy(self, pod: PodShape) -> tuple[CPUBindPolicy, bool]:
        milli = pod.requests.get(CPU, 0)
        return own_bind_policy(pod.derived(pod_specs), milli, self.settings.default_bind_policy)

    # --- filter ----------------------------------------------------------------------------------

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        """Return the fixed reasons, then one for each requested resource."""
        return _REASONS + tuple(Reason(f"Insufficient NUMA {name}") for name in _names(pod))

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        numbers = _numbers(tables, rows)
        asked, mask = self._asked(pod, numbers)
        mask |= self._amplified(pod, tables, asked)
        open_rows = mask == 0
        mask |= np.where(open_rows, self._cpus(asked), 0)
        with_policy = np.flatnonzero((mask == 0) & (asked.policy > 0))
        if len(with_policy):
            mask[with_policy] |= self._numa(pod, _at(asked, with_policy))
        self._allow_reserved(pod, tables, numbers, mask)
        return mask

    def _asked(self, pod: PodShape, rows: Ints) -> tuple[Asked, Mask]:
        """Return what the pod asks of each row, and the mask of what contradicts the node."""
        table = self.table
        table.follow()
        specs = pod.derived(pod_specs)
        milli = pod.requests.get(CPU, 0)
        mask = np.zeros(len(rows), dtype=np.int64)

        binding = np.full(len(rows), _binding(*self._own_policy(pod)), dtype=np.int64)
        if milli > 0:
            node = table.bind_policy[rows]
            full, spread = node == _NODE_FULL, node == _NODE_SPREAD
            mask |= _bit(full & (binding == SPREAD_REQUIRED), _CONFLICT)
            mask |= _bit(spread & (binding == FULL_REQUIRED), _CONFLICT)
            binding[full], binding[spread] = FULL_REQUIRED, SPREAD_REQUIRED
        bound = binding != UNBOUND
        step = table.core_step[rows]
        if milli % 1000:
            mask |= _bit(bound, _FRACTION)
        mask |= _bit(bound & (step == 0), _INVALID)
        odd = (milli // 1000) % np.maximum(step, 1) != 0
        mask |= _bit((binding == FULL_REQUIRED) & odd, _MULTIPLE)

        policy = table.policy[rows].astype(np.int64)
        own = POLICIES.index(specs.numa.numa_topology_policy)
        if own:
            mask |= _bit((policy > 0) & (policy != own), _MISMATCH)
            policy[:] = own
        asked = Asked(
            rows=rows,
            binding=binding,
            policy=policy,
            amounts=tuple((name, pod.requests[name]) for name in _names(pod)),
            cpus=milli // 1000,
            alone=specs.alone_on_core,
            exclusive=_exclusive(specs),
            wider_restricted=self.settings.wider_restricted,
        )
        return asked, mask

    def _amplified(self, pod: PodShape, tables: Tables, asked: Asked) -> Mask:
        milli = pod.requests.get(CPU, 0)
        ratio = self.table.cpu_ratio[asked.rows]
        if milli <= 0 or not (ratio > NO_RATIO).any():
            return np.zeros(len(asked.rows), dtype=np.int64)
        allocatable = tables.nodes.allocatable[asked.rows, CPU_COLUMN]
        requested = tables.nodes.requested[asked.rows, CPU_COLUMN]
        request = np.where(asked.binding != UNBOUND, _amplify(np.int64(milli), ratio), milli)
        short = request > allocatable - self._with_bound_cpus(requested, asked.rows)
        return _bit((ratio > NO_RATIO) & short, _AMPLIFIED)

    def _with_bound_cpus(self, requested: Ints, rows: Ints) -> Ints:
        """Return requested cpu with allocated CPUs amplified; requests count them as they are."""
        bound = self.table.bound[rows] * 1000
        ratio = self.table.cpu_ratio[rows]
        counts = (bound > 0) & (requested >= bound)
        return np.where(counts, requested - bound + _amplify(bound, ratio), requested)

    def _cpus(self, asked: Asked) -> Mask:
        usable = usable_counts(self.table, asked)[:, WHOLE_NODE]
        return _bit((asked.binding != UNBOUND) & (usable < asked.cpus), _CPUS)

    def _numa(self, pod: PodShape, asked: Asked) -> Mask:
        table = self.table
        found = needs(table, asked)
        mask = _bit(table.slots[asked.rows] == 0, _NO_ZONES)
        needed = np.zeros(len(asked.rows), dtype=np.bool_)
        for one in found:
            needed |= one.need > 0
        no_room = np.zeros(len(asked.rows), dtype=np.bool_)
        for group in groups(table, asked, found):
            room, admitted = group.room.any(axis=1), group.admitted.any(axis=1)
            refused = needed[group.at] & ~admitted & ~group.last_resort
            no_room[group.at] = refused & ~room
            mask[group.at] |= _bit(refused & room, _NOT_ALIGNED)
        names = _names(pod)
        named = np.zeros(len(asked.rows), dtype=np.bool_)
        for one in found:
            lacking = no_room & lacks_in_total(table, asked, one)
            named |= lacking
            mask |= _bit(lacking, _FIRST_RESOURCE + names.index(one.name))
        return mask | _bit(no_room & ~named, _NO_ROOM)

    def _allow_reserved(self, pod: PodShape, tables: Tables, numbers: Ints, mask: Mask) -> None:
        """Clear what only room that is reserved for the pod would change."""
        if self.matched is None:
            return
        reserved = self.matched.reservations(pod, tables)
        for position in np.flatnonzero(mask):
            if mask[position] & ~_ROOM_BITS:
                continue
            row = int(numbers[position])
            for uid in reserved.get(row, ()):
                placed = self._placement(pod, tables, row, reservation=uid)
                if isinstance(placed, Placement):
                    mask[position] = 0
                    break

    # --- score -----------------------------------------------------------------------------------

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        numbers = _numbers(tables, rows)
        asked, contradictions = self._asked(pod, numbers)
        scores = self._whole_node(pod, tables, asked)
        scores[contradictions != 0] = 0
        at = np.flatnonzero((asked.policy > 0) & (self.table.slots[numbers] > 0))
        if len(at):
            scores[at] = self._numa_scores(_at(asked, at))
        return scores

    def normalize(self, raw: Scores) -> Scores:
        return as_is(raw)

    def _whole_node(self, pod: PodShape, tables: Tables, asked: Asked) -> Scores:
        scoring = self.settings.scoring
        total = np.zeros(len(asked.rows), dtype=np.int64)
        weights = np.zeros_like(total)
        for name, weight in scoring.weights.items():
            request = pod.requests.get(name, 0)
            if "/" in name and not request:
                continue
            most, used = capacity_and_use(pod, tables, asked.rows, name, with_defaults=False)
            if name == CPU and request > 0:
                ratio = self.table.cpu_ratio[asked.rows]
                bound = asked.binding != UNBOUND
                own = np.where(bound, _amplify(np.int64(request), ratio), request)
                used = self._with_bound_cpus(used - request, asked.rows) + own
            has = most > 0
            most = np.where(has, most, 1)
            if scoring.most_allocated:
                share = np.minimum(used, most) * 100 // most
            else:
                share = np.maximum(0, most - used) * 100 // most
            total += np.where(has, weight * share, 0)
            weights += np.where(has, weight, 0)
        return total // np.maximum(weights, 1)

    def _numa_scores(self, asked: Asked) -> Scores:
        table, settings = self.table, self.settings
        scores = np.zeros(len(asked.rows), dtype=np.int64)
        found = needs(table, asked)
        for group in groups(table, asked, found):
            sets = chosen_sets(table, asked, group, settings.numa_scoring)
            given = scores_of_sets(table, asked, group.at, sets, settings.scoring)
            scores[group.at] = np.where(sets > 0, given, 0)
        return scores

    # --- allocation ------------------------------------------------------------------------------

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        """Add CPUs and amounts of NUMA nodes. A reservation of `allocation` may be used up."""
        placed = self._placement(pod, tables, row, reservation=allocation.reservation)
        if isinstance(placed, Unfit):
            return Reason(placed.reason)
        return replace(allocation, cpus=CpuSet.of_mask(placed.cpus), numa=placed.numa)

    def _placement(
        self, pod: PodShape, tables: Tables, row: int, *, reservation: str
    ) -> Placement | Unfit:
        facts = self.table.facts(row)
        demand = self.demand(pod, facts)
        state = self.table.state(row, reservation=reservation)
        if (
            facts.strategy is NUMAAllocateStrategy.UNSET
            and self.settings.numa_scoring.most_allocated
        ):
            state = replace(state, strategy=NUMAAllocateStrategy.MOST_ALLOCATED)
        others = [
            hints for one in self.others if (hints := one.hints(pod, tables, row)) is not None
        ]
        return allocate(state, demand, self.settings.numa_scoring, others=others)

    def demand(self, pod: PodShape, facts: NumaFacts) -> NumaDemand:
        """Return what the pod is to get on a node with these facts."""
        specs = pod.derived(pod_specs)
        milli = pod.requests.get(CPU, 0)
        policy, required = self._own_policy(pod)
        if milli > 0 and facts.bind_policy is NodeCPUBindPolicy.FULL_PCPUS_ONLY:
            policy, required = FULL, True
        elif milli > 0 and facts.bind_policy is NodeCPUBindPolicy.SPREAD_BY_PCPUS:
            policy, required = SPREAD, True
        cpus = None
        if policy:
            cpus = CpuDemand(
                count=milli // 1000,
                policy=policy,
                required=required,
                exclusive=specs.cpus.preferred_cpu_exclusive_policy,
                alone_on_core=specs.alone_on_core,
            )
        return NumaDemand(
            amounts={name: pod.requests[name] for name in _names(pod)},
            cpus=cpus,
            policy=specs.numa.numa_topology_policy or facts.policy,
            exclusive=_exclusive(specs),
            wider_restricted=self.settings.wider_restricted,
        )

    # --- record ----------------------------------------------------------------------------------

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        """Return `resource-status`, and for bound pods `resource-spec` as it was understood."""
        allocation = booking.allocation
        annotations: dict[str, str | None] = {}
        if allocation.cpus or allocation.numa:
            status = resource_status(allocation.cpus, allocation.numa)
            annotations[ANNOTATION_RESOURCE_STATUS] = status
        row = tables.nodes.row(booking.node)
        if allocation.cpus and row is not None:
            spec = self._understood(booking.shape, self.table.facts(row))
            if spec is not None:
                annotations[ANNOTATION_RESOURCE_SPEC] = spec
        return Recorded(annotations, {})

    def _understood(self, pod: PodShape, facts: NumaFacts) -> str | None:
        """Return `resource-spec` with the policy that took effect, None where it is there."""
        spec = pod.derived(pod_specs).cpus
        cpus = self.demand(pod, facts).cpus
        if cpus is None:
            return None
        changed = spec
        if spec.required_cpu_bind_policy in (CPUBindPolicy.UNSET, CPUBindPolicy.DEFAULT):
            if cpus.required:
                changed = _with_required(spec, cpus.policy)
            elif spec.preferred_cpu_bind_policy is not cpus.policy:
                changed = _with_preferred(spec, cpus.policy)
        return resource_spec_text(changed) if changed != spec else None


def _with_required(spec: ResourceSpec, policy: CPUBindPolicy) -> ResourceSpec:
    return struct_replace(spec, required_cpu_bind_policy=policy)


def _with_preferred(spec: ResourceSpec, policy: CPUBindPolicy) -> ResourceSpec:
    return struct_replace(spec, preferred_cpu_bind_policy=policy)


def _names(pod: PodShape) -> list[str]:
    """Return the requested resources that may have a reason of their own, in a fixed order."""
    return sorted(name for name, amount in pod.requests.items() if amount > 0)[:_MOST_RESOURCES]


def _numbers(tables: Tables, rows: Rows) -> Ints:
    if isinstance(rows, slice):
        return np.arange(len(tables.nodes), dtype=np.intp)[rows]
    return rows


def _at(asked: Asked, positions: Ints) -> Asked:
    return replace(
        asked,
        rows=asked.rows[positions],
        binding=asked.binding[positions],
        policy=asked.policy[positions],
    )


def _binding(policy: CPUBindPolicy, required: bool) -> int:
    if policy is FULL:
        return FULL_REQUIRED if required else FULL_PREFERRED
    if policy is SPREAD:
        return SPREAD_REQUIRED if required else SPREAD_PREFERRED
    return UNBOUND


def _exclusive(specs: PodSpecs) -> NUMAExclusive:
    """Return whether wide and narrow pods may meet; a pod with a policy of its own has a default.

    Restricted and SingleNUMANode stand for Required. BestEffort, which is to refuse nothing that
    it need not, stands for Preferred.
    """
    stated = specs.numa.single_numa_node_exclusive
    match specs.numa.numa_topology_policy:
        case NUMATopologyPolicy.NONE:
            return stated
        case NUMATopologyPolicy.BEST_EFFORT:
            return stated or NUMAExclusive.PREFERRED
    return stated or NUMAExclusive.REQUIRED


def _bit(rows: Bools, reason: int) -> Mask:
    return rows.astype(np.int64) << reason


def _amplify(amounts: Ints | np.int64, ratio: Ints) -> Ints:
    """Return amounts * ratio, rounded up. ratio: hundredths, at least 100."""
    return -(-amounts * ratio // NO_RATIO)
