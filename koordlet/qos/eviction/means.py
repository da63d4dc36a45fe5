"""How a pod is evicted: the types between the evictor and what carries an eviction out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

from hooks.subject import Pod


class Answered(Enum):
    """EVICTED: the pod's deletion has begun. GONE: this very pod does not exist any more.
    REFUSED: by a disruption budget, admission or missing rights; another pod may go instead.
    UNREACHABLE: no answer in time, so it is not known whether the pod will go."""

    EVICTED = auto()
    GONE = auto()
    REFUSED = auto()
    UNREACHABLE = auto()


class Answer(NamedTuple):
    """detail: the error, for people. retry_after_s: when the server wants to be asked again."""

    answered: Answered
    detail: str = ""
    retry_after_s: float | None = None


class EvictionApi(Protocol):
    """The API server. Neither method raises."""

    async def evict(self, pod: Pod) -> Answer:
        """Ask for the eviction of the pod with this very uid; return within a few seconds."""
        ...

    def warn(self, pod: Pod, reason: str, message: str) -> None:
        """Write a Kubernetes event about the pod in the background."""
        ...


class Stopper(Protocol):
    """The container runtime."""

    async def stop(self, container_ids: Sequence[str], *, grace_s: float) -> str:
        """Stop containers, all at once: SIGTERM, then SIGKILL after the grace. Return the errors,
        "" for success; a container that does not exist any more is stopped."""
        ...
