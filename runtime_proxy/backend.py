"""What the process needs of a backend mode: CRI runtimes and dockerd are two of them."""

import asyncio
from typing import Protocol

from runtime_proxy.status import Gauge


class Backend(Protocol):
    @property
    def gauges(self) -> tuple[Gauge, ...]: ...

    async def start(self) -> None:
        """Begin with what goes on in the background; nothing here waits for the runtime."""

    def new_connection(self) -> asyncio.Protocol:
        """The protocol of one accepted client."""

    def health(self) -> list[str]:
        """What is wrong with the proxy itself; empty if nothing is."""

    def readiness(self) -> list[str]:
        """What keeps calls from reaching the runtime; empty if nothing does."""

    def stand_back(self) -> None:
        """A successor serves: leave to it all that is not about calls under way here."""

    async def drain(self, limit_s: float) -> int:
        """Let running calls end for at most `limit_s`; how many were cut off then."""

    async def close(self) -> None:
        """Release everything."""
