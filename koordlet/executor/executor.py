"""The executor: the one writer of kernel files.

It is told what is wanted, per subject. `plan` reads, compares in numbers, applies the kernel's
rules and returns ordered writes, and writes nothing; `apply` journals the originals, writes once
each, and reads back. Every prefix of a plan is a state that the kernel takes, so it may be cut
anywhere: by the write budget, by a refusal, by a crash.

What the kernel says decides the state: ENOENT and ENODEV are a group that is gone (nobody's
fault), EOPNOTSUPP is unsupported, everything else is a refusal that backs off per file.
Facts: linux-interfaces.md sections 5, 6, 18, 20.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from koordlet.executor import node_wide, tasks
from koordlet.executor.files import FilePlanner
from koordlet.executor.order import ancestors
from koordlet.executor.slots import (
    BAD,
    Act,
    Plan,
    PlannedWrite,
    ResourceView,
    Slot,
    SlotKey,
    State,
    Want,
    WriteNote,
    WriteReport,
)
from koordlet.journal import Delivery, Handed, Journal, JournalError, Record, RecordKey, plain
from linux.cgroup_files import FILES, field_text, number
from linux.cgroup_paths import Layout, is_below
from linux.cpuset import CpuSet
from linux.host import Host
from linux.resources import Resource, Value
from linux.weights import Formula

log = logging.getLogger(__name__)

_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ESRCH})
_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_FIGHT: Final = 4
_FIGHT_WINDOW_S: Final = 60.0
_SLICE: Final = 128
_COOKIE_GROUPS: Final = 256  # of which changes are counted


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be written, and how long a refused file rests.

    writes_per_second refills the budget, burst is its size. backoff_s: the first rest; it doubles
    up to max_backoff_s.
    """

    writes_per_second: float = 200.0
    burst: int = 4000
    backoff_s: float = 1.0
    max_backoff_s: float = 300.0


def describe(error: OSError) -> str:
    """Return an error as the state's detail shows it: "EINVAL: Invalid argument"."""
    number = error.errno or 0
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"


