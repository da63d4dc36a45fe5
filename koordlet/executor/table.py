"""The table of slots: the desired values of all subjects, and their states.

A subject's desired values are set all at once. A slot whose value is no longer desired is restored.
It leaves the table when its file holds no value of ours and the runtime cannot write one again.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hooks.state import State
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.records import Record, RecordKey
from koordlet.executor.requests_ahead import RequestsAhead
from koordlet.executor.slots import BAD, Slot, SlotKey, Want
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

    writes_per_second: refills the budget. The configuration's default, chosen: more than pods that
        come and go need. Twice the value halves the time until a larger change is complete, and
        doubles the writes of a defect that writes without end.
    burst: the size of the budget. Chosen: all files of a full node, so that the first pass and a
        changed NodeSLO are complete at once. Twice the value allows a defect twice the writes.
    backoff_s: the first rest after a refusal; it doubles up to max_backoff_s. Chosen: many refusals
        end within a second (a group that is being set up), and a lasting one costs one write in
        five minutes. Twice the values: a value that becomes possible is in force that much later.
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
        self.requests = RequestsAhead()
        self._repeats = Repeats(clock=clock)
        self.slots: dict[SlotKey, Slot] = {}
        self.by_path: dict[str, Slot] = {}
        """The slots of cgroup files by their path."""
        self.released: list[Slot] = []
        """Slots to restore whose value is no longer desired since the last plan."""
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
        """Return the slots whose desired value belongs to one of these subjects."""
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

    # -- desired values --------------------------------------------------------------------------

    def want(self, subject: str, wants: Sequence[Want]) -> None:
        """Set all desired values of a subject; values that are no longer desired are restored."""
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
            elif slot.want is not None and _differ_in_reason(slot.want, want):
                slot.renew(want)
                continue
            elif slot.want is not None and slot.want.subject != subject:
                # The first subject keeps the place; `views` shows the other one as blocked.
                self._contended.add(key)
                continue
            slot.assign(want)
        for key in old.keys() - new.keys():
            self._release(key, subject)

    def wanted(self, subject: str) -> Mapping[SlotKey, Want]:
        """Return the desired values of a subject."""
        return self.by_subject.get(subject, {})

    def subjects(self) -> list[str]:
        """Return the subjects with desired values."""
        return list(self.by_subject)

    # -- values to restore -----------------------------------------------------------------------

    def restore(self, record: Record) -> None:
        """Restore the original of `record`, unless a subject has a desired value there."""
        slot = self.slots.get(record.record_key) or self._add(record.record_key)
        if slot.want is None:
            slot.assign(None)
            slot.restore(record)
            self.released.append(slot)

    def orphans(self, left_behind: Callable[[], Sequence[Record]]) -> list[Record]:
        """Return records without a slot: leftovers of an earlier run, and supports.

        A support (a burst that was lowered for a quota) counts only once its cause is gone.
        left_behind: finds leftovers that the journal lacks; called only after changes.
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
        """Watch files that a runtime may write again though no policy claims them."""
        if not self._runtime_values_stale:
            return
        self._runtime_values_stale = False
        for values in self.journal.all_runtime_values():
            key = values.place, values.resource, ""
            if key not in self.slots and self.journal.get(*key) is None:
                self.let_go(self._add(key))

    def _unused(self, key: SlotKey) -> bool:
        slot = self.slots.get(key)
        return slot is None or slot.parked

    def live(self) -> dict[SlotKey, Slot]:
        return {key: slot for key, slot in self.slots.items() if not slot.parked}

    def journal_grew(self) -> None:
        """Note that the journal has new records, some of which may have no slot."""
        self._orphans_stale = True

    # -- slots -----------------------------------------------------------------------------------

    def look_again(self) -> None:
        """At the next plan, judge all values again that are not in force as they are claimed."""
        self._orphans_stale = True
        for slot in self.slots.values():
            if not slot.as_claimed:
                slot.look_again()

    def set_layout(self, layout: Layout) -> None:
        """Use another layout: the pods' root appeared or moved."""
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
        """Drop a slot without a value of ours, or watch it if the runtime may write one again."""
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
        """Forget the desired values of a subject whose groups are gone, as none can be restored.

        Returns False, and changes nothing, while a group exists or if the subject has values other
        than files of its own group.
        """
        slots = [self.slots[key] for key in self.by_subject.get(subject, ()) if key in self.slots]
        if any(slot.file is None or slot.subject != subject for slot in slots):
            return False
        if any(slot.slot_key in self._contended for slot in slots):
            return False
        directories = {slot.directory for slot in slots}
        if any(self.host.is_dir(directory) for directory in directories):
            return False
        for directory in directories:
            self.host.gone(directory)
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
            log.debug("records stay in the journal, which has reported why: %s", error)

    # -- states ----------------------------------------------------------------------------------

    def reject(self, slot: Slot, error: OSError, wrote: str = "") -> None:
        """Note a refusal; the file rests, each time twice as long."""
        rest = min(self.limits.backoff_s * 2**slot.failures, self.limits.max_backoff_s)
        slot.refuse(error.errno or 0, self.clock() + rest)
        on = f" on writing {wrote!r}" if wrote else ""
        self.set_state(slot, State.FAILED, f"{describe(error)}{on}")

    def in_force(self, slot: Slot) -> None:
        """Note that the value is in force, fully or degraded."""
        self.set_state(slot, State.DEGRADED if slot.degraded else State.APPLIED, slot.degraded)

    def set_state(self, slot: Slot, state: State, detail: str = "") -> None:
        """Set a slot's state, and log it if it changed."""
        if state is slot.state and detail == slot.detail:
            return
        before = slot.state
        slot.stand(state, detail)
        if state in BAD:
            # On a busy node pods come and go, and each may have the same problem: the log gets the
            # first one, `status` shows all of them.
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
            if (left_out := self._repeats.due((slot.resource, state, before))) is not None:
                log.info(
                    "%s: %s, was %s",
                    _place(slot),
                    state,
                    before,
                    extra={"same_change_not_logged": left_out} if left_out else None,
                )
        else:
            log.debug("%s: %s %s", _place(slot), state, detail)


def _differ_in_reason(one: Want, other: Want) -> bool:
    """Return whether two desired values are the same value of the same policy."""
    return (
        one.subject == other.subject
        and one.value == other.value
        and one.requested == other.requested
        and one.claim.policy == other.claim.policy
        and one.claim.degraded == other.claim.degraded
    )


def _place(slot: Slot) -> str:
    where = slot.path or slot.place or "node"
    return f"{where} ({slot.resource}{'/' + slot.key if slot.key else ''})"
