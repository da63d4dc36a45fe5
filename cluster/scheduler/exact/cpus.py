"""Which CPUs of one node a pod gets.

Sets of CPUs are masks: bit n stands for CPU n. The search goes from the narrowest place to the
widest: one NUMA node, one socket, the whole machine. Whole physical cores are preferred or avoided
as the pod's bind policy says. docs/scheduler.md, "NodeNUMAResource", describes it with examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

from apis.numa import CPUExclusivePolicy
from apis.numa import NUMAAllocateStrategy as Strategy
from cluster.scheduler.exact.even import split_evenly
from cluster.scheduler.exact.unfit import Unfit
from cluster.scheduler.exact.whole_cores import some_whole_cores, whole_sum
from cluster.scheduler.tables.numa.cpu_topology import (
    Core,
    CpuTopology,
    cores_of,
    one_of_each_core,
    whole_cores,
)
from cluster.scheduler.tables.numa.demand import FULL, CpuDemand

NOT_ENOUGH: Final = "not enough cpus available to satisfy request"

_NO_LIMITS: Final[Mapping[int, int]] = MappingProxyType({})


def usable_cpus(topology: CpuTopology, free: int, demand: CpuDemand, preferred: int = 0) -> int:
    """Return the CPUs of `free` that the pod's policy can use, if it is required."""
    if not demand.required:
        return free
    if demand.policy is FULL:
        return whole_cores(topology, free)
    return one_of_each_core(topology, free, preferred)


def allocate_cpus(
    topology: CpuTopology,
    free: int,
    demand: CpuDemand,
    *,
    strategy: Strategy,
    held: int = 0,
    preferred: int = 0,
    shares: Mapping[int, int] | None = None,
    limits: Mapping[int, int] = _NO_LIMITS,
) -> int | Unfit:
    """Return the mask of the CPUs that the pod gets, a subset of `free` of demand.count CPUs.

    strategy: which NUMA nodes and sockets are used first: MOST_ALLOCATED those with the fewest free
    CPUs, LEAST_ALLOCATED and UNSET those with the most. DISTRIBUTE_EVENLY is LEAST_ALLOCATED,
    except that a pod that does not fit into one NUMA node is divided evenly over the fewest that
    it fits into.
    free: CPUs that may be allocated. held: CPUs of other pods with the demand's exclusive policy.
    preferred: CPUs that are taken first (those of a reservation).
    shares: NUMA id -> count of CPUs to take there; the counts add up to demand.count. Where these
    cannot be whole cores, and the policy requires some, other counts are taken, near to them.
    limits: NUMA id -> most CPUs to take there; no limit for others.
    """
    usable = usable_cpus(topology, free, demand, preferred)
    search = _Search(topology, demand, strategy, held)
    taken = 0
    if shares is None:
        within = search.within(usable, preferred, limits)
        if within.bit_count() < demand.count:
            return Unfit(NOT_ENOUGH)
        taken = search.take_preferred(within, preferred, demand.count)
    else:
        for numa, count in shares.items():
            there = usable & topology.numa.get(numa, 0)
            taken |= search.take_preferred(there, preferred, min(count, there.bit_count()))
    if _satisfies(topology, taken, demand, limits):
        return taken
    if demand.required and demand.policy is FULL:
        whole = some_whole_cores(
            topology,
            usable,
            demand.count,
            strategy,
            preferred=preferred,
            shares=shares,
            limits=limits,
        )
        if whole is not None:
            return whole
    if taken.bit_count() < demand.count:
        return Unfit(NOT_ENOUGH)
    return Unfit(f"insufficient CPUs to satisfy required cpu bind policy {demand.policy}")


def _satisfies(
    topology: CpuTopology, taken: int, demand: CpuDemand, limits: Mapping[int, int]
) -> bool:
    if taken.bit_count() != demand.count:
        return False
    if any((taken & topology.numa.get(n, 0)).bit_count() > most for n, most in limits.items()):
        return False
    if not demand.required:
        return True
    if demand.policy is FULL:
        return whole_cores(topology, taken) == taken
    return one_of_each_core(topology, taken) == taken


