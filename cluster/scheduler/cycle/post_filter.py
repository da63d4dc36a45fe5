"""What runs for a pod that no node takes as things are, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.scheduler.cycle.victims import Candidate
from cluster.scheduler.reasons.diagnosis import Diagnosis
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape

NEVER: Final = "Never"
"""The preemptionPolicy of pods that preempt no others."""
NOT_ELIGIBLE: Final = "preemption: not eligible"
"""How a remark begins if no victims were looked for."""


@dataclass(frozen=True, slots=True)
class NotFound:
    """No eviction helps now.

    remark: why, for the end of the pod's condition. waits: victims of the pod's former preemption
    are still there, so its nomination stays. more: nodes are left to be tried, so the pod is tried
    again soon.
    """

    remark: str
    waits: bool = False
    more: bool = False

    @property
    def searched(self) -> bool:
        """Whether victims were looked for at all."""
        return bool(self.remark) and not self.remark.startswith(NOT_ELIGIBLE)


class PostFilter(Protocol):
    """Looks for a way to place a pod that no node takes as things are."""

    @property
    def name(self) -> str: ...

    def post_filter(
        self,
        pod: PendingPod[PodShape],
        diagnosis: Diagnosis,
        *,
        being_evicted: Callable[[Booking], bool],
        salt: int,
    ) -> Candidate | NotFound:
        """Return the node to free with its victims, or why there is none.

        being_evicted: whether a placed pod is the victim of a preemption and not gone yet.
        salt: decides between nodes of equal cost.
        """
        ...
