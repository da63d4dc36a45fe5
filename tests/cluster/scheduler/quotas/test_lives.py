"""Random lives of a scheduler with quotas: edits, late events, failed bindings, gangs, restarts.

No quota ever has more bound than its maximum; in the end the table of quotas equals one that is
made from the objects, and what waits is refused by its quota or fits on no node.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cluster.scheduler.binding.placement import Placement
from cluster.scheduler.configuration.reading import read_configuration
from tests.cluster.scheduler.beds.lives import Lives, milli
from tests.cluster.scheduler.quotas.making import PREFIX, assert_as_made_from_objects

_CONFIGURATION = read_configuration(
    """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    preFilter: {enabled: [{name: ElasticQuota}]}
    reserve: {enabled: [{name: ElasticQuota}]}
    permit: {enabled: [{name: Coscheduling}]}
- schedulerName: other
  plugins:
    preFilter: {enabled: [{name: ElasticQuota}]}
""",
    obj="test",
)
_FIXED = "fixed"
_MOST_FIXED = 2000
"""Milli-cores that quota `fixed` may use at most; quota `edited` changes."""


class QuotaLives(Lives):
    configuration = _CONFIGURATION
    _names: ClassVar = (_FIXED, _FIXED, "edited", "")

    def __init__(self) -> None:
        self.quotas: dict[str, dict[str, Any]] = {}
        self.late_quotas: deque[bytes] = deque()
        super().__init__()
        self._put_quota(_FIXED, 1000, _MOST_FIXED)
        self._put_quota("edited", 1000, 6000)
        self.see_quotas(2)

    def _labels(self, number: int) -> dict[str, str]:
        name = self._names[number % len(self._names)]
        return {PREFIX + "name": name} if name else {}

    def _put_quota(self, name: str, least: int, most: int) -> None:
        kind = "MODIFIED" if name in self.quotas else "ADDED"
        self.quotas[name] = {
            "metadata": {"name": name, "namespace": "team"},
            "spec": {"min": {"cpu": f"{least}m"}, "max": {"cpu": f"{most}m"}},
        }
        self.late_quotas.append(self._line(kind, self.quotas[name]))

    @rule(least=st.sampled_from([0, 1000, 2500]), most=st.sampled_from([500, 2500, 6000]))
    def edit(self, least: int, most: int) -> None:
        """Some edits have a minimum above the maximum; they change nothing."""
        self._put_quota("edited", least, most)

    @rule()
    def lower_and_raise_the_minimum(self) -> None:
        self._put_quota(_FIXED, 0 if self.version % 2 else 2000, _MOST_FIXED)

    @rule(count=st.integers(1, 3))
    def see_quotas(self, count: int) -> None:
        for _ in range(min(count, len(self.late_quotas))):
            self.process.quotas.take(self.late_quotas.popleft())

    def _bind(self, placement: Placement) -> bool:
        bound = super()._bind(placement)
        used = sum(
            milli(pod)
            for pod in self.pods.values()
            if pod["spec"].get("nodeName")
            and pod["metadata"]["labels"].get(PREFIX + "name") == _FIXED
        )
        assert used <= _MOST_FIXED
        return bound

    def _after_restart(self) -> None:
        self.late_quotas.clear()
        for quota in self.quotas.values():
            self.process.quotas.take(self._line("ADDED", quota))

    def teardown(self) -> None:
        self.see_quotas(len(self.late_quotas) or 1)
        super().teardown()

    def _held_back(self, pod: dict[str, Any]) -> bool:
        seen = self.process.pods.items[f"default/{pod['metadata']['name']}"]
        shape = self.process.source.shape_of(seen)
        admission = self.process.plugins.quota_admissions[shape.scheduler_name]
        return admission.refusal(shape) is not None

    def _compare_with_a_scheduler_made_from_objects(self) -> None:
        super()._compare_with_a_scheduler_made_from_objects()
        known = self.process.plugins.quotas
        assert known is not None
        if known.problems():
            # The former definition is in force, which no object shows.
            return
        assert_as_made_from_objects(self.process)


QuotaLives.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestQuotaLives = QuotaLives.TestCase