class _Search(NamedTuple):
    """What stays the same while the CPUs of one pod are chosen."""

    topology: CpuTopology
    demand: CpuDemand
    strategy: Strategy
    held: int

    def take_preferred(self, usable: int, preferred: int, count: int) -> int:
        """Return `count` CPUs of `usable`, as many as possible of `preferred`."""
        first = usable & preferred
        taken = self.take(first, min(count, first.bit_count()))
        return taken | self.take(usable & ~first, count - taken.bit_count())

    def take(self, free: int, count: int) -> int:
        """Return `count` CPUs of `free`, which has as many."""
        if count < 1:
            return 0
        if self.strategy is Strategy.DISTRIBUTE_EVENLY:
            divided = self._divide(free, count)
            if divided is not None:
                return divided
        taken = 0
        if self.demand.policy is FULL or self.topology.widest_core == 1:
            taken = self._take_cores(free, count)
        if self.demand.policy is not FULL and not taken:
            taken = self._take_threads(free, count)
        return self._take_rest(free, taken, count)

    def within(self, usable: int, preferred: int, limits: Mapping[int, int]) -> int:
        """Return `usable` without the CPUs beyond the limits: those that would be taken last."""
        whole = self.demand.required and self.demand.policy is FULL
        if whole and self.topology.core_step != self.topology.widest_core:
            # The CPUs of a limit may be no whole cores; `some_whole_cores` looks at the limits.
            return usable
        step = self.topology.core_step if whole else 1
        for numa, most in limits.items():
            there = usable & self.topology.numa.get(numa, 0)
            if there.bit_count() > most:
                first = whole_cores(self.topology, preferred) if whole else preferred
                usable ^= there ^ self.take_preferred(there, first, most // step * step)
        return usable

    # --- orders and marks ------------------------------------------------------------------------

    def _directed(self, free_count: int) -> int:
        """Return a key that sorts by count of free CPUs as the strategy does."""
        return free_count if self.strategy is Strategy.MOST_ALLOCATED else -free_count

    def _around(self, numa: int, free: int) -> int:
        """Return the count of free CPUs of the sockets that a NUMA node lies on."""
        cpus = self.topology.numa[numa]
        sockets = (mask for mask in self.topology.sockets.values() if mask & cpus)
        return sum((mask & free).bit_count() for mask in sockets)

    def _marks(self) -> tuple[int, ...]:
        """Return the CPUs to leave out in each attempt, 0 in the last: policies are wishes.

        They are those of cores, or first of NUMA nodes, that another pod wants for itself.
        """
        cores = cores_of(self.topology, self.held)
        match self.demand.exclusive:
            case CPUExclusivePolicy.PCPU_LEVEL:
                return cores, 0
            case CPUExclusivePolicy.NUMA_NODE_LEVEL if self.held:
                return self._marked_numa(), cores, 0
        return 0, 0

    def _marked_numa(self) -> int:
        if self.demand.exclusive is not CPUExclusivePolicy.NUMA_NODE_LEVEL:
            return 0
        marked = [mask for mask in self.topology.numa.values() if mask & self.held]
        return sum(marked)  # NUMA nodes share no CPU

    # --- whole cores -----------------------------------------------------------------------------

    def _take_cores(self, free: int, count: int) -> int:
        """Return CPUs of whole free cores: all from one NUMA node or socket if one has enough.

        May return fewer than `count`.
        """
        mask = whole_cores(self.topology, free)
        if not mask:
            return 0
        for marked in (self._marked_numa(), 0):
            candidates = [
                (self._directed(size), self._directed(self._around(numa, free)), numa)
                for numa, cpus in self.topology.numa.items()
                if (size := (cpus & mask).bit_count()) >= count and not cpus & marked
            ]
            if candidates:
                return _first_of(
                    self._cores_in(mask & self.topology.numa[min(candidates)[2]]), count
                )
        on_socket = {
            socket: self._cores_in(mask & cpus)
            for socket, cpus in self.topology.sockets.items()
            if mask & cpus
        }
        size_of = {
            socket: (mask & self.topology.sockets[socket]).bit_count() for socket in on_socket
        }
        enough = [(self._directed(n), socket) for socket, n in size_of.items() if n >= count]
        if enough:
            return _first_of(on_socket[min(enough)[1]], count)
        taken = 0
        partly: list[tuple[int, int]] = []
        for negative, socket in sorted((-n, socket) for socket, n in size_of.items()):
            if -negative <= count - taken.bit_count():
                taken |= sum(core.mask for core in on_socket[socket])
            else:
                partly.append((-negative, socket))
        for _, socket in sorted(partly):
            for core in on_socket[socket]:
                if core.mask.bit_count() <= count - taken.bit_count():
                    taken |= core.mask
        return taken

    def _cores_in(self, cpus: int) -> list[Core]:
        """Return the cores whose CPUs are in `cpus`, the widest first, then by number."""
        cores = [core for core in self.topology.cores if core.mask & cpus]
        if self.topology.core_step != self.topology.widest_core:
            cores.sort(key=lambda core: -core.mask.bit_count())
        return cores

    # --- threads ---------------------------------------------------------------------------------

    def _take_threads(self, free: int, count: int) -> int:
        """Return CPUs of one NUMA node or one socket, spread over cores; 0 if none has enough.

        While exclusive wishes count, each core gives one CPU only.
        """
        numa, sockets = self.topology.numa, self.topology.sockets
        marks = self._marks()
        for attempt, marked in enumerate(marks, 1):
            spare = attempt < len(marks)
            candidates = [
                (self._directed(size), self._directed(self._around(node, free)), node, there)
                for node, cpus in numa.items()
                if (size := (there := cpus & free & ~marked).bit_count()) >= count
            ]
            for *_, there in sorted(candidates):
                if self._capacity(there, spare=spare) >= count:
                    return self._interleaved(self._threads(there), count)
        # A socket of several NUMA nodes is not left out as a whole, but marked cores are.
        for attempt, marked in enumerate(marks[-2:], 1):
            spare = attempt == 1
            on_sockets = [
                (self._directed(size), socket, there)
                for socket, cpus in sockets.items()
                if (size := (there := cpus & free & ~marked).bit_count()) >= count
            ]
            for *_, there in sorted(on_sockets):
                if self._capacity(there, spare=spare) >= count:
                    return self._interleaved(self._threads(there), count)
        return 0

    def _capacity(self, cpus: int, *, spare: bool) -> int:
        return (one_of_each_core(self.topology, cpus) if spare else cpus).bit_count()

    def _threads(self, cpus: int) -> list[int]:
        """Return the masks of `cpus` by core, the core with the lowest CPU first."""
        masks = [there for core in self.topology.cores if (there := core.mask & cpus)]
        masks.sort(key=lambda mask: mask & -mask)
        return masks

    @staticmethod
    def _interleaved(masks: Sequence[int], count: int) -> int:
        """Return the first CPU of each core, then the second of each, up to `count` CPUs."""
        taken = 0
        left = list(masks)
        while left and count:
            remaining: list[int] = []
            for mask in left:
                if not count:
                    break
                lowest = mask & -mask
                taken |= lowest
                count -= 1
                if mask & ~lowest:
                    remaining.append(mask & ~lowest)
            left = remaining
        return taken

    # --- what is left ----------------------------------------------------------------------------

    def _take_rest(self, free: int, taken: int, count: int) -> int:
        """Return `taken` and as many further CPUs as make `count`, near those that are taken."""
        for marked in self._marks():
            missing = count - taken.bit_count()
            if not missing:
                break
            left = free & ~taken
            in_socket = {s: (mask & left).bit_count() for s, mask in self.topology.sockets.items()}
            mine = {s: (mask & taken).bit_count() for s, mask in self.topology.sockets.items()}
            in_numa = {n: (mask & left).bit_count() for n, mask in self.topology.numa.items()}
            cores = [core for core in self.topology.cores if core.mask & left & ~marked]

            def order(
                core: Core,
                left: int = left,
                mine: Mapping[int, int] = mine,
                in_socket: Mapping[int, int] = in_socket,
                in_numa: Mapping[int, int] = in_numa,
            ) -> tuple[int, int, int, int, int]:
                return (
                    -mine[core.socket],
                    self._directed(in_socket[core.socket]),
                    self._directed(in_numa[core.numa]),
                    (core.mask & left).bit_count(),
                    core.socket,
                )

            cores.sort(key=order)  # stable: equal ones stay ordered by number
            masks = [core.mask & left & ~marked for core in cores]
            taken |= self._interleaved(masks, missing)
        return taken

    # --- divided evenly --------------------------------------------------------------------------

    def _divide(self, free: int, count: int) -> int | None:
        """Return CPUs divided evenly over the fewest NUMA nodes; None if one node has enough."""
        topology = self.topology
        usable = whole_cores(topology, free) if self.demand.policy is FULL else free
        step = topology.core_step if self.demand.policy is FULL else 1
        if usable.bit_count() < count or count % step:
            usable, step = free, 1
        sizes = {numa: (mask & usable).bit_count() for numa, mask in topology.numa.items()}
        order = sorted(sizes, key=lambda numa: (-sizes[numa], numa))
        if sizes[order[0]] >= count:
            return None
        chosen: dict[int, int] = {}
        for numa in order:
            chosen[numa] = sizes[numa]
            if sum(chosen.values()) >= count:
                break
        taken = 0
        plain = self._replace(strategy=Strategy.LEAST_ALLOCATED)
        for numa, share in split_evenly(count, chosen, step=step).items():
            taken |= plain.take(usable & topology.numa[numa], share)
        return taken


def _first_of(cores: Sequence[Core], count: int) -> int:
    """Return `count` CPUs of cores that have as many: whole cores if some add up to it."""
    exact = whole_sum(cores, count)
    if exact is not None:
        return exact
    return sum(islice((cpu for core in cores for cpu in _single_bits(core.mask)), count))


def _single_bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest
