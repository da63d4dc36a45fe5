"""Planning for cgroup files: what to write where, under the kernel's rules, in which order.

Reads only. Three kinds of rules meet here: values that are ordered along the tree (quota, cpuset,
memory; see `order`), the burst, which mainline keeps at or below the quota of the same
group, and the weight, which `cpu.idle` fixes while it is 1 and the kernel resets when idle ends.
Facts: linux-interfaces.md sections 5 and 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from koordlet.executor.order import TOP, Lattice, Node, Order, ancestors, order
from koordlet.executor.slots import Act, Plan, PlannedWrite, Slot, SlotKey, Want
from koordlet.journal import Handed, Journal, Record, plain
from linux.cgroup_files import (
    DEFAULT_PERIOD_US,
    DEFAULTS,
    FILES,
    CgroupFile,
    Codec,
    Levels,
    Number,
    content,
    encode,
    field_text,
    in_range,
    number,
    same,
)
from linux.cgroup_paths import Layout, is_below, parent_of
from linux.cpuset import CpuSet
from linux.host import Host
from linux.resources import UNLIMITED, Resource, Value
from linux.weights import Formula, detect

_QUOTA: Final = Resource.CPU_CFS_QUOTA
_RATIO_SHIFT: Final = 20
"""The kernel compares bandwidths as (quota << 20) / period."""
_IDLE_WEIGHTS: Final[Mapping[int, tuple[str, str]]] = {1: ("3", "1024"), 2: ("0", "100")}
"""What the weight reads while cpu.idle is 1, and what the kernel makes it when idle ends."""
_UNLIMITED_BYTES: Final = (1 << 63) - (1 << 16)
"""Below what an unlimited v1 counter reads for any page size up to 64 KiB: nobody has that much."""
_KEPT_VOTES: Final = 4096
_KEPT_HANDED: Final = 6
_UNIT_SUFFIXES: Final = (".slice", ".scope", ".service", ".mount", ".socket", ".swap")
_PLAIN_FILES: Final = frozenset({"tasks", "notify_on_release", "release_agent"})


@dataclass(slots=True)
class Sequence3:
    """Planned writes in three stretches: before values along the tree move, those, and after."""

    before: list[PlannedWrite] = field(default_factory=list)
    middle: list[PlannedWrite] = field(default_factory=list)
    after: list[PlannedWrite] = field(default_factory=list)

    def in_order(self) -> list[PlannedWrite]:
        return [*self.before, *self.middle, *self.after]


@dataclass(frozen=True, slots=True)
class _WithSwap:
    """A write of the limit of memory and swap together: before the memory limit if it raises."""

    write: PlannedWrite
    raises: bool


class FilePlanner:
    """Plans writes of cgroup files. Keeps no state but what it learned about weights."""

    def __init__(
        self,
        host: Host,
        layout: Layout,
        journal: Journal,
        *,
        page_size_bytes: int,
        burst_above_quota: bool,
    ) -> None:
        self._host = host
        self.layout = layout
        self._journal = journal
        self._page_size_bytes = page_size_bytes
        self.burst_above_quota = burst_above_quota
        self._votes: dict[str, Counter[Formula]] = {}

    def same(self, file: CgroupFile, wanted: str, found: str) -> bool:
        return same(file, wanted, found, page_size_bytes=self._page_size_bytes)

    # -- the journal's view ----------------------------------------------------------------------

    def record_of(self, slot: Slot, plan: Plan) -> Record | None:
        """Return the slot's record if it is about this incarnation of the group.

        What the runtime was handed counts as ours wherever it stands, on record or not.
        """
        record = plan.records.get(slot.slot_key) or self._journal.get(*slot.slot_key)
        handed = self._journal.handed(slot.place, slot.resource)
        if record is None and handed is None:
            return None
        inode = self._inode(slot.directory)
        if record is not None and record.inode not in (0, inode):
            record = None
        if handed is None or handed.inode != inode or slot.file is None or slot.found is None:
            return record
        for text in handed.texts:
            if self.same(slot.file, text, slot.found):
                return (record or handed.as_record()).with_ours(text)
        return record

    def _inode(self, directory: str) -> int:
        try:
            return self._host.inode(directory)
        except OSError:
            return 0

    def journal_slot(self, slot: Slot, plan: Plan, *texts: str) -> None:
        """Have the journal know the original and that `texts` are ours, before they are written."""
        record = self.record_of(slot, plan)
        if record is None:
            record = Record(
                place=slot.place,
                inode=self._inode(slot.directory),
                resource=slot.resource,
                key=slot.key,
                original=self.handed_down(slot, plan) or slot.found,
            )
        if slot.want is not None:
            record = _replace(record, policy=slot.want.claim.policy, support_of="")
        plan.keep(record.with_ours(*texts))

    def handed_down(self, slot: Slot, plan: Plan) -> str | None:
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
        ours = any(self.same(file, text, slot.found) for text in record.ours)
        return record.original if ours else None

    def _support(
        self, place: str, resource: Resource, of: Resource, found: str, plan: Plan, *texts: str
    ) -> None:
        """Journal a resource that nobody wants here but that must move for another's sake."""
        file = FILES[resource]
        directory = self.layout.directory(file.controller, place)
        record = plan.records.get((place, resource, "")) or self._journal.get(place, resource)
        inode = self._inode(directory)
        if record is None or record.inode != inode:
            record = Record(
                place=place, inode=inode, resource=resource, original=found, support_of=of.value
            )
        elif not any(
            text is not None and self.same(file, text, found)
            for text in (record.original, *record.ours)
        ):
            # Written by somebody else since, while the cause did not stand.
            record = msgspec.structs.replace(record, original=found, asked=None)
        plan.keep(record.with_ours(*texts))

    # -- wishes as text --------------------------------------------------------------------------

    def wish(self, slot: Slot) -> None:
        """Work out the wish as the file's text.

        Raises ValueError when it cannot be one, OSError when what it depends on cannot be read.
        """
        assert slot.file is not None
        slot.clamp = slot.note = slot.blocked_by = ""
        slot.text = None
        if slot.resource in (Resource.CPU_CFS_QUOTA, Resource.CPU_CFS_BURST):
            slot.period_us = self._period(slot)
        if slot.want is None:
            assert slot.restoring is not None
            slot.text = self._original_text(slot, slot.restoring)
            if not slot.text and slot.file.codec is Codec.CPUS and self._populated(slot):
                # The kernel takes no empty set from a group with tasks: all there is comes closest.
                slot.text = self._everything(slot)
            number(slot.file, slot.text)  # a journal can be damaged as well
            return
        value, slot.note = in_range(slot.file, slot.want.value)
        if isinstance(value, CpuSet) and self.layout.version == 2:
            # v1's root group bounds a wish; v2 would refuse all of it for one that does not exist.
            online = CpuSet.parse(self._everything(slot))
            if value & online and not value <= online:
                slot.note = f"{value - online} is not there"
                value = value & online
        slot.text = self._encode(slot, value)

    def _populated(self, slot: Slot) -> bool:
        if self.layout.version == 1:
            return False
        try:
            return b"populated 1" in self._host.read(f"{slot.directory}/cgroup.events")
        except OSError:
            return True  # not known: the careful answer

    def _everything(self, slot: Slot) -> str:
        """Return the CPUs (or NUMA nodes) of the machine: what the root group has."""
        assert slot.file is not None
        root = self.layout.hierarchy(slot.file.controller)
        raw = self._host.read(f"{root}/{slot.file.v2}.effective")
        return raw.decode("ascii", "replace").strip()

    def requested_text(self, slot: Slot, value: Value) -> str | None:
        """Return what kubelet asked for as the file's text; None if it cannot be."""
        assert slot.file is not None
        try:
            return self._encode(slot, in_range(slot.file, value)[0])
        except ValueError:
            return None

    def _original_text(self, slot: Slot, record: Record) -> str:
        if record.original is not None:
            return record.original
        asked = record.asked_value()
        if isinstance(asked, int | CpuSet):
            return self._encode(slot, asked)
        return self._untouched(slot.resource, slot.place)

    def _untouched(self, resource: Resource, place: str) -> str:
        """Return what a group has whose runtime was asked for nothing.

        Raises OSError when that cannot be read, ValueError when nobody knows.
        """
        if resource in (Resource.CPUSET_CPUS, Resource.CPUSET_MEMS):
            # A runtime leaves v2's empty set as it is, and copies the parent's on v1.
            above = parent_of(place)
            return "" if self.layout.version == 2 else self._standing(FILES[resource], above)
        if resource not in DEFAULTS:
            raise ValueError(f"what {resource} was before is not known")
        return DEFAULTS[resource][self.layout.version - 1]

    def _encode(self, slot: Slot, value: Number) -> str:
        assert slot.file is not None
        return encode(
            slot.file,
            self.layout.version,
            value,
            formula=self._formula(slot),
            period_us=slot.period_us,
        )

    def _period(self, slot: Slot) -> int:
        name = "cpu.cfs_period_us" if self.layout.version == 1 else "cpu.max"
        try:
            raw = self._host.read(f"{slot.directory}/{name}")
            return int(field_text(FILES[Resource.CPU_CFS_PERIOD], self.layout.version, raw))
        except (OSError, ValueError):
            return DEFAULT_PERIOD_US

    def learn(self, slot: Slot, evidence: Collection[Formula] = frozenset(Formula)) -> None:
        """Learn the weight formula of this level from a weight; only `evidence` counts."""
        want, found = slot.want, slot.found
        if slot.resource is not Resource.CPU_SHARES or self.layout.version != 2:
            return
        if want is None or found is None or want.requested is None:
            return
        # The runtime converted what kubelet asked for, or what our reply put in its place.
        for known in (want.requested, want.value):
            formula = detect([(known, int(found))]) if isinstance(known, int) else None
            if formula is not None and formula in evidence:
                if len(self._votes) > _KEPT_VOTES:
                    # Pods come and go; what their level uses is known by now.
                    self._votes = {
                        level: votes
                        for level, votes in self._votes.items()
                        if level.startswith("level:")
                    }
                for level in (parent_of(slot.place), _level(want)):
                    self._votes.setdefault(level, Counter())[formula] += 1
                return

    def _formula(self, slot: Slot) -> Formula:
        """Return the formula that the slot's siblings use, else its level's, else the old one."""
        if slot.resource is Resource.CPU_SHARES and self.layout.version == 2:
            for level in (parent_of(slot.place), _level(slot.want)):
                votes = self._votes.get(level)
                if votes:
                    return votes.most_common(1)[0][0]
        return Formula.LINEAR

    # -- the plan --------------------------------------------------------------------------------

    def plan(
        self, dirty: Sequence[Slot], slots: Mapping[SlotKey, Slot], plan: Plan, now: float
    ) -> list[PlannedWrite]:
        """Return the ordered writes for `dirty`, whose wishes are worked out.

        slots: all slots, for what stands around the dirty ones.
        """
        writes = Sequence3()
        version = self.layout.version
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
            self._tree(resource, of, slots, plan, writes.middle, now)
        # A parent's quota may move those of groups that are not dirty themselves.
        bursts |= {place: None for place, resource, _ in plan.planned if resource is _QUOTA}
        for place in bursts:
            self._burst(place, slots, plan, writes, now)
        # Idle before weights: whether a weight can be written depends on it.
        for slot in sorted(plain_ones, key=lambda slot: slot.resource is not Resource.CPU_IDLE):
            self._plain(slot, slots, plan, writes)
        return writes.in_order()

    def _write(self, slot: Slot, text: str, *, final: bool = True) -> PlannedWrite:
        assert slot.file is not None
        why = slot.why if final else f"{slot.why} (a step: old and new together)"
        current = (slot.settled or b"") if slot.file.codec is Codec.PERIOD else b""
        return PlannedWrite(
            act=Act.WRITE,
            path=slot.path,
            slot=slot.slot_key,
            subject=slot.subject,
            old=slot.found or "",
            new=text,
            why=why,
            data=content(slot.file, self.layout.version, text, current),
            final=final,
        )

    def hand_down(self, lacking: Sequence[Slot]) -> list[PlannedWrite]:
        """Return the writes that give groups below kubepods a controller that stops above them.

        On v2 a file exists only where every group above hands its controller down; kubelet and
        runtimes do so as a rule. It stays handed down: by itself it changes no value.
        """
        root = self.layout.kubepods
        if self.layout.version == 1 or not root:
            return []
        writes: dict[tuple[str, str], PlannedWrite] = {}
        for slot in lacking:
            if slot.want is None or slot.file is None or not slot.place.startswith(f"{root}/"):
                continue
            chain = [one for one in ancestors(slot.place) if is_below(one, root)]
            for above in reversed(chain):
                directory = self.layout.directory("", above)
                if not self._lists(f"{directory}/cgroup.controllers", slot.file.controller):
                    if above == root:
                        break  # not ours to enable: the pods' root has not got it itself
                elif self._lists(f"{directory}/cgroup.subtree_control", slot.file.controller):
                    continue
                new = f"+{slot.file.controller}"
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

    def _lists(self, path: str, word: str) -> bool:
        try:
            return word.encode() in self._host.read(path).split()
        except OSError:
            return False

    # -- values along the tree -------------------------------------------------------------------

    def _tree(
        self,
        resource: Resource,
        dirty: Sequence[Slot],
        slots: Mapping[SlotKey, Slot],
        plan: Plan,
        out: list[PlannedWrite],
        now: float,
    ) -> None:
        file = FILES[resource]
        enforced = file.levels(self.layout.version) is Levels.ENFORCED
        of_place: dict[str, Slot] = {}
        nodes: dict[str, Node] = {}
        for slot in slots.values():
            if slot.resource is not resource or slot.found is None:
                continue
            found = self._element(file, slot.found, slot.period_us)
            wanted = None
            if slot.text is not None and slot.retry_at <= now:
                wanted = self._element(file, slot.text, slot.period_us)
            of_place[slot.place] = slot
            nodes[slot.place] = Node(found, wanted)
        if enforced:
            # What is dirty may move, and so may what an earlier plan had to keep from its wish.
            moving = {slot.place for slot in dirty} & nodes.keys()
            moving |= {
                place
                for place, node in nodes.items()
                if node.wanted is not None and node.wanted != node.found
            }
            for place in moving:
                self._add_neighbours(file, place, nodes)
        ordered = order(nodes, _lattice(file), enforced=enforced)
        self._note(ordered, of_place)
        texts: dict[str, list[str]] = {}
        for step in ordered.steps:
            slot = of_place[step.cgroup]
            text = self._text_of(file, slot, step.value)
            earlier = texts.setdefault(step.cgroup, [])
            if not earlier and slot.found is not None and self.same(file, text, slot.found):
                continue  # a page or a rounding apart: no difference to the kernel
            earlier.append(text)
            write = self._write(slot, text, final=step.final)
            with_swap = self._with_swap(slot, text) if resource is Resource.MEMORY_LIMIT else None
            if with_swap is not None and with_swap.raises:
                out.append(with_swap.write)
            plan.add(write, out)
            if with_swap is not None and not with_swap.raises:
                out.append(with_swap.write)
        for cgroup, written in texts.items():
            if written:
                self.journal_slot(of_place[cgroup], plan, *written)

    def _with_swap(self, slot: Slot, text: str) -> _WithSwap | None:
        """Move v1's limit of memory and swap together along with the memory limit, where needed.

        The kernel keeps the memory limit at or below it, and runtimes set both alike, so that a
        container gets no swap: a limit that grows would be refused, and one that shrinks would
        let swap in.
        """
        if self.layout.version != 1:
            return None
        path = f"{slot.directory}/memory.memsw.limit_in_bytes"
        try:
            old = int(self._host.read(path))
        except (OSError, ValueError):
            return None  # no swap accounting on this kernel
        wanted, found = _bytes(text), _bytes(slot.found or "")
        raises = old < wanted
        if not raises and not (old == found and wanted < found < _UNLIMITED_BYTES):
            return None
        write = PlannedWrite(
            act=Act.WRITE,
            path=path,
            slot=slot.slot_key,
            subject=slot.subject,
            old=str(old),
            new=text,
            why=f"{slot.why} (memory and swap together must not be less, and allow no swap)",
            data=text.encode(),
            final=False,
        )
        return _WithSwap(write, raises)

    @staticmethod
    def _note(ordered: Order, of_place: Mapping[str, Slot]) -> None:
        for cgroup in ordered.finals:
            of_place[cgroup].clamp = ordered.notes.get(cgroup, "")
        for cgroup, blocker in ordered.blocked.items():
            of_place[cgroup].blocked_by = f"{blocker} allows none of it"

    def _element(self, file: CgroupFile, text: str, period_us: int) -> int:
        """Return a field's text as a value that `order` compares."""
        value = number(file, text)
        if isinstance(value, CpuSet):
            # On v2 an empty set means whatever the parent has.
            return value.mask if value or self.layout.version == 1 else TOP
        if file.codec is Codec.QUOTA and value != UNLIMITED:
            return (value << _RATIO_SHIFT) // period_us
        return value

    def _text_of(self, file: CgroupFile, slot: Slot, value: int) -> str:
        """Return the text of a value that an order came to: the wish's or the old where equal."""
        for text in (slot.text, slot.found):
            if text is not None and self._element(file, text, slot.period_us) == value:
                return text
        if file.codec is Codec.CPUS:
            return str(CpuSet.of_mask(value)) if value != TOP else ""
        if file.codec is Codec.QUOTA and value != TOP:
            if slot.clamp.startswith("bounded"):
                return str(((value + 1) * slot.period_us - 1) >> _RATIO_SHIFT)
            return str(-(-value * slot.period_us >> _RATIO_SHIFT))
        return encode(file, self.layout.version, value)

    def _add_neighbours(self, file: CgroupFile, place: str, nodes: dict[str, Node]) -> None:
        """Add the unmanaged groups that bound `place` from above or that it must stay around."""
        for above in ancestors(place):
            if above not in nodes:
                found = self._read_element(file, above)
                if found is not None:
                    nodes[above] = Node(found)
        node = nodes[place]
        if node.wanted is not None and not _lattice(file).le(node.found, node.wanted):
            self._add_below(file, place, nodes)

    def _add_below(self, file: CgroupFile, place: str, nodes: dict[str, Node]) -> None:
        for name in self._children(self.layout.directory(file.controller, place)):
            below = f"{place}/{name}"
            if below not in nodes:
                found = self._read_element(file, below)
                if found is None:
                    continue
                nodes[below] = Node(found)
            # A managed group may have to shrink along, and an unlimited one hands its parent's
            # limit on to those below it.
            handed_on = file.codec is Codec.QUOTA and nodes[below].found == TOP
            if handed_on or nodes[below].wanted is not None:
                self._add_below(file, below, nodes)

    def _children(self, directory: str) -> list[str]:
        try:
            names = self._host.listdir(directory)
        except OSError:
            return []
        return [
            name
            for name in names
            # Files of controllers have a dot in their names, and three others are known.
            if ("." not in name or name.endswith(_UNIT_SUFFIXES))
            and name not in _PLAIN_FILES
            and self._host.is_dir(f"{directory}/{name}")
        ]

    def _standing(self, file: CgroupFile, place: str) -> str:
        """Return the resource's field as it stands; raises OSError and ValueError."""
        directory = self.layout.directory(file.controller, place)
        raw = self._host.read(f"{directory}/{file.name(self.layout.version)}")
        return field_text(file, self.layout.version, raw)

    def _read_text(self, file: CgroupFile, place: str) -> str | None:
        try:
            return self._standing(file, place)
        except (OSError, ValueError):
            return None

    def _read_element(self, file: CgroupFile, place: str) -> int | None:
        """Read an unmanaged group; None if it cannot be read (only v1 files are ever asked for)."""
        text = self._read_text(file, place)
        if text is None:
            return None
        try:
            period = DEFAULT_PERIOD_US
            if file.codec is Codec.QUOTA:
                directory = self.layout.directory(file.controller, place)
                period = int(self._host.read(f"{directory}/cpu.cfs_period_us"))
            return self._element(file, text, period)
        except (OSError, ValueError):
            return None

    # -- burst, which the quota bounds -----------------------------------------------------------

    def _burst(
        self,
        place: str,
        slots: Mapping[SlotKey, Slot],
        plan: Plan,
        writes: Sequence3,
        now: float,
    ) -> None:
        """Keep the burst at or below the quota: lowered before quotas move, raised after."""
        burst = slots.get((place, Resource.CPU_CFS_BURST, ""))
        quota_us = self._final_quota(place, slots, plan)
        bounded = not self.burst_above_quota
        if burst is None:
            if bounded and quota_us != UNLIMITED:
                self._lower_foreign_burst(place, quota_us, slots, plan, writes.before)
            return
        if burst.found is None or burst.text is None or burst.retry_at > now:
            return
        wanted, found = int(burst.text), int(burst.found)
        burst.clamp = ""
        if bounded and quota_us == UNLIMITED and burst.want is not None and wanted:
            # It would have no effect, and would make the next quota that kubelet sets fail.
            wanted, burst.clamp = 0, "without a quota there is nothing to burst above"
        elif bounded and quota_us != UNLIMITED and wanted > quota_us:
            wanted, burst.clamp = quota_us, f"kept at the quota of {quota_us} µs"
        if wanted != found:
            self.journal_slot(burst, plan, str(wanted))
            plan.add(
                self._write(burst, str(wanted)),
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
        """A burst above the new quota would make the kernel refuse the quota."""
        file = FILES[Resource.CPU_CFS_BURST]
        text = self._read_text(file, place)
        if text is None or int(text) <= quota_us:
            return
        quota = slots[place, Resource.CPU_CFS_QUOTA, ""]
        new = str(quota_us)
        self._support(place, Resource.CPU_CFS_BURST, Resource.CPU_CFS_QUOTA, text, plan, new)
        path = f"{self.layout.directory('cpu', place)}/{file.name(self.layout.version)}"
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
        """Return the quota of `place`, in µs of its own period, after the writes planned so far."""
        key = (place, Resource.CPU_CFS_QUOTA, "")
        text = plan.planned.get(key)
        if text is None and (slot := slots.get(key)) is not None:
            text = slot.found
        if text is None:
            text = self._read_text(FILES[Resource.CPU_CFS_QUOTA], place)
        value = UNLIMITED if text is None else number(FILES[Resource.CPU_CFS_QUOTA], text)
        assert isinstance(value, int)
        return value

    # -- values that stand alone, but for idle and weight ----------------------------------------

    def _plain(
        self, slot: Slot, slots: Mapping[SlotKey, Slot], plan: Plan, writes: Sequence3
    ) -> None:
        assert slot.file is not None
        if slot.text is None or slot.found is None or self.same(slot.file, slot.text, slot.found):
            return
        out = writes.middle
        if slot.resource is Resource.CPU_IDLE:
            out = writes.after if slot.text == "1" else writes.before
            if slot.text == "1" and not self._keep_weight(slot, slots, plan):
                slot.blocked_by = "the weight, which idle takes away, cannot be read"
                return
        elif slot.resource is Resource.CPU_SHARES and self._idle_fixes_weight(slot, slots, plan):
            slot.blocked_by = "cpu.idle is 1, which fixes the weight"
            return
        self.journal_slot(slot, plan, slot.text)
        plan.add(self._write(slot, slot.text), out)

    def _idle_fixes_weight(self, slot: Slot, slots: Mapping[SlotKey, Slot], plan: Plan) -> bool:
        key = (slot.place, Resource.CPU_IDLE, "")
        text = plan.planned.get(key)
        if text is not None:
            # Idle ends first; where it begins, the weight can still be written before.
            return False
        idle = slots.get(key)
        if idle is not None and idle.found is not None:
            return idle.found == "1"
        return self._read_text(FILES[Resource.CPU_IDLE], slot.place) == "1"

    def left_for_idle(self, slot: Slot, slots: Mapping[SlotKey, Slot]) -> Record | None:
        """Return the record that a restored weight leaves behind while idle is still wanted.

        The kernel will forget the weight when idle ends, and it has to be put back then.
        """
        if slot.resource is not Resource.CPU_SHARES:
            return None
        idle = slots.get((slot.place, Resource.CPU_IDLE, ""))
        record = self._journal.get(*slot.slot_key)
        if idle is None or record is None or (idle.want is None and idle.found != "1"):
            return None
        # What stands is the original, or somebody else's since; under idle it tells nothing.
        stands = slot.found if idle.found != "1" else None
        return Record(
            place=slot.place,
            inode=record.inode,
            resource=slot.resource,
            original=stands or self._original_text(slot, record),
            support_of=Resource.CPU_IDLE.value,
            ours=_IDLE_WEIGHTS[self.layout.version],
        )

    def _keep_weight(self, idle: Slot, slots: Mapping[SlotKey, Slot], plan: Plan) -> bool:
        """Journal the weight before idle begins: the kernel forgets it when idle ends.

        Returns whether it is on record now.
        """
        marks = _IDLE_WEIGHTS[self.layout.version]
        weight = slots.get((idle.place, Resource.CPU_SHARES, ""))
        if weight is not None and weight.found is not None:
            self.journal_slot(weight, plan, *marks)
            return True
        text = self._read_text(FILES[Resource.CPU_SHARES], idle.place)
        if text is None:
            return False
        self._support(idle.place, Resource.CPU_SHARES, Resource.CPU_IDLE, text, plan, *marks)
        return True

    # -- values handed over at creation ----------------------------------------------------------

    def adopt_delivery(
        self, place: str, resource: Resource, requested: Value | None, delivered: Value, policy: str
    ) -> Record | None:
        """Return the record of a value that the runtime was handed, if it still stands.

        Raises OSError when that cannot be told now.
        """
        file = FILES[resource]
        slot = Slot(place, resource, "", file)
        slot.directory = self.layout.directory(file.controller, place)
        if resource is Resource.CPU_CFS_QUOTA:
            slot.period_us = self._period(slot)
        wanted = self.requested_text(slot, delivered)
        if wanted is None:
            return None
        text = self._standing(file, place)
        if not self.same(file, wanted, text):
            other = self._other_weight(file, delivered)
            if other is None or not self.same(file, other, text):
                return None
        return Record(
            place=place,
            inode=self._inode(slot.directory),
            resource=resource,
            original=self._untouched(resource, place) if requested is None else None,
            asked=plain(requested),
            ours=(text,),
            policy=policy,
        )

    def handed(
        self, container_id: str, record: Record, earlier: Sequence[Value] = ()
    ) -> Handed | None:
        """Return what the runtime was handed, by its record; None if kubelet asked for just that.

        The newest text of `record` is what was handed now; what was handed before, `earlier` or
        on record, may still be what the runtime knows.
        """
        slot = Slot(record.place, record.resource, record.key, FILES[record.resource])
        assert slot.file is not None
        slot.directory = self.layout.directory(slot.file.controller, record.place)
        if record.resource is Resource.CPU_CFS_QUOTA:
            slot.period_us = self._period(slot)
        before = self._journal.handed(record.place, record.resource)
        texts = list(before.texts) if before is not None and before.inode == record.inode else []
        texts += [one for value in earlier if (one := self.requested_text(slot, value)) is not None]
        text = record.ours[-1]
        if not texts and self.same(slot.file, text, self._original_text(slot, record)):
            return None
        return Handed(
            container_id=container_id,
            place=record.place,
            inode=record.inode,
            resource=record.resource,
            texts=tuple([*(one for one in texts if one != text), text][-_KEPT_HANDED:]),
            original=record.original,
            asked=record.asked,
            policy=record.policy,
        )

    def echoes(self, record: Record, asked: int | str) -> bool:
        """Tell whether a request is a value of ours that the runtime tells back."""
        slot = Slot(record.place, record.resource, record.key, FILES[record.resource])
        assert slot.file is not None
        slot.directory = self.layout.directory(slot.file.controller, record.place)
        if record.resource is Resource.CPU_CFS_QUOTA:
            slot.period_us = self._period(slot)
        value = CpuSet.parse(asked) if isinstance(asked, str) else asked
        text = self.requested_text(slot, value)
        return text is not None and any(self.same(slot.file, ours, text) for ours in record.ours)

    def _other_weight(self, file: CgroupFile, delivered: Value) -> str | None:
        if file.codec is not Codec.SHARES or not isinstance(delivered, int):
            return None
        return encode(file, self.layout.version, delivered, formula=Formula.QUADRATIC)


def _replace(record: Record, *, policy: str, support_of: str) -> Record:
    return Record(
        place=record.place,
        inode=record.inode,
        resource=record.resource,
        key=record.key,
        original=record.original,
        asked=record.asked,
        ours=record.ours,
        policy=policy,
        support_of=support_of,
    )


def _lattice(file: CgroupFile) -> Lattice:
    return Lattice.SETS if file.codec is Codec.CPUS else Lattice.NUMBERS


def _bytes(text: str) -> int:
    """Return a v1 memory limit as it compares; "-1" and what no page counter holds are alike."""
    value = int(text or 0)
    return _UNLIMITED_BYTES if value < 0 else min(value, _UNLIMITED_BYTES)


def _level(want: Want | None) -> str:
    return f"level:{want.subject.partition('/')[0]}" if want is not None else "level:"
