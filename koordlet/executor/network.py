"""Applies the classes of network QoS to the kernel: what differs, in an order that works.

Everything is compared with what the kernel has. Classes are changed in place, so packets that wait
in them go on waiting; the root qdisc is made once and never replaced. Only what carries our handle
or our table's name is touched; a device whose root qdisc is another's keeps it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Final

import msgspec

from linux.htb import INGRESS, MAJOR, ROOT, HtbClass, Qdisc, Shaping
from linux.packet_classes import Member, PacketClasses, Present, levels_of

FILE_NAME: Final = "network-qos"
"""Of the marker, in the run directory."""
_NO_GROUPS: Final = frozenset({errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL})
"""What kernels answer to a rule that they do not know."""
_NO_TABLES: Final = frozenset({errno.EOPNOTSUPP, errno.EPROTONOSUPPORT})
"""What kernels without nf_tables answer to a request for a table, so that there is none."""


class Operation(StrEnum):
    ADD = "add"
    CHANGE = "change"
    DELETE = "delete"


class Step(msgspec.Struct, frozen=True):
    """One change of a class."""

    operation: Operation
    each: HtbClass


class Occupied(Exception):
    """The device has a queueing discipline that neither the kernel's defaults nor we made."""

    def __init__(self, found: Qdisc) -> None:
        self.found = found
        super().__init__(
            f"its queueing discipline {found.kind} {found.handle >> 16:x}: was set by another"
            " program and is left alone"
        )


class Difference(msgspec.Struct, frozen=True):
    """What there is in the kernel, and what leads from there to what is wanted.

    root: whether our qdisc is the device's root. elsewhere: the numbers of other devices that have
    one. present: our classes on the device. first: steps before packets are led to the classes;
    last: steps after it. table: None if our table is not as we make it. unreadable: why the table
    could not be read.
    """

    root: bool
    elsewhere: tuple[int, ...]
    present: Mapping[int, HtbClass]
    first: tuple[Step, ...]
    last: tuple[Step, ...]
    table: Present | None = None
    unreadable: str = ""


class Changed(msgspec.Struct, frozen=True):
    """What applying did. made: the root qdisc is new. classes: the steps that succeeded.
    members: those with another class than before. problems: what the kernel refused.
    classes_in_force, members_in_force: what the kernel has now."""

    made: bool = False
    classes: tuple[Step, ...] = ()
    members: int = 0
    problems: tuple[str, ...] = ()
    classes_in_force: Mapping[int, HtbClass] = {}
    members_in_force: Mapping[Member, int] = {}

    @property
    def writes(self) -> int:
        return self.made + len(self.classes) + self.members


def steps(present: Mapping[int, HtbClass], wanted: Sequence[HtbClass]) -> tuple[list[Step], ...]:
    """Return the steps that lead to the wanted classes: those to do first, and those at the end.

    wanted: parents before children. At the end is what no packet is led to any more. The kernel
    refuses to move a class, so one that lies elsewhere is deleted first, with all below it.
    """
    by_minor = {each.minor: each for each in wanted}
    misplaced: set[int] = set()
    for each in _top_down(present):
        now = by_minor.get(each.minor)
        if each.parent in misplaced or (now is not None and now.parent != each.parent):
            misplaced.add(each.minor)
    first = [
        Step(Operation.DELETE, each)
        for each in reversed(_top_down(present))
        if each.minor in misplaced
    ]
    for each in wanted:
        before = present.get(each.minor)
        if before is None or each.minor in misplaced:
            first.append(Step(Operation.ADD, each))
        elif before != each:
            first.append(Step(Operation.CHANGE, each))
    last = [
        Step(Operation.DELETE, each)
        for each in reversed(_top_down(present))
        if each.minor not in by_minor and each.minor not in misplaced
    ]
    return first, last


def after(present: Mapping[int, HtbClass], done: Iterable[Step]) -> dict[int, HtbClass]:
    """Return the classes that there are after these steps."""
    classes = dict(present)
    for step in done:
        if step.operation is Operation.DELETE:
            classes.pop(step.each.minor, None)
        else:
            classes[step.each.minor] = step.each
    return classes


def _top_down(classes: Mapping[int, HtbClass]) -> list[HtbClass]:
    """Return the classes, each behind its parent."""
    children: dict[int, list[HtbClass]] = {}
    for each in classes.values():
        children.setdefault(each.parent, []).append(each)
    ordered = []
    rest = list(children.get(0, ()))
    while rest:
        each = rest.pop()
        ordered.append(each)
        rest += children.get(each.minor, ())
    return ordered


