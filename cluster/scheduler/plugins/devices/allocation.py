"""DeviceShare on the chosen node: which devices the pod gets, and what is written on it."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from apis.keys import ANNOTATION_DEVICE_ALLOCATED, LABEL_GPU_ISOLATION_PROVIDER
from cluster.scheduler.exact.devices import failures
from cluster.scheduler.exact.devices.allocate import Devices, allocate
from cluster.scheduler.exact.devices.candidates import NO_LIMITS, Limits
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.exact.devices.numa_hints import device_hints
from cluster.scheduler.exact.devices.records import (
    DeviceRecord,
    adapted_record,
    device_record,
)
from cluster.scheduler.exact.numa import Hints
from cluster.scheduler.plugins.contract import Reason, Recorded, Restored
from cluster.scheduler.plugins.devices.hinted import asks_for_devices, limits_of_hint, narrowed
from cluster.scheduler.plugins.devices.reserved import limits_within
from cluster.scheduler.plugins.devices.settings import DEFAULT, NAME, Settings, requested, rules_of
from cluster.scheduler.tables.booking import Allocation, Booking
from cluster.scheduler.tables.devices.request import DeviceRequest, device_request
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables


class DeviceShareAllocator:
    """Chooses the devices on the chosen node, and writes them on the pod."""

    name = NAME

    def __init__(
        self,
        devices: DeviceTable,
        settings: Settings = DEFAULT,
        restored: Restored | None = None,
    ) -> None:
        """restored: devices of reservations are free for pods that may use these."""
        self._devices = devices
        self._settings = settings
        self._restored = restored

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        """Return whether the pod requests devices, or claims some that it was not given."""
        if ANNOTATION_DEVICE_ALLOCATED in pod.annotations:
            return True
        return isinstance(pod.derived(device_request), DeviceRequest)

    def allocate(
        self, pod: PodShape, tables: Tables, row: int, allocation: Allocation
    ) -> Allocation | Reason:
        numa = frozenset(node for node, _ in allocation.numa)
        limits = Limits(numa=numa) if numa and self._settings.align else NO_LIMITS
        without: Set[str] = frozenset()
        if allocation.reservation:
            # What the reservation holds is free for its owner, who takes it first.
            without = frozenset({allocation.reservation})
            within = limits_within(
                self._devices, tables, row, allocation.reservation, self._restored
            )
            limits = replace(within, numa=limits.numa)
        elif self._restored is not None:
            without = self._restored.ignored(pod, tables, row)
        found = self.choose(pod, row, limits=limits, without=without)
        if isinstance(found, Failure):
            return Reason(found.text, found.resolvable)
        return replace(allocation, devices=found) if found else allocation

    def choose(
        self,
        pod: PodShape,
        row: int,
        *,
        limits: Limits = NO_LIMITS,
        without: Set[str] = frozenset(),
    ) -> Devices | Failure:
        """Return the devices that the pod would get on a node; nothing where kubelet allocates.

        without: UIDs of pods and reservations whose devices count as free.
        """
        request = requested(pod)
        if request is None:
            return {}
        devices = self._devices.view(row, without=without)
        if devices is None:
            by_kubelet = request.counted and not asks_for_devices(pod, self._settings)
            return {} if by_kubelet else failures.NO_DEVICES[next(iter(request.types))]
        rules = rules_of(self._settings, self._devices)
        limits = narrowed(limits, limits_of_hint(pod, self._devices, row, self._settings))
        return allocate(devices, request, limits=limits, rules=rules)

    def hints(
        self,
        pod: PodShape,
        tables: Tables,
        row: int,
        sets: Iterable[int],
        *,
        reservation: str = "",
        without: frozenset[str] = frozenset(),
    ) -> Hints | None:
        """Return which of these sets of NUMA nodes could give the devices, for the NUMA policy.

        None where devices need not be aligned, or where it is not known where they are. NUMA nodes
        without devices change nothing: a set counts as its part with devices does, so a pod whose
        CPUs need more NUMA nodes than its devices can be aligned too. Where the pod uses a
        reservation, its devices decide as they do in `allocate`.
        """
        request = pod.derived(device_request)
        devices = self._devices.view(row, without=without)
        if not self._settings.align or devices is None or not isinstance(request, DeviceRequest):
            return None
        limits = NO_LIMITS
        if reservation:
            limits = limits_within(self._devices, tables, row, reservation, self._restored)
        found = device_hints(
            devices,
            request,
            limits=narrowed(limits, limits_of_hint(pod, self._devices, row, self._settings)),
            rules=rules_of(self._settings, self._devices),
        )
        if found is None:
            return None
        with_devices = 0
        for mask in found:
            with_devices |= mask
        return {mask: found[part] for mask in sets if (part := mask & with_devices) in found}

    def record(self, booking: Booking, tables: Tables) -> Recorded:
        devices = booking.allocation.devices
        if not devices:
            if ANNOTATION_DEVICE_ALLOCATED in booking.shape.annotations:
                # Written by someone else; the node would give the pod devices that others have.
                return Recorded({ANNOTATION_DEVICE_ALLOCATED: None}, {})
            return Recorded({}, {})
        record = self._record(booking, tables)
        return Recorded(dict(record.annotations), dict(record.labels), record.lock)

    def _record(self, booking: Booking, tables: Tables) -> DeviceRecord:
        devices = booking.allocation.devices
        if not self._settings.adaption:
            return device_record(devices)
        row = tables.nodes.row(booking.node)
        view = self._devices.view(row) if row is not None else None
        return adapted_record(
            devices,
            node=booking.node,
            vendor=view.vendor if view is not None else "",
            model=view.model if view is not None else "",
            isolation=booking.shape.labels.get(LABEL_GPU_ISOLATION_PROVIDER, ""),
            now_ns=round(booking.start * 1e9),
        )
