"""Claims on the scheduler's switches, which group identity and core scheduling share."""

from __future__ import annotations

from collections.abc import Iterable

from hooks.claim import Claim
from linux.resources import Resource


def switch_claims(
    policy: str, source: str, wanted: Iterable[tuple[str, str, str]]
) -> tuple[Claim, ...]:
    """Return a claim for each of `wanted`: (dotted name, "0" or "1", reason)."""
    return tuple(
        Claim(
            resource=Resource.SYSCTL,
            key=name,
            value=value,
            policy=policy,
            reason=reason,
            source=source,
        )
        for name, value, reason in wanted
    )
