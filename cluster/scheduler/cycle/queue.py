"""The scheduling queue: which pod is tried next, and when a refused pod is tried again.

A pod has one state: active, backing off, unschedulable, gated, or in flight. Active pods leave by
priority, then by time. Pods of one shape that were refused wait together (`Held`): what plugins
look at is the same, so one of them is tried for all, and a change of the cluster costs the same for
ten thousand of them as for one. When that one is placed, the next follows; when it is refused, all
wait again. Differences from kube-scheduler, which keeps and retries each pod on its own:
docs/facts/scheduler.md, "The queue". The pods by state: `waiting_pods`; what has refused pods
tried again: `waking`.

No I/O, no clock: `now` is in seconds on a clock that never jumps and begins about 1970, so that it
compares with the times at which pods were created.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from cluster.scheduler.cycle.events import ClusterEvent, EventTable
from cluster.scheduler.cycle.in_flight import InFlight
from cluster.scheduler.cycle.waiting import (
    ACTIVATED,
    ATTEMPT_FAILED,
    GATE_OPENED,
    POD_ADDED,
    POD_EDITED,
    POD_GONE,
    TRIED_EARLY,
    Backoff,
    Entry,
    Gate,
    Gated,
    Held,
    QueueState,
)
from cluster.scheduler.cycle.waiting_pods import WaitingPods
from cluster.scheduler.cycle.waking import LONGEST_UNSCHEDULABLE_S, Waking
from cluster.scheduler.tables.pending import PendingPod, Shape

S = TypeVar("S", bound=Shape)


class SchedulingQueue(Generic[S]):
    """All pods that wait for a node."""

    def __init__(
        self,
        events: EventTable,
        *,
        gates: Sequence[Gate[S]] = (),
        backoff: Backoff | None = None,
        longest_unschedulable_s: float = LONGEST_UNSCHEDULABLE_S,
    ) -> None:
        self._events = events
        self._gates = tuple(gates)
        self._backoff = backoff or Backoff()
        self._entries: dict[str, Entry[S]] = {}
        self._waiting: WaitingPods[S] = WaitingPods()
        self.incoming = self._waiting.incoming
        """How many pods came to a state: see WaitingPods."""
        self.changes = 0
        """How many changes of the cluster came that may help pods."""
        self._in_flight: InFlight[Entry[S]] = InFlight()
        self._waking = Waking(self._waiting, events, self._backoff, longest_unschedulable_s)
        self._attempts = 0

    # --- what is in the queue --------------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many pods are known, in flight or not."""
        return len(self._entries)

    def count(self, state: QueueState) -> int:
        """Return how many pods have a state."""
        return len(self._in_flight) if state is QueueState.IN_FLIGHT else self._waiting.count(state)

    def refusing(self) -> Iterator[tuple[str, S, int]]:
        """Yield which plugins hold unschedulable pods back: plugin, shape, count of pods.

        Pods that several plugins refused come with each.
        """
        return self._waiting.refusing()

    def gated_by(self) -> Iterator[tuple[str, S]]:
        """Yield which plugin keeps each gated pod out, and the pod's shape."""
        for entry in self._entries.values() if self.count(QueueState.GATED) else ():
            if entry.gate is not None:
                yield entry.gate.plugin, entry.pod.shape

    def state_of(self, uid: str) -> QueueState | None:
        """Return the state of a pod; None when it is not known."""
        entry = self._entries.get(uid)
        if entry is None:
            return None
        return entry.state if entry.held is None else entry.held.state

    def gate(self, uid: str) -> Gated[S] | None:
        """Return what keeps a gated pod out; None for any other pod."""
        entry = self._entries.get(uid)
        return None if entry is None else entry.gate

    def pod(self, uid: str) -> PendingPod[S] | None:
        """Return a pod; None when it is not known."""
        entry = self._entries.get(uid)
        return None if entry is None else entry.pod

    def key(self, uid: str) -> str | None:
        """Return namespace/name of a pod; None when it is not known."""
        entry = self._entries.get(uid)
        return None if entry is None else entry.pod.key

    def order(self, uid: str) -> int:
        """Return the order of a pod's last attempt, 0 before the first."""
        entry = self._entries.get(uid)
        return 0 if entry is None else entry.order

    def untried(self, gangs: Iterable[str]) -> int:
        """Return how many members of `gangs` are active or back off: they will be tried."""
        return self._waiting.untried(gangs)

    def tries(self, uid: str) -> tuple[int, float]:
        """Return how often a pod was tried, and when it first passed its gates; 0 if unknown."""
        entry = self._entries.get(uid)
        return (0, 0.0) if entry is None else (entry.attempts, entry.entered or 0.0)

    def next_time(self) -> float | None:
        """Return when `pop` may have a pod that it has not now, without any further input."""
        return self._waking.next_time()

    def take_gated(self) -> tuple[Gated[S], ...]:
        """Return the pods that a gate keeps out, once for each pod and reason.

        For the condition and the event that show a user why the pod waits.
        """
        return self._waiting.take_gated()

    # --- pods come, change and go ----------------------------------------------------------------

    def add(self, pod: PendingPod[S], now: float) -> None:
        """Add a pod without a node, or take over a change of one that is known."""
        entry = self._entries.get(pod.uid)
        if entry is None:
            entry = self._entries[pod.uid] = Entry(pod, now)
            self._admit(entry, now, POD_ADDED)
            return
        before, entry.pod = entry.pod, pod
        if entry.state is QueueState.IN_FLIGHT:
            entry.edited = entry.edited or not _alike(before, pod)
        elif entry.gate is not None:
            self._admit(entry, now, GATE_OPENED)
        elif not _alike(before, pod):
            entry.pod = before
            self._waiting.withdraw(entry)
            entry.pod = pod
            self._admit(entry, now, POD_EDITED)

    def remove(self, uid: str) -> None:
        """Forget a pod that was deleted, or that has a node; unknown pods are ignored."""
        entry = self._entries.pop(uid, None)
        if entry is None:
            return
        if entry.state is QueueState.IN_FLIGHT:
            self._in_flight.drop(uid)
        else:
            self._waiting.withdraw(entry)

    def release(self, uid: str, gangs: Iterable[str], now: float) -> None:
        """Have the members of `gangs` tried again that a pod held up which has left them.

        No change of the cluster could help that pod now, and so none would wake them.
        """
        groups = [held for gang in gangs for held in self._waiting.groups(gang)]
        # Groups that gave their nodes back together share their probes.
        by_probes = {id(held.probes): held.probes for held in groups}
        its_own = {
            each
            for each, probes in by_probes.items()
            if any(probe.uid == uid for probe, _ in probes)
        }
        held_up = [held for held in groups if id(held.probes) in its_own]
        self._waking.wake(held_up, now, POD_GONE)

    # --- attempts --------------------------------------------------------------------------------

    def pop(self, now: float) -> PendingPod[S] | None:
        """Return the pod to try next; it is in flight until refused, failed, or removed.

        When no pod is active, one that backs off after a refusal is tried early; after an error the
        time is waited for.
        """
        self.advance(now)
        while True:
            found = self._waiting.active.first()
            if found is None:
                early = self._waiting.refused.first()
                if early is None:
                    return None
                self._waking.activate_held(early[1], TRIED_EARLY)
                continue
            item = found[1]
            entry = item if isinstance(item, Entry) else next(iter(item.pods.values()))
            self._waiting.withdraw(entry)
            if self._closed(entry):
                continue
            entry.attempts += 1
            self._attempts += 1
            entry.order = self._attempts
            entry.state = QueueState.IN_FLIGHT
            self._in_flight.start(entry.pod.uid, entry)
            return entry.pod

    def refuse(self, uid: str, plugins: Collection[str], now: float) -> None:
        """Take back a pod that no node can take, with the plugins that refused it, at least one.

        Pods of its shape that were refused before wait with it again: the same would come of them.
        Those that were never tried stay, because each gets a condition of its own.
        """
        self._refuse(uid, plugins, now, alone="")

    def refuse_alone(self, uid: str, plugins: Collection[str], now: float) -> None:
        """Take back a pod that differs from others of its shape, such as one with a nominated node.

        The others stay where they are.
        """
        self._refuse(uid, plugins, now, alone=uid)

    def refuse_gangs(
        self,
        uid: str,
        plugins: Collection[str],
        gangs: Iterable[str],
        waiting: Iterable[str],
        now: float,
    ) -> None:
        """Take back a member, and hold up every other member of `gangs` until it can be helped.

        waiting: UIDs of the members that had a node and gave it back. Members that are gated stay.
        """
        gangs = tuple(gangs)
        landed = self._in_flight.land(uid)
        if landed is None:
            self.return_waiting(waiting, gangs, now)
            return
        entry = landed.entry
        entry.refusals += 1
        entry.errors = 0
        members = [entry]
        for other in waiting:
            returned = self._in_flight.land(other)
            if returned is not None:
                members.append(returned.entry)
        for gang in gangs:
            singles = tuple(self._waiting.singles(gang))
            for single in singles:
                self._waiting.withdraw(single)
            members += singles
        edited = any(member.edited for member in members)
        # The refused member comes first, so that the next try fails, if it does, before the others
        # were given nodes.
        groups = dict.fromkeys(self._waiting.hold(member) for member in members)
        next(iter(groups)).pods.move_to_end(uid, last=False)
        for gang in gangs:
            groups.update(dict.fromkeys(self._waiting.groups(gang)))
        refusals = max(held.refusals for held in groups)
        for held in groups:
            held.probes = ((entry.pod, frozenset(plugins)),)
            held.refusals = refusals
            held.refused_at = now
            held.order = entry.order
            self._waking.put_unschedulable(held)
        if edited or self._waking.helped(groups, landed.events):
            self._waking.wake(groups, now, ATTEMPT_FAILED)

    def return_waiting(self, uids: Iterable[str], gangs: Iterable[str], now: float) -> None:
        """Take back members of `gangs` that gave a node back although each could be placed.

        They wait for what the refused members of `gangs` wait for. Where a member is still to be
        tried, they back off and are tried with it, not before the end of its back-off if it had an
        error; where none was refused, they wait until `activate`, an edit or the flush.
        """
        gangs = tuple(gangs)
        late = self._waiting.late(gangs)
        if late is not None:
            # Tried earlier, they would keep nodes from other pods until then.
            landed_ones = filter(None, map(self._in_flight.land, uids))
            self._back_off((landed.entry for landed in landed_ones), late, now)
            return
        again = self.untried(gangs) > 0
        probes = {
            (probe.uid, plugins): (probe, plugins)
            for gang in gangs
            for held in self._waiting.groups(gang)
            for probe, plugins in held.probes
        }
        order = max(
            (held.order for gang in gangs for held in self._waiting.groups(gang)), default=0
        )
        groups: dict[Held[S], None] = {}
        for uid in uids:
            landed = self._in_flight.land(uid)
            if landed is None:
                continue
            again = again or landed.entry.edited
            landed.entry.refusals += 1
            groups[self._waiting.hold(landed.entry)] = None
        shared = tuple(probes.values())
        for held in groups:
            held.probes = shared
            held.order = order
            held.refused_at = now
            self._waking.put_unschedulable(held)
        if again:
            self._waking.wake(groups, now, ATTEMPT_FAILED)

    def fail(self, uid: str, now: float) -> None:
        """Take back a pod whose attempt ended with an error; it is tried again after a time."""
        self._fail(uid, now, None)

    def _fail(self, uid: str, now: float, late: float | None) -> None:
        """Have a pod back off after an error. late: when its gang is tried again, if that waits."""
        landed = self._in_flight.land(uid)
        if landed is None:
            return
        entry = landed.entry
        entry.edited = False
        entry.errors += 1
        entry.since = now
        pause = self._backoff.after(entry.errors)
        until = now + pause
        if late is not None and until - late <= pause / 2:
            # A thousand members that fail one after another must not move all others each time.
            until = late
        self._waiting.put(entry, QueueState.BACKOFF, ATTEMPT_FAILED, until=until)

    def fail_gangs(
        self, uid: str, gangs: Iterable[str], waiting: Iterable[str], now: float
    ) -> tuple[str, ...]:
        """Take back a member whose attempt ended with an error; its gangs back off with it.

        Members that were tried before it is tried again would hold nodes in the meantime. Those
        that are unschedulable stay, and back off with it once they are woken. Gated ones stay.
        waiting: as in `refuse_gangs`. Returns the UIDs of the other members that back off because
        of it, and not after an error of their own.
        """
        gangs = tuple(gangs)
        self._fail(uid, now, self._waiting.late(gangs))
        late = self._waiting.late(gangs)
        held_up: tuple[str, ...] = ()
        if late is not None:
            members = [entry for gang in gangs for entry in self._waiting.untried_members(gang)]
            early = [e for e in members if e.state is not QueueState.BACKOFF or e.until < late]
            held_up = tuple(e.pod.uid for e in early if e.state is not QueueState.BACKOFF)
            self._waking.wait_together(gangs, late, now)
            for entry in early:
                self._waiting.withdraw(entry)
            self._back_off(early, late, now)
        self.return_waiting(waiting, gangs, now)
        return held_up

    def put_off(self, uid: str, gangs: Iterable[str], now: float) -> None:
        """Have a refused pod, and the refused members of `gangs`, back off as after an error.

        What was done to make room for them has failed. They are tried at one time, after the
        longest of their back-offs. A pod that was not refused, or backs off after an error
        already, stays as it is.
        """
        groups = {held: None for gang in gangs for held in self._waiting.groups(gang)}
        entries = {e.pod.uid: e for held in groups for e in held.pods.values()}
        entry = self._entries.get(uid)
        if entry is not None and entry.held is not None:
            entries[uid] = entry
        for each in entries.values():
            self._waiting.withdraw(each)
        until = now + self._backoff.after(max((e.refusals for e in entries.values()), default=0))
        for each in entries.values():
            self._waiting.put(each, QueueState.BACKOFF, ATTEMPT_FAILED, until=until)

    # --- what makes pods active again ------------------------------------------------------------

    def cluster_event(self, event: ClusterEvent, now: float) -> int:
        """Move the pods that a change may help. Returns how many were moved.

        Pods of plugins with hints by state are moved by `advance`.
        """
        if not self._events.interest(event.kind, event.action):
            return 0
        self.changes += 1
        self._in_flight.record(event)
        return self._waking.event(event, now)

    def activate(self, uids: Iterable[str], now: float) -> int:
        """Make pods active at once, without waiting for a back-off. Returns how many became so.

        Pods that wait together become active together. Gated pods are tested again.
        """
        before = self.count(QueueState.ACTIVE)
        for uid in uids:
            entry = self._entries.get(uid)
            if entry is None or entry.state is QueueState.IN_FLIGHT:
                continue
            if entry.gate is not None:
                self._admit(entry, now, ACTIVATED)
            elif entry.held is not None:
                self._waking.activate_held(entry.held, ACTIVATED)
            elif entry.state is QueueState.BACKOFF:
                self._waiting.withdraw(entry)
                self._waiting.put(entry, QueueState.ACTIVE, ACTIVATED)
        return self.count(QueueState.ACTIVE) - before

    def advance(self, now: float) -> None:
        """Move the pods whose time has come, and those that a change of state helps.

        `pop` does it too.
        """
        self._waking.advance(now)

    # --- gates -----------------------------------------------------------------------------------

    def _closed(self, entry: Entry[S]) -> bool:
        """Gate a pod that has no state, or is gated already, if a gate says so."""
        pod = entry.pod
        for gate in self._gates:
            reason = gate.test(pod)
            if reason is not None:
                self._waiting.put_gated(entry, Gated(pod, gate.plugin, reason))
                return True
        return False

    def _admit(self, entry: Entry[S], now: float, why: str) -> None:
        """Put a pod that is gated, or has no state, where it belongs."""
        was_gated = entry.gate is not None
        if self._closed(entry):
            if not was_gated:
                self.incoming[why, QueueState.UNSCHEDULABLE.value] += 1
            return
        if was_gated:
            self._waiting.withdraw(entry)
            entry.since = now
        if entry.entered is None:
            entry.entered = now
        gang = entry.pod.gang
        if gang:
            singles = self._waiting.singles(gang)
            if singles:
                # The members of a gang are tried in a row, so that two gangs do not take half of
                # the nodes each.
                entry.since = next(iter(singles)).since
                late = self._waiting.late((gang,))
                if late is not None and self._waiting.all_back_off(gang):
                    # Alone it would wait on a node until the others are tried again.
                    self._waiting.put(entry, QueueState.BACKOFF, why, until=late)
                    return
            elif self._waiting.groups(gang):
                # Alone it would wait on a node for members that are not tried.
                held = self._waiting.hold(entry)
                self._waking.wake((held,), now, why)
                self._waiting.count_joined(held, why)
                return
        self._waiting.put(entry, QueueState.ACTIVE, why)

    # --- moves -----------------------------------------------------------------------------------

    def _back_off(self, entries: Iterable[Entry[S]], until: float, now: float) -> None:
        """Have members of a gang that have no state back off as after an error, until then."""
        for entry in entries:
            entry.edited = False
            # They are tried in a row, see `_admit`, after the one that had the error.
            entry.since = now
            self._waiting.put(entry, QueueState.BACKOFF, ATTEMPT_FAILED, until=until)

    def _refuse(self, uid: str, plugins: Collection[str], now: float, *, alone: str) -> None:
        landed = self._in_flight.land(uid)
        if landed is None:
            return
        entry = landed.entry
        entry.errors = 0
        if entry.edited:
            # The pod as it is now was never tried.
            entry.edited = False
            self._admit(entry, now, POD_EDITED)
            return
        entry.refusals += 1
        held = self._waiting.hold(entry, alone=alone)
        held.probes = ((entry.pod, frozenset(plugins)),)
        held.refused_at = now
        held.order = entry.order
        self._waking.put_unschedulable(held)
        if self._waking.helped((held,), landed.events):
            self._waking.wake((held,), now, ATTEMPT_FAILED)


def _alike(before: PendingPod[S], after: PendingPod[S]) -> bool:
    return (before.shape, before.priority, before.gang) == (
        after.shape, after.priority, after.gang,
    )  # fmt: skip