class Executor:
    """See the module. Not thread-safe: one thread owns it.

    burst_above_quota: this kernel takes a burst above the quota (Alibaba Cloud Linux); mainline
        does not.
    directory_roots: below which host directories may be made.
    """

    def __init__(
        self,
        host: Host,
        layout: Layout,
        journal: Journal,
        *,
        limits: Limits = Limits(),
        page_size_bytes: int = 4096,
        burst_above_quota: bool = False,
        directory_roots: Sequence[str] = node_wide.DIRECTORY_ROOTS,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.host = host
        self.journal = journal
        self.limits = limits
        self.directory_roots = directory_roots
        self.clock = clock
        self._wall_clock = wall_clock
        self._planner = FilePlanner(
            host,
            layout,
            journal,
            page_size_bytes=page_size_bytes,
            burst_above_quota=burst_above_quota,
        )
        self._slots: dict[SlotKey, Slot] = {}
        self._files: list[Slot] = []
        self._virtual: dict[Resource, list[Slot]] = {}
        self._lists_stale = True
        self._orphans_stale = True
        self._handed_stale = True
        self._by_subject: dict[str, dict[SlotKey, Want]] = {}
        self._contended: set[SlotKey] = set()
        self._lacking: list[Slot] = []  # slots whose group is there and whose file is not
        self._tokens = float(limits.burst)
        self._refilled = clock()
        self.cookie_changes: dict[tuple[str, str], int] = {}
        """(core scheduling group, "succeeded" or "failed") -> changes, of the last groups."""

    @property
    def layout(self) -> Layout:
        return self._planner.layout

    def set_burst_above_quota(self, *, allowed: bool) -> None:
        """Note what was found out about this kernel, see the class."""
        self._planner.burst_above_quota = allowed

    # -- what is wanted --------------------------------------------------------------------------

    def want(self, subject: str, wants: Sequence[Want]) -> None:
        """Set everything that is wanted for a subject; what is no longer wanted is restored."""
        new = {want.slot_key: want for want in wants}
        old = self._by_subject.get(subject, {})
        if new:
            self._by_subject[subject] = new
        else:
            self._by_subject.pop(subject, None)
        for key, want in new.items():
            slot = self._slots.get(key)
            if slot is None:
                slot = self._add(key)
            elif slot.want == want:
                continue
            elif slot.want is not None and slot.want.subject != subject:
                # The first subject keeps the place; `views` tells the other one.
                self._contended.add(key)
                continue
            self._assign(slot, want)
        for key in old.keys() - new.keys():
            self._release(key, subject)

    def wanted(self, subject: str) -> Mapping[SlotKey, Want]:
        """Return what is wanted for a subject."""
        return self._by_subject.get(subject, {})

    def subjects(self) -> list[str]:
        """Return the subjects for which something is wanted."""
        return list(self._by_subject)

    def restore(self, record: Record) -> None:
        """Have the original of `record` put back, unless somebody wants the place."""
        slot = self._slots.get(record.record_key) or self._add(record.record_key)
        if slot.want is None:
            self._assign(slot, None)
            slot.restoring = record

    def orphans(self) -> list[Record]:
        """Return the records that no slot is about: leftovers of an earlier run, or supports.

        A support (a burst lowered for a quota's sake) is one only once its cause is gone.
        """
        if not self._orphans_stale:
            return []
        self._orphans_stale = False
        found = []
        for record in [*self.journal.records(), *node_wide.left_behind(self)]:
            cause = (record.place, Resource(record.support_of), "") if record.support_of else None
            slot = self._slots.get(record.record_key)
            if (slot is None or slot.parked) and (cause is None or self._unused(cause)):
                found.append(record)
        return found

    def watch_handed(self) -> None:
        """Watch what the runtime may write again though nobody wants it; see `Handed`."""
        if not self._handed_stale:
            return
        self._handed_stale = False
        for handed in self.journal.all_handed():
            key = handed.place, handed.resource, ""
            if key not in self._slots and self.journal.get(*key) is None:
                self._let_go(self._add(key))

    def _live(self) -> dict[SlotKey, Slot]:
        return {key: slot for key, slot in self._slots.items() if not slot.parked}

    def _unused(self, key: SlotKey) -> bool:
        slot = self._slots.get(key)
        return slot is None or slot.parked

    def directories(self) -> set[str]:
        """Return the directories of all cgroup files that something is wanted for."""
        return {slot.directory for slot in self._slots.values() if slot.file and slot.directory}

    def paths(self) -> set[str]:
        """Return the cgroup files that something is wanted for."""
        return {slot.path for slot in self._slots.values() if slot.file and slot.path}

    def look_again(self) -> None:
        """Judge again, at the next plan, what is not simply applied: what is around may differ."""
        self._orphans_stale = True
        for slot in self._slots.values():
            if slot.state is not State.APPLIED:
                slot.settled = None

    def set_layout(self, layout: Layout) -> None:
        """Work with another layout: the pods' root appeared or moved."""
        if layout == self.layout:
            return
        self._planner.layout = layout
        before = self._by_subject
        self._slots, self._by_subject = {}, {}
        self._lists_stale = self._orphans_stale = self._handed_stale = True
        for subject, wants in before.items():
            self.want(subject, list(wants.values()))

    def adopt_deliveries(self, container_id: str, place: str) -> None:
        """Journal what the runtime was handed for a container, now that its group exists."""
        deliveries = self.journal.deliveries(container_id)
        if not deliveries or not place:
            return
        file = FILES[Resource.CPU_SHARES]
        if not self.layout.has(file.controller) or not self.host.is_dir(
            self.layout.directory(file.controller, place)
        ):
            return
        try:
            adopted = [
                one
                for delivery in deliveries.values()
                if (one := self._adopted(delivery, place)) is not None
            ]
        except OSError as error:
            log.warning("container %s: tried again at the next pass: %s", container_id, error)
            return
        self._orphans_stale = True
        # What a full disk cannot take is in memory, goes to the file with the next append, and is
        # told of by the pass.
        with contextlib.suppress(JournalError):
            self.journal.update(
                [record for record, _ in adopted],
                handed=[handed for _, handed in adopted if handed is not None],
            )
            self.journal.done_with(container_id)

    def _adopted(self, delivery: Delivery, place: str) -> tuple[Record, Handed | None] | None:
        """Return what a delivery becomes; None if what was handed does not stand."""
        resource = delivery.resource
        try:
            if resource not in FILES:
                of_processes = tasks.adopted(self, delivery, place)
                return None if of_processes is None else (of_processes, None)
            requested = _canonical(delivery.requested)
            delivered = _canonical(delivery.delivered)
            record = self._planner.adopt_delivery(
                place, resource, requested, 0 if delivered is None else delivered, delivery.policy
            )
            if record is None:
                return None
            known = self.journal.get(place, resource)
            if known is not None and known.inode == record.inode:
                # Written by the runtime, but ours: what stood there before us stays the original,
                # unless kubelet asked for something new and not just for what we had written.
                asked = record.asked
                if asked is not None and not self._planner.echoes(known, asked):
                    known = msgspec.structs.replace(known, original=None, asked=asked)
                record = known.with_ours(*record.ours)
            earlier = [value for one in delivery.earlier if (value := _canonical(one)) is not None]
            return record, self._planner.handed(delivery.container_id, record, earlier)
        except ValueError as error:
            log.warning("container %s, %s: %s", delivery.container_id, resource, error)
            return None
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise

    def _add(self, key: SlotKey) -> Slot:
        place, resource, _ = key
        file = FILES.get(resource)
        slot = Slot(*key, file)
        if file is not None and self.layout.has(file.controller):
            slot.directory = self.layout.directory(file.controller, place)
            name = file.name(self.layout.version)
            slot.path = f"{slot.directory}/{name}" if name else ""
        self._slots[key] = slot
        self._lists_stale = True
        return slot

    def _drop(self, slot: Slot) -> None:
        if self._slots.get(slot.slot_key) is slot:
            del self._slots[slot.slot_key]
        self._lists_stale = self._orphans_stale = True

    def _let_go(self, slot: Slot) -> None:
        """Nothing of ours stands: drop the slot, or watch what the runtime may write again."""
        if slot.file is None or self.journal.handed(slot.place, slot.resource) is None:
            self._drop(slot)
            return
        slot.restoring = None
        slot.text = None
        self._orphans_stale = True
        self.set_state(slot, State.APPLIED)

    def _assign(self, slot: Slot, want: Want | None) -> None:
        slot.want = want
        slot.restoring = None
        slot.settled = slot.text = None
        slot.retry_at = 0.0
        slot.failures = slot.fights = 0
        slot.foreign = []

    def _release(self, key: SlotKey, subject: str) -> None:
        slot = self._slots.get(key)
        if slot is None or slot.want is None or slot.want.subject != subject:
            return
        heir = None
        if key in self._contended:
            heir = next((of[key] for of in self._by_subject.values() if key in of), None)
        self._assign(slot, heir)
        if slot.want is None:
            slot.restoring = self.journal.get(*key)
            if slot.restoring is None:
                self._let_go(slot)

    # -- planning --------------------------------------------------------------------------------

    def plan(self, pause: Callable[[], None] | None = None) -> Plan:
        """Return what has to be done now. Writes nothing.

        pause: called after each slice of reads, for threads that wait for the interpreter.
        """
        if self._lists_stale:
            self._files = [slot for slot in self._slots.values() if slot.file is not None]
            self._virtual = {}
            for slot in self._slots.values():
                if slot.file is None:
                    self._virtual.setdefault(slot.resource, []).append(slot)
            self._lists_stale = False
        plan = Plan()
        now = self.clock()
        self._lacking.clear()
        judged = [slot for slot in self._read(now, pause) if self._judge(slot, plan, now)]
        dirty = [slot for slot in judged if self._wish(slot)]
        files = self._planner.hand_down(self._lacking)
        files += self._planner.plan(dirty, self._live() if dirty else {}, plan, now)
        for slot in dirty:
            if slot.slot_key not in plan.planned:
                self._conclude(slot, plan)
        switches = node_wide.plan(self, self._virtual, plan, now)
        of_tasks = tasks.plan(self, self._virtual, plan, now)
        # Group identity and core scheduling must never be on together, so what one leaves behind
        # goes first, then the switches (off before on), then what the other brings.
        if node_wide.ends_group_identity(switches):
            plan.writes = [*of_tasks.first, *files, *switches, *of_tasks.last]
        else:
            plan.writes = [*of_tasks.first, *switches, *files, *of_tasks.last]
        return plan

    def _read(self, now: float, pause: Callable[[], None] | None) -> list[Slot]:
        """Read every file; return the slots whose content is not the one last judged."""
        read = self.host.read
        version = self.layout.version
        dirty: list[Slot] = []
        for index, slot in enumerate(self._files):
            if pause is not None and index % _SLICE == _SLICE - 1:
                pause()
            if slot.retry_at > now:
                continue
            if not self._may_write(slot):
                continue
            try:
                raw = read(slot.path)
            except OSError as error:
                self._unreadable(slot, error)
                continue
            if raw == slot.settled:
                continue
            assert slot.file is not None
            try:
                slot.found = field_text(slot.file, version, raw)
                number(slot.file, slot.found)
            except ValueError as error:
                slot.found = None
                self.set_state(slot, State.FAILED, f"unreadable content: {error}")
                continue
            slot.settled = raw
            dirty.append(slot)
        return dirty

    def _may_write(self, slot: Slot) -> bool:
        """Tell whether the slot's file is one that we may touch; sets the state when not."""
        if not slot.path:
            assert slot.file is not None
            what = f"cgroup v{self.layout.version} has no file for it here"
            self.set_state(slot, State.UNSUPPORTED, what)
            return False
        want = slot.want
        if want is None:
            return True  # we wrote there before, or there would be no record
        if want.subject.startswith("hostapp/"):
            return bool(slot.place)
        root = self.layout.kubepods
        if root and is_below(slot.place, root):
            return True
        if not root or not slot.place:
            self.set_state(slot, State.PENDING, "its cgroup is not known yet")
        else:
            self.set_state(slot, State.BLOCKED, f"{slot.place!r} does not lie in {root!r}")
        return False

    def _unreadable(self, slot: Slot, error: OSError) -> None:
        slot.settled = slot.found = None
        if error.errno not in _GONE:
            self.reject(slot, error)
        elif not self.host.is_dir(slot.directory):
            if slot.want is None:
                self._forget([slot.slot_key], gone=[(slot.place, slot.resource)])
                self._drop(slot)
            else:
                self.set_state(slot, State.PENDING, "no such cgroup at this time")
        else:
            self._lacking.append(slot)
            name = slot.path.rpartition("/")[2]
            detail = f"there is no {name} here: the kernel or its parent group lacks it"
            self.set_state(slot, State.UNSUPPORTED, detail)

    def _forget(
        self,
        keys: Sequence[RecordKey],
        left: Sequence[Record] = (),
        gone: Sequence[tuple[str, Resource]] = (),
    ) -> None:
        try:
            self.journal.update(left, forget=keys, superseded=gone)
        except JournalError as error:
            log.warning("the journal cannot be written: %s", error)

    def _judge(self, slot: Slot, plan: Plan, now: float) -> bool:
        """Square what was found with the journal; False when there is nothing left to do."""
        file, found = slot.file, slot.found
        assert file is not None and found is not None
        record = self._planner.record_of(slot, plan)
        if record is not None and any(self._planner.same(file, one, found) for one in record.ours):
            # A weight by the new formula came from the runtime, if by our answer. One by the old
            # formula may be our own first guess, and says nothing.
            self._planner.learn(slot, {Formula.QUADRATIC})
            if slot.parked:
                slot.restoring = record
            return True
        if slot.want is None:
            # The original, or somebody else's value, stands there: nothing of ours to undo.
            if not slot.parked:
                self._finish(slot, plan)
            return False
        if record is None:
            self._planner.learn(slot)
            return True
        if slot.state in (State.APPLIED, State.DEGRADED):
            slot.foreign = [at for at in slot.foreign if now - at < _FIGHT_WINDOW_S] + [now]
        if record.original is None or not self._planner.same(file, record.original, found):
            plan.keep(msgspec.structs.replace(record, original=found, asked=None))
        if len(slot.foreign) >= _FIGHT:
            self._yield_to_other(slot, now)
            return False
        return True

    def _yield_to_other(self, slot: Slot, now: float) -> None:
        """Somebody writes another value again and again: leave it to them for a while."""
        rest = min(60.0 * 2**slot.fights, self.limits.max_backoff_s * 2)
        slot.fights += 1
        slot.foreign = []
        slot.retry_at = now + rest
        slot.settled = None
        detail = f"another writer keeps setting {slot.found}; tried again in {rest:.0f} s"
        self.set_state(slot, State.BLOCKED, detail)

    def _finish(self, slot: Slot, plan: Plan) -> None:
        plan.done.append(slot)
        left = self._planner.left_for_idle(slot, self._slots)
        if left is not None:
            plan.keep(left)
        else:
            plan.forget.append(slot.slot_key)

    def _wish(self, slot: Slot) -> bool:
        try:
            self._planner.wish(slot)
        except ValueError as error:
            slot.text = None
            self.set_state(slot, State.FAILED, str(error))
            return False
        except OSError as error:
            self._unreadable(slot, error)
            return False
        return True

    def _conclude(self, slot: Slot, plan: Plan) -> None:
        """Set the state of a slot for which nothing is to be written."""
        assert slot.file is not None and slot.found is not None and slot.text is not None
        if slot.blocked_by:
            self.set_state(slot, State.BLOCKED, slot.blocked_by)
            return
        if slot.want is None:
            if self._planner.same(slot.file, slot.text, slot.found):
                self._finish(slot, plan)
            else:
                self.set_state(slot, State.DEGRADED, f"not restored in full: {slot.clamp}")
            return
        if (
            self._planner.record_of(slot, plan) is None
            and self._planner.handed_down(slot, plan) is not None
        ):
            self._planner.journal_slot(slot, plan, slot.found)
        requested = slot.want.requested
        if requested is not None and self._planner.record_of(slot, plan) is None:
            # The runtime was handed our value at creation: what kubelet asked for is the original.
            asked = self._planner.requested_text(slot, requested)
            if asked is not None and not self._planner.same(slot.file, asked, slot.found):
                self._planner.journal_slot(slot, plan, slot.found)
                record = plan.records[slot.slot_key]
                record = msgspec.structs.replace(record, original=None, asked=plain(requested))
                plan.keep(record)
                self._note_handed(slot, record, plan)
        self.set_state(slot, State.DEGRADED if slot.degraded else State.APPLIED, slot.degraded)

    def _note_handed(self, slot: Slot, record: Record, plan: Plan) -> None:
        kind, _, container_id = slot.subject.partition("/")
        handed = self._planner.handed(container_id, record) if kind == "container" else None
        if handed is not None:
            plan.handed.append(handed)

    # -- applying --------------------------------------------------------------------------------

    def apply(self, plan: Plan, pause: Callable[[], None] | None = None) -> WriteReport:
        """Do what `plan` says, as far as budget and kernel allow."""
        try:
            self.journal.update(plan.records.values(), plan.forget, handed=plan.handed)
        except JournalError as error:
            # Without the original on record nothing may be written: it could not be put back.
            for write in plan.writes:
                slot = self._slots.get(write.slot)
                if slot is not None:
                    slot.settled = None
                    self.set_state(slot, State.FAILED, f"the journal cannot be written: {error}")
            return WriteReport(failed=len(plan.writes))
        for slot in plan.done:
            self._let_go(slot)
        self._refill()
        written = failed = deferred = restored = 0
        refused = _Refused()
        restored_slots: list[Slot] = []
        removed: list[Slot] = []
        paths: set[str] = set()
        for index, write in enumerate(plan.writes):
            if pause is not None and index % _SLICE == _SLICE - 1:
                pause()
            slot = self._slots.get(write.slot)
            if slot is not None and slot.file is not None and slot.retry_at > self._refilled:
                continue  # its widening step was refused in this pass
            if slot is not None and (other := refused.before(write)):
                slot.settled = None
                if slot.retry_at <= self._refilled:  # else it was refused itself, and says why
                    self.set_state(slot, State.BLOCKED, f"waits for {other}")
                continue
            if self._tokens < 1.0:
                deferred += 1
                if slot is not None:
                    slot.settled = None
                    self.set_state(slot, State.PENDING, "the write budget is used up")
                continue
            self._tokens -= 1.0
            paths.add(write.path)
            try:
                self._perform(write)
            except OSError as error:
                self._note(slot, write, describe(error))
                self._count_cookie(slot, "failed")
                if slot is not None:
                    slot.settled = None
                    self._not_written(slot, error, write)
                if error.errno not in _GONE:
                    failed += 1
                    refused.add(write)
                continue
            written += 1
            self._note(slot, write, "")
            self._count_cookie(slot, "succeeded")
            if slot is None:
                continue
            if slot.file is not None:
                if write.final and self._settle(slot, write):
                    restored += 1
                    restored_slots.append(slot)
            elif write.act is Act.RMDIR:
                removed.append(slot)
            elif write.final:
                slot.failures = 0
                slot.found = write.new
                self.set_state(
                    slot, State.DEGRADED if slot.degraded else State.APPLIED, slot.degraded
                )
        if removed:
            # At once: whoever makes something of this name from now on is not us.
            self._forget([slot.slot_key for slot in removed])
            for slot in removed:
                self._drop(slot)
        if restored_slots:
            left = [self._planner.left_for_idle(slot, self._slots) for slot in restored_slots]
            keys = [
                slot.slot_key for slot, one in zip(restored_slots, left, strict=True) if not one
            ]
            self._forget(keys, [one for one in left if one])
        return WriteReport(
            written=written,
            failed=failed,
            deferred=deferred,
            restored=restored + len(removed) + len(plan.done),
            paths=frozenset(paths),
        )

    def fill_budget(self) -> None:
        """Allow a full burst of writes again: for an uninstall, which must not stop half-way."""
        self._tokens = float(self.limits.burst)

    def _refill(self) -> None:
        now = self.clock()
        gained = (now - self._refilled) * self.limits.writes_per_second
        self._tokens = min(self._tokens + gained, float(self.limits.burst))
        self._refilled = now

    def _perform(self, write: PlannedWrite) -> None:
        match write.act:
            case Act.WRITE:
                self.host.write(write.path, write.data)
            case Act.MKDIR:
                try:
                    self.host.mkdir(write.path, write.mode)
                except FileExistsError:
                    return
            case Act.RMDIR:
                self.host.rmdir(write.path)
            case Act.MOVE_TASKS:
                tasks.move(self.host, write)
            case Act.COOKIE_CREATE:
                self.host.core_sched_create(write.ids[0])
            case Act.COOKIE_COPY:
                self.host.core_sched_copy(write.ids[0], list(write.ids[1:]))

    def _note(self, slot: Slot | None, write: PlannedWrite, error: str) -> None:
        if slot is None:
            return
        slot.writes.append(
            WriteNote(self._wall_clock(), write.path, write.old, write.new, write.why, error)
        )

    def _count_cookie(self, slot: Slot | None, status: str) -> None:
        if slot is None or slot.resource is not Resource.CORE_SCHED_COOKIE:
            return
        record = self.journal.get(*slot.slot_key)
        left = "" if record is None or not record.ours else record.ours[-1]
        key = left if slot.want is None else str(slot.want.value), status
        # Counted last, kept longest: a group may be one pod, and pods come and go for ever.
        self.cookie_changes[key] = self.cookie_changes.pop(key, 0) + 1
        if len(self.cookie_changes) > _COOKIE_GROUPS:
            del self.cookie_changes[next(iter(self.cookie_changes))]

    def _not_written(self, slot: Slot, error: OSError, write: PlannedWrite) -> None:
        if error.errno in _GONE:
            if slot.file is not None:
                self._unreadable(slot, error)
        elif error.errno in _UNSUPPORTED:
            self.set_state(slot, State.UNSUPPORTED, describe(error))
            slot.retry_at = self.clock() + self.limits.max_backoff_s
        else:
            self.reject(slot, error, write.new)
            node_wide.explain_refusal(self, slot, write)

    def _settle(self, slot: Slot, write: PlannedWrite) -> bool:
        """Read back what was written; True when it was a restore that is complete."""
        assert slot.file is not None and slot.text is not None
        try:
            raw = self.host.read(slot.path)
            found = field_text(slot.file, self.layout.version, raw)
        except (OSError, ValueError):
            slot.settled = None
            return False
        slot.found = found
        slot.failures = 0
        if not self._planner.same(slot.file, write.new, found):
            return self._settle_odd(slot, raw, found, write.new)
        slot.odd = None
        slot.settled = raw
        if slot.want is None and self._planner.same(slot.file, slot.text, found):
            self._let_go(slot)
            return True
        if slot.want is None:
            self.set_state(slot, State.DEGRADED, f"not restored in full: {slot.clamp}")
        else:
            self.set_state(slot, State.DEGRADED if slot.degraded else State.APPLIED, slot.degraded)
        return False

    def _settle_odd(self, slot: Slot, raw: bytes, found: str, wrote: str) -> bool:
        """The kernel shows something else: once may be another writer, twice is the kernel."""
        again = slot.odd == found
        slot.odd = found
        slot.settled = raw if again else None
        if again:
            record = self.journal.get(*slot.slot_key)
            if record is not None:
                try:
                    self.journal.update([record.with_ours(found)])
                except JournalError as error:
                    log.warning("the journal cannot be written: %s", error)
            self.set_state(slot, State.DEGRADED, f"wrote {wrote}, and the kernel made it {found}")
        return False

    def reject(self, slot: Slot, error: OSError, wrote: str = "") -> None:
        """Note a refusal; the file rests, twice as long each time."""
        rest = min(self.limits.backoff_s * 2**slot.failures, self.limits.max_backoff_s)
        slot.failures = min(slot.failures + 1, 32)
        slot.retry_at = self.clock() + rest
        slot.errno = error.errno or 0
        on = f" on writing {wrote!r}" if wrote else ""
        self.set_state(slot, State.FAILED, f"{describe(error)}{on}")

    def set_state(self, slot: Slot, state: State, detail: str = "") -> None:
        """Set a slot's state, and log it if it is news."""
        if state is slot.state and detail == slot.detail:
            return
        before, slot.state, slot.detail = slot.state, state, detail
        if state in BAD:
            if before is not state:
                log.warning("%s: %s: %s", _place(slot), state, detail)
        elif before in BAD:
            log.info("%s: %s, was %s", _place(slot), state, before)
        else:
            log.debug("%s: %s %s", _place(slot), state, detail)

    # -- for people ------------------------------------------------------------------------------

    def views(self, subject: str) -> list[ResourceView]:
        """Return how everything stands that is wanted for a subject."""
        return [self._view(key, want) for key, want in self._by_subject.get(subject, {}).items()]

    def restoring(self) -> list[ResourceView]:
        """Return the originals that are still to be put back."""
        return [
            self._view(slot.slot_key, None)
            for slot in self._slots.values()
            if slot.restoring is not None
        ]

    def states(self) -> dict[tuple[Resource, State], int]:
        """Count slots by resource and state, for metrics."""
        counts: dict[tuple[Resource, State], int] = {}
        for slot in self._slots.values():
            if slot.parked:
                continue
            counts[slot.resource, slot.state] = counts.get((slot.resource, slot.state), 0) + 1
        return counts

    def standing(self, resources: Collection[Resource]) -> list[tuple[str, ResourceView]]:
        """Return (subject, view) of everything that is wanted of some resources."""
        return [
            (slot.want.subject, self._view(key, slot.want))
            for key, slot in self._slots.items()
            if slot.resource in resources and slot.want is not None
        ]

    def _view(self, key: SlotKey, want: Want | None) -> ResourceView:
        slot = self._slots[key]
        record = self.journal.get(*key)
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
            retry_in_s=max(slot.retry_at - self.clock(), 0.0),
            writes=tuple(slot.writes),
            claim=None if want is None else want.claim,
            cookie=slot.cookie,
        )


