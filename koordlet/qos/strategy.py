"""What a QoS strategy is: a pure step from a situation and its own state to a verdict.

A strategy does no I/O and knows no clock but the situation's. What it wants of the kernel it says
as standing claims, which live for `ttl_s` after the step that made them: the claims of a strategy
that dies, stalls or is switched off go, and the original values return. What it wants evicted it
says as shortages, which the evictor checks and carries out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from apis.errors import InputError
from hooks.facts import NodeInputs
from hooks.standing import NOTHING_STANDS, Standing
from hooks.subject import ContainerSubject, HostAppSubject, Pod, Requested
from koordlet.measurement.series import Measurements
from linux.cpus import Cpu


class PodOnNode(msgspec.Struct, frozen=True):
    """A pod and its containers that have a cgroup.

    terminating: its deletion has begun. requested: of the pod's own cgroup, as far as it is known.
    unlisted: kubelet or the API server lists pods, and not this one (yet). What is known is then
    what it was created with: it may have been evicted since, or protected from evictions.
    """

    pod: Pod
    containers: tuple[ContainerSubject, ...] = ()
    terminating: bool = False
    requested: Requested = Requested()
    unlisted: bool = False


class NodeAmounts(msgspec.Struct, frozen=True):
    """What the node has. allocatable: the Node's, by resource name; CPU in milli-cores (batch-cpu
    and mid-cpu too), memory in bytes; empty without an API server. cpus: the CPUs that are online;
    empty while their topology is not known."""

    cpu_milli: int
    memory_bytes: int
    allocatable: Mapping[str, int] = {}
    cpus: tuple[Cpu, ...] = ()


class Situation(msgspec.Struct, frozen=True):
    """All that a step may look at.

    now: seconds of the monotonic clock; measurements have the same moment. wall: seconds since the
    epoch, for people. interval_s: between two samples of a fast series.
    """

    now: float
    wall: float
    inputs: NodeInputs
    node: NodeAmounts
    pods: tuple[PodOnNode, ...]
    host_apps: tuple[HostAppSubject, ...]
    measurements: Measurements
    interval_s: float = 1.0


class Victim(msgspec.Struct, frozen=True):
    """A pod that may be evicted. releases: what its end gives back, in the shortage's unit. rank:
    equal for pods of which an operator prefers none; lower ranks go first."""

    pod: Pod
    releases: int
    rank: tuple[float, ...] = ()


class Shortage(msgspec.Struct, frozen=True):
    """Too little of something, which only evictions end.

    gate: the feature gate of the strategy, upstream's name; part of the event's text.
    resource: what is short, such as cpu, memory, kubernetes.io/batch-cpu. of_requests: the amounts
    are requests; otherwise they are usage. needed: what must be released, milli-cores or bytes.
    numbers: the measurement and the formula, for people.
    victims: in the order in which they shall go, without pods whose deletion has begun. others: the
    other pods whose end releases some of it. They do not go for this shortage, but if they go for
    another one or by themselves, that counts. cool_down_s: the least time between two rounds of
    evictions for this gate.
    """

    gate: str
    resource: str
    of_requests: bool
    needed: int
    numbers: str
    victims: tuple[Victim, ...]
    cool_down_s: float
    others: tuple[Victim, ...] = ()


class Note(msgspec.Struct, frozen=True):
    """A line of the audit log. verbosity: upstream's levels 0..5. obj: the pod as namespace/name,
    "" for the node."""

    verbosity: int
    reason: str
    message: str
    obj: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """The result of a step.

    standing: what is wanted of the kernel until the next step. gauges: figures for metrics and
    `koordctl top`, by series name and labels. summary: what the strategy does now and why, with
    its numbers, one line; "" while it does nothing.
    faults: bad input that cost one gate or one pod its part, while the rest of the step went on.
    unmeasured: the step had no measurement to judge by; claims from before a restart then stay.
    """

    standing: Standing = NOTHING_STANDS
    shortages: tuple[Shortage, ...] = ()
    notes: tuple[Note, ...] = ()
    gauges: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    summary: str = ""
    faults: tuple[InputError, ...] = ()
    unmeasured: bool = False


def _whole(state: Any) -> Any:
    return state


def _nothing(_: NodeInputs) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy as data. `koordlet.qos.strategies.registry.STRATEGIES` lists all of them.

    gates: upstream's feature gates, each with its default; the strategy runs while any of them is
    on. interval_s: between two steps. ttl_s: how long its claims live without another step.
    initial: the state before the first step. step(state, situation) returns the next state and the
    verdict; it may raise InputError for a bad field, and then the last verdict stands.
    kept: the type of what is kept of the state over a restart of the daemon; None for nothing. It
    holds plain values, and its tag is its version: one with another tag is not resumed.
    keep, resume: from the state to what is kept of it, and back; without them it is kept whole.
    lapsed: from the state to that of a step before which none of its claims are in force: the last
    step had none, or they have ended since, as after a stall.
    disabled: why these inputs have it claim nothing, whatever is measured; "" where they do not.
    """

    name: str
    gates: Mapping[str, bool]
    interval_s: float
    ttl_s: float
    initial: Callable[[], Any]
    step: Callable[[Any, Situation], tuple[Any, Verdict]]
    kept: type[msgspec.Struct] | None = None
    keep: Callable[[Any], msgspec.Struct] = _whole
    resume: Callable[[Any], Any] = _whole
    lapsed: Callable[[Any], Any] = _whole
    disabled: Callable[[NodeInputs], str] = _nothing
