"""The circuit breaker of one hook server: a dead or slow server costs its time once, not per call.

A pure state machine over a clock. Closed: calls go through. Open: calls fail at once; for a server
that cannot be reached until it shows a sign of life, for one that let calls time out also until
a pause is over, which doubles with every relapse. Then one trial call decides.
"""

import enum

# A server that is alive but too slow is tried again after this long, doubling up to the limit.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


class Breaker:
    def __init__(self) -> None:
        self.state = State.CLOSED
        self.reason = ""
        self.trips = 0
        self._pause_s = 0.0
        self._not_before = 0.0
        self._trial_running = False

    def admit(self) -> bool:
        """Whether a call may go through now. An admitted trial must report its outcome."""
        if self.state is State.CLOSED:
            return True
        if self.state is State.TRIAL and not self._trial_running:
            self._trial_running = True
            return True
        return False

    def succeeded(self) -> None:
        """An admitted call was answered. One from before the breaker opened proves nothing now."""
        if self.state is State.OPEN:
            return
        self.state = State.CLOSED
        self.reason = ""
        self._pause_s = 0.0
        self._trial_running = False

    def unreachable(self, reason: str) -> None:
        """The server is not there: open until it is."""
        self._open(reason)

    def timed_out(self, reason: str, now: float) -> None:
        """The server is there and does not answer in time: open for a pause as well."""
        if self.state is State.OPEN:
            return
        self._open(reason)
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._not_before = now + self._pause_s

    def abandoned(self) -> None:
        """The admitted call ended for a reason that says nothing about the server."""
        self._trial_running = False

    def alive(self, now: float) -> bool:
        """A sign of life while open; whether calls may come again (the trial first)."""
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
