"""Which claims and disks the pods of each node use, and how many places of drivers they take.

A row is counted again, when a filter next looks, after a pod came or went, a claim got another
volume, or its CSINode or an attachment changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from apis.scheduling_pod import SchedulingNode
from apis.storage import ANNOTATION_MIGRATED_PLUGINS, CSINode
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.nodes import NodeTable
from cluster.scheduler.tables.shapes import PodDisk
from cluster.scheduler.tables.volumes.objects import MIGRATED, Attached
from cluster.scheduler.tables.volumes.table import VolumeTable

K = TypeVar("K", bound=Hashable)
V = TypeVar("V", bound=Hashable)

UNLIMITED: Final = -1

_MOST_DRIVERS: Final = 64
"""Chosen: drivers of one CSINode whose limits count. Nodes have a few; each name costs two columns
of all nodes, so that an object of thousands of names would take all memory."""


@dataclass(frozen=True, slots=True)
class DriverLimits:
    """What a CSINode says. most: volumes that a driver can attach to the node, by driver, of at
    most 64 drivers. migrated: in-tree plugins, of those that count, whose volumes drivers serve
    there."""

    most: Mapping[str, int]
    migrated: frozenset[str]


def limits_of(node: CSINode) -> DriverLimits:
    """Return what the tables keep of a CSINode."""
    plugins = node.metadata.annotations.get(ANNOTATION_MIGRATED_PLUGINS, "")
    most = dict(islice(_limited(node).items(), _MOST_DRIVERS))
    return DriverLimits(most, frozenset(MIGRATED.keys() & plugins.split(",")))


def unused_limits(node: CSINode) -> tuple[str, ...]:
    """Return what of a CSINode does not count, as a sentence for the log."""
    count = len(_limited(node))
    if count <= _MOST_DRIVERS:
        return ()
    return (
        f"CSINode {node.metadata.name}: spec.drivers limits the volumes of {count} drivers; "
        f"only the limits of the first {_MOST_DRIVERS} count",
    )


def _limited(node: CSINode) -> dict[str, int]:
    return {
        driver.name: min(driver.allocatable.count, 2**31)
        for driver in node.spec.drivers or ()
        if driver.allocatable is not None and driver.allocatable.count is not None
    }


_NO_LIMITS: Final = DriverLimits({}, frozenset())


class AttachmentTable:
    """Follows bookings, nodes and the objects of CSI drivers."""

    def __init__(self, nodes: NodeTable, volumes: VolumeTable) -> None:
        self.version = 0
        """Grows with each change of what is attached or can be."""
        self._nodes = nodes
        self._volumes = volumes
        volumes.claim_changed.append(self._claim_changed)
        self._uses: dict[str, Counter[int]] = {}
        """Key of a claim -> count of the pods that use it, by row."""
        self._claims_on: dict[int, Counter[str]] = {}
        self._disks: dict[tuple[str, str], Counter[tuple[int, PodDisk]]] = {}
        self._limits: dict[str, DriverLimits] = {}
        """By name of the node."""
        self._in_force: dict[int, DriverLimits] = {}
        """What the columns hold, by row."""
        self._attachments: dict[str, dict[str, tuple[str, str]]] = {}
        """Name of a node -> name of a VolumeAttachment -> driver, name of the volume."""
        self._node_of: dict[str, str] = {}
        """Name of a VolumeAttachment -> name of its node."""
        self._dirty: set[int] = set()
        self._rows: dict[int, frozenset[Attached]] = {}
        """What takes places, by row, as last counted."""
        self._rows_with: dict[Attached, set[int]] = {}
        self._drivers: dict[str, _Driver] = {}
        self._migrated: dict[str, NDArray[np.bool_]] = {}

    # --- reading -------------------------------------------------------------------------------

    def in_use(self, claim: str) -> bool:
        """Return whether a pod with a node uses a claim."""
        return claim in self._uses

    def rows_in_conflict(self, disk: PodDisk) -> Iterator[int]:
        """Yield the rows where a pod uses a disk that `disk` cannot be shared with."""
        for row, used in self._disks.get((disk.kind, disk.name), ()):
            shared = disk.read_only and used.read_only
            same = not disk.monitors or not set(disk.monitors).isdisjoint(used.monitors)
            if same and not shared:
                yield row

    def has_limit(self, driver: str) -> bool:
        """Return whether any node limits the volumes of a driver."""
        return driver in self._drivers

    def exceeded(self, wanted: Iterable[Attached]) -> NDArray[np.bool_]:
        """Return for each row whether a driver there has no places left for what is wanted.

        What is attached to a row already takes no further place.
        """
        self._follow()
        length = len(self._nodes)
        more: dict[str, NDArray[np.int64]] = {}
        for volume in set(wanted):
            if not self.has_limit(volume.driver):
                continue
            count = more.setdefault(volume.driver, np.zeros(length, dtype=np.int64))
            new = np.ones(length, dtype=np.bool_)
            if volume.plugin:
                new &= self._serves(volume.plugin, length)
            new[list(self._rows_with.get(volume, ()))] = False
            count += new
        result = np.zeros(length, dtype=np.bool_)
        for name, count in more.items():
            driver = self._drivers[name]
            most, taken = driver.columns(length)
            result |= (most != UNLIMITED) & (count > 0) & (taken + count > most)
        return result

    # --- objects -------------------------------------------------------------------------------

    def set_limits(self, node: str, limits: DriverLimits | None) -> None:
        """Take what a CSINode says, None if it is gone."""
        if limits is None:
            self._limits.pop(node, None)
        else:
            self._limits[node] = limits
        row = self._nodes.row(node)
        if row is not None:
            self._set_row(row, limits or _NO_LIMITS)

    def set_attachment(self, name: str, node: str, driver: str, volume: str) -> None:
        """Take a VolumeAttachment."""
        self.delete_attachment(name)
        self._node_of[name] = node
        self._attachments.setdefault(node, {})[name] = driver, volume
        self._touch(self._nodes.row(node))

    def delete_attachment(self, name: str) -> None:
        node = self._node_of.pop(name, None)
        if node is None:
            return
        of_node = self._attachments[node]
        del of_node[name]
        if not of_node:
            del self._attachments[node]
        self._touch(self._nodes.row(node))

    def set_node(self, row: int, node: SchedulingNode) -> None:
        """Take a node: what is known of its name holds for its row."""
        name = node.metadata.name
        self._set_row(row, self._limits.get(name, _NO_LIMITS))
        if name in self._attachments:
            self._touch(row)

    def forget_node(self, row: int) -> None:
        self._set_row(row, _NO_LIMITS)
        self._touch(row)

    def _set_row(self, row: int, limits: DriverLimits) -> None:
        before = self._in_force.pop(row, _NO_LIMITS)
        if limits != _NO_LIMITS:
            self._in_force[row] = limits
        if limits == before:
            return
        for name in before.most.keys() | limits.most.keys():
            driver = self._drivers.get(name)
            if driver is None:
                driver = self._drivers[name] = _Driver()
            driver.set_limit(row, limits.most.get(name, UNLIMITED))
            if not driver.limited:
                del self._drivers[name]
        for plugin in before.migrated ^ limits.migrated:
            self._migrated.setdefault(plugin, np.zeros(0, dtype=np.bool_))
            self._serves(plugin, row + 1)[row] = plugin in limits.migrated
        self._touch(row)

    def _serves(self, plugin: str, length: int) -> NDArray[np.bool_]:
        """Return for each row whether a driver serves the volumes of an in-tree plugin."""
        known = self._migrated.get(plugin)
        if known is None:
            return np.zeros(length, dtype=np.bool_)
        if len(known) < length:
            known = self._migrated[plugin] = np.pad(known, (0, length))
        return known[:length]

    # --- bookings ------------------------------------------------------------------------------

    def place(self, booking: Booking, row: int) -> None:
        """Count what a booking uses."""
        shape = booking.shape
        for claim in shape.claims:
            key = f"{shape.namespace}/{claim.name}"
            self._uses.setdefault(key, Counter())[row] += 1
            self._claims_on.setdefault(row, Counter())[key] += 1
        for disk in shape.disks:
            self._disks.setdefault((disk.kind, disk.name), Counter())[row, disk] += 1
        if shape.claims or shape.disks:
            self._touch(row)

    def remove(self, booking: Booking, row: int) -> None:
        """Take back what `place` did."""
        shape = booking.shape
        for claim in shape.claims:
            key = f"{shape.namespace}/{claim.name}"
            _take(self._uses, key, row)
            _take(self._claims_on, row, key)
        for disk in shape.disks:
            _take(self._disks, (disk.kind, disk.name), (row, disk))
        if shape.claims or shape.disks:
            self._touch(row)

    def _claim_changed(self, key: str) -> None:
        for row in self._uses.get(key, ()):
            self._touch(row)

    def _touch(self, row: int | None) -> None:
        if row is not None:
            self._dirty.add(row)
            self.version += 1

    # --- counting ------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Count the rows again that changed."""
        for row in self._dirty:
            self._count(row)
        self._dirty.clear()

    def _count(self, row: int) -> None:
        before = self._rows.get(row, frozenset())
        after = frozenset(self._attached_to(row))
        for volume in before - after:
            rows = self._rows_with[volume]
            rows.discard(row)
            if not rows:
                del self._rows_with[volume]
        for volume in after - before:
            self._rows_with.setdefault(volume, set()).add(row)
        if after:
            self._rows[row] = after
        else:
            self._rows.pop(row, None)
        counts = Counter(
            volume.driver
            for volume in after
            if not volume.plugin or self._serves(volume.plugin, row + 1)[row]
        )
        for name in {volume.driver for volume in before | after}:
            driver = self._drivers.get(name)
            if driver is not None:
                driver.set_taken(row, counts[name])

    def _attached_to(self, row: int) -> Iterator[Attached]:
        for claim in self._claims_on.get(row, ()):
            if (volume := self._volumes.attached(claim)) is not None:
                yield volume
        if row >= len(self._nodes) or not self._nodes.alive[row]:
            return
        for driver, name in self._attachments.get(self._nodes.name(row), {}).values():
            known = self._volumes.volume(name)
            if known is not None and known.attached is not None:
                yield known.attached._replace(driver=driver)


class _Driver:
    """Places of one driver by row. limited: count of the rows with a limit."""

    def __init__(self) -> None:
        self.limited = 0
        self._most: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._taken: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def columns(self, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the limits and the places that are taken, of the first `length` rows."""
        if len(self._most) < length:
            self._most = np.pad(self._most, (0, length), constant_values=UNLIMITED)
            self._taken = np.pad(self._taken, (0, length))
        return self._most[:length], self._taken[:length]

    def set_limit(self, row: int, most: int) -> None:
        limits, _ = self.columns(row + 1)
        self.limited += int(most != UNLIMITED) - int(limits[row] != UNLIMITED)
        limits[row] = most

    def set_taken(self, row: int, taken: int) -> None:
        self.columns(row + 1)[1][row] = taken


def _take(table: dict[K, Counter[V]], key: K, value: V) -> None:
    counter = table[key]
    counter[value] -= 1
    if not counter[value]:
        del counter[value]
    if not counter:
        del table[key]
