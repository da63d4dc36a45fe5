"""Watches the directory of site policies, and puts the loaded ones into the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor as Workers
from typing import Any

from koordlet.configuration.config import Config
from koordlet.decisions.decider import Decider
from koordlet.decisions.rules import Rules
from koordlet.decisions.site_policies import Site
from service.directory_watch import DirectoryWatch
from service.events import Events, Severity


class SiteWatch:
    """Belongs to the event loop; files are read and run in worker threads."""

    def __init__(
        self,
        site: Site,
        config: Config,
        *,
        rules: Rules,
        deciders: Sequence[Decider],
        events: Events,
        workers: Workers,
    ) -> None:
        """deciders: receive the names of the policies in force."""
        self._site = site
        self._config = config
        self._rules = rules
        self._deciders = deciders
        self._events = events
        self._workers = workers
        self._loading = asyncio.Lock()
        self._watch: DirectoryWatch | None = None

    async def load(self) -> None:
        """Load changed policies; a policy that cannot be loaded is left out, with an event."""
        loop = asyncio.get_running_loop()
        async with self._loading:
            policies, problems = await loop.run_in_executor(self._workers, self._site.loader.load)
        for origin, problem in problems:
            self._events.add("bad-policy", origin, problem, severity=Severity.ERROR)
        if policies == self._rules.site_policies:
            return
        self._site.hook_guard.forget()
        self._site.repair_guard.forget()
        names = frozenset(policy.name for policy in policies)
        for decider in self._deciders:
            decider.site_names = names
        self._rules.change_site_policies(policies)

    def start(self, spawn: Callable[[str, Coroutine[Any, Any, None]], None]) -> None:
        """Load again at each change of the directory. spawn: runs a task."""
        self._watch = DirectoryWatch(
            self._config.site_policies.directory,
            lambda: spawn("site-policies", self.load()),
            poll=self._config.intervals.objects,
        )

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
