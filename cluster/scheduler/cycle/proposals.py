"""Nodes that a preemption could free, as extenders are asked about them and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proposal:
    """The pods that would be evicted from one node.

    victims: UID -> namespace/name, the most important first. violations: how many of the evictions
    go beyond a PodDisruptionBudget.
    """

    victims: Mapping[str, str]
    violations: int = 0


Proposals = Mapping[str, Proposal]
"""By the node's name, the cheapest node first."""
