"""Plans values of the node: switches in /proc/sys, resctrl groups, host directories.

Only known switches are written, and only control groups that a claim names or that are koordlet's
by name. A group or directory that koordlet made is removed when no claim needs it any more.

Facts: docs/facts/kernel.md, "resctrl" and "Core scheduling".
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Final

from hooks.state import State
from koordlet.executor import host_settings
from koordlet.executor.records import Record
from koordlet.executor.slots import Act, Plan, PlannedWrite, Slot
from koordlet.executor.table import SlotTable
from linux import resctrl, resctrl_groups, sysctls
from linux.cgroup_paths import PathError, check_relative
from linux.host import Host
from linux.resources import Resource
from linux.sysctls import GROUP_IDENTITY, SCHED_CORE

_MAKING: Final = "making"
_MADE: Final = "made"
"""The value `ours` of a control group's record: before the group is made, and after."""


def plan(
    table: SlotTable, virtual: Mapping[Resource, Sequence[Slot]], plan: Plan, now: float
) -> list[PlannedWrite]:
    """Return the writes for the node, in order: directories, groups, settings of the host,
    switches off, switches on."""
    writes: list[PlannedWrite] = []
    for slot in virtual.get(Resource.HOST_DIRECTORY, ()):
        if slot.retry_at <= now:
            _directory(table, slot, plan, writes)
    _groups(table, virtual.get(Resource.RESCTRL_SCHEMATA, ()), plan, writes, now)
    for slot in virtual.get(Resource.KERNEL_SETTING, ()):
        if slot.retry_at <= now:
            host_settings.plan_setting(table, slot, plan, writes)
    switches: list[PlannedWrite] = []
    # Off before on: a switch may go on only after the other one went off.
    for slot in sorted(virtual.get(Resource.SYSCTL, ()), key=lambda slot: _goal(table, slot)):
        if slot.retry_at <= now:
            _switch(table, slot, plan, switches, now)
    return writes + switches


def ends_group_identity(writes: Sequence[PlannedWrite]) -> bool:
    """Return whether group identity is switched off; then its values have to be removed first."""
    return any(write.slot[2] == GROUP_IDENTITY and write.new == "0" for write in writes)


def hold_identities(
    table: SlotTable, writes: list[PlannedWrite], switches: Sequence[PlannedWrite]
) -> list[PlannedWrite]:
    """Return the writes without those of identities, if the kernel would refuse them.

    The kernel refuses them while their switch is off: because it refused to turn the switch on, or
    because a daemon that starts under core scheduling finds identities from an earlier run. They
    have no effect then, and are written once the switch is on.
    """
    of_identity = [write for write in writes if write.slot[1] is Resource.CPU_BVT]
    if not of_identity or any(write.slot[2] == GROUP_IDENTITY for write in switches):
        return writes
    try:
        found = table.host.read(sysctls.path_of(GROUP_IDENTITY))
    except OSError:
        return writes  # this kernel has no such switch
    if found.strip() != b"0":
        return writes
    switch = table.slots.get(("", Resource.SYSCTL, GROUP_IDENTITY))
    why = f", {switch.state}: {switch.detail}" if switch is not None and switch.detail else ""
    for write in of_identity:
        slot = table.slots.get(write.slot)
        if slot is not None:
            slot.look_again()
            table.set_state(slot, State.BLOCKED, f"{GROUP_IDENTITY} is 0{why}")
    return [write for write in writes if write.slot[1] is not Resource.CPU_BVT]


def _applied(table: SlotTable, slot: Slot, found: str) -> None:
    slot.aim(found)
    slot.observe(found)
    slot.accept()
    table.in_force(slot)


# -- switches ------------------------------------------------------------------------------------


def _goal(table: SlotTable, slot: Slot) -> str:
    """Return the value that a switch will have."""
    if slot.want is not None:
        return str(slot.want.value)
    record = table.journal.get(*slot.slot_key)
    return (record.original if record is not None else None) or ""


def _waits(
    table: SlotTable, slot: Slot, wanted: str, planned: Sequence[PlannedWrite], now: float
) -> str:
    """Return what a switch has to wait for, "" if for nothing.

    Core scheduling stays on while tasks have cookies of ours, because cookies cannot be removed
    afterwards. Neither switch goes on until the other is off: both together can lock up the kernel.
    """
    if slot.key == SCHED_CORE and wanted == "0":
        for record in table.journal.records():
            if record.resource is Resource.CORE_SCHED_COOKIE:
                holder = table.slots.get(record.record_key)
                if holder is None or holder.retry_at > now:
                    return "cookies, which have to be removed before"
    if wanted == "1":
        other = SCHED_CORE if slot.key == GROUP_IDENTITY else GROUP_IDENTITY
        try:
            on = table.host.read(sysctls.path_of(other)).strip() == b"1"
        except OSError:
            on = False
        if on and not any(write.slot[2] == other and write.new == "0" for write in planned):
            return f"{other}, which is still 1"
    return ""


