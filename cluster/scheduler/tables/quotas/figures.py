"""What a quota is, has and uses at one moment, for its status, its metrics and /apis/v1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from apis.keys import ROOT_QUOTA
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.quotas.tree import QuotaNode


@dataclass(frozen=True, slots=True)
class QuotaFigures:
    """Amounts by resource name. scaled_least: the minimum as it counts now. firm_*: of pods that
    are not preemptible. own_*: without the quotas below. child_request: the sum of the requests of
    pods and of the quotas below; request: what the quota asks of its parent. unschedulable: of the
    root of a tree, what lies on nodes that take no pods.
    """

    name: str
    parent: str
    is_parent: bool
    tree: str
    lends: bool
    least: Amounts
    most: Amounts
    weight: Amounts
    scaled_least: Amounts
    runtime: Amounts
    request: Amounts
    child_request: Amounts
    used: Amounts
    firm_request: Amounts
    firm_used: Amounts
    own_request: Amounts
    own_used: Amounts
    own_firm_request: Amounts
    own_firm_used: Amounts
    allocated: Amounts
    guaranteed: Amounts
    unschedulable: Amounts


def figures(table: QuotaTable, name: str) -> QuotaFigures | None:
    """Return the figures of a quota in force, None for any other. The root quota has those of the
    top of the default tree."""
    quota = table.top("") if name == ROOT_QUOTA else table.quotas.get(name)
    if quota is None:
        return None
    said = quota.definition
    names = sorted(said.most) if name != ROOT_QUOTA else table.total_names
    return QuotaFigures(
        name=said.name,
        parent=said.parent,
        is_parent=said.is_parent or bool(quota.children),
        tree=table.tree_of(quota),
        lends=said.lends,
        least=dict(said.least),
        most=dict(said.most),
        weight=dict(said.weight),
        scaled_least=quota.scaled_least(),
        runtime={each: quota.runtime(each) for each in names},
        request=_asked(quota, names),
        child_request=dict(quota.all.request),
        used=dict(quota.all.used),
        firm_request=dict(quota.all.firm_request),
        firm_used=dict(quota.all.firm_used),
        own_request=dict(quota.own.request),
        own_used=dict(quota.own.used),
        own_firm_request=dict(quota.own.firm_request),
        own_firm_used=dict(quota.own.firm_used),
        allocated=_guarantee(table, names, quota.allocated),
        guaranteed=_guarantee(table, names, quota.guaranteed),
        unschedulable=dict(said.unschedulable),
    )


def _asked(quota: QuotaNode, names: list[str]) -> Amounts:
    asked = {name: quota.request(name) for name in names}
    return {name: amount for name, amount in asked.items() if amount}


def _guarantee(table: QuotaTable, names: list[str], amount_of: Callable[[str], int]) -> Amounts:
    """Return amounts that count with ElasticQuotaGuaranteeUsage alone."""
    if not table.settings.sharing.guarantee:
        return {}
    amounts = {name: amount_of(name) for name in names}
    return {name: amount for name, amount in amounts.items() if amount}
