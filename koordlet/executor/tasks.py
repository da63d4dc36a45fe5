"""Plans values of processes: OOM scores, core scheduling cookies, resctrl membership.

None of these is a file of the group: each process or thread has its own value, new processes start
at any time, and a pid may soon belong to another process. So nothing is cached: every pass reads
the group's processes and the value of each.

Facts: docs/facts/kernel.md, "resctrl", "Core scheduling" and "Processes".
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hooks.state import State
from koordlet.executor.records import Delivery, Record, plain
from koordlet.executor.slots import Act, Plan, PlannedWrite, Slot
from koordlet.executor.table import SlotTable
from linux import resctrl, resctrl_groups
from linux.host import Host
from linux.procfs import oom_score_adj_path, parse_ids
from linux.resources import DELIVERED_AT_CREATION, Resource
from linux.sysctls import SCHED_CORE

_NO_CORE_SCHED: Final = frozenset(
    {errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY}
)
_SWITCH: Final = ("", Resource.SYSCTL, SCHED_CORE)


@dataclass(slots=True)
class TaskWrites:
    """first: writes that remove values from processes; last: writes that set them."""

    first: list[PlannedWrite] = field(default_factory=list)
    last: list[PlannedWrite] = field(default_factory=list)


def plan(
    table: SlotTable, virtual: Mapping[Resource, Sequence[Slot]], plan: Plan, now: float
) -> TaskWrites:
    """Return the writes for processes and threads."""
    writes = TaskWrites()
    for slot in virtual.get(Resource.OOM_SCORE_ADJ, ()):
        if slot.retry_at <= now:
            _oom_score(table, slot, plan, writes.last)
    _cookies(table, virtual.get(Resource.CORE_SCHED_COOKIE, ()), plan, writes, now)
    _membership(table, virtual.get(Resource.RESCTRL_GROUP, ()), plan, writes, now)
    return writes


def _directory(table: SlotTable, place: str) -> str:
    """Return a directory of the group that lists its processes; every hierarchy does."""
    layout = table.layout
    controller = next((one for one in ("cpu", "cpuset", "memory") if layout.has(one)), "cpu")
    return layout.directory(controller, place)


def _ids(table: SlotTable, slot: Slot, plan: Plan, name: str) -> list[int] | None:
    """Return the group's processes or threads; None when it is gone, with the state set."""
    if not slot.place:
        table.set_state(slot, State.PENDING, "its cgroup is not known yet")
        return None
    slot.locate(_directory(table, slot.place))
    try:
        return parse_ids(table.host.read(f"{slot.directory}/{name}"))
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENODEV:
            table.reject(slot, error)
            return None
    if slot.want is None:
        plan.finish(slot)
    else:
        table.set_state(slot, State.PENDING, "no such cgroup at this time")
    return None


def _record(table: SlotTable, slot: Slot, original: str | None) -> Record:
    """Return the slot's record, or a new one if it belongs to a former group of this name."""
    try:
        inode = table.host.inode(slot.directory)
    except OSError:
        inode = 0
    record = table.journal.get(*slot.slot_key)
    if record is not None and record.inode == inode:
        return record
    policy = slot.want.claim.policy if slot.want is not None else ""
    return Record(
        place=slot.place,
        inode=inode,
        resource=slot.resource,
        key=slot.key,
        original=original,
        policy=policy,
    )


def adopted(table: SlotTable, delivery: Delivery, place: str) -> Record | None:
    """Return the record of a value that was delivered for processes; None for other resources.

    Raises OSError when the group cannot be read.
    """
    if delivery.resource not in DELIVERED_AT_CREATION:
        return None
    inode = table.host.inode(_directory(table, place))
    known = table.journal.get(place, delivery.resource)
    if known is None or known.inode != inode:
        default_group = "" if delivery.resource is Resource.RESCTRL_GROUP else None
        known = Record(
            place=place,
            inode=inode,
            resource=delivery.resource,
            original=default_group,
            requested=delivery.requested,
            policy=delivery.policy,
        )
    return known.with_ours(str(delivery.delivered))


def _applied(table: SlotTable, slot: Slot, found: str) -> None:
    slot.observe(found)
    slot.accept()
    table.in_force(slot)


def move(host: Host, write: PlannedWrite) -> None:
    """Carry out MOVE_TASKS, with one write per thread; threads that have ended are skipped."""
    for tid in write.ids:
        try:
            host.write(write.path, str(tid).encode())
        except ProcessLookupError:
            continue


# -- OOM scores ----------------------------------------------------------------------------------


