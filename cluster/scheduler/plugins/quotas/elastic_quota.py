"""ElasticQuota: a pod passes if its quota has room for it now.

For each resource that the pod requests and the quota limits: used + request <= runtime. A pod that
is not preemptible has to fit into the quota's minimum with the others of its kind, too. Source of
the rules: docs/facts/scheduler.md, "Admission by quotas".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.quotas.definitions import quantity_of
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.quotas.tree import QuotaNode
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

ELASTIC_QUOTA: Final = "ElasticQuota"

_MOST_KEPT: Final = 10_000
"""Quotas of which a hint keeps what is left; chosen: above the count of any known cluster, so that
names of deleted quotas do not pile up. Beyond it the amounts are worked out again."""


@dataclass(frozen=True, slots=True)
class ElasticQuotaAdmission:
    """runtime: the limit is the runtime; else it is the maximum. parents: the quotas above need
    room, too."""

    quotas: QuotaTable
    runtime: bool = True
    parents: bool = False
    name: str = ELASTIC_QUOTA

    def check(self, pod: PodShape, tables: Tables) -> None:
        """Raises Refusal with the quota, its limit, what is used, and the resources that lack."""
        refusal = self.refusal(pod)
        if refusal is not None:
            raise refusal

    def refusal(self, pod: PodShape) -> Refusal | None:
        """Return why the pod is not admitted as things are, None if it is."""
        belongs = self.quotas.of(pod)
        if belongs.problem:
            return Refusal(self.name, f"the quota cannot be used: {belongs.problem}")
        quota, requests = belongs.quota, belongs.requests
        if quota is None or not requests:
            return None
        if self.quotas.is_counted(belongs):
            return self._refusal(quota, requests, firm=belongs.firm)
        with self.quotas.counted(belongs):
            return self._refusal(quota, requests, firm=belongs.firm)

    def _refusal(self, quota: QuotaNode, requests: Amounts, *, firm: bool) -> Refusal | None:
        """Return why a pod that is counted in the request is not admitted, None if it is."""
        exceeded = self._exceeded(quota, requests)
        if exceeded:
            return Refusal(
                self.name,
                f"Insufficient quotas, quotaName: {quota.name}, "
                + self._amounts(quota, requests, exceeded),
                resolvable=True,
            )
        if firm and (refusal := self._firm_refusal(quota, requests)):
            return refusal
        return self._refusal_above(quota, requests) if self.parents else None

    def left(self, quota: QuotaNode) -> Amounts:
        """Return how much the pods of a quota may use beyond what they use, by resource."""
        used, most = quota.all.used, quota.definition.most
        limits = quota.runtimes() if self.runtime else most
        return {name: limits[name] - used.get(name, 0) for name in most}

    def limit(self, quota: QuotaNode, name: str) -> int | None:
        """Return how much of a resource the pods of a quota may use, None if it is not limited."""
        if name not in quota.definition.most:
            return None
        return quota.runtime(name) if self.runtime else quota.definition.most[name]

    def _exceeded(self, quota: QuotaNode, requests: Amounts) -> list[str]:
        found = []
        for name, amount in requests.items():
            limit = self.limit(quota, name)
            if limit is not None and quota.all.used[name] + amount > limit:
                found.append(name)
        return sorted(found)

    def _firm_refusal(self, quota: QuotaNode, requests: Amounts) -> Refusal | None:
        least, used = quota.definition.least, quota.all.firm_used
        exceeded = sorted(
            name
            for name, amount in requests.items()
            if name in least and used[name] + amount > least[name]
        )
        if not exceeded:
            return None
        return Refusal(
            self.name,
            f"Insufficient non-preemptible quotas, quotaName: {quota.name}, "
            f"min: {amounts_text(least)}, nonPreemptibleUsed: {amounts_text(used)}, "
            f"pod's request: {amounts_text(requests)}, exceedDimensions: {_names_text(exceeded)}",
        )

    def _refusal_above(self, quota: QuotaNode, requests: Amounts) -> Refusal | None:
        path: list[str] = []
        for at in quota.path():
            path.insert(0, at.name)
            exceeded = self._exceeded(at, requests) if at is not quota else []
            if exceeded:
                return Refusal(
                    self.name,
                    f"Insufficient quotas, quotaNameTopo: {_names_text(path)}, "
                    + self._amounts(at, requests, exceeded),
                    resolvable=True,
                )
        return None

    def _amounts(self, quota: QuotaNode, requests: Amounts, exceeded: Iterable[str]) -> str:
        limits = {name: self.limit(quota, name) or 0 for name in quota.definition.most}
        return (
            f"runtime: {amounts_text(limits)}, used: {amounts_text(quota.all.used)}, "
            f"pod's request: {amounts_text(requests)}, exceedDimensions: {_names_text(exceeded)}"
        )


class QuotaHint:
    """Whether a change may help a pod that ElasticQuota refused: whether it would pass now.

    Asked after the tables took the change, about each shape that waits, which is counted as
    pending; it wakes no pod in vain. What is left of a quota is worked out once for all its shapes
    and kept until a count changes.
    """

    def __init__(self, admissions: Mapping[str, ElasticQuotaAdmission]) -> None:
        """admissions: by scheduler name."""
        self._admissions = admissions
        self._left: dict[tuple[str, str], tuple[int, Amounts]] = {}
        """(scheduler name, quota) -> (version of the table, what is left)."""

    def __call__(self, pod: PendingPod[Any], old: Any, new: Any) -> bool:
        shape: PodShape = pod.shape
        admission = self._admissions.get(shape.scheduler_name)
        if admission is None:
            return True
        belongs = admission.quotas.of(shape)
        quota = belongs.quota
        if quota is None:
            return not belongs.problem
        left = self._left_of(shape.scheduler_name, admission, quota)
        for name, amount in belongs.requests.items():
            if amount > left[name]:
                return False
        return not (belongs.firm or admission.parents) or admission.refusal(shape) is None

    def _left_of(
        self, scheduler_name: str, admission: ElasticQuotaAdmission, quota: QuotaNode
    ) -> Amounts:
        version, key = admission.quotas.version, (scheduler_name, quota.name)
        kept = self._left.get(key)
        if kept is None or kept[0] != version:
            if len(self._left) > _MOST_KEPT:
                self._left.clear()
            kept = self._left[key] = version, admission.left(quota)
        return kept[1]


def amounts_text(amounts: Amounts) -> str:
    """Return amounts as messages about quotas show them: `cpu:4,memory:8Gi`."""
    return ",".join(sorted(f"{name}:{quantity_of(name, amounts[name])}" for name in amounts))


def _names_text(names: Iterable[str]) -> str:
    return f"[{' '.join(names)}]"
