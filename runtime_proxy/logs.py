"""Logs on standard error: one line a record, its fields as key=value, or one JSON object.

Nothing from a request's body is ever logged: names of stages, servers, sockets and reasons are.
Values are quoted so that none can break out of its line.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime

# syslog's priorities as sd-daemon(3) writes them, for a journal that reads our standard error.
_PRIORITY = {logging.DEBUG: "<7>", logging.INFO: "<6>", logging.WARNING: "<4>"}
_ERROR_PRIORITY = "<3>"
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "message",
    "asctime",
    "taskName",
}


def set_up(*, level: str, form: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__()
        self._journal = "JOURNAL_STREAM" in os.environ

    def format(self, record: logging.LogRecord) -> str:
        parts = [record.getMessage()]
        for key, value in _fields(record).items():
            text = value if isinstance(value, str) else str(value)
            plain = text.isprintable() and text and not set(text) & set(' "=')
            parts.append(f"{key}={text if plain else json.dumps(text)}")
        if record.exc_info:
            parts.append("traceback=" + json.dumps(self.formatException(record.exc_info)))
        line = " ".join(parts)
        if self._journal:
            return _PRIORITY.get(record.levelno, _ERROR_PRIORITY) + line
        return f"{_time(record)} {record.levelname} {line}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
