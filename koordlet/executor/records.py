"""What the journal holds: originals, and values that a runtime was given in place of others."""

from __future__ import annotations

from typing import Final

import msgspec

from apis.cpuset import CpuSet
from linux.resources import Resource, Value

RecordKey = tuple[str, Resource, str]
"""(cgroup or other place, resource, key)."""

KEPT_OURS: Final = 6
"""Values of ours that a record keeps. Chosen: a value may be found late by some writes, for example
after several changes of a NodeSLO in the second between two passes; one that is found later than
that counts as another writer's."""


class Record(msgspec.Struct, frozen=True):
    """The original of one resource in one place.

    place: the cgroup; "" for the node, where `key` names a switch, a directory or a control group.
    inode: of the cgroup's directory; 0 where the place has none.
    original: the field's text before we wrote; None: the thing itself did not exist.
    asked: the original as a canonical value, where the file never showed it: the runtime was handed
        our value at creation in place of this one.
    ours: texts that we wrote and the kernel showed, newest last.
    policy: who wrote last, for people.
    support_of: the resource for whose sake this one was touched.
    """

    place: str
    inode: int
    resource: Resource
    key: str = ""
    original: str | None = None
    requested: int | str | None = None
    ours: tuple[str, ...] = ()
    policy: str = ""
    support_of: str = ""

    @property
    def record_key(self) -> RecordKey:
        return self.place, self.resource, self.key

    def requested_value(self) -> Value | None:
        """Return `asked` as the canonical value: a text stands for a CPU set."""
        return CpuSet.parse(self.requested) if isinstance(self.requested, str) else self.requested

    def with_ours(self, *texts: str) -> Record:
        """Return the record with `texts` as our newest values."""
        kept = [one for one in self.ours if one not in texts]
        return msgspec.structs.replace(self, ours=tuple([*kept, *texts][-KEPT_OURS:]))


def plain(value: Value | None) -> int | str | None:
    """Return a canonical value as `Record.requested` keeps it."""
    return value if value is None or isinstance(value, int) else str(value)


class Delivery(msgspec.Struct, frozen=True):
    """A value that the runtime was handed when it made a container.

    requested: what kubelet had asked for; None when it had asked for nothing.
    earlier: what it was handed before, and nobody has seen yet.
    anew: kubelet named the resource in this very request; else `requested` may be our own value,
        told back as the one that the runtime has.
    """

    container_id: str
    resource: Resource
    requested: int | str | None
    delivered: int | str
    policy: str = ""
    earlier: tuple[int | str, ...] = ()
    requested_now: bool = False


class RuntimeValues(msgspec.Struct, frozen=True):
    """What a container's runtime was handed in place of what kubelet asked for, as it stood.

    systemd writes it again at every reload, runc at every update, for as long as the group lives:
    also when nobody wants it any more.

    texts: the field's texts in the kernel: whether the runtime took an answer, nobody tells us.
    original, asked: as in `Record`.
    """

    container_id: str
    place: str
    inode: int
    resource: Resource
    texts: tuple[str, ...]
    original: str | None = None
    requested: int | str | None = None
    policy: str = ""

    def as_record(self) -> Record:
        """Return what the journal knows of the place by this alone."""
        return Record(
            place=self.place,
            inode=self.inode,
            resource=self.resource,
            original=self.original,
            requested=self.requested,
            ours=self.texts,
            policy=self.policy,
        )


class Superseded(msgspec.Struct, frozen=True):
    """kubelet has asked for these resources anew: what the runtime was handed before is history."""

    container_id: str
    resources: frozenset[Resource]
