"""Judges the observed values: is a value ours, another writer's or the original, and what follows.

A pass reads every file, and judges only those whose content differs from the content that it judged
last. The observed value also decides the original: a value that is not ours was written by another
program, and is what has to be restored one day.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from apis.qos import KubeQoS
from hooks.state import State
from koordlet.executor.files import FilePlanner
from koordlet.executor.originals import Originals, of_container
from koordlet.executor.pod_groups import PodGroups
from koordlet.executor.records import Record, plain
from koordlet.executor.slots import GONE, Plan, Slot
from koordlet.executor.table import SlotTable
from linux.cgroup_files import field_text, number
from linux.cgroup_paths import is_below, parent_of
from linux.resources import Resource
from linux.weights import Formula

_FIGHT: Final = 4
_FIGHT_WINDOW_S: Final = 60.0
"""So many foreign values in this time, and the file is left to the other writer for a while.
Chosen: one program that sets a value at its start, or a person who tries, stays below it; a program
that sets it periodically does not. Twice the number doubles the writes of such a fight. In the
directories of Burstable and BestEffort each group of a pod that came or went in this time allows
one more, and a class's first or last group a second one (`PodGroups`)."""
_FIRST_REST_S: Final = 60.0
"""How long a file is left to another writer first; the time doubles with each fight. Chosen as the
length of the window, so that a fight costs at most half of the time."""


