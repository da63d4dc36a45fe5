"""PodDisruptionBudgets of the API server into the table that preemption reads."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import field

from apis.core import ObjectMeta
from apis.decode import Wire
from apis.meta import LabelSelector
from cluster.scheduler.tables.disruption_budgets import Budget, DisruptionBudgets
from kube.cache import Change, Event
from kube.resources import Resource

DISRUPTION_BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True)


class DisruptionBudgetSpec(Wire, frozen=True):
    """selector: the pods that the budget is about; empty selects all of the namespace."""

    selector: LabelSelector | None = None


class DisruptionBudgetStatus(Wire, frozen=True):
    """disruptions_allowed: Pods that may be disrupted now. disrupted_pods: name -> since when, of
    pods whose eviction the API server has accepted already."""

    disruptions_allowed: int = 0
    disrupted_pods: Mapping[str, str] = field(default_factory=dict)


class DisruptionBudget(Wire, frozen=True):
    """A PodDisruptionBudget, as far as preemption looks at it."""

    metadata: ObjectMeta = ObjectMeta()
    spec: DisruptionBudgetSpec = DisruptionBudgetSpec()
    status: DisruptionBudgetStatus = DisruptionBudgetStatus()


class DisruptionBudgetSource:
    """Takes the events of a cache of PodDisruptionBudgets."""

    def __init__(self, budgets: DisruptionBudgets) -> None:
        self._budgets = budgets

    def event(self, event: Event[DisruptionBudget]) -> None:
        """Take a change of a budget."""
        new = event.new
        namespace, name = new.metadata.namespace, new.metadata.name
        if event.change is Change.DELETED:
            self._budgets.delete(namespace, name)
            return
        self._budgets.set(
            Budget(
                namespace=namespace,
                name=name,
                selector=new.spec.selector,
                allowed=new.status.disruptions_allowed,
                disrupted=frozenset(new.status.disrupted_pods),
            )
        )
