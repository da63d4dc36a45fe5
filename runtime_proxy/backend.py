"""What the process needs of a backend mode, of which there are two: CRI runtimes and dockerd."""

import asyncio
from typing import Protocol

from runtime_proxy.status import Gauge


class Backend(Protocol):
    @property
    def gauges(self) -> tuple[Gauge, ...]: ...

    async def start(self) -> None:
        """Start the background work. Does not wait for the runtime."""

    def new_connection(self) -> asyncio.Protocol:
        """Return the protocol of one accepted client."""

    def health(self) -> list[str]:
        """Return what is wrong with the proxy itself; empty if nothing is."""

    def status(self) -> dict[str, object]:
        """Return the state of the proxy's parts, as JSON values."""

    def readiness(self) -> list[str]:
        """Return what keeps calls from reaching the runtime; empty if nothing does."""

    def stand_back(self) -> None:
        """Leave to a successor all that does not belong to a call under way here."""

    async def drain(self, limit_s: float) -> int:
        """Let running calls end, and return how many were cut off after `limit_s` seconds."""

    async def close(self) -> None:
        """Release everything."""
