"""Logs: one line a record, whatever it holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from service import logs
from service.logs import JsonFormatter, TextFormatter

HOSTILE = 'x" level=ERROR\n2026-01-01 ERROR forged'


@pytest.fixture
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def record(message: str, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("koordlet", logging.WARNING, "", 0, message, (), None)
    vars(made).update(extra)
    return made


@pytest.mark.usefixtures("root_logger")
@pytest.mark.parametrize("form", ["text", "json"])
def test_no_value_and_no_message_breaks_out_of_its_line(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up(level="info", form=form, environment={})
    logging.getLogger("t").info("said\nFAKE", extra={"reason": HOSTILE, "count": 3})
    logging.getLogger("t").debug("not asked for")
    (line,) = capsys.readouterr().err.splitlines()
    if form == "json":
        told = json.loads(line)
        assert (told["message"], told["reason"], told["count"]) == ("said\nFAKE", HOSTILE, 3)
    else:
        assert line.endswith(
            't: said\\nFAKE reason="x\\" level=ERROR\\n2026-01-01 ERROR forged" count=3'
        )


def test_a_field_takes_the_place_of_nothing_that_the_record_says() -> None:
    told = json.loads(JsonFormatter().format(record("told", level="debug", logger="other")))
    assert (told["level"], told["logger"]) == ("warning", "koordlet")


def test_a_traceback_is_a_field() -> None:
    made = record("failed")
    error = ValueError("it\nbroke")
    made.exc_info = (ValueError, error, None)
    assert (
        TextFormatter(journald=False)
        .format(made)
        .endswith('koordlet: failed traceback="ValueError: it\\nbroke"')
    )
    assert json.loads(JsonFormatter().format(made))["traceback"] == "ValueError: it\nbroke"


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, 7), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2)],
)
def test_under_systemd_lines_carry_a_priority_and_no_time(level: int, priority: int) -> None:
    made = record("told", a=1)
    made.levelno = level
    assert TextFormatter(journald=True).format(made) == f"<{priority}>koordlet: told a=1"
