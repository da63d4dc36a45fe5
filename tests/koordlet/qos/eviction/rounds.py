"""Rounds of evictions of pods that have names only, and how they end."""

from __future__ import annotations

from koordlet.qos.eviction.round import Key, Round
from koordlet.qos.strategy import Shortage


def a_round(
    *shortages: Shortage,
    expected: dict[str, dict[Key, int]] | None = None,
    barred: dict[str, str] | None = None,
    cooling: dict[str, float] | None = None,
    most: int = 100,
) -> Round:
    return Round(
        shortages,
        expected={f"uid-{name}": amounts for name, amounts in (expected or {}).items()},
        barred={f"uid-{name}": why for name, why in (barred or {}).items()},
        cooling=cooling or {},
        most=most,
    )


def all_taken(round_: Round, refusing: tuple[str, ...] = ()) -> list[str]:
    names = []
    while (choice := round_.next()) is not None:
        name = choice.victim.pod.name
        if name in refusing:
            round_.refused(choice, "refused by a budget")
        else:
            round_.evicted(choice)
            names.append(name)
    return names
