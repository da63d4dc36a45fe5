"""Gangs from pods and PodGroups: which gang a pod belongs to, and what defines it.

A PodGroup that cannot be used defines nothing, so its members wait; the reason is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from apis.quota import PodGroup
from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.cycle.permit import Decisions, Permit
from cluster.scheduler.sources.complaints import Complaints
from cluster.scheduler.tables.gang_definitions import (
    GangDefaults,
    GangDefinition,
    gang_from_pod,
    gang_from_pod_group,
    gang_name,
)
from cluster.scheduler.tables.shapes import PodShape
from kube.cache import Change, Event, object_key


class GangSource:
    """Reads gangs for the profiles that schedule them."""

    def __init__(
        self,
        permit: Permit[PodShape],
        defaults: Mapping[str, GangDefaults],
        *,
        clock: Callable[[], float],
        follow: Callable[[Decisions], None],
    ) -> None:
        """defaults: by scheduler name, of the profiles with Coscheduling. follow: carries out what
        follows from a change of a PodGroup."""
        self._permit = permit
        self._defaults = defaults
        self._clock = clock
        self._follow = follow
        self.complaints = Complaints()
        """Of PodGroups and of pods that define gangs."""

    def gang_of(self, pod: SchedulingPod) -> str:
        """Return the id of a pod's gang, or ""."""
        if pod.spec.scheduler_name not in self._defaults:
            return ""
        name = gang_name(pod.metadata)
        return "" if name is None else name.id

    def pod_groups_of(self, pod: SchedulingPod) -> tuple[str, ...]:
        """Return namespace/name of the PodGroup that a pod belongs to; none, or one."""
        if pod.spec.scheduler_name not in self._defaults:
            return ()
        name = gang_name(pod.metadata)
        return (name.id,) if name is not None and name.by_pod_group else ()

    def defined_by(self, pod: SchedulingPod) -> GangDefinition | None:
        """Return the gang that a pod's annotations define, or None."""
        defaults = self._defaults.get(pod.spec.scheduler_name)
        if defaults is None:
            return None
        read = gang_from_pod(pod.metadata, defaults)
        self.complaints.set(pod.ref, read.errors)
        return read.definition

    def forget(self, pod: SchedulingPod) -> None:
        self.complaints.forget(pod.ref)

    def pod_group_event(self, event: Event[PodGroup]) -> None:
        """Take a change of a PodGroup."""
        if not self._defaults:
            return
        key = object_key(event.new)
        ref = f"PodGroup {key}"
        if event.change is Change.DELETED:
            self.complaints.forget(ref)
            self._follow(self._permit.undefine(key, self._clock()))
            return
        # A PodGroup names no scheduler; the defaults of the first profile with gangs hold.
        read = gang_from_pod_group(event.new, next(iter(self._defaults.values())))
        self.complaints.set(ref, read.errors)
        if read.definition is None:
            self._follow(self._permit.undefine(key, self._clock()))
        else:
            self._follow(self._permit.define(read.definition, self._clock()))
