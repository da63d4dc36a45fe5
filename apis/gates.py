"""Feature gates as flags and files write them: `A=true,B=false`, over a program's defaults.

An unknown gate is an error that names similar ones, because a typing mistake in a gate is otherwise
a feature that silently stays off. The format is that of Kubernetes' own programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Final, NamedTuple

from apis.errors import InputError, InputErrors


class Stage(StrEnum):
    """How mature upstream calls a gate; `AllAlpha` and `AllBeta` set a whole stage.

    OWN gates are not upstream's: manifests that set a stage must not switch them on.
    """

    ALPHA = "alpha"
    BETA = "beta"
    OWN = "own"


class Gate(NamedTuple):
    """One gate: its default and its stage."""

    default: bool
    stage: Stage


ON: Final = Gate(default=True, stage=Stage.BETA)
OFF: Final = Gate(default=False, stage=Stage.ALPHA)
OWN: Final = Gate(default=False, stage=Stage.OWN)

_STAGES: Final[Mapping[str, Stage]] = {"AllAlpha": Stage.ALPHA, "AllBeta": Stage.BETA}

# What Go's strconv.ParseBool takes, because existing manifests may use any of it.
_TRUE: Final = frozenset({"1", "t", "T", "true", "True", "TRUE"})
_FALSE: Final = frozenset({"0", "f", "F", "false", "False", "FALSE"})


def parse_bool(text: str) -> bool | None:
    """Return what Go's flag package reads in `text`, or None when it is not a boolean."""
    if text in _TRUE:
        return True
    return False if text in _FALSE else None


def parse_gates(text: str, *, obj: str, field: str) -> dict[str, bool]:
    """Parse `A=true,B=false` as the flag writes it; raises InputErrors for bad entries.

    Names are checked by `resolve_gates`, which sees all of them.
    """
    parsed: dict[str, bool] = {}
    errors: list[InputError] = []
    for entry in text.split(","):
        entry = entry.strip()
        if not entry:
            continue
        name, equals, value = entry.partition("=")
        on = parse_bool(value.strip())
        if not equals or on is None:
            errors.append(
                InputError(
                    obj=obj,
                    field=field,
                    value=entry,
                    problem="not a feature gate and its setting",
                    hint="write Name=true or Name=false, separated by commas",
                )
            )
        else:
            parsed[name.strip()] = on
    if errors:
        raise InputErrors(errors)
    return parsed


def resolve_gates(
    known: Mapping[str, Gate], *settings: tuple[str, str, Mapping[str, bool]]
) -> dict[str, bool]:
    """Return every known gate's value after `settings` in order, later ones over earlier ones.

    settings: (object, field, gates) of each place that sets gates, for the error messages.
    `AllAlpha` and `AllBeta` set those gates of a stage that no setting names. Raises InputErrors.
    """
    errors: list[InputError] = []
    explicit: dict[str, bool] = {}
    stages: dict[Stage, bool] = {}
    for obj, field, gates in settings:
        for name, on in gates.items():
            if name in _STAGES:
                stages[_STAGES[name]] = on
            elif name in known:
                explicit[name] = on
            else:
                errors.append(_unknown(known, obj, field, name))
    if errors:
        raise InputErrors(errors)
    return {
        name: explicit.get(name, stages.get(gate.stage, gate.default))
        for name, gate in known.items()
    }


def _unknown(gates: Iterable[str], obj: str, field: str, name: str) -> InputError:
    known = [*gates, *_STAGES]
    by_lower = {gate.lower(): gate for gate in known}
    close = [by_lower[low] for low in get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"known gates: {', '.join(known)}"
    return InputError(obj=obj, field=field, value=name, problem="unknown feature gate", hint=hint)
