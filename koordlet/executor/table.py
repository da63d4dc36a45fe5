"""The table of slots: what is wanted where, by whom, and how it stands.

A subject's wants are given all at once; a slot that nobody wants any more is restored, and leaves
the table when nothing of ours stands there and nobody may bring it back.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.records import Record, RecordKey
from koordlet.executor.slots import BAD, Slot, SlotKey, State, Want
from koordlet.executor.texts import Texts
from linux.cgroup_files import FILES
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.resources import Resource
from service.repeats import Repeats

log = logging.getLogger(__name__)


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


DEFAULT_LIMITS: Final = Limits()


def describe(error: OSError) -> str:
    """Return an error as the state's detail shows it: "EINVAL: Invalid argument"."""
    number = error.errno or 0
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"


class SlotTable:
    """See the module. Every part of the executor works on the same one."""

    def __init__(
        self,
        texts: Texts,
        journal: Journal,
        *,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self.texts = texts
        self.journal = journal
        self.limits = limits
        self.clock = clock
        self._repeats = Repeats(clock=clock)
        self.slots: dict[SlotKey, Slot] = {}
        self.by_path: dict[str, Slot] = {}
        """The slots of cgroup files by their path."""
        self.released: list[Slot] = []
        """Slots that lost their wish since the last plan, and are to be restored."""
        self._files: list[Slot] = []
        self._virtual: dict[Resource, list[Slot]] = {}
        self._lists_stale = True
        self._orphans_stale = True
        self._runtime_values_stale = True
        self.by_subject: dict[str, dict[SlotKey, Want]] = {}
        self._contended: set[SlotKey] = set()

    @property
    def host(self) -> Host:
        return self.texts.host

    @property
    def layout(self) -> Layout:
        return self.texts.layout

    def files(self) -> Sequence[Slot]:
        """Return the slots of cgroup files."""
        self._list()
        return self._files

    def virtual(self) -> Mapping[Resource, Sequence[Slot]]:
        """Return the slots of everything else."""
        self._list()
        return self._virtual

    def of_subjects(self, subjects: Iterable[str]) -> list[Slot]:
        """Return the slots whose value one of these subjects wants."""
        return [
            slot
            for subject in subjects
            for key in self.by_subject.get(subject, ())
            if (slot := self.slots.get(key)) is not None and slot.subject == subject
        ]

    def _list(self) -> None:
        if not self._lists_stale:
            return
        self._files = [slot for slot in self.slots.values() if slot.file is not None]
        self._virtual = {}
        for slot in self.slots.values():
            if slot.file is None:
                self._virtual.setdefault(slot.resource, []).append(slot)
        self._lists_stale = False

    # -- what is wanted --------------------------------------------------------------------------

    def want(self, subject: str, wants: Sequence[Want]) -> None:
        """Set everything that is wanted for a subject; what is no longer wanted is restored."""
        new = {want.slot_key: want for want in wants}
        old = self.by_subject.get(subject, {})
        if new:
            self.by_subject[subject] = new
        else:
            self.by_subject.pop(subject, None)
        for key, want in new.items():
            slot = self.slots.get(key)
            if slot is None:
                slot = self._add(key)
            elif slot.want == want:
                continue
            elif slot.want is not None and slot.want.subject != subject:
                # The first subject keeps the place; `views` tells the other one.
                self._contended.add(key)
                continue
            slot.assign(want)
        for key in old.keys() - new.keys():
            self._release(key, subject)

    def wanted(self, subject: str) -> Mapping[SlotKey, Want]:
        """Return what is wanted for a subject."""
        return self.by_subject.get(subject, {})

    def subjects(self) -> list[str]:
        """Return the subjects for which something is wanted."""
        return list(self.by_subject)

    # -- what is to be put back ------------------------------------------------------------------

    def restore(self, record: Record) -> None:
        """Have the original of `record` put back, unless somebody wants the place."""
        slot = self.slots.get(record.record_key) or self._add(record.record_key)
        if slot.want is None:
            slot.assign(None)
            slot.restore(record)

    def orphans(self, left_behind: Callable[[], Sequence[Record]]) -> list[Record]:
        """Return the records that no slot is about: leftovers of an earlier run, or supports.

        A support (a burst lowered for a quota's sake) is one only once its cause is gone.
        left_behind: finds what no journal knows; asked only when something has changed.
        """
        if not self._orphans_stale:
            return []
        self._orphans_stale = False
        found = []
        for record in [*self.journal.records(), *left_behind()]:
            cause = (record.place, Resource(record.support_of), "") if record.support_of else None
            slot = self.slots.get(record.record_key)
            if (slot is None or slot.parked) and (cause is None or self._unused(cause)):
                found.append(record)
        return found

    def watch_runtime_values(self) -> None:
        """Watch what the runtime may write again though nobody wants it; see `RuntimeValues`."""
        if not self._runtime_values_stale:
            return
        self._runtime_values_stale = False
        for handed in self.journal.all_runtime_values():
            key = handed.place, handed.resource, ""
            if key not in self.slots and self.journal.get(*key) is None:
                self.let_go(self._add(key))

    def _unused(self, key: SlotKey) -> bool:
        slot = self.slots.get(key)
        return slot is None or slot.parked

    def live(self) -> dict[SlotKey, Slot]:
        return {key: slot for key, slot in self.slots.items() if not slot.parked}

    def journal_grew(self) -> None:
        """Note that the journal has new records: some may be nobody's."""
        self._orphans_stale = True

    # -- slots -----------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Judge again, at the next plan, what is not simply applied: what is around may differ."""
        self._orphans_stale = True
        for slot in self.slots.values():
            if slot.state is not State.APPLIED:
                slot.look_again()

    def set_layout(self, layout: Layout) -> None:
        """Work with another layout: the pods' root appeared or moved."""
        if layout == self.texts.layout:
            return
        self.texts.layout = layout
        before = self.by_subject
        self.slots, self.by_subject, self.by_path = {}, {}, {}
        self._lists_stale = self._orphans_stale = self._runtime_values_stale = True
        for subject, wants in before.items():
            self.want(subject, list(wants.values()))

    def _add(self, key: SlotKey) -> Slot:
        place, resource, _ = key
        file = FILES.get(resource)
        slot = Slot(*key, file)
        if file is not None and self.texts.layout.has(file.controller):
            directory = self.texts.layout.directory(file.controller, place)
            slot.locate(directory, file.name(self.texts.layout.version) or "")
        self.slots[key] = slot
        if slot.path:
            self.by_path[slot.path] = slot
        self._lists_stale = True
        return slot

    def drop(self, slot: Slot) -> None:
        if self.slots.get(slot.slot_key) is slot:
            del self.slots[slot.slot_key]
            self.by_path.pop(slot.path, None)
        self._lists_stale = self._orphans_stale = True

    def let_go(self, slot: Slot) -> None:
        """Nothing of ours stands: drop the slot, or watch what the runtime may write again."""
        if slot.file is None or self.journal.runtime_values(slot.place, slot.resource) is None:
            self.drop(slot)
            return
        slot.park()
        self._orphans_stale = True
        self.set_state(slot, State.APPLIED)

    def _release(self, key: SlotKey, subject: str) -> None:
        slot = self.slots.get(key)
        if slot is None or slot.want is None or slot.want.subject != subject:
            return
        heir = None
        if key in self._contended:
            heir = next((of[key] for of in self.by_subject.values() if key in of), None)
        slot.assign(heir)
        if slot.want is None:
            slot.restore(self.journal.get(*key))
            if slot.restoring is None:
                self.let_go(slot)
            else:
                self.released.append(slot)

    def leave(self, subject: str) -> bool:
        """Forget what was wanted for a subject whose groups are gone: nothing can be restored.

        Returns False, and changes nothing, while a group is there or where more than the files of
        its own group was wanted.
        """
        slots = [self.slots[key] for key in self.by_subject.get(subject, ()) if key in self.slots]
        if any(slot.file is None or slot.subject != subject for slot in slots):
            return False
        if any(slot.slot_key in self._contended for slot in slots):
            return False
        if any(self.host.is_dir(one) for one in {slot.directory for slot in slots}):
            return False
        self.by_subject.pop(subject, None)
        self.forget(
            [slot.slot_key for slot in slots], gone=[(slot.place, slot.resource) for slot in slots]
        )
        for slot in slots:
            self.drop(slot)
        return True

    def forget(
        self,
        keys: Sequence[RecordKey],
        left: Sequence[Record] = (),
        gone: Sequence[tuple[str, Resource]] = (),
    ) -> None:
        try:
            self.journal.update(left, forget=keys, superseded=gone)
        except JournalError as error:
            log.warning("the journal cannot be written: %s", error)

    # -- states ----------------------------------------------------------------------------------

    def reject(self, slot: Slot, error: OSError, wrote: str = "") -> None:
        """Note a refusal; the file rests, twice as long each time."""
        rest = min(self.limits.backoff_s * 2**slot.failures, self.limits.max_backoff_s)
        slot.refuse(error.errno or 0, self.clock() + rest)
        on = f" on writing {wrote!r}" if wrote else ""
        self.set_state(slot, State.FAILED, f"{describe(error)}{on}")

    def in_force(self, slot: Slot) -> None:
        """Note that the value stands, in full or as far as it goes."""
        self.set_state(slot, State.DEGRADED if slot.degraded else State.APPLIED, slot.degraded)

    def set_state(self, slot: Slot, state: State, detail: str = "") -> None:
        """Set a slot's state, and log it if it is news."""
        if state is slot.state and detail == slot.detail:
            return
        before = slot.state
        slot.stand(state, detail)
        if state in BAD:
            # On a busy node pods come and go, and each may meet what the last one met: `status`
            # has them all, the log has the first.
            trouble = (slot.resource, state, detail)
            if before is not state and (left_out := self._repeats.due(trouble)) is not None:
                log.warning(
                    "%s: %s: %s",
                    _place(slot),
                    state,
                    detail,
                    extra={"same_trouble_not_logged": left_out} if left_out else None,
                )
        elif before in BAD:
            log.info("%s: %s, was %s", _place(slot), state, before)
        else:
            log.debug("%s: %s %s", _place(slot), state, detail)


def _place(slot: Slot) -> str:
    where = slot.path or slot.place or "node"
    return f"{where} ({slot.resource}{'/' + slot.key if slot.key else ''})"
