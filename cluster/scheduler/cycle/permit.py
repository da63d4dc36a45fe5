"""Gangs over the scheduling queue: which members wait on a node, are bound, or give it back.

Members of a gang are tried one after another, each in its own cycle; other pods may be tried in
between, and any number of gangs is under way at a time. A member that finds a node keeps it and
waits. When every gang of the group has enough, all that wait are allowed to bind. When a member
finds none, a Strict group gives all nodes back at once, and is held up until a change may help that
member. A group also gives its nodes back when no member is left to be tried, and when it is not
complete any more. A wait has a time limit.

All pods take this way through the queue; a pod without a gang is allowed as soon as it has a node.
No I/O and no clock: `now` is in seconds, as for the queue. docs/facts/scheduler.md, "Gangs".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from apis.keys import (
    ANNOTATION_BIND_GANG_GROUP_ID,
    ANNOTATION_BIND_GANG_GROUP_ID_OLD,
    ANNOTATION_BIND_GANG_MEMBER_COUNT,
    ANNOTATION_BIND_GANG_MEMBER_COUNT_OLD,
)
from cluster.scheduler.cycle.ordered import Ordered, OrderedItem
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.waiting import Gate
from cluster.scheduler.tables.gang_definitions import GangDefinition, GangMode
from cluster.scheduler.tables.gangs import Gang, Gangs, Step
from cluster.scheduler.tables.gather import Gather
from cluster.scheduler.tables.pending import PendingPod, Shape

S = TypeVar("S", bound=Shape)

COSCHEDULING: Final = "Coscheduling"

_NOTHING: Final[Mapping[str, str | None]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from an input; the queue and the gangs have been changed already.

    allow: UIDs of pods to bind now, with `annotations` on each (None removes one).
    give_back: UIDs of pods whose bookings have to be removed from the tables. held_up: UIDs of
    members that wait with one that was refused or had an error. message: why, for conditions and
    events of the last two; it is the same for all. undoes, gangs: for the cluster event about each
    booking that is removed, see ClusterEvent.
    """

    allow: tuple[str, ...] = ()
    annotations: Mapping[str, str | None] = field(default_factory=lambda: _NOTHING)
    give_back: tuple[str, ...] = ()
    held_up: tuple[str, ...] = ()
    message: str = ""
    undoes: int = 0
    gangs: tuple[str, ...] = ()


def gang_gate(gangs: Gangs) -> Gate[Any]:
    """Return the gate that keeps members out of the queue until their group is complete."""

    def test(pod: PendingPod[Any]) -> str | None:
        return gangs.why_closed(pod.gang) if pod.gang else None

    return Gate(COSCHEDULING, test)


@dataclass(frozen=True, slots=True)
class Wanted(Generic[S]):
    """What has to be placed at one time so that the members of a gang are bound.

    gang: its id. least: pods. pods: those that are there to be placed. gather: how they are to be
    gathered in the network, or None. strict: one that finds no node has all give theirs back.
    gated: how many others are left out because of their scheduling gates.
    """

    gang: str
    least: int
    pods: tuple[PendingPod[S], ...]
    gather: Gather | None = None
    strict: bool = True
    gated: int = 0


class _Wait(OrderedItem):
    """The wait of a member that has a node."""

    __slots__ = ("uid",)

    def __init__(self, uid: str) -> None:
        super().__init__()
        self.uid = uid


Decisions = tuple[Decision, ...]
"""One for each group of gangs that an input concerns; mostly one or none."""