class Judge:
    """See the module."""

    def __init__(self, table: SlotTable, originals: Originals, files: FilePlanner) -> None:
        self._table = table
        self._texts = table.texts
        self._originals = originals
        self._files = files
        self._pod_groups = PodGroups(table.texts, window_s=_FIGHT_WINDOW_S)
        self.lacking: list[Slot] = []
        """Slots whose group exists and whose file does not, as of the last reading."""
        self._left_alone: set[tuple[str, Resource]] = set()

    def leave_alone(self, places: Iterable[tuple[str, Resource]]) -> None:
        """Do not judge these until the next pass: whose value they hold is not known yet."""
        self._left_alone.update(places)

    def count_pod_groups(self, now: float) -> None:
        """Note which pods' groups have come and gone, if a QoS directory has a desired value."""
        if any(self._table.wanted(f"kubeqos/{qos}") for qos in KubeQoS):
            self._pod_groups.count(now)
        else:
            self._pod_groups.forget()

    def dirty(self, slots: Sequence[Slot], plan: Plan, now: float) -> list[Slot]:
        """Return those of `slots`, all of cgroup files, that may have to be written.

        Their desired texts are set.
        """
        self.lacking.clear()
        judged = [slot for slot in self._read(slots, now) if self._judge(slot, plan, now)]
        self._left_alone.clear()
        return [slot for slot in judged if self._wish(slot)]

    def _read(self, slots: Sequence[Slot], now: float) -> list[Slot]:
        """Read the files; return the slots whose content differs from the one last judged."""
        read = self._texts.raw
        version = self._texts.layout.version
        requests = self._table.requests
        dirty: list[Slot] = []
        for slot in slots:
            if slot.retry_at > now:
                continue
            if self._left_alone and (slot.place, slot.resource) in self._left_alone:
                slot.look_again()
                continue
            if requests and slot.place in requests:
                slot.look_again()
                continue
            if not self._may_write(slot):
                continue
            try:
                raw = read(slot.path)
            except OSError as error:
                self.unreadable(slot, error)
                continue
            if raw == slot.settled:
                continue
            assert slot.file is not None
            try:
                found = field_text(slot.file, version, raw)
                number(slot.file, found)
            except ValueError as error:
                slot.lose_sight()
                self._table.set_state(slot, State.FAILED, f"unreadable content: {error}")
                continue
            slot.observe(found, raw)
            dirty.append(slot)
        return dirty

    def _may_write(self, slot: Slot) -> bool:
        """Return whether koordlet may write the slot's file; set the state when not."""
        if not slot.path:
            assert slot.file is not None
            what = f"cgroup v{self._texts.layout.version} has no file for it here"
            self._table.set_state(slot, State.UNSUPPORTED, what)
            return False
        want = slot.want
        if want is None:
            return True  # we wrote there before, or there would be no record
        if want.subject.startswith("hostapp/"):
            return bool(slot.place)
        root = self._texts.layout.kubepods
        if root and is_below(slot.place, root):
            return True
        if not root or not slot.place:
            self._table.set_state(slot, State.PENDING, "its cgroup is not known yet")
        else:
            self._table.set_state(slot, State.BLOCKED, f"{slot.place!r} does not lie in {root!r}")
        return False

    def unreadable(self, slot: Slot, error: OSError) -> None:
        """Set the state of a slot whose file cannot be read; forget it when its group is gone."""
        slot.lose_sight()
        if error.errno not in GONE:
            self._table.reject(slot, error)
        elif not self._texts.host.is_dir(slot.directory):
            if slot.want is None:
                self._table.forget([slot.slot_key], gone=[(slot.place, slot.resource)])
                self._table.drop(slot)
            else:
                self._table.set_state(slot, State.PENDING, "no such cgroup at this time")
        else:
            self.lacking.append(slot)
            name = slot.path.rpartition("/")[2]
            detail = f"there is no {name} here: the kernel or its parent group lacks it"
            self._table.set_state(slot, State.UNSUPPORTED, detail)

    def _judge(self, slot: Slot, plan: Plan, now: float) -> bool:
        """Compare the observed value with the journal; return False when nothing is left to do."""
        file, found = slot.file, slot.found
        assert file is not None and found is not None
        record = self._originals.record_of(slot, plan)
        if record is not None and self._stands(slot, record, plan):
            # A weight by the quadratic formula was converted by the runtime, even if from a
            # delivered value. One by the linear formula may be our own first guess: no evidence.
            self._texts.learn(slot, {Formula.QUADRATIC})
            if slot.parked:
                slot.restore(record)
            elif slot.slot_key in plan.records or self._table.journal.get(*slot.slot_key):
                self._follow_request(slot, plan.records.get(slot.slot_key, record), plan)
            return True
        if slot.want is None:
            # The file holds the original or another writer's value: nothing of ours to undo.
            if not slot.parked:
                self._finish(slot, plan)
            return False
        if record is None:
            self._texts.learn(slot)
            return True
        if slot.state in (State.APPLIED, State.DEGRADED):
            slot.meet_foreign(now, _FIGHT_WINDOW_S)
        if of_container(slot):
            self._follow_request(slot, record, plan)
        elif record.original is None or not self._texts.same(file, record.original, found):
            plan.keep(msgspec.structs.replace(record, original=found, requested=None))
        if self._fights(slot, now):
            self._yield_to_other(slot, now)
            return False
        return True

    def _fights(self, slot: Slot, now: float) -> bool:
        """Return whether another program keeps writing to the file for no reason of its own."""
        if slot.foreign < _FIGHT:
            return False
        return slot.foreign - self._pod_groups.resets_explained(slot.place, now) >= _FIGHT

    def _follow_request(self, slot: Slot, record: Record, plan: Plan) -> None:
        """Plan to journal what kubelet requests now, where it requested something else before."""
        requested = self._originals.as_requested(slot, record)
        if requested is not record:
            plan.keep(requested)

    def _stands(self, slot: Slot, record: Record, plan: Plan) -> bool:
        """Return whether the observed value is ours, or what the kernel left of ours."""
        assert slot.file is not None and slot.found is not None
        if any(self._texts.same(slot.file, one, slot.found) for one in record.ours):
            return True
        if not self._originals.cut_down(slot, record.ours):
            return False
        plan.keep(record.with_ours(slot.found))
        return True

    def _yield_to_other(self, slot: Slot, now: float) -> None:
        """Leave the file to a program that keeps writing another value, for a while."""
        rest = min(_FIRST_REST_S * 2**slot.yields, self._table.limits.max_backoff_s * 2)
        slot.yield_until(now + rest)
        detail = f"another writer keeps setting {slot.found}; tried again in {rest:.0f} s"
        self._table.set_state(slot, State.BLOCKED, detail)

    def _finish(self, slot: Slot, plan: Plan) -> None:
        plan.done.append(slot)
        left = self._files.left_for_idle(slot, self._table.slots)
        if left is not None:
            plan.keep(left)
        else:
            plan.forget.append(slot.slot_key)

    def _restored_as_far_as_can_be(self, slot: Slot) -> bool:
        """Return whether the file holds the original, or what the kernel has left of it."""
        assert slot.file is not None and slot.found is not None and slot.text is not None
        if self._texts.same(slot.file, slot.text, slot.found):
            return True
        above = self._table.slots.get((parent_of(slot.place), slot.resource, slot.key))
        moves = above is not None and not above.parked
        return not moves and self._originals.cut_down(slot, [slot.text])

    def _wish(self, slot: Slot) -> bool:
        try:
            self._files.wish(slot)
        except ValueError as error:
            slot.aim(None)
            self._table.set_state(slot, State.FAILED, str(error))
            return False
        except OSError as error:
            self.unreadable(slot, error)
            return False
        return True

    def conclude(self, slot: Slot, plan: Plan) -> None:
        """Set the state of a slot for which nothing is to be written."""
        assert slot.file is not None and slot.found is not None and slot.text is not None
        if slot.blocked_by:
            self._table.set_state(slot, State.BLOCKED, slot.blocked_by)
            return
        if slot.want is None:
            if self._restored_as_far_as_can_be(slot):
                self._finish(slot, plan)
            else:
                self._table.set_state(slot, State.DEGRADED, f"not restored in full: {slot.clamp}")
            return
        if (
            self._originals.record_of(slot, plan) is None
            and self._originals.inherited(slot, plan) is not None
        ):
            self._originals.keep(slot, plan, slot.found)
        requested = slot.want.requested
        if requested is not None and self._originals.record_of(slot, plan) is None:
            # Our value was delivered at creation: what kubelet requested is the original.
            text = self._texts.text_of(slot, requested)
            if text is not None and not self._texts.same(slot.file, text, slot.found):
                self._originals.keep(slot, plan, slot.found)
                record = plan.records[slot.slot_key]
                record = msgspec.structs.replace(record, original=None, requested=plain(requested))
                plan.keep(record)
                self._note_runtime_values(slot, record, plan)
        self._table.in_force(slot)

    def _note_runtime_values(self, slot: Slot, record: Record, plan: Plan) -> None:
        kind, _, container_id = slot.subject.partition("/")
        values = (
            self._originals.runtime_values_of(container_id, record) if kind == "container" else None
        )
        if values is not None:
            plan.runtime_values.append(values)
