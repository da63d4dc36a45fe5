"""Triggers: reasons for a pass before the timer. Any thread may add one, which ends a sleep."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Sequence
from typing import Final

_MOST_REASONS: Final = 16
"""Reasons that are kept for the report of one pass: more say nothing new."""
DRAIN_S: Final = 0.05
"""How long triggers are gathered into one pass. Chosen: changes come in bursts, and no triggered
value is urgent by so little. Twice the value delays every triggered pass by that much."""


class Triggers:
    """See the module. Only the thread that sleeps takes the reasons."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        for descriptor in (self._wake_read, self._wake_write):
            if descriptor >= 0:
                os.close(descriptor)
        self._wake_read = self._wake_write = -1

    def add(self, reason: str) -> None:
        """Note a reason. Any thread; never blocks."""
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.append(reason)
        self.wake()

    def wake(self) -> None:
        """End a sleep without a reason. Any thread; never blocks."""
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of wake-ups already
        except OSError as error:
            if error.errno != errno.EBADF:
                raise

    def sleep(self, seconds: float, also: Sequence[int] = ()) -> bool:
        """Sleep; True when it ended early, by a wake-up or because `also` can be read."""
        poll = select.poll()
        for descriptor in (self._wake_read, *also):
            poll.register(descriptor, select.POLLIN)
        early = bool(poll.poll(seconds * 1000))
        if early:
            self._drain()
        return early

    @property
    def waiting(self) -> bool:
        """Whether there are reasons."""
        return bool(self._reasons)

    def gathered(self) -> tuple[str, ...]:
        """Wait for `DRAIN_S`, and return and remove all reasons."""
        time.sleep(DRAIN_S)
        self._drain()
        return self.take()

    def take(self) -> tuple[str, ...]:
        """Return and remove the reasons."""
        reasons, self._reasons = self._reasons, []
        return tuple(dict.fromkeys(reasons))

    def _drain(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass
