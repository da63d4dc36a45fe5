"""Hardware counters of a cgroup: perf_event_open(2) with the cgroup flag.

The kernel counts per CPU, so a group needs one set of counters on each. The counters of a set form
a perf group: they count during the same time, which makes their ratio exact. While more counters
are open than the CPU has, the kernel takes turns and says how long a set really ran.
Numbers and layouts: linux/perf_event.h; docs/facts/kernel.md, "Performance counters".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple


class Event(NamedTuple):
    """What is counted: perf_event_attr's type and config."""

    type: int
    config: int


CYCLES: Final = Event(0, 0)  # PERF_TYPE_HARDWARE, PERF_COUNT_HW_CPU_CYCLES
INSTRUCTIONS: Final = Event(0, 1)  # PERF_COUNT_HW_INSTRUCTIONS

_SYSCALL: Final = {"x86_64": 298, "aarch64": 241}
_FLAG_CGROUP: Final = 1 << 2
_FLAG_CLOEXEC: Final = 1 << 3
_READ_FORMAT: Final = 1 | 2 | 8  # times enabled and running, and all members of the group
_ATTR_BYTES: Final = 112  # PERF_ATTR_SIZE_VER5: kernels from 4.1 on know it

_FORBIDDEN: Final = (
    "this process may not count: it needs CAP_PERFMON or CAP_SYS_ADMIN, and no filter of system "
    "calls that refuses perf_event_open (docs/measurement.md)"
)
_REASONS: Final = {
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.ENOENT: "this machine has no such counters; virtual machines often have none",
    errno.ENODEV: "this machine has no such counters; virtual machines often have none",
    errno.EOPNOTSUPP: "this machine's counters cannot count these events",
    errno.ENOSYS: "this kernel has no performance counters (CONFIG_PERF_EVENTS)",
}


class NoCounters(OSError):
    """This process cannot count on this machine, whatever the cgroup. strerror says why."""


class Counted(NamedTuple):
    """A set's counters on one CPU. enabled_ns, running_ns: how long the group was on this CPU, and
    how long of that the set counted."""

    enabled_ns: int
    running_ns: int
    values: tuple[int, ...]

    def scaled(self) -> tuple[float, ...]:
        """Return the values as if the set had counted all the time; zeros if it never did."""
        if not self.running_ns or self.running_ns >= self.enabled_ns:
            return tuple(map(float, self.values))
        factor = self.enabled_ns / self.running_ns
        return tuple(value * factor for value in self.values)


def parse_set(content: bytes) -> Counted:
    """Parse what read(2) gives for a set: number of members, both times, the members' values."""
    (members,) = struct.unpack_from("=Q", content)
    enabled, running, *values = struct.unpack_from(f"={2 + members}Q", content, 8)
    return Counted(enabled, running, tuple(values))


class CgroupCounters:
    """Counters of one cgroup on several CPUs, counting from now until `close`.

    directory: the cgroup's, on this machine: of the v1 hierarchy perf_event, or of v2. A CPU that
    went offline is left out. Raises NoCounters, or OSError (ENOENT: the group is gone); then
    nothing stays open.
    """

    def __init__(self, directory: str, cpus: Sequence[int], events: Sequence[Event]) -> None:
        self._leaders: list[int] = []
        self._members: list[int] = []
        group = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        offline: OSError | None = None
        try:
            for cpu in cpus:
                try:
                    self._leaders.append(_open(events[0], group, cpu, -1))
                except OSError as error:
                    if error.errno != errno.ENODEV:
                        raise
                    offline = error
                    continue
                leader = self._leaders[-1]
                self._members += [_open(event, group, cpu, leader) for event in events[1:]]
            if offline is not None and not self._leaders:
                raise offline
        except OSError as error:
            self.close()
            if error.errno not in _REASONS or not os.path.isdir(directory):
                raise  # the group went while its descriptor was open: ENOENT too
            raise NoCounters(error.errno, _REASONS[error.errno]) from error
        finally:
            os.close(group)
        self._bytes = 8 * (3 + len(events))

    def read(self) -> tuple[float, ...]:
        """Return each event's scaled count, summed over the CPUs."""
        counted = [parse_set(os.read(leader, self._bytes)).scaled() for leader in self._leaders]
        return tuple(map(sum, zip(*counted, strict=True)))

    def close(self) -> None:
        """Stop counting. Later calls do nothing."""
        # Members first: a member whose leader is gone would go on as a set of its own.
        for descriptor in (*self._members, *self._leaders):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._members, self._leaders = [], []


def _open(event: Event, group: int, cpu: int, leader: int) -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"perf_event_open is not known on {platform.machine()}")
    attributes = struct.pack(
        "=IIQQQQ", event.type, _ATTR_BYTES, event.config, 0, 0, _READ_FORMAT
    ).ljust(_ATTR_BYTES, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_char_p(attributes),
        ctypes.c_int(group),
        ctypes.c_int(cpu),
        ctypes.c_int(leader),
        ctypes.c_ulong(_FLAG_CGROUP | _FLAG_CLOEXEC),
    )
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"perf_event_open on CPU {cpu}")
    return int(descriptor)
