"""The journal's entries: originals, and values that were delivered in place of kubelet's."""

from __future__ import annotations

from typing import Final

import msgspec

from apis.cpuset import CpuSet
from linux.resources import Resource, Value

RecordKey = tuple[str, Resource, str]
"""(cgroup or other place, resource, key)."""

KEPT_OURS: Final = 6
"""Values of ours that a record keeps. Chosen: a value may be observed some writes late, for example
after several changes of a NodeSLO in the second between two passes. A value that is older than this
counts as another writer's. Twice the value makes the records longer, and such mistakes rarer."""


class Record(msgspec.Struct, frozen=True):
    """The original of one resource in one place.

    place: the cgroup; "" for the node, where `key` names a switch, a directory or a control group.
    inode: of the cgroup's directory; 0 where the place has none.
    original: the field's text before we wrote; None: the thing itself did not exist.
    requested: the original as a canonical value, where the file never showed it: our value was
        delivered at creation in place of this one.
    ours: texts that we wrote and the kernel showed, newest last.
    policy: the policy that wrote last, for people.
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
        """Return `requested` as the canonical value: a text stands for a CPU set."""
        return CpuSet.parse(self.requested) if isinstance(self.requested, str) else self.requested

    def with_ours(self, *texts: str) -> Record:
        """Return the record with `texts` as our newest values."""
        newest = dict.fromkeys(texts)
        kept = [one for one in self.ours if one not in newest]
        return msgspec.structs.replace(self, ours=tuple([*kept, *newest][-KEPT_OURS:]))


def plain(value: Value | None) -> int | str | None:
    """Return a canonical value as `Record.requested` keeps it."""
    return value if value is None or isinstance(value, int) else str(value)


class Delivery(msgspec.Struct, frozen=True):
    """A value that a reply delivered for a container and that was not looked for in its group yet.

    requested: what kubelet requested; None when it requested nothing.
    earlier: former deliveries that were not looked for either.
    requested_now: kubelet named the resource in this very request. Otherwise `requested` may be our
        own value, reported back by the runtime.
    """

    container_id: str
    resource: Resource
    requested: int | str | None
    delivered: int | str
    policy: str = ""
    earlier: tuple[int | str, ...] = ()
    requested_now: bool = False


class RuntimeValues(msgspec.Struct, frozen=True):
    """Delivered values of one file that the container's runtime may write again at any time.

    systemd writes them at every reload and runc at every update, for as long as the group lives,
    even when no policy claims them any more.

    texts: the values as the kernel shows them, newest last. There are several because no event
        reports whether the runtime took the latest reply.
    original, requested: as in `Record`.
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
        """Return the record that follows from these values alone."""
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
    """Kubelet requested other values of these resources, so earlier deliveries do not count."""

    container_id: str
    resources: frozenset[Resource]
