"""What the reference says about a pod on a node, one node and one reservation at a time.

Written from the rules, over plain bookings; it shares no code with the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.scheduler.tables.reservations.facts import AllocatePolicy, ReservationFacts

Amounts = dict[str, int]


@dataclass(frozen=True)
class Reserved:
    """A reservation on the node, and the requests of the pods that use it."""

    facts: ReservationFacts
    owners: tuple[Amounts, ...]
    matched: bool

    def used(self, name: str) -> int:
        return sum(owner.get(name, 0) for owner in self.owners)

    def counted(self, name: str) -> int:
        return max(self.facts.allocatable.get(name, 0), self.used(name))

    @property
    def usable(self) -> bool:
        once = self.facts.once and bool(self.owners)
        return self.matched and self.facts.available and not once


@dataclass(frozen=True)
class OneNode:
    """A node: what it has, what pods outside of reservations request, and its reservations."""

    allocatable: Amounts
    pods: int
    others: tuple[Amounts, ...]
    reservations: tuple[Reserved, ...]

    def free(self, name: str) -> int:
        taken = sum(other.get(name, 0) for other in self.others)
        taken += sum(each.counted(name) for each in self.reservations)
        return self.allocatable.get(name, 0) - taken

    def free_pods(self) -> int:
        taken = len(self.others) + sum(max(1, len(each.owners)) for each in self.reservations)
        return self.pods - taken

    def fits_alone(self, pod: Amounts) -> bool:
        covered = all(amount <= self.free(name) for name, amount in pod.items() if amount)
        return covered and self.free_pods() >= 1

    def fits_in(self, pod: Amounts, each: Reserved, *, required: bool) -> bool:
        """Return whether the pod may go through a reservation."""
        facts = each.facts
        requested = {name: amount for name, amount in pod.items() if amount}
        if not each.usable or not (required or set(requested) & set(facts.allocatable)):
            return False
        if self.free_pods() + (not each.owners) < 1:
            return False
        for name, amount in requested.items():
            inner = facts.reserved.get(name, 0)
            left = max(0, facts.allocatable.get(name, 0) - each.used(name))
            if amount > self.free(name) + max(0, left - inner):
                return False
            inside = facts.allocatable.get(name, 0) - inner - each.used(name)
            if name in _restricted(facts) and amount > inside:
                return False
        most = facts.allocatable.get("pods")
        return most is None or len(each.owners) < most

    def passes(self, pod: Amounts, *, required: bool) -> bool:
        """Return whether the node takes the pod."""
        if any(self.fits_in(pod, each, required=required) for each in self.reservations):
            return True
        return not required and self.fits_alone(pod)


def _restricted(facts: ReservationFacts) -> set[str]:
    if facts.policy is not AllocatePolicy.RESTRICTED:
        return set()
    names = set(facts.allocatable)
    if facts.restricted is not None and names & facts.restricted:
        return names & facts.restricted
    return names


def score(pod: Amounts, each: Reserved) -> int:
    """Return how full the pod makes a reservation, 0..100."""
    capacities = {name: amount for name, amount in each.facts.allocatable.items() if amount > 0}
    parts = []
    for name, capacity in capacities.items():
        wanted = pod.get(name, 0) + each.used(name)
        parts.append(wanted * 100 // capacity if wanted <= capacity else 0)
    return sum(parts) // len(parts) if parts else 0
