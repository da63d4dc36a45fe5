"""Finds container starts and sandbox ends that no event reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor as Workers
from typing import Final

from koordlet.state import NodeState
from linux.cgroup_paths import Layout
from linux.host import Host

SWEEP_S: Final = 60.0
"""Between two sweeps. Chosen: lost events are rare, and a sweep costs one stat(2) for each sandbox
without containers. Twice the value doubles how long a lost end is unnoticed."""
_START_PATIENCE_S: Final = 30.0
"""After this time a created container counts as started. Chosen: runtimes start containers within
seconds. Twice the value doubles how long a container whose start was lost has no repaired
values."""


class Sweep:
    """Compares the state with the directories. Belongs to the event loop."""

    def __init__(
        self, *, state: NodeState, host: Host, workers: Workers, changed: Callable[[str], None]
    ) -> None:
        self._state = state
        self._host = host
        self._workers = workers
        self._changed = changed
        self._missing_once: set[str] = set()

    async def run(self, layout: Layout) -> None:
        """Count overdue containers as started; drop sandboxes whose directories are gone twice."""
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
