"""The words of the table: what a behaviour arranges, does and expects.

Paths are relative to a group of the test's own: "g/cpu.shares" is the file of group g. On v1 the
file's name tells the hierarchy; files that every hierarchy has are written "cpuset:g/cgroup.procs"
(without a prefix: cpu). Texts may hold {pid} (the last process that was started), {all}, {first},
{last} (CPUs), {beyond} (the first number that no CPU has), {nodes} and {quota+}.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Make:
    """Make the group; expects `error` (0: it is made)."""

    group: str
    error: int = 0


@dataclass(frozen=True, slots=True)
class Remove:
    group: str
    error: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """One write; expects `error` (0: accepted)."""

    path: str
    text: str
    error: int = 0


@dataclass(frozen=True, slots=True)
class WriteSoon:
    """A write that is accepted within a second; until then it may be refused with `meanwhile`."""

    path: str
    text: str
    meanwhile: int


@dataclass(frozen=True, slots=True)
class Reads:
    """The file reads as `text`, without the last newline."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class ReadFails:
    path: str
    error: int


@dataclass(frozen=True, slots=True)
class HasLine:
    """The file has this line."""

    path: str
    line: str


@dataclass(frozen=True, slots=True)
class Exists:
    path: str


@dataclass(frozen=True, slots=True)
class Missing:
    path: str


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process outside the test's groups; {pid} is its pid from here on."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """The last process touches this much memory."""

    mebibytes: int


@dataclass(frozen=True, slots=True)
class Outgrow:
    """The last process touches this much memory and does not get it."""

    mebibytes: int


@dataclass(frozen=True, slots=True)
class Ends:
    """The last process is killed within a few seconds."""


Step = (
    Make | Remove | Write | WriteSoon | Reads | ReadFails | HasLine | Exists | Missing | Start
    | Allocate | Outgrow | Ends
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Behaviour:
    """One row. `version`: of cgroup. `since`: the kernel that has it."""

    name: str
    version: int
    steps: tuple[Step, ...]
    since: tuple[int, int] = (0, 0)
    before: tuple[int, int] = (99, 0)


def on_v1(
    name: str, *steps: Step, since: tuple[int, int] = (0, 0), before: tuple[int, int] = (99, 0)
) -> Behaviour:
    return Behaviour(name, 1, steps, since, before)


def on_v2(
    name: str, *steps: Step, since: tuple[int, int] = (0, 0), before: tuple[int, int] = (99, 0)
) -> Behaviour:
    return Behaviour(name, 2, steps, since, before)
