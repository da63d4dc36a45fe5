"""The types of the executor: slots, desired values, planned writes, states.

A slot is one (place, resource, key), with its desired and observed value and its state. A planned
write has the old value, the new one and the reason. Planning only reads; applying writes.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from hooks.claim import Claim
from hooks.state import State
from koordlet.executor.records import Record, RecordKey, RuntimeValues
from linux.block_io import BLOCK_FILES, V2_CONTROLLER
from linux.cgroup_files import DEFAULT_PERIOD_US, CgroupFile
from linux.resources import Resource, Value

KEPT_WRITES: Final = 5
"""Writes that a slot keeps for `koordctl explain`. Chosen: enough to see two writers alternate, and
few enough for tens of thousands of slots. Twice the value doubles the memory that they take."""

MAX_FAILURES: Final = 32
"""Refusals in a row that are counted. The back-off doubles with each and reaches its maximum after
nine, so any larger bound has the same effect; this one keeps 2**failures small."""

SlotKey = RecordKey


GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ESRCH})
"""The errors of system calls on a group or process that does not exist any more."""

BAD: Final = frozenset({State.UNSUPPORTED, State.BLOCKED, State.FAILED})
"""States whose beginning is logged as a warning."""


class Want(msgspec.Struct, frozen=True):
    """One desired value.

    place: the cgroup, "" for the node. value: canonical. claim: the winning one.
    requested: what kubelet requested, canonical; None when unknown.
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
    """A write that was done or refused. at: seconds since the epoch; error: "" for a done one."""

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
    """One planned operation. old, new: for people; data, ids: what is written.

    final: after it the slot has its value. False for a widening step, and for all but the last of
        several writes.
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


Written = Callable[[PlannedWrite, str], None]
"""Called with each operation that the kernel accepted, and the policy that it is for, "" for none.
In the executor's thread."""


