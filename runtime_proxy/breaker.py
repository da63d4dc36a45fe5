"""The circuit breaker of one hook server: a dead or slow server costs its time once, not per call.

A pure state machine over a clock in seconds. While it is closed, calls go through. While it is
open, calls fail at once: until the server shows a sign of life, and for a server that was too slow
also until a pause is over, which doubles with every relapse. Then one trial call decides.

A server is too slow when one call times out, or when all answers of some seconds came slowly.
"""

import enum

# A server that is alive but too slow is tried again after this long, doubling up to the limit.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
# Slow answers in a row that open the breaker, and the time from the first to the last of them: one
# stall of a server delays many calls at once, and is over after a second or two.
_SLOW_ANSWERS = 5
_SLOW_FOR_S = 5.0


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class Breaker:
    def __init__(self) -> None:
        self.state = State.CLOSED
        self.reason = ""
        self.trips = 0
        self._lost = False
        self._pause_s = 0.0
        self._not_before = 0.0
        self._trial_running = False
        self._slow_answers = 0
        self._slow_since = 0.0

    @property
    def lost(self) -> bool:
        """Whether it is open because the server could not be reached, and not for slowness."""
        return self.state is State.OPEN and self._lost

    def admit(self) -> bool:
        """Return whether a call may go through now. An admitted trial must report its outcome."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.TRIAL and not self._trial_running:
            self._trial_running = True
            return True
        return False

    def succeeded(self) -> None:
        """Note that an admitted call was answered in good time.

        The answer to a call from before the breaker opened proves nothing.
        """
        if self.state is State.OPEN:
            return
        self.state = State.CLOSED
        self._slow_answers = 0
        self.reason = ""
        self._pause_s = 0.0
        self._trial_running = False

    def answered_slowly(self, reason: str, now: float) -> None:
        """Note that an admitted call was answered, but late."""
        if self.state is State.TRIAL:
            self.timed_out(reason, now)
        elif self.state is State.CLOSED:
            if self._slow_answers == 0:
                self._slow_since = now
            self._slow_answers += 1
            if self._slow_answers >= _SLOW_ANSWERS and now - self._slow_since >= _SLOW_FOR_S:
                self.timed_out(reason, now)

    def unreachable(self, reason: str) -> None:
        """Open until the server shows a sign of life."""
        self._open(reason)
        self._lost = True

    def timed_out(self, reason: str, now: float) -> None:
        """Open until the server shows a sign of life, and for a pause at least."""
        if self.state is State.OPEN:
            return
        self._open(reason)
        self._lost = False
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._not_before = now + self._pause_s

    def abandoned(self) -> None:
        """Note that an admitted call ended for a reason that says nothing about the server."""
        self._trial_running = False

    def alive(self, now: float) -> bool:
        """Note a sign of life, and return whether calls may go through (first a trial)."""
        if self.state is not State.OPEN or now < self._not_before:
            return self.state is not State.OPEN
        self.state = State.TRIAL if self._pause_s else State.CLOSED
        self._trial_running = False
        return True

    def _open(self, reason: str) -> None:
        if self.state is not State.OPEN:
            self.trips += 1
        self.state = State.OPEN
        self.reason = reason
        self._trial_running = False
        self._slow_answers = 0
