"""Keeps the executor's desired values up to date with the decisions for every subject.

A decision is kept as long as the subject is the same, and the engine too or all that it would claim
there. Standing claims are composed into kept decisions, so strategies that change their claims
every second cost no policy's work. The desired values of a subject are dropped when it has left for
good. Values that an earlier run wrote are restored when no subject has a claim on them. Values of a
policy stay while its input is bad.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from hooks.decision import Decision, Outcome
from hooks.engine import Decide, Engine, decide
from hooks.policy import OffBecause
from hooks.requested import requested_value
from hooks.standing import NOTHING_STANDS, Claims, Standing, differing, same_effect, under
from hooks.subject import (
    ContainerSubject,
    Level,
    Pod,
    PodSubject,
    QosSubject,
    SandboxSubject,
    Subject,
)
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.records import Record
from koordlet.executor.slots import PlannedWrite, Want
from koordlet.state.snapshot import Snapshot
from linux.resources import Resource

AT_CREATION_ONLY: Final = frozenset({Resource.ENV, Resource.MOUNT, Resource.DEVICE})
"""Resources that only the runtime can set, at a container's creation."""
_OF_NODE: Final = frozenset(
    {
        Resource.SYSCTL,
        Resource.KERNEL_SETTING,
        Resource.RESCTRL_SCHEMATA,
        Resource.HOST_DIRECTORY,
    }
)
_ABSENT_PASSES: Final = 2
"""Passes without a subject before its values are restored. Its cgroup, if it is to be removed, is
gone by then as a rule. Twice the value delays the restore of what stays by that many passes."""
_DELIVERY_PATIENCE_S: Final = 600.0
"""How long the deliveries of a container without a group are kept. Chosen: runtimes create the
group within seconds of the reply, on a loaded disk within minutes. Twice the value keeps the
deliveries of failed creations that much longer."""


class Known:
    """A subject as of the last pass, with its decision.

    plain: the decision from the policies' claims alone. claims: the standing claims beside them.
    """

    __slots__ = ("_decision", "cgroup", "claims", "engine", "plain", "subject")

    def __init__(self, subject: Subject, engine: Engine, plain: Decision, claims: Claims) -> None:
        self.subject = subject
        self.engine = engine
        self.plain = plain
        self.cgroup = subject.cgroup
        self.renew(claims)

    def renew(self, claims: Claims) -> None:
        """Take other standing claims, which may differ in their reasons alone."""
        self.claims = claims
        self._decision: Decision | None = None

    @property
    def decision(self) -> Decision:
        """The decision from all claims."""
        if self._decision is None:
            self._decision = under(self.plain, self.claims, self.subject)
        return self._decision


class Valid(NamedTuple):
    """Which decisions hold for the engine in force.

    engine: the one in force. former: that of the pass before; None: its decisions do not hold.
    levels: those at which both claim the same.
    """

    engine: Engine | None
    former: Engine | None = None
    levels: frozenset[Level] = frozenset()

    def holds(self, known: Known) -> bool:
        """Return whether the engine would decide the same about the subject, unless it changed.

        A decision with a fault is made again: what failed may succeed now.
        """
        if known.engine is self.engine:
            return True
        same = known.engine is self.former and known.subject.level in self.levels
        return same and not known.plain.faults


class PodsUpdate(NamedTuple):
    """The result of an update of some pods. subjects: keys of the subjects that exist."""

    decided: int
    faults: int
    subjects: list[str]


class Restood(NamedTuple):
    """The result of a change of the standing claims.

    changed: keys of the subjects whose desired values may be others now. around: these and the
    subjects that the kernel's rules tie to them: all of a pod's, and of a QoS directory's pods.
    """

    changed: Sequence[str]
    around: Collection[str]


