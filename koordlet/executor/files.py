"""Plans the writes to cgroup files under the kernel's rules, in order. Reads only.

There are three kinds of rules: values that are ordered along the cgroup tree (see `tree`); the
burst, which mainline keeps at or below the quota of the same group; and the weight, which
`cpu.idle` fixes while it is 1 and which the kernel resets when idle ends.

Facts: docs/facts/kernel.md, "Cgroup files" and "What a write does".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from apis.cpuset import CpuSet
from koordlet.executor.journal import Journal
from koordlet.executor.order import ancestors
from koordlet.executor.originals import Originals
from koordlet.executor.records import Record
from koordlet.executor.slots import Act, Plan, PlannedWrite, Slot, SlotKey
from koordlet.executor.texts import Texts
from koordlet.executor.tree import TreePlanner
from linux.cgroup_files import FILES, Codec, Levels, in_range, number
from linux.cgroup_paths import is_below
from linux.resources import UNLIMITED, Resource

_QUOTA: Final = Resource.CPU_CFS_QUOTA
_IDLE_WEIGHTS: Final[Mapping[int, tuple[str, str]]] = {1: ("3", "1024"), 2: ("0", "100")}
"""By cgroup version: what the weight reads while cpu.idle is 1, and what the kernel sets it to when
idle ends (kernel: sched_group_set_idle)."""


@dataclass(slots=True)
class Sequence3:
    """Planned writes in three parts: before the writes along the tree, these, and after them."""

    before: list[PlannedWrite] = field(default_factory=list)
    middle: list[PlannedWrite] = field(default_factory=list)
    after: list[PlannedWrite] = field(default_factory=list)

    def in_order(self) -> list[PlannedWrite]:
        return [*self.before, *self.middle, *self.after]


class FilePlanner:
    """See the module."""

    def __init__(
        self, texts: Texts, originals: Originals, journal: Journal, *, burst_above_quota: bool
    ) -> None:
        self._texts = texts
        self._originals = originals
        self._journal = journal
        self._along_the_tree = TreePlanner(texts, originals)
        self.burst_above_quota = burst_above_quota

    def wish(self, slot: Slot) -> None:
        """Set the slot's desired text.

        Raises ValueError when the value has no text, OSError when a file that it depends on cannot
        be read.
        """
        assert slot.file is not None
        slot.aim(None)
        if slot.resource in (Resource.CPU_CFS_QUOTA, Resource.CPU_CFS_BURST):
            slot.count_by(self._texts.period(slot))
        if slot.want is None:
            assert slot.restoring is not None
            text = self._originals.text(slot, slot.restoring)
            if not text and slot.file.codec is Codec.CPUS and self._texts.populated(slot):
                # The kernel refuses an empty set for a group with tasks. The closest is all CPUs.
                text = self._texts.everything(slot)
            number(slot.file, text)  # raises ValueError: the journal may be damaged
            slot.aim(text)
            return
        value, note = in_range(slot.file, slot.want.value)
        if isinstance(value, CpuSet) and self._texts.layout.version == 2:
            # On v1 the root group bounds the value. v2 refuses a list with a CPU that cannot exist.
            there = CpuSet.parse(self._texts.everything(slot))
            if value & there and not value <= there:
                note = f"this machine has no {value - there}"
                value = value & there
        slot.aim(self._texts.encode(slot, value), note=note)

    def plan(
        self, dirty: Sequence[Slot], slots: Mapping[SlotKey, Slot], plan: Plan, now: float
    ) -> list[PlannedWrite]:
        """Return the ordered writes for `dirty`, whose desired texts are set.

        slots: all slots, for the values around the dirty ones.
        """
        writes = Sequence3()
        version = self._texts.layout.version
        trees: dict[Resource, list[Slot]] = {}
        bursts: dict[str, None] = {}
        plain_ones: list[Slot] = []
        for slot in dirty:
            assert slot.file is not None
            if slot.resource in (_QUOTA, Resource.CPU_CFS_BURST):
                bursts[slot.place] = None
            if slot.file.levels(version) is not Levels.FREE:
                trees.setdefault(slot.resource, []).append(slot)
            elif slot.resource is not Resource.CPU_CFS_BURST:
                plain_ones.append(slot)
        for resource, of in trees.items():
            self._along_the_tree.plan(resource, of, slots, plan, writes.middle, now)
        # A parent's quota may change the quotas of groups that are not dirty themselves.
        bursts |= {place: None for place, resource, _ in plan.planned if resource is _QUOTA}
        for place in bursts:
            self._burst(place, slots, plan, writes, now)
        # Idle before weights: whether a weight can be written depends on it.
        for slot in sorted(plain_ones, key=lambda slot: slot.resource is not Resource.CPU_IDLE):
            self._plain(slot, slots, plan, writes)
        return writes.in_order()

    def enable_controllers(self, lacking: Sequence[Slot]) -> list[PlannedWrite]:
        """Return the writes that enable a missing controller for groups below kubepods.

        On v2 a group has a controller's files only if every group above enables the controller in
        `cgroup.subtree_control`; kubelet and runtimes do so as a rule. It stays enabled afterwards:
        by itself it changes no value.
        """
        root = self._texts.layout.kubepods
        if self._texts.layout.version == 1 or not root:
            return []
        writes: dict[tuple[str, str], PlannedWrite] = {}
        for slot in lacking:
            if slot.want is None or not slot.controller or not slot.place.startswith(f"{root}/"):
                continue
            chain = [one for one in ancestors(slot.place) if is_below(one, root)]
            for above in reversed(chain):
                directory = self._texts.layout.directory("", above)
                if not self._texts.lists(f"{directory}/cgroup.controllers", slot.controller):
                    if above == root:
                        break  # not ours to enable: the pods' root itself lacks it
                elif self._texts.lists(f"{directory}/cgroup.subtree_control", slot.controller):
                    continue
                new = f"+{slot.controller}"
                writes.setdefault(
                    (directory, new),
                    PlannedWrite(
                        act=Act.WRITE,
                        path=f"{directory}/cgroup.subtree_control",
                        slot=slot.slot_key,
                        subject=slot.subject,
                        old="",
                        new=new,
                        why=f"{slot.why} (its groups lack the controller)",
                        data=new.encode(),
                        final=False,
                    ),
                )
        return list(writes.values())

    # -- the burst, which the quota bounds -------------------------------------------------------

    def _burst(
        self,
        place: str,
        slots: Mapping[SlotKey, Slot],
        plan: Plan,
        writes: Sequence3,
        now: float,
    ) -> None:
        """Keep the burst at or below the quota: lower it before quotas change, raise it after."""
        burst = slots.get((place, Resource.CPU_CFS_BURST, ""))
        bounded = not self.burst_above_quota
        if burst is None and not (bounded and (place, _QUOTA, "") in plan.planned):
            return
        quota_us = self._final_quota(place, slots, plan)
        if burst is None:
            if quota_us != UNLIMITED:
                self._lower_foreign_burst(place, quota_us, slots, plan, writes.before)
            return
        if burst.found is None or burst.text is None or burst.retry_at > now:
            return
        wanted, found = int(burst.text), int(burst.found)
        clamp = ""
        if bounded and quota_us == UNLIMITED and burst.want is not None and wanted:
            # It would have no effect, and the kernel would refuse the next quota of kubelet's.
            wanted, clamp = 0, "without a quota there is nothing to burst above"
        elif bounded and quota_us != UNLIMITED and wanted > quota_us:
            wanted, clamp = quota_us, f"kept at the quota of {quota_us} µs"
        burst.clamp_to(clamp)
        if wanted != found:
            self._originals.keep(burst, plan, str(wanted))
            plan.add(
                self._texts.write(burst, str(wanted)),
                writes.before if wanted < found else writes.after,
            )

    def _lower_foreign_burst(
        self,
        place: str,
        quota_us: int,
        slots: Mapping[SlotKey, Slot],
        plan: Plan,
        out: list[PlannedWrite],
    ) -> None:
        """Lower a burst that is not managed and above the new quota, which it would block."""
        file = FILES[Resource.CPU_CFS_BURST]
        text = self._texts.read(file, place)
        if text is None or int(text) <= quota_us:
            return
        quota = slots[place, Resource.CPU_CFS_QUOTA, ""]
        new = str(quota_us)
        self._originals.support(
            place, Resource.CPU_CFS_BURST, Resource.CPU_CFS_QUOTA, text, plan, new
        )
        path = (
            f"{self._texts.layout.directory('cpu', place)}/{file.name(self._texts.layout.version)}"
        )
        out.append(
            PlannedWrite(
                act=Act.WRITE,
                path=path,
                slot=(place, Resource.CPU_CFS_BURST, ""),
                subject=quota.subject,
                old=text,
                new=new,
                why=f"{quota.why} (the burst must not exceed the quota)",
                data=new.encode(),
            )
        )

    def _final_quota(self, place: str, slots: Mapping[SlotKey, Slot], plan: Plan) -> int:
        """Return the quota of `place` after the writes planned so far, in µs of its own period."""
        key = (place, Resource.CPU_CFS_QUOTA, "")
        text = plan.planned.get(key)
        if text is None and (slot := slots.get(key)) is not None:
            text = slot.found
        if text is None:
            text = self._texts.read(FILES[Resource.CPU_CFS_QUOTA], place)
        value = UNLIMITED if text is None else number(FILES[Resource.CPU_CFS_QUOTA], text)
        assert isinstance(value, int)
        return value

    # -- independent values, idle and weight -----------------------------------------------------

    def _plain(
        self, slot: Slot, slots: Mapping[SlotKey, Slot], plan: Plan, writes: Sequence3
    ) -> None:
        assert slot.file is not None
        if (
            slot.text is None
            or slot.found is None
            or self._texts.same(slot.file, slot.text, slot.found)
        ):
            return
        out = writes.middle
        if slot.resource is Resource.CPU_IDLE:
            out = writes.after if slot.text == "1" else writes.before
            if slot.text == "1" and not self._keep_weight(slot, slots, plan):
                slot.block("the weight, which idle takes away, cannot be read")
                return
        elif slot.resource is Resource.CPU_SHARES and self._idle_fixes_weight(slot, slots, plan):
            slot.block("cpu.idle is 1, which fixes the weight")
            return
        self._originals.keep(slot, plan, slot.text)
        plan.add(self._texts.write(slot, slot.text), out)

    def _idle_fixes_weight(self, slot: Slot, slots: Mapping[SlotKey, Slot], plan: Plan) -> bool:
        key = (slot.place, Resource.CPU_IDLE, "")
        text = plan.planned.get(key)
        if text is not None:
            # Idle ends before the weight is written; where it begins, the weight is written before.
            return False
        idle = slots.get(key)
        if idle is not None and idle.found is not None:
            return idle.found == "1"
        return self._texts.read(FILES[Resource.CPU_IDLE], slot.place) == "1"

    def left_for_idle(self, slot: Slot, slots: Mapping[SlotKey, Slot]) -> Record | None:
        """Return the record to keep for a restored weight while idle is still desired.

        The kernel resets the weight when idle ends, and it has to be restored again then.
        """
        if slot.resource is not Resource.CPU_SHARES:
            return None
        idle = slots.get((slot.place, Resource.CPU_IDLE, ""))
        record = self._journal.get(*slot.slot_key)
        if idle is None or record is None or (idle.want is None and idle.found != "1"):
            return None
        # The observed weight is the original or another writer's; under idle it means nothing.
        stands = slot.found if idle.found != "1" else None
        return Record(
            place=slot.place,
            inode=record.inode,
            resource=slot.resource,
            original=stands or self._originals.text(slot, record),
            support_of=Resource.CPU_IDLE.value,
            ours=_IDLE_WEIGHTS[self._texts.layout.version],
        )

    def _keep_weight(self, idle: Slot, slots: Mapping[SlotKey, Slot], plan: Plan) -> bool:
        """Journal the weight before idle begins: the kernel resets it when idle ends.

        Returns whether the journal has it now.
        """
        marks = _IDLE_WEIGHTS[self._texts.layout.version]
        weight = slots.get((idle.place, Resource.CPU_SHARES, ""))
        if weight is not None and weight.found is not None:
            self._originals.keep(weight, plan, *marks)
            return True
        text = self._texts.read(FILES[Resource.CPU_SHARES], idle.place)
        if text is None:
            return False
        self._originals.support(
            idle.place, Resource.CPU_SHARES, Resource.CPU_IDLE, text, plan, *marks
        )
        return True
