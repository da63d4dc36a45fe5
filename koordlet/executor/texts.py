"""Cgroup files as texts: reads them, and returns the text of a value in one.

Most values have one text. A weight of cgroup v2 has two, depending on the formula by which the
runtime converts kubelet's shares. Which formula a level of the tree uses is learned from the
weights that are observed there.

Facts: docs/facts/kernel.md, "Shares, weights and quotas".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

from koordlet.executor.slots import Act, PlannedWrite, Slot, Want
from linux.cgroup_files import (
    DEFAULT_PERIOD_US,
    FILES,
    CgroupFile,
    Codec,
    Number,
    content,
    encode,
    field_text,
    in_range,
    same,
)
from linux.cgroup_paths import Layout, parent_of
from linux.host import Host
from linux.resources import Resource, Value
from linux.topology import POSSIBLE_CPUS
from linux.weights import Formula, detect

_KEPT_VOTES: Final = 4096
"""Directories whose observed weights are counted. Chosen: far more than the pods of a node. Beyond
it only the counts per level are kept, so twice the value means more memory and the same result."""


class Texts:
    """See the module. Its only state is what it learned about weights."""

    def __init__(self, host: Host, layout: Layout, *, page_size_bytes: int) -> None:
        self.host = host
        self.layout = layout
        self._page_size_bytes = page_size_bytes
        self._votes: dict[str, Counter[Formula]] = {}
        self._seen: dict[str, bytes] | None = None
        self._inodes: dict[str, int] | None = None

    def same(self, file: CgroupFile, wanted: str, found: str) -> bool:
        return same(file, wanted, found, page_size_bytes=self._page_size_bytes)

    def unmanaged(self, place: str, resource: Resource) -> Slot:
        """Return a slot outside the table, for the texts of a file without a desired value."""
        file = FILES[resource]
        slot = Slot(place, resource, "", file)
        slot.locate(self.layout.directory(file.controller, place))
        if resource is Resource.CPU_CFS_QUOTA:
            slot.count_by(self.period(slot))
        return slot

    # -- reading ---------------------------------------------------------------------------------

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """Read each file and directory once during the block, in which nothing may be written.

        Journal, judge and planner look at the same few files of a group one after the other.
        """
        self._seen = {}
        self._inodes = {}
        try:
            yield
        finally:
            self._seen = self._inodes = None

    def raw(self, path: str) -> bytes:
        """Return a file's content; raises OSError."""
        seen = self._seen
        if seen is None:
            return self.host.read(path)
        content = seen.get(path)
        if content is None:
            content = seen[path] = self.host.read(path)
        return content

    def inode(self, directory: str) -> int:
        """Return a directory's inode number; 0 when it cannot be read."""
        inodes = self._inodes
        inode = None if inodes is None else inodes.get(directory)
        if inode is not None:
            return inode
        try:
            inode = self.host.inode(directory)
        except OSError:
            return 0
        if inodes is not None:
            inodes[directory] = inode
        return inode

    def standing(self, file: CgroupFile, place: str) -> str:
        """Return the resource's field as read; raises OSError and ValueError."""
        directory = self.layout.directory(file.controller, place)
        raw = self.raw(f"{directory}/{file.name(self.layout.version)}")
        return field_text(file, self.layout.version, raw)

    def read(self, file: CgroupFile, place: str) -> str | None:
        try:
            return self.standing(file, place)
        except (OSError, ValueError):
            return None

    def period(self, slot: Slot) -> int:
        name = "cpu.cfs_period_us" if self.layout.version == 1 else "cpu.max"
        try:
            raw = self.raw(f"{slot.directory}/{name}")
            return int(field_text(FILES[Resource.CPU_CFS_PERIOD], self.layout.version, raw))
        except (OSError, ValueError):
            return DEFAULT_PERIOD_US

    def populated(self, slot: Slot) -> bool:
        if self.layout.version == 1:
            return False
        try:
            return b"populated 1" in self.raw(f"{slot.directory}/cgroup.events")
        except OSError:
            return True  # not known: assume tasks, for which the kernel has more rules

    def everything(self, slot: Slot) -> str:
        """Return the CPUs (or NUMA nodes) that v2 accepts: the machine's, offline ones included."""
        path = f"{self.layout.hierarchy('cpuset')}/cpuset.mems.effective"
        if slot.resource is Resource.CPUSET_CPUS:
            path = POSSIBLE_CPUS
        return self.raw(path).decode("ascii", "replace").strip()

    def children(self, directory: str) -> list[str]:
        try:
            return self.host.directories(directory)
        except OSError:
            return []

    def lists(self, path: str, word: str) -> bool:
        try:
            return word.encode() in self.raw(path).split()
        except OSError:
            return False

    # -- values as text --------------------------------------------------------------------------

    def encode(self, slot: Slot, value: Number) -> str:
        assert slot.file is not None
        return encode(
            slot.file,
            self.layout.version,
            value,
            formula=self._formula(slot),
            period_us=slot.period_us,
        )

    def text_of(self, slot: Slot, value: Value) -> str | None:
        """Return a requested or delivered value as the file's text; None if it has none."""
        assert slot.file is not None
        try:
            return self.encode(slot, in_range(slot.file, value)[0])
        except ValueError:
            return None

    def other_weight(self, file: CgroupFile, delivered: Value) -> str | None:
        """Return the weight of `delivered` shares by the quadratic formula; None for non-shares."""
        if file.codec is not Codec.SHARES or not isinstance(delivered, int):
            return None
        return encode(file, self.layout.version, delivered, formula=Formula.QUADRATIC)

    def write(self, slot: Slot, text: str, *, final: bool = True) -> PlannedWrite:
        assert slot.file is not None
        why = slot.why if final else f"{slot.why} (first step: the old and the new value joined)"
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

    # -- weights ---------------------------------------------------------------------------------

    def learn(self, slot: Slot, evidence: Collection[Formula] = frozenset(Formula)) -> None:
        """Learn the weight formula of this level from an observed weight.

        evidence: the formulas for which this weight counts as evidence.
        """
        want, found = slot.want, slot.found
        if slot.resource is not Resource.CPU_SHARES or self.layout.version != 2:
            return
        if want is None or found is None or want.requested is None:
            return
        # The runtime converted the requested value, or the value that our reply delivered.
        for known in (want.requested, want.value):
            formula = detect([(known, int(found))]) if isinstance(known, int) else None
            if formula is not None and formula in evidence:
                if len(self._votes) > _KEPT_VOTES:
                    # Pods come and go; the formula of their level is known by now.
                    self._votes = {
                        level: votes
                        for level, votes in self._votes.items()
                        if level.startswith("level:")
                    }
                for level in (parent_of(slot.place), _level(want)):
                    self._votes.setdefault(level, Counter())[formula] += 1
                return

    def _formula(self, slot: Slot) -> Formula:
        """Return the formula of the slot's siblings, else of its level, else the linear one."""
        if slot.resource is Resource.CPU_SHARES and self.layout.version == 2:
            for level in (parent_of(slot.place), _level(slot.want)):
                votes = self._votes.get(level)
                if votes:
                    return votes.most_common(1)[0][0]
        return Formula.LINEAR


def _level(want: Want | None) -> str:
    return f"level:{want.subject.partition('/')[0]}" if want is not None else "level:"
