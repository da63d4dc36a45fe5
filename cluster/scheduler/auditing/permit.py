"""Reports what happens to pods and gangs to the workload auditor.

Every pod passes through `Permit`. With the auditor on, the scheduler has an `AuditedPermit` in its
place, which also reports; with it off nothing is called.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cluster.scheduler.auditing.auditor import WorkloadAuditor
from cluster.scheduler.auditing.events import (
    ALL_ATTEMPTED,
    PREEMPT_FAILURE,
    SCHEDULE_FAILURE,
    VICTIM_DELETING,
)
from cluster.scheduler.cycle.permit import Decisions, Permit
from cluster.scheduler.cycle.post_filter import NotFound
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.tables.gang_definitions import GangDefinition
from cluster.scheduler.tables.gangs import Gang, Gangs, Step
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape

_PLACED = (Step.WAITING, Step.BINDING, Step.BOUND)


class AuditedPermit(Permit[PodShape]):
    """A `Permit` that reports to the auditor."""

    def __init__(
        self, queue: SchedulingQueue[PodShape], gangs: Gangs, auditor: WorkloadAuditor
    ) -> None:
        super().__init__(queue, gangs)
        self._auditor = auditor
        self._key_of: dict[str, str] = {}
        """Id of a gang -> the key of its workload: while the gang exists, if it is audited."""
        self._sharing: dict[str, set[str]] = {}
        """Key of a workload -> the ids of its gangs."""
        self._refused: set[str] = set()
        """Keys of workloads of which a member found no node since all were tried last."""

    # --- pods and PodGroups come, change and go ------------------------------------------------

    def add(
        self, pod: PendingPod[PodShape], now: float, *, defines: GangDefinition | None = None
    ) -> Decisions:
        left, before = self._gangs.of(pod.uid), self._queue.pod(pod.uid)
        decisions = super().add(pod, now, defines=defines)
        gated = bool(pod.shape.gates)
        joined = self._gangs.of(pod.uid)
        if left is not None and left is not joined:
            self._left(left)
        if joined is None:
            self._auditor.add(pod.uid, pod.key, pod)
            self._auditor.gate(pod.uid, gated)
        elif left is joined:
            if before is not None and bool(before.shape.gates) != gated:
                self._auditor.gate(self._key_of.get(joined.id, ""), gated)
        else:
            self._auditor.delete(pod.uid)
            self._joined(joined, pod)
        return decisions

    def bound(
        self,
        uid: str,
        now: float,
        *,
        gang: str | None = None,
        defines: GangDefinition | None = None,
    ) -> Decisions:
        left = self._gangs.of(uid)
        decisions = super().bound(uid, now, gang=gang, defines=defines)
        self._auditor.scheduled(uid)
        self._left(left)
        return decisions

    def gone(self, uid: str, now: float) -> Decisions:
        left = self._gangs.of(uid)
        decisions = super().gone(uid, now)
        self._auditor.delete(uid)
        self._left(left)
        return decisions

    def define(self, definition: GangDefinition, now: float) -> Decisions:
        before = self._gangs.get(definition.id)
        was_complete = before is not None and before.complete
        decisions = super().define(definition, now)
        gang = self._gangs.get(definition.id)
        if gang is not None and gang.complete and not was_complete:
            self._auditor.complete(self._key_of.get(gang.id, ""))
        return decisions

    def undefine(self, gang_id: str, now: float) -> Decisions:
        left = self._gangs.get(gang_id)
        decisions = super().undefine(gang_id, now)
        self._left(left)
        return decisions

    def _joined(self, gang: Gang, pod: PendingPod[PodShape]) -> None:
        """Take a new member. Gangs of which pods have nodes are followed only if they were before:
        what comes to them later has no part in how they are scheduled."""
        peers = tuple(self._gangs.peers(gang))
        found = (self._key_of[each.id] for each in peers if each.id in self._key_of)
        key = next(found, None)
        if key is None:
            if any(each.once_satisfied or each.count(*_PLACED) for each in peers):
                return
            key = ",".join(gang.group)
            self._auditor.add(key, key, pod, gang=True)
        if gang.id not in self._key_of:
            self._key_of[gang.id] = key
            self._sharing.setdefault(key, set()).add(gang.id)
        self._auditor.gate(key, bool(pod.shape.gates))
        if gang.complete:
            self._auditor.complete(key)

    def _left(self, gang: Gang | None) -> None:
        """Forget a gang that ended with its last pod or with its PodGroup."""
        if gang is None or self._gangs.get(gang.id) is not None:
            return
        key = self._key_of.pop(gang.id, "")
        if key and self._unshare(key, gang.id):
            self._auditor.delete(key)

    def _unshare(self, key: str, gang: str) -> bool:
        """Return whether a workload has no gang any more."""
        sharing = self._sharing[key]
        sharing.discard(gang)
        if not sharing:
            del self._sharing[key]
            self._refused.discard(key)
        return not sharing

    # --- attempts ------------------------------------------------------------------------------

    def pop(self, now: float) -> PendingPod[PodShape] | None:
        pod = super().pop(now)
        if pod is not None and not pod.gang:
            self._auditor.attempt(pod.uid)
        return pod

    def refused(self, uid: str, plugins: Collection[str], reason: str, now: float) -> Decisions:
        self._failed(uid)
        return super().refused(uid, plugins, reason, now)

    def failed(self, uid: str, error: str, now: float) -> Decisions:
        self._failed(uid)
        return super().failed(uid, error, now)

    def _failed(self, uid: str) -> None:
        key = self._workload(uid)
        if key == uid:
            self._auditor.result(uid, SCHEDULE_FAILURE)
        elif key:
            self._refused.add(key)

    def _allow(self, gang: Gang) -> Decisions:
        decisions = super()._allow(gang)
        key = self._key_of.get(gang.id)
        if decisions and key is not None:
            self._auditor.scheduled(key)
            for each in tuple(self._sharing[key]):
                del self._key_of[each]
                self._unshare(key, each)
        return decisions

    def _give_back(
        self, gang: Gang, waiting: tuple[str, ...], message: str, now: float
    ) -> Decisions:
        key = self._key_of.get(gang.id)
        if waiting and key is not None and self._round_is_over(gang):
            if key not in self._refused:
                self._auditor.result(key, ALL_ATTEMPTED)
            self._refused.discard(key)
        return super()._give_back(gang, waiting, message, now)

    # --- preemption ----------------------------------------------------------------------------

    def preempted(self, uid: str, victims: Iterable[str]) -> None:
        """Record that pods are evicted for a pod, or for its gang. victims: UIDs of those that are
        not gone."""
        self._auditor.preempted(self._workload(uid), victims)

    def not_preempted(self, uid: str, found: NotFound) -> None:
        """Record why no pod is evicted for a pod, or for its gang."""
        if found.waits:
            self._auditor.searched(self._workload(uid), VICTIM_DELETING)
        elif found.searched:
            self._auditor.searched(self._workload(uid), PREEMPT_FAILURE)

    def victim_gone(self, uid: str) -> None:
        """Record that a pod is gone, which may be a victim."""
        self._auditor.gone(uid)

    def victim_stays(self, uid: str) -> None:
        """Record that a victim is not evicted after all."""
        self._auditor.stays(uid)

    def _workload(self, uid: str) -> str:
        """Return the key of a pod's workload; "" for members of gangs that are not audited."""
        gang = self._gangs.of(uid)
        return uid if gang is None else self._key_of.get(gang.id, "")
