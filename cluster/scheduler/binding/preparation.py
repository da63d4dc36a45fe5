"""What the writes before a binding have in common: a placement that cannot be carried out."""

from __future__ import annotations

from apis.scheduling_pod import SchedulingPod
from cluster.scheduler.binding.placement import Placement, Refused, Why


class GivenUp(Exception):
    """A pod cannot be bound to its node now."""

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.refused = Refused(why, message)


def check_pod(placement: Placement, pod: SchedulingPod | None) -> None:
    """Check that the pod of a placement still waits. Raises GivenUp. pod: as last seen."""
    if pod is None or pod.metadata.uid != placement.uid:
        raise GivenUp(Why.DELETED, f"pod {placement.key} does not exist any more")
    if pod.metadata.deletion_timestamp is not None:
        raise GivenUp(Why.DELETED, f"pod {placement.key} is being deleted")
