"""The devices that a scheduling hint asks for: those that are recorded on the pod, no others."""

from __future__ import annotations

from dataclasses import replace

from cluster.scheduler.exact.devices.candidates import NO_LIMITS, Limits, smaller
from cluster.scheduler.plugins.devices.settings import Settings
from cluster.scheduler.tables.amounts import Amounts
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.scheduling_hint import has_hint, hint_of
from cluster.scheduler.tables.shapes import PodShape


def asks_for_devices(pod: PodShape, settings: Settings) -> bool:
    """Return whether the pod has to get the devices that are recorded on it."""
    return settings.follows_hints and has_hint(pod) and bool(pod.derived(hint_of).devices)


def limits_of_hint(pod: PodShape, devices: DeviceTable, row: int, settings: Settings) -> Limits:
    """Return the devices of a node that a pod may get by its hint, and how much of each."""
    if not asks_for_devices(pod, settings):
        return NO_LIMITS
    hinted = pod.derived(hint_of).devices
    required: dict[str, dict[int, Amounts]] = {type_: {} for type_, each in hinted.items() if each}
    functions = {}
    for (type_, minor), share in devices.holding(row, hinted).items():
        required[type_][minor] = share.amounts
        if share.functions:
            functions[type_, minor] = share.functions
    return Limits(required=required, functions=functions)


def narrowed(limits: Limits, by: Limits) -> Limits:
    """Return the limits of a NUMA affinity and a reservation, within those of a hint."""
    if by is NO_LIMITS:
        return limits
    required = dict(limits.required)
    for type_, hinted in by.required.items():
        reserved = required.get(type_)
        required[type_] = (
            hinted
            if reserved is None
            else {
                minor: smaller(amounts, reserved[minor])
                for minor, amounts in hinted.items()
                if minor in reserved
            }
        )
    return replace(limits, required=required, functions=by.functions)
