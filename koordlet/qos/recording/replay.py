"""Makes the strategies' decisions again from a recording, also under another NodeSLO. No I/O but
reading the files.

The store, the runner and the strategies are the daemon's own. The first rounds of a recording lack
what was measured before it, so decisions that look back over a window agree with the daemon's once
that window has passed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from apis.nodeslo import NodeSLOSpec
from hooks.claim import Claim
from hooks.facts import NodeInputs
from hooks.standing import Standing
from hooks.subject import HostAppSubject, PodSubject
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store
from koordlet.qos.board import Board, Lease
from koordlet.qos.recording import frames
from koordlet.qos.recording.recorder import files, name
from koordlet.qos.runner import Runner
from koordlet.qos.strategy import NodeAmounts, PodOnNode, Situation, Strategy
from service.events import Events

Plain = dict[str, Any]

_TABLE: Final = "recording"
_RETENTION_S: Final = 1800.0
"""The longest window of a strategy that a replay can look back over. Chosen: that of NodeMetric's
longest report."""
_METRICS: Final = {metric.value: metric for metric in Metric}


_Context = frames.Start | frames.Inputs | frames.Pods | frames.Amounts | frames.Names


class Replayed(msgspec.Struct, frozen=True):
    """One round's decision of one strategy.

    claims: one line for each standing claim. evictions: the gate and the resource of each shortage.
    """

    wall: float
    strategy: str
    summary: str
    claims: tuple[str, ...]
    evictions: tuple[str, ...]


class Reading(msgspec.Struct):
    """What reading a recording met. damaged: frames that were left out."""

    rounds: int = 0
    damaged: int = 0
    unusable: list[str] = msgspec.field(default_factory=list)
    """Files that are not recordings, with the reason."""


def paths_of(path: str) -> list[str]:
    """Return the files of a recording, oldest first: of a directory, or the one that is named.

    Raises OSError, and ValueError for a directory without any.
    """
    if not os.path.isdir(path):
        return [path]
    numbers = sorted(files(path))
    if not numbers:
        raise ValueError(
            f"{path} has no files of a recording ({name(1)} and so on);"
            " koordlet writes them with recording.enabled: true"
        )
    return [f"{path}/{name(number)}" for number in numbers]


def replay(
    paths: Iterable[str],
    strategies: Sequence[Strategy],
    *,
    slo: NodeSLOSpec | None = None,
    reading: Reading | None = None,
) -> Iterator[tuple[Replayed, ...]]:
    """Yield the decisions of each round, one of each strategy that was stepped in it.

    slo: in the place of the recorded NodeSLO. reading: filled on the way. Raises OSError.
    """
    reading = reading if reading is not None else Reading()
    machine = _Replay(strategies, slo)
    for path in paths:
        try:
            with open(path, "rb") as file:
                for frame in frames.unpack(file):
                    if frame is None:
                        reading.damaged += 1
                    elif isinstance(frame, frames.Round):
                        decided = machine.round(frame)
                        if decided is None:
                            reading.damaged += 1
                        else:
                            reading.rounds += 1
                            yield decided
                    else:
                        machine.take(frame)
        except frames.NotARecording as error:
            reading.unusable.append(f"{path}: {error}")


class _Replay:
    """The state of a replay."""

    def __init__(self, strategies: Sequence[Strategy], slo: NodeSLOSpec | None) -> None:
        self._strategies = strategies
        self._gates = {each.name: each.gates for each in strategies}
        self._slo = slo
        self._inputs: NodeInputs | None = None
        self._pods: tuple[PodOnNode, ...] = ()
        self._apps: tuple[HostAppSubject, ...] = ()
        self._known: Mapping[str, str] = {}
        self._node: NodeAmounts | None = None
        self._interval_s = 1.0
        self._names: tuple[Series, ...] = ()
        self._now = float("-inf")
        self._restarted = False
        self._begin()

    def _begin(self) -> None:
        """Forget what was measured and decided, as after a restart of the machine."""
        self._store = Store()
        self._store.add_table(_TABLE, interval_s=self._interval_s, retention_s=_RETENTION_S)
        self._board, self._runner = self._deciding()

    def _deciding(self) -> tuple[Board, Runner]:
        board = Board([each.name for each in self._strategies], lambda standing: None)
        return board, Runner(
            self._strategies, board, Events(), intervals={}, clock=lambda: self._now
        )

    def _resume(self, inputs: NodeInputs, now: float) -> None:
        """Go on as after a restart of the daemon, which keeps samples, claims and states."""
        leases, states = self._board.leases, self._runner.kept_states
        self._board, self._runner = self._deciding()
        ttl_s = self._runner.times_to_live(inputs.settings)
        self._runner.resume({name: state for name, state in states.items() if name in ttl_s})
        self._board.resume(
            {
                name: Lease(lease.standing, now + ttl_s[name], resumed=True)
                for name, lease in leases.items()
                if name in ttl_s
            }
        )

    def take(self, frame: _Context) -> None:
        """Note what the following rounds are about."""
        match frame:
            case frames.Start():
                self._restarted = True
            case frames.Inputs(inputs):
                if self._slo is not None:
                    inputs = msgspec.structs.replace(inputs, slo=self._slo)
                self._inputs = inputs
            case frames.Pods(pods, apps):
                self._pods, self._apps = pods, apps
                self._known = names_of(pods)
            case frames.Amounts(node, interval_s):
                self._node, self._interval_s = node, interval_s
            case frames.Names(names):
                # No strategy of this version reads a metric of a later one.
                self._names = tuple(
                    Series(_METRICS.get(metric, Metric.NODE_CPU), of, detail)
                    if metric in _METRICS
                    else Series(Metric.NODE_CPU, metric, "unknown")
                    for metric, of, detail in names
                )

    def round(self, frame: frames.Round) -> tuple[Replayed, ...] | None:
        """Decide one round; None for one that does not fit what came before it."""
        inputs, node = self._inputs, self._node
        if inputs is None or node is None or len(frame.values) != 8 * len(self._names):
            return None
        if frame.now <= self._now:
            self._begin()  # the machine was restarted
        elif self._restarted:
            self._resume(inputs, frame.now)
        self._restarted = False
        self._now = frame.now
        values = np.frombuffer(frame.values, dtype="<f8")
        samples = {
            series: float(value)
            for series, value in zip(self._names, values, strict=True)
            if np.isfinite(value)
        }
        self._store.record(_TABLE, frame.now, samples)
        self._board.expire(frame.now)
        situation = Situation(
            now=frame.now,
            wall=frame.wall,
            inputs=inputs,
            node=node,
            pods=self._pods,
            host_apps=self._apps,
            measurements=self._store.view(frame.now),
            interval_s=self._interval_s,
        )
        outcome = self._runner.run(situation, lambda: inputs.settings)
        decided = []
        for status in self._runner.statuses:
            if not status.on or status.stepped_at != frame.now:
                continue
            lease = self._board.lease(status.name)
            decided.append(
                Replayed(
                    wall=frame.wall,
                    strategy=status.name,
                    summary=status.problem or status.summary,
                    claims=(claim_lines(lease.standing, self._known) if lease is not None else ()),
                    evictions=tuple(
                        f"{short.gate} for {short.resource}"
                        for short in outcome.shortages
                        if short.gate in self._gates[status.name]
                    ),
                )
            )
        return tuple(decided)


def names_of(pods: Iterable[PodOnNode]) -> dict[str, str]:
    """Return the key of each pod and container with its name; keys have UIDs and ids."""
    names: dict[str, str] = {}
    for one in pods:
        name = f"{one.pod.namespace}/{one.pod.name}"
        names[PodSubject(one.pod).key] = f"pod {name}"
        names |= {each.key: f"container {name}/{each.name}" for each in one.containers}
    return names


def claim_lines(standing: Standing, names: Mapping[str, str]) -> tuple[str, ...]:
    """Return each claim as "subject resource op value", sorted. names: of subjects, by key."""

    def line(subject: str, claim: Claim) -> str:
        value = f"x {claim.factor:g}" if claim.value == 0 and claim.factor != 1.0 else claim.value
        return f"{names.get(subject, subject)} {claim.resource} {claim.op} {value}"

    lines = [line(key, claim) for key, claims in standing.by_subject.items() for claim in claims]
    lines += [
        line(f"each {kube_qos} {level}", claim)
        for (level, kube_qos), claims in standing.by_class.items()
        for claim in claims
    ]
    return tuple(sorted(lines))


def changes(rounds: Iterable[tuple[Replayed, ...]]) -> Iterator[Replayed]:
    """Yield the decisions that differ from the strategy's one before, in what they want."""
    before: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for decided in rounds:
        for each in decided:
            wants = each.claims, each.evictions
            if before.get(each.strategy, ((), ())) != wants:
                yield each
            before[each.strategy] = wants


class Compared(msgspec.Struct, frozen=True):
    """A moment at which two replays of one strategy want different things."""

    wall: float
    strategy: str
    one: Replayed
    other: Replayed


def compared(
    one: Iterable[tuple[Replayed, ...]],
    other: Iterable[tuple[Replayed, ...]],
    *,
    counted: Callable[[bool], None] = lambda same: None,
) -> Iterator[Compared]:
    """Yield where two replays of one recording begin to differ, or differ in another way.

    counted: called for each decision with whether both replays want the same.
    """
    shown: dict[str, tuple[object, object]] = {}
    for left, right in zip(one, other, strict=True):
        by_name = {each.strategy: each for each in right}
        for each in left:
            twin = by_name.get(each.strategy)
            if twin is None:
                continue
            wants = (each.claims, each.evictions), (twin.claims, twin.evictions)
            counted(wants[0] == wants[1])
            if wants[0] != wants[1] and shown.get(each.strategy) != wants:
                yield Compared(each.wall, each.strategy, each, twin)
            shown[each.strategy] = wants
