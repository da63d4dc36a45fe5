"""Command lines of the cluster's programs: tables of flags, their typed values, and --help.

Names and defaults are upstream's, so that its manifests work unchanged. Go's syntax is accepted:
one or two dashes, `-flag=value`, `-flag value`, bare booleans.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from apis.flags import bad_flag, read_flags
from apis.gates import parse_bool
from apis.meta import parse_duration
from service.addresses import parse_address

_WIDTH = 96
"""Columns of --help: as wide as the texts of the tables."""


class Kind(StrEnum):
    """Type of a flag's value."""

    TEXT = "text"
    BOOL = "bool"
    NUMBER = "number"
    WHOLE = "whole number"
    PORT = "port"
    DURATION = "duration"
    ADDRESS = "address"


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with upstream's default. help: "" for a flag without effect here."""

    default: str
    kind: Kind
    help: str = ""


class FlagError(ValueError):
    """A flag cannot be used. The text names the flag and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The values of all flags of a program: those of the command line, and defaults.

    given: flags of the command line. without_effect: those of them that have no effect here.
    """

    values: Mapping[str, str]
    given: frozenset[str] = frozenset()
    without_effect: tuple[str, ...] = ()

    def text(self, name: str) -> str:
        return self.values[name]

    def on(self, name: str) -> bool:
        return parse_bool(self.values[name]) is True

    def number(self, name: str) -> float:
        try:
            number = float(self.values[name])
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise FlagError(f"--{name}={self.values[name]}: expected a number")
        return number

    def whole(self, name: str) -> int:
        """Return a whole number from 0 to 2^31-1."""
        text = self.values[name]
        # 10 digits: those of 2^31-1.
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 2**31):
            raise FlagError(f"--{name}={text}: expected a whole number, 0 to 2^31-1")
        return int(text)

    def port(self, name: str) -> int:
        """Return a port; 0 stands for not served."""
        text = self.values[name]
        if not (text.isascii() and text.isdigit() and int(text[:6]) <= 65535):
            raise FlagError(f"--{name}={text}: expected a port number from 0 to 65535")
        return int(text)

    def seconds(self, name: str) -> float:
        try:
            return parse_duration(self.values[name]) / 1e9
        except ValueError as error:
            raise FlagError(f"--{name}={self.values[name]}: {error}") from None

    def names(self, name: str) -> tuple[str, ...]:
        return name_list(self.values[name])

    def address(self, name: str) -> tuple[str, int] | None:
        """Return (host, port) of a listening address, None for "0" (off).

        An empty host means every address of the machine, IPv4 and IPv6.
        """
        text = self.values[name]
        if text in ("0", ""):
            return None
        try:
            host, port = parse_address(text)
        except ValueError as error:
            raise FlagError(f"--{name}={text}: {error}") from None
        return host, port


def read_values(
    arguments: Sequence[str],
    flags: Mapping[str, Flag],
    *,
    program: str,
    lists: Collection[str] = (),
) -> Values:
    """Return the values that a command line gives. Raises FlagError or InputError.

    lists: flags that may be repeated; their texts are joined by commas. Of another flag that is
    repeated the last text counts.
    """
    booleans = {name for name, flag in flags.items() if flag.kind is Kind.BOOL}
    words = read_flags(arguments, known=flags, booleans=booleans, program=program)
    if words.positional:
        raise FlagError(f"{words.positional[0]!r} is not a flag; see --help")
    said: dict[str, str] = {}
    for name, text in words.flags:
        said[name] = f"{said[name]},{text}" if name in lists and name in said else text
    values = {name: flag.default for name, flag in flags.items()} | said
    for name in booleans:
        if parse_bool(values[name]) is None:
            raise bad_flag(name, values[name], "not a boolean: write true or false")
    return Values(
        values=values,
        given=frozenset(said),
        without_effect=tuple(sorted(name for name in said if not flags[name].help)),
    )


def check_values(settings: Values, flags: Mapping[str, Flag]) -> None:
    """Raise FlagError for a value that is not of its flag's kind."""
    for name, flag in flags.items():
        match flag.kind:
            case Kind.ADDRESS:
                settings.address(name)
            case Kind.NUMBER:
                settings.number(name)
            case Kind.WHOLE:
                settings.whole(name)
            case Kind.PORT:
                settings.port(name)
            case Kind.DURATION:
                settings.seconds(name)


def describe(flags: Mapping[str, Flag]) -> tuple[str, str]:
    """Return the lines of --help about the flags with effect, and about those without."""
    lines = [
        f"  --{name} [{flag.default}]\n      {flag.help}"
        for name, flag in flags.items()
        if flag.help
    ]
    idle = ", ".join(f"--{name}" for name, flag in flags.items() if not flag.help)
    without = textwrap.fill(
        idle, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join(lines), without


def name_list(text: str) -> tuple[str, ...]:
    """Return the trimmed members of a comma-separated flag."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def chosen(text: str, known: Sequence[str], flag: str) -> frozenset[str]:
    """Return the names that a list selects; for each name the first matching entry decides.

    `*` selects all, `name` selects and `-name` excludes that name.
    """
    entries = name_list(text)
    for entry in entries:
        if entry != "*" and entry.removeprefix("-") not in known:
            raise FlagError(
                f"--{flag}: {entry!r} is unknown; expected *, name or -name of {', '.join(known)}"
            )
    picked = set()
    for name in known:
        for entry in entries:
            if entry == f"-{name}":
                break
            if entry in (name, "*"):
                picked.add(name)
                break
    return frozenset(picked)
