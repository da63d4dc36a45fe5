"""What the executor knows about each value: what is wanted, what was found, how it stands.

A slot is one (place, resource, key). A planned write is what would be written there, with the old
value, the new one and the reason; a plan is pure reading until it is applied.
"""

from __future__ import annotations

import errno
from collections import deque
from enum import StrEnum
from typing import Final

import msgspec

from hooks.claim import Claim
from koordlet.executor.journal import Handed, Record, RecordKey
from linux.cgroup_files import DEFAULT_PERIOD_US, CgroupFile
from linux.resources import Resource, Value

KEPT_WRITES: Final = 5

SlotKey = RecordKey


class State(StrEnum):
    """How a desired value stands."""

    APPLIED = "applied"
    DEGRADED = "degraded"  # in force, but less than what was asked for: the detail says how
    UNSUPPORTED = "unsupported"  # this kernel has no such thing
    BLOCKED = "blocked"  # another writer or a kernel rule stands against it
    FAILED = "failed"  # the kernel refused; tried again after a while
    PENDING = "pending"  # not tried yet: no such group, or the write budget is used up


GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ESRCH})
"""What a system call says of a group or process that is not there any more."""

BAD: Final = frozenset({State.UNSUPPORTED, State.BLOCKED, State.FAILED})


class Want(msgspec.Struct, frozen=True):
    """One desired value.

    place: the cgroup, "" for the node. value: canonical. claim: the one that won.
    requested: what kubelet asked the runtime for, canonical; None when unknown.
    """

    subject: str
    place: str
    resource: Resource
    key: str
    value: Value
    claim: Claim
    requested: Value | None = None

    @property
    def slot_key(self) -> SlotKey:
        return self.place, self.resource, self.key


class WriteNote(msgspec.Struct, frozen=True):
    """A write that was done or refused. `at`: seconds since the epoch; `error` "" when it went."""

    at: float
    path: str
    old: str
    new: str
    why: str
    error: str = ""


class Act(StrEnum):
    """What a planned write does."""

    WRITE = "write"
    MKDIR = "mkdir"
    RMDIR = "rmdir"
    MOVE_TASKS = "move-tasks"
    COOKIE_CREATE = "cookie-create"
    COOKIE_COPY = "cookie-copy"


class PlannedWrite(msgspec.Struct, frozen=True):
    """One operation that would be done. `old`, `new`: for people; `data`, `ids`: what is carried.

    final: after it the slot has its value; False for a widening step and for one of several writes.
    """

    act: Act
    path: str
    slot: SlotKey
    subject: str
    old: str
    new: str
    why: str
    data: bytes = b""
    ids: tuple[int, ...] = ()
    mode: int = 0o755
    final: bool = True


class Slot:
    """The mutable state of one value. Owned by the executor."""

    __slots__ = (
        "blocked_by",
        "clamp",
        "cookie",
        "detail",
        "directory",
        "errno",
        "failures",
        "fights",
        "file",
        "foreign",
        "found",
        "key",
        "note",
        "path",
        "period_us",
        "place",
        "resource",
        "restoring",
        "retry_at",
        "settled",
        "state",
        "text",
        "want",
        "writes",
    )

    def __init__(
        self, place: str, resource: Resource, key: str, file: CgroupFile | None = None
    ) -> None:
        self.place = place
        self.resource = resource
        self.key = key
        self.file = file
        self.directory = ""
        self.path = ""
        self.want: Want | None = None
        self.restoring: Record | None = None
        self.settled: bytes | None = None  # the content that was last judged, and found settled
        self.found: str | None = None  # the resource's field in it
        self.text: str | None = None  # the wish as text, before the kernel's rules
        self.note = ""  # what the range did to the wish
        self.clamp = ""  # what the kernel's rules did to it
        self.blocked_by = ""
        self.cookie = 0  # that all processes share, of a core scheduling group
        self.period_us = DEFAULT_PERIOD_US
        self.state = State.PENDING
        self.detail = ""
        self.errno = 0
        self.failures = 0
        self.fights = 0
        self.retry_at = 0.0
        self.foreign: list[float] = []  # when somebody else's value was found of late
        self.writes: deque[WriteNote] = deque(maxlen=KEPT_WRITES)

    @property
    def slot_key(self) -> SlotKey:
        return self.place, self.resource, self.key

    @property
    def subject(self) -> str:
        return self.want.subject if self.want is not None else ""

    @property
    def parked(self) -> bool:
        """Whether it is only watched: the runtime may write again what it was once handed."""
        return self.want is None and self.restoring is None

    @property
    def why(self) -> str:
        if self.want is None:
            return "restore: no policy claims it any more"
        return f"{self.want.claim.policy}: {self.want.claim.reason}"

    @property
    def degraded(self) -> str:
        """Everything that makes the value in force less than the wish."""
        claimed = self.want.claim.degraded if self.want is not None else ""
        return "; ".join(part for part in (claimed, self.note, self.clamp) if part)


class Plan:
    """What would be done: operations in order, and what the journal has to hold before them."""

    def __init__(self) -> None:
        self.writes: list[PlannedWrite] = []
        self.records: dict[RecordKey, Record] = {}
        self.forget: list[RecordKey] = []
        self.handed: list[Handed] = []
        self.done: list[Slot] = []  # restores that need nothing any more
        self.planned: dict[SlotKey, str] = {}  # what each slot will hold at the end

    def keep(self, record: Record) -> None:
        """Have the journal hold `record` before anything is written."""
        self.records[record.record_key] = record

    def finish(self, slot: Slot) -> None:
        """A restore needs no write any more: let the slot and its record go."""
        self.done.append(slot)
        self.forget.append(slot.slot_key)

    def add(self, write: PlannedWrite, to: list[PlannedWrite]) -> None:
        """Put a write into one of the lists that become `writes`."""
        to.append(write)
        self.planned[write.slot] = write.new


class WriteReport(msgspec.Struct, frozen=True):
    """What applying a plan came to."""

    written: int = 0
    failed: int = 0
    deferred: int = 0
    restored: int = 0
    paths: frozenset[str] = frozenset()


class ResourceView(msgspec.Struct, frozen=True):
    """One value for people: what `koordctl explain` shows of the kernel's side.

    desired, original: as text of the file. observed: None when it could not be read.
    retry_in_s: seconds until a refused write is tried again; 0 when it is not waiting.
    """

    place: str
    resource: Resource
    key: str
    path: str
    desired: str
    observed: str | None
    state: State
    detail: str
    original: str | None
    retry_in_s: float
    writes: tuple[WriteNote, ...]
    claim: Claim | None
    cookie: int = 0
