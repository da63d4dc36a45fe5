"""The engine in force: rebuilt when an object, a fact or a setting changes, and swapped as a whole.

Changes come in bursts (a NodeSLO may change ten times a second), so a rebuild waits a moment and
takes all of them at once. Rules whose inputs did not change are kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hooks.engine import Engine, PolicyState
from hooks.facts import NodeInputs
from hooks.policies import BUILTIN
from hooks.policy import OffBecause, Policy
from service.events import Events, Severity

_LOG = logging.getLogger("koordlet.decisions.rules")


class Rules:
    """Owns the engine and its inputs. Belongs to the event loop."""

    def __init__(
        self, inputs: NodeInputs, events: Events, swapped: Callable[[Engine], None], *, delay: float
    ) -> None:
        """swapped: called after each swap. delay: how long changes are gathered, in seconds."""
        self._events = events
        self._swapped = swapped
        self._delay = delay
        self._inputs = inputs
        self._site: tuple[Policy, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._problems: dict[str, str] = {}
        self.builds = 0
        self.last_build_s = 0.0
        self.engine = Engine.build(BUILTIN, inputs)
        self._tell_problems()

    @property
    def inputs(self) -> NodeInputs:
        """The newest inputs, even if the engine is not built from them yet."""
        return self._inputs

    @property
    def site_policies(self) -> tuple[Policy, ...]:
        return self._site

    def change(self, **inputs: Any) -> None:
        """Change some of the inputs (fields of `NodeInputs`); the engine follows soon."""
        changed = msgspec.structs.replace(self._inputs, **inputs)
        if changed != self._inputs:
            self._inputs = changed
            self._soon()

    def change_site_policies(self, policies: Sequence[Policy]) -> None:
        """Replace the site policies."""
        if tuple(policies) != self._site:
            self._site = tuple(policies)
            self._soon()

    def build_now(self) -> None:
        """Rebuild and swap at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        started = time.perf_counter()
        self.engine = Engine.build((*BUILTIN, *self._site), self._inputs, previous=self.engine)
        self.builds += 1
        self.last_build_s = time.perf_counter() - started
        self._tell_problems()
        self._swapped(self.engine)

    def states(self) -> Mapping[str, tuple[str, str]]:
        """Return policy -> ("on", "off" or "degraded", why)."""
        return {state.policy.name: policy_state(state) for state in self.engine.states}

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.build_now()

    def _tell_problems(self) -> None:
        problems = {state.policy.name: state.problem for state in self.engine.states}
        for policy, problem in problems.items():
            if problem and problem != self._problems.get(policy):
                kept = self.engine.state(policy)
                consequence = (
                    "its last good rule stays in force"
                    if kept is not None and kept.active
                    else "the policy is off"
                )
                self._events.add(
                    "bad-rule",
                    f"policy {policy}",
                    f"{problem}; {consequence}",
                    severity=Severity.ERROR,
                )
        self._problems = problems


def policy_state(state: PolicyState) -> tuple[str, str]:
    """Return ("on", "off" or "degraded", why)."""
    if state.off is not None:
        because, detail = state.off.because, state.off.detail
        if detail and because in (OffBecause.GATE, OffBecause.NODESLO):
            return "off", detail  # which names the gate or the field
        return "off", f"{because}: {detail}".rstrip(": ")
    try:
        degraded = state.policy.degraded(state.rule)
    except Exception as error:  # noqa: BLE001 - a policy is isolated, and its fault is shown
        degraded = f"{type(error).__name__}: {error}"
    why = "; ".join(part for part in (degraded, state.problem) if part)
    return ("degraded" if degraded else "on"), why