def _switch(table: SlotTable, slot: Slot, plan: Plan, out: list[PlannedWrite], now: float) -> None:
    if slot.key not in sysctls.OURS:
        table.set_state(slot, State.BLOCKED, f"{slot.key!r} is not a switch that may be written")
        return
    slot.locate_file(sysctls.path_of(slot.key))
    try:
        found = table.host.read(slot.path).decode("ascii", "replace").strip()
    except FileNotFoundError:
        if slot.want is None:
            plan.finish(slot)
        else:
            table.set_state(slot, State.UNSUPPORTED, f"there is no {slot.path}")
        return
    except OSError as error:
        table.reject(slot, error)
        return
    slot.observe(found)
    wanted = host_settings.wanted(table, slot, found, plan)
    if wanted is None:
        return
    if waits := _waits(table, slot, wanted, out, now):
        table.set_state(slot, State.PENDING, f"waits for {waits}")
        return
    host_settings.write(table, slot, found, wanted, wanted, plan, out)


# -- control groups ------------------------------------------------------------------------------


def _groups(
    table: SlotTable, slots: Sequence[Slot], plan: Plan, out: list[PlannedWrite], now: float
) -> None:
    if not slots:
        return
    host = table.host
    try:
        root = resctrl.parse_schemata(
            host.read(f"{resctrl.MOUNT}/schemata").decode("ascii", "replace")
        )
    except FileNotFoundError:
        for slot in slots:
            if slot.want is None:
                plan.finish(slot)
            else:
                table.set_state(slot, State.UNSUPPORTED, "resctrl is not mounted")
        return
    except OSError as error:
        # Without a list of the groups, none may count as gone or as made by koordlet.
        for slot in slots:
            table.reject(slot, error)
        return
    except ValueError as error:
        for slot in slots:
            table.set_state(slot, State.FAILED, f"unreadable schemata: {error}")
        return
    # Groups are removed first: each takes one of the few CLOSIDs.
    for slot in sorted(slots, key=lambda slot: slot.want is not None):
        if slot.retry_at <= now:
            _group(table, slot, root, plan, out)


def left_behind(table: SlotTable) -> list[Record]:
    """Return records for pods' groups that the journal lacks: an earlier daemon left them."""
    try:
        names = resctrl_groups.groups(table.host)
    except OSError:
        return []
    return [
        Record(place="", inode=0, resource=Resource.RESCTRL_SCHEMATA, key=name, ours=(_MADE,))
        for name in names
        if resctrl.is_ours_by_name(name)
        and table.journal.get("", Resource.RESCTRL_SCHEMATA, name) is None
    ]


def explain_refusal(table: SlotTable, slot: Slot, write: PlannedWrite) -> None:
    """Add the kernel's explanation of a refused resctrl command to the state."""
    if slot.resource is Resource.RESCTRL_SCHEMATA and slot.state is State.FAILED:
        why = resctrl_groups.last_status(table.host)
        if write.act is Act.MKDIR and slot.errno == errno.ENOSPC:
            why = why or "no CLOSID is left, and every control group takes one"
        if why:
            table.set_state(slot, State.FAILED, f"{slot.detail}: {why}")


def _inode(table: SlotTable, path: str) -> int:
    try:
        return table.host.inode(path)
    except OSError:
        return 0


def _of_this_group(record: Record | None, inode: int) -> Record | None:
    """Return the record if it is about the group that exists now, not a former one of that name.

    A group that the daemon was about to make when it ended may have been made by another program.
    """
    if record is None or resctrl.is_ours_by_name(record.key):
        return record
    if record.original is None and _MADE not in record.ours:
        return None
    return record if record.inode in (0, inode) else None


def note_made(table: SlotTable, slot: Slot, path: str) -> None:
    """Journal that a control group was made, with its inode."""
    made = Record(place="", inode=_inode(table, path), resource=slot.resource, key=slot.key)
    table.forget((), [made.with_ours(_MADE)])


