"""The originals of values, from the journal and from what was delivered to the runtime.

The file of a delivered value never showed the original: the delivery records it instead. The
runtime may write a delivered value again for as long as the container lives.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from apis.cpuset import CpuSet
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.records import KEPT_OURS, Delivery, Record, RuntimeValues, plain
from koordlet.executor.slots import GONE, Plan, Slot, SlotKey
from koordlet.executor.texts import Texts
from linux.cgroup_files import DEFAULTS, FILES, CgroupFile, Codec
from linux.cgroup_paths import PathError, parent_of, parse
from linux.resources import Resource, Value

log = logging.getLogger(__name__)

_KEPT_RUNTIME_VALUES: Final = KEPT_OURS
"""A runtime holds the last value that it took; the older ones cover replies that it refused."""

OfProcesses = Callable[[Delivery, str], Record | None]
"""Makes the record of a delivery that belongs to processes and not to a file: `tasks.adopted`."""


class Originals:
    """See the module."""

    def __init__(self, texts: Texts, journal: Journal) -> None:
        self._texts = texts
        self._journal = journal

    def record_of(self, slot: Slot, plan: Plan) -> Record | None:
        """Return the slot's record if it belongs to the group that exists now.

        A value that the runtime may write counts as ours, even where the journal has no record.
        """
        record = plan.records.get(slot.slot_key) or self._journal.get(*slot.slot_key)
        values = self._journal.runtime_values(slot.place, slot.resource)
        if record is None and values is None:
            return None
        inode = self._texts.inode(slot.directory)
        if record is not None and record.inode not in (0, inode):
            record = None
        if values is None or values.inode != inode or slot.file is None or slot.found is None:
            return record
        for text in values.texts:
            if self._texts.same(slot.file, text, slot.found) or self.cut_down(slot, [text]):
                return (record or values.as_record()).with_ours(text)
        return record

    def keep(self, slot: Slot, plan: Plan, *texts: str) -> None:
        """Plan to journal the original, and `texts` as ours, before they are written."""
        record = self.record_of(slot, plan)
        if record is None:
            inherited = self.inherited(slot, plan)
            record = Record(
                place=slot.place,
                inode=self._texts.inode(slot.directory),
                resource=slot.resource,
                key=slot.key,
                original=inherited or slot.found,
                # The groups below may have inherited it as well.
                ours=(slot.found,) if inherited and slot.found is not None else (),
            )
            record = self.as_requested(slot, record)
        if slot.want is not None:
            policy = slot.want.claim.policy
            record = msgspec.structs.replace(record, policy=policy, support_of="")
        plan.keep(record.with_ours(*self._standing(slot.file, record, slot.found), *texts))

    def _standing(self, file: CgroupFile | None, record: Record, found: str | None) -> list[str]:
        """Return the value of ours that the kernel shows, for the record to keep.

        A value that changes every second is planned many times while its write is held back or
        refused; the record must not forget the one that is in force meanwhile.
        """
        if file is None or found is None:
            return []
        return [one for one in record.ours if self._texts.same(file, one, found)]

    def as_requested(self, slot: Slot, record: Record) -> Record:
        """Return a container's record with what kubelet requests now as its original.

        A runtime writes only what kubelet requests, so another value in a container's file is not
        the original. The record stays as it is where it has the same original, where kubelet
        requests nothing, and where the request equals a value of ours: a runtime may report a
        delivered value back as the request.
        """
        want = slot.want
        if want is None or want.requested is None or slot.file is None or not of_container(slot):
            return record
        texts = [self._texts.text_of(slot, want.requested)]
        texts.append(self._texts.other_weight(slot.file, want.requested))
        requested = [text for text in texts if text is not None]
        known = () if record.original is None else (record.original,)
        if (
            not requested
            or record.requested == plain(want.requested)
            or any(
                self._texts.same(slot.file, a, b) for a in requested for b in (*known, *record.ours)
            )
            or (record.original == slot.found and self.cut_down(slot, requested))
        ):
            return record
        return msgspec.structs.replace(record, original=None, requested=plain(want.requested))

    def inherited(self, slot: Slot, plan: Plan) -> str | None:
        """Return what a new group would have inherited from its parent without koordlet.

        On Alibaba's kernel a new group inherits its parent's identity, and on cgroup v1 runtimes
        and kubelet copy the parent's CPU set to it, so a value that was there before our first
        write may be ours. None: this value is not.
        """
        copied = slot.resource is Resource.CPU_BVT or (
            slot.resource is Resource.CPUSET_CPUS and self._texts.layout.version == 1
        )
        if not copied or slot.found is None:
            return None
        above = (parent_of(slot.place), slot.resource, "")
        record = plan.records.get(above) or self._journal.get(*above)
        if record is None or record.original is None:
            return None
        file = FILES[slot.resource]
        ours = any(self._texts.same(file, text, slot.found) for text in record.ours)
        return record.original if ours else None

    def copies_below(self, record: Record, known: Callable[[SlotKey], bool]) -> list[Record]:
        """Return records of the groups that copied a CPU set of ours from a directory above.

        On cgroup v1 kubelet and runtimes do so for each new group. A group that was made while
        koordlet did not run has no record of its own, and would keep the set for good.
        record: of a directory that is about to be restored. known: whether a group has a desired
        value, or is being restored.
        """
        if record.resource is not Resource.CPUSET_CPUS or self._texts.layout.version != 1:
            return []
        file = FILES[record.resource]
        found: list[Record] = []
        level = [record.place]
        while level:
            places = [
                f"{place}/{name}"
                for place in level
                for name in self._texts.children(
                    self._texts.layout.directory(file.controller, place)
                )
            ]
            for place in places:
                key = (place, record.resource, "")
                text = (
                    None if known(key) or self._journal.get(*key) else self._texts.read(file, place)
                )
                if (
                    text is None
                    or record.original is None
                    or self._texts.same(file, record.original, text)
                    or not any(self._texts.same(file, ours, text) for ours in record.ours)
                ):
                    continue
                directory = self._texts.layout.directory(file.controller, place)
                found.append(
                    msgspec.structs.replace(
                        record, place=place, inode=self._texts.inode(directory), ours=(text,)
                    )
                )
            level = places
        return found

    def support(
        self, place: str, resource: Resource, of: Resource, found: str, plan: Plan, *texts: str
    ) -> None:
        """Plan to journal a value that is not claimed but has to change for another resource."""
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
            # Another program has written it since, while the other resource did not need it.
            record = msgspec.structs.replace(record, original=found, requested=None)
        plan.keep(record.with_ours(*self._standing(file, record, found), *texts))

    def cut_down(self, slot: Slot, texts: Collection[str]) -> bool:
        """Return whether the observed CPU set is what the kernel left of one of `texts`.

        v1 removes a CPU that goes offline from every group's set, and never adds it again.
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
        """Return the original as the file's text. Raises OSError and ValueError."""
        if record.original is not None:
            return record.original
        requested = record.requested_value()
        if isinstance(requested, int | CpuSet):
            return self._texts.encode(slot, requested)
        return self._untouched(slot.resource, slot.place)

    def _untouched(self, resource: Resource, place: str) -> str:
        """Return the value of a group for which kubelet requested nothing.

        Raises OSError when it cannot be read, ValueError when it is not known.
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
            raise ValueError(f"the original of {resource} is not known")
        return DEFAULTS[resource][self._texts.layout.version - 1]

    # -- delivered values ------------------------------------------------------------------------

    def adopt_deliveries(
        self, container_id: str, place: str, of_processes: OfProcesses
    ) -> Collection[Resource]:
        """Journal the values that were delivered for a container, now that its group exists.

        Returns the resources whose files cannot be read now; the next pass tries again.
        """
        deliveries = self._journal.deliveries(container_id)
        if not deliveries or not place:
            return ()
        file = FILES[Resource.CPU_SHARES]
        if not self._texts.layout.has(file.controller) or not self._texts.inode(
            self._texts.layout.directory(file.controller, place)
        ):
            return ()
        adopted: list[tuple[Record | None, RuntimeValues | None]] = []
        waiting: list[Resource] = []
        for delivery in deliveries.values():
            try:
                one = self._adopted(delivery, place, of_processes)
            except OSError as error:
                # A container that ends between two system calls is not news.
                level = logging.DEBUG if error.errno in GONE else logging.WARNING
                log.log(level, "container %s, %s: %s", container_id, delivery.resource, error)
                waiting.append(delivery.resource)
                continue
            adopted.append(one)
        # If the disk is full, the records stay in memory and go to the file with the next append.
        # The pass reports the failure.
        with contextlib.suppress(JournalError):
            self._journal.update(
                [record for record, _ in adopted if record is not None],
                runtime_values=[values for _, values in adopted if values is not None],
            )
            if not waiting:
                self._journal.forget_deliveries(container_id)
        return waiting

    def places_of(self, container_ids: Collection[str]) -> dict[str, str]:
        """Return the groups of these containers, found by their names below the pods' root.

        For callers that know containers only from the journal. Walks the whole tree of the pods.
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
        """Return the record and the runtime's values that follow from a delivery.

        No record if the delivered value is not in the file: the runtime may be about to write it,
        and systemd may do so at any time.
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
                # The runtime wrote it, but it is ours: the known original stays, unless kubelet
                # requested something new and not just the value that we had written.
                request = record.requested
                if request is not None and (
                    delivery.requested_now or not self.echoes(known, request)
                ):
                    known = msgspec.structs.replace(known, original=None, requested=request)
                elif known.original in record.ours:
                    # It was judged before the delivery was noted: the value was ours all the time.
                    known = msgspec.structs.replace(
                        known, original=record.original, requested=request
                    )
                record = known.with_ours(*record.ours)
            earlier = [value for one in delivery.earlier if (value := _canonical(one)) is not None]
            values = self.runtime_values_of(delivery.container_id, record, earlier)
            return record if stands else None, values
        except ValueError as error:
            log.warning("container %s, %s: %s", delivery.container_id, resource, error)
            return None, None
        except FileNotFoundError:
            return None, None  # the group has no such file, so nothing was written there

    def _adopt(
        self, place: str, resource: Resource, requested: Value | None, delivered: Value, policy: str
    ) -> tuple[Record | None, bool]:
        """Return the record of a delivered value, and whether the file holds the value.

        Raises OSError when the file cannot be read now.
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
        """Return the values that the runtime may write; None if only what kubelet requested.

        The newest text of `record` was delivered last. Former deliveries, in `earlier` or in the
        journal, count too: the runtime may not have taken the last one.
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

    def echoes(self, record: Record, requested: int | str) -> bool:
        """Return whether a request is a value of ours that the runtime reports back."""
        slot = self._texts.unmanaged(record.place, record.resource)
        file = FILES[record.resource]
        value = CpuSet.parse(requested) if isinstance(requested, str) else requested
        text = self._texts.text_of(slot, value)
        return text is not None and any(self._texts.same(file, ours, text) for ours in record.ours)


def of_container(slot: Slot) -> bool:
    """Return whether the slot is a container's, whose files the runtime writes too."""
    return slot.subject.startswith("container/")


def _canonical(kept: int | str | None) -> Value | None:
    return CpuSet.parse(kept) if isinstance(kept, str) else kept
