"""What nobody tells: containers whose start was missed, sandboxes whose end was missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor as Workers
from typing import Final

from koordlet.state import NodeState
from linux.cgroup_paths import Layout
from linux.host import Host

SWEEP_S: Final = 60.0
_START_PATIENCE_S: Final = 30.0


class Sweep:
    """Looks at the state and at the directories. Belongs to the event loop."""

    def __init__(
        self, *, state: NodeState, host: Host, workers: Workers, changed: Callable[[str], None]
    ) -> None:
        self._state = state
        self._host = host
        self._workers = workers
        self._changed = changed
        self._missing_once: set[str] = set()

    async def run(self, layout: Layout) -> None:
        """Drop sandboxes whose directories are gone twice in a row."""
        if self._state.start_overdue(_START_PATIENCE_S):
            self._changed("start-container")
        candidates = self._state.stale_candidates()
        loop = asyncio.get_running_loop()
        missing = await loop.run_in_executor(self._workers, self._missing, layout, candidates)
        gone = missing & self._missing_once
        if gone:
            self._state.forget_sandboxes(gone)
            self._changed("sweep")
        self._missing_once = missing

    def _missing(self, layout: Layout, cgroups: Mapping[str, str]) -> set[str]:
        controller = next(iter(layout.mounts))
        return {
            id_
            for id_, cgroup in cgroups.items()
            if not self._host.is_dir(layout.directory(controller, cgroup))
        }
