"""Which GPUs of a node may be given together: its partitions.

GPUs that are linked with each other, but not with all others, are useful to one pod only in certain
groups. A Device names these groups in an annotation; three models have a built-in table.
docs/facts/scheduler.md, "GPU partitions".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import Meta

from apis.annotations import annotation_field
from apis.decode import Embedded, decode_text, field_decoder, remembered
from apis.errors import InputError
from apis.keys import ANNOTATION_GPU_PARTITIONS, GPU_MEMORY
from apis.quantity import ZERO, Quantity
from cluster.scheduler.tables.amounts import amount_of

HONOR: Final = "Honor"
"""Value of the label gpu-partition-policy with which nothing but a partition is allocated."""

_MOST_PARTITIONS: Final = 1024
"""Of all sizes of a node; chosen: 16 GPUs have 120 pairs, and each partition is looked at."""


@dataclass(frozen=True, slots=True)
class Partition:
    """GPUs that may be given together, by ascending minor. bandwidth: of their ring bus, bytes/s.

    score: a higher one is preferred.
    """

    minors: tuple[int, ...]
    score: int = 1
    bandwidth: int = 0
    bits: int = field(init=False, repr=False)
    """The set of minors as a number: bit n stands for minor n."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", sum(1 << minor for minor in self.minors))


PartitionTable = Mapping[int, tuple[tuple[Partition, ...], ...]]
"""Number of GPUs -> groups of equal score, the highest score first."""


LARGEST_MINOR: Final = 63
"""Of a GPU in a partition: a set of GPUs is one 64-bit number. Machines of today have 8 or 16."""


class _Partition(Embedded, frozen=True):
    minors: tuple[Annotated[int, Meta(ge=0, le=LARGEST_MINOR)], ...] = ()
    gpu_link_type: Annotated[str, Meta(max_length=64)] = ""
    ring_bus_bandwidth: Quantity = ZERO
    allocation_score: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0


_partitions = field_decoder(dict[str, tuple[_Partition, ...]])


_FIELD: Final = annotation_field(ANNOTATION_GPU_PARTITIONS)


def parse_partitions(text: str, *, obj: str) -> PartitionTable:
    """Return the partitions of a Device's annotation. Raises InputError that names `obj`.

    Nodes with equal annotations share one table.
    """
    return _parse(text, obj)


def _table(read: dict[str, tuple[_Partition, ...]]) -> PartitionTable:
    count = sum(len(partitions) for partitions in read.values())
    if count > _MOST_PARTITIONS:
        raise _refused("", count, f"more than {_MOST_PARTITIONS} partitions")
    table: dict[int, list[Partition]] = {}
    for key, partitions in read.items():
        if not (key.isascii() and key.isdigit() and len(key) < 3 and int(key) > 0):
            raise _refused("", key, "expected a number of GPUs as the key")
        for index, one in enumerate(partitions):
            minors = tuple(sorted(set(one.minors)))
            if len(minors) != int(key) or len(one.minors) != int(key):
                raise _refused(
                    f".{key}[{index}].minors", list(one.minors), f"expected {key} different minors"
                )
            table.setdefault(int(key), []).append(
                Partition(
                    minors=minors,
                    score=one.allocation_score,
                    bandwidth=amount_of(GPU_MEMORY, one.ring_bus_bandwidth),
                )
            )
    return partition_table(table)


def _refused(member: str, value: object, problem: str) -> InputError:
    return InputError(obj="", field=f"{_FIELD}{member}", value=value, problem=problem)


_parse = remembered(lambda text: decode_text(_partitions, text, field=_FIELD), _table, field=_FIELD)


def partition_table(partitions: Mapping[int, list[Partition]]) -> PartitionTable:
    """Return partitions grouped by score, the highest first; in a group by minors."""
    table = {}
    for size, of_size in partitions.items():
        groups: dict[int, list[Partition]] = {}
        for partition in of_size:
            groups.setdefault(partition.score, []).append(partition)
        table[size] = tuple(
            tuple(sorted(groups[score], key=lambda partition: partition.minors))
            for score in sorted(groups, reverse=True)
        )
    return MappingProxyType(table)


_EIGHT_LINKED: Final = partition_table(
    {
        size: [Partition(tuple(range(first, first + size))) for first in range(0, 8, size)]
        for size in (1, 2, 4, 8)
    }
)
_EIGHT_LINKED_MODELS: Final = frozenset({"H100", "H100-80GB-HBM3", "H800", "H20"})
"""Upstream's list, and the name that NVIDIA's driver gives the H100 with NVLink, which koordlet
reports. The H100 for PCIe slots has other names, and no such links."""
_NVIDIA: Final = ("", "nvidia")


def built_in_partitions(vendor: str, model: str) -> PartitionTable | None:
    """Return the partitions of a model by the node's labels: of 8 GPUs halves, quarters, ones."""
    if vendor in _NVIDIA and model in _EIGHT_LINKED_MODELS:
        return _EIGHT_LINKED
    return None


@dataclass(frozen=True, slots=True)
class PartitionRules:
    """The partitions of a node, None without any.

    mandatory: nothing else is allocated, whatever the pod says.
    """

    table: PartitionTable | None = None
    mandatory: bool = False


NO_PARTITIONS: Final = PartitionRules()


def partition_rules(
    own: PartitionTable | None,
    own_policy: str,
    *,
    unreadable: bool,
    vendor: str,
    model: str,
    node_policy: str,
) -> PartitionRules:
    """Return the rules of a node.

    own, own_policy: of its Device. unreadable: the Device has a table that cannot be used; where
    its label demands partitions, no GPU is given without one then. vendor, model, node_policy:
    labels of the Node.
    """
    if own is not None or unreadable:
        return PartitionRules(own, own_policy == HONOR)
    built_in = built_in_partitions(vendor, model)
    return PartitionRules(built_in, built_in is not None and node_policy == HONOR)
