"""Runs a command so that problems with its output end in a message and not in a traceback.

Such problems are a closed pipe, a full disk and a terminal without UTF-8.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Final

INTERRUPTED: Final = 130
"""The exit status of a command that Ctrl-C ended: 128 + SIGINT, as in shells."""


def guarded(name: str, body: Callable[[], int]) -> int:
    """Run a command's body and return its exit status; 2 if its output could not be written.

    name: the command's name, which precedes its messages.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return body()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader has read enough: `koordctl status | head -1`.
        _drop_the_rest()
        return 0
    except OSError as error:
        _drop_the_rest()
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _drop_the_rest() -> None:
    """Discard unwritten output, so that the interpreter does not try again when it ends."""
    if sys.stdout is None:
        return
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
