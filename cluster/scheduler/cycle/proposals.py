"""Nodes that a preemption could free, as extenders are asked about them and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape

ROOM_BY_NOW: Final = "preemption: a node takes the pod by now."
_NO_ROWS: Final = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The pods that would be evicted from one node.

    victims: UID -> namespace/name, the most important first. violations: how many of the evictions
    go beyond a PodDisruptionBudget.
    """

    victims: Mapping[str, str]
    violations: int = 0


Proposals = Mapping[str, Proposal]
"""By the node's name, the cheapest node first."""


@dataclass(frozen=True, slots=True)
class NeedsRoom:
    """A pod that no node takes, and for which extenders are to be asked about evictions.

    What they are asked about is worked out when its turn comes: thousands of pods may wait, and
    what could be evicted for one of them takes 100 KB. Of rows, a bit each is kept.
    passed: the rows that passed all filters at the attempt, and were refused by others.
    """

    pod: PendingPod[PodShape]
    _diagnosis: Diagnosis
    _resolvable: bytes
    _passed: bytes

    @classmethod
    def of(
        cls, pod: PendingPod[PodShape], diagnosis: Diagnosis, passed: NDArray[np.intp]
    ) -> NeedsRoom:
        """Return what is kept of an attempt."""
        without = replace(diagnosis, resolvable=_NO_ROWS)
        return cls(pod, without, _packed(diagnosis.resolvable), _packed(passed))

    @property
    def diagnosis(self) -> Diagnosis:
        """Why the pod had no node at the attempt."""
        return replace(self._diagnosis, resolvable=_unpacked(self._resolvable))

    @property
    def passed(self) -> NDArray[np.intp]:
        """The rows that passed all filters at the attempt, ascending."""
        return _unpacked(self._passed)


def _packed(rows: NDArray[np.intp]) -> bytes:
    bits = np.zeros(int(rows.max()) + 1 if len(rows) else 0, dtype=np.bool_)
    bits[rows] = True
    return np.packbits(bits).tobytes()


def _unpacked(bits: bytes) -> NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8)))
