"""The examples of the help: each can be typed as it stands."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from koordctl.help_texts import EPILOG
from koordctl.main import command_line


def _commands() -> dict[str, argparse.ArgumentParser]:
    (made,) = (
        action
        for action in command_line()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(made.choices)


def _examples(text: str) -> list[list[str]]:
    """Return the arguments of each example; what follows two blanks is its description."""
    found = re.findall(r"^  koordctl (.*?)(?:  .*| > .*)?$", text, re.MULTILINE)
    return [shlex.split(each) for each in found]


@pytest.mark.parametrize("name", sorted(_commands()))
def test_each_command_has_examples_that_its_parser_takes(name: str) -> None:
    text = _commands()[name].format_help()
    examples = _examples(text)
    assert examples, text
    for each in examples:
        assert each[0] == name, each
        command_line().parse_args(each)


def test_the_examples_of_all_commands_are_taken() -> None:
    examples = _examples(EPILOG)
    assert {each[0] for each in examples} >= {"explain", "plan", "status", "top", "report", "why"}
    for each in examples:
        command_line().parse_args(each)


def test_an_example_with_a_wrong_option_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    (wrong,) = _examples("  koordctl top --sorted cpu    a typing error\n")
    with pytest.raises(SystemExit):
        command_line().parse_args(wrong)
    assert "--sorted" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(_commands()))
def test_lines_fit_a_terminal_of_100_columns(name: str) -> None:
    epilog = _commands()[name].epilog
    assert epilog and max(map(len, epilog.splitlines())) <= 100
