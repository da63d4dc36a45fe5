"""What follows from a decision about a container, computed once for all replicas.

The engine gives one mapping of outcomes to all containers of a shape, so the mapping's identity
identifies what was computed before. The reply to a creation waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from hooks.decision import Decision, Outcome, ResourceKey
from hooks.subject import Requested
from koordlet.state.requests_log import members
from linux.resources import Resource
from nri_plugin.replies import in_place_of

_MOST_MADE: Final = 2048
"""Decisions whose consequences are kept; then all are dropped. The engine keeps as many shapes.
About 2 MB, and up to 6 MB where all pods differ: one with four claims takes 2.7 KiB."""


class Consequences(NamedTuple):
    """What a decision about a container with this request leads to.

    outcomes: kept, so that no other mapping can have its identity.
    delivered: the values that the runtime gets in place of kubelet's.
    kept: the line of a new container in the requests log, behind its id.
    directories: (path, mode) of host directories that the runtime mounts.
    """

    outcomes: Mapping[ResourceKey, Outcome]
    requested: Requested
    delivered: Requested
    kept: bytes
    directories: tuple[tuple[str, int], ...]


class KnownConsequences:
    """Computes consequences, and keeps them. Belongs to the event loop."""

    def __init__(self) -> None:
        self._made: dict[int, Consequences] = {}

    def of(self, requested: Requested, decision: Decision) -> Consequences:
        """Return the consequences of a decision about a container with this request."""
        outcomes = decision.outcomes
        known = self._made.get(id(outcomes))
        if known is not None and known.outcomes is outcomes and known.requested == requested:
            return known
        delivered = in_place_of(requested, decision)
        made = Consequences(
            outcomes,
            requested,
            delivered,
            members(requested, hooked=True, delivered=delivered),
            tuple(
                (key, outcome.value)
                for (resource, key), outcome in outcomes.items()
                if resource is Resource.HOST_DIRECTORY and isinstance(outcome.value, int)
            ),
        )
        if len(self._made) >= _MOST_MADE:
            self._made.clear()
        self._made[id(outcomes)] = made
        return made
