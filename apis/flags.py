"""Command lines as Go programs read them: one or two dashes, `-a=b` or `-a b`, `-on` for booleans.

Existing manifests, charts and units are written for upstream's programs, so ours read the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Final, NamedTuple

from apis.errors import InputError, printable

COMMAND_LINE: Final = "command line"


class Words(NamedTuple):
    """flags: (name without dashes, text) in the order of the command line."""

    flags: tuple[tuple[str, str], ...]
    positional: tuple[str, ...]


def read_flags(
    arguments: Sequence[str], *, known: Collection[str], booleans: Collection[str], program: str
) -> Words:
    """Take a command line apart; raises InputError for an unknown flag or one without its value.

    Values are texts yet; a boolean flag without one is "true". program: whose --help is named.
    """
    flags: list[tuple[str, str]] = []
    positional: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            positional += rest
            break
        if not argument.startswith("-") or argument == "-":
            positional.append(argument)
            continue
        name, equals, text = argument.removeprefix("-").removeprefix("-").partition("=")
        if name not in known:
            raise _unknown(argument, name, known, program)
        if not equals:
            if name in booleans:
                text = "true"
            elif rest:
                text = rest.pop(0)
            else:
                raise bad_flag(name, "", f"needs a value: -{name}=...")
        flags.append((name, text))
    return Words(tuple(flags), tuple(positional))


def bad_flag(name: str, value: str, problem: str) -> InputError:
    """Return the error of a flag whose value cannot be used."""
    return InputError(obj=COMMAND_LINE, field=f"-{name}", value=value, problem=problem)


def _unknown(argument: str, name: str, known: Collection[str], program: str) -> InputError:
    close = get_close_matches(name, known, n=3)
    hint = "did you mean " + " or ".join(f"-{each}" for each in close) + "?" if close else None
    written = printable(argument.partition("=")[0])
    return InputError(
        obj=COMMAND_LINE,
        field="",
        value=argument,
        problem=f"unknown flag {written}",
        hint=hint or f"'{program} --help' lists the flags",
    )
