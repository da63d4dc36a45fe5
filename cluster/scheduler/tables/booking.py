"""A booking: everything that one placement of a pod changes, as one value.

The tables are changed by placing a booking and by removing it, and a removal is the exact inverse.
A pod that the API server shows as bound becomes the same kind of value, with its allocation read
from the pod's annotations, so an assumed placement and its confirmation take one path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from apis.cpuset import NO_CPUS, CpuSet
from apis.device import DeviceAllocation
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.shapes import PodShape

_NO_DEVICES: Final[Mapping[str, tuple[DeviceAllocation, ...]]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PlannedVolumes:
    """What has to be written for the claims of a pod before the pod is bound to its node.

    binds: (claim, persistent volume) by key and name. provisions: keys of claims whose volumes are
    to be made for the node.
    """

    binds: tuple[tuple[str, str], ...] = ()
    provisions: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.binds or self.provisions)


NO_VOLUMES: Final = PlannedVolumes()


@dataclass(frozen=True, slots=True)
class Allocation:
    """The exact part of a placement, on the chosen node.

    cpus: CPUs of the pod's own. numa: amounts by NUMA node id, ascending. devices: what is
    allocated, by device type. reservation: UID of the reservation that the pod uses, or "".
    volumes: planned for claims that are not bound yet; a pod that is bound has none. takes: UIDs
    of pods on the node that use the reservation that this booking is, from now on.
    """

    cpus: CpuSet = NO_CPUS
    numa: tuple[tuple[int, Amounts], ...] = ()
    devices: Mapping[str, tuple[DeviceAllocation, ...]] = field(default_factory=lambda: _NO_DEVICES)
    reservation: str = ""
    volumes: PlannedVolumes = NO_VOLUMES
    takes: tuple[str, ...] = ()


NO_ALLOCATION: Final = Allocation()


@dataclass(frozen=True, slots=True)
class Booking:
    """A pod on a node.

    key: namespace/name. start: when the pod started or was assumed, seconds since 1970.
    initialized: when the pod's init containers had ended, seconds since 1970, or 0.
    terminating: the pod is being deleted; it counts until it is gone, but not for spread.
    ends: when its grace period is over, seconds since 1970, or 0 while it is not being deleted.
    preempted: it is being deleted to make room for another pod.
    """

    key: str
    uid: str
    shape: PodShape
    node: str
    allocation: Allocation = NO_ALLOCATION
    start: float = 0.0
    initialized: float = 0.0
    terminating: bool = False
    ends: float = 0.0
    preempted: bool = False
