"""The states of values, for people, events and metrics."""

from __future__ import annotations

from collections.abc import Collection

from hooks.state import State
from koordlet.executor.records import Record
from koordlet.executor.slots import ResourceView, SlotKey, Want
from koordlet.executor.table import SlotTable
from linux.resources import Resource


def views(table: SlotTable, subject: str) -> list[ResourceView]:
    """Return the states of a subject's desired values."""
    return [_view(table, key, want) for key, want in table.by_subject.get(subject, {}).items()]


def restoring(table: SlotTable) -> list[ResourceView]:
    """Return the originals that are still to be restored."""
    return [
        _view(table, slot.slot_key, None)
        for slot in table.slots.values()
        if slot.restoring is not None
    ]


def states(table: SlotTable) -> dict[tuple[Resource, State], int]:
    """Count slots by resource and state, for metrics."""
    counts: dict[tuple[Resource, State], int] = {}
    for slot in table.slots.values():
        if slot.parked:
            continue
        counts[slot.resource, slot.state] = counts.get((slot.resource, slot.state), 0) + 1
    return counts


def standing(table: SlotTable, resources: Collection[Resource]) -> list[tuple[str, ResourceView]]:
    """Return (subject, view) of every desired value of these resources."""
    return [
        (slot.want.subject, _view(table, key, slot.want))
        for key, slot in table.slots.items()
        if slot.resource in resources and slot.want is not None
    ]


def _view(table: SlotTable, key: SlotKey, want: Want | None) -> ResourceView:
    slot = table.slots[key]
    record = table.journal.get(*key)
    state, detail = slot.state, slot.detail
    if want is not None and slot.want is not None and slot.want.subject != want.subject:
        state, detail = State.BLOCKED, f"{slot.want.subject} sets the same place"
    return ResourceView(
        place=slot.place,
        resource=slot.resource,
        key=slot.key,
        path=slot.path,
        desired=slot.text or ("" if want is None else str(want.value)),
        observed=slot.found,
        state=state,
        detail=detail,
        original=None if record is None else _original(record),
        retry_in_s=max(slot.retry_at - table.clock(), 0.0),
        writes=tuple(slot.writes),
        claim=None if want is None else want.claim,
        cookie=slot.cookie,
    )


def _original(record: Record) -> str | None:
    return record.original if record.original is not None else _text(record.requested)


def _text(requested: int | str | None) -> str | None:
    return None if requested is None else str(requested)
