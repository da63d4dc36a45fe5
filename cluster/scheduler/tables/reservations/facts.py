"""What the scheduler looks at of a reservation, whatever object it comes from.

A Reservation is one, and so is a pod with the label `operating-mode: Reservation`. In both cases
the resources are held by a booking with the reservation's UID: of its reserve pod, or of the pod.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from apis.core import Taint
from apis.keys import PODS
from apis.scheduling import ReservationOwner
from cluster.scheduler.tables.amounts import Amounts

_NOTHING: Final[Amounts] = MappingProxyType({})
_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})


class AllocatePolicy(enum.IntEnum):
    """Where the room of a pod that uses a reservation comes from.

    DEFAULT and ALIGNED: from the reservation, and what is missing from the node. RESTRICTED: for
    the resources that are reserved from the reservation alone.
    """

    DEFAULT = 0
    ALIGNED = 1
    RESTRICTED = 2


@dataclass(frozen=True, slots=True)
class ReservationFacts:
    """A reservation, without its node: that is where its booking is.

    owners: pods that may use it; one entry has to match. allocatable: what is reserved. available:
    pods may use it now (phase Available; a pod that runs and is ready). once: the first pod that
    uses it keeps it for itself. unschedulable: it takes pods with a toleration only; also while it
    is being deleted. order: the lowest other than 0 goes first. restricted: names that the
    annotation reservation-restricted-options lists, None without it. reserved: part of
    `allocatable` that pods do not get (annotation node.koordinator.sh/reservation).
    """

    name: str
    uid: str
    owners: tuple[ReservationOwner, ...]
    allocatable: Amounts
    available: bool = True
    policy: AllocatePolicy = AllocatePolicy.DEFAULT
    once: bool = True
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    labels: Mapping[str, str] = field(default_factory=lambda: _NO_LABELS)
    order: int = 0
    restricted: frozenset[str] | None = None
    reserved: Amounts = field(default_factory=lambda: _NOTHING)

    @property
    def restricted_names(self) -> frozenset[str]:
        """Names of what pods get from the reservation alone; empty unless RESTRICTED.

        Options that name nothing that is reserved count as none.
        """
        if self.policy is not AllocatePolicy.RESTRICTED:
            return frozenset()
        names = frozenset(self.allocatable)
        return (names & self.restricted or names) if self.restricted is not None else names

    @property
    def most_owners(self) -> int | None:
        """How many pods may use the reservation at a time; None without a limit."""
        return self.allocatable.get(PODS)

    def matches_alike(self, other: ReservationFacts) -> bool:
        """Return whether both match the same pods."""
        return (
            self.name == other.name
            and self.owners == other.owners
            and self.allocatable == other.allocatable
            and self.unschedulable == other.unschedulable
            and self.taints == other.taints
            and self.labels == other.labels
        )
