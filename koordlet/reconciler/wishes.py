"""Keeps the executor's desired values up to date with the decisions for every subject.

A decision is kept as long as subject and engine are the same. The desired values of a subject are
dropped when it has left for good. Values that an earlier run wrote are restored when no subject has
a claim on them. Values of a policy stay while its input is bad.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from hooks.decision import Decision, Outcome
from hooks.engine import Decide, Engine, decide
from hooks.policy import OffBecause
from hooks.requested import requested_value
from hooks.subject import ContainerSubject, Pod, PodSubject, SandboxSubject, Subject
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.records import Record
from koordlet.executor.slots import PlannedWrite, Want
from koordlet.state.snapshot import Snapshot
from linux.resources import Resource

AT_CREATION_ONLY: Final = frozenset({Resource.ENV, Resource.MOUNT, Resource.DEVICE})
"""Resources that only the runtime can set, at a container's creation."""
_OF_NODE: Final = frozenset({Resource.SYSCTL, Resource.RESCTRL_SCHEMATA, Resource.HOST_DIRECTORY})
_ABSENT_PASSES: Final = 2
"""Passes without a subject before its values are restored. Its cgroup, if it is to be removed, is
gone by then as a rule. Twice the value delays the restore of what stays by that many passes."""
_DELIVERY_PATIENCE_S: Final = 600.0
"""How long the deliveries of a container without a group are kept. Chosen: runtimes create the
group within seconds of the reply, on a loaded disk within minutes. Twice the value keeps the
deliveries of failed creations that much longer."""
_SLICE: Final = 64
"""Subjects that are decided between two pauses. Chosen: few enough that a hook which waits for the
interpreter does not wait for the whole pass. Twice the value doubles that wait."""


class Known:
    """A subject as of the last pass, with its decision."""

    __slots__ = ("cgroup", "decision", "engine", "subject")

    def __init__(self, subject: Subject, engine: Engine, decision: Decision) -> None:
        self.subject = subject
        self.engine = engine
        self.decision = decision
        self.cgroup = subject.cgroup


class PodsUpdate(NamedTuple):
    """The result of an update of some pods. subjects: keys of the subjects that exist."""

    decided: int
    faults: int
    subjects: list[str]


