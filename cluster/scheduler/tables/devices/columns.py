"""The devices of one type as columns, padded to the same number of devices for each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import numpy as np

from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.devices.inventory import DeviceUnit
from cluster.scheduler.tables.devices.request import DEVICE_RESOURCES

NO_SEGMENT: Final = -1
_FIRST_SLOTS: Final = 16
_FIRST_DEVICES: Final = 8
"""The GPUs of most machines; the columns double when a node has more."""
_MANY_LABEL_SETS: Final = 1024
"""Label sets beyond twice the number of devices that are kept before unused ones are dropped."""


class Segments(NamedTuple):
    """The parts of one node as numbers from 0."""

    numa: Mapping[int, int]
    pcie: Mapping[tuple[int, str], int]


def segments_of(units: Iterable[DeviceUnit]) -> Segments:
    """Number the NUMA nodes and PCIe switches of a node's devices, ascending."""
    places = {(unit.numa, unit.pcie) for unit in units}
    numas = sorted({numa for numa, _ in places})
    return Segments(
        {numa: number for number, numa in enumerate(numas)},
        {place: number for number, place in enumerate(sorted(places))},
    )


class DeviceColumns:
    """The devices of one type: axes slot, device, and for amounts resource (`resources`).

    present: the slot has a device there. total, free: amounts; free is negative where pods hold
    more than the device has. holders: how many pods or reservations hold a part. closed: how many
    pods have the device's PCIe switch for themselves. free_functions: virtual functions that no pod
    has. minor: number of the device. numa, pcie: numbers within the node, the same for all types;
    NO_SEGMENT without topology. labels: number of the device's label set.

    By slot: unattributed: devices that pods requested although nothing says which ones they got.
    unknown_switch: whether a device does not say on which PCIe switch it is.
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
        self.free_functions = np.zeros(shape, dtype=np.int32)
        self.unattributed = np.zeros(_FIRST_SLOTS, dtype=np.int64)
        self.unknown_switch = np.zeros(_FIRST_SLOTS, dtype=np.bool_)
        self.label_sets: list[Mapping[str, str]] = [{}]
        self._label_numbers: dict[frozenset[tuple[str, str]], int] = {frozenset(): 0}

    def clear(self, slot: int) -> None:
        for column in (
            self.present,
            self.total,
            self.free,
            self.holders,
            self.closed,
            self.free_functions,
        ):
            column[slot] = 0
        self.numa[slot] = NO_SEGMENT
        self.pcie[slot] = NO_SEGMENT
        self.unattributed[slot] = 0
        self.unknown_switch[slot] = False

    def set(self, slot: int, units: tuple[DeviceUnit, ...], segments: Segments) -> None:
        """Describe the devices of a slot; nothing is held of them."""
        self.clear(slot)
        if len(self.label_sets) > _MANY_LABEL_SETS + 2 * np.count_nonzero(self.present):
            self._forget_unused_labels()
        for index, unit in enumerate(units):
            self.present[slot, index] = True
            self.minor[slot, index] = unit.minor
            self.labels[slot, index] = self._label_number(unit.labels)
            self.free_functions[slot, index] = len(unit.functions)
            if unit.switch is None:
                self.unknown_switch[slot] = True
            if unit.has_topology:
                self.numa[slot, index] = segments.numa[unit.numa]
                self.pcie[slot, index] = segments.pcie[unit.numa, unit.pcie]
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

    def count(self, slot: int, index: int, amounts: Amounts, functions: int, sign: int) -> None:
        """Take amounts and virtual functions of a device (sign 1), or give them back (-1)."""
        self.holders[slot, index] += sign
        self.free_functions[slot, index] -= sign * functions
        for name, amount in amounts.items():
            self.free[slot, index, self.column[name]] -= sign * amount

    def grow(self, slots: int, devices: int) -> None:
        """Make room for that many slots, and devices of a slot."""
        for name, old in vars(self).items():
            if isinstance(old, np.ndarray):
                shape = (slots, devices, *old.shape[2:])[: old.ndim]
                empty = NO_SEGMENT if old is self.numa or old is self.pcie else 0
                new = np.full(shape, empty, dtype=old.dtype)
                new[tuple(map(slice, old.shape))] = old
                setattr(self, name, new)
