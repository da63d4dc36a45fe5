"""One sandbox, one container and one pod as the runtime reported them.

A container's record keeps apart what kubelet requested, what koordlet delivered in place of it, and
what the runtime reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from hooks.requested import overlay
from hooks.subject import NOTHING_REQUESTED, Pod, Requested
from koordlet.state.requests_log import Remembered

_UPDATABLE: Final = frozenset(Requested.__struct_fields__) - {"oom_score_adj"}
"""The values that kubelet may change in an update."""


class SandboxRecord(msgspec.Struct):
    """A sandbox. seen: the mark of the last report that named it; see
    `koordlet.state.runtime_records.RuntimeRecords.now`."""

    id: str
    pod: Pod
    cgroup: str
    resources: Requested
    seen: int
    stopped: bool = False


class ContainerRecord(msgspec.Struct):
    """A container.

    first_reported: the values in the runtime's first report.
    from_events: what kubelet requested in events; an update names only values that change. None
        where no hook saw a request.
    delivered: what the last reply delivered in place of these; None where that is not known.
    reported: the values in the runtime's last report, less those that kubelet requested since.
        A value in a full list that equals none of these was requested in an event that did not
        reach koordlet.
    hooked: a hook saw the creation. lacks: what is missing and only creation could have set.
    """

    id: str
    sandbox_id: str
    uid: str
    name: str
    cgroup: str
    seen: int
    created_at: float
    first_reported: Requested
    from_events: Requested | None = None
    delivered: Requested | None = None
    reported: Requested = NOTHING_REQUESTED
    hooked: bool = False
    started: bool = False
    lacks: tuple[str, ...] = ()

    @property
    def remembered(self) -> Remembered | None:
        """Return what the requests log keeps over a restart; None if there is nothing to keep."""
        if self.hooked and self.from_events is not None:
            return Remembered(
                self.from_events, hooked=True, delivered=self.delivered, reported=self.reported
            )
        known = self.request
        if known == NOTHING_REQUESTED:
            return None
        return Remembered(known, hooked=False, delivered=self.delivered, reported=self.reported)

    @property
    def request(self) -> Requested:
        """Return what kubelet requested, as far as the runtime reported it."""
        if self.from_events is None:
            return self.first_reported
        return self.from_events if self.hooked else overlay(self.from_events, self.first_reported)

    def add_request(self, requested: Requested) -> None:
        """Add what kubelet requests now to what it requested in earlier events."""
        earlier = self.from_events
        self.from_events = requested if earlier is None else overlay(requested, earlier)

    def forget_reported(self, requested: Requested) -> None:
        """Drop the reported values of what kubelet requests now."""
        if self.reported != NOTHING_REQUESTED:
            self.reported = Requested(
                *(
                    getattr(self.reported, name) if getattr(requested, name) is None else None
                    for name in Requested.__struct_fields__
                )
            )

    def differs_from(self, reported: Requested) -> bool:
        """Return whether a reported value differs from what was requested and delivered."""
        return _differing(reported, self.request, self.delivered) != NOTHING_REQUESTED

    def take_listed(self, reported: Requested) -> Requested:
        """Take the values of a full list, and return those that count as requested from now on.

        These were neither requested nor delivered nor reported before. They may also come from
        another NRI plugin; koordlet's decisions are based on them all the same.
        """
        unseen = NOTHING_REQUESTED
        if self.delivered is not None:
            unseen = _differing(reported, self.request, self.delivered, self.reported)
            if unseen != NOTHING_REQUESTED:
                self.add_request(unseen)
        self.reported = reported
        return unseen


@dataclass(slots=True)
class PodRecords:
    """The runtime's sandboxes and containers of one pod, by id."""

    sandboxes: dict[str, SandboxRecord] = field(default_factory=dict)
    containers: dict[str, ContainerRecord] = field(default_factory=dict)


def _differing(reported: Requested, *known: Requested | None) -> Requested:
    """Return the updatable values of `reported` that differ from the same value of each `known`."""
    return Requested(
        **{
            name: value
            for name in _UPDATABLE
            if (value := getattr(reported, name)) is not None
            and all(each is None or getattr(each, name) != value for each in known)
        }
    )
