"""Makes the NRI supervisor from the configuration, and exposes its state and counts."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from koordlet.configuration.config import Config
from nri_plugin.handler import Handler
from nri_plugin.options import FailurePolicy, Launch, Options
from nri_plugin.statistics import Statistics
from nri_plugin.supervisor import Supervisor

_LOG = logging.getLogger("koordlet")

_READY_PATIENCE_S: Final = 3.0
"""How long the start waits for the runtime's first list before the daemon reports ready without it.
Chosen: many times the duration of a registration. Twice the value delays the start of a daemon
whose runtime is down."""


class NriLink:
    """statistics, supervisor: None until `start`, which is not called where NRI is off."""

    def __init__(self, config: Config, handler: Handler, *, launch: Launch | None) -> None:
        self._config = config
        self._handler = handler
        self._launch = launch
        self.statistics: Statistics | None = None
        self.supervisor: Supervisor | None = None

    def start(self, cgroup_version: int) -> Supervisor:
        """Return the supervisor; its `run` is the caller's to spawn."""
        config = self._config
        options = Options(
            run_dir=config.run_dir,
            socket=config.nri.socket,
            name=config.nri.plugin_name,
            index=config.nri.plugin_index,
            cgroup_version=cgroup_version,
            first_backoff_s=config.nri.backoff,
            failure_policy=self.failure_policy,
        )
        self.statistics = Statistics()
        self.supervisor = Supervisor(
            options, self._handler, statistics=self.statistics, launch=self._launch
        )
        return self.supervisor

    async def wait_synced(self) -> None:
        """Wait for the runtime's first list, at most `_READY_PATIENCE_S`."""
        if self.supervisor is None:
            return
        try:
            async with asyncio.timeout(_READY_PATIENCE_S):
                await self.supervisor.wait_synced()
        except TimeoutError:
            _LOG.warning(
                "ready without the runtime; koordlet goes on dialling it",
                extra={"problem": self.supervisor.status.problem},
            )

    @property
    def failure_policy(self) -> FailurePolicy:
        """The configured policy."""
        return FailurePolicy(self._config.nri.failure_policy or FailurePolicy.IGNORE)

    def stop(self) -> None:
        if self.supervisor is not None:
            self.supervisor.stop()

    @property
    def protects(self) -> bool:
        """Whether new containers get their values in replies over NRI."""
        return self.supervisor is not None and self.supervisor.status.protects

    @property
    def lists_taken(self) -> int:
        """How many lists of the runtime were taken so far."""
        return 0 if self.statistics is None else self.statistics.synchronizations

    @property
    def hooks_answered(self) -> int:
        """How many requests of the runtime were answered so far."""
        if self.statistics is None:
            return 0
        return sum(histogram.count for histogram in self.statistics.hook_latency.values())
