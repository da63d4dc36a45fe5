"""The reconciler: decides for every subject again, and has the executor make it so.

A pass is a plain function of the snapshot and of what the kernel shows; the loop around it is three
lines in a thread of its own, since a kernel write may block for seconds. A pass runs on the timer
and at once after a trigger; triggers that come together make one pass.

It is cheap while nothing changes: a decision is kept as long as subject and engine are the same, a
file that reads as it did when it was last judged is not looked at further, and the thread gives way
between slices, so that hook replies in the same process are not held up.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import msgspec

from hooks.decision import Decision, Outcome
from hooks.engine import Engine, Guard
from hooks.policy import OffBecause
from hooks.subject import ContainerSubject, PodSubject, Requested, Subject
from koordlet.executor.executor import Executor
from koordlet.executor.slots import PlannedWrite, ResourceView, State, Want, WriteReport
from koordlet.journal import Journal, JournalError, Record
from koordlet.snapshot import Snapshot
from linux.cgroup_files import DEFAULT_PERIOD_US
from linux.cgroup_paths import Layout
from linux.inotify import IN_MODIFY, Inotify
from linux.resources import UNLIMITED, Resource, Value

log = logging.getLogger(__name__)

AT_CREATION_ONLY: Final = frozenset({Resource.ENV, Resource.MOUNT, Resource.DEVICE})
"""What only the runtime can give a container, when it makes it."""
_LOOK_AGAIN_EVERY: Final = 6
_ABSENT_PASSES: Final = 2
_DELIVERY_PATIENCE_S: Final = 600.0
_DRAIN_S: Final = 0.05
"""How long triggers that follow each other are gathered into one pass."""
_PAUSE_S: Final = 0.0005


class PassReport(msgspec.Struct, frozen=True):
    """What one pass did.

    decided: subjects whose decision was made anew. faults: policies that could not claim.
    cpu_ms: processor time of this thread.
    """

    reasons: tuple[str, ...] = ()
    subjects: int = 0
    decided: int = 0
    written: int = 0
    failed: int = 0
    deferred: int = 0
    restored: int = 0
    faults: int = 0
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    generation: int = 0


class ReconcileStats(msgspec.Struct, frozen=True):
    """Counters since the start, for metrics."""

    passes: int = 0
    written: int = 0
    failed: int = 0
    restored: int = 0
    foreign_changes: int = 0
    crashed_passes: int = 0
    last: PassReport = PassReport()
    last_finished_at: float = 0.0  # seconds since the epoch
    journal_records: int = 0
    journal_error: str = ""


class SubjectView(msgspec.Struct, frozen=True):
    """All about one subject: the decision, and how each value stands."""

    subject: Subject
    decision: Decision
    resources: tuple[ResourceView, ...]


class OnPass(Protocol):
    """Called in the reconciler's thread after each pass."""

    def __call__(self, report: PassReport, /) -> None: ...


class _Known:
    """What the last pass knew of a subject."""

    __slots__ = ("cgroup", "decision", "engine", "subject")

    def __init__(self, subject: Subject, engine: Engine, decision: Decision) -> None:
        self.subject = subject
        self.engine = engine
        self.decision = decision
        self.cgroup = subject.cgroup


