"""The reconciler: decides every subject again, and has the executor write what differs.

A pass is a plain function of the snapshot and of the kernel's values. The loop around it runs in
its own thread, since a kernel write may block for seconds. A pass runs on the timer and at once
after a trigger; triggers that come together lead to one pass.

A pass is cheap while nothing changes: a decision is kept as long as subject and engine are the
same, and a file with unchanged content is not judged again. The thread steps aside often
(`service.scheduling`), so that it delays neither hook replies nor the runtime that waits for them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from hooks.engine import Decide, Engine, decide
from hooks.standing import NOTHING_STANDS, Standing
from hooks.state import State
from hooks.subject import Subject
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.slots import ResourceView, WriteReport
from koordlet.reconciler.outside import OutsideChanges
from koordlet.reconciler.pods_queue import PodsQueue
from koordlet.reconciler.reports import PassReport, ReconcileStats, SubjectView
from koordlet.reconciler.triggers import DRAIN_S, Triggers
from koordlet.reconciler.wishes import Wishes
from koordlet.state.snapshot import Snapshot
from linux.cgroup_paths import Layout
from linux.resources import Resource
from service.scheduling import schedule_beside_event_loop

log = logging.getLogger(__name__)

_BUDGET_AGAIN_S: Final = 1.0
"""The pause before a pass for writes that were deferred: the budget of a second has refilled by
then. Twice the value halves the number of such passes and doubles each one's writes."""

_LOOK_AGAIN_EVERY: Final = 6
"""Every so many timer passes judge again what is not applied: once a minute by default. Twice the
value doubles how long a value that has become possible is not noticed."""
_AFTER_CRASH_S: Final = 0.05
"""The pause after a failed pass, against a loop that fails at once each time."""
_CRASH_LOG_EVERY_S: Final = 300.0
"""How long the same defect is not logged again; as for events that repeat."""
_MOST_OF_CRASH: Final = 300
"""Characters of an error that `status` and `/readyz` show: about three lines."""


class OnPass(Protocol):
    """Called in the reconciler's thread after each pass."""

    def __call__(self, report: PassReport, /) -> None: ...