class Wishes:
    """See the module. Guarded by the reconciler's lock.

    decide: decides about one subject.
    """

    def __init__(self, executor: Executor, journal: Journal, *, decide: Decide) -> None:
        self._executor = executor
        self._journal = journal
        self._decide = decide
        self.known: dict[str, Known] = {}
        """By the subject's key, in the order of the snapshot."""
        self.engine: Engine | None = None
        """The engine of the latest decisions."""
        self._held: set[str] = set()
        """Policies of that engine that are off because their input is bad."""
        self._of_pod: dict[str, list[str]] = {}
        """The keys of a pod's subjects, by its uid."""
        self._absent: dict[str, int] = {}
        self._delivered_at: dict[str, float] = {}

    def update(
        self,
        snapshot: Snapshot,
        pause: Callable[[], None] | None,
    ) -> tuple[int, int]:
        """Set the desired values of all subjects; return (decisions made, faults in them)."""
        engine = snapshot.engine
        self.engine = engine
        self._held = _without_input(engine)
        known_before, self.known = self.known, {}
        self._of_pod = {}
        decided = faults = 0
        fresh = self._awaited_deliveries(snapshot)
        for index, subject in enumerate(snapshot.subjects):
            if pause is not None and index % _SLICE == _SLICE - 1:
                pause()
            if fresh and isinstance(subject, ContainerSubject) and subject.id in fresh:
                self._executor.adopt_deliveries(subject.id, subject.cgroup)
            decided += self._update_one(subject, known_before.get(subject.key))
            faults += len(self.known[subject.key].decision.faults)
        self._let_go(snapshot)
        return decided, faults

    def update_pods(self, pods: Mapping[str, Sequence[Subject]]) -> PodsUpdate:
        """Set the desired values of some pods, with the engine of the last update.

        pods: by uid; no subjects: the pod has ended.
        """
        assert self.engine is not None
        decided = faults = 0
        touched: list[str] = []
        for uid, subjects in pods.items():
            before = {key: self.known.pop(key) for key in self._of_pod.pop(uid, ())}
            for subject in subjects:
                if isinstance(subject, ContainerSubject) and self._journal.deliveries(subject.id):
                    self._executor.adopt_deliveries(subject.id, subject.cgroup)
                decided += self._update_one(subject, before.pop(subject.key, None))
                faults += len(self.known[subject.key].decision.faults)
                touched.append(subject.key)
            for key in before:
                # If its groups still exist, a later pass drops its values.
                self._executor.leave(key)
        return PodsUpdate(decided, faults, touched)

    def beside(self, subject_key: str) -> Sequence[str]:
        """Return the keys of all subjects of a known subject's pod; () for one without a pod."""
        known = self.known.get(subject_key)
        pod = _pod_of(known.subject) if known is not None else None
        return () if pod is None else self._of_pod[pod.uid]

    def differs(self, subjects: Iterable[Subject]) -> bool:
        """Return whether these subjects have other desired values than at the last update."""
        assert self.engine is not None
        for subject in subjects:
            before = self.known.get(subject.key)
            if before is None:
                return True
            if before.subject is not subject:
                decision = self._decide(self.engine, subject, before.decision)
                if decision.outcomes != before.decision.outcomes:
                    return True
        return False

    def _update_one(self, subject: Subject, before: Known | None) -> bool:
        """Set the desired values of one subject; return whether it was decided again."""
        engine, key = self.engine, subject.key
        assert engine is not None
        if (pod := _pod_of(subject)) is not None:
            self._of_pod.setdefault(pod.uid, []).append(key)
        if (
            before is not None
            and before.engine is engine
            and (before.subject is subject or before.subject == subject)
        ):
            self.known[key] = before
            return False
        decision = self._decide(engine, subject, before.decision if before is not None else None)
        self.known[key] = Known(subject, engine, decision)
        unchanged = (
            before is not None
            and not self._held
            and not decision.faults
            and not before.decision.faults
            and before.subject == subject
            and before.decision.outcomes == decision.outcomes
        )
        if not unchanged:  # else engine or subject object are new, and the values are the same
            self._executor.want(key, self._wants(subject, decision, self._held))
        return True

    def nothing(self) -> None:
        """Drop the desired values of all subjects."""
        for subject in self._executor.subjects():
            self._executor.want(subject, ())
        self.known.clear()

    def restore_leftovers(self, snapshot: Snapshot) -> None:
        """Restore values that an earlier run wrote and that no subject has a claim on now."""
        if not snapshot.complete:
            return
        self._executor.watch_runtime_values()
        orphans = self._executor.orphans()
        if not orphans:
            return
        holding = _without_input(snapshot.engine)
        faulty = {
            (known.cgroup, fault.policy)
            for known in self.known.values()
            for fault in known.decision.faults
        }
        for record in orphans:
            if not _held(record, holding, faulty):
                self._executor.restore(record)

    def _awaited_deliveries(self, snapshot: Snapshot) -> set[str]:
        """Return the containers whose deliveries have not been looked for in their groups yet.

        A container whose creation failed, or that ended before a pass, is forgotten after a while.
        """
        awaited = set(self._journal.containers_with_deliveries())
        now = time.monotonic()
        self._delivered_at = {one: self._delivered_at.get(one, now) for one in awaited}
        if snapshot.complete:
            for one, at in self._delivered_at.items():
                if now - at > _DELIVERY_PATIENCE_S:
                    awaited.discard(one)
                    with contextlib.suppress(JournalError):  # the next append writes it
                        self._journal.forget_deliveries(one)
        return awaited

    def _wants(self, subject: Subject, decision: Decision, held: set[str]) -> list[Want]:
        wants = wants_of(subject, decision)
        # While input is bad, the last good value stays in force.
        holding = {fault.policy for fault in decision.faults} | held
        if holding:
            present = {want.slot_key for want in wants}
            wants += [
                want
                for slot_key, want in self._executor.wanted(subject.key).items()
                if slot_key not in present and want.claim.policy in holding
            ]
        return wants

    def _let_go(self, snapshot: Snapshot) -> None:
        """Drop the desired values of subjects that left."""
        for key in self._executor.subjects():
            if key in self.known:
                self._absent.pop(key, None)
            elif snapshot.complete:
                if self._executor.leave(key):
                    self._absent.pop(key, None)
                    continue
                # The cgroup of a subject that left is removed too, as a rule a moment later.
                passes = self._absent.get(key, 0) + 1
                self._absent[key] = passes
                if passes >= _ABSENT_PASSES:
                    self._absent.pop(key)
                    self._executor.want(key, ())


def _pod_of(subject: Subject) -> Pod | None:
    if isinstance(subject, ContainerSubject | PodSubject | SandboxSubject):
        return subject.pod
    return None


def plan_for(executor: Executor, snapshot: Snapshot, decide: Decide = decide) -> list[PlannedWrite]:
    """Return what a pass over `snapshot` would write, through a fresh executor; writes nothing.

    `executor` must be one of its own, with a journal from `Journal.copy_in_memory`.
    """
    for subject in snapshot.subjects:
        if isinstance(subject, ContainerSubject):
            executor.adopt_deliveries(subject.id, subject.cgroup)
        executor.want(subject.key, wants_of(subject, decide(snapshot.engine, subject, None)))
    if snapshot.complete:
        executor.watch_runtime_values()
        for record in executor.orphans():
            executor.restore(record)
    return executor.plan().writes


def wants_of(subject: Subject, decision: Decision) -> list[Want]:
    """Return the desired kernel values of a decision."""
    return [
        _want(subject, resource, key, outcome)
        for (resource, key), outcome in decision.outcomes.items()
        if resource not in AT_CREATION_ONLY
    ]


def _want(subject: Subject, resource: Resource, key: str, outcome: Outcome) -> Want:
    # Sysctls, control groups and directories belong to the node and have a key, not a cgroup.
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


def _without_input(engine: Engine) -> set[str]:
    """Return the policies that are off because their input is bad: their values stay."""
    return {
        state.policy.name
        for state in engine.states
        if state.off is not None and state.off.because is OffBecause.BAD_INPUT
    }


def _held(record: Record, holding: set[str], faulty: set[tuple[str, str]]) -> bool:
    return record.policy in holding or (record.place, record.policy) in faulty