def _original(record: Record) -> str | None:
    return record.original if record.original is not None else _text(record.asked)


def _text(asked: int | str | None) -> str | None:
    return None if asked is None else str(asked)


def _canonical(kept: int | str | None) -> Value | None:
    return CpuSet.parse(kept) if isinstance(kept, str) else kept


def _place(slot: Slot) -> str:
    where = slot.path or slot.place or "node"
    return f"{where} ({slot.resource}{'/' + slot.key if slot.key else ''})"


_BESIDE: Final[Mapping[Resource, Resource]] = {
    Resource.CPU_SHARES: Resource.CPU_IDLE,  # an idle group takes no weight
    Resource.CPU_CFS_QUOTA: Resource.CPU_CFS_BURST,  # a quota below the burst is refused
    Resource.CPU_CFS_BURST: Resource.CPU_CFS_QUOTA,
}
"""What is planned to follow which other resource of the same group."""


class _Refused:
    """The refusals of one pass: what was planned to follow one is not tried.

    Along the tree the same resource follows, within a group another one, and a control group that
    could not be made is neither filled nor entered.
    """

    def __init__(self) -> None:
        self._places: dict[Resource, set[str]] = {}
        self._above: dict[tuple[Resource, str], str] = {}
        self._groups: set[str] = set()

    def add(self, write: PlannedWrite) -> None:
        place, resource, key = write.slot
        if write.act is Act.MKDIR and resource is Resource.RESCTRL_SCHEMATA:
            self._groups.add(key)
        if resource in FILES:
            self._places.setdefault(resource, set()).add(place)
            for above in ancestors(place):
                self._above[resource, above] = place

    def before(self, write: PlannedWrite) -> str:
        """Return what was refused and stands before a write; "" if nothing does."""
        place, resource, key = write.slot
        group = {Resource.RESCTRL_SCHEMATA: key, Resource.RESCTRL_GROUP: write.new}.get(resource)
        if group in self._groups:
            return f"control group {group}"
        beside = _BESIDE.get(resource)
        if beside is not None and place in self._places.get(beside, ()):
            return f"{beside} of {place}"
        places = self._places.get(resource)
        if not places or place in places:
            return ""
        above = next((one for one in ancestors(place) if one in places), "")
        return above or self._above.get((resource, place), "")
