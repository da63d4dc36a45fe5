"""The queue of changed pods from the event loop to the reconciler's thread.

Queued subjects are those that the next snapshot would have. Making a snapshot empties the queue in
the same step, so neither ever overtakes the other.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hooks.engine import Engine
from hooks.subject import Subject


class QueuedPod(NamedTuple):
    """A pod's subjects, and how many of kubelet's requests they follow from."""

    subjects: Sequence[Subject]
    requests: int


class PodsQueue:
    """See the module. Any thread; never blocks for longer than a copy takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pods: dict[str, QueuedPod] = {}
        self._qos: Sequence[Subject] = ()
        self._engine: Engine | None = None

    def __len__(self) -> int:
        return len(self._pods)

    @property
    def engine(self) -> Engine | None:
        """The engine with which the newest pods were queued."""
        return self._engine

    def put(
        self,
        engine: Engine,
        pods: Mapping[str, Sequence[Subject]],
        qos: Sequence[Subject],
        *,
        requests: int,
    ) -> None:
        """Queue pods with their subjects, by uid, in place of older ones of the same pods.

        qos: the QoS directories, whose values may depend on all their pods.
        requests: how many of kubelet's requests the subjects follow from.
        """
        queued = {uid: QueuedPod(subjects, requests) for uid, subjects in pods.items()}
        with self._lock:
            self._pods.update(queued)
            self._qos = qos
            self._engine = engine

    def take(self) -> tuple[Mapping[str, QueuedPod], Sequence[Subject]]:
        """Return what is queued, and empty the queue."""
        with self._lock:
            pods, self._pods = self._pods, {}
            qos, self._qos = self._qos, ()
            return pods, qos

    def clear(self) -> None:
        """Empty the queue: a snapshot with all its pods has been made."""
        self.take()
