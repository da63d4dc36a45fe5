"""Plans settings of the whole host: numbers in files of /proc/sys and /sys, scheduler features.

Only the settings of `linux.kernel_settings` are written. The original is journaled as everywhere; a
value that another program writes over ours becomes the original.
"""

from __future__ import annotations

import msgspec

from hooks.state import State
from koordlet.executor.records import Record
from koordlet.executor.slots import Act, Plan, PlannedWrite, Slot
from koordlet.executor.table import SlotTable
from linux import kernel_settings


def plan_setting(table: SlotTable, slot: Slot, plan: Plan, out: list[PlannedWrite]) -> None:
    """Plan the write of one setting."""
    try:
        paths = kernel_settings.paths_of(slot.key)
    except ValueError as error:
        table.set_state(slot, State.BLOCKED, str(error))
        return
    found: str | None = None
    for path in paths:
        slot.locate_file(path)
        try:
            content = table.host.read(path).decode("ascii", "replace")
        except FileNotFoundError:
            continue
        except OSError as error:
            table.reject(slot, error)
            return
        found = kernel_settings.read_setting(slot.key, content)
        break
    if found is None:
        if slot.want is None:
            plan.finish(slot)
        else:
            where = " and no ".join(paths)
            table.set_state(slot, State.UNSUPPORTED, f"this kernel has no {where} with {slot.key}")
        return
    slot.observe(found)
    value = wanted(table, slot, found, plan)
    if value is not None:
        data = kernel_settings.written(slot.key, value)
        write(table, slot, found, value, data, plan, out)


def wanted(table: SlotTable, slot: Slot, found: str, plan: Plan) -> str | None:
    """Return the value to write: the claim's, or the original; None if there is nothing to do."""
    record = table.journal.get(*slot.slot_key)
    if slot.want is None:
        original = record.original if record is not None else None
        if record is None or original is None or found not in record.ours or found == original:
            plan.finish(slot)
            return None
        return original
    value = str(slot.want.value)
    if found != value:
        return value
    slot.aim(found)
    slot.observe(found)
    slot.accept()
    table.in_force(slot)
    return None


def write(
    table: SlotTable,
    slot: Slot,
    found: str,
    value: str,
    data: str,
    plan: Plan,
    out: list[PlannedWrite],
) -> None:
    """Plan the write of `value`, and journal the original before. data: the text that sets it."""
    if slot.want is not None:
        record = table.journal.get(*slot.slot_key)
        if record is None or found not in record.ours:
            record = Record(
                place=slot.place,
                inode=0,
                resource=slot.resource,
                key=slot.key,
                original=found,
                ours=() if record is None else record.ours,
            )
        record = msgspec.structs.replace(record, policy=slot.want.claim.policy)
        # The value in force stays among ours, also while writes of newer ones are refused.
        plan.keep(record.with_ours(*(one for one in record.ours if one == found), value))
    slot.aim(value)
    plan.add(
        PlannedWrite(
            act=Act.WRITE,
            path=slot.path,
            slot=slot.slot_key,
            subject=slot.subject,
            old=found,
            new=value,
            why=slot.why,
            data=data.encode(),
        ),
        out,
    )
