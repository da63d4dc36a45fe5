"""Command lines as Go programs read them."""

from __future__ import annotations

import pytest

from apis.errors import InputError
from apis.flags import Words, read_flags


def read(*arguments: str) -> Words:
    return read_flags(arguments, known=("name", "size", "on"), booleans={"on"}, program="it")


@pytest.mark.parametrize(
    ("arguments", "flags", "positional"),
    [
        (("-name=a", "--size", "2"), (("name", "a"), ("size", "2")), ()),
        (("--on", "rest"), (("on", "true"),), ("rest",)),
        (("-on=false", "--name=", "-"), (("on", "false"), ("name", "")), ("-",)),
        (("-name", "-on"), (("name", "-on"),), ()),
        (("run", "--", "-what"), (), ("run", "-what")),
        (("-name=a=b", "-name=c"), (("name", "a=b"), ("name", "c")), ()),
    ],
)
def test_flags_are_taken_apart(
    arguments: tuple[str, ...], flags: tuple[tuple[str, str], ...], positional: tuple[str, ...]
) -> None:
    assert read(*arguments) == Words(flags, positional)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--nmae=1", "did you mean -name?"),
        ("-zzz", "'it --help' lists the flags"),
        ("--nope=1", "command line: unknown flag --nope "),
        ("---name=1", "unknown flag ---name "),
        ("--size", "needs a value"),
    ],
)
def test_a_wrong_flag_is_named_with_what_to_do(argument: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(argument)
