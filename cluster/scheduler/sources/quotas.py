"""ElasticQuotas into the table of quotas; pods that quotas refused are tried after each change.

A quota that cannot be used is logged with its reason, and costs itself only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from apis.keys import (
    ANNOTATION_QUOTA_NAMESPACES,
    ANNOTATION_QUOTA_SHARED_WEIGHT,
    ANNOTATION_QUOTA_TOTAL_RESOURCE,
    ANNOTATION_QUOTA_UNSCHEDULABLE_RESOURCE,
)
from apis.quota import ElasticQuota
from cluster.scheduler.cycle.events import Action, ClusterEvent
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.plugins.quotas.elastic_quota import ELASTIC_QUOTA
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.shapes import PodShape
from kube.cache import Change, Event

_log = logging.getLogger(__name__)


_DEFINING: Final = (
    ANNOTATION_QUOTA_SHARED_WEIGHT,
    ANNOTATION_QUOTA_NAMESPACES,
    ANNOTATION_QUOTA_TOTAL_RESOURCE,
    ANNOTATION_QUOTA_UNSCHEDULABLE_RESOURCE,
)


def _says(quota: ElasticQuota) -> tuple[object, ...]:
    """Return all of a quota that its definition depends on."""
    meta = quota.metadata
    annotations = tuple(meta.annotations.get(key) for key in _DEFINING)
    return meta.uid, meta.labels, quota.spec, annotations


class QuotaSource:
    """Takes the events of ElasticQuotas, and of pods that begin or cease to wait for a node."""

    def __init__(
        self, quotas: QuotaTable, queue: SchedulingQueue[PodShape], *, clock: Callable[[], float]
    ) -> None:
        self._quotas = quotas
        self._queue = queue
        self._clock = clock
        self.problems: dict[str, str] = {}
        """namespace/name -> why a quota is not in force as its object says."""

    def quota_event(self, event: Event[ElasticQuota]) -> None:
        """Take a change of a quota."""
        old, modified = event.old, event.change is Change.MODIFIED
        if modified and old is not None and _says(old) == _says(event.new):
            # A status was written, mostly by this very process: hundreds a second.
            return
        before = self._quotas.version
        if event.change is Change.DELETED:
            self._quotas.delete_quota(event.key)
        else:
            if old is not None and old.metadata.uid != event.new.metadata.uid:
                self._quotas.delete_quota(event.key)
            self._quotas.set_quota(event.new)
        problems = dict(self._quotas.problems())
        for key, problem in problems.items():
            if self.problems.get(key) != problem:
                _log.warning("%s", problem)
        self.problems = problems
        if self._quotas.version != before:
            self._tell()

    def advance(self, now: float) -> None:
        """Let time pass; seconds since 1970. Pods may end that counted until now."""
        if self._quotas.advance(now):
            self._tell()

    def waits(self, uid: str, shape: PodShape) -> None:
        """Take a pod without a node."""
        if self._quotas.want(uid, shape):
            self._tell()

    def waits_no_more(self, uid: str) -> None:
        """Take a pod that is bound or gone, before its booking is removed."""
        if self._quotas.unwant(uid):
            self._tell()

    def _tell(self) -> None:
        event = ClusterEvent(ELASTIC_QUOTA, Action.UPDATE_OTHER)
        self._queue.cluster_event(event, self._clock())