class Slot:
    """One value: its place, its desired and observed value, and its state.

    Owned by the executor. Attributes are for reading; only the methods below change them.

    directory, path: of the file; "" where there is none or it is not known yet.
    want, restoring: at most one is set: the desired value, or the record whose original is
    restored.
    text: the desired value as the file's text; None while it is not known.
    note: how the resource's range changed the desired value. clamp: how the kernel's rules did.
    blocked_by: what prevents any part of the desired value.
    found: the resource's field as last read. settled: the whole content that was judged last;
        the same content is not judged again.
    period_us: the period of a quota or burst in `text` and `found`.
    cookie: the cookie that all processes of a core scheduling group share.
    retry_at: no write is tried before this time of the executor's clock. errno: of the last
    refusal.
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
    yields: int  # how often the file was left to another writer
    _foreign: list[float]  # when another writer's value was observed lately

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
    def controller(self) -> str:
        """The cgroup v2 controller that the value needs; "" if none."""
        if self.file is not None:
            return self.file.controller
        return V2_CONTROLLER if self.resource in BLOCK_FILES else ""

    @property
    def parked(self) -> bool:
        """Whether it is only watched, because the runtime may write a delivered value again."""
        return self.want is None and self.restoring is None

    @property
    def why(self) -> str:
        if self.want is None:
            return "restore: no policy claims it any more"
        return f"{self.want.claim.policy}: {self.want.claim.reason}"

    @property
    def degraded(self) -> str:
        """All reasons why the value in force is less than the desired one; "" for none."""
        claimed = self.want.claim.degraded if self.want is not None else ""
        return "; ".join(part for part in (claimed, self.note, self.clamp) if part)

    @property
    def as_claimed(self) -> bool:
        """Whether exactly the claimed value is in force; nothing around it can improve that."""
        claimed = self.want.claim.degraded if self.want is not None else ""
        return self.state in (State.APPLIED, State.DEGRADED) and self.detail == claimed

    # -- its place -------------------------------------------------------------------------------

    def locate(self, directory: str, name: str = "") -> None:
        """Set the directory, and the name of the file in it."""
        self.directory = directory
        if name:
            self.path = f"{directory}/{name}"

    def locate_file(self, path: str) -> None:
        """Set the path of something that is not a cgroup file."""
        self.path = path

    def count_by(self, period_us: int) -> None:
        """Set the period of the group's quota and burst."""
        self.period_us = period_us

    # -- the desired value -----------------------------------------------------------------------

    def assign(self, want: Want | None) -> None:
        """Set another desired value, or none, and forget the failures under the former one."""
        self.want = want
        self.restoring = self.settled = self.text = None
        self.retry_at = 0.0
        self.failures = self.yields = 0
        self._foreign = []

    def renew(self, want: Want) -> None:
        """Take the same desired value for another reason; what is known of the file stays."""
        self.want = want

    def restore(self, record: Record | None) -> None:
        """Restore the original of `record`; None: there is nothing to restore."""
        self.restoring = record

    def park(self) -> None:
        """Only watch the file from now on."""
        self.restoring = None
        self.text = None

    def aim(self, text: str | None, *, note: str = "", clamp: str = "") -> None:
        """Set the text that the file should have; None while it is not known."""
        self.text = text
        self.note = note
        self.clamp = clamp
        self.blocked_by = ""

    def clamp_to(self, clamp: str) -> None:
        """Note how the kernel's rules change the desired value; "" if they do not."""
        self.clamp = clamp

    def block(self, by: str) -> None:
        """Note what prevents any part of the desired value."""
        self.blocked_by = by

    # -- the observed value ----------------------------------------------------------------------

    def observe(self, found: str, content: bytes | None = None) -> None:
        """Note the resource's field as read, and for a cgroup file the content as judged."""
        self.found = found
        self.settled = content

    def lose_sight(self) -> None:
        """Note that the file could not be read or parsed."""
        self.found = self.settled = None

    def look_again(self) -> None:
        """Judge the content at the next pass even if it stays the same."""
        self.settled = None

    def share_cookie(self, cookie: int) -> None:
        """Note the cookie that all processes share; 0 while they share none."""
        self.cookie = cookie

    # -- its state -------------------------------------------------------------------------------

    def stand(self, state: State, detail: str) -> None:
        self.state = state
        self.detail = detail

    def accept(self) -> None:
        """Note that the kernel accepted the last write."""
        self.failures = 0

    def refuse(self, error_number: int, retry_at: float) -> None:
        """Note a refusal, and the time until which no further write is tried."""
        self.failures = min(self.failures + 1, MAX_FAILURES)
        self.errno = error_number
        self.retry_at = retry_at

    def rest(self, until: float) -> None:
        """Try no write before `until`, without counting a refusal."""
        self.retry_at = until

    def meet_foreign(self, now: float, window_s: float) -> None:
        """Note that another writer's value was observed where ours was in force."""
        self._foreign = [at for at in self._foreign if now - at < window_s] + [now]

    @property
    def foreign(self) -> int:
        """How often another writer's value was observed lately."""
        return len(self._foreign)

    def yield_until(self, until: float) -> None:
        """Leave the file to the other writer until then."""
        self.yields += 1
        self._foreign = []
        self.retry_at = until
        self.settled = None

    def remember(self, write: WriteNote) -> None:
        """Keep a write for `koordctl explain`."""
        self.writes.append(write)


class Plan:
    """Planned operations in order, and what the journal must hold before them."""

    def __init__(self) -> None:
        self.writes: list[PlannedWrite] = []
        self.records: dict[RecordKey, Record] = {}
        self.forget: list[RecordKey] = []
        self.runtime_values: list[RuntimeValues] = []
        self.done: list[Slot] = []  # restores that need no write any more
        self.planned: dict[SlotKey, str] = {}  # what each slot will hold at the end

    def keep(self, record: Record) -> None:
        """Plan to journal `record` before the writes."""
        self.records[record.record_key] = record

    def finish(self, slot: Slot) -> None:
        """Drop the slot and its record: its restore needs no write any more."""
        self.done.append(slot)
        self.forget.append(slot.slot_key)

    def add(self, write: PlannedWrite, to: list[PlannedWrite]) -> None:
        """Append a write to one of the lists that become `writes`."""
        to.append(write)
        self.planned[write.slot] = write.new


class WriteReport(msgspec.Struct, frozen=True):
    """The result of applying a plan, as counts of writes. paths: the files that were written."""

    written: int = 0
    failed: int = 0
    deferred: int = 0
    restored: int = 0
    paths: frozenset[str] = frozenset()


class ResourceView(msgspec.Struct, frozen=True):
    """One value for people: its state in the kernel, as `koordctl explain` shows it.

    desired, original: as text of the file. observed: None when it could not be read.
    retry_in_s: seconds until a refused write is tried again; 0 when none is waiting.
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
