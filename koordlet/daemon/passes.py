"""From changes of the state to passes: a snapshot is published, the reconciler works from it.

The event loop publishes, the reconciler's thread takes what was published last. Changes that come
together share a snapshot, and a pass. No pass runs while another daemon holds this node's pods.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from hooks.engine import Guard
from koordlet.configuration.config import Config
from koordlet.decisions.rules import Rules
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.slots import State as ValueState
from koordlet.executor.table import Limits
from koordlet.exposition.container_metrics import OF_PROCESSES, Standing
from koordlet.node.kubepods_lock import KubepodsLock
from koordlet.node.probe import pods_cpus
from koordlet.reconciler.reconciler import Reconciler
from koordlet.reconciler.reports import PassReport
from koordlet.state import NodeState
from koordlet.state.snapshot import Snapshot
from linux import resctrl_groups
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.local import LocalHost
from linux.resources import Resource
from service.locks import LockHeld

_LOG = logging.getLogger("koordlet")

_QUIET: Final = frozenset(
    {"create-container", "stop-container", "remove-container", "stop-sandbox"}
)
"""Changes of the state that give the reconciler nothing to do at once: a container that is being
created has no group yet, and one that ended has none any more."""

_PUBLISH_EVERY_S: Final = 0.02
"""A change is published at once; in a burst of changes they share a snapshot."""

_MOST_ENDED: Final = 16384


class Passes:
    """The reconciler and what it works from. Belongs to the event loop, but where it says so."""

    def __init__(
        self,
        config: Config,
        *,
        host: Host,
        state: NodeState,
        rules: Rules,
        journal: Journal,
        guard: Guard,
        lock: KubepodsLock | None,
        published: Callable[[], None],
        displaced: Callable[[LockHeld], None],
        cpus_changed: Callable[[], None],
    ) -> None:
        """guard: how policies are called. lock: what keeps other daemons away; None where there
        are none. published: called after each snapshot. displaced: called when another daemon
        turns out to have this node's pods. cpus_changed: called when pods can have other CPUs than
        the rules know.
        """
        self._config = config
        self._host = host
        self._state = state
        self._rules = rules
        self._journal = journal
        self._guard = guard
        self._lock = lock
        self._published = published
        self._displaced = displaced
        self._cpus_changed = cpus_changed
        self._layout: Layout | None = None
        self._reasons: set[str] = set()
        self._journal_problem = ""
        self._scheduled = False
        self._published_at = 0.0
        self._passed_at = time.monotonic()
        self._ended: deque[str] = deque(maxlen=_MOST_ENDED)
        self._ended_before_pass: list[str] = []
        self.snapshot: Snapshot = state.snapshot(rules.engine)
        """What the next pass works from."""
        self.executor: Executor | None = None
        self.reconciler: Reconciler | None = None
        self.values: Mapping[tuple[Resource, ValueState], int] = {}
        self.of_processes: Sequence[Standing] = ()
        self.resctrl_groups: Sequence[str] = ()

    # --- life ----------------------------------------------------------------------------------

    def claim(self, layout: Layout) -> None:
        """Keep other daemons away; raises LockHeld when another one has this node's pods."""
        if self._lock is not None:
            self._lock.hold(layout)

    def start(self, layout: Layout, *, burst_above_quota: bool) -> None:
        """Start the reconciler's thread."""
        self._layout = layout
        self._loop = asyncio.get_running_loop()
        self.executor = Executor(
            self._host,
            layout,
            self._journal,
            limits=Limits(writes_per_second=float(self._config.writes.budget_per_second)),
            page_size_bytes=self._rules.inputs.kernel.page_size_bytes,
            burst_above_quota=burst_above_quota,
        )
        self.snapshot = self._state.snapshot(self._rules.engine)
        self.reconciler = Reconciler(
            self.executor,
            self._journal,
            self._snapshot_for_pass,
            interval_s=self._config.intervals.reconcile,
            guard=self._guard,
            on_pass=self._pass_done,
            watch=True,
            here=self._host.here if isinstance(self._host, LocalHost) else lambda path: path,
        )
        self.reconciler.start()

    def set_layout(self, layout: Layout, *, burst_above_quota: bool) -> None:
        """Work with another layout from the next pass on."""
        self._layout = layout
        if self.reconciler is not None:
            self.reconciler.set_layout(layout, burst_above_quota=burst_above_quota)

    async def stop(self) -> None:
        """End the thread after the pass in progress, and let another daemon in."""
        if self.reconciler is not None:
            loop = asyncio.get_running_loop()
            if not await loop.run_in_executor(None, self.reconciler.stop):
                _LOG.warning("the reconciler is stuck in a kernel write; leaving it")
                return
            self.reconciler.close()
            self._journal.close()
        if self._lock is not None:
            self._lock.close()

    # --- publishing ----------------------------------------------------------------------------

    def state_changed(self, reason: str) -> None:
        """Publish a snapshot soon, and have a pass run if the reason gives it something to do."""
        self._reasons.add(reason)
        if not self._scheduled:
            self._scheduled = True
            loop = asyncio.get_running_loop()
            wait = self._published_at + _PUBLISH_EVERY_S - loop.time()
            if wait > 0:
                loop.call_later(wait, self._publish)
            else:
                loop.call_soon(self._publish)

    def _publish(self) -> None:
        self._scheduled = False
        self._published_at = asyncio.get_running_loop().time()
        reasons, self._reasons = self._reasons, set()
        self.snapshot = self._state.snapshot(self._rules.engine)
        self._published()
        if self.reconciler is not None and reasons - _QUIET:
            self.reconciler.trigger(",".join(sorted(reasons)))

    def ended(self, container_id: str) -> None:
        """A container has ended: what it was handed over is forgotten after a pass."""
        self._ended.append(container_id)

    # --- passes, in the reconciler's thread ----------------------------------------------------

    def _snapshot_for_pass(self) -> Snapshot:
        assert self._layout is not None
        try:
            self.claim(self._layout)
        except LockHeld as held:
            self._loop.call_soon_threadsafe(self._displaced, held)
            raise
        if pods_cpus(self._host, self._layout) != self._rules.inputs.kernel.pods_cpus:
            self._loop.call_soon_threadsafe(self._cpus_changed)
        # What was handed over before an end is in the journal when this pass is done.
        self._ended_before_pass = [self._ended.popleft() for _ in range(len(self._ended))]
        return self.snapshot

    def _pass_done(self, report: PassReport) -> None:
        self._passed_at = time.monotonic()
        self._forget_deliveries()
        if self.reconciler is not None:
            # Taken here, because a scrape must not wait for a pass.
            self.values = self.reconciler.states()
            told = {resource for resource, _ in self.values} & OF_PROCESSES
            self.of_processes = self.reconciler.standing(told) if told else ()
            self._tell_of_journal(self.reconciler.stats.journal_error)
        if self._rules.inputs.kernel.resctrl is not None:
            self.resctrl_groups = tuple(resctrl_groups.groups(self._host))
        if report.written or report.failed or report.restored:
            _LOG.info(
                "reconciled",
                extra={
                    "reasons": ",".join(report.reasons),
                    "subjects": report.subjects,
                    "decided": report.decided,
                    "written": report.written,
                    "failed": report.failed,
                    "restored": report.restored,
                    "cpu_ms": round(report.cpu_ms, 1),
                },
            )

    def _tell_of_journal(self, problem: str) -> None:
        """Say that kernel files are not written, and that they are again."""
        if problem == self._journal_problem:
            return
        self._journal_problem = problem
        if problem:
            _LOG.error("originals cannot be recorded, so no kernel file is written: %s", problem)
        else:
            _LOG.info("originals are recorded again, and kernel files written")

    def _forget_deliveries(self) -> None:
        """Forget what was handed over for containers that ended, most of all unstarted ones."""
        try:
            for container_id in self._ended_before_pass:
                self._journal.done_with(container_id)
        except JournalError as error:
            _LOG.warning("deliveries stay in the journal: %s", error)
        self._ended_before_pass = []

    @property
    def crash(self) -> str:
        """Why the last pass failed; "" when it did not."""
        return self.reconciler.stats.crash if self.reconciler is not None else ""

    @property
    def silent_s(self) -> float:
        """For how long no pass was finished, in seconds; 0 before the first one began."""
        return time.monotonic() - self._passed_at if self.reconciler is not None else 0.0
