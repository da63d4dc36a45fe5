"""One direction of the relay: octets in, frames shown to rules, octets out.

A rule is shown one whole frame of its kind (or HEADERS with all their CONTINUATIONs) and says
whether it goes on. Kinds without a rule go on unseen, and frames that go on one behind the other
leave as one piece: this loop is the proxy's hot path.

What goes on leaves as it came, whole and in order. What a rule `put`s leaves behind everything
before the frame that the rule was shown, and before that frame.
"""

from collections.abc import Callable, Mapping

from runtime_proxy.http2 import frames
from runtime_proxy.http2.frames import (
    END_HEADERS,
    FRAME_HEADER,
    HEADER_SIZE,
    HEADERS,
    PUSH_PROMISE,
    STREAM_MASK,
    ConnectionFault,
    ErrorCode,
)

# (stream, flags, buffer, start of the frame in it, its end) -> whether it goes on.
Rule = Callable[[int, int, bytes, int, int], bool]
# Of frames: the kind is one octet, and most of them are unknown.
_KINDS = 256


class Passage:
    """`feed` it, take from `out` and clear that."""

    __slots__ = (
        "_at",
        "_buffer",
        "_max_block",
        "_rest",
        "_rules",
        "_run",
        "max_frame_size",
        "out",
    )

    def __init__(self, rules: Mapping[int, Rule], *, max_block: int) -> None:
        self.out: list[bytes] = []
        # The largest frame that the receiver ever said it takes: a smaller limit binds the sender
        # only when it has seen it, and the end that set it enforces it.
        self.max_frame_size = frames.DEFAULT_MAX_FRAME_SIZE
        self._rules = [rules.get(kind) for kind in range(_KINDS)]
        self._max_block = max_block
        self._rest = b""
        # While `feed` is at work: frames from `_run` to `_at` go on and have not left yet.
        self._buffer = b""
        self._run = 0
        self._at = 0

    def feed(self, data: bytes) -> None:
        buffer = self._buffer = self._rest + data if self._rest else data
        rules = self._rules
        largest = self.max_frame_size
        size = len(buffer)
        at = 0
        while size - at >= HEADER_SIZE:
            high, low, kind, flags, stream = FRAME_HEADER.unpack_from(buffer, at)
            length = high << 8 | low
            if length > largest:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} octets")
            end = at + HEADER_SIZE + length
            if end > size:
                break
            rule = rules[kind]
            if rule is not None:
                if kind in (HEADERS, PUSH_PROMISE) and not flags & END_HEADERS:
                    end = frames.header_block_end(buffer, at, largest, self._max_block)
                    if end == 0:
                        break
                self._at = at
                if not rule(stream & STREAM_MASK, flags, buffer, at, end):
                    if self._run < at:
                        self.out.append(buffer[self._run : at])
                    self._run = end
            at = end
        run = self._run
        if run < at:
            self.out.append(buffer if run == 0 and at == size else buffer[run:at])
        self._rest = buffer[at:] if at < size else b""
        self._buffer = b""
        self._run = self._at = 0

    def rule_others(self, rule: Rule) -> None:
        """From the next `feed` on, what has no rule has this one."""
        self._rules = [known or rule for known in self._rules]

    def put(self, octets: bytes) -> None:
        """Frames of our own, behind all that came before."""
        if self._run < self._at:
            self.out.append(self._buffer[self._run : self._at])
            self._run = self._at
        self.out.append(octets)
