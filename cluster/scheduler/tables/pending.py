"""A pod that waits for a node, as the scheduling queue and gangs see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Shape(Protocol):
    """What plugins may look at of a pod; hashable, and equal for pods of equal content."""

    @property
    def gates(self) -> tuple[str, ...]:
        """Names in spec.schedulingGates."""
        ...


S_co = TypeVar("S_co", bound=Shape, covariant=True)


@dataclass(frozen=True, slots=True)
class PendingPod(Generic[S_co]):
    """A pod without a node.

    key: namespace/name. created: seconds since 1970. gang: id of its gang (namespace/name), or "".
    """

    key: str
    uid: str
    priority: int
    shape: S_co
    created: float
    gang: str = ""
