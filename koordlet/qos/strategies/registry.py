"""All strategies. Their order is the order of claims of equal rank: of two that set one value, the
first wins."""

from __future__ import annotations

from typing import Final

from koordlet.qos.strategies import (
    bandwidth,
    cpu_burst,
    cpu_evict,
    cpu_suppress,
    memory_evict,
    pressure,
)
from koordlet.qos.strategy import Strategy

STRATEGIES: Final[tuple[Strategy, ...]] = (
    cpu_suppress.STRATEGY,
    cpu_burst.STRATEGY,
    cpu_evict.STRATEGY,
    memory_evict.STRATEGY,
    pressure.STRATEGY,
    bandwidth.STRATEGY,
)
