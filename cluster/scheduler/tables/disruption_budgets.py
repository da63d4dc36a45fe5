"""How many pods may be disrupted, by the PodDisruptionBudgets of their namespaces.

Preemption prefers victims whose budgets allow it; it may go beyond a budget if nothing else makes
room. Evictions of its own count against a budget until the budget's status is written anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from apis.meta import LabelSelector, matches
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.shapes import PodShape


@dataclass(frozen=True, slots=True)
class Budget:
    """A PodDisruptionBudget.

    selector: as in policy/v1, an empty one selects all pods of the namespace, None selects none.
    allowed: status.disruptionsAllowed. disrupted: names of pods that count as disrupted already.
    """

    namespace: str
    name: str
    selector: LabelSelector | None
    allowed: int
    disrupted: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """Return namespace/name."""
        return f"{self.namespace}/{self.name}"


_Label = tuple[str, str] | None


def _label_of(budget: Budget) -> _Label:
    """Return a label that all selected pods have; None if the selector names none."""
    labels = {} if budget.selector is None else budget.selector.match_labels
    return next(iter(labels.items()), None)


class DisruptionBudgets:
    """All budgets, found by the shape of a pod."""

    def __init__(self) -> None:
        self._budgets: dict[str, dict[str, Budget]] = {}
        """Namespace -> name -> budget."""
        self._by_label: dict[tuple[str, _Label], dict[str, None]] = {}
        """Namespace and `_label_of` -> names, so that a pod is compared with few budgets."""
        self._spent: dict[str, frozenset[str]] = {}
        """Key -> UIDs of evicted pods that the budget's status does not show yet."""
        self._generation = 0
        """Grows when other pods are selected than before."""
        self._found: WeakKeyDictionary[PodShape, tuple[int, tuple[str, ...]]] = WeakKeyDictionary()
        """Shape -> names of the budgets that select it, and as of which generation."""

    def __len__(self) -> int:
        return sum(map(len, self._budgets.values()))

    def set(self, budget: Budget) -> None:
        """Take a budget, new or changed."""
        of_namespace = self._budgets.setdefault(budget.namespace, {})
        before = of_namespace.get(budget.name)
        of_namespace[budget.name] = budget
        self._spent.pop(budget.key, None)
        if before is None or before.selector != budget.selector:
            if before is not None:
                self._forget_label(before)
            names = self._by_label.setdefault((budget.namespace, _label_of(budget)), {})
            names[budget.name] = None
            self._generation += 1

    def _forget_label(self, budget: Budget) -> None:
        place = budget.namespace, _label_of(budget)
        names = self._by_label[place]
        del names[budget.name]
        if not names:
            del self._by_label[place]

    def delete(self, namespace: str, name: str) -> None:
        """Forget a budget."""
        of_namespace = self._budgets.get(namespace, {})
        if (before := of_namespace.pop(name, None)) is not None:
            self._forget_label(before)
            self._spent.pop(f"{namespace}/{name}", None)
            self._generation += 1
            if not of_namespace:
                del self._budgets[namespace]

    def of(self, shape: PodShape) -> tuple[Budget, ...]:
        """Return the budgets that select pods of a shape."""
        of_namespace = self._budgets.get(shape.namespace)
        if not of_namespace:
            return ()
        known = self._found.get(shape)
        if known is None or known[0] != self._generation:
            names = tuple(
                name
                for label in (None, *shape.labels.items())
                for name in self._by_label.get((shape.namespace, label), ())
                if matches(of_namespace[name].selector, shape.labels)
            )
            known = self._found[shape] = (self._generation, names)
        return tuple(of_namespace[name] for name in known[1])

    def allowed(self, budget: Budget) -> int:
        """Return how many more pods a budget allows to be disrupted, at least 0."""
        return max(0, budget.allowed - len(self._spent.get(budget.key, ())))

    def spend(self, booking: Booking) -> None:
        """Count the eviction of a pod until each of its budgets is written anew."""
        for budget in self.of(booking.shape):
            if _name(booking) not in budget.disrupted:
                spent = self._spent.get(budget.key, frozenset())
                self._spent[budget.key] = spent | {booking.uid}

    def give_back(self, booking: Booking) -> None:
        """Count the eviction of a pod no more: it was refused."""
        for budget in self.of(booking.shape):
            spent = self._spent.get(budget.key, frozenset())
            self._spent[budget.key] = spent - {booking.uid}

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Take back at the end of the block what is spent in it."""
        spent = dict(self._spent)
        try:
            yield
        finally:
            self._spent = spent

    def violating(self, bookings: Iterable[Booking]) -> frozenset[str]:
        """Return the UIDs of the pods whose eviction goes beyond a budget.

        bookings: pods that would be evicted together; the first ones use up what is allowed.
        """
        left: dict[str, int] = {}
        result = set()
        for booking in bookings:
            for budget in self.of(booking.shape):
                if _name(booking) in budget.disrupted:
                    continue
                left[budget.key] = left.get(budget.key, self.allowed(budget)) - 1
                if left[budget.key] < 0:
                    result.add(booking.uid)
        return frozenset(result)


def _name(booking: Booking) -> str:
    return booking.key.partition("/")[2]