class Wishes:
    """See the module. Guarded by the reconciler's lock.

    decide: decides about one subject. step_aside: called for each subject.
    """

    def __init__(
        self,
        executor: Executor,
        journal: Journal,
        *,
        decide: Decide,
        step_aside: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._journal = journal
        self._decide = decide
        self._step_aside = step_aside
        self.known: dict[str, Known] = {}
        """By the subject's key, in the order of the snapshot."""
        self.engine: Engine | None = None
        """The engine of the latest decisions."""
        self.standing: Standing = NOTHING_STANDS
        """The standing claims of the next decisions; `restand` brings the known ones up to them."""
        self._followed: Standing = NOTHING_STANDS
        """The standing claims that the desired values of all subjects follow."""
        self._valid = Valid(None)
        self._held: set[str] = set()
        """Policies of that engine that are off because their input is bad."""
        self._of_pod: dict[str, list[str]] = {}
        """The keys of a pod's subjects, by its uid."""
        self._absent: dict[str, int] = {}
        self._delivered_at: dict[str, float] = {}

    def update(self, snapshot: Snapshot) -> tuple[int, int]:
        """Set the desired values of all subjects; return (decisions made, faults in them)."""
        engine = snapshot.engine
        self._begin(engine)
        known_before, self.known = self.known, {}
        self._of_pod = {}
        decided = faults = 0
        fresh = self._awaited_deliveries(snapshot)
        for subject in snapshot.subjects:
            if fresh and isinstance(subject, ContainerSubject) and subject.id in fresh:
                self._executor.adopt_deliveries(subject.id, subject.cgroup)
            decided += self._update_one(subject, known_before.get(subject.key))
            faults += len(self.known[subject.key].plain.faults)
        self._valid = Valid(engine)  # all known ones are of this engine now
        self._followed = self.standing
        self._let_go(snapshot)
        return decided, faults

    def _begin(self, engine: Engine) -> None:
        """Decide with this engine from now on."""
        former, held = self.engine, self._held
        self.engine = engine
        self._held = _without_input(engine)
        if former is None or held != self._held:  # which values are held follows from both
            self._valid = Valid(engine)
        elif engine is not former:
            levels = frozenset(level for level in Level if engine.claims_as(former, level))
            self._valid = Valid(engine, former, levels)

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
                faults += len(self.known[subject.key].plain.faults)
                touched.append(subject.key)
            for key in before:
                # If its groups still exist, a later pass drops its values.
                self._executor.leave(key)
        return PodsUpdate(decided, faults, touched)

    def restand(self) -> Restood:
        """Set the desired values of the known subjects whose standing claims have changed."""
        if self._followed is self.standing:
            return Restood((), ())
        changed: list[str] = []
        around: set[str] = set()
        differ = differing(self._followed, self.standing)
        for key in self.known if differ is None else filter(differ.__contains__, self.known):
            known = self.known[key]
            claims = self.standing.of(known.subject)
            if claims is known.claims:
                continue
            same = same_effect(known.claims, claims)
            known.renew(claims)
            if not same:
                self._executor.want(key, self._wants(known.subject, known.decision, self._held))
                changed.append(key)
                around.update(self._tied_to(known.subject))
        self._followed = self.standing
        return Restood(changed, around)

    def _tied_to(self, subject: Subject) -> Iterable[str]:
        """Return the keys of a subject, of those whose values it bounds, and of those above it."""
        if isinstance(subject, QosSubject):
            below = (key for pod in subject.pods for key in self._of_pod.get(pod.uid, ()))
            return (subject.key, *below)
        pod = _pod_of(subject)
        if pod is None:
            return (subject.key,)
        # A directory's value may have been held back for the sake of this pod's.
        above = f"kubeqos/{pod.kube_qos}"
        return (above, *self._of_pod[pod.uid]) if above in self.known else self._of_pod[pod.uid]

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
                decision = self._decide(self.engine, subject, before.plain)
                if decision.outcomes != before.plain.outcomes:
                    return True
        return False

    def _update_one(self, subject: Subject, before: Known | None) -> bool:
        """Set the desired values of one subject; return whether it was decided again."""
        engine, key = self.engine, subject.key
        assert engine is not None
        self._step_aside()
        if (pod := _pod_of(subject)) is not None:
            self._of_pod.setdefault(pod.uid, []).append(key)
        claims = self.standing.of(subject)
        if (
            before is not None
            and self._valid.holds(before)
            and (before.subject is subject or before.subject == subject)
        ):
            self.known[key] = before
            before.engine = engine
            if claims is not before.claims:
                same = same_effect(before.claims, claims)
                before.renew(claims)
                if not same:
                    self._executor.want(key, self._wants(subject, before.decision, self._held))
            return False
        plain = self._decide(engine, subject, before.plain if before is not None else None)
        known = self.known[key] = Known(subject, engine, plain, claims)
        unchanged = (
            before is not None
            and not self._held
            and not plain.faults
            and not before.plain.faults
            and before.subject == subject
            and before.plain.outcomes == plain.outcomes
            and same_effect(before.claims, claims)
        )
        if not unchanged:  # else engine or subject object are new, and the values are the same
            self._executor.want(key, self._wants(subject, known.decision, self._held))
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
            for fault in known.plain.faults
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
    if isinstance(subject, (ContainerSubject, PodSubject, SandboxSubject)):
        return subject.pod
    return None


def plan_for(
    executor: Executor,
    snapshot: Snapshot,
    decide: Decide = decide,
    standing: Standing = NOTHING_STANDS,
) -> list[PlannedWrite]:
    """Return what a pass over `snapshot` would write, through a fresh executor; writes nothing.

    `executor` must be one of its own, with a journal from `Journal.copy_in_memory`.
    """
    for subject in snapshot.subjects:
        if isinstance(subject, ContainerSubject):
            executor.adopt_deliveries(subject.id, subject.cgroup)
        plain = decide(snapshot.engine, subject, None)
        decision = under(plain, standing.of(subject), subject)
        executor.want(subject.key, wants_of(subject, decision))
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
