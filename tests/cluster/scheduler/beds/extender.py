"""Extenders that are asked, and answer when the test wants it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape


@dataclass
class Extender:
    """Keeps the questions.

    asks_nodes, asks_victims: the profile whose pods it is asked about, "" for none: which nodes
    take a pod, and which pods are evicted for it.
    """

    asks_nodes: str = ""
    asks_victims: str = ""
    questions: deque[str] = field(default_factory=deque)
    """UIDs of pods."""

    def concerns(self, pod: PodShape) -> bool:
        return pod.scheduler_name == self.asks_nodes

    def binds(self, pod: PodShape) -> bool:
        return False

    def ask(self, pod: PendingPod[PodShape]) -> None:
        assert self.concerns(pod.shape)
        self.questions.append(pod.uid)

    def preempts(self, pod: PodShape) -> bool:
        return pod.scheduler_name == self.asks_victims

    def ask_victims(self, pod: PendingPod[PodShape]) -> None:
        assert self.preempts(pod.shape)
        self.questions.append(pod.uid)
