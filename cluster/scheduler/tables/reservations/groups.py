"""A reservation and the pods that use it, as they count on their node.

They count together, with the larger of what is reserved and what its pods request, for each
resource. So pods inside a reservation are not counted twice, a pod that needs more than is left of
its reservation counts with the rest too, and what is left is taken for everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.scheduler.tables.use import NO_USE, Use


@dataclass(slots=True)
class Group:
    """own: row and use of the reservation's booking, None while it has none. owners: UIDs of the
    pods that use it, with their rows. used: what they take, by row."""

    own: tuple[int, Use] | None = None
    owners: dict[str, int] = field(default_factory=dict)
    used: dict[int, Use] = field(default_factory=dict)

    def on(self, row: int) -> Use:
        """Return what the group takes of the node of this row."""
        used = self.used.get(row, NO_USE)
        if self.own is None or self.own[0] != row:
            return used
        return self.own[1].larger(used)

    def add(self, uid: str, row: int, use: Use) -> None:
        """Count a pod that uses the reservation."""
        self.owners[uid] = row
        self.used[row] = self.used.get(row, NO_USE) + use

    def drop(self, uid: str, row: int, use: Use) -> None:
        """Take back what `add` did."""
        del self.owners[uid]
        left = self.used[row] - use
        if left.pods:
            self.used[row] = left
        else:
            del self.used[row]
