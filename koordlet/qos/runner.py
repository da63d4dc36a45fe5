"""Steps the strategies that are due, and keeps their states and verdicts.

A strategy is isolated: one that raises keeps its last claims until its lease on the board ends, is
counted and reported, and is stepped again at its next turn. Bad input (`InputError`) is not a
defect: the last verdict then stays in force for as long as the input is bad, as with policies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from apis.errors import InputError, InputErrors, printable
from hooks.facts import Settings
from koordlet.qos.board import Board, Lease, checked
from koordlet.qos.strategy import Note, Shortage, Situation, Strategy, Verdict
from service.events import Events, Severity
from service.repeats import Repeats

_LOG = logging.getLogger("koordlet.qos")

_EARLY: Final = 0.5
"""A strategy is due when its turn is less than this part of a sampling interval away: rounds jitter
by milliseconds, and waiting for the next one would double the interval of the fastest."""
_MOST_OF_PROBLEM: Final = 300
"""Characters of an error that `status` shows: about three lines."""


class StrategyStatus(msgspec.Struct, frozen=True):
    """A strategy's state, for `koordctl status` and metrics.

    why: the gates, when it is off. stepped_at: seconds of the monotonic clock; None before the
    first step. problem: why the last step failed, or its bad input; "" for none. leased: its claims
    are in force. took_s: the time of the last step.
    """

    name: str
    on: bool
    why: str
    interval_s: float
    ttl_s: float
    stepped_at: float | None = None
    steps: int = 0
    failures: int = 0
    problem: str = ""
    summary: str = ""
    leased: bool = False
    took_s: float = 0.0
    worst_s: float = 0.0


class Outcome(NamedTuple):
    """What the steps of one round demand besides claims; notes with their strategy's name."""

    shortages: tuple[Shortage, ...]
    notes: tuple[tuple[str, Note], ...]


NOTHING: Final = Outcome((), ())


class _Run:
    """The mutable state of one strategy."""

    def __init__(self, strategy: Strategy, interval_s: float) -> None:
        self.strategy = strategy
        self.interval_s = interval_s
        self.ttl_s = strategy.ttl_s * interval_s / strategy.interval_s
        self.why = gates_off(strategy, Settings())
        self.status = StrategyStatus(
            name=strategy.name,
            on=not self.why,
            why=self.why,
            interval_s=interval_s,
            ttl_s=self.ttl_s,
        )
        self.reset()

    def reset(self) -> None:
        """Forget everything, as before the first step."""
        self.state: Any = None
        self.begun = False
        self.due_at = float("-inf")
        self.verdict = Verdict()

    def note(self, **fields: Any) -> None:
        self.status = msgspec.structs.replace(self.status, **fields)


