"""CPU and memory in the resource formulas: integers, so that arithmetic is exact."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from apis.keys import CPU, MEMORY
from apis.quantity import Quantity


@dataclass(frozen=True, slots=True)
class Amount:
    """CPU in milli-cores and memory in bytes."""

    cpu: int = 0
    memory: int = 0

    @classmethod
    def of(cls, resources: Mapping[str, Quantity]) -> Self:
        cpu, memory = resources.get(CPU), resources.get(MEMORY)
        return cls(cpu.milli_value() if cpu else 0, memory.value() if memory else 0)

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.cpu + other.cpu, self.memory + other.memory)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.cpu - other.cpu, self.memory - other.memory)

    def largest(self, other: Amount) -> Amount:
        """Return the larger value of each resource."""
        return Amount(max(self.cpu, other.cpu), max(self.memory, other.memory))

    def smallest(self, other: Amount) -> Amount:
        """Return the smaller value of each resource."""
        return Amount(min(self.cpu, other.cpu), min(self.memory, other.memory))

    def at_least_zero(self) -> Amount:
        return self.largest(NOTHING)

    def percent(self, cpu_percent: int, memory_percent: int) -> Amount:
        """Return a percentage of each resource, truncated towards zero."""
        return Amount(
            truncate(self.cpu * cpu_percent, 100), truncate(self.memory * memory_percent, 100)
        )

    def split(self, parts: int) -> Amount:
        """Return one of `parts` equal parts, rounded up."""
        return Amount(-(-self.cpu // parts), -(-self.memory // parts))


NOTHING: Final = Amount()


def truncate(dividend: int, divisor: int) -> int:
    """Return the quotient, truncated towards zero."""
    quotient = abs(dividend) // divisor
    return quotient if dividend >= 0 else -quotient


def total(amounts: Iterable[Amount]) -> Amount:
    """Return the sum."""
    cpu = memory = 0
    for amount in amounts:
        cpu += amount.cpu
        memory += amount.memory
    return Amount(cpu, memory)
