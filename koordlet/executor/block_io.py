"""Plans block I/O control: one line for each disk in files of a cgroup.

Several disks share a file, and each is a slot of its own: the kernel changes one disk's line with
each write. The original of a disk without a line is that it has none.

Facts: docs/facts/kernel.md, "Block I/O control".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hooks.state import State
from koordlet.executor import host_settings
from koordlet.executor.slots import Plan, PlannedWrite, Slot
from koordlet.executor.table import SlotTable
from linux.block_io import (
    BLOCK_FILES,
    OF_ROOT,
    V1_CONTROLLER,
    V2_CONTROLLER,
    line_to_write,
    read_line,
    same_as_none,
)
from linux.resources import Resource


def plan_block_io(
    table: SlotTable, virtual: Mapping[Resource, Sequence[Slot]], plan: Plan, now: float
) -> tuple[list[PlannedWrite], list[Slot]]:
    """Return the writes, iocost's parameters first, and the slots whose group lacks the file."""
    writes: list[PlannedWrite] = []
    lacking: list[Slot] = []
    contents: dict[str, str | OSError] = {}
    for resource in BLOCK_FILES:
        for slot in virtual.get(resource, ()):
            if slot.retry_at <= now:
                _plan_line(table, slot, contents, plan, writes, lacking)
    return writes, lacking


def _plan_line(
    table: SlotTable,
    slot: Slot,
    contents: dict[str, str | OSError],
    plan: Plan,
    out: list[PlannedWrite],
    lacking: list[Slot],
) -> None:
    layout = table.layout
    controller = V1_CONTROLLER if layout.version == 1 else V2_CONTROLLER
    name = BLOCK_FILES[slot.resource].name(layout.version)
    if not name or not layout.has(controller):
        _unsupported(table, slot, f"cgroup v{layout.version} of this node has no file for it", plan)
        return
    if not slot.place and BLOCK_FILES[slot.resource].form not in OF_ROOT:
        table.set_state(slot, State.BLOCKED, "its cgroup is not known")
        return
    slot.locate(layout.directory(controller, slot.place), name)
    content = contents.get(slot.path)
    if content is None:
        content = contents[slot.path] = _read(table, slot.path)
    if isinstance(content, OSError):
        if not isinstance(content, FileNotFoundError):
            table.reject(slot, content)
        elif slot.want is None or table.host.is_dir(slot.directory):
            lacking.append(slot)
            why = f"there is no {name} here: the kernel or its parent group lacks it"
            _unsupported(table, slot, why, plan)
        else:
            table.set_state(slot, State.PENDING, "no such cgroup at this time")
        return
    try:
        found = read_line(slot.resource, layout.version, slot.key, content)
    except ValueError as error:
        table.set_state(slot, State.FAILED, f"{name} is not readable: {error}")
        return
    slot.observe(found)
    value = host_settings.wanted(table, slot, found, plan)
    if value is None:
        return
    if slot.want is None and same_as_none(slot.resource, found) and not value:
        plan.finish(slot)
        return
    data = line_to_write(slot.resource, layout.version, slot.key, value)
    host_settings.write(table, slot, found, value, data, plan, out)


def _read(table: SlotTable, path: str) -> str | OSError:
    try:
        return table.host.read(path).decode("ascii", "replace")
    except OSError as error:
        return error


def _unsupported(table: SlotTable, slot: Slot, why: str, plan: Plan) -> None:
    """A file that is not there holds no value of ours either."""
    if slot.want is None:
        plan.finish(slot)
    else:
        table.set_state(slot, State.UNSUPPORTED, why)
