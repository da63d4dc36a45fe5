"""What a file held before us: the journal's view of a value, and what a runtime was handed.

A value that the runtime was handed at a container's creation never shows its original in the file;
the note of the delivery does. For as long as the container lives the runtime may write it again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from apis.cpuset import CpuSet
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.records import Delivery, Record, RuntimeValues, plain
from koordlet.executor.slots import Plan, Slot
from koordlet.executor.texts import Texts
from linux.cgroup_files import DEFAULTS, FILES, Codec
from linux.cgroup_paths import PathError, parent_of, parse
from linux.resources import Resource, Value

log = logging.getLogger(__name__)

_KEPT_RUNTIME_VALUES: Final = 6

OfProcesses = Callable[[Delivery, str], Record | None]
"""What a delivery becomes that belongs to processes and not to a file; see `tasks.adopted`."""


class Originals:
    """See the module."""

    def __init__(self, texts: Texts, journal: Journal) -> None:
        self._texts = texts
        self._journal = journal

    def record_of(self, slot: Slot, plan: Plan) -> Record | None:
        """Return the slot's record if it is about this incarnation of the group.

        What the runtime was handed counts as ours wherever it stands, on record or not.
        """
        record = plan.records.get(slot.slot_key) or self._journal.get(*slot.slot_key)
        handed = self._journal.runtime_values(slot.place, slot.resource)
        if record is None and handed is None:
            return None
        inode = self._texts.inode(slot.directory)
        if record is not None and record.inode not in (0, inode):
            record = None
        if handed is None or handed.inode != inode or slot.file is None or slot.found is None:
            return record
        for text in handed.texts:
            if self._texts.same(slot.file, text, slot.found) or self.cut_down(slot, [text]):
                return (record or handed.as_record()).with_ours(text)
        return record

    def keep(self, slot: Slot, plan: Plan, *texts: str) -> None:
        """Have the journal know the original and that `texts` are ours, before they are written."""
        record = self.record_of(slot, plan)
        if record is None:
            record = Record(
                place=slot.place,
                inode=self._texts.inode(slot.directory),
                resource=slot.resource,
                key=slot.key,
                original=self.inherited(slot, plan) or slot.found,
            )
            record = self.as_requested(slot, record)
        if slot.want is not None:
            policy = slot.want.claim.policy
            record = msgspec.structs.replace(record, policy=policy, support_of="")
        plan.keep(record.with_ours(*texts))

    def as_requested(self, slot: Slot, record: Record) -> Record:
        """Return a container's record with what kubelet requests now as its original.

        A runtime writes what kubelet requests and nothing else, so another value in a container's
        file is not the original, whoever wrote it. The record stays as it is where it says the
        same, where kubelet requests nothing, and where the request equals a value of ours: a
        runtime may report that one back as the request.
        """
        want = slot.want
        if want is None or want.requested is None or slot.file is None or not of_container(slot):
            return record
        texts = [self._texts.text_of(slot, want.requested)]
        texts.append(self._texts.other_weight(slot.file, want.requested))
        asked = [text for text in texts if text is not None]
        known = () if record.original is None else (record.original,)
        if (
            not asked
            or record.requested == plain(want.requested)
            or any(self._texts.same(slot.file, a, b) for a in asked for b in (*known, *record.ours))
            or (record.original == slot.found and self.cut_down(slot, asked))
        ):
            return record
        return msgspec.structs.replace(record, original=None, requested=plain(want.requested))

    def inherited(self, slot: Slot, plan: Plan) -> str | None:
        """Return what a group would have got from its parent at its birth if we were not here.

        Alibaba's kernel hands a group's identity to the groups that are made in it later, so a
        value that nobody wrote may be ours. None: this one is not.
        """
        if slot.resource is not Resource.CPU_BVT or slot.found is None:
            return None
        above = (parent_of(slot.place), slot.resource, "")
        record = plan.records.get(above) or self._journal.get(*above)
        if record is None or record.original is None:
            return None
        file = FILES[slot.resource]
        ours = any(self._texts.same(file, text, slot.found) for text in record.ours)
        return record.original if ours else None

    def support(
        self, place: str, resource: Resource, of: Resource, found: str, plan: Plan, *texts: str
    ) -> None:
        """Journal a resource that nobody wants here but that must move for another's sake."""
        file = FILES[resource]
        directory = self._texts.layout.directory(file.controller, place)
        record = plan.records.get((place, resource, "")) or self._journal.get(place, resource)
        inode = self._texts.inode(directory)
        if record is None or record.inode != inode:
            record = Record(
                place=place, inode=inode, resource=resource, original=found, support_of=of.value
            )
        elif not any(
            text is not None and self._texts.same(file, text, found)
            for text in (record.original, *record.ours)
        ):
            # Written by somebody else since, while the cause did not stand.
            record = msgspec.structs.replace(record, original=found, requested=None)
        plan.keep(record.with_ours(*texts))

    def cut_down(self, slot: Slot, texts: Collection[str]) -> bool:
        """Tell whether the kernel made one of `texts` what was found.

        v1 takes a CPU that goes offline out of every group's set, and never puts it back.
        """
        file = slot.file
        if file is None or file.codec is not Codec.CPUS or self._texts.layout.version != 1:
            return False
        try:
            above = CpuSet.parse(self._texts.standing(file, parent_of(slot.place)))
            left = CpuSet.parse(slot.found or "")
            return any(CpuSet.parse(text) & above == left for text in texts)
        except (OSError, ValueError):
            return False

    def text(self, slot: Slot, record: Record) -> str:
        if record.original is not None:
            return record.original
        asked = record.requested_value()
        if isinstance(asked, int | CpuSet):
            return self._texts.encode(slot, asked)
        return self._untouched(slot.resource, slot.place)

    def _untouched(self, resource: Resource, place: str) -> str:
        """Return what a group has whose runtime was asked for nothing.

        Raises OSError when that cannot be read, ValueError when nobody knows.
        """
        if resource in (Resource.CPUSET_CPUS, Resource.CPUSET_MEMS):
            # A runtime leaves v2's empty set as it is, and copies the parent's on v1.
            above = parent_of(place)
            return (
                ""
                if self._texts.layout.version == 2
                else self._texts.standing(FILES[resource], above)
            )
        if resource not in DEFAULTS:
            raise ValueError(f"what {resource} was before is not known")
        return DEFAULTS[resource][self._texts.layout.version - 1]

    # -- values handed over at creation ----------------------------------------------------------

    def adopt_deliveries(
        self, container_id: str, place: str, of_processes: OfProcesses
    ) -> Collection[Resource]:
        """Journal what the runtime was handed for a container, now that its group exists.

        Returns the resources of which that cannot be told now; the next pass tries again.
        of_processes: see there.
        """
        deliveries = self._journal.deliveries(container_id)
        if not deliveries or not place:
            return ()
        file = FILES[Resource.CPU_SHARES]
        if not self._texts.layout.has(file.controller) or not self._texts.host.is_dir(
            self._texts.layout.directory(file.controller, place)
        ):
            return ()
        adopted: list[tuple[Record | None, RuntimeValues | None]] = []
        waiting: list[Resource] = []
        for delivery in deliveries.values():
            try:
                one = self._adopted(delivery, place, of_processes)
            except OSError as error:
                log.warning("container %s, %s: %s", container_id, delivery.resource, error)
                waiting.append(delivery.resource)
                continue
            adopted.append(one)
        # What a full disk cannot take is in memory, goes to the file with the next append, and is
        # told of by the pass.
        with contextlib.suppress(JournalError):
            self._journal.update(
                [record for record, _ in adopted if record is not None],
                runtime_values=[handed for _, handed in adopted if handed is not None],
            )
            if not waiting:
                self._journal.forget_deliveries(container_id)
        return waiting

    def places_of(self, container_ids: Collection[str]) -> dict[str, str]:
        """Return the groups of these containers, found by their names below the pods' root.

        For whoever knows no containers but from the journal. It walks the whole tree of the pods.
        """
        layout = self._texts.layout
        controller = FILES[Resource.CPU_SHARES].controller
        found: dict[str, str] = {}
        level = [layout.kubepods] if layout.kubepods and layout.has(controller) else []
        while level and len(found) < len(container_ids):
            below: list[str] = []
            for place in level:
                for name in self._texts.children(layout.directory(controller, place)):
                    try:
                        parsed = parse(f"{place}/{name}")
                    except PathError:
                        continue
                    container_id = "" if parsed is None else parsed.container_id
                    if not container_id:
                        below.append(f"{place}/{name}")
                    elif container_id in container_ids:
                        found[container_id] = f"{place}/{name}"
            level = below
        return found

    def _adopted(
        self, delivery: Delivery, place: str, of_processes: OfProcesses
    ) -> tuple[Record | None, RuntimeValues | None]:
        """Return what a delivery becomes: no record if what was handed does not stand.

        The runtime may be about to write it, and systemd may do so at any time.
        """
        resource = delivery.resource
        try:
            if resource not in FILES:
                return of_processes(delivery, place), None
            requested = _canonical(delivery.requested)
            delivered = _canonical(delivery.delivered)
            record, stands = self._adopt(
                place, resource, requested, 0 if delivered is None else delivered, delivery.policy
            )
            if record is None:
                return None, None
            known = self._journal.get(place, resource)
            if stands and known is not None and known.inode == record.inode:
                # Written by the runtime, but ours: what stood there before us stays the original,
                # unless kubelet asked for something new and not just for what we had written.
                asked = record.requested
                if asked is not None and (delivery.requested_now or not self.echoes(known, asked)):
                    known = msgspec.structs.replace(known, original=None, requested=asked)
                elif known.original in record.ours:
                    # Judged before the note of the delivery came: it was never anybody else's.
                    known = msgspec.structs.replace(
                        known, original=record.original, requested=asked
                    )
                record = known.with_ours(*record.ours)
            earlier = [value for one in delivery.earlier if (value := _canonical(one)) is not None]
            handed = self.runtime_values_of(delivery.container_id, record, earlier)
            return record if stands else None, handed
        except ValueError as error:
            log.warning("container %s, %s: %s", delivery.container_id, resource, error)
            return None, None
        except FileNotFoundError:
            return None, None  # the group has no such file: nothing was put there

    def _adopt(
        self, place: str, resource: Resource, requested: Value | None, delivered: Value, policy: str
    ) -> tuple[Record | None, bool]:
        """Return the record of a value that the runtime was handed, and whether it stands.

        Raises OSError when that cannot be told now.
        """
        file = FILES[resource]
        slot = self._texts.unmanaged(place, resource)
        wanted = self._texts.text_of(slot, delivered)
        if wanted is None:
            return None, False
        text = self._texts.standing(file, place)
        stands = self._texts.same(file, wanted, text)
        if not stands:
            other = self._texts.other_weight(file, delivered)
            stands = other is not None and self._texts.same(file, other, text)
        ours: tuple[str, ...] = (text,) if stands else (wanted,)
        slot.observe(text)
        if not stands and self.cut_down(slot, ours):
            stands, ours = True, (text, wanted)
        record = Record(
            place=place,
            inode=self._texts.inode(slot.directory),
            resource=resource,
            original=self._untouched(resource, place) if requested is None else None,
            requested=plain(requested),
            ours=ours,
            policy=policy,
        )
        return record, stands

    def runtime_values_of(
        self, container_id: str, record: Record, earlier: Sequence[Value] = ()
    ) -> RuntimeValues | None:
        """Return what the runtime was handed, by its record; None if kubelet asked for just that.

        The newest text of `record` is what was handed now; what was handed before, `earlier` or
        on record, may still be what the runtime knows.
        """
        slot = self._texts.unmanaged(record.place, record.resource)
        file = FILES[record.resource]
        before = self._journal.runtime_values(record.place, record.resource)
        texts = list(before.texts) if before is not None and before.inode == record.inode else []
        texts += [one for value in earlier if (one := self._texts.text_of(slot, value)) is not None]
        text = record.ours[-1]
        if not texts and self._texts.same(file, text, self.text(slot, record)):
            return None
        return RuntimeValues(
            container_id=container_id,
            place=record.place,
            inode=record.inode,
            resource=record.resource,
            texts=tuple([*(one for one in texts if one != text), text][-_KEPT_RUNTIME_VALUES:]),
            original=record.original,
            requested=record.requested,
            policy=record.policy,
        )

    def echoes(self, record: Record, asked: int | str) -> bool:
        """Tell whether a request is a value of ours that the runtime tells back."""
        slot = self._texts.unmanaged(record.place, record.resource)
        file = FILES[record.resource]
        value = CpuSet.parse(asked) if isinstance(asked, str) else asked
        text = self._texts.text_of(slot, value)
        return text is not None and any(self._texts.same(file, ours, text) for ours in record.ours)


def of_container(slot: Slot) -> bool:
    """Tell whether something is wanted there for a container: its files are the runtime's."""
    return slot.subject.startswith("container/")


def _canonical(kept: int | str | None) -> Value | None:
    return CpuSet.parse(kept) if isinstance(kept, str) else kept
