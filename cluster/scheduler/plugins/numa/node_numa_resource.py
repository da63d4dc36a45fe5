"""NodeNUMAResource: CPUs of a pod's own, and alignment to NUMA nodes.

A node passes if it has enough free CPUs of the kind that the bind policy needs, and a set of NUMA
nodes that the NUMA policy accepts. Counts of free CPUs by NUMA node decide that for all nodes at
once; which CPUs and which NUMA nodes is worked out for the chosen node (`exact`). Where all cores
of a machine have equally many threads the counts are exact. docs/scheduler.md, "NodeNUMAResource".
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import numpy as np
from msgspec.structs import replace as struct_replace
from numpy.typing import NDArray

from apis.cpuset import CpuSet
from apis.keys import ANNOTATION_RESOURCE_SPEC, ANNOTATION_RESOURCE_STATUS, CPU
from apis.numa import CPUBindPolicy, NUMAAllocateStrategy, resource_spec_text
from cluster.scheduler.exact.numa import Hints, Placement, allocate
from cluster.scheduler.exact.unfit import Unfit
from cluster.scheduler.plugins.contract import (
    Mask,
    OfRowAlone,
    Reason,
    Recorded,
    Refusal,
    Restored,
    ScoredAsIs,
    Scores,
    only,
    zeros,
)
from cluster.scheduler.plugins.numa.asked import (
    DEFAULT_SETTINGS,
    UNBOUND,
    Asked,
    Settings,
    amplified,
    asked_of,
    at_positions,
    demand_of,
    names_of,
    numbers_of,
    own_policy,
    with_bound_cpus,
)
from cluster.scheduler.plugins.numa.reasons import (
    AMPLIFIED,
    CPUS,
    FIRST_RESOURCE,
    MOST_RESOURCES,
    NO_ROOM,
    NO_ZONES,
    NOT_ALIGNED,
    NOT_INTEGER,
    REASONS,
    ROOM_BITS,
    bit,
)
from cluster.scheduler.plugins.numa.room import (
    anything_needed,
    groups,
    lacks_in_total,
    needs,
    usable_counts,
)
from cluster.scheduler.plugins.numa.score import node_score, node_scores
from cluster.scheduler.tables.amounts import CPU_COLUMN
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.numa.demand import pod_specs
from cluster.scheduler.tables.numa.facts import NO_RATIO, NumaFacts, amplify
from cluster.scheduler.tables.numa.record import resource_status
from cluster.scheduler.tables.numa.state import NumaState, narrowed
from cluster.scheduler.tables.numa.table import WHOLE_NODE, NumaTable
from cluster.scheduler.tables.scheduling_hint import has_hint, hint_of
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

__all__ = ["NAME", "HintProvider", "NodeNUMAResource", "Settings"]

NAME: Final = "NodeNUMAResource"


class HintProvider(Protocol):
    """Another plugin whose allocations lie on NUMA nodes."""

    def hints(
        self,
        pod: PodShape,
        tables: Tables,
        row: int,
        sets: Iterable[int],
        *,
        reservation: str = "",
        without: frozenset[str] = frozenset(),
    ) -> Hints | None:
        """Return which of these sets of NUMA nodes the pod could use; None without an opinion.

        reservation: UID of the one that the pod uses. without: UIDs of those that count as free.
        """
        ...


@dataclass(frozen=True, slots=True)
class NodeNUMAResource(ScoredAsIs, OfRowAlone):
    """Admission, Filter, Score and Allocator.

    others: aligned together with CPUs and memory. restored: reserved room counts for a pod that may
    use it.
    """

    table: NumaTable
    settings: Settings = DEFAULT_SETTINGS
    others: tuple[HintProvider, ...] = ()
    restored: Restored | None = None
    name: str = NAME

    # --- pod -------------------------------------------------------------------------------------

    def check(self, pod: PodShape, tables: Tables) -> None:
        """Refuse a pod whose annotations cannot be used, or that is to be bound to part of a CPU.

        Raises Refusal.
        """
        specs = pod.derived(pod_specs)
        if specs.error is not None:
            raise Refusal(NAME, str(specs.error))
        policy, _ = own_policy(self.settings, pod)
        if policy and pod.requests.get(CPU, 0) % 1000:
            raise Refusal(NAME, NOT_INTEGER)

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        """Return whether the pod is scored, or brings what is not its own. Raises Refusal."""
        self.check(pod, tables)
        return any(pod.requests.values()) or ANNOTATION_RESOURCE_STATUS in pod.annotations

    def _asks(self, pod: PodShape) -> bool:
        """Return whether a node could hold the pod back, or give it something.

        A pod without requests needs nothing of CPUs and NUMA nodes, whatever the policies are.
        """
        if not any(pod.requests.values()):
            return False
        policy, _ = own_policy(self.settings, pod)
        return bool(
            policy or pod.derived(pod_specs).numa.numa_topology_policy or self.table.any_policy
        )

    # --- filter ----------------------------------------------------------------------------------

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        """Return the fixed reasons, then one for each requested resource.

        Resources beyond the most that have a reason of their own share the last one's.
        """
        names = names_of(pod)[:MOST_RESOURCES]
        return REASONS + tuple(Reason(f"Insufficient NUMA {name}") for name in names)

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        numbers = numbers_of(tables, rows)
        if not self._asks(pod):
            return zeros(len(numbers))
        asked, mask = asked_of(self.table, self.settings, pod, numbers)
        mask |= self._amplified(pod, tables, asked)
        open_rows = mask == 0
        mask |= np.where(open_rows, self._cpus(asked), 0)
        with_policy = np.flatnonzero((mask == 0) & (asked.policy > 0))
        if len(with_policy):
            mask[with_policy] |= self._numa(pod, at_positions(asked, with_policy))
        self._allow_reserved(pod, tables, numbers, mask)
        return mask

    def filter_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        """Return the mask that `filter` gives one row."""
        return int(self.filter(pod, tables, only(row)).item()) if self._asks(pod) else 0

    def _amplified(self, pod: PodShape, tables: Tables, asked: Asked) -> Mask:
        milli = pod.requests.get(CPU, 0)
        ratio = self.table.cpu_ratio[asked.rows]
        if milli <= 0 or not (ratio > NO_RATIO).any():
            return zeros(len(asked.rows))
        allocatable = tables.nodes.allocatable[asked.rows, CPU_COLUMN]
        requested = tables.nodes.requested[asked.rows, CPU_COLUMN]
        request = np.where(asked.binding != UNBOUND, amplified(np.int64(milli), ratio), milli)
        short = request > allocatable - with_bound_cpus(self.table, requested, asked.rows)
        short &= ratio > NO_RATIO
        if self.restored is not None and short.any():
            rows = self.restored.rows(pod, tables)
            for position in np.flatnonzero(short & np.isin(asked.rows, rows)):
                row = int(asked.rows[position])
                sets = [frozenset({uid}) for uid in self.restored.on(pod, tables, row)]
                for uids in sets or [self.restored.ignored(pod, tables, row)]:
                    if int(request[position]) <= self._amplified_free(tables, row, uids):
                        short[position] = False
        return bit(short, AMPLIFIED)

    def _amplified_free(self, tables: Tables, row: int, uids: Set[str]) -> int:
        """Return the cpu that is free on a node with what these reservations have left."""
        reservations = tables.reservations
        slots = [slot for uid in uids if (slot := reservations.slot(uid)) is not None]
        left = int(reservations.remainder(np.array(slots, dtype=np.intp))[:, CPU_COLUMN].sum())
        taken = np.array([int(tables.nodes.requested[row, CPU_COLUMN]) - left])
        unused = sum(self.table.unused_cpus(row, uid) for uid in uids)
        rows = only(row)
        counted = int(with_bound_cpus(self.table, taken, rows, unused=unused)[0])
        return int(tables.nodes.allocatable[row, CPU_COLUMN]) - counted

    def _cpus(self, asked: Asked) -> Mask:
        usable = usable_counts(self.table, asked)[:, WHOLE_NODE]
        return bit((asked.binding != UNBOUND) & (usable < asked.cpus), CPUS)

    def _numa(self, pod: PodShape, asked: Asked) -> Mask:
        table = self.table
        found = needs(table, asked)
        mask = bit(table.slots[asked.rows] == 0, NO_ZONES)
        needed = anything_needed(asked, found)
        no_room = np.zeros(len(asked.rows), dtype=np.bool_)
        for group in groups(table, asked, found):
            room, admitted = group.room.any(axis=1), group.admitted.any(axis=1)
            refused = needed[group.at] & ~admitted & ~group.last_resort
            no_room[group.at] = refused & ~room
            mask[group.at] |= bit(refused & room, NOT_ALIGNED)
        names = names_of(pod)
        named = np.zeros(len(asked.rows), dtype=np.bool_)
        for one in found:
            lacking = no_room & lacks_in_total(table, asked, one)
            named |= lacking
            number = min(names.index(one.name), MOST_RESOURCES - 1)
            mask |= bit(lacking, FIRST_RESOURCE + number)
        return mask | bit(no_room & ~named, NO_ROOM)

    def _allow_reserved(
        self, pod: PodShape, tables: Tables, numbers: NDArray[np.intp], mask: Mask
    ) -> None:
        """Clear what only room that is reserved for the pod would change."""
        if self.restored is None or not mask.any():
            return
        rows = self.restored.rows(pod, tables)
        for position in np.flatnonzero((mask != 0) & np.isin(numbers, rows)):
            if mask[position] & ~ROOM_BITS:
                continue
            row = int(numbers[position])
            # A pod that ignores reservations uses none, and sees all of them as free.
            uids = self.restored.on(pod, tables, row) or ("",)
            if any(
                isinstance(self._placement(pod, tables, row, reservation=uid), Placement)
                for uid in uids
            ):
                mask[position] = 0

    # --- score -----------------------------------------------------------------------------------

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        return node_scores(self.table, self.settings, pod, tables, rows)

    def score_row(self, pod: PodShape, tables: Tables, row: int) -> int:
        """Return what `score` gives one row."""
        return node_score(self.table, self.settings, pod, tables, row)

    # --- allocation ------------------------------------------------------------------------------

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        """Add CPUs and amounts of NUMA nodes. A reservation of `allocation` may be used up."""
        if not self._asks(pod):
            return allocation
        if allocation.reservation and self._short_within(pod, tables, row, allocation.reservation):
            return REASONS[AMPLIFIED]
        placed = self._placement(pod, tables, row, reservation=allocation.reservation)
        if isinstance(placed, Unfit):
            return Reason(placed.reason)
        return replace(allocation, cpus=CpuSet.of_mask(placed.cpus), numa=placed.numa)

    def _short_within(self, pod: PodShape, tables: Tables, row: int, uid: str) -> bool:
        """Return whether amplified cpu is short on a node for a pod that uses a reservation."""
        facts = self.table.facts(row)
        if facts.cpu_ratio <= NO_RATIO:
            return False
        request = pod.requests.get(CPU, 0)
        if demand_of(self.settings, pod, facts).cpus is not None:
            request = amplify(request, facts.cpu_ratio)
        return request > self._amplified_free(tables, row, frozenset({uid}))

    def _placement(
        self, pod: PodShape, tables: Tables, row: int, *, reservation: str
    ) -> Placement | Unfit:
        if self.restored is None or not reservation:
            free = frozenset[str]()
            if self.restored is not None:
                free = self.restored.ignored(pod, tables, row)
            state = self.table.state(row, reservation=reservation, without=free)
            return self._placement_in(state, pod, tables, row, free=free)
        restricted = self.restored.restricted(tables, reservation)
        # What is reserved comes first, also where the pod may have what the node has beside it.
        first = self.table.reserved_state(
            row, reservation, restricted or self.table.reserved_names(row, reservation)
        )
        free = frozenset({reservation})
        placed = self._placement_in(first, pod, tables, row, reservation, free=free)
        if restricted or isinstance(placed, Placement):
            return placed
        state = self.table.state(row, reservation=reservation, without=free)
        return self._placement_in(state, pod, tables, row, reservation, free=free)

    def _placement_in(
        self,
        state: NumaState,
        pod: PodShape,
        tables: Tables,
        row: int,
        reservation: str = "",
        *,
        free: frozenset[str],
    ) -> Placement | Unfit:
        """Return what a pod gets of a node in a state. free: reservations that count as free."""
        facts = self.table.facts(row)
        demand = demand_of(self.settings, pod, facts)
        if (
            facts.strategy is NUMAAllocateStrategy.UNSET
            and self.settings.numa_scoring.most_allocated
        ):
            state = replace(state, strategy=NUMAAllocateStrategy.MOST_ALLOCATED)
        if self.settings.follows_hints and has_hint(pod):
            hint = pod.derived(hint_of)
            if hint.recorded:
                state = narrowed(state, hint.cpus.mask, hint.numa)
        others = [
            partial(one.hints, pod, tables, row, reservation=reservation, without=free)
            for one in self.others
        ]
        return allocate(state, demand, self.settings.numa_scoring, others=others)

    # --- record ----------------------------------------------------------------------------------

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        """Return `resource-status`, and for bound pods `resource-spec` as it was understood."""
        allocation = booking.allocation
        annotations: dict[str, str | None] = {}
        if allocation.cpus or allocation.numa:
            status = resource_status(allocation.cpus, allocation.numa)
            annotations[ANNOTATION_RESOURCE_STATUS] = status
        elif ANNOTATION_RESOURCE_STATUS in booking.shape.annotations:
            # Written by someone else; the node would put the pod on CPUs that others have.
            annotations[ANNOTATION_RESOURCE_STATUS] = None
        row = tables.nodes.row(booking.node)
        if allocation.cpus and row is not None:
            spec = self._understood(booking.shape, self.table.facts(row))
            if spec is not None:
                annotations[ANNOTATION_RESOURCE_SPEC] = spec
        return Recorded(annotations, {})

    def _understood(self, pod: PodShape, facts: NumaFacts) -> str | None:
        """Return `resource-spec` with the policy that took effect, None where it is there."""
        spec = pod.derived(pod_specs).cpus
        cpus = demand_of(self.settings, pod, facts).cpus
        if cpus is None:
            return None
        changed = spec
        if spec.required_cpu_bind_policy in (CPUBindPolicy.UNSET, CPUBindPolicy.DEFAULT):
            if cpus.required:
                changed = struct_replace(spec, required_cpu_bind_policy=cpus.policy)
            elif spec.preferred_cpu_bind_policy is not cpus.policy:
                changed = struct_replace(spec, preferred_cpu_bind_policy=cpus.policy)
        return resource_spec_text(changed) if changed != spec else None
