"""Plans values that are ordered along the cgroup tree: quota, cpuset and memory.

No child may have more than its parent at any moment. So the values of the groups around a group
decide when its value can change, and sometimes whether. `order` finds the steps; this file reads
the values and makes the writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from apis.cpuset import CpuSet
from koordlet.executor.order import TOP, Lattice, Node, Order, ancestors, order
from koordlet.executor.originals import Originals
from koordlet.executor.slots import Act, Plan, PlannedWrite, Slot, SlotKey
from koordlet.executor.texts import Texts
from linux.cgroup_files import DEFAULT_PERIOD_US, FILES, CgroupFile, Codec, Levels, encode, number
from linux.resources import UNLIMITED, Resource

_RATIO_SHIFT: Final = 20
"""The kernel compares bandwidths as (quota << 20) / period (its BW_SHIFT)."""
_UNLIMITED_BYTES: Final = (1 << 63) - (1 << 16)
"""A limit that counts as unlimited: less than what an unlimited v1 counter reads for any page size
up to 64 KiB, and more than any machine's memory."""


@dataclass(frozen=True, slots=True)
class _WithSwap:
    """A write of the limit of memory plus swap. raises: it has to precede the memory limit's."""

    write: PlannedWrite
    raises: bool


class TreePlanner:
    """See the module."""

    def __init__(self, texts: Texts, originals: Originals) -> None:
        self._texts = texts
        self._originals = originals

    def plan(
        self,
        resource: Resource,
        dirty: Sequence[Slot],
        slots: Mapping[SlotKey, Slot],
        plan: Plan,
        out: list[PlannedWrite],
        now: float,
    ) -> None:
        """Append the writes for one resource to `out`. slots: all slots, for the values around."""
        file = FILES[resource]
        enforced = file.levels(self._texts.layout.version) is Levels.ENFORCED
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
        copies = self._copies(file, dirty, of_place) if enforced else {}
        for place, copy in copies.items():
            of_place[place] = copy
            assert copy.found is not None and copy.text is not None
            nodes[place] = Node(
                self._element(file, copy.found, copy.period_us),
                self._element(file, copy.text, copy.period_us),
            )
        moving = [
            place
            for place, node in nodes.items()
            if node.wanted is not None and node.wanted != node.found
        ]
        if not moving:
            return
        if enforced:
            for place in moving:
                self._add_neighbours(file, place, nodes)
        ordered = order(nodes, _lattice(file), enforced=enforced)
        self._note(ordered, of_place)
        texts: dict[str, list[str]] = {}
        for step in ordered.steps:
            slot = of_place[step.cgroup]
            text = self._text_of(file, slot, step.value)
            earlier = texts.setdefault(step.cgroup, [])
            if not earlier and slot.found is not None and self._texts.same(file, text, slot.found):
                continue  # they differ by less than a page or a rounding: the same to the kernel
            earlier.append(text)
            write = self._texts.write(slot, text, final=step.final)
            with_swap = self._with_swap(slot, text) if resource is Resource.MEMORY_LIMIT else None
            if with_swap is not None and with_swap.raises:
                out.append(with_swap.write)
            plan.add(write, out)
            if with_swap is not None and not with_swap.raises:
                out.append(with_swap.write)
        for cgroup, written in texts.items():
            if written and cgroup not in copies:
                self._originals.keep(of_place[cgroup], plan, *written)

    def _copies(
        self, file: CgroupFile, dirty: Sequence[Slot], managed: Mapping[str, Slot]
    ) -> dict[str, Slot]:
        """Return slots for the unmanaged groups with a CPU set that is restored above them.

        On v1 a new group copies its parent's set. Of a pod that kubelet has just made, koordlet may
        not have heard when its class's set is restored, and nothing would widen the copy later.
        """
        found: dict[str, Slot] = {}
        if file.resource is not Resource.CPUSET_CPUS:
            return found
        for slot in dirty:
            if slot.restoring is not None and slot.text is not None:
                self._add_copies(file, slot.place, slot, managed, found)
        return found

    def _add_copies(
        self,
        file: CgroupFile,
        place: str,
        above: Slot,
        managed: Mapping[str, Slot],
        found: dict[str, Slot],
    ) -> None:
        assert above.restoring is not None
        directory = self._texts.layout.directory(file.controller, place)
        for name in self._texts.children(directory):
            below = f"{place}/{name}"
            if below not in managed and below not in found:
                text = self._texts.read(file, below)
                if text is None or not any(
                    self._texts.same(file, ours, text) for ours in above.restoring.ours
                ):
                    continue
                copy = self._texts.unmanaged(below, file.resource)
                copy.locate(f"{directory}/{name}", file.name(self._texts.layout.version))
                copy.observe(text)
                copy.aim(above.text)
                found[below] = copy
            self._add_copies(file, below, above, managed, found)

    def _with_swap(self, slot: Slot, text: str) -> _WithSwap | None:
        """Change v1's limit of memory plus swap along with the memory limit, where needed.

        The kernel keeps the memory limit at or below it, and runtimes set both to the same value,
        so that a container gets no swap. Without this, a growing memory limit would be refused, and
        a shrinking one would allow swap.
        """
        if self._texts.layout.version != 1:
            return None
        path = f"{slot.directory}/memory.memsw.limit_in_bytes"
        try:
            old = int(self._texts.raw(path))
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
            why=f"{slot.why} (the limit of memory plus swap follows the memory limit)",
            data=text.encode(),
            final=False,
        )
        return _WithSwap(write, raises)

    @staticmethod
    def _note(ordered: Order, of_place: Mapping[str, Slot]) -> None:
        for cgroup in ordered.finals:
            of_place[cgroup].clamp_to(ordered.notes.get(cgroup, ""))
        for cgroup, blocker in ordered.blocked.items():
            of_place[cgroup].block(f"{blocker} allows none of it")

    def _element(self, file: CgroupFile, text: str, period_us: int) -> int:
        """Return a field's text as a value that `order` compares."""
        value = number(file, text)
        if isinstance(value, CpuSet):
            # On v2 an empty set means whatever the parent has.
            return value.mask if value or self._texts.layout.version == 1 else TOP
        if file.codec is Codec.QUOTA and value != UNLIMITED:
            return (value << _RATIO_SHIFT) // period_us
        return value

    def _text_of(self, file: CgroupFile, slot: Slot, value: int) -> str:
        """Return the text of a value of `order`: the desired or the old text if it is the same."""
        for text in (slot.text, slot.found):
            if text is not None and self._element(file, text, slot.period_us) == value:
                return text
        if file.codec is Codec.CPUS:
            return str(CpuSet.of_mask(value)) if value != TOP else ""
        if file.codec is Codec.QUOTA and value != TOP:
            if slot.clamp.startswith("bounded"):
                return str(((value + 1) * slot.period_us - 1) >> _RATIO_SHIFT)
            return str(-(-value * slot.period_us >> _RATIO_SHIFT))
        return encode(file, self._texts.layout.version, value)

    def _add_neighbours(self, file: CgroupFile, place: str, nodes: dict[str, Node]) -> None:
        """Add the unmanaged groups that bound `place`, or whose values it must contain."""
        for above in ancestors(place):
            if above not in nodes:
                found = self._read_element(file, above)
                if found is not None:
                    nodes[above] = Node(found)
        node = nodes[place]
        if node.wanted is not None and not _lattice(file).le(node.found, node.wanted):
            self._add_below(file, place, nodes)

    def _add_below(self, file: CgroupFile, place: str, nodes: dict[str, Node]) -> None:
        for name in self._texts.children(self._texts.layout.directory(file.controller, place)):
            below = f"{place}/{name}"
            if below not in nodes:
                found = self._read_element(file, below)
                if found is None:
                    continue
                nodes[below] = Node(found)
            # A managed group may have to shrink too, and through an unlimited one its parent's
            # limit applies to the groups below.
            passes_on = file.codec is Codec.QUOTA and nodes[below].found == TOP
            if passes_on or nodes[below].wanted is not None:
                self._add_below(file, below, nodes)

    def _read_element(self, file: CgroupFile, place: str) -> int | None:
        """Read the value of an unmanaged group on v1; None if it cannot be read."""
        text = self._texts.read(file, place)
        if text is None:
            return None
        try:
            period = DEFAULT_PERIOD_US
            if file.codec is Codec.QUOTA and number(file, text) != UNLIMITED:
                directory = self._texts.layout.directory(file.controller, place)
                period = int(self._texts.raw(f"{directory}/cpu.cfs_period_us"))
            return self._element(file, text, period)
        except (OSError, ValueError):
            return None


def _lattice(file: CgroupFile) -> Lattice:
    return Lattice.SETS if file.codec is Codec.CPUS else Lattice.NUMBERS


def _bytes(text: str) -> int:
    """Return a v1 memory limit for comparison; "-1" and all unlimited readings are equal."""
    value = int(text or 0)
    return _UNLIMITED_BYTES if value < 0 else min(value, _UNLIMITED_BYTES)
