"""Which pods are promised a node: preemption made room for them there, and they are not bound yet.

Filters count the nominated pods of a node that are at least as important as the pod in question, so
that a less important pod does not take the room that was made. With the gate
CrossSchedulerNomination the pods that another scheduler nominated count too, where they are more
important than the pod in question: of two equal ones that two schedulers nominate for one node,
each would else hold the other back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

from cluster.scheduler.tables.pending import PendingPod, Shape

S = TypeVar("S", bound=Shape)

_RECENT: Final = 1024
"""Changes that are kept in their order. Chosen: a gang of 500 is nominated at once, in two changes
for each pod; a reader that is no further behind looks at the changed nodes alone."""


class Nominator(Generic[S]):
    """Node -> the pods nominated for it."""

    def __init__(self) -> None:
        self._on: dict[str, dict[str, PendingPod[S]]] = {}
        self._node_of: dict[str, str] = {}
        self._of_others: set[str] = set()
        """UIDs of pods that another scheduler nominated."""
        self._own: dict[str, set[str]] = {}
        """UID of a pod that is not bound -> the nodes that preemption nominated it for. What the
        pod shows of these may be an earlier write of this scheduler."""
        self.version = 0
        """Grows with every change."""
        self._recent: deque[str] = deque(maxlen=_RECENT)
        """The nodes of the last changes: the last one is that of `version`."""

    def __len__(self) -> int:
        return len(self._node_of)

    def nominate(self, pod: PendingPod[S], node: str) -> None:
        """Record that preemption nominated `pod` for `node`, instead of for any other node."""
        self._own.setdefault(pod.uid, set()).add(node)
        self._nominate(pod, node)

    def follow(self, pod: PendingPod[S], before: str, shown: str) -> None:
        """Take the nomination that a pod shows instead of `before`, "" for none.

        An autoscaler may write it, for the node that it makes for the pod. What may be an echo of
        this scheduler's own writes changes nothing.
        """
        own = self._own.get(pod.uid, ())
        if shown and shown != before and shown not in own:
            self._nominate(pod, shown)
        elif not shown and before not in own and self.node_of(pod.uid) == before:
            self.withdraw(pod.uid)

    def forget(self, uid: str) -> str:
        """End the nomination of a pod that is bound or gone, as `withdraw`."""
        self._own.pop(uid, None)
        return self.withdraw(uid)

    def _nominate(self, pod: PendingPod[S], node: str) -> None:
        self.withdraw(pod.uid)
        self._on.setdefault(node, {})[pod.uid] = pod
        self._node_of[pod.uid] = node
        self._changed(node)

    def nominated_by_other(self, pod: PendingPod[S], node: str) -> None:
        """Record that another scheduler nominated `pod` for `node`."""
        self._nominate(pod, node)
        self._of_others.add(pod.uid)

    def update(self, pod: PendingPod[S]) -> None:
        """Replace a nominated pod after a change of it; others are ignored."""
        node = self._node_of.get(pod.uid)
        if node is not None:
            self._on[node][pod.uid] = pod
            self._changed(node)

    def withdraw(self, uid: str) -> str:
        """End a pod's nomination. Returns the node that it was for, or ""."""
        node = self._node_of.pop(uid, "")
        self._of_others.discard(uid)
        if node:
            self._changed(node)
            pods = self._on[node]
            del pods[uid]
            if not pods:
                del self._on[node]
        return node

    def node_of(self, uid: str) -> str:
        """Return the node that a pod is nominated for, or ""."""
        return self._node_of.get(uid, "")

    def nodes(self) -> Iterator[str]:
        """Yield the nodes that have nominated pods."""
        return iter(self._on)

    def changed_since(self, version: int) -> frozenset[str] | None:
        """Return the nodes whose nominated pods changed after `version`; None: any may have."""
        changes = self.version - version
        if changes > len(self._recent):
            return None
        return frozenset(islice(reversed(self._recent), changes))

    def highest(self, node: str) -> int | None:
        """Return the highest priority of the pods nominated for `node`; None without any."""
        return max((pod.priority for pod in self._pods(node)), default=None)

    def at_least(self, node: str, priority: int) -> tuple[PendingPod[S], ...]:
        """Return the pods nominated for `node` of at least `priority`, most important first.

        Those of other schedulers only above `priority`.
        """
        return self._sorted(
            pod
            for pod in self._pods(node)
            if pod.priority > priority
            or (pod.priority == priority and pod.uid not in self._of_others)
        )

    def below(self, node: str, priority: int) -> tuple[PendingPod[S], ...]:
        """Return the pods nominated for `node` below `priority`, most important first.

        Their nominations end when preemption chooses the node for a pod of `priority`. Those of
        other schedulers are not ours to end.
        """
        return self._sorted(
            pod
            for pod in self._pods(node)
            if pod.priority < priority and pod.uid not in self._of_others
        )

    def _changed(self, node: str) -> None:
        self.version += 1
        self._recent.append(node)

    def _pods(self, node: str) -> Iterator[PendingPod[S]]:
        return iter(self._on.get(node, {}).values())

    def _sorted(self, pods: Iterator[PendingPod[S]]) -> tuple[PendingPod[S], ...]:
        return tuple(sorted(pods, key=lambda pod: (-pod.priority, pod.created, pod.key)))
