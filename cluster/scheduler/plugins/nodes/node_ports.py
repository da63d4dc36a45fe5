"""NodePorts: a node passes if none of the pod's host ports is in use there.

Two ports conflict if protocol and number are equal and so are the addresses, or one is 0.0.0.0.
Source: kube-scheduler; docs/facts/scheduler.md, "Ports".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.plugins.contract import (
    AppliesByShape,
    Leaving,
    Mask,
    OfRowAlone,
    Reason,
    Restored,
    zeros,
)
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.ports import meet
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_FEW: Final = 64
"""Up to so many rows are looked up one by one. Chosen: a port may be in use on thousands of nodes,
and mostly the one row is asked for on which a pod was placed."""
_IN_USE: Final = (Reason("node(s) didn't have free ports for the requested pod ports"),)


@dataclass(frozen=True, slots=True)
class NodePorts(AppliesByShape, OfRowAlone):
    """restored: ports of reservations count as free for pods that may use these."""

    restored: Restored | None = None
    name: str = "NodePorts"

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return bool(pod.ports)

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        return _IN_USE

    def headroom(self, pod: PodShape, tables: Tables, rows: Rows, pods: int) -> NDArray[np.int64]:
        """Return 1: a second pod on the node would ask for the same ports."""
        return np.ones(len(tables.nodes), dtype=np.int64)[rows]

    def may_open(
        self, pod: PodShape, tables: Tables, rows: NDArray[np.intp], leaving: Leaving
    ) -> NDArray[np.bool_]:
        """Return where a pod could leave that uses one of the ports."""
        return leaving.weigh(lambda other: int(meet(pod.ports, other.ports))) > 0

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        mask = zeros(len(tables.nodes))
        if not isinstance(rows, slice) and len(rows) <= _FEW:
            mask[[row for row in rows.tolist() if tables.ports.conflicts(pod.ports, row)]] = 1
        else:
            self._hold_all(mask, pod, tables)
        if self.restored is not None and mask.any():
            for row in self.restored.rows(pod, tables).tolist():
                if mask[row] and not self._in_use(pod, tables, row, self.restored):
                    mask[row] = 0
        return mask[rows]

    def _hold_all(self, mask: Mask, pod: PodShape, tables: Tables) -> None:
        for port in pod.ports:
            for row in tables.ports.rows_in_conflict(port.protocol, port.host_port, port.host_ip):
                mask[row] = 1

    def _in_use(self, pod: PodShape, tables: Tables, row: int, restored: Restored) -> bool:
        """Return whether a port is in use by others than the pod's reservations."""
        uids = restored.ignored(pod, tables, row) or restored.on(pod, tables, row)
        shapes = [tables.bookings[uid].shape.ports for uid in uids]
        return tables.ports.conflicts(pod.ports, row, without=shapes)
