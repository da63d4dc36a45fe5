"""The devices of one type as columns, padded to the same number of devices for each node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.device_inventory import DeviceUnit
from cluster.scheduler.tables.device_request import DEVICE_RESOURCES

NO_SEGMENT: Final = -1
_FIRST_SLOTS: Final = 16
_FIRST_DEVICES: Final = 8
"""The GPUs of most machines; the columns double when a node has more."""
_MANY_LABEL_SETS: Final = 1024
"""Label sets beyond twice the number of devices that are kept before unused ones are dropped."""


class DeviceColumns:
    """The devices of one type: axes slot, device, and for amounts resource (`resources`).

    present: the slot has a device there. total, free: amounts; free is negative where pods hold
    more than the device has. holders: how many pods or reservations hold a part. closed: how many
    pods have the device's PCIe switch for themselves. minor: number of the device. numa, pcie:
    numbers within the node, ascending with NUMA node and PCIe id; NO_SEGMENT without topology.
    labels: number of the device's label set. unattributed: by slot, devices that pods requested
    although nothing says which ones they got.
    """

    def __init__(self, type_: str) -> None:
        self.type = type_
        self.resources = DEVICE_RESOURCES[type_]
        self.column = {name: index for index, name in enumerate(self.resources)}
        shape = _FIRST_SLOTS, _FIRST_DEVICES
        self.present = np.zeros(shape, dtype=np.bool_)
        self.total = np.zeros((*shape, len(self.resources)), dtype=np.int64)
        self.free = np.zeros((*shape, len(self.resources)), dtype=np.int64)
        self.holders = np.zeros(shape, dtype=np.int32)
        self.closed = np.zeros(shape, dtype=np.int32)
        self.minor = np.zeros(shape, dtype=np.int32)
        self.numa = np.full(shape, NO_SEGMENT, dtype=np.int16)
        self.pcie = np.full(shape, NO_SEGMENT, dtype=np.int16)
        self.labels = np.zeros(shape, dtype=np.int32)
        self.unattributed = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.label_sets: list[Mapping[str, str]] = [{}]
        self._label_numbers: dict[frozenset[tuple[str, str]], int] = {frozenset(): 0}

    def clear(self, slot: int) -> None:
        for column in (self.present, self.total, self.free, self.holders, self.closed):
            column[slot] = 0
        self.numa[slot] = NO_SEGMENT
        self.pcie[slot] = NO_SEGMENT
        self.unattributed[slot] = 0

    def set(self, slot: int, units: tuple[DeviceUnit, ...]) -> None:
        """Describe the devices of a slot; nothing is held of them."""
        self.clear(slot)
        if len(self.label_sets) > _MANY_LABEL_SETS + 2 * np.count_nonzero(self.present):
            self._forget_unused_labels()
        numas = {numa: n for n, numa in enumerate(sorted({unit.numa for unit in units}))}
        pcies = {
            pcie: n for n, pcie in enumerate(sorted({(unit.numa, unit.pcie) for unit in units}))
        }
        for index, unit in enumerate(units):
            self.present[slot, index] = True
            self.minor[slot, index] = unit.minor
            self.labels[slot, index] = self._label_number(unit.labels)
            if unit.has_topology:
                self.numa[slot, index] = numas[unit.numa]
                self.pcie[slot, index] = pcies[unit.numa, unit.pcie]
            for name, amount in unit.total.items():
                self.total[slot, index, self.column[name]] = amount
        self.free[slot] = self.total[slot]

    def _forget_unused_labels(self) -> None:
        """Renumber the label sets, without those that no device has any more."""
        self.labels[~self.present] = 0
        used = np.unique(self.labels[self.present])
        self.label_sets = [{}, *(self.label_sets[number] for number in used if number)]
        self._label_numbers = {
            frozenset(labels.items()): number for number, labels in enumerate(self.label_sets)
        }
        self.labels = np.searchsorted(np.union1d([0], used), self.labels).astype(np.int32)

    def _label_number(self, labels: Mapping[str, str]) -> int:
        key = frozenset(labels.items())
        number = self._label_numbers.get(key)
        if number is None:
            number = self._label_numbers[key] = len(self.label_sets)
            self.label_sets.append(labels)
        return number

    def count(self, slot: int, index: int, amounts: Amounts, sign: int) -> None:
        """Take `amounts` of a device (sign 1), or give them back (sign -1)."""
        self.holders[slot, index] += sign
        for name, amount in amounts.items():
            self.free[slot, index, self.column[name]] -= sign * amount

    def grow(self, slots: int, devices: int) -> None:
        """Make room for that many slots, and devices of a slot."""
        for name in ("present", "total", "free", "holders", "closed", "minor", "labels"):
            setattr(self, name, _grown(getattr(self, name), slots, devices, 0))
        for name in ("numa", "pcie"):
            setattr(self, name, _grown(getattr(self, name), slots, devices, NO_SEGMENT))
        more = np.zeros(slots - len(self.unattributed), dtype=np.int64)
        self.unattributed = np.concatenate((self.unattributed, more))


def _grown(old: NDArray[np.generic], slots: int, devices: int, empty: int) -> NDArray[np.generic]:
    new = np.full((slots, devices, *old.shape[2:]), empty, dtype=old.dtype)
    new[: old.shape[0], : old.shape[1]] = old
    return new
