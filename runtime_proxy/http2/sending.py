"""The request direction's flow control while DATA is held: what may be sent, what is owed.

Holding DATA breaks the end-to-end flow control, so three numbers of the connection are kept:

- `server_window`: what the server still accepts (its grants less what we have sent);
- `client_window`: what the client believes it may send (our grants less its data);
- `queued`: octets that we hold and that will still be sent on.

The client is owed `server_window - queued - client_window` whenever that is positive, and gets it
once it is a quarter of what the client could have then. (grpc-go grants a few octets for every
message; passed on at once they would wake the client a second time in each call.) A message that
grew makes it negative; the server's next grants then pay the debt before the client sees any.
Where held messages alone would starve the client (a big message, or many behind a slow hook), they
leave `queued` until their release, and data that then finds no window waits in the queue.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from runtime_proxy.http2 import frames
from runtime_proxy.http2.held import Held, Phase

# Below this the client is close to being unable to send: a whole small request should always fit.
_LOW_WINDOW = 16 * 1024
# The client gets what it is owed once that is this share of its whole window: grpc-go's own rule.
_GRANT_SHARE = 4


@dataclass(slots=True)
class _Pending:
    """DATA that waits for the server's window: a frame as it came, or our own message."""

    stream: int
    payload: bytes
    flow: int
    held: Held | None
    sent: int = 0


class Sending:
    """One connection's windows and its queue. The numbers are the relay's hot path: plain fields.

    `owing` says that the client is owed a grant that was too small to send, or will be owed one
    when what is held leaves `queued`.
    """

    def __init__(self) -> None:
        self.server_window = frames.DEFAULT_WINDOW
        self.client_window = frames.DEFAULT_WINDOW
        self.queued = 0
        self.owing = False
        self.max_frame_size = frames.DEFAULT_MAX_FRAME_SIZE
        self.queue: deque[_Pending] = deque()
        self._stripped: list[tuple[int, int]] = []

    def enqueue_frame(self, stream: int, frame: bytes) -> None:
        """A DATA frame that must stay behind what waits, or for the window."""
        self._enqueue(_Pending(stream, frame, len(frame) - frames.HEADER_SIZE, None))

    def enqueue_message(self, held: Held, body: bytes) -> None:
        """A released request's whole body."""
        self.uncount(held)
        held.phase = Phase.SENDING
        self._enqueue(_Pending(held.stream, body, len(body), held))

    def _enqueue(self, pending: _Pending) -> None:
        self.queue.append(pending)
        self.queued += pending.flow

    def has(self, stream: int) -> bool:
        return any(pending.stream == stream for pending in self.queue)

    def forget(self, stream: int) -> bool:
        """The stream has ended: what waits on it is sent no more; whether its end was in that."""
        ended = False
        if not self.queue:
            return ended
        kept: deque[_Pending] = deque()
        for pending in self.queue:
            if pending.stream == stream:
                self.queued -= pending.flow - pending.sent
                ended = pending.held is not None or bool(pending.payload[4] & frames.END_STREAM)
            else:
                kept.append(pending)
        self.queue = kept
        return ended

    def pump(self) -> list[bytes]:
        """What the server's windows allow now, in order, stepping over streams that are full."""
        out: list[bytes] = []
        waiting: deque[_Pending] = deque()
        blocked: set[int] = set()
        while self.queue:
            pending = self.queue.popleft()
            if pending.stream in blocked or not self._send(pending, out):
                blocked.add(pending.stream)
                waiting.append(pending)
        self.queue = waiting
        return out

    def _send(self, pending: _Pending, out: list[bytes]) -> bool:
        """Send what the windows allow, and return whether that was all of the message."""
        held = pending.held
        if held is None:
            while pending.flow > (room := min(self.server_window, self.max_frame_size)):
                # A server grants more only when much of its window is used: waiting for room for
                # the whole frame could be waiting for ever.
                if room <= 0:
                    return False
                out.append(self._first_part(pending, room))
            self.server_window -= pending.flow
            self.queued -= pending.flow
            out.append(pending.payload)
            return True
        left = pending.flow - pending.sent
        sendable = max(0, min(left, self.server_window, held.server_window))
        if sendable == 0 and left:
            return False
        part = pending.payload[pending.sent : pending.sent + sendable]
        done = sendable == left
        out.append(
            frames.data_frames(pending.stream, part, max_frame_size=self.max_frame_size, end=done)
        )
        pending.sent += sendable
        held.server_window -= sendable
        self.server_window -= sendable
        self.queued -= sendable
        if done:
            held.phase = Phase.WAITING
        return done

    def _first_part(self, pending: _Pending, room: int) -> bytes:
        """Cut `room` octets off a client's frame; its padding goes."""
        flags = pending.payload[4]
        body = frames.strip_padding(flags, pending.payload[frames.HEADER_SIZE :])
        part, rest = body[:room], body[room:]
        if padding := pending.flow - len(body):
            self._stripped.append((pending.stream, padding))
        self.queued -= pending.flow - len(rest)
        self.server_window -= len(part)
        pending.payload = frames.frame(frames.DATA, flags & frames.END_STREAM, pending.stream, rest)
        pending.flow = len(rest)
        return frames.frame(frames.DATA, 0, pending.stream, part)

    def take_stripped(self) -> list[tuple[int, int]]:
        """Padding that was left out, as (stream, octets): the server will not give it back."""
        stripped, self._stripped = self._stripped, []
        return stripped

    def uncount(self, held: Held) -> None:
        """A held message leaves the hold: its octets are no longer among the queued ones."""
        if held.counted and held.waits_for_us:
            self.queued -= held.received_flow
        held.counted = False

    def grant(self, holds: Collection[Held]) -> int:
        """Octets to grant the client now, 0 for none; held messages are kept from starving it."""
        if self.client_window < _LOW_WINDOW:
            for held in holds:
                if held.waits_for_us:
                    self.uncount(held)
        owed = self.server_window - self.queued - self.client_window
        self.owing = owed > 0 or self.queued > 0
        if owed <= 0 or owed * _GRANT_SHARE < self.client_window + owed:
            return 0
        self.client_window += owed
        self.owing = self.queued > 0
        return owed
