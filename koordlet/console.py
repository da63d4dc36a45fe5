"""What a command's output may meet: a reader that left, a full disk, a terminal without UTF-8.

None of these is a defect of the command, so none of them ends in a traceback.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Final

INTERRUPTED: Final = 130
"""The exit status of a command that Ctrl-C ended, as shells count it."""


def guarded(name: str, body: Callable[[], int]) -> int:
    """Run a command's body and return its exit status; 2 where the answer could not be written.

    name: the command's, before its messages.
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
        # The reader has what it wanted: `koordctl status | head -1`.
        _drop_the_rest()
        return 0
    except OSError as error:
        _drop_the_rest()
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _drop_the_rest() -> None:
    """Keep the interpreter, when it ends, from trying once more."""
    if sys.stdout is None:
        return
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
