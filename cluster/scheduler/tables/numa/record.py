"""The annotations in which a pod's CPUs and NUMA nodes are recorded: written and read back.

koordlet reads `resource-status` and puts the pod on these CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from apis.annotations import NUMANodeResource, ResourceStatus, parse_resource_status
from apis.cpuset import NO_CPUS, CpuSet
from apis.keys import ANNOTATION_RESOURCE_STATUS, CPU, MEMORY
from apis.numa import resource_status_text
from apis.quantity import Notation, Quantity
from cluster.scheduler.tables.amounts import Amounts, amounts_of

NumaAmounts = tuple[tuple[int, Amounts], ...]

_BYTES: Final = (MEMORY, "ephemeral-storage")


def resource_status(cpus: CpuSet, numa: NumaAmounts) -> str:
    """Return the annotation `resource-status` for an allocation."""
    return resource_status_text(
        ResourceStatus(
            cpus=cpus,
            numa_node_resources=tuple(
                NUMANodeResource(
                    node=node, resources={n: _quantity(n, a) for n, a in amounts.items()}
                )
                for node, amounts in numa
            ),
        )
    )


def recorded_allocation(annotations: Mapping[str, str], *, obj: str) -> tuple[CpuSet, NumaAmounts]:
    """Return (CPUs, amounts by NUMA id) that the annotations record. Raises InputError.

    Entries of one NUMA node are added up; negative amounts count as 0.
    """
    text = annotations.get(ANNOTATION_RESOURCE_STATUS)
    if not text:
        return NO_CPUS, ()
    status = parse_resource_status(text, obj=obj)
    by_node: dict[int, dict[str, int]] = {}
    for entry in status.numa_node_resources:
        into = by_node.setdefault(entry.node, {})
        for name, amount in amounts_of(entry.resources).items():
            into[name] = into.get(name, 0) + max(0, amount)
    return status.cpus, tuple(sorted(by_node.items()))


def _quantity(name: str, amount: int) -> Quantity:
    if name == CPU:
        return Quantity.of_milli(amount)
    in_bytes = name in _BYTES or name.startswith("hugepages-") or name.endswith("memory")
    return Quantity.of(amount, Notation.BINARY_SI if in_bytes else Notation.DECIMAL_SI)
