"""Whole physical cores that have a given count of CPUs together, where cores may differ in size.

A core has fewer threads than others where some are offline, or where a machine has cores of two
kinds. Counts alone do not say then whether whole cores add up to what a pod requests: here every
sum that is possible is known, so cores are found whenever there are some. Sets of CPUs are masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from apis.numa import NUMAAllocateStrategy as Strategy
from cluster.scheduler.tables.numa.cpu_topology import Core, CpuTopology

Sums = int
"""Bit n: some of the cores have n CPUs together."""


def some_whole_cores(
    topology: CpuTopology,
    usable: int,
    count: int,
    strategy: Strategy,
    *,
    preferred: int,
    shares: Mapping[int, int] | None,
    limits: Mapping[int, int],
) -> int | None:
    """Return whole cores of `usable` with `count` CPUs together, or None if there are none.

    All in one NUMA node if one has some; else as many as possible of the NUMA node with the most
    CPUs, and so on. shares: NUMA id -> the count to come near to, in these NUMA nodes alone.
    usable: whole cores. preferred: CPUs whose cores are taken first. limits: NUMA id -> most CPUs.
    """
    cores: dict[int, list[Core]] = {}
    for core in topology.cores:
        if core.mask & usable and (shares is None or core.numa in shares):
            cores.setdefault(core.numa, []).append(core)
    sums = {
        numa: sums_of(there, min(count, limits.get(numa, count))) for numa, there in cores.items()
    }
    if shares is None:
        direction = 1 if strategy is Strategy.MOST_ALLOCATED else -1
        sizes = {n: sum(core.mask.bit_count() for core in there) for n, there in cores.items()}
        alone = [(direction * sizes[n], n) for n, possible in sums.items() if possible >> count & 1]
        if alone:
            numa = min(alone)[1]
            return _taken(cores[numa], preferred, count)
        order = sorted(cores, key=lambda n: (-sizes[n], n))
    else:
        order = sorted(cores, key=lambda n: (shares[n], n))
    rest: list[Sums] = [1]
    for numa in reversed(order):
        rest.append(_added(sums[numa], rest[-1]))
    rest.reverse()
    if not rest[0] >> count & 1:
        return None
    taken, left = 0, count
    for position, numa in enumerate(order):
        wanted = left if shares is None else shares[numa]
        after = rest[position + 1]
        possible = [n for n in _bits(sums[numa]) if n <= left and after >> (left - n) & 1]
        chosen = min(possible, key=lambda n: (abs(n - wanted), -n))
        taken |= _taken(cores[numa], preferred, chosen)
        left -= chosen
    return taken


def sums_of(cores: Sequence[Core], most: int) -> Sums:
    """Return the sums up to `most` that some of the cores have."""
    sums = 1
    for core in cores:
        sums |= sums << core.mask.bit_count()
    return sums & (1 << most + 1) - 1


def _added(some: Sums, others: Sums) -> Sums:
    """Return the sums of one of each."""
    total = 0
    for number in _bits(some):
        total |= others << number
    return total


def _taken(cores: Sequence[Core], preferred: int, count: int) -> int:
    """Return cores that have `count` CPUs together, which exist: as many preferred as possible."""
    first = [core for core in cores if core.mask & preferred]
    others = [core for core in cores if not core.mask & preferred]
    reached = sums_of(others, count)
    number = max(n for n in _bits(sums_of(first, count)) if reached >> (count - n) & 1)
    of_first, of_others = whole_sum(first, number), whole_sum(others, count - number)
    assert of_first is not None and of_others is not None
    return of_first | of_others


def whole_sum(cores: Sequence[Core], count: int) -> int | None:
    """Return the CPUs of cores that have `count` together, the first ones of each size."""
    by_size: dict[int, list[Core]] = {}
    for core in cores:
        by_size.setdefault(core.mask.bit_count(), []).append(core)
    sizes = sorted(by_size, reverse=True)
    # Bit n of sums[i]: some cores of the sizes from the i-th on have n CPUs together.
    sums = [1]
    for size in reversed(sizes):
        reached = sums[-1]
        for _ in range(min(len(by_size[size]), count // size)):
            reached |= reached << size
        sums.append(reached)
    sums.reverse()
    if not sums[0] >> count & 1:
        return None
    taken, left = 0, count
    for position, size in enumerate(sizes):
        number = min(left // size, len(by_size[size]))
        while not sums[position + 1] >> (left - number * size) & 1:
            number -= 1
        taken |= sum(core.mask for core in by_size[size][:number])
        left -= number * size
    return taken


def _bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
