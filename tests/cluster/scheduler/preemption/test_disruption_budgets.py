"""PodDisruptionBudgets as preemption sees them."""

from __future__ import annotations

from apis.meta import LabelSelector, LabelSelectorRequirement
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.disruption_budgets import Budget, DisruptionBudgets
from cluster.scheduler.tables.shapes import Shapes
from tests.cluster.scheduler.making import make_pod

_shapes = Shapes()


def _booking(name: str, app: str, namespace: str = "default") -> Booking:
    shape = _shapes.of(make_pod(name, namespace=namespace, labels={"app": app}))
    return Booking(f"{namespace}/{name}", name, shape, "n")


def _budget(name: str, app: str, allowed: int, **more: frozenset[str]) -> Budget:
    return Budget("default", name, LabelSelector(match_labels={"app": app}), allowed, **more)


def test_the_first_pods_use_up_what_a_budget_allows() -> None:
    budgets = DisruptionBudgets()
    budgets.set(_budget("one", "a", 1))
    pods = [_booking("p0", "a"), _booking("p1", "b"), _booking("p2", "a"), _booking("p3", "a")]
    assert budgets.violating(pods) == {"p2", "p3"}
    other = _booking("p4", "a", namespace="other")
    assert budgets.violating([pods[0], other]) == frozenset()


def test_each_of_two_budgets_counts() -> None:
    budgets = DisruptionBudgets()
    budgets.set(_budget("one", "a", 1))
    budgets.set(_budget("two", "a", 0))
    pod = _booking("p0", "a")
    assert budgets.violating([pod]) == {"p0"}
    assert {budget.name for budget in budgets.of(pod.shape)} == {"one", "two"}
    budgets.delete("default", "two")
    budgets.delete("default", "two")
    assert budgets.violating([pod]) == frozenset()
    assert {budget.name for budget in budgets.of(pod.shape)} == {"one"}


def test_pods_that_count_as_disrupted_use_up_nothing() -> None:
    budgets = DisruptionBudgets()
    budgets.set(_budget("one", "a", 1, disrupted=frozenset({"p0"})))
    assert budgets.violating([_booking("p0", "a"), _booking("p1", "a")]) == frozenset()


def test_an_empty_selector_selects_all_pods_and_none_selects_nothing() -> None:
    budgets = DisruptionBudgets()
    budgets.set(Budget("default", "all", LabelSelector(), 0))
    assert budgets.violating([_booking("p0", "a")]) == {"p0"}
    budgets.set(Budget("default", "all", None, 0))
    assert budgets.violating([_booking("p0", "a")]) == frozenset()


def test_a_budget_is_found_by_its_present_selector_alone() -> None:
    budgets = DisruptionBudgets()
    exists = LabelSelectorRequirement(key="app", operator="Exists")
    two = LabelSelector(match_labels={"app": "a", "tier": "x"})
    pods = [_booking("p0", "a"), _booking("p1", "b")]
    for selector, expected in (
        (LabelSelector(match_labels={"app": "a"}), {"p0"}),
        (LabelSelector(match_labels={"app": "b"}), {"p1"}),
        (LabelSelector(match_expressions=(exists,)), {"p0", "p1"}),
        (LabelSelector(match_labels={"app": "a"}, match_expressions=(exists,)), {"p0"}),
        (two, set()),
        (LabelSelector(match_labels={"app": "c"}), set()),
    ):
        budgets.set(Budget("default", "one", selector, 0))
        assert budgets.violating(pods) == expected
        other = _booking("p2", "a", namespace="other")
        assert budgets.violating([other]) == frozenset()
    budgets.delete("default", "one")
    assert budgets.violating(pods) == frozenset()


def test_evictions_count_until_the_status_is_written_again() -> None:
    budgets = DisruptionBudgets()
    budget = _budget("one", "a", 1)
    budgets.set(budget)
    budgets.spend(_booking("p0", "a"))
    assert budgets.allowed(budget) == 0
    assert budgets.violating([_booking("p1", "a")]) == {"p1"}
    budgets.set(budget)
    assert budgets.violating([_booking("p1", "a")]) == frozenset()


def test_what_is_spent_in_a_trial_or_given_back_may_be_spent_again() -> None:
    budgets = DisruptionBudgets()
    budget = _budget("one", "a", 2)
    budgets.set(budget)
    budgets.spend(_booking("p0", "a"))
    for _ in range(2):
        with budgets.trial():
            budgets.spend(_booking("p1", "a"))
            assert budgets.allowed(budget) == 0
        assert budgets.allowed(budget) == 1
    budgets.spend(_booking("p0", "a"))  # the same pod once more
    assert budgets.allowed(budget) == 1
    budgets.give_back(_booking("p1", "a"))
    assert budgets.allowed(budget) == 1
    budgets.give_back(_booking("p0", "a"))
    assert budgets.allowed(budget) == 2
    budgets.set(_budget("one", "a", 2, disrupted=frozenset({"p0"})))
    budgets.spend(_booking("p0", "a"))
    assert budgets.allowed(budget) == 2
    assert len(budgets) == 1
    budgets.set(_budget("two", "b", 2))
    assert len(budgets) == 2
