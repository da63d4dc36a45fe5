"""Claims, persistent volumes, classes and free storage, and what placements plan with them.

A placement that binds a claim to a volume holds that volume until the placement is taken back or
the pod is known to be bound; no other claim gets it meanwhile. Source of the rules:
kube-scheduler's volume binding; docs/facts/scheduler.md, "Volumes".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.nodes import NodeTable
from cluster.scheduler.tables.volumes.candidates import Candidates
from cluster.scheduler.tables.volumes.objects import (
    Attached,
    Claim,
    Class,
    Volume,
    attached_by_provisioner,
)
from cluster.scheduler.tables.volumes.places import Place, Places

_NONE_LEFT: Final = -1
"""Free storage of a place that no object reports."""


class VolumeTable:
    """`version` grows with each change that may change the verdict on a pod with claims."""

    def __init__(self, nodes: NodeTable) -> None:
        self.version = 0
        self.places = Places(nodes)
        self._claims: dict[str, Claim] = {}
        self._volumes: dict[str, tuple[Volume, int]] = {}
        """Name -> volume, number of its place."""
        self._of_class: dict[str, set[str]] = {}
        """Name of a class -> names of its volumes."""
        self._candidates: dict[str, Candidates] = {}
        self._reserved: dict[str, set[str]] = {}
        """Key of a claim -> names of the volumes that refer to it."""
        self._classes: dict[str, tuple[Class, int]] = {}
        """Name -> class, number of the place where its volumes can be made."""
        self._drivers: set[str] = set()
        """CSI drivers that report how much storage is left."""
        self._storage: dict[str, _Storage] = {}
        """Name of a class -> what is left."""
        self._storage_of: dict[str, tuple[str, int]] = {}
        """Key of an object that reports free storage -> class, number of the place."""
        self._planned_binds: dict[str, dict[str, str]] = {}
        """Name of a volume -> UID of a pod -> key of the claim that it is to be bound to."""
        self._planned_nodes: dict[str, dict[str, str]] = {}
        """Key of a claim -> UID of a pod -> node that the claim's volume is to be made for."""
        self._planned_for: dict[str, dict[str, str]] = {}
        """Key of a claim -> UID of a pod -> name of the volume that it is to be bound to."""
        self.claim_changed: list[Callable[[str], None]] = []
        """Called with the key of a claim whose volume may be another one."""

    # --- reading -------------------------------------------------------------------------------

    def claim(self, key: str) -> Claim | None:
        return self._claims.get(key)

    def volume(self, name: str) -> Volume | None:
        found = self._volumes.get(name)
        return None if found is None else found[0]

    def class_of(self, claim: Claim) -> Class | None:
        found = self._classes.get(claim.class_name)
        return None if found is None else found[0]

    def waits(self, claim: Claim) -> bool:
        """Return whether an unbound claim is to be bound when a pod that uses it has a node."""
        found = self.class_of(claim)
        return found is not None and found.waits and not claim.volume

    def node_of(self, claim: Claim) -> str:
        """Return the node that a claim's volume is being made or planned for, or ""."""
        planned = self._planned_nodes.get(claim.key)
        return claim.selected_node or (next(iter(planned.values())) if planned else "")

    def reserved_for(self, claim: Claim) -> Volume | None:
        """Return the volume that refers to a claim, or is planned for it, and fits; or None."""
        names = self._reserved.get(claim.key, set()) | set(
            self._planned_for.get(claim.key, {}).values()
        )
        fitting = []
        for name in names:
            volume = self.volume(name)
            if (
                volume is not None
                and self._is_for(volume, claim)
                and volume.class_name == claim.class_name
                and volume.size >= claim.size
                and volume.volume_mode == claim.volume_mode
                and not volume.deleting
            ):
                fitting.append(volume)
        return min(fitting, key=lambda each: (each.size, each.name), default=None)

    def candidates(self, class_name: str) -> Candidates:
        """Return the volumes of a class, at least those that are free."""
        found = self._candidates.get(class_name)
        if found is None:
            found = self._candidates[class_name] = Candidates(
                (volume, place, self._is_free(volume))
                for volume, place in map(
                    self._volumes.__getitem__, self._of_class.get(class_name, ())
                )
                if _may_be_free(volume)
            )
        return found

    def rows_of(self, volume: Volume) -> NDArray[np.bool_]:
        """Return for each row whether a known volume can be reached from there."""
        return self.places.rows_in(self._volumes[volume.name][1])

    def rows_for_new(self, storage_class: Class) -> NDArray[np.bool_]:
        """Return for each row whether volumes of a known class can be made for it."""
        return self.places.rows_in(self._classes[storage_class.name][1])

    def reports_storage(self, storage_class: Class) -> bool:
        """Return whether the class' driver reports how much storage is left."""
        return storage_class.provisioner in self._drivers

    def rows_with_storage(self, storage_class: Class, size: int, length: int) -> NDArray[np.bool_]:
        """Return for each row whether a volume of `size` bytes can be made. length: of all rows."""
        enough = np.zeros(length, dtype=np.bool_)
        storage = self._storage.get(storage_class.name)
        if storage is not None:
            left = storage.by_place(self.places.size, size)
            for layer in self.places.layers():
                enough |= left[layer] >= size
        return enough

    def attached(self, key: str) -> Attached | None:
        """Return what the volume of a claim takes of a node, None if that is not known."""
        claim = self._claims.get(key)
        if claim is None:
            return None
        volume = self.volume(claim.volume) if claim.volume else None
        if volume is not None:
            return volume.attached
        storage_class = self._classes.get(claim.class_name)
        if storage_class is None or not storage_class[0].provisioner:
            return None
        return attached_by_provisioner(storage_class[0].provisioner, key)

    def _is_for(self, volume: Volume, claim: Claim) -> bool:
        if volume.claim:
            return volume.is_for(claim)
        return claim.key in self._planned_binds.get(volume.name, {}).values()

    def _is_free(self, volume: Volume) -> bool:
        return _may_be_free(volume) and volume.name not in self._planned_binds

    # --- objects -------------------------------------------------------------------------------

    def set_claim(self, claim: Claim) -> None:
        if self._claims.get(claim.key) != claim:
            self._claims[claim.key] = claim
            self._changed(claim.key)

    def delete_claim(self, key: str) -> None:
        if self._claims.pop(key, None) is not None:
            self._changed(key)

    def set_volume(self, volume: Volume) -> None:
        known = self._volumes.get(volume.name)
        if known is not None and known[0] == volume:
            return
        place = self.places.hold(volume.place)
        self._volumes[volume.name] = volume, place
        if known is not None:
            self._forget(*known, keeps_class=known[0].class_name == volume.class_name)
        self._of_class.setdefault(volume.class_name, set()).add(volume.name)
        if volume.claim:
            self._reserved.setdefault(volume.claim, set()).add(volume.name)
        candidates = self._candidates.get(volume.class_name)
        if (
            candidates is not None
            # A volume that is made for a claim never was free, and the others stay in order.
            and (volume.name in candidates or _may_be_free(volume))
            and not candidates.replace(volume, place, self._is_free(volume))
        ):
            del self._candidates[volume.class_name]
        self._changed(volume.claim)

    def delete_volume(self, name: str) -> None:
        known = self._volumes.pop(name, None)
        if known is not None:
            self._forget(*known, keeps_class=False)
            self._changed(known[0].claim)

    def set_class(self, storage_class: Class) -> None:
        known = self._classes.get(storage_class.name)
        if known is not None and known[0] == storage_class:
            return
        place = self.places.hold(storage_class.topologies)
        self._classes[storage_class.name] = storage_class, place
        if known is not None:
            self.places.release(known[1])
        self._class_changed(storage_class.name)

    def delete_class(self, name: str) -> None:
        known = self._classes.pop(name, None)
        if known is not None:
            self.places.release(known[1])
            self._class_changed(name)

    def set_driver(self, name: str, *, reports_storage: bool) -> None:
        """Take a CSIDriver."""
        if reports_storage == (name in self._drivers):
            return
        if reports_storage:
            self._drivers.add(name)
        else:
            self._drivers.discard(name)
        self.version += 1

    def set_storage(self, key: str, class_name: str, place: Place, left: int) -> None:
        """Take what an object reports: how large a new volume of a class can be at most."""
        number = self.places.hold(place)
        if self._storage_of.get(key) == (class_name, number):
            self.places.release(number)
            # Drivers report all the time; what was asked for is mostly far from what is left.
            if self._storage[class_name].set(key, number, left):
                self.version += 1
            return
        self.delete_storage(key)
        self._storage_of[key] = class_name, number
        self._storage.setdefault(class_name, _Storage()).set(key, number, left)
        self.version += 1

    def delete_storage(self, key: str) -> None:
        known = self._storage_of.pop(key, None)
        if known is None:
            return
        class_name, number = known
        storage = self._storage[class_name]
        storage.remove(key, number)
        if not storage:
            del self._storage[class_name]
        self.places.release(number)
        self.version += 1

    def _forget(self, volume: Volume, place: int, *, keeps_class: bool) -> None:
        """Take a former state of a volume out of what is derived from volumes."""
        self.places.release(place)
        if not keeps_class:
            names = self._of_class[volume.class_name]
            names.discard(volume.name)
            if not names:
                del self._of_class[volume.class_name]
            candidates = self._candidates.get(volume.class_name)
            if candidates is not None and volume.name in candidates:
                del self._candidates[volume.class_name]
        if volume.claim:
            reserved = self._reserved[volume.claim]
            reserved.discard(volume.name)
            if not reserved:
                del self._reserved[volume.claim]
            self._tell(volume.claim)

    def _changed(self, claim: str) -> None:
        self.version += 1
        if claim:
            self._tell(claim)

    def _class_changed(self, name: str) -> None:
        self.version += 1
        for key, claim in self._claims.items():
            if claim.class_name == name and not claim.bound:
                self._tell(key)

    def _tell(self, claim: str) -> None:
        for listener in self.claim_changed:
            listener(claim)

    # --- bookings ------------------------------------------------------------------------------

    def place(self, booking: Booking) -> None:
        """Hold the volumes that a placement plans with."""
        planned = booking.allocation.volumes
        if not planned:
            return
        for claim, volume in planned.binds:
            self._planned_binds.setdefault(volume, {})[booking.uid] = claim
            self._planned_for.setdefault(claim, {})[booking.uid] = volume
            self._set_free(volume)
        for claim in planned.provisions:
            self._planned_nodes.setdefault(claim, {})[booking.uid] = booking.node
        self.version += 1

    def remove(self, booking: Booking) -> None:
        """Take back what `place` did."""
        planned = booking.allocation.volumes
        if not planned:
            return
        for claim, volume in planned.binds:
            _drop(self._planned_binds, volume, booking.uid)
            _drop(self._planned_for, claim, booking.uid)
            self._set_free(volume)
        for claim in planned.provisions:
            _drop(self._planned_nodes, claim, booking.uid)
        self.version += 1

    def _set_free(self, name: str) -> None:
        volume = self.volume(name)
        if volume is not None and volume.class_name in self._candidates:
            self._candidates[volume.class_name].set_free(name, self._is_free(volume))