class Runner:
    """See the module. `run` belongs to the sampling thread; the rest to any.

    intervals: strategy -> seconds between two steps, where the configuration gives another value
        than the strategy; its time to live changes in proportion.
    step_aside: called after each step, so that hook replies get the interpreter.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        board: Board,
        events: Events,
        *,
        intervals: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
        step_aside: Callable[[], None] = lambda: None,
    ) -> None:
        self._board = board
        self._events = events
        self._clock = clock
        self._step_aside = step_aside
        self._repeats = Repeats(clock=clock)
        self._runs = {
            each.name: _Run(each, intervals.get(each.name, each.interval_s)) for each in strategies
        }

    @property
    def statuses(self) -> tuple[StrategyStatus, ...]:
        leases = self._board.leases
        return tuple(_with_lease(run.status, leases.get(name)) for name, run in self._runs.items())

    def times_to_live(self, settings: Settings) -> Mapping[str, float]:
        """Return for how many seconds the claims of each strategy live that these settings run."""
        return {
            name: run.ttl_s
            for name, run in self._runs.items()
            if not gates_off(run.strategy, settings)
        }

    @property
    def kept_types(self) -> Mapping[str, type[msgspec.Struct]]:
        """The types of what outlasts a restart of the states, by strategy."""
        return {
            name: run.strategy.kept
            for name, run in self._runs.items()
            if run.strategy.kept is not None
        }

    @property
    def kept_states(self) -> Mapping[str, msgspec.Struct]:
        """What outlasts a restart of the present states, by strategy."""
        return {
            name: run.strategy.keep(run.state)
            for name, run in self._runs.items()
            if run.begun and run.strategy.kept is not None
        }

    def resume(self, states: Mapping[str, msgspec.Struct]) -> None:
        """Go on from the states of before a restart. Before the first step of any strategy."""
        for name, state in states.items():
            run = self._runs[name]
            run.state = run.strategy.resume(state)
            run.begun = True

    def gauges(self, now: float) -> Iterable[tuple[str, tuple[tuple[str, str], ...], float]]:
        """Return (name, labels, value) of the verdicts whose time to live has not passed."""
        for run in self._runs.values():
            at = run.status.stepped_at
            if at is not None and now - at <= run.ttl_s:
                for (name, labels), value in run.verdict.gauges.items():
                    yield name, labels, value

    def settings_changed(self, settings: Settings) -> None:
        """End the claims of strategies whose gates are all off now."""
        for run in self._runs.values():
            if gates_off(run.strategy, settings):
                self._board.drop(run.strategy.name)

    def run(self, situation: Situation, settings: Callable[[], Settings]) -> Outcome:
        """Step every strategy that is due.

        settings: those in force now. A gate may be switched off while a strategy is stepped, and
        then the claims must not come back with the end of the step.
        """
        shortages: list[Shortage] = []
        notes: list[tuple[str, Note]] = []
        for name, run in self._runs.items():
            why = gates_off(run.strategy, situation.inputs.settings)
            if why:
                if run.begun or why != run.why:
                    run.why = why
                    run.reset()
                    self._board.drop(name)
                    run.note(on=False, why=why, problem="", summary="", stepped_at=None)
                continue
            if run.why:
                run.why = ""
                run.note(on=True, why="")
            if situation.now < run.due_at - _EARLY * situation.interval_s:
                continue
            verdict = self._step(run, situation)
            self._step_aside()
            if verdict is None:
                continue
            shortages += verdict.shortages
            notes += [(name, note) for note in verdict.notes]
            if gates_off(run.strategy, settings()):
                self._board.drop(name)
        return Outcome(tuple(shortages), tuple(notes)) if shortages or notes else NOTHING

    def _step(self, run: _Run, situation: Situation) -> Verdict | None:
        """Step one strategy and publish its claims; return the verdict, None without one."""
        name = run.strategy.name
        run.due_at = situation.now + run.interval_s
        started = self._clock()
        held = self._board.lease(name) is not None
        try:
            if not run.begun:
                run.state = run.strategy.initial()
                run.begun = True
            elif not held:
                run.state = run.strategy.lapsed(run.state)
            state, verdict = run.strategy.step(run.state, situation)
            standing, problems = checked(verdict.standing)
        except (InputError, InputErrors) as error:
            self._events.add(
                "bad-input", f"strategy {name}", f"{error}; its last claims stay in force"
            )
            self._board.renew(name, until=situation.now + run.ttl_s)
            run.note(problem=str(error)[:_MOST_OF_PROBLEM])
            return None
        except Exception as error:  # noqa: BLE001 - a strategy is isolated, and its fault reported
            self._failed(run, error)
            return None
        took_s = self._clock() - started
        lease = self._board.lease(name)
        if held and lease is None:
            # It stalled, or was switched off: what it decided builds on claims that have ended.
            return None
        if verdict.unmeasured and lease is not None and lease.resumed:
            # Claims and state of before the restart stay until a step can judge.
            verdict = msgspec.structs.replace(verdict, notes=())
        else:
            run.state = state
            self._board.publish(name, standing, until=situation.now + run.ttl_s)
        run.verdict = verdict
        for problem in problems:
            self._events.add(
                "policy-fault",
                f"strategy {name}",
                f"a claim that cannot be carried out is dropped: {problem}",
                severity=Severity.ERROR,
            )
        for fault in verdict.faults:
            self._events.add("bad-input", fault.obj, f"{name}: {fault}")
        run.note(
            stepped_at=situation.now,
            steps=run.status.steps + 1,
            problem="; ".join([*problems, *map(str, verdict.faults)])[:_MOST_OF_PROBLEM],
            summary=verdict.summary,
            took_s=took_s,
            worst_s=max(run.status.worst_s, took_s),
        )
        return verdict

    def _failed(self, run: _Run, error: Exception) -> None:
        """Count a defect; the claims stay until the lease ends."""
        name = run.strategy.name
        problem = printable(f"{type(error).__name__}: {error}")[:_MOST_OF_PROBLEM]
        run.note(failures=run.status.failures + 1, problem=problem)
        left_out = self._repeats.due((name, type(error).__name__))
        if left_out is not None:
            _LOG.error(
                "strategy %s failed; its claims end in %g s unless a later step succeeds",
                name,
                run.ttl_s,
                exc_info=error,
                extra={"same_failure_not_logged": left_out} if left_out else None,
            )


def _with_lease(status: StrategyStatus, lease: Lease | None) -> StrategyStatus:
    if lease is None:
        return status
    summary = status.summary
    if lease.resumed:
        waits = "its claims of before the restart stay until it can judge"
        summary = f"{waits}: {summary}" if summary else waits
    return msgspec.structs.replace(status, leased=True, summary=summary)


def gates_off(strategy: Strategy, settings: Settings) -> str:
    """Return why the strategy is off: all its gates are; "" while any is on."""
    if any(settings.gate(gate, default=default) for gate, default in strategy.gates.items()):
        return ""
    names = ", ".join(strategy.gates)
    return (
        f"feature gate {names}=false"
        if len(strategy.gates) == 1
        else f"feature gates {names}: all false"
    )