class Reconciler:
    """See the module. `run_once` may be called by any thread; passes never overlap.

    snapshot_source: returns the snapshot in force; called once a pass.
    guard: how policies are called, see `hooks.engine`. interval_s: the timer.
    watch: look for outside changes with inotify.
    """

    def __init__(
        self,
        executor: Executor,
        journal: Journal,
        snapshot_source: Callable[[], Snapshot],
        *,
        interval_s: float = 10.0,
        guard: Guard | None = None,
        on_pass: OnPass | None = None,
        watch: bool = False,
        here: Callable[[str], str] = lambda path: path,
    ) -> None:
        self._executor = executor
        self._journal = journal
        self._snapshot_source = snapshot_source
        self.interval_s = interval_s
        self._guard = guard
        self._on_pass = on_pass
        self._watch = watch
        self._here = here
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._absent: dict[str, int] = {}
        self._passes_since_look = 0
        self._stats = ReconcileStats()
        self._reasons: list[str] = []
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._inotify: Inotify | None = None
        self._watched_for: object = None
        self._handed_at: dict[str, float] = {}
        self._new_layout: tuple[Layout, bool] | None = None

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
        """End the thread after the pass in progress; False when it has not ended in time."""
        self._stopping = True
        self._wake()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._thread = None
        return True

    def close(self) -> None:
        """Release what the reconciler holds; after `stop`."""
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        for descriptor in (self._wake_read, self._wake_write):
            if descriptor >= 0:
                os.close(descriptor)
        self._wake_read = self._wake_write = -1

    def trigger(self, reason: str) -> None:
        """Have a pass run soon. Any thread; never blocks."""
        if len(self._reasons) < 16:
            self._reasons.append(reason)
        self._wake()

    def set_layout(self, layout: Layout, *, burst_above_quota: bool = False) -> None:
        """Work with another layout from the next pass on. Any thread; never blocks."""
        self._new_layout = (layout, burst_above_quota)
        self.trigger("layout")

    def explain(self, subject_key: str) -> SubjectView | None:
        """Return what is decided for a subject and how it stands; None if it is not known.

        Waits for a pass in progress.
        """
        with self._lock:
            known = self._known.get(subject_key)
            if known is None:
                return None
            views = tuple(self._executor.views(subject_key))
            return SubjectView(known.subject, known.decision, views)

    def explain_all(self) -> list[SubjectView]:
        """Return `explain` of every subject, in the snapshot's order."""
        with self._lock:
            return [
                SubjectView(known.subject, known.decision, tuple(self._executor.views(key)))
                for key, known in self._known.items()
            ]

    def explain_file(self, path: str) -> list[tuple[str, ResourceView]]:
        """Return (subject, view) of whatever is wanted for one file."""
        with self._lock:
            return [
                (key, view)
                for key in self._known
                for view in self._executor.views(key)
                if view.path == path
            ]

    def restoring(self) -> list[ResourceView]:
        """Return the originals that are still to be put back."""
        with self._lock:
            return self._executor.restoring()

    def states(self) -> dict[tuple[Resource, State], int]:
        """Count values by resource and state."""
        with self._lock:
            return self._executor.states()

    def standing(self, resources: Collection[Resource]) -> list[tuple[Subject, ResourceView]]:
        """Return how everything stands that is wanted of some resources."""
        with self._lock:
            return [
                (known.subject, view)
                for key, view in self._executor.standing(resources)
                if (known := self._known.get(key)) is not None
            ]

    # -- passes ----------------------------------------------------------------------------------

    def run_once(self, *reasons: str) -> PassReport:
        """Run one pass now, in the calling thread."""
        with self._lock:
            return self._pass(reasons)

    def restore_all(self) -> PassReport:
        """Put every original back: for the uninstall. Claims are ignored from here on.

        Repeats while there is progress; what could not be put back stays in the journal.
        """
        with self._lock:
            started, cpu = time.monotonic(), time.thread_time()
            for subject in self._executor.subjects():
                self._executor.want(subject, ())
            self._known.clear()
            self._journal.update()
            self._executor.look_again()
            self._executor.watch_handed()
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

    def _pass(self, reasons: Sequence[str]) -> PassReport:
        started, cpu = time.monotonic(), time.thread_time()
        if self._new_layout is not None:
            (layout, burst_above_quota), self._new_layout = self._new_layout, None
            self._executor.set_layout(layout)
            self._executor.set_burst_above_quota(allowed=burst_above_quota)
        snapshot = self._snapshot_source()
        pause = self._pause if self._thread is threading.current_thread() else None
        journal_error = ""
        try:
            self._journal.update()
        except JournalError as error:
            journal_error = str(error)
        decided, faults = self._decide(snapshot, pause)
        self._restore_leftovers(snapshot)
        self._passes_since_look += 1
        if reasons != ("timer",) or self._passes_since_look >= _LOOK_AGAIN_EVERY:
            self._passes_since_look = 0
            self._executor.look_again()
        plan = self._executor.plan(pause)
        done = self._executor.apply(plan, pause)
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
        # Events of our own writes are queued by now; what else there is came from others.
        foreign = self._foreign_changes(own=done.paths)
        self._watch_directories(snapshot)
        self._stats = msgspec.structs.replace(
            self._stats,
            passes=self._stats.passes + 1,
            written=self._stats.written + done.written,
            failed=self._stats.failed + done.failed,
            restored=self._stats.restored + done.restored,
            foreign_changes=self._stats.foreign_changes + foreign,
            last=report,
            last_finished_at=time.time(),
            journal_records=len(self._journal),
            journal_error=journal_error,
        )
        if foreign:
            self.trigger("outside change")
        if any(path.endswith("/cgroup.subtree_control") for path in done.paths):
            self.trigger("controllers")  # files that were missing are there now
        return report

    def _awaited_deliveries(self, snapshot: Snapshot) -> set[str]:
        """Return the containers that were handed values and have not been seen since.

        One whose creation failed, or that lived shorter than a pass, is forgotten after a while.
        """
        awaited = set(self._journal.containers_with_deliveries())
        now = time.monotonic()
        self._handed_at = {one: self._handed_at.get(one, now) for one in awaited}
        if snapshot.complete:
            for one, at in self._handed_at.items():
                if now - at > _DELIVERY_PATIENCE_S:
                    awaited.discard(one)
                    with contextlib.suppress(JournalError):  # the next append tells the file
                        self._journal.done_with(one)
        return awaited

    def _decide(
        self,
        snapshot: Snapshot,
        pause: Callable[[], None] | None,
    ) -> tuple[int, int]:
        """Tell the executor what is wanted now; return (decisions made, faults in them)."""
        engine = snapshot.engine
        known_before, known = self._known, {}
        decided = faults = 0
        held = _without_input(engine)
        fresh = self._awaited_deliveries(snapshot)
        for index, subject in enumerate(snapshot.subjects):
            if pause is not None and index % 64 == 63:
                pause()
            key = subject.key
            before = known_before.get(key)
            if fresh and isinstance(subject, ContainerSubject) and subject.id in fresh:
                self._executor.adopt_deliveries(subject.id, subject.cgroup)
            if (
                before is not None
                and before.engine is engine
                and (before.subject is subject or before.subject == subject)
            ):
                known[key] = before
                faults += len(before.decision.faults)
                continue
            decision = engine.decide(
                subject, self._guard, before=before.decision if before is not None else None
            )
            decided += 1
            faults += len(decision.faults)
            known[key] = _Known(subject, engine, decision)
            if (
                before is not None
                and not held
                and not decision.faults
                and not before.decision.faults
                and before.subject == subject
                and before.decision.outcomes == decision.outcomes
            ):
                continue  # another engine, or another object, and the same wishes
            self._executor.want(key, self._wants(subject, decision, held))
        self._known = known
        for key in self._executor.subjects():
            if key in known:
                self._absent.pop(key, None)
            elif snapshot.complete:
                # A subject that left takes its cgroup along, as a rule a moment later.
                passes = self._absent.get(key, 0) + 1
                self._absent[key] = passes
                if passes >= _ABSENT_PASSES:
                    self._absent.pop(key)
                    self._executor.want(key, ())
        return decided, faults

    def _wants(self, subject: Subject, decision: Decision, held: set[str]) -> list[Want]:
        wants = [
            _want(subject, resource, key, outcome)
            for (resource, key), outcome in decision.outcomes.items()
            if resource not in AT_CREATION_ONLY
        ]
        # Bad input holds what was in force: the last good value stays until the object is mended.
        holding = {fault.policy for fault in decision.faults} | held
        if holding:
            present = {want.slot_key for want in wants}
            wants += [
                want
                for slot_key, want in self._executor.wanted(subject.key).items()
                if slot_key not in present and want.claim.policy in holding
            ]
        return wants

    def _restore_leftovers(self, snapshot: Snapshot) -> None:
        """Put back what an earlier run wrote and nobody wants any more."""
        if not snapshot.complete:
            return
        self._executor.watch_handed()
        orphans = self._executor.orphans()
        if not orphans:
            return
        holding = _without_input(snapshot.engine)
        faulty = {
            (known.cgroup, fault.policy)
            for known in self._known.values()
            for fault in known.decision.faults
        }
        for record in orphans:
            if not _held(record, holding, faulty):
                self._executor.restore(record)

    @staticmethod
    def _pause() -> None:
        time.sleep(_PAUSE_S)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._turn()

    def _turn(self) -> None:
        """Wait for a reason and run one pass. A defect must not end repair for good."""
        try:
            reasons = self._wait()
            if not reasons or self._stopping:
                return
            report = self.run_once(*reasons)
            if report.deferred:
                threading.Timer(1.0, self.trigger, ("write budget",)).start()
            if self._on_pass is not None:
                self._on_pass(report)
        except Exception:
            # The next pass starts from what the kernel shows, so nothing is carried over.
            log.exception("a reconcile pass failed")
            self._stats = msgspec.structs.replace(
                self._stats, crashed_passes=self._stats.crashed_passes + 1
            )
            time.sleep(_DRAIN_S)

    def _wait(self) -> tuple[str, ...]:
        """Sleep until the timer, a trigger or a foreign write; return why it ended."""
        deadline = time.monotonic() + self.interval_s
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if self._inotify is not None:
            poll.register(self._inotify.fileno(), select.POLLIN)
        while not self._stopping:
            left = deadline - time.monotonic()
            if left <= 0:
                return (*self._take_reasons(), "timer")
            if not poll.poll(left * 1000):
                continue
            self._drain_wake()
            with self._lock:
                foreign = self._foreign_changes()
            if foreign:
                self._stats = msgspec.structs.replace(
                    self._stats, foreign_changes=self._stats.foreign_changes + foreign
                )
                self._reasons.append("outside change")
            if self._reasons:
                time.sleep(_DRAIN_S)
                self._drain_wake()
                return self._take_reasons()
        return ()

    def _take_reasons(self) -> tuple[str, ...]:
        reasons, self._reasons = self._reasons, []
        return tuple(dict.fromkeys(reasons))

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already
        except OSError as error:
            if error.errno != errno.EBADF:
                raise

    def _drain_wake(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    # -- outside changes -------------------------------------------------------------------------

    def _watch_directories(self, snapshot: Snapshot) -> None:
        """Watch the directories of all files that something is wanted for."""
        if not self._watch or self._watched_for is snapshot:
            return
        self._watched_for = snapshot
        if self._inotify is None:
            try:
                self._inotify = Inotify()
            except OSError as error:
                log.warning("no watch for outside changes, the timer finds them: %s", error)
                self._watch = False
                return
        wanted = {self._here(directory) for directory in self._executor.directories()}
        for path in self._inotify.watched():
            if path not in wanted:
                self._inotify.remove(path)
        for path in wanted:
            if not self._inotify.add(path, IN_MODIFY):
                continue

    def _foreign_changes(self, own: frozenset[str] = frozenset()) -> int:
        """Count the writes to managed files since the last call, except those to `own`."""
        if self._inotify is None:
            return 0
        events = self._inotify.events()
        if not events:
            return 0
        ours = {self._here(path) for path in own}
        managed = {self._here(path) for path in self._executor.paths()}
        # An event without a path: some were lost, so anything may have changed.
        return sum(
            not event.path or (event.path in managed and event.path not in ours) for event in events
        )


def _want(subject: Subject, resource: Resource, key: str, outcome: Outcome) -> Want:
    # Node-wide things have no cgroup: sysctls, control groups and directories are keyed.
    place = "" if resource in _OF_NODE else subject.cgroup
    return Want(
        subject=subject.key,
        place=place,
        resource=resource,
        key=key,
        value=outcome.value,
        claim=outcome.winner,
        requested=requested_value(subject, resource),
    )


_OF_NODE: Final = frozenset({Resource.SYSCTL, Resource.RESCTRL_SCHEMATA, Resource.HOST_DIRECTORY})


def requested_value(subject: Subject, resource: Resource) -> Value | None:
    """Return what kubelet asked for, canonical: a quota per 100 ms."""
    if not isinstance(subject, ContainerSubject | PodSubject):
        return None
    return asked_for(subject.requested, resource)


def asked_for(asked: Requested, resource: Resource) -> Value | None:
    """Return a request's value of one resource, canonical."""
    match resource:
        case Resource.CPU_SHARES:
            return asked.cpu_shares
        case Resource.CPU_CFS_QUOTA:
            quota, period = asked.cfs_quota_us, asked.cfs_period_us
            if quota is None or quota == UNLIMITED or not period or period == DEFAULT_PERIOD_US:
                return quota
            return quota * DEFAULT_PERIOD_US // period
        case Resource.MEMORY_LIMIT:
            return asked.memory_limit_bytes
        case Resource.CPUSET_CPUS:
            return asked.cpus or None
        case Resource.CPUSET_MEMS:
            return asked.mems or None
        case Resource.OOM_SCORE_ADJ:
            return asked.oom_score_adj
        case _:
            return None


def _without_input(engine: Engine) -> set[str]:
    """Return the policies that are off because their input is bad: what they did stays."""
    return {
        state.policy.name
        for state in engine.states
        if state.off is not None and state.off.because is OffBecause.BAD_INPUT
    }


def _held(record: Record, holding: set[str], faulty: set[tuple[str, str]]) -> bool:
    return record.policy in holding or (record.place, record.policy) in faulty


def _sum(one: WriteReport, other: WriteReport) -> WriteReport:
    return WriteReport(
        written=one.written + other.written,
        failed=one.failed + other.failed,
        deferred=one.deferred + other.deferred,
        restored=one.restored + other.restored,
    )


def plan_for(
    executor: Executor, snapshot: Snapshot, guard: Guard | None = None
) -> list[PlannedWrite]:
    """Return what a pass over `snapshot` would write, through a fresh executor; writes nothing.

    `executor` must be one of its own, with a journal from `Journal.copy_in_memory`.
    """
    for subject in snapshot.subjects:
        decision = snapshot.engine.decide(subject, guard)
        executor.want(
            subject.key,
            [
                _want(subject, resource, key, outcome)
                for (resource, key), outcome in decision.outcomes.items()
                if resource not in AT_CREATION_ONLY
            ],
        )
    if snapshot.complete:
        executor.watch_handed()
        for record in executor.orphans():
            executor.restore(record)
    return executor.plan().writes
