"""Evicts victims in the background, a few at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from cluster.scheduler.binding.placement import Refused, Why
from cluster.scheduler.binding.victims import Victim, evict_victim
from kube.client import Client
from kube.faults import Faults

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 8
"""Evictions in parallel. Chosen: half of the bindings' connections. An eviction is less urgent than
a binding, because the victim takes seconds to end."""


class Evictor:
    """Carries evictions out. on_outcome: called once for each victim, with None or a refusal."""

    def __init__(
        self,
        client: Client,
        on_outcome: Callable[[Victim, Refused | None], None],
        *,
        now: Callable[[], float],
    ) -> None:
        """now: the wall clock in seconds."""
        self._client = client
        self._on_outcome = on_outcome
        self._now = now
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self.faults = Faults("evictions")

    @property
    def in_flight(self) -> int:
        """How many victims have no outcome yet."""
        return len(self._tasks)

    def submit(self, victim: Victim, controller: str) -> None:
        """Evict a pod. controller: the scheduler's name, for the pod's condition."""
        task = asyncio.create_task(self._carry_out(victim, controller))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Give up what is under way; a later leader decides again about the pods concerned."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, victim: Victim, controller: str) -> None:
        try:
            async with self._gate:
                refused = await evict_victim(
                    self._client, victim, controller=controller, now=self._now
                )
        except Exception as error:  # noqa: BLE001 - a defect must not leave a victim for ever
            self.faults.note("evicting a pod", about=f"{victim.namespace}/{victim.name}")
            refused = Refused(Why.FAILING, f"{type(error).__name__}: {error}")
        if refused is not None:
            key = f"{victim.namespace}/{victim.name}"
            _log.warning("pod %s is not evicted: %s", key, refused.message)
        self._on_outcome(victim, refused)