class _Storage:
    """What is left of one class, by place. Several objects may report one place."""

    def __init__(self) -> None:
        self._reports: dict[int, dict[str, int]] = {}
        self._left: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._asked: list[int] = []
        """Sizes that were asked for since an answer changed last, ascending."""

    def __bool__(self) -> bool:
        return bool(self._reports)

    def by_place(self, size: int, asked: int) -> NDArray[np.int64]:
        """Return the largest volume that can be made by place, of `size` places and nowhere.

        asked: the size in bytes that the result is compared with.
        """
        at = bisect_right(self._asked, asked)
        if not at or self._asked[at - 1] != asked:
            self._asked.insert(at, asked)
        if len(self._left) < size + 1:
            # Twice as long, so that it is made again rarely; the last index stands for nowhere.
            self._left = np.full(2 * size + 2, _NONE_LEFT, dtype=np.int64)
            for number in self._reports:
                self._sum_up(number)
        return self._left

    def set(self, key: str, number: int, left: int) -> bool:
        """Take a report; return whether it changes the answer on a size that was asked for."""
        before = self._most(number)
        self._reports.setdefault(number, {})[key] = left
        self._sum_up(number)
        low, high = sorted((before, self._most(number)))
        changed = bisect_right(self._asked, low) != bisect_right(self._asked, high)
        if changed:
            # The answers so far are old now, so only the next ones count.
            self._asked.clear()
        return changed

    def remove(self, key: str, number: int) -> None:
        del self._reports[number][key]
        if not self._reports[number]:
            del self._reports[number]
        self._sum_up(number)

    def _most(self, number: int) -> int:
        return max(self._reports.get(number, {}).values(), default=_NONE_LEFT)

    def _sum_up(self, number: int) -> None:
        if number < len(self._left):
            self._left[number] = self._most(number)


def _may_be_free(volume: Volume) -> bool:
    """Return whether the volume can be bound to any claim, unless a placement plans with it."""
    return volume.available and not volume.deleting and not volume.claim


def _drop(table: dict[str, dict[str, str]], key: str, uid: str) -> None:
    of_key = table[key]
    del of_key[uid]
    if not of_key:
        del table[key]