class Reconciler:
    """See the module. `run_once` may be called by any thread; passes never overlap.

    snapshot_source: returns the snapshot in force; called once a pass.
    decide: decides about one subject. interval_s: the timer.
    followed: called after the writes that follow from these standing claims.
    watch: look for outside changes with inotify. step_aside: called for each subject; the
    executor's host calls it for each file.
    """

    def __init__(
        self,
        executor: Executor,
        journal: Journal,
        snapshot_source: Callable[[], Snapshot],
        *,
        interval_s: float = 10.0,
        decide: Decide = decide,
        on_pass: OnPass | None = None,
        followed: Callable[[Standing], None] = lambda standing: None,
        watch: bool = False,
        here: Callable[[str], str] = lambda path: path,
        step_aside: Callable[[], None] = lambda: None,
    ) -> None:
        self._executor = executor
        self._journal = journal
        self._snapshot_source = snapshot_source
        self.interval_s = interval_s
        self._on_pass = on_pass
        self._followed = followed
        self._lock = threading.Lock()
        self._wishes = Wishes(executor, journal, decide=decide, step_aside=step_aside)
        self._outside = OutsideChanges(executor, here=here) if watch else None
        self._triggers = Triggers()
        self._passes_since_look = 0
        self._stats = ReconcileStats()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._new_layout: tuple[Layout, bool] | None = None
        self._crash_logged_at: dict[str, float] = {}
        self._pods = PodsQueue()
        self._standing: Standing = NOTHING_STANDS
        """The newest standing claims; the thread brings the desired values up to them."""
        self._outside_pods: set[str] = set()
        """Subjects of pods in whose files others have written."""
        self._outside_at = math.inf
        """When they are looked at, unless another pod changes before."""
        self._pass_at = time.monotonic()
        """When the timer's next pass is due."""

    # -- for the daemon --------------------------------------------------------------------------

    @property
    def stats(self) -> ReconcileStats:
        return self._stats

    def start(self) -> None:
        """Start the thread; the first pass runs at once."""
        if self._thread is not None:
            raise RuntimeError("the reconciler runs already")
        self._stopping = False
        self.trigger("start")
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after the pass in progress; return whether it ended in time.

        timeout_s: 10 s is what upstream's DaemonSet allows for the end.
        """
        self._stopping = True
        self._triggers.wake()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def close(self) -> None:
        """Release what the reconciler holds; after `stop`."""
        if self._outside is not None:
            self._outside.close()
        self._triggers.close()

    def trigger(self, reason: str) -> None:
        """Request a pass. Any thread; never blocks."""
        self._triggers.add(reason)

    def pods_changed(
        self,
        engine: Engine,
        pods: Mapping[str, Sequence[Subject]],
        qos: Sequence[Subject] = (),
        *,
        requests: int = 0,
    ) -> None:
        """Have these pods looked at now, without the rest of the node. Any thread; never blocks.

        pods: by uid, what the next snapshot would say of each; no subjects: it has ended.
        qos: the QoS directories, if what is wanted of them depends on their pods.
        requests: how many of kubelet's requests for running containers the subjects follow from.
        """
        self._pods.put(engine, pods, qos, requests=requests)
        self._triggers.wake()

    @property
    def pods_waiting(self) -> int:
        """How many pods are queued. Any thread."""
        return len(self._pods)

    def requested(self, cgroup: str, number: int) -> None:
        """Leave a container's files alone until what follows from a new request is known here.

        Any thread; never blocks. number: the number of this request. The pod is queued, or a pass
        is requested, after it.
        """
        self._executor.requests.add(cgroup, number)

    def standing_changed(self, standing: Standing) -> None:
        """Have the strategies' claims in force from now on. Any thread; never blocks.

        Only the subjects whose claims have changed are looked at. Passes use the same claims.
        """
        self._standing = standing
        self._triggers.wake()

    def snapshot_made(self) -> None:
        """Empty the queue of pods: a snapshot for the next pass, which has them, was made."""
        self._pods.clear()

    def set_layout(self, layout: Layout, *, burst_above_quota: bool = False) -> None:
        """Use another layout from the next pass on. Any thread; never blocks."""
        self._new_layout = (layout, burst_above_quota)
        self.trigger("layout")

    def explain(self, subject_key: str) -> SubjectView | None:
        """Return a subject's decision and the states of its values; None if it is not known.

        Waits for a pass in progress.
        """
        with self._lock:
            known = self._wishes.known.get(subject_key)
            if known is None:
                return None
            views = tuple(self._executor.views(subject_key))
            return SubjectView(known.subject, known.decision, views)

    def explain_all(self) -> list[SubjectView]:
        """Return `explain` of every subject, in the snapshot's order."""
        with self._lock:
            return [
                SubjectView(known.subject, known.decision, tuple(self._executor.views(key)))
                for key, known in self._wishes.known.items()
            ]

    def explain_file(self, path: str) -> list[tuple[str, ResourceView]]:
        """Return (subject, view) of the desired values of one file."""
        with self._lock:
            return [
                (key, view)
                for key in self._wishes.known
                for view in self._executor.views(key)
                if view.path == path
            ]

    def restoring(self) -> list[ResourceView]:
        """Return the originals that are still to be restored."""
        with self._lock:
            return self._executor.restoring()

    def states(self) -> dict[tuple[Resource, State], int]:
        """Count values by resource and state."""
        with self._lock:
            return self._executor.states()

    def standing(self, resources: Collection[Resource]) -> list[tuple[Subject, ResourceView]]:
        """Return (subject, view) of every desired value of these resources."""
        with self._lock:
            return [
                (known.subject, view)
                for key, view in self._executor.standing(resources)
                if (known := self._wishes.known.get(key)) is not None
            ]

    # -- passes ----------------------------------------------------------------------------------

    def run_once(self, *reasons: str) -> PassReport:
        """Run one pass now, in the calling thread."""
        # Before the lock: it may wait for the event loop, which may wait for the lock.
        snapshot = self._snapshot_source()
        with self._lock:
            return self._pass(reasons, snapshot)

    def update_once(self) -> PassReport | None:
        """Process the queued pods and the new standing claims now, in the calling thread.

        Returns None, and leaves them to the next pass, if there are none, or if engine or layout
        have changed.
        """
        with self._lock:
            return self._update() if self._can_update() else None

    def _can_update(self) -> bool:
        """Return whether there is something to update, with engine and layout of the last pass."""
        if not self._pods and not self._outside_pods and not self._restanding:
            return False
        same = not self._pods or self._pods.engine is self._wishes.engine
        return same and self._new_layout is None and self._wishes.engine is not None

    @property
    def _restanding(self) -> bool:
        """Whether there are standing claims that the desired values do not follow yet."""
        return self._standing is not self._wishes.standing

    def restore_all(self) -> PassReport:
        """Restore every original, for the uninstall. Claims are ignored from here on.

        Repeats while there is progress; values that cannot be restored stay in the journal.
        """
        with self._lock:
            started, cpu = time.monotonic(), time.thread_time()
            self._wishes.nothing()
            self._journal.update()
            self._executor.look_again()
            self._executor.watch_runtime_values()
            total = WriteReport()
            while True:
                self._executor.adopt_all_deliveries()
                for record in self._executor.orphans():
                    self._executor.restore(record)
                self._executor.fill_budget()
                report = self._executor.apply(self._executor.plan())
                total = _sum(total, report)
                self._executor.look_again()
                if not (report.written or report.restored):
                    break
            return PassReport(
                reasons=("restore",),
                written=total.written,
                failed=total.failed,
                deferred=total.deferred,
                restored=total.restored,
                wall_ms=(time.monotonic() - started) * 1000,
                cpu_ms=(time.thread_time() - cpu) * 1000,
            )

    def _pass(self, reasons: Sequence[str], snapshot: Snapshot) -> PassReport:
        started, cpu = time.monotonic(), time.thread_time()
        if self._new_layout is not None:
            (layout, burst_above_quota), self._new_layout = self._new_layout, None
            self._executor.set_layout(layout)
            self._executor.set_burst_above_quota(allowed=burst_above_quota)
        journal_error = ""
        try:
            self._journal.update()
        except JournalError as error:
            journal_error = str(error)
        self._executor.requests.follow(snapshot.requests)
        self._wishes.standing = self._standing
        decided, faults = self._wishes.update(snapshot)
        self._wishes.restore_leftovers(snapshot)
        self._passes_since_look += 1
        if reasons != ("timer",) or self._passes_since_look >= _LOOK_AGAIN_EVERY:
            self._passes_since_look = 0
            self._executor.look_again()
        self._forget_outside()
        done = self._executor.apply(self._executor.plan())
        report = PassReport(
            reasons=tuple(reasons),
            subjects=len(snapshot.subjects),
            decided=decided,
            written=done.written,
            failed=done.failed,
            deferred=done.deferred,
            restored=done.restored,
            faults=faults,
            wall_ms=(time.monotonic() - started) * 1000,
            cpu_ms=(time.thread_time() - cpu) * 1000,
            generation=snapshot.engine.generation,
        )
        self._stats = msgspec.structs.replace(
            self._stats,
            passes=self._stats.passes + 1,
            last=report,
            last_finished_at=time.time(),
            journal_records=len(self._journal),
            journal_error=journal_error,
        )
        self._done(done)
        if self._outside is not None:
            self._outside.watch(snapshot)
        return report

    def _update(self) -> PassReport:
        """Do for queued pods and changed standing claims what a pass does for the whole node."""
        started, cpu = time.monotonic(), time.thread_time()
        reasons = ("pods",) if self._pods or self._outside_pods else ("standing claims",)
        queued, qos = self._pods.take()
        pods = {uid: each.subjects for uid, each in queued.items()}
        for each in queued.values():
            self._executor.requests.follow(
                each.requests, [subject.cgroup for subject in each.subjects]
            )
        self._wishes.standing = self._standing
        with self._journal.gathering(), self._executor.one_look():
            self._journal.update()
            update = self._wishes.update_pods(pods)
            restood = self._wishes.restand()
            subjects = {*update.subjects, *self._outside_pods, *restood.around}
            self._forget_outside()
            self._executor.look_again(subjects)
            plan = self._executor.plan(subjects=subjects)
        done = self._executor.apply(plan)
        self._stats = msgspec.structs.replace(
            self._stats,
            journal_error=self._journal.problem or self._stats.journal_error,
            pod_updates=self._stats.pod_updates + len(pods),
            standing_updates=self._stats.standing_updates + len(restood.changed),
            journal_records=len(self._journal),
        )
        self._done(done)
        if self._outside is not None:
            self._outside.watch_more(self._executor.directories_of(update.subjects))
        if self._wishes.differs(qos):
            self.trigger("pods")  # values of a QoS directory that depend on all its pods
        return PassReport(
            reasons=reasons,
            subjects=len(subjects),
            decided=update.decided + len(restood.changed),
            written=done.written,
            failed=done.failed,
            deferred=done.deferred,
            restored=done.restored,
            faults=update.faults,
            wall_ms=(time.monotonic() - started) * 1000,
            cpu_ms=(time.thread_time() - cpu) * 1000,
            generation=self._wishes.engine.generation if self._wishes.engine else 0,
        )

    def _forget_outside(self) -> None:
        """Forget noted writes by others: all files are read now."""
        self._outside_pods = set()
        self._outside_at = math.inf

    def _done(self, done: WriteReport) -> None:
        """Count the writes, and look for writes by others in the meantime."""
        self._followed(self._wishes.standing)
        self._stats = msgspec.structs.replace(
            self._stats,
            written=self._stats.written + done.written,
            failed=self._stats.failed + done.failed,
            restored=self._stats.restored + done.restored,
        )
        # The events of our own writes are queued by now; all other events are of others' writes.
        self._look_outside(own=done.paths)
        if any(path.endswith("/cgroup.subtree_control") for path in done.paths):
            self.trigger("controllers")  # files that were missing exist now

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        schedule_beside_event_loop()
        while not self._stopping:
            self._turn()

    def _turn(self) -> None:
        """Wait for a reason and run one pass. A defect must not end the thread."""
        try:
            reasons = self._wait()
            if self._stopping:
                return
            if not reasons:
                update = self.update_once()
                if update is not None and update.deferred:
                    self._catch_up_soon()
                self._retry_journal()
                return
            self._pass_at = time.monotonic() + self.interval_s
            report = self.run_once(*reasons)
            if report.deferred:
                self._catch_up_soon()
            self._retry_journal()
            if self._on_pass is not None:
                self._on_pass(report)
            self._stats = msgspec.structs.replace(self._stats, crash="")
        except Exception as error:  # noqa: BLE001 - it is reported, and the next pass runs
            # The next pass reads the kernel's values again, so no state has to be repaired.
            self._crashed(error)
            time.sleep(_AFTER_CRASH_S)

    def _crashed(self, error: Exception) -> None:
        """Count a failed pass, and log it; the same defect only once in a while."""
        self._stats = msgspec.structs.replace(
            self._stats,
            crashed_passes=self._stats.crashed_passes + 1,
            crash=f"{type(error).__name__}: {error}"[:_MOST_OF_CRASH],
        )
        where = traceback.extract_tb(error.__traceback__, -1)[-1]
        defect = f"{type(error).__name__} {where.filename}:{where.lineno}"
        now = time.monotonic()
        if now - self._crash_logged_at.get(defect, -math.inf) >= _CRASH_LOG_EVERY_S:
            self._crash_logged_at[defect] = now
            log.error(
                "a reconcile pass failed",
                exc_info=error,
                extra={"crashed": self._stats.crashed_passes},
            )

    def _catch_up_soon(self) -> None:
        threading.Timer(_BUDGET_AGAIN_S, self.trigger, ("write budget",)).start()

    def _retry_journal(self) -> None:
        """After a failure of the journal, have a pass as soon as the journal may be tried again.

        No kernel file is written until then, so the next timer may be too late for a new pod.
        """
        wait_s = self._journal.retry_in_s
        if wait_s is not None:
            self._pass_at = min(self._pass_at, time.monotonic() + wait_s)

    def _wait(self) -> tuple[str, ...]:
        """Sleep until there is a reason for a pass, and return it; () if an update is enough.

        Updates come first, because they would have to wait for a pass, which takes longer.
        """
        while not self._stopping:
            now = time.monotonic()
            if (self._pods or self._restanding or now >= self._outside_at) and self._can_update():
                return ()
            if now >= self._pass_at:
                return (*self._triggers.take(), "timer")
            if self._triggers.waiting:
                return self._triggers.gathered()
            left = self._pass_at - now
            if self._outside_at > now:
                left = min(left, self._outside_at - now)
            also = self._outside.descriptors() if self._outside is not None else ()
            if self._triggers.sleep(left, also):
                with self._lock:
                    self._look_outside()
        return ()

    def _look_outside(self, own: Collection[str] = ()) -> None:
        """Note writes by others, except to `own`, and look at their pods or at the whole node."""
        if self._outside is None:
            return
        changes = self._outside.changes(own)
        if not changes.writes:
            return
        self._stats = msgspec.structs.replace(
            self._stats, foreign_changes=self._stats.foreign_changes + changes.writes
        )
        for subject in changes.subjects:
            if pod := self._wishes.beside(subject):
                self._outside_pods.update(pod)
                # Gather further writes of the same program.
                self._outside_at = min(self._outside_at, time.monotonic() + DRAIN_S)
            else:
                self._triggers.add("outside change")


def _sum(one: WriteReport, other: WriteReport) -> WriteReport:
    return WriteReport(
        written=one.written + other.written,
        failed=one.failed + other.failed,
        deferred=one.deferred + other.deferred,
        restored=one.restored + other.restored,
    )
