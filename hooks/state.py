"""The states of a desired value: whether it is in force, and if not, why."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """The state of a desired value."""

    APPLIED = "applied"
    DEGRADED = "degraded"  # in force, but less than desired: the detail says how
    UNSUPPORTED = "unsupported"  # this kernel has no such thing
    BLOCKED = "blocked"  # another writer or a kernel rule prevents it
    FAILED = "failed"  # the kernel refused; tried again after a back-off
    PENDING = "pending"  # not tried yet: no such group, or the write budget is used up