class Network:
    """The effector. One thread at a time; its sockets are opened when it is used first."""

    def __init__(
        self,
        marker: str,
        shaping: Callable[[], Shaping] = Shaping,
        packets: Callable[[], PacketClasses] = PacketClasses,
    ) -> None:
        """marker: the file that says that something may have been applied. It is made before the
        first change and removed after the last, so a daemon that never shaped does not look."""
        self._marker = marker
        self._make_shaping = shaping
        self._make_packets = packets
        self._shaping: Shaping | None = None
        self._packets: PacketClasses | None = None

    @property
    def applied(self) -> bool:
        """Whether something of ours may be in the kernel, of this run or a former one."""
        return os.path.lexists(self._marker)

    def close(self) -> None:
        """Close the sockets; the next use opens new ones."""
        for each in (self._shaping, self._packets):
            if each is not None:
                each.close()
        self._shaping = self._packets = None

    def apply(
        self,
        index: int,
        *,
        classes: Sequence[HtbClass],
        default: int,
        members: Mapping[Member, int],
    ) -> Changed:
        """Make the device's classes and their members what is wanted; take away ours elsewhere.

        default: the class of packets that belong to no member. What the kernel refuses is in the
        result, and the rest is done. Raises Occupied; OSError when the marker could not be made,
        or nothing could be read.
        """
        with open(self._marker, "ab"):
            pass
        packets = self._open_packets()
        found = self.look(index, classes=classes)
        shaping = self._open_shaping()
        for other in found.elsewhere:
            shaping.delete_root(other)
        if not found.root:
            shaping.add_root(index, default=default)
        problems: list[str] = []
        done = self._carry_out(shaping, index, found.first, problems)
        moved = 0
        led: Mapping[Member, int] = {} if found.table is None else found.table.members
        refused = found.unreadable
        if not refused:
            try:
                moved, led = _lead(packets, found.table, members, problems)
            except OSError as error:
                refused = _text(error)
        if refused:
            problems.append(f"packets cannot be classified with nftables: {refused}")
        done += self._carry_out(shaping, index, found.last, problems)
        return Changed(
            made=not found.root,
            classes=tuple(done),
            members=moved,
            problems=tuple(problems),
            classes_in_force=after(found.present, done),
            members_in_force=led,
        )

    def look(self, index: int, *, classes: Sequence[HtbClass]) -> Difference:
        """Return what applying these classes to the device would change. Nothing is written.

        Raises Occupied; OSError when qdiscs and classes cannot be read.
        """
        shaping = self._open_shaping()
        root, elsewhere = False, []
        for qdisc in shaping.qdiscs(index):
            if qdisc.ours and qdisc.index != index:
                elsewhere.append(qdisc.index)
            elif qdisc.ours and qdisc.parent == ROOT:
                root = True
            elif qdisc.index == index and _is_anothers(qdisc):
                raise Occupied(qdisc)
        present = shaping.classes(index)
        first, last = steps(present, classes)
        table, unreadable = None, ""
        try:
            table = self._open_packets().read()
        except OSError as error:
            unreadable = _text(error)
        return Difference(
            root, tuple(elsewhere), present, tuple(first), tuple(last), table, unreadable
        )

    def devices(self) -> tuple[int, ...]:
        """Return the numbers of the devices that have our qdisc. Raises OSError."""
        return tuple(qdisc.index for qdisc in self._open_shaping().qdiscs(0) if qdisc.ours)

    def remove(self) -> bool:
        """Take away all that is ours; the kernel's defaults return. Return whether there was any.

        Raises OSError.
        """
        removed = False
        # The classes first: a table that cannot be removed leads packets to no class then.
        for index in self.devices():
            self._open_shaping().delete_root(index)
            removed = True
        try:
            removed = self._open_packets().remove() or removed
        except OSError as error:
            if error.errno not in _NO_TABLES:
                raise
        with suppress(FileNotFoundError):
            os.unlink(self._marker)
        return removed

    def _open_shaping(self) -> Shaping:
        if self._shaping is None:
            self._shaping = self._make_shaping()
        return self._shaping

    def _open_packets(self) -> PacketClasses:
        if self._packets is None:
            self._packets = self._make_packets()
        return self._packets

    def _carry_out(
        self, shaping: Shaping, index: int, todo: Iterable[Step], problems: list[str]
    ) -> list[Step]:
        done = []
        for step in todo:
            try:
                if step.operation is Operation.ADD:
                    shaping.add(index, step.each)
                elif step.operation is Operation.CHANGE:
                    shaping.change(index, step.each)
                else:
                    shaping.delete(index, step.each.minor)
            except OSError as error:
                problems.append(
                    f"the kernel refuses to {step.operation} class {step.each.minor:x}: "
                    + _text(error)
                )
            else:
                done.append(step)
        return done


def _is_anothers(qdisc: Qdisc) -> bool:
    """Return whether another program set this qdisc in the place that ours would take.

    A qdisc below one of our classes is not in that place, nor is one for incoming packets.
    """
    return bool(qdisc.handle) and qdisc.parent != INGRESS and qdisc.parent >> 16 != MAJOR


def _lead(
    packets: PacketClasses,
    present: Present | None,
    members: Mapping[Member, int],
    problems: list[str],
) -> tuple[int, Mapping[Member, int]]:
    """Make these the members of the classes; return how many changed, and the members now.

    Raises OSError.
    """
    if present is None or present.levels != levels_of(members):
        return _install(packets, members, present, problems)
    before = present.members
    add = {member: minor for member, minor in members.items() if before.get(member) != minor}
    remove = [member for member, minor in before.items() if members.get(member) != minor]
    if add or remove:
        packets.change(add, remove)
    return len({*add, *remove}), members


def _install(
    packets: PacketClasses,
    members: Mapping[Member, int],
    present: Present | None,
    problems: list[str],
) -> tuple[int, Mapping[Member, int]]:
    """Make the table; without groups where the kernel does not know them. Raises OSError."""
    try:
        packets.install(members)
    except OSError as error:
        addresses: dict[Member, int] = {
            each: minor for each, minor in members.items() if isinstance(each, str)
        }
        if error.errno not in _NO_GROUPS or len(addresses) == len(members):
            raise
        problems.append(
            f"{len(members) - len(addresses)} pods on the node's network are in class system:"
            f" the kernel cannot tell sockets apart by cgroup: {_text(error)}"
        )
        if present is None or present.levels:
            packets.install(addresses)
            return len(addresses), addresses
        return _lead(packets, present, addresses, problems)
    return len(members), members


def _text(error: OSError) -> str:
    return error.strerror or str(error)
