"""Applies a plan: first the journal, then one write after the other, each of which is read back.

The kernel's answer decides the state. ENOENT and ENODEV: the group is gone, which is not a failure.
EOPNOTSUPP: unsupported. Any other error is a refusal: the file backs off, and writes that were
planned to follow it are held back. A budget limits the writes of all files together.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hooks.state import State
from koordlet.executor import node_wide, tasks
from koordlet.executor.files import FilePlanner
from koordlet.executor.journal import JournalError
from koordlet.executor.judging import Judge
from koordlet.executor.order import ancestors
from koordlet.executor.slots import (
    GONE,
    Act,
    Plan,
    PlannedWrite,
    Slot,
    WriteNote,
    WriteReport,
    Written,
)
from koordlet.executor.table import SlotTable, describe
from linux.block_io import BLOCK_FILES
from linux.cgroup_files import FILES, field_text
from linux.resources import Resource

log = logging.getLogger(__name__)

_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_COOKIE_GROUPS: Final = 256
"""Core scheduling groups whose changes are counted. Chosen: each is a series of a metric, and a
node has far fewer at a time. Twice the value doubles the series that ended groups leave behind."""


class Applier:
    """See the module."""

    def __init__(
        self,
        table: SlotTable,
        files: FilePlanner,
        judge: Judge,
        *,
        wall_clock: Callable[[], float],
        written: Written | None,
    ) -> None:
        self._table = table
        self._texts = table.texts
        self._files = files
        self._judge = judge
        self._wall_clock = wall_clock
        self._on_written = written
        self._tokens = float(table.limits.burst)
        self._refilled = table.clock()
        self.cookie_changes: dict[tuple[str, str], int] = {}
        """(core scheduling group, "succeeded" or "failed") -> changes, of the latest groups."""

    def apply(self, plan: Plan) -> WriteReport:
        """Carry out `plan` as far as the budget and the kernel allow."""
        try:
            self._table.journal.update(
                plan.records.values(), plan.forget, runtime_values=plan.runtime_values
            )
        except JournalError as error:
            return self._not_journalled(plan, error)
        for slot in plan.done:
            self._table.let_go(slot)
        self._refill()
        progress = _Progress()
        for write in plan.writes:
            if self._may_go(write, progress):
                self._carry_out(write, progress)
        self._forget_restored(progress.restored)
        return WriteReport(
            written=progress.written,
            failed=progress.failed,
            deferred=progress.deferred,
            restored=len(progress.restored) + progress.removed + len(plan.done),
            paths=frozenset(progress.paths),
        )

    def _not_journalled(self, plan: Plan, error: JournalError) -> WriteReport:
        """Write nothing: without its original in the journal, no value could be restored."""
        for write in plan.writes:
            slot = self._table.slots.get(write.slot)
            if slot is not None:
                slot.look_again()
                self._table.set_state(slot, State.FAILED, f"the journal cannot be written: {error}")
        return WriteReport(failed=len(plan.writes))

    def _may_go(self, write: PlannedWrite, progress: _Progress) -> bool:
        """Return whether a write may be tried now. Takes it off the budget, or sets the state."""
        slot = self._table.slots.get(write.slot)
        if slot is not None and slot.file is not None and slot.retry_at > self._refilled:
            return False  # its widening step was refused in this pass, or it still backs off
        if slot is not None and (other := progress.refused.before(write)):
            slot.look_again()
            if slot.retry_at <= self._refilled:  # else it was refused itself; its state says why
                self._table.set_state(slot, State.BLOCKED, f"waits for {other}")
            return False
        if slot is not None and slot.place in self._table.requests:
            slot.look_again()
            progress.refused.add(write)  # what was planned to follow it would be refused
            return False
        if self._tokens < 1.0:
            progress.deferred += 1
            if slot is not None:
                slot.look_again()
                self._table.set_state(slot, State.PENDING, "the write budget is used up")
            return False
        self._tokens -= 1.0
        return True

    def _carry_out(self, write: PlannedWrite, progress: _Progress) -> None:
        slot = self._table.slots.get(write.slot)
        progress.paths.add(write.path)
        try:
            self._perform(write)
        except OSError as error:
            self._note(slot, write, describe(error))
            self._count_cookie(slot, "failed")
            if slot is not None:
                slot.look_again()
                self._not_written(slot, error, write)
            if error.errno not in GONE:
                progress.failed += 1
                progress.refused.add(write)
            return
        progress.written += 1
        self._note(slot, write, "")
        self._count_cookie(slot, "succeeded")
        if self._on_written is not None:
            self._on_written(write, self._policy_of(slot, write))
        if slot is not None:
            self._written(slot, write, progress)

    def _written(self, slot: Slot, write: PlannedWrite, progress: _Progress) -> None:
        """Follow up a write that the kernel accepted: read it back, set journal and state."""
        if write.act is Act.MKDIR and slot.resource is Resource.RESCTRL_SCHEMATA:
            node_wide.note_made(self._table, slot, write.path)
        if slot.file is not None:
            if write.final and self._settle(slot, write):
                progress.restored.append(slot)
        elif write.act is Act.RMDIR:
            # At once: whatever gets this name from now on is not ours.
            self._table.forget([slot.slot_key])
            self._table.drop(slot)
            progress.removed += 1
        elif write.final:
            slot.observe(write.new)
            slot.accept()
            self._table.in_force(slot)

    def _forget_restored(self, restored: Sequence[Slot]) -> None:
        """Remove the records of restored files from the journal."""
        if not restored:
            return
        left = [self._files.left_for_idle(slot, self._table.slots) for slot in restored]
        keys = [slot.slot_key for slot, one in zip(restored, left, strict=True) if not one]
        self._table.forget(keys, [one for one in left if one])

    def fill_budget(self) -> None:
        """Allow a full burst of writes again: for an uninstall, which must not stop half-way."""
        self._tokens = float(self._table.limits.burst)

    def _refill(self) -> None:
        now = self._table.clock()
        gained = (now - self._refilled) * self._table.limits.writes_per_second
        self._tokens = min(self._tokens + gained, float(self._table.limits.burst))
        self._refilled = now

    def _perform(self, write: PlannedWrite) -> None:
        match write.act:
            case Act.WRITE:
                self._texts.host.write(write.path, write.data)
            case Act.MKDIR:
                try:
                    self._texts.host.mkdir(write.path, write.mode)
                except FileExistsError:
                    if write.slot[1] is Resource.RESCTRL_SCHEMATA:
                        raise  # another program made it a moment ago: the next pass looks at it
                    return
            case Act.RMDIR:
                self._texts.host.rmdir(write.path)
            case Act.MOVE_TASKS:
                tasks.move(self._texts.host, write)
            case Act.COOKIE_CREATE:
                self._texts.host.core_sched_create(write.ids[0])
            case Act.COOKIE_COPY:
                self._texts.host.core_sched_copy(write.ids[0], list(write.ids[1:]))

    def _note(self, slot: Slot | None, write: PlannedWrite, error: str) -> None:
        if slot is None:
            return
        slot.remember(
            WriteNote(self._wall_clock(), write.path, write.old, write.new, write.why, error)
        )

    def _policy_of(self, slot: Slot | None, write: PlannedWrite) -> str:
        """Return the policy that claims the value, or claimed it before its restore."""
        if slot is not None and slot.want is not None:
            return slot.want.claim.policy
        record = self._table.journal.get(*write.slot)
        return "" if record is None else record.policy

    def _count_cookie(self, slot: Slot | None, status: str) -> None:
        if slot is None or slot.resource is not Resource.CORE_SCHED_COOKIE:
            return
        record = self._table.journal.get(*slot.slot_key)
        left = "" if record is None or not record.ours else record.ours[-1]
        key = left if slot.want is None else str(slot.want.value), status
        # The group counted last is kept longest: a group may be one pod, and pods come and go.
        self.cookie_changes[key] = self.cookie_changes.pop(key, 0) + 1
        if len(self.cookie_changes) > _COOKIE_GROUPS:
            del self.cookie_changes[next(iter(self.cookie_changes))]

    def _not_written(self, slot: Slot, error: OSError, write: PlannedWrite) -> None:
        if slot.resource in BLOCK_FILES and self._texts.host.is_dir(slot.directory):
            # The group is there, so ENODEV is about the disk.
            gone = False
        else:
            gone = error.errno in GONE
        if gone:
            if slot.file is not None:
                self._judge.unreadable(slot, error)
        elif error.errno in _UNSUPPORTED:
            self._table.set_state(slot, State.UNSUPPORTED, describe(error))
            slot.rest(self._table.clock() + self._table.limits.max_backoff_s)
        else:
            self._table.reject(slot, error, write.new)
            node_wide.explain_refusal(self._table, slot, write)

    def _settle(self, slot: Slot, write: PlannedWrite) -> bool:
        """Read back what was written; return whether it was a restore that is now complete."""
        assert slot.file is not None and slot.text is not None
        try:
            raw = self._texts.host.read(slot.path)
            found = field_text(slot.file, self._texts.layout.version, raw)
        except (OSError, ValueError):
            slot.look_again()
            return False
        slot.observe(found, raw)
        slot.accept()
        if not self._texts.same(slot.file, write.new, found):
            self._take_odd(slot, found, write.new)
            return False
        if slot.want is None and self._texts.same(slot.file, slot.text, found):
            self._table.let_go(slot)
            return True
        if slot.want is None:
            self._table.set_state(slot, State.DEGRADED, f"not restored in full: {slot.clamp}")
        else:
            self._table.in_force(slot)
        return False

    def _take_odd(self, slot: Slot, found: str, wrote: str) -> None:
        """Record that the kernel changed our value on writing: the result counts as ours too."""
        record = self._table.journal.get(*slot.slot_key)
        if record is not None:
            self._table.forget((), [record.with_ours(found)])
        self._table.set_state(
            slot, State.DEGRADED, f"wrote {wrote}, and the kernel changed it to {found}"
        )


_BESIDE: Final[Mapping[Resource, Resource]] = {
    Resource.CPU_SHARES: Resource.CPU_IDLE,  # an idle group takes no weight
    Resource.CPU_CFS_QUOTA: Resource.CPU_CFS_BURST,  # a quota below the burst is refused
    Resource.CPU_CFS_BURST: Resource.CPU_CFS_QUOTA,
}
"""Resource -> the resource of the same group whose write precedes its own."""


@dataclass(slots=True)
class _Progress:
    """How far one plan has come.

    restored: slots of files whose originals are in force again. removed: directories that koordlet
    had made.
    """

    written: int = 0
    failed: int = 0
    deferred: int = 0
    removed: int = 0
    restored: list[Slot] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    refused: _Refused = field(default_factory=lambda: _Refused())


class _Refused:
    """The refusals of one pass. Writes that were planned to follow a refused one are not tried.

    These follow a refused write: the same resource above and below it in the cgroup tree; the
    resource of the same group that depends on it; for a resctrl group that could not be made, its
    schemata and its members; for a switch that stayed on, the other switch, and group identities,
    each of which the kernel would refuse while their switch is off.
    """

    def __init__(self) -> None:
        self._places: dict[Resource, set[str]] = {}
        self._above: dict[tuple[Resource, str], str] = {}
        self._groups: set[str] = set()
        self._switches: list[str] = []

    def add(self, write: PlannedWrite) -> None:
        place, resource, key = write.slot
        if write.act is Act.MKDIR and resource is Resource.RESCTRL_SCHEMATA:
            self._groups.add(key)
        if resource is Resource.SYSCTL:
            self._switches.append(key)
        if resource in FILES:
            self._places.setdefault(resource, set()).add(place)
            for above in ancestors(place):
                self._above[resource, above] = place

    def before(self, write: PlannedWrite) -> str:
        """Return the refused write that precedes a write, by name; "" if there is none."""
        place, resource, key = write.slot
        if resource in (Resource.SYSCTL, Resource.CPU_BVT) and self._switches:
            return self._switches[0]
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
