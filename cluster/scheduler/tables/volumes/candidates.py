"""Persistent volumes of one class as columns, in the order in which claims prefer them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from apis.meta import matches
from cluster.scheduler.tables.volumes.objects import Claim, Volume


class Candidates:
    """Volumes by size, then by name. An index into the columns is also a rank: smaller is better.

    places: number of the place of each volume. A volume that is not free is planned for a claim, or
    stopped to be available after it was taken in: it belongs to a claim or is being deleted.
    """

    def __init__(self, volumes: Iterable[tuple[Volume, int, bool]]) -> None:
        """volumes: (volume, number of its place, whether it is free)."""
        ordered = sorted(volumes, key=lambda each: (each[0].size, each[0].name))
        self.volumes = [volume for volume, _, _ in ordered]
        self.places: NDArray[np.int64] = np.array([each[1] for each in ordered], dtype=np.int64)
        self._sizes = np.array([volume.size for volume in self.volumes], dtype=np.int64)
        self._free = np.array([each[2] for each in ordered], dtype=np.bool_)
        self._index = {volume.name: number for number, volume in enumerate(self.volumes)}
        numbers: dict[tuple[frozenset[str], str], int] = {}
        self._kinds = np.array(
            [numbers.setdefault(_kind(volume), len(numbers)) for volume in self.volumes],
            dtype=np.int64,
        )
        self._kinds_known = list(numbers)

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def replace(self, volume: Volume, place: int, free: bool) -> bool:
        """Take the new state of a volume; return whether that was possible in place."""
        number = self._index.get(volume.name)
        if number is None:
            return False
        old = self.volumes[number]
        if old.size != volume.size or _kind(old) != _kind(volume):
            return False
        self.volumes[number] = volume
        self.places[number] = place
        self._free[number] = free
        return True

    def set_free(self, name: str, free: bool) -> None:
        """Set whether a volume may be bound to any claim."""
        number = self._index.get(name)
        if number is not None:
            self._free[number] = free

    def for_claim(self, claim: Claim) -> NDArray[np.intp]:
        """Return the indexes of the free volumes that a claim can be bound to, best first."""
        if not self.volumes:
            return np.zeros(0, dtype=np.intp)
        fitting = np.array(
            [
                claim.modes <= modes and claim.volume_mode == volume_mode
                for modes, volume_mode in self._kinds_known
            ]
        )
        found = np.flatnonzero(self._free & (self._sizes >= claim.size) & fitting[self._kinds])
        if claim.selector is None:
            return found
        selected = [
            number for number in found if matches(claim.selector, dict(self.volumes[number].labels))
        ]
        return np.array(selected, dtype=np.intp)


def _kind(volume: Volume) -> tuple[frozenset[str], str]:
    return volume.modes, volume.volume_mode
