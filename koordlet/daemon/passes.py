"""Leads changes of the state to the reconciler: of single pods as pod updates, others as passes.

The state belongs to the event loop. Changes of one pod are queued for the reconciler's thread soon
after the reply. Changes that may concern any subject trigger a pass; the event loop makes its
snapshot when the pass begins. No pass runs while another daemon has the lock of this node's pods.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

from hooks.engine import Decide
from hooks.standing import NOTHING_STANDS, Standing
from hooks.state import State as ValueState
from hooks.subject import Level
from koordlet.configuration.config import Config
from koordlet.daemon.gaps import Gaps
from koordlet.decisions.rules import Rules
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.slots import Written
from koordlet.executor.table import Limits
from koordlet.exposition.container_metrics import OF_PROCESSES
from koordlet.exposition.container_metrics import Standing as OfProcess
from koordlet.node.kubepods_lock import KubepodsLock
from koordlet.node.probe import pods_cpus
from koordlet.reconciler.pass_log import PassLog
from koordlet.reconciler.reconciler import Reconciler
from koordlet.reconciler.reports import PassReport
from koordlet.state import NodeState
from koordlet.state.snapshot import Snapshot
from linux import resctrl_groups
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.local import LocalHost
from linux.paced_host import PacedHost
from linux.resources import Resource
from service.locks import LockHeld
from service.scheduling import StepAside

_LOG = logging.getLogger("koordlet")

_GATHER_S: Final = 0.02
"""How long changes of pods wait at least, until a new pod takes them along; without one twice as
long. An update costs about half a millisecond of processor time besides what each pod costs.
Measured with pods that start back to back: 30 ms cost as much. Twice the value doubles the time
until values that a reply cannot deliver are in force."""

_AFTER_REPLY_S: Final = 0.001
"""How long after the reply to RunPodSandbox a new pod is queued: the runtime has taken the reply
then, and has other work before it creates a container. At once, the reconciler's thread keeps the
runtime's from its CPU: RunPodSandbox took 0.40 instead of 0.28 ms (p50). After 2 ms its work meets
CreateContainer more often where that follows 5 ms after the reply."""

_MANY_WAIT: Final = 16
"""With so many queued pods the reconciler does not rest in a burst. Chosen: it falls behind where
the machine is slow, and for a while by a pass: one over 50 pods takes the gaps of 6 pods. Twice the
value doubles the time until values are in force where the gaps are not enough."""

_COMPLETE_S: Final = 0.5
"""How long the look at a new container waits that has all its values from the runtime. Chosen: pods
that start every few hundred milliseconds are then looked at along with the next one, which halves
the number of updates. Twice the value doubles the time until a value is repaired that the runtime
did not write, or that it wrote and another program changed at once."""

_SNAPSHOT_PATIENCE_S: Final = 10.0
"""How long a pass waits for the event loop. Chosen: the loop answers within milliseconds, so after
this time it is stuck, and systemd's watchdog restarts the daemon. Twice the value changes
nothing."""

_MOST_ENDED: Final = 16384
"""Ended containers whose deliveries the next pass forgets. Chosen: passes are seconds apart, so
this is far more than a node ends; what is beyond it is forgotten later by its age."""


class Passes:
    """The reconciler and its inputs. Belongs to the event loop, except where stated."""

    def __init__(
        self,
        config: Config,
        *,
        host: Host,
        state: NodeState,
        rules: Rules,
        journal: Journal,
        decide: Decide,
        lock: KubepodsLock | None,
        catch_up: Callable[[], None],
        published: Callable[[], None],
        displaced: Callable[[LockHeld], None],
        cpus_changed: Callable[[], None],
        gaps: Gaps,
        followed: Callable[[Standing], None] = lambda standing: None,
        written: Written | None = None,
    ) -> None:
        """decide: decides about one subject. lock: excludes other daemons; None for no lock.
        catch_up: does what follows earlier replies; called before a pod or the state is handed to
        the reconciler. published: called after each snapshot. displaced: called when another daemon
        has the lock of this node's pods. cpus_changed: called when pods can have other CPUs than
        the rules know. gaps: in which the reconciler works while new pods appear. followed: called
        after the writes that follow from these standing claims. written: see `Written`.
        """
        self._config = config
        self._host = host
        self._state = state
        self._rules = rules
        self._journal = journal
        self._decide = decide
        self._lock = lock
        self._catch_up = catch_up
        self._published = published
        self._displaced = displaced
        self._cpus_changed = cpus_changed
        self._followed = followed
        self._written = written
        self._layout: Layout | None = None
        self._reasons: set[str] = set()
        self._pods: set[str] = set()
        """Uids of pods that have changed since they were queued for the reconciler."""
        self._queueing: asyncio.TimerHandle | None = None
        """Queues these pods, at the time that follows."""
        self._queue_at = math.inf
        self._queued_at = -math.inf
        """When pods were last queued."""
        self._gaps = gaps
        self._scheduled = False
        self._stale = False
        self._standing: Standing = NOTHING_STANDS
        self._passed_at = time.monotonic()
        self._pass_log = PassLog()
        self._ended: deque[str] = deque(maxlen=_MOST_ENDED)
        self._ended_before_pass: list[str] = []
        self._snapshot: Snapshot = state.snapshot(rules.engine)
        self.executor: Executor | None = None
        self.reconciler: Reconciler | None = None
        self.values: Mapping[tuple[Resource, ValueState], int] = {}
        self.of_processes: Sequence[OfProcess] = ()
        self.resctrl_groups: Sequence[str] = ()

    # --- life ----------------------------------------------------------------------------------

    def claim(self, layout: Layout) -> None:
        """Lock this node's pods; raises LockHeld when another daemon has the lock."""
        if self._lock is not None:
            self._lock.hold(layout)

    def start(self, layout: Layout, *, burst_above_quota: bool) -> None:
        """Start the reconciler's thread."""
        self._layout = layout
        self._loop = asyncio.get_running_loop()
        step_aside = StepAside(wait=self._rest)
        self.executor = Executor(
            PacedHost(self._host, step_aside),
            layout,
            self._journal,
            limits=Limits(writes_per_second=float(self._config.writes.budget_per_second)),
            page_size_bytes=self._rules.inputs.kernel.page_size_bytes,
            burst_above_quota=burst_above_quota,
            written=self._written,
        )
        self._stale = True
        self.reconciler = Reconciler(
            self.executor,
            self._journal,
            self._snapshot_for_pass,
            interval_s=self._config.intervals.reconcile,
            decide=self._decide,
            on_pass=self._pass_done,
            followed=self._followed,
            watch=True,
            here=self._host.here if isinstance(self._host, LocalHost) else lambda path: path,
            step_aside=step_aside,
        )
        self.reconciler.standing_changed(self._standing)
        self.reconciler.start()

    def set_layout(self, layout: Layout, *, burst_above_quota: bool) -> None:
        """Use another layout from the next pass on."""
        self._layout = layout
        if self.reconciler is not None:
            self.reconciler.set_layout(layout, burst_above_quota=burst_above_quota)

    async def stop(self) -> None:
        """End the thread after the pass in progress, and release the lock."""
        if self.reconciler is not None:
            loop = asyncio.get_running_loop()
            if not await loop.run_in_executor(None, self.reconciler.stop):
                _LOG.warning("the reconciler is stuck in a kernel write; leaving it")
                return
            self.reconciler.close()
            self._journal.close()
        if self._lock is not None:
            self._lock.close()

    # --- changes -------------------------------------------------------------------------------

    def state_changed(self, reason: str) -> None:
        """Request a pass over the whole node."""
        self._stale = True
        self._reasons.add(reason)
        self._soon()

    def pod_appeared(self, uid: str) -> None:
        """A pod is about to run: have the values of its own group written soon after the reply.

        In a burst of new pods the others are gathered, and go along with the first one that comes
        when they have waited long enough. So the reconciler works while the runtime is busy between
        two calls, and not whenever a timer ends, which would be during the hooks of the burst.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.call_at(now + _AFTER_REPLY_S, self._gaps.begin)
        if now - self._queued_at < _GATHER_S:
            self._pod_changed(uid, queue_at=self._queued_at + 2 * _GATHER_S)
        else:
            self._pod_changed(uid, queue_at=now + _AFTER_REPLY_S)

    def pod_changed(self, uid: str, *, can_wait: bool = False) -> None:
        """Queue a pod soon, together with others. can_wait: only when others are queued."""
        soon = asyncio.get_running_loop().time() + 2 * _GATHER_S
        self._pod_changed(uid, queue_at=math.inf if can_wait else soon)

    def container_complete(self, uid: str) -> None:
        """Queue the pod of a new container that has all its values: not urgent."""
        self._pod_changed(uid, queue_at=asyncio.get_running_loop().time() + _COMPLETE_S)

    def _pod_changed(self, uid: str, *, queue_at: float) -> None:
        """Note a changed pod; all of them are queued at this time, if not before."""
        self._stale = True
        self._pods.add(uid)
        if queue_at < self._queue_at:
            self._queue_at = queue_at
            if self._queueing is not None:
                self._queueing.cancel()
            self._queueing = asyncio.get_running_loop().call_at(queue_at, self._queue_pods)

    def _queue_pods(self) -> None:
        self._queueing, self._queue_at = None, math.inf
        self._queued_at = asyncio.get_running_loop().time()
        # The reconciler must not see a container before what was delivered for it is noted.
        self._catch_up()
        pods, self._pods = self._pods, set()
        if self.reconciler is None or not pods:
            return
        if self._layout is not None and not self._layout.kubepods:
            self.state_changed("first pod")  # with the snapshot, the pods' root is looked for
        else:
            engine = self._rules.engine
            qos = self._state.qos_subjects() if engine.claims_at(Level.QOS) else ()
            subjects = {uid: self._state.subjects_of(uid) for uid in pods}
            self.reconciler.pods_changed(engine, subjects, qos, requests=self._state.requests)

    def requested(self, cgroup: str) -> None:
        """Kubelet requests other values of a running container, which the state has already.

        Before the reply. The caller also reports the change of the pod or of the state.
        """
        if self.reconciler is not None and cgroup:
            self.reconciler.requested(cgroup, self._state.requests)

    def _soon(self) -> None:
        """Trigger a pass for all reasons together, after the reply."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._trigger)

    def _trigger(self) -> None:
        self._scheduled = False
        if self._reasons and self.reconciler is not None:
            reasons, self._reasons = self._reasons, set()
            self.reconciler.trigger(",".join(sorted(reasons)))

    @property
    def snapshot(self) -> Snapshot:
        """The state and the engine as of now. For the event loop."""
        if self._stale or self._snapshot.engine is not self._rules.engine:
            self._stale = False
            self._snapshot = self._state.snapshot(self._rules.engine)
            self._published()
        return self._snapshot

    def snapshot_for_pass(self) -> Snapshot:
        """Return `snapshot` for a pass that uses it at once. For the event loop."""
        self._catch_up()
        snapshot = self.snapshot
        # It has all pods that are queued or waiting.
        self._pods = set()
        if self.reconciler is not None:
            self.reconciler.snapshot_made()
        return snapshot

    def standing_changed(self, standing: Standing) -> None:
        """Have the strategies' claims in force from now on. Any thread; never blocks."""
        self._standing = standing
        if self.reconciler is not None:
            self.reconciler.standing_changed(standing)

    def ended(self, container_id: str) -> None:
        """A container has ended: its deliveries are forgotten after a pass."""
        self._ended.append(container_id)

    # --- passes, in the reconciler's thread ----------------------------------------------------

    def _rest(self) -> bool:
        """Wait for a gap between the runtime's calls, unless too much has to be done."""
        waiting = self.reconciler.pods_waiting if self.reconciler is not None else 0
        return waiting < _MANY_WAIT and self._gaps.wait()

    def _snapshot_for_pass(self) -> Snapshot:
        assert self._layout is not None
        try:
            self.claim(self._layout)
        except LockHeld as held:
            self._loop.call_soon_threadsafe(self._displaced, held)
            raise
        if pods_cpus(self._host, self._layout) != self._rules.inputs.kernel.pods_cpus:
            self._loop.call_soon_threadsafe(self._cpus_changed)
        # Deliveries that were noted before an end are in the journal when this pass is done.
        self._ended_before_pass = [self._ended.popleft() for _ in range(len(self._ended))]
        return self._snapshot_of_loop()

    def _snapshot_of_loop(self) -> Snapshot:
        """Have the event loop, which owns the state, make the snapshot, and wait for it."""
        made: Future[Snapshot] = Future()

        def make() -> None:
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(self.snapshot_for_pass())
                except Exception as error:  # noqa: BLE001 - it is the pass that fails
                    made.set_exception(error)

        self._loop.call_soon_threadsafe(make)
        try:
            return made.result(_SNAPSHOT_PATIENCE_S)
        except TimeoutError:
            made.cancel()
            raise RuntimeError("the event loop makes no snapshot: it is stuck") from None

    def _pass_done(self, report: PassReport) -> None:
        self._passed_at = time.monotonic()
        self._forget_deliveries()
        if self.reconciler is not None:
            # Read here, because a scrape must not wait for a pass.
            self.values = self.reconciler.states()
            shown = {resource for resource, _ in self.values} & OF_PROCESSES
            self.of_processes = self.reconciler.standing(shown) if shown else ()
        if self._rules.inputs.kernel.resctrl is not None:
            self.resctrl_groups = tuple(resctrl_groups.groups(self._host))
        self._pass_log.add(report)

    def _forget_deliveries(self) -> None:
        """Forget the deliveries of ended containers; those of unstarted ones never got a group."""
        try:
            for container_id in self._ended_before_pass:
                self._journal.forget_deliveries(container_id)
        except JournalError as error:
            _LOG.debug("deliveries stay in the journal, which has reported why: %s", error)
        self._ended_before_pass = []

    @property
    def crash(self) -> str:
        """Why the last pass failed; "" when it did not."""
        return self.reconciler.stats.crash if self.reconciler is not None else ""

    @property
    def silent_s(self) -> float:
        """Seconds since a pass was finished; 0 before the first one began."""
        return time.monotonic() - self._passed_at if self.reconciler is not None else 0.0
