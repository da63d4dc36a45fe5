"""What a collector is, and what it is given in a round.

A collector reads the kernel and returns samples. It does no waiting and starts no process; the
sampler calls it in the sampling thread at its interval and stores what it returns. A collector that
raises loses its own samples of this round, and no other collector's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from koordlet.measurement.kernel_files import KernelFiles
from koordlet.measurement.series import Metric, Series
from linux.cgroup_paths import Layout

_K = TypeVar("_K")
_V = TypeVar("_V")


class ContainerTarget(msgspec.Struct, frozen=True):
    """A container with its cgroup. id: without a scheme. cgroup: relative to a hierarchy's root."""

    id: str
    cgroup: str


class GroupTarget(NamedTuple):
    """The cgroup of a pod or container. of: the pod's uid or the container's id."""

    is_pod: bool
    of: str
    cgroup: str


class PodTarget(msgspec.Struct, frozen=True, dict=True):
    """A pod with its cgroup.

    best_effort: its QoS label is BE. batch_cpu_request_milli: the sum of its containers' requests
    of kubernetes.io/batch-cpu; 0 for a pod that has completed, which requests nothing any more.
    """

    uid: str
    cgroup: str
    containers: tuple[ContainerTarget, ...] = ()
    best_effort: bool = False
    batch_cpu_request_milli: int = 0

    @cached_property
    def groups(self) -> tuple[GroupTarget, ...]:
        """The pod and its containers, as far as they have a cgroup."""
        found = [GroupTarget(True, self.uid, self.cgroup)]
        found += [GroupTarget(False, each.id, each.cgroup) for each in self.containers]
        return tuple(each for each in found if each.cgroup)


class HostAppTarget(msgspec.Struct, frozen=True):
    """A host application with its cgroup."""

    name: str
    cgroup: str


class Targets(msgspec.Struct, frozen=True, dict=True):
    """What is measured beside the node itself.

    A new value for each change; collectors compare by identity. layout: None until it is known.
    """

    layout: Layout | None = None
    pods: tuple[PodTarget, ...] = ()
    host_apps: tuple[HostAppTarget, ...] = ()

    @cached_property
    def groups(self) -> tuple[GroupTarget, ...]:
        """The pods and containers that have a cgroup, each pod before its containers.

        Those of an unchanged pod are the same objects, so that collectors find them quickly.
        """
        return tuple(group for pod in self.pods for group in pod.groups)


class Recent(Protocol):
    """The newest samples, as of the round."""

    def latest(self, series: Series, *, within_s: float) -> float | None:
        """Return the newest sample of one series that is at most `within_s` old."""
        ...

    def latest_of(self, metric: Metric, *, within_s: float) -> Mapping[tuple[str, str], float]:
        """Return the newest sample of each object, by `Series.of` and `Series.detail`."""
        ...


class Unavailable(Exception):
    """The kernel or the node does not offer what a collector reads; the message says what."""


def layout_with(targets: Targets, *controllers: str) -> Layout:
    """Return the layout; Unavailable if it is not known or has no hierarchy for a controller."""
    layout = targets.layout
    if layout is None:
        raise Unavailable("the cgroup tree is not known yet")
    for controller in controllers:
        if not layout.has(controller):
            raise Unavailable(f"cgroup v1 has no hierarchy for {controller} here")
    return layout


def followed(
    known: Mapping[_K, _V],
    wanted: Iterable[_K],
    make: Callable[[_K], _V],
    close: Callable[[_V], None],
) -> dict[_K, _V]:
    """Return a value for each wanted key, in their order: the known one, or one that is made.

    Known values of other keys are closed.
    """
    found: dict[_K, _V] = {}
    for key in wanted:
        if key not in found:
            found[key] = known[key] if key in known else make(key)
    for key, value in known.items():
        if key not in found:
            close(value)
    return found


def _go_on() -> None:
    """Do not step aside: for the rounds of tests."""


@dataclass(frozen=True, slots=True)
class Round:
    """One call of a collector.

    now: the moment under which samples are stored, seconds of the monotonic clock.
    clock: the same clock, for the moment at which a counter is read.
    measured: what this round's collectors so far and former rounds have stored.
    step_aside: to be called for each group, so that hook replies get the interpreter.
    problem: reports what was left out, while the other samples are good.
    """

    now: float
    targets: Targets
    files: KernelFiles
    measured: Recent
    clock: Callable[[], float] = time.monotonic
    step_aside: Callable[[], None] = _go_on
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        self.problems.append(text)


class Collector(Protocol):
    """See the module. Belongs to the sampling thread.

    name: in status. interval_s: between two samples. retention_s: how long samples are kept.
    gate: upstream's feature gate that switches it on; None: always on.
    """

    @property
    def name(self) -> str: ...

    @property
    def interval_s(self) -> float: ...

    @property
    def retention_s(self) -> float: ...

    @property
    def gate(self) -> str | None: ...

    def sample(self, round_: Round) -> Mapping[Series, float]:
        """Return the samples of this round; empty while there are none yet.

        Raises Unavailable, OSError or ValueError when there can be none.
        """
        ...

    def close(self) -> None:
        """Release what is open. A later `sample` starts again."""
        ...
