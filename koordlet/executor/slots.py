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
from koordlet.executor.records import Record, RecordKey, RuntimeValues
from linux.cgroup_files import DEFAULT_PERIOD_US, CgroupFile
from linux.resources import Resource, Value

KEPT_WRITES: Final = 5
"""Writes that a slot remembers for people. Chosen: enough to see two writers alternate, and few
enough for tens of thousands of slots."""

MAX_FAILURES: Final = 32
"""Refusals in a row that are counted: the back-off doubles with each, and reached its longest rest
long before 2**32 seconds."""

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
    """One value: where it lies, what is wanted there, what was found, and how it stands.

    Owned by the executor. Attributes are for reading; only the methods below change them.

    directory, path: of the file; "" where there is none or it is not known yet.
    want, restoring: at most one is set: a wish, or the record whose original is put back.
    text: the wish as the file's text; None while it is not worked out.
    note: how the value's range changed the wish. clamp: how the kernel's rules changed it.
    blocked_by: what keeps all of the wish out of the file.
    found: the resource's field as it was last read. settled: the whole content that was judged
        last; content that equals it needs no second look.
    period_us: what a quota or burst in `text` and `found` is counted by.
    cookie: the one that all processes share, of a core scheduling group.
    retry_at: no write is tried before, by the executor's clock. errno: of the last refusal.
    """

    __slots__ = (
        "_foreign",
        "blocked_by",
        "clamp",
        "cookie",
        "detail",
        "directory",
        "errno",
        "failures",
        "file",
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
        "yields",
    )

    want: Want | None
    restoring: Record | None
    text: str | None
    found: str | None
    settled: bytes | None
    failures: int  # refusals in a row
    yields: int  # how often the place was left to another writer
    _foreign: list[float]  # when another writer's value was found of late

    def __init__(
        self, place: str, resource: Resource, key: str, file: CgroupFile | None = None
    ) -> None:
        self.place = place
        self.resource = resource
        self.key = key
        self.file = file
        self.directory = ""
        self.path = ""
        self.period_us = DEFAULT_PERIOD_US
        self.found = None
        self.cookie = 0
        self.state = State.PENDING
        self.detail = ""
        self.errno = 0
        self.writes: deque[WriteNote] = deque(maxlen=KEPT_WRITES)
        self.aim(None)
        self.assign(None)

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

    # -- where it lies ---------------------------------------------------------------------------

    def locate(self, directory: str, name: str = "") -> None:
        """Set the directory, and the file in it."""
        self.directory = directory
        if name:
            self.path = f"{directory}/{name}"

    def locate_file(self, path: str) -> None:
        """Set the path of something that is no cgroup file."""
        self.path = path

    def count_by(self, period_us: int) -> None:
        """Set the period that the group's quota and burst are counted by."""
        self.period_us = period_us

    # -- what is wanted --------------------------------------------------------------------------

    def assign(self, want: Want | None) -> None:
        """Start with another wish, or with none: what happened under the old one does not count."""
        self.want = want
        self.restoring = self.settled = self.text = None
        self.retry_at = 0.0
        self.failures = self.yields = 0
        self._foreign = []

    def restore(self, record: Record | None) -> None:
        """Have the original of `record` put back; None: nothing is left to put back."""
        self.restoring = record

    def park(self) -> None:
        """Only watch it from now on."""
        self.restoring = None
        self.text = None

    def aim(self, text: str | None, *, note: str = "", clamp: str = "") -> None:
        """Set the text that the file is to have; None while it is not known."""
        self.text = text
        self.note = note
        self.clamp = clamp
        self.blocked_by = ""

    def clamp_to(self, clamp: str) -> None:
        """Note how the kernel's rules change the wish; "" if they do not."""
        self.clamp = clamp

    def block(self, by: str) -> None:
        """Note what keeps all of the wish out of the file."""
        self.blocked_by = by

    # -- what was found --------------------------------------------------------------------------

    def observe(self, found: str, content: bytes | None = None) -> None:
        """Note the resource's field as it is, and the content of a cgroup file, which is judged."""
        self.found = found
        self.settled = content

    def lose_sight(self) -> None:
        """Note that the file could not be read, or not understood."""
        self.found = self.settled = None

    def look_again(self) -> None:
        """Have the content judged at the next pass even if it stays the same."""
        self.settled = None

    def share_cookie(self, cookie: int) -> None:
        """Note the cookie that all processes share; 0 while they share none."""
        self.cookie = cookie

    # -- how it stands ---------------------------------------------------------------------------

    def stand(self, state: State, detail: str) -> None:
        self.state = state
        self.detail = detail

    def accept(self) -> None:
        """Note that the kernel took the last write."""
        self.failures = 0

    def refuse(self, error_number: int, retry_at: float) -> None:
        """Note that the kernel refused; the longer the more often it did so in a row."""
        self.failures = min(self.failures + 1, MAX_FAILURES)
        self.errno = error_number
        self.retry_at = retry_at

    def rest(self, until: float) -> None:
        """Try nothing before `until`, without a refusal that counts."""
        self.retry_at = until

    def meet_foreign(self, now: float, window_s: float) -> None:
        """Note that another writer's value stands where ours was in force."""
        self._foreign = [at for at in self._foreign if now - at < window_s] + [now]

    @property
    def foreign(self) -> int:
        """How often another writer's value was found of late."""
        return len(self._foreign)

    def yield_until(self, until: float) -> None:
        """Leave it to the other writer until then."""
        self.yields += 1
        self._foreign = []
        self.retry_at = until
        self.settled = None

    def remember(self, write: WriteNote) -> None:
        """Keep a write for `koordctl explain`."""
        self.writes.append(write)


class Plan:
    """What would be done: operations in order, and what the journal has to hold before them."""

    def __init__(self) -> None:
        self.writes: list[PlannedWrite] = []
        self.records: dict[RecordKey, Record] = {}
        self.forget: list[RecordKey] = []
        self.runtime_values: list[RuntimeValues] = []
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
