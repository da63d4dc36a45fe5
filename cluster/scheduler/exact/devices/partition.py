"""GPUs as one partition: which one leaves the most for those who come later.

Source: docs/facts/scheduler.md, "GPU partitions". Groups are visited from the highest score down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cluster.scheduler.tables.devices.partitions import Partition, PartitionTable
from cluster.scheduler.tables.devices.request import PartitionRequest

_WEIGHTS: Final = ((8, 10_000), (4, 100), (2, 1))
"""A free partition of 8 GPUs counts more than all of 4, and one of 4 more than all of 2."""

_ANY: Final = PartitionRequest()


def choose_partition(
    table: PartitionTable,
    count: int,
    available: int,
    request: PartitionRequest | None,
    allowed: Callable[[tuple[int, ...]], bool] = lambda minors: True,
) -> tuple[int, ...] | None:
    """Return the minors of the best partition of `count` GPUs, or None.

    available: bit n is set if the GPU with minor n can be given and no pod has a part of it.
    allowed: further condition on the minors.
    """
    wanted = request or _ANY
    groups = table.get(count, ())
    for group in groups[:1] if wanted.restricted else groups:
        feasible = [
            partition
            for partition in group
            if partition.bits & ~available == 0
            and partition.bandwidth >= wanted.bandwidth
            and allowed(partition.minors)
        ]
        if feasible:
            best = max(
                feasible,
                key=lambda one: (
                    what_stays(table, available & ~one.bits, count),
                    tuple(-minor for minor in one.minors),
                ),
            )
            return best.minors
    return None


def what_stays(table: PartitionTable, available: int, count: int) -> int:
    """Return the weighted number of partitions of at least `count` GPUs that stay free.

    Each counts with weight * score. Only the group with the highest score counts.
    """
    return sum(
        weight * partition.score
        for size, weight in _WEIGHTS
        if size >= count
        for partition in _first_group(table, size)
        if partition.bits & ~available == 0
    )


def _first_group(table: PartitionTable, size: int) -> tuple[Partition, ...]:
    groups = table.get(size, ())
    return groups[0] if groups else ()