def _group(
    table: SlotTable,
    slot: Slot,
    root: Mapping[str, Mapping[int, int]],
    plan: Plan,
    out: list[PlannedWrite],
) -> None:
    try:
        path = resctrl_groups.group_path(slot.key)
    except ValueError as error:
        table.set_state(slot, State.BLOCKED, str(error))
        return
    slot.locate_file(f"{path}/schemata")
    try:
        found: dict[str, dict[int, int]] | None = resctrl_groups.read_group(table.host, slot.key)
    except FileNotFoundError:
        found = None
    except OSError as error:
        table.reject(slot, error)
        return
    except ValueError as error:
        table.set_state(slot, State.FAILED, f"unreadable schemata: {error}")
        return
    if slot.want is None:
        _undo_group(table, slot, path, found, plan, out)
        return
    try:
        wanted = resctrl.parse_schemata(str(slot.want.value))
    except ValueError as error:
        table.set_state(slot, State.FAILED, str(error))
        return
    if "L3" not in root and "L3CODE" in root:
        wanted = resctrl.with_cdp(wanted)
    gaps = resctrl.missing(wanted, root)
    text = resctrl.format_schemata(wanted)
    slot.aim(text, clamp=f"this machine has no {', '.join(gaps)}" if gaps else "")
    if found is None:
        plan.keep(
            Record(place="", inode=0, resource=slot.resource, key=slot.key).with_ours(_MAKING)
        )
        plan.add(_operation(Act.MKDIR, path, slot, "", "control group"), out)
        # A new group shows the whole machine, which differs from every value worth writing.
        lines = resctrl.differing(wanted, root)
    else:
        slot.observe(resctrl.format_schemata(found))
        lines = resctrl.differing(wanted, found)
        inode = _inode(table, path)
        known = table.journal.get(*slot.slot_key)
        record = _of_this_group(known, inode)
        if record is None and (lines or known or resctrl.is_ours_by_name(slot.key)):
            # A group that an earlier daemon left behind counts as made by this one.
            original = None if resctrl.is_ours_by_name(slot.key) else slot.found
            plan.keep(
                Record(
                    place="", inode=inode, resource=slot.resource, key=slot.key, original=original
                ).with_ours(_MADE if original is None else text)
            )
        if not lines:
            slot.accept()
            table.in_force(slot)
            return
    # One write per resource: the kernel refuses all lines of a write if one is bad.
    for name, domains in lines.items():
        text = resctrl.format_schemata({name: domains})
        old = resctrl.format_schemata({name: found[name]}) if found is not None else ""
        plan.add(_operation(Act.WRITE, slot.path, slot, old.strip(), text.strip(), text), out)


def _undo_group(
    table: SlotTable,
    slot: Slot,
    path: str,
    found: Mapping[str, Mapping[int, int]] | None,
    plan: Plan,
    out: list[PlannedWrite],
) -> None:
    record = table.journal.get(*slot.slot_key) or slot.restoring
    if found is not None:
        record = _of_this_group(record, _inode(table, path))
    if found is None or record is None:
        plan.finish(slot)
        return
    if record.original is None:
        plan.add(_operation(Act.RMDIR, path, slot, "control group", ""), out)
        return
    try:
        lines = resctrl.differing(resctrl.parse_schemata(record.original), found)
    except ValueError as error:
        table.set_state(slot, State.FAILED, f"the journal's original: {error}")
        return
    if not lines:
        plan.finish(slot)
    for name, domains in lines.items():
        text = resctrl.format_schemata({name: domains})
        old = resctrl.format_schemata({name: found[name]})
        plan.add(_operation(Act.WRITE, slot.path, slot, old.strip(), text.strip(), text), out)


def _operation(act: Act, path: str, slot: Slot, old: str, new: str, data: str = "") -> PlannedWrite:
    return PlannedWrite(
        act=act,
        path=path,
        slot=slot.slot_key,
        subject=slot.subject,
        old=old,
        new=new,
        why=slot.why,
        data=data.encode(),
    )


# -- host directories ----------------------------------------------------------------------------


def missing_directories(host: Host, path: str) -> list[str]:
    """Return the directories to make for `path`, outermost first."""
    made: list[str] = []
    while path and not host.is_dir(path):
        made.insert(0, path)
        path = path.rpartition("/")[0]
    return made


def make_host_directory(host: Host, path: str, mode: int) -> None:
    """Make a host directory at once, for a container that is about to be created with it.

    The hook calls this before it replies: the runtime mounts the directory soon after, and cannot
    start the container without it. Raises PathError for a path with `.` or `..`, and OSError.
    """
    plain = "/" + check_relative(path)
    for one in missing_directories(host, plain):
        try:
            host.mkdir(one, mode if one == plain else 0o755)
        except FileExistsError:
            continue


def _directory(table: SlotTable, slot: Slot, plan: Plan, out: list[PlannedWrite]) -> None:
    try:
        slot.locate_file("/" + check_relative(slot.key))
    except PathError as error:
        table.set_state(slot, State.BLOCKED, str(error))
        return
    exists = table.host.is_dir(slot.path)
    if slot.want is None:
        record = table.journal.get(*slot.slot_key)
        if not exists or record is None or slot.errno == errno.ENOTEMPTY:
            plan.finish(slot)  # files that the workload left in it are not ours to remove
            return
        plan.add(_operation(Act.RMDIR, slot.path, slot, "directory", ""), out)
        return
    # Its name shows that it is this workload's, so it is removed with it even if a hook made it.
    plan.keep(Record(place="", inode=0, resource=slot.resource, key=slot.key).with_ours(_MADE))
    if exists:
        _applied(table, slot, "directory")
        return
    mode = slot.want.value if isinstance(slot.want.value, int) else 0o755
    for path in missing_directories(table.host, slot.path):
        last = path == slot.path
        plan.add(
            PlannedWrite(
                act=Act.MKDIR,
                path=path,
                slot=slot.slot_key,
                subject=slot.subject,
                old="",
                new="directory",
                why=slot.why,
                mode=mode if last else 0o755,
                final=last,
            ),
            out,
        )
