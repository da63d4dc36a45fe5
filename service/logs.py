"""Structured logs on standard error: `key=value` lines for people and journald, or JSON lines.

A record's fields are those of `extra={...}`. Under systemd a line begins with the priority that
journald reads (sd-daemon(3)), and leaves the time to journald. Whatever a message or a value holds,
it cannot break out of its line. What must not be logged (a request's body, a container's
environment) is for the caller not to pass.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

_PRIORITY: Final = {
    logging.DEBUG: "<7>",
    logging.INFO: "<6>",
    logging.WARNING: "<4>",
    logging.ERROR: "<3>",
    logging.CRITICAL: "<2>",
}


def set_up(*, level: str, form: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send all logs to standard error. level: debug, info, warning, error; form: text or json."""
    journald = "JOURNAL_STREAM" in environment
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(journald=journald))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    # No format of ours shows these, and each costs a stack walk or a system call a record.
    logging.logThreads = False
    logging.logProcesses = False
    logging.logMultiprocessing = False


class TextFormatter(logging.Formatter):
    """time level logger: message key=value ..."""

    def __init__(self, *, journald: bool) -> None:
        super().__init__()
        self._journald = journald

    def format(self, record: logging.LogRecord) -> str:
        parts = [_one_line(record.getMessage())]
        parts += [f"{key}={_quoted(value)}" for key, value in _fields(record).items()]
        line = f"{record.name}: {' '.join(parts)}"
        if record.exc_info:
            line += " traceback=" + _quoted(self.formatException(record.exc_info))
        if self._journald:
            return _PRIORITY.get(record.levelno, "<6>") + line
        return f"{_time(record)} {record.levelname:<7} {line}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in _fields(record).items():
            entry.setdefault(key, value)
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


_STANDARD: Final = frozenset(
    (*vars(logging.LogRecord("", 0, "", 0, "", (), None)), "message", "asctime", "taskName")
)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Return what the caller added to the record."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    if text and text.isprintable() and not any(char in ' ="' for char in text):
        return text
    return json.dumps(text, ensure_ascii=False)
