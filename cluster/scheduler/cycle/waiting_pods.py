"""The pods that wait, by state: active, backing off, unschedulable or gated.

The pods of a state are sorted by what is taken first. Refused pods of one shape form a group
(`Held`), which moves as a whole. Indexes answer which groups a plugin refused, and where the
members of a gang are. When and why a pod moves is decided by `queue`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Generic, TypeVar

from cluster.scheduler.cycle.ordered import Ordered
from cluster.scheduler.cycle.waiting import Entry, Gated, Held, HeldKey, QueueState
from cluster.scheduler.tables.pending import Shape

S = TypeVar("S", bound=Shape)


class WaitingPods(Generic[S]):
    """Pods, each alone (`Entry`) or with others of its shape (`Held`), by state."""

    def __init__(self) -> None:
        self.active: Ordered[Entry[S] | Held[S]] = Ordered()
        """By priority, then by time."""
        self.refused: Ordered[Held[S]] = Ordered()
        """Backing off after a refusal, by the end of that."""
        self.failed: Ordered[Entry[S]] = Ordered()
        """Backing off after an error, by the end of that."""
        self.incoming: Counter[tuple[str, str]] = Counter()
        """How many pods came to a state, by why and by the state's name in kube-scheduler, where
        gated pods are among the unschedulable ones."""
        self._held: dict[HeldKey, Held[S]] = {}
        self._held_of_gang: dict[str, dict[Held[S], None]] = {}
        self._single_of_gang: dict[str, OrderedDict[str, Entry[S]]] = {}
        """Gang members that are active or back off on their own."""
        self._backing_off: dict[str, tuple[int, float]] = {}
        """Gang -> how many of these back off after an error, and the latest end of that."""
        self._refused_by: dict[str, dict[Held[S], None]] = {}
        """Plugin -> unschedulable pods that it refused."""
        self._gated_news: dict[str, Gated[S]] = {}
        self._counts = dict.fromkeys(QueueState, 0)

    # --- what is where ---------------------------------------------------------------------------

    def count(self, state: QueueState) -> int:
        """Return how many pods have a state, which is not IN_FLIGHT."""
        return self._counts[state]

    def refusing(self) -> Iterator[tuple[str, S, int]]:
        """Yield which plugins hold unschedulable pods back: plugin, shape, count of pods.

        Pods that several plugins refused come with each.
        """
        for plugin, groups in self._refused_by.items():
            for held in groups:
                first = next(iter(held.pods.values()), None)
                if first is not None:
                    yield plugin, first.pod.shape, len(held.pods)

    def refused_by(self, plugin: str) -> Collection[Held[S]]:
        """Return the unschedulable groups that a plugin refused."""
        return self._refused_by.get(plugin, {})

    def unschedulable(self) -> list[Held[S]]:
        """Return all unschedulable groups."""
        return [held for held in self._held.values() if held.state is QueueState.UNSCHEDULABLE]

    def groups(self, gang: str) -> Collection[Held[S]]:
        """Return the groups of refused members of a gang, wherever they are."""
        return self._held_of_gang.get(gang, {})

    def singles(self, gang: str) -> Collection[Entry[S]]:
        """Return the members of a gang that are active or back off on their own."""
        found = self._single_of_gang.get(gang)
        return () if found is None else found.values()

    def untried_members(self, gang: str) -> Iterator[Entry[S]]:
        """Yield the members of a gang that are active or back off: they will be tried."""
        yield from self.singles(gang)
        for held in self.groups(gang):
            if held.state is not QueueState.UNSCHEDULABLE:
                yield from held.pods.values()

    def untried(self, gangs: Iterable[str]) -> int:
        """Return how many members of `gangs` are active or back off."""
        return sum(
            len(self.singles(gang))
            + sum(
                len(held.pods)
                for held in self.groups(gang)
                if held.state is not QueueState.UNSCHEDULABLE
            )
            for gang in gangs
        )

    def late(self, gangs: Iterable[str]) -> float | None:
        """Return when the last member of `gangs` that backs off after an error is tried again.

        None: no member does. The result may be too late while others still back off, after the
        last one has left.
        """
        found = (self._backing_off.get(gang) for gang in gangs)
        return max((end for _, end in filter(None, found)), default=None)

    def all_back_off(self, gang: str) -> bool:
        """Return whether those members of a gang back off that are active or do so on their own."""
        count, _ = self._backing_off.get(gang, (0, 0.0))
        return count == len(self.singles(gang))

    def take_gated(self) -> tuple[Gated[S], ...]:
        """Return the gated pods, once for each pod and reason."""
        news = tuple(self._gated_news.values())
        self._gated_news.clear()
        return news

    # --- moves -----------------------------------------------------------------------------------

    def put_gated(self, entry: Entry[S], gated: Gated[S]) -> None:
        """Gate a pod that has no state, or is gated already."""
        if entry.gate is None:
            self._counts[QueueState.GATED] += 1
        if entry.gate is None or entry.gate.reason != gated.reason:
            self._gated_news[entry.pod.uid] = gated
        entry.gate = gated
        entry.state = QueueState.GATED

    def put(self, entry: Entry[S], state: QueueState, why: str, *, until: float = 0.0) -> None:
        """Make a pod that has no state active, or have it back off after an error until then."""
        pod = entry.pod
        entry.state = state
        self._counts[state] += 1
        self.incoming[why, state.value] += 1
        if state is QueueState.ACTIVE:
            self.active.push((-pod.priority, entry.since, pod.gang), entry)
        else:
            entry.until = until
            self.failed.push((until,), entry)
            if pod.gang:
                count, end = self._backing_off.get(pod.gang, (0, until))
                self._backing_off[pod.gang] = count + 1, max(end, until)
        if pod.gang:
            self._single_of_gang.setdefault(pod.gang, OrderedDict())[pod.uid] = entry

    def hold(self, entry: Entry[S], *, alone: str = "") -> Held[S]:
        """Add a pod that has no state to those that it waits with; these keep their state.

        alone: the UID of the pod, if it waits with no others.
        """
        pod = entry.pod
        key = (pod.gang, pod.shape, pod.priority, alone)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = Held(key)
            if pod.gang:
                self._held_of_gang.setdefault(pod.gang, {})[held] = None
        entry.edited = False
        entry.state = QueueState.UNSCHEDULABLE
        entry.held = held
        held.pods[pod.uid] = entry
        held.joined += 1
        held.refusals = max(held.refusals, entry.refusals)
        self._counts[held.state] += 1
        return held

    def count_joined(self, held: Held[S], why: str) -> None:
        """Count the pods that were added to a group as come to its state."""
        self.incoming[why, held.state.value] += held.joined
        held.joined = 0

    def move(self, held: Held[S], state: QueueState, why: str, *, until: float = 0.0) -> None:
        """Move a group from where it is to `state`. until: the end of its back-off, if it is that.

        Among the unschedulable, it is found under the plugins of its `probes`.
        """
        self._counts[held.state] -= len(held.pods)
        self._counts[state] += len(held.pods)
        self.incoming[why, state.value] += held.joined if held.state is state else len(held.pods)
        held.joined = 0
        self._unlink(held)
        held.state = state
        gang, _, priority, _ = held.key
        if state is QueueState.ACTIVE:
            self.active.push((-priority, held.refused_at, gang), held)
        elif state is QueueState.BACKOFF:
            self.refused.push((until, -priority, gang), held)
        else:
            held.linked = tuple({plugin for _, plugins in held.probes for plugin in plugins})
            for plugin in held.linked:
                self._refused_by.setdefault(plugin, {})[held] = None

    def withdraw(self, entry: Entry[S]) -> None:
        """Take a pod out of its state, which is not in flight."""
        held, pod = entry.held, entry.pod
        if held is None:
            self._counts[entry.state] -= 1
            if entry.gate is not None:
                entry.gate = None
                self._gated_news.pop(pod.uid, None)
                return
            (self.active if entry.state is QueueState.ACTIVE else self.failed).remove(entry)
            if pod.gang:
                if entry.state is QueueState.BACKOFF:
                    count, end = self._backing_off.pop(pod.gang)
                    if count > 1:
                        self._backing_off[pod.gang] = count - 1, end
                singles = self._single_of_gang[pod.gang]
                del singles[pod.uid]
                if not singles:
                    del self._single_of_gang[pod.gang]
            return
        self._counts[held.state] -= 1
        entry.held = None
        entry.since = held.refused_at
        entry.refusals = held.refusals
        del held.pods[pod.uid]
        if not held.pods:
            self._unlink(held)
            del self._held[held.key]
            gang = held.key[0]
            if gang:
                others = self._held_of_gang[gang]
                del others[held]
                if not others:
                    del self._held_of_gang[gang]

    def _unlink(self, held: Held[S]) -> None:
        if held.serial:
            (self.active if held.state is QueueState.ACTIVE else self.refused).remove(held)
        for plugin in held.linked:
            groups = self._refused_by[plugin]
            del groups[held]
            if not groups:
                del self._refused_by[plugin]
        held.linked = ()
