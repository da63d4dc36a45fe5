"""What it costs to free each node for the members of a gang, kept over one search.

Members that request the same amounts at the same priority share the costs, however else they
differ: pods of an indexed Job have a label each, so no two of them have one shape. All nodes are
worked out at once. Afterwards a node is worked out again when its pods changed, or when evictions
have used up budgets since. Where that would be many nodes, all are worked out at once again: an
eviction that uses up a budget makes each node dearer that the budget protects.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.cycle.victim_columns import Costs
from cluster.scheduler.cycle.victims import Candidate
from cluster.scheduler.tables.tables import Tables

_MOST_AGAIN: Final = 32
"""Nodes that one search works out again one by one, before it works out all. Measured: 0.08 ms for
a node, 13 ms for all of 5,000 nodes with 20 pods each. A larger number would have searches in such
a cluster take longer where budgets are used up; a smaller one, all nodes worked out more often."""


@dataclass(frozen=True, slots=True, order=True)
class Freed:
    """A node that could be freed, with its victims by amounts.

    cost: of the candidate, and a number that decides between nodes of equal cost.
    """

    cost: tuple[float, ...]
    candidate: Candidate = field(compare=False)


class FreeingCosts:
    """The costs of all nodes for one priority and one set of requested amounts."""

    def __init__(
        self,
        tables: Tables,
        all_costs: Callable[[], Costs],
        again: Callable[[int], Candidate | None],
        ties: NDArray[np.uint64],
    ) -> None:
        """all_costs: returns the costs of all nodes, as they are when it is called. again: row ->
        the victims there, likewise; None for a node without room even without its less important
        pods. ties: by row."""
        self._tables = tables
        self._work_out_all = all_costs
        self._work_out = again
        self._ties = ties
        self._again: dict[int, tuple[Freed, int]] = {}
        """Row -> its cost where `_costs` does not hold, and as of how many evictions."""
        self._cheap: list[Freed] = []
        """The costs of `_again`, the least first, with some that hold no more."""
        self._evictions = 0
        self._refresh()

    def _refresh(self) -> None:
        """Work all nodes out."""
        self._costs = self._work_out_all()
        self._costs_as_of = self._evictions
        self._order = self._costs.order(self._ties[self._costs.rows])
        self._rows: NDArray[np.intp] = self._costs.rows[self._order]
        """The rows of `_costs`, the least cost first."""
        self._holds = np.ones(len(self._rows), dtype=np.bool_)
        """By position: whether `_costs` holds for the row."""
        self._again.clear()
        self._cheap.clear()

    def cheapest(self, where: NDArray[np.bool_]) -> Freed | None:
        """Return the node that costs the least among the rows that are set in `where`, or None."""
        for _ in range(_MOST_AGAIN):
            best, as_of = self._known_cheapest(where)
            if best is None or as_of == self._evictions:
                return best
            self.changed(best.candidate.row)
        self._refresh()
        return self._known_cheapest(where)[0]

    def changed(self, row: int) -> None:
        """Work a node out again: its pods are not those of before."""
        self._holds[self._rows == row] = False
        self._again.pop(row, None)
        candidate = self._work_out(row)
        if candidate is not None:
            freed = self._freed(candidate)
            self._again[row] = freed, self._evictions
            if len(self._cheap) > 2 * len(self._again) + _MOST_AGAIN:
                self._cheap = sorted(each for each, _ in self._again.values())
            else:
                insort(self._cheap, freed)

    def budgets_changed(self) -> None:
        """Note that budgets allow less than before, so that any node may cost more."""
        self._evictions += 1

    def _known_cheapest(self, where: NDArray[np.bool_]) -> tuple[Freed | None, int]:
        found = []
        for freed in self._cheap:
            row = freed.candidate.row
            known = self._again.get(row)
            if known is not None and known[0] is freed and where[row]:
                found.append(known)
                break
        usable = self._holds & where[self._rows]
        if usable.any():
            element = int(self._order[usable.argmax()])
            freed = self._freed(self._costs.candidate(element, self._tables))
            found.append((freed, self._costs_as_of))
        return min(found, default=(None, 0))

    def _freed(self, candidate: Candidate) -> Freed:
        return Freed((*candidate.cost, int(self._ties[candidate.row])), candidate)
