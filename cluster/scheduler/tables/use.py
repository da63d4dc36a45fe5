"""What pods take of a node, as values that can be added and taken back."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from apis.keys import CPU, MEMORY
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.shapes import PodShape


@dataclass(frozen=True, slots=True)
class Use:
    """What pods take of a node. cpu, memory: as `PodShape.scored`, for scores. pods: a count."""

    amounts: Amounts
    cpu: int = 0
    memory: int = 0
    pods: int = 0

    def __add__(self, other: Use) -> Use:
        return self._combined(other, 1)

    def __sub__(self, other: Use) -> Use:
        return self._combined(other, -1)

    def _combined(self, other: Use, sign: int) -> Use:
        amounts = dict(self.amounts)
        for name, amount in other.amounts.items():
            total = amounts.get(name, 0) + sign * amount
            if total:
                amounts[name] = total
            else:
                amounts.pop(name, None)
        return Use(
            amounts,
            self.cpu + sign * other.cpu,
            self.memory + sign * other.memory,
            self.pods + sign * other.pods,
        )

    def larger(self, other: Use) -> Use:
        """Return the larger amount of each resource."""
        return Use(
            {
                name: max(self.amounts.get(name, 0), other.amounts.get(name, 0))
                for name in self.amounts.keys() | other.amounts.keys()
            },
            max(self.cpu, other.cpu),
            max(self.memory, other.memory),
            max(self.pods, other.pods),
        )


NO_USE: Final = Use(MappingProxyType({}))


def use_of(shape: PodShape) -> Use:
    """Return what one pod of a shape takes."""
    return Use(shape.requests, shape.scored[CPU], shape.scored[MEMORY], 1)