class Permit(Generic[S]):
    """Every pod from the queue to its binding."""

    def __init__(self, queue: SchedulingQueue[S], gangs: Gangs) -> None:
        """queue: with `gang_gate(gangs)` among its gates. gangs: changed by this object alone."""
        self._queue = queue
        self._gangs = gangs
        self._deadlines: Ordered[_Wait] = Ordered()
        self._waits: dict[str, _Wait] = {}
        self._keys: dict[str, str] = {}
        """UID -> namespace/name of members that are not bound, for messages."""
        self._edits = 0
        """Grows when a pod of the queue is not what it was."""
        self._last_wanted: tuple[object, tuple[Wanted[S], ...]] = None, ()
        """As of what, and what `wanted` returned then: members are tried in a row."""

    # --- pods and PodGroups come, change and go ------------------------------------------------

    def add(
        self, pod: PendingPod[S], now: float, *, defines: GangDefinition | None = None
    ) -> Decisions:
        """Take over a pod without a node, or a change of one.

        defines: the definition in its annotations. A pod that waits on a node or is being bound
        keeps it, unless it changed its gang.
        """
        before = self._gangs.of(pod.uid)
        self._edits += self._queue.pod(pod.uid) != pod
        decisions: Decisions = ()
        step = Step.PENDING
        if before is not None and before.id == pod.gang:
            step = self._gangs.step(pod.uid) or Step.PENDING
        elif before is not None:
            decisions = self._leave(pod, before, now)
        if not pod.gang:
            self._queue.add(pod, now)
            return decisions
        joined = self._gangs.get(pod.gang)
        was_complete = joined is not None and joined.complete
        gang = self._gangs.join(pod.uid, pod.gang, step, defines)
        self._keys[pod.uid] = pod.key
        if gang.complete and not was_complete:
            self._activate(self._gangs.naming(gang), now)
        self._queue.add(pod, now)
        return decisions

    def bound(
        self,
        uid: str,
        now: float,
        *,
        gang: str | None = None,
        defines: GangDefinition | None = None,
    ) -> Decisions:
        """Record a pod that is bound and has not terminated, as just written or as seen.

        gang: the id of its gang as seen ("" for none), with the definition in its annotations; None
        keeps the gang that is known.
        """
        known = self._gangs.of(uid)
        self._queue.remove(uid)
        self._end_wait(uid)
        self._keys.pop(uid, None)
        if gang is None:
            gang = "" if known is None else known.id
        decisions: Decisions = ()
        if known is not None:
            self._queue.release(uid, known.group, now)
        if known is not None and known.id != gang:
            self._gangs.leave(uid)
            decisions = self._settle(known, now)
        if not gang:
            return decisions
        joined = self._gangs.join(uid, gang, Step.BOUND, defines)
        if self._gangs.satisfied_once(joined):
            self._activate(self._gangs.peers(joined), now)
        return decisions + self._settle(joined, now)

    def gone(self, uid: str, now: float) -> Decisions:
        """Forget a pod that was deleted or that terminated."""
        gang = self._gangs.of(uid)
        self._queue.remove(uid)
        self._end_wait(uid)
        self._keys.pop(uid, None)
        if gang is None:
            return ()
        self._queue.release(uid, gang.group, now)
        self._gangs.leave(uid)
        return self._settle(gang, now)

    def define(self, definition: GangDefinition, now: float) -> Decisions:
        """Take over a PodGroup, new or changed."""
        known = self._gangs.get(definition.id)
        if known is not None and known.by_pod_group and known.definition == definition:
            return ()
        gang = self._gangs.define(definition)
        self._activate(self._gangs.naming(gang), now)
        return self._settle(gang, now)

    def undefine(self, gang_id: str, now: float) -> Decisions:
        """Forget a PodGroup that was deleted or is not valid any more."""
        gang = self._gangs.get(gang_id)
        if gang is None or not gang.by_pod_group:
            return ()
        self._gangs.undefine(gang_id)
        return self._settle(gang, now)

    # --- attempts ------------------------------------------------------------------------------

    def pop(self, now: float) -> PendingPod[S] | None:
        """Return the pod to try next, as the queue does."""
        pod = self._queue.pop(now)
        if pod is not None and pod.gang:
            self._gangs.move(pod.uid, Step.TRIED)
        return pod

    def wanted(self, uid: str) -> tuple[Wanted[S], ...]:
        """Return what a member's group needs room for, when it is the first that is tried.

        Nothing while members wait on nodes, for pods without a gang, and for groups whose members
        need not wait for each other any more, unless they are to be gathered. The same objects are
        returned again for a group of which nothing changed since the last call, where it needs room
        for more than one pod.
        """
        gang = self._gangs.of(uid)
        if gang is None or gang.definition is None:
            return ()
        if self._gangs.may_skip_group(gang) and gang.definition.gather is None:
            return ()
        peers = tuple(self._gangs.peers(gang))
        if any(other.members[Step.WAITING] for other in peers):
            return ()
        defined = tuple(other for other in peers if other.definition is not None)
        as_of = self._gangs.version, self._edits, tuple(other.id for other in defined)
        if self._last_wanted[0] != as_of:
            found = tuple(map(self._wanted, defined))
            if sum(each.least for each in found) <= 1:
                # It matters then which of the pods comes first.
                return found
            self._last_wanted = as_of, found
        return self._last_wanted[1]

    def unbound(self, uid: str) -> tuple[Wanted[S], ...]:
        """Return what the group of a member needs room for, as if none of its members waited.

        Without members that have scheduling gates: they are not tried, and take no room.
        """
        gang = self._gangs.of(uid)
        if gang is None:
            return ()
        wanted = (
            self._wanted(other, Step.WAITING)
            for other in self._gangs.peers(gang)
            if other.definition is not None
        )
        return tuple(map(_without_gates, wanted))

    def group(self, uid: str) -> frozenset[str]:
        """Return the ids of the gangs that are bound together with the gang of a member."""
        gang = self._gangs.of(uid)
        return frozenset() if gang is None else frozenset(g.id for g in self._gangs.peers(gang))

    def needs_others(self, uid: str) -> bool:
        """Return whether a pod is bound only if other members of its group get nodes as well."""
        gang = self._gangs.of(uid)
        if gang is None or self._gangs.may_skip_group(gang):
            return False
        peers = (other for other in self._gangs.peers(gang) if other.definition is not None)
        return sum(self._least(other, Step.WAITING) for other in peers) > 1

    def _least(self, gang: Gang, *steps: Step) -> int:
        """Return how many nodes a gang needs, as if its members at `steps` had none."""
        return self._gangs.missing(gang) + (gang.count(*steps) if steps else 0)

    def _wanted(self, gang: Gang, *steps: Step) -> Wanted[S]:
        """Return what a gang needs room for. steps: of members that count beside the untried."""
        uids = self._gangs.members((gang,), Step.TRIED, Step.PENDING, *steps)
        least = self._least(gang, *steps)
        pods = tuple(pod for uid in uids if (pod := self._queue.pod(uid)) is not None)
        gather = None if gang.definition is None else gang.definition.gather
        return Wanted(gang.id, least, pods, gather, self._strict(gang))

    def placed(self, uid: str, now: float) -> Decisions:
        """Decide about a pod that has a node: it is allowed, waits, or gives the node back.

        It waits when it is in none of the lists of the decisions.
        """
        gang = self._gangs.of(uid)
        if gang is None:
            return (Decision(allow=(uid,), annotations=_ALONE),)
        self._gangs.move(uid, Step.WAITING)
        wait = self._waits[uid] = _Wait(uid)
        wait_s = 0.0 if gang.definition is None else gang.definition.wait_s
        self._deadlines.push((now + wait_s,), wait)
        return self._settle(gang, now)

    def refused(self, uid: str, plugins: Collection[str], reason: str, now: float) -> Decisions:
        """Take back a pod that no node can take. reason: what its condition says."""
        gang = self._gangs.of(uid)
        if gang is None:
            self._queue.refuse(uid, plugins, now)
            return ()
        self._gangs.move(uid, Step.PENDING)
        if not self._strict(gang):
            self._queue.refuse(uid, plugins, now)
            return self._settle(gang, now)
        group = tuple(self._gangs.peers(gang))
        waiting = self._gangs.members(group, Step.WAITING)
        others = tuple(u for u in self._gangs.members(group, Step.PENDING) if u != uid)
        undoes = self._step_back(waiting)
        self._queue.refuse_gangs(uid, plugins, [other.id for other in group], waiting, now)
        decision = Decision(
            give_back=waiting,
            held_up=others,
            message=(
                f'GangGroup "{",".join(gang.group)}" gets rejected due to member Pod'
                f' "{self._keys.get(uid, uid)}" is unschedulable with reason "{reason}",'
                f" alreadyWaitForBound: {len(waiting)}"
            ),
            undoes=undoes,
            gangs=tuple(other.id for other in group),
        )
        settled = self._settle(gang, now)
        return (decision, *settled) if waiting or others else settled

    def refused_alone(self, uid: str, plugins: Collection[str], now: float) -> Decisions:
        """Take back a pod for which preemption made room on a node; others are not affected."""
        self._gangs.move(uid, Step.PENDING)
        self._queue.refuse_alone(uid, plugins, now)
        gang = self._gangs.of(uid)
        return () if gang is None else self._settle(gang, now)

    def failed(self, uid: str, error: str, now: float) -> Decisions:
        """Take back a pod whose cycle or binding ended with an error; it is tried again later."""
        gang = self._gangs.of(uid)
        self._end_wait(uid)
        self._gangs.move(uid, Step.PENDING)
        if gang is None or not self._strict(gang):
            self._queue.fail(uid, now)
            return ()
        message = (
            f'GangGroup "{",".join(gang.group)}" gets rejected due to member Pod'
            f' "{self._keys.get(uid, uid)}" failed: {error}'
        )
        group = tuple(self._gangs.peers(gang))
        ids = tuple(other.id for other in group)
        waiting = self._gangs.members(group, Step.WAITING)
        undoes = self._step_back(waiting)
        held_up = self._queue.fail_gangs(uid, ids, waiting, now)
        if not waiting and not held_up:
            return ()
        return (
            Decision(give_back=waiting, held_up=held_up, message=message, undoes=undoes, gangs=ids),
        )

    def put_off(self, uid: str, now: float) -> None:
        """Have a refused pod back off as after an error, a Strict group as a whole.

        Preemption made no room for it, because a victim stays.
        """
        gang = self._gangs.of(uid)
        group = () if gang is None or not self._strict(gang) else self._gangs.peers(gang)
        self._queue.put_off(uid, [other.id for other in group], now)

    # --- time ----------------------------------------------------------------------------------

    def expire(self, now: float) -> Decisions:
        """End the waits whose time is over. A Strict group ends with its first member."""
        decisions: Decisions = ()
        while (first := self._deadlines.first()) is not None and first[0][0] <= now:
            uid = first[1].uid
            gang = self._gangs.of(uid)
            if gang is None:
                self._end_wait(uid)
                continue
            group = self._gangs.peers(gang)
            uids = self._gangs.members(group, Step.WAITING) if self._strict(gang) else (uid,)
            message = (
                f"Pod {self._keys.get(uid, uid)} waited until its time limit for the other pods"
                f" of gang {gang.id}"
            )
            decisions += self._give_back(gang, uids, message, now)
        return decisions

    def next_time(self) -> float | None:
        """Return when `expire` has something to do."""
        first = self._deadlines.first()
        return None if first is None else float(first[0][0])

    def waiting_groups(self) -> int:
        """Return how many groups have members that wait, for waiting_gang_group_number."""
        return len({gang.group for gang in self._gangs if gang.members[Step.WAITING]})

    # --- what follows --------------------------------------------------------------------------

    def _strict(self, gang: Gang) -> bool:
        """Return whether members give their nodes back because of one that has none."""
        definition = gang.definition
        strict = definition is None or definition.mode is GangMode.STRICT
        return strict and not self._gangs.may_skip_group(gang)

    def _settle(self, gang: Gang, now: float) -> Decisions:
        """Decide about the group of a gang that changed, and about the groups that name it."""
        groups = {gang.group: gang}
        for other in self._gangs.naming(gang):
            groups.setdefault(other.group, other)
        decisions: Decisions = ()
        for one in groups.values():
            if self._gangs.satisfied(one):
                decisions += self._allow(one)
            elif self._gangs.why_closed(one.id) is not None or self._round_is_over(one):
                group = self._gangs.peers(one)
                waiting = self._gangs.members(group, Step.WAITING)
                decisions += self._give_back(one, waiting, self._short_of(one), now)
        return decisions

    def _round_is_over(self, gang: Gang) -> bool:
        """Return whether no member of the group is left to be tried.

        Those that wait would then keep other pods from their nodes for nothing.
        """
        group = tuple(self._gangs.group(gang))
        return not any(other.members[Step.TRIED] for other in group) and not self._queue.untried(
            other.id for other in group
        )

    def _short_of(self, gang: Gang) -> str:
        closed = self._gangs.why_closed(gang.id)
        if closed is None:
            closed = "every member was tried, and too few have a node"
        return f'GangGroup "{",".join(gang.group)}" gets rejected: {closed}'

    def _allow(self, gang: Gang) -> Decisions:
        """Allow the members of the group that wait."""
        group = tuple(self._gangs.peers(gang))
        waiting = self._gangs.members(group, Step.WAITING)
        if not waiting:
            return ()
        count = sum(other.count(Step.WAITING, Step.BINDING) for other in group)
        for uid in waiting:
            self._end_wait(uid)
            self._gangs.move(uid, Step.BINDING)
        return (Decision(allow=waiting, annotations=bind_annotations(",".join(gang.group), count)),)

    def _give_back(
        self, gang: Gang, waiting: tuple[str, ...], message: str, now: float
    ) -> Decisions:
        if not waiting:
            return ()
        undoes = self._step_back(waiting)
        self._queue.return_waiting(waiting, [other.id for other in self._gangs.group(gang)], now)
        peers = tuple(other.id for other in self._gangs.peers(gang))
        return (Decision(give_back=waiting, message=message, undoes=undoes, gangs=peers),)

    def _step_back(self, waiting: tuple[str, ...]) -> int:
        """Make waiting members pending. Returns the order of the first of their attempts."""
        first = min((self._queue.order(uid) for uid in waiting), default=0)
        for uid in waiting:
            self._end_wait(uid)
            self._gangs.move(uid, Step.PENDING)
        return first

    def _end_wait(self, uid: str) -> None:
        wait = self._waits.pop(uid, None)
        if wait is not None:
            self._deadlines.remove(wait)

    def _activate(self, gangs: Iterable[Gang], now: float) -> None:
        """Make the pending members of those gangs active whose groups are complete."""
        for gang in tuple(gangs):
            if self._gangs.why_closed(gang.id) is None:
                self._queue.activate(tuple(gang.members[Step.PENDING]), now)

    def _leave(self, pod: PendingPod[S], gang: Gang, now: float) -> Decisions:
        """End the membership of a pod that names another gang now, or none."""
        waited = self._gangs.step(pod.uid) is Step.WAITING
        decisions: Decisions = ()
        if waited:
            # It waited for members that it does not belong to any more.
            message = f"Pod {pod.key} left gang {gang.id}"
            decisions = self._give_back(gang, (pod.uid,), message, now)
        self._keys.pop(pod.uid, None)
        self._queue.release(pod.uid, gang.group, now)
        self._gangs.leave(pod.uid)
        return decisions + self._settle(gang, now)


def _without_gates(wanted: Wanted[S]) -> Wanted[S]:
    pods = tuple(pod for pod in wanted.pods if not pod.shape.gates)
    return replace(wanted, pods=pods, gated=len(wanted.pods) - len(pods))


def bind_annotations(group_id: str, count: int) -> Mapping[str, str | None]:
    """Return what is written with the binding of a pod.

    count: members of the group that are bound together. One pod alone is none: the annotations are
    removed, because they may be those of a pod that it was copied from.
    """
    together = count > 1
    group = group_id if together else None
    number = str(count) if together else None
    return {
        ANNOTATION_BIND_GANG_GROUP_ID: group,
        ANNOTATION_BIND_GANG_MEMBER_COUNT: number,
        ANNOTATION_BIND_GANG_GROUP_ID_OLD: group,
        ANNOTATION_BIND_GANG_MEMBER_COUNT_OLD: number,
    }


_ALONE: Final = bind_annotations("", 1)