def _oom_score(table: SlotTable, slot: Slot, plan: Plan, out: list[PlannedWrite]) -> None:
    pids = _ids(table, slot, plan, "cgroup.procs")
    if pids is None:
        return
    values: dict[int, str] = {}
    for pid in sorted(pids):
        try:
            raw = table.host.read(oom_score_adj_path(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended
        except OSError as error:
            table.reject(slot, error)
            return
        values[pid] = raw.decode("ascii", "replace").strip()
    if slot.want is None:
        record = table.journal.get(*slot.slot_key)
        original = None
        if record is not None:
            requested_text = None if record.requested is None else str(record.requested)
            original = record.original if record.original is not None else requested_text
        if record is None or original is None:
            plan.finish(slot)
            return
        wanted = original
        pids_to_write = [pid for pid, value in values.items() if value in record.ours]
        if not pids_to_write or wanted in record.ours:
            plan.finish(slot)
            return
    else:
        wanted = str(slot.want.value)
        slot.aim(wanted)
        pids_to_write = [pid for pid, value in values.items() if value != wanted]
        if not pids_to_write:
            requested = slot.want.requested
            if values and requested is not None and str(requested) != wanted:
                record = _record(table, slot, None)
                if not record.ours:
                    delivered = Record(
                        place=record.place,
                        inode=record.inode,
                        resource=record.resource,
                        requested=plain(requested),
                        policy=record.policy,
                    )
                    plan.keep(delivered.with_ours(wanted))
            _applied(table, slot, wanted if values else "")
            return
        first = values[min(values)]
        record = _record(table, slot, first if first != wanted else values[pids_to_write[0]])
        plan.keep(record.with_ours(wanted))
    for index, pid in enumerate(pids_to_write):
        plan.add(
            PlannedWrite(
                act=Act.WRITE,
                path=oom_score_adj_path(pid),
                slot=slot.slot_key,
                subject=slot.subject,
                old=values[pid],
                new=wanted,
                why=slot.why,
                data=wanted.encode(),
                final=index == len(pids_to_write) - 1,
            ),
            out,
        )


# -- core scheduling -----------------------------------------------------------------------------


def _cookies(
    table: SlotTable, slots: Sequence[Slot], plan: Plan, writes: TaskWrites, now: float
) -> None:
    """Plan one cookie for each core scheduling group, and its removal from former members."""
    groups: dict[str, list[tuple[Slot, dict[int, int]]]] = {}
    for slot in slots:
        if slot.retry_at > now:
            continue
        pids = _ids(table, slot, plan, "cgroup.procs")
        if pids is None:
            continue
        cookies = _read_cookies(table, slot, sorted(pids), plan)
        if cookies is None:
            continue
        if slot.want is None:
            _clear(slot, cookies, plan, writes.first)
        else:
            groups.setdefault(str(slot.want.value), []).append((slot, cookies))
    owner = _owners(groups)
    for group, members in sorted(groups.items()):
        _share(table, group, members, owner, plan, writes.last)


def _read_cookies(
    table: SlotTable, slot: Slot, pids: Sequence[int], plan: Plan
) -> dict[int, int] | None:
    found: dict[int, int] = {}
    for pid in pids:
        try:
            found[pid] = table.host.core_sched_cookie(pid)
        except ProcessLookupError:
            continue
        except OSError as error:
            if error.errno not in _NO_CORE_SCHED:
                table.reject(slot, error)
            elif plan.planned.get(_SWITCH) == "1":
                # Alibaba Cloud Linux: cookies work once the switch is on, which this plan does.
                return dict.fromkeys(pids, 0)
            elif slot.want is None:
                plan.finish(slot)
            else:
                detail = "this kernel, or this machine without SMT, has no core scheduling"
                table.set_state(slot, State.UNSUPPORTED, detail)
            return None
    return found


def _clear(slot: Slot, cookies: Mapping[int, int], plan: Plan, out: list[PlannedWrite]) -> None:
    holding = [pid for pid, cookie in cookies.items() if cookie]
    if not holding:
        plan.finish(slot)
        return
    plan.add(_cookie_write(Act.COOKIE_COPY, slot, (0, *holding), "", "no cookie"), out)


def _owners(groups: Mapping[str, Sequence[tuple[Slot, Mapping[int, int]]]]) -> dict[int, str]:
    """Return which group each cookie belongs to.

    It is the group whose members were in it before, and not one that a container has just moved to;
    else the group with most of the cookie's holders.
    """
    holders: dict[int, Counter[str]] = {}
    settled: dict[int, Counter[str]] = {}
    for group, members in groups.items():
        for slot, cookies in members:
            for cookie in cookies.values():
                if cookie:
                    holders.setdefault(cookie, Counter())[group] += 1
                    settled.setdefault(cookie, Counter())[group] += slot.found == group
    return {
        cookie: min(of, key=lambda group: (-settled[cookie][group], -of[group], group))
        for cookie, of in holders.items()
    }


def _share(
    table: SlotTable,
    group: str,
    members: Sequence[tuple[Slot, Mapping[int, int]]],
    owner: Mapping[int, str],
    plan: Plan,
    out: list[PlannedWrite],
) -> None:
    counted: Counter[int] = Counter()
    old_members: Counter[int] = Counter()
    for slot, cookies in members:
        for cookie in cookies.values():
            if cookie and owner[cookie] == group:
                counted[cookie] += 1
                # A container from another group takes this group's cookie, not vice versa.
                old_members[cookie] += slot.found == group
    target = max(
        counted, key=lambda cookie: (old_members[cookie], counted[cookie], -cookie), default=0
    )
    source = 0
    if target:
        source = min(
            pid for _, cookies in members for pid, cookie in cookies.items() if cookie == target
        )
    for slot, cookies in members:
        slot.aim(group)
        slot.share_cookie(0)
        if not cookies:
            _applied(table, slot, "")
            continue
        lacking = [pid for pid, cookie in cookies.items() if not target or cookie != target]
        if not lacking:
            slot.share_cookie(target)
            _applied(table, slot, group)
            continue
        plan.keep(_record(table, slot, "0").with_ours(group))
        if not source:
            source = lacking.pop(0)
            plan.add(
                _cookie_write(
                    Act.COOKIE_CREATE, slot, (source,), "", "a new cookie", final=not lacking
                ),
                out,
            )
        if lacking:
            plan.add(
                _cookie_write(
                    Act.COOKIE_COPY, slot, (source, *lacking), "", f"the cookie of {source}"
                ),
                out,
            )


def _cookie_write(
    act: Act, slot: Slot, ids: tuple[int, ...], old: str, new: str, *, final: bool = True
) -> PlannedWrite:
    return PlannedWrite(
        act=act,
        path=f"{slot.directory}/cgroup.procs",
        slot=slot.slot_key,
        subject=slot.subject,
        old=old,
        new=new,
        why=slot.why,
        ids=ids,
        final=final,
    )


# -- resctrl membership --------------------------------------------------------------------------


def _membership(
    table: SlotTable, slots: Sequence[Slot], plan: Plan, writes: TaskWrites, now: float
) -> None:
    """Plan to move the threads of every container into its control group, or to the default one."""
    threads_file = "tasks" if table.layout.version == 1 else "cgroup.threads"
    of_group: dict[str, set[int] | None] = {}

    def members(group: str) -> set[int] | None:
        """Return the group's threads; None: no such group. Raises OSError and ValueError."""
        if group not in of_group:
            try:
                of_group[group] = resctrl_groups.tasks(table.host, group)
            except FileNotFoundError:
                of_group[group] = None
        return of_group[group]

    for slot in slots:
        if slot.retry_at > now:
            continue
        tids = _ids(table, slot, plan, threads_file)
        if tids is None:
            continue
        try:
            if slot.want is None:
                _leave(table, slot, tids, members, plan, writes.first)
            else:
                _join(table, slot, str(slot.want.value), tids, members, plan, writes.last)
        except OSError as error:
            table.reject(slot, error)
        except ValueError as error:
            table.set_state(slot, State.FAILED, f"unreadable threads of a group: {error}")


def _join(
    table: SlotTable,
    slot: Slot,
    group: str,
    tids: Sequence[int],
    members: Callable[[str], set[int] | None],
    plan: Plan,
    out: list[PlannedWrite],
) -> None:
    slot.aim(group)
    inside = members(group)
    if inside is None:
        key = ("", Resource.RESCTRL_SCHEMATA, group)
        if key not in plan.planned:
            table.set_state(slot, State.BLOCKED, f"there is no control group {group!r}")
            return
        inside = set()
    outside = [tid for tid in tids if tid not in inside]
    if not outside:
        _applied(table, slot, group)
        return
    plan.keep(_record(table, slot, "").with_ours(group))
    plan.add(
        _move(slot, f"{resctrl_groups.group_path(group)}/tasks", outside, group),
        out,
    )


def _leave(
    table: SlotTable,
    slot: Slot,
    tids: Sequence[int],
    members: Callable[[str], set[int] | None],
    plan: Plan,
    out: list[PlannedWrite],
) -> None:
    record = table.journal.get(*slot.slot_key)
    inside: list[int] = []
    if record is not None:
        ours = {tid for group in record.ours for tid in members(group) or ()}
        inside = [tid for tid in tids if tid in ours]
    if not inside:
        plan.finish(slot)
        return
    plan.add(_move(slot, f"{resctrl.MOUNT}/tasks", inside, "the default group"), out)


def _move(slot: Slot, path: str, tids: Sequence[int], group: str) -> PlannedWrite:
    return PlannedWrite(
        act=Act.MOVE_TASKS,
        path=path,
        slot=slot.slot_key,
        subject=slot.subject,
        old=slot.found or "",
        new=group,
        why=slot.why,
        ids=tuple(tids),
    )
