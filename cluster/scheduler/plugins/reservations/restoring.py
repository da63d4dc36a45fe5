"""What reservations give back to a pod that may use them, or that ignores them.

To every other pod a reservation is taken room, as the tables have it. Plugins that hold nodes back
for lack of room ask here whether a reservation changes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.plugins.contract import Given, only
from cluster.scheduler.plugins.reservations.pre_allocation import PreAllocating
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.reservations.asked import asked_of
from cluster.scheduler.tables.reservations.facts import AllocatePolicy
from cluster.scheduler.tables.reservations.table import Slots
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_NONE: Final[frozenset[str]] = frozenset()
_BY_OWNERS: Final = PreAllocating()


@dataclass(frozen=True, slots=True)
class Restoring:
    """The contract's `Restored`. `usable` is what the pod may use by itself, or all for a pod that
    ignores reservations. pre_allocating: gives a reserve pod the room of pods that it takes over.
    """

    pre_allocating: PreAllocating = _BY_OWNERS

    def slots(self, pod: PodShape, tables: Tables, rows: Rows) -> Slots:
        """Return the slots on these rows whose remainder the pod may take."""
        table = tables.reservations
        if len(table) and pod.derived(asked_of).ignores:
            return table.every(rows)
        return table.usable(pod, rows)

    def given(self, pod: PodShape, tables: Tables, rows: Rows) -> Given | None:
        if self.pre_allocating.applies(pod, tables):
            return self.pre_allocating.given(pod, tables, rows)
        slots = self.slots(pod, tables, rows)
        if not len(slots):
            return None
        table = tables.reservations
        unused = (table.owners[slots] == 0).astype(np.int64)
        return Given(table.row[slots], table.remainder(slots), unused)

    def rows(self, pod: PodShape, tables: Tables) -> NDArray[np.int64]:
        slots = self.slots(pod, tables, slice(0, len(tables.nodes)))
        return np.unique(tables.reservations.row[slots])

    def on(self, pod: PodShape, tables: Tables, row: int) -> tuple[str, ...]:
        table = tables.reservations
        if pod.derived(asked_of).ignores:
            return ()
        slots = table.usable(pod, only(row))
        return tuple(sorted(table.facts(slot).uid for slot in slots.tolist()))

    def ignored(self, pod: PodShape, tables: Tables, row: int) -> frozenset[str]:
        if not pod.derived(asked_of).ignores:
            return _NONE
        table = tables.reservations
        return frozenset(table.facts(slot).uid for slot in table.slots_on(row))

    def taken_over(
        self, pod: PodShape, tables: Tables, rows: Rows
    ) -> Mapping[int, tuple[Booking, ...]]:
        return self.pre_allocating.taken_over(pod, tables, rows)

    def restricted(self, tables: Tables, uid: str) -> frozenset[str]:
        facts = tables.reservations.get(uid)
        if facts is None or facts.policy is not AllocatePolicy.RESTRICTED:
            return _NONE
        return facts.restricted_names
