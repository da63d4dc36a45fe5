"""Nodes that a preemption could free, as extenders are asked about them and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.nodes import NodeTable
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
    what could be evicted for one of them takes 100 KB. Of rows, a bit each is kept. A row whose
    node is gone counts no more, also where another node has the row by now.
    """

    pod: PendingPod[PodShape]
    _diagnosis: Diagnosis
    _resolvable: bytes
    _passed: bytes
    _version: int

    @classmethod
    def of(
        cls,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        passed: NDArray[np.intp],
        nodes: NodeTable,
    ) -> NeedsRoom:
        """Return what is kept of an attempt.

        passed: the rows that passed all filters, and were refused by others. nodes: the table, as
        at the attempt.
        """
        without = replace(diagnosis, resolvable=_NO_ROWS)
        resolvable = _packed(diagnosis.resolvable)
        return cls(pod, without, resolvable, _packed(passed), nodes.version)

    def diagnosis(self, nodes: NodeTable) -> Diagnosis:
        """Return why the pod had no node at the attempt. nodes: the table, as it is now."""
        resolvable = nodes.same_since(_unpacked(self._resolvable), self._version)
        return replace(self._diagnosis, resolvable=resolvable)

    def passed(self, nodes: NodeTable) -> NDArray[np.intp]:
        """Return the rows that passed all filters at the attempt, ascending. nodes: as above."""
        return nodes.same_since(_unpacked(self._passed), self._version)


def _packed(rows: NDArray[np.intp]) -> bytes:
    bits = np.zeros(int(rows.max()) + 1 if len(rows) else 0, dtype=np.bool_)
    bits[rows] = True
    return np.packbits(bits).tobytes()


def _unpacked(bits: bytes) -> NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8)))
