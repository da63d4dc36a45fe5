"""Pods and shapes for tests that look at neither the shape's content nor at nodes."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.scheduler.tables.pending import PendingPod


@dataclass(frozen=True)
class FakeShape:
    """A shape that is only a name, and perhaps scheduling gates."""

    name: str = "plain"
    gates: tuple[str, ...] = ()


Pod = PendingPod[FakeShape]


def pending(
    name: str,
    shape: str = "plain",
    *,
    priority: int = 0,
    gang: str = "",
    created: float = 0.0,
    gates: tuple[str, ...] = (),
) -> Pod:
    """Return a pod whose UID is its name."""
    return PendingPod(
        key=f"default/{name}",
        uid=name,
        priority=priority,
        shape=FakeShape(shape, gates),
        created=created,
        gang=gang,
    )
