"""A decision: for one subject, one value for each resource, and which claims led to it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hooks.claim import Claim
from linux.resources import Resource, Value

ResourceKey = tuple[Resource, str]
"""A resource and its key ("" for resources without one)."""


class Outcome(msgspec.Struct, frozen=True):
    """The value of one resource.

    winner: the claim that set the value, or the first modifier of kubelet's request.
    modifiers: claims that shaped it (divide, within, at-least), in order of application.
    losers: claims without effect: overruled, or bounds that the value keeps anyway.
    """

    value: Value
    winner: Claim
    modifiers: tuple[Claim, ...] = ()
    losers: tuple[Claim, ...] = ()

    @property
    def degraded(self) -> str:
        return self.winner.degraded


class Fault(msgspec.Struct, frozen=True):
    """A policy that could not claim for this subject: bad input, or a defect of the policy.

    input_error: the input is bad, and the fault stays until the object changes.
    """

    policy: str
    message: str
    input_error: bool


class Decision(msgspec.Struct, frozen=True):
    """All outcomes for one subject. generation: number of the engine that decided."""

    outcomes: Mapping[ResourceKey, Outcome]
    faults: tuple[Fault, ...] = ()
    generation: int = 0

    def value(self, resource: Resource, key: str = "") -> Value | None:
        """Return the decided value, or None when no policy claims the resource."""
        outcome = self.outcomes.get((resource, key))
        return None if outcome is None else outcome.value
