"""One end of HTTP/2 that does whatever is legal, and takes nothing from its peer that is not.

A fake client or server for generated worlds: it pads, splits, interleaves, changes its settings,
starves its peer of window and resets, all by its `Random`; each frame that it receives is held
against RFC 9113 and RFC 7541, and the first illegal one raises `Broken`.
"""

from __future__ import annotations

import random
import struct
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import hpack

from runtime_proxy.http2 import frames
from runtime_proxy.http2.frames import ErrorCode

TABLE = frames.SETTING_HEADER_TABLE_SIZE
STREAMS = frames.SETTING_MAX_CONCURRENT_STREAMS
WINDOW = frames.SETTING_INITIAL_WINDOW_SIZE
FRAME = frames.SETTING_MAX_FRAME_SIZE
_LIST = 0x6
_DEFAULTS = {
    TABLE: 4096,
    STREAMS: 2**31,
    WINDOW: frames.DEFAULT_WINDOW,
    FRAME: frames.DEFAULT_MAX_FRAME_SIZE,
}
_PUSH_PROMISE_OFF = {0x2: 0}
_UNKNOWN_FRAME = 0xFA

Headers = list[tuple[str, str]]


class Broken(AssertionError):
    """The peer sent what HTTP/2 does not allow."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


@dataclass
class Stream:
    number: int
    send_window: int
    window: int
    """What the peer may still send."""
    unsent: bytes = b""
    trailers: Headers | None = None
    """What ends our side behind the body; without them the body does."""
    sent: bytearray = field(default_factory=bytearray)
    got: bytearray = field(default_factory=bytearray)
    headers: list[dict[str, str]] = field(default_factory=list)
    may_send: bool = False
    """Our headers are out (the server's come when its answer begins)."""
    sent_end: bool = False
    got_end: bool = False
    sent_reset: bool = False
    got_reset: bool = False
    given_up: bool = False
    """The server said that it does not look at this stream."""

    @property
    def reset(self) -> bool:
        return self.sent_reset or self.got_reset or self.given_up

    @property
    def closed(self) -> bool:
        return self.reset or (self.sent_end and self.got_end)


class Peer:
    """`octets` is what it sends; `receive` takes what was sent to it."""

    def __init__(self, rng: random.Random, *, client: bool) -> None:
        self.random = rng
        self.client = client
        self.octets = bytearray(frames.PREFACE if client else b"")
        self.streams: dict[int, Stream] = {}
        self.goodbye: int | None = None
        """The last stream of a GOAWAY received."""
        self.leaving_after: int | None = None
        """The last stream of a GOAWAY sent."""
        self.on_headers: Callable[[Stream], None] = lambda stream: None
        self.in_force = dict(_DEFAULTS)
        self._unacknowledged: deque[dict[int, int]] = deque()
        self._windows_said: list[int] = []
        self._theirs = dict(_DEFAULTS)
        self._encoder = hpack.Encoder()
        self._tables: list[int] = []
        self._largest_table = rng.choice([0, 200, 4096, 16_384])
        self._decoder = hpack.Decoder()
        self.send_window = self.window = frames.DEFAULT_WINDOW
        self._window_target = rng.choice([65_535, 100_000, 1 << 20])
        self._stream_target = rng.choice([400, 5_000, 65_535, 300_000])
        # How much of a window has to be used before any of it is given back.
        self._used_share = rng.choice([0.0, 0.25, 0.5, 0.9])
        self._pads = rng.choice([0.0, 0.0, 0.3, 0.9])
        self._pings: Counter[bytes] = Counter()
        self._rest = b""
        self._preface_due = not client
        self._settings_seen = False
        self._block = b""
        self._block_stream = 0
        self._block_ends = False
        self.change_settings()

    @property
    def largest_body(self) -> int:
        """What a peer can send in a world of bounded length."""
        return min(40 * self._stream_target, 300_000)

    @property
    def largest_window(self) -> int:
        return self._window_target

    # -- sending -------------------------------------------------------------------------------

    def change_settings(self) -> None:
        rng = self.random
        chosen: dict[int, int] = {}
        for identifier, values in (
            (TABLE, [0, 50, 300, 4096, 16_384]),
            (WINDOW, [0, 100, 16_384, 65_535, 200_000]),
            (FRAME, [16_384, 16_385, 60_000, 2**24 - 1]),
            (STREAMS, [1, 3, 100]),
            (_LIST, [1 << 20]),
            (0xF00D, [7]),
        ):
            if rng.random() < 0.5 and (identifier != STREAMS or not self.client):
                chosen[identifier] = rng.choice(values)
        if not self.client and self._windows_said and WINDOW in chosen:
            # No runtime takes window back. Where one did while data waits in the relay, the
            # client's acknowledgement would overtake what it sent before.
            chosen[WINDOW] = max(chosen[WINDOW], max(self._windows_said))
        if WINDOW in chosen:
            self._windows_said.append(chosen[WINDOW])
        chosen |= _PUSH_PROMISE_OFF if self.client else {}
        self._unacknowledged.append(chosen)
        self.octets += frames.settings(chosen)

    def ping(self) -> None:
        payload = self.random.randbytes(8)
        self._pings[payload] += 1
        self.octets += frames.ping(payload)

    def chatter(self) -> None:
        """Frames that mean nothing: priorities, and types that nobody knows."""
        stream = self.random.choice([*self.streams, 1, 101])
        if self.random.random() < 0.5:
            self._frame(frames.PRIORITY, 0, stream, struct.pack(">IB", 0, 16))
        else:
            self._frame(_UNKNOWN_FRAME, self.random.randrange(256), stream, b"whatever")

    def open(self, number: int, headers: Headers, body: bytes) -> Stream:
        stream = self._new(number)
        stream.unsent = body
        stream.may_send = True
        self.streams[number] = stream
        ends = not body and self.random.random() < 0.5
        self._headers(number, headers, end=ends)
        stream.sent_end = ends
        return stream

    def answer(self, stream: Stream, headers: Headers, body: bytes, trailers: Headers) -> None:
        stream.may_send = True
        stream.unsent, stream.trailers = body, trailers
        self._headers(stream.number, headers, end=False)

    def answer_at_once(self, stream: Stream, headers: Headers) -> None:
        self._headers(stream.number, headers, end=True)
        stream.may_send = stream.sent_end = True

    def send_some(self, stream: Stream) -> bool:
        """A piece of the body, as far as windows and frames allow; whether anything went."""
        if not stream.may_send or stream.sent_end or stream.reset:
            return False
        rng = self.random
        if not stream.unsent:
            if stream.trailers is not None:
                self._headers(stream.number, stream.trailers, end=True)
            else:
                self._frame(frames.DATA, frames.END_STREAM, stream.number)
            stream.sent_end = True
            return True
        room = min(stream.send_window, self.send_window, self._theirs[FRAME])
        if room <= 0:
            return False
        size = min(room, len(stream.unsent), rng.choice([1, 900, 16_384, 1 << 20]))
        padding = b""
        flags = 0
        if rng.random() < self._pads and room > size:
            padding = bytes(rng.randrange(min(256, room - size)))
            flags |= frames.PADDED
        part, stream.unsent = stream.unsent[:size], stream.unsent[size:]
        if not stream.unsent and stream.trailers is None and rng.random() < 0.7:
            flags |= frames.END_STREAM
            stream.sent_end = True
        head = bytes((len(padding),)) if flags & frames.PADDED else b""
        payload = head + part + padding
        stream.sent += part
        stream.send_window -= len(payload)
        self.send_window -= len(payload)
        self._frame(frames.DATA, flags, stream.number, payload)
        return True

    def reset(self, stream: Stream) -> None:
        if not stream.closed:
            stream.sent_reset = True
            self.octets += frames.rst_stream(stream.number, ErrorCode.CANCEL)

    def leave(self) -> None:
        """GOAWAY: streams above the last one that we have seen will not be looked at."""
        last = max(self.streams, default=0) if not self.client else 0
        self.leaving_after = last
        self.octets += frames.goaway(last, ErrorCode.NO_ERROR)

    def give_windows(self) -> bool:
        """Give back what our policy of windows allows by now; whether that was anything."""
        gave = False
        if self.window <= self._window_target * (1 - self._used_share):
            gave |= self._give(0, self._window_target - self.window)
            self.window = self._window_target
        for stream in self.streams.values():
            low = self._stream_target * (1 - self._used_share)
            if stream.window <= low and not stream.got_end and not stream.reset:
                gave |= self._give(stream.number, self._stream_target - stream.window)
                stream.window = self._stream_target
        return gave

    def _give(self, stream: int, increment: int) -> bool:
        if increment > 0:
            self.octets += frames.window_update(stream, increment)
        return increment > 0

    def _new(self, number: int) -> Stream:
        return Stream(number, send_window=self._theirs[WINDOW], window=self.in_force[WINDOW])

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self.octets += frames.frame(kind, flags, stream, payload)

    def _headers(self, stream: int, headers: Headers, *, end: bool) -> None:
        rng = self.random
        if self._tables:
            # The smallest one since the last block has to be said, and then the one that holds.
            for size in (min(self._tables), self._tables[-1]):
                # h2's encoder forgets a change that is followed by none.
                if size != self._encoder.header_table_size:
                    self._encoder.header_table_size = size
            self._tables.clear()
        block = self._encoder.encode(headers, huffman=rng.random() < 0.5)
        cuts = sorted(rng.randrange(len(block) + 1) for _ in range(rng.choice([0, 0, 1, 4])))
        pieces = [block[a:b] for a, b in zip([0, *cuts], [*cuts, len(block)], strict=True)]
        flags = frames.END_STREAM if end else 0
        first = pieces[0]
        if rng.random() < 0.2:
            flags |= frames.PRIORITISED
            first = struct.pack(">IB", 0, 200) + first
        if rng.random() < self._pads:
            padding = rng.randrange(40)
            flags |= frames.PADDED
            first = bytes((padding,)) + first + bytes(padding)
        kind = frames.HEADERS
        for at, piece in enumerate([first, *pieces[1:]]):
            last = frames.END_HEADERS if at == len(pieces) - 1 else 0
            self._frame(kind, flags | last, stream, piece)
            kind, flags = frames.CONTINUATION, 0

    # -- receiving -----------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        buffer = self._rest + data
        if self._preface_due:
            if len(buffer) < len(frames.PREFACE):
                self._rest = buffer
                return
            require(buffer.startswith(frames.PREFACE), "no preface")
            buffer = buffer[len(frames.PREFACE) :]
            self._preface_due = False
        while len(buffer) >= frames.HEADER_SIZE:
            high, low, kind, flags, stream = frames.FRAME_HEADER.unpack_from(buffer)
            length = high << 8 | low
            require(length <= self.in_force[FRAME], f"frame of {length} octets")
            end = frames.HEADER_SIZE + length
            if len(buffer) < end:
                break
            payload, buffer = buffer[frames.HEADER_SIZE : end], buffer[end:]
            self._take(kind, flags, stream, payload)
        self._rest = buffer

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        require(
            self._settings_seen or (kind == frames.SETTINGS and not flags & frames.ACK),
            "the first frame is not SETTINGS",
        )
        require(not self._block_stream or kind == frames.CONTINUATION, "frame in a header block")
        ignored = not self.client and self.leaving_after is not None and number > self.leaving_after
        if ignored and kind in (frames.WINDOW_UPDATE, frames.RST_STREAM):
            return
        if kind == frames.DATA:
            self._take_data(flags, number, payload)
        elif kind == frames.HEADERS:
            self._block_stream, self._block_ends = number, bool(flags & frames.END_STREAM)
            self._block = frames.header_fragment(kind, flags, payload)
            self._take_block_part(flags)
        elif kind == frames.CONTINUATION:
            require(number == self._block_stream != 0, "CONTINUATION without HEADERS")
            self._block += payload
            self._take_block_part(flags)
        elif kind == frames.SETTINGS:
            require(number == 0, "SETTINGS on a stream")
            self._settings_seen = True
            if flags & frames.ACK:
                self._take_acknowledgement(payload)
            else:
                self._take_settings(payload)
        elif kind == frames.PING:
            require(number == 0 and len(payload) == 8, "PING of a wrong form")
            if flags & frames.ACK:
                self._pings[payload] -= 1
                require(self._pings[payload] >= 0, "answer to no PING of ours")
            else:
                self.octets += frames.ping_ack(payload)
        elif kind == frames.WINDOW_UPDATE:
            self._take_window(number, frames.parse_uint31(payload))
        elif kind == frames.RST_STREAM:
            require(number in self.streams, f"reset of stream {number}, which is idle")
            self.streams[number].got_reset = True
        elif kind == frames.GOAWAY:
            self.goodbye = frames.parse_uint31(payload)
            if self.client:
                for stream in self.streams.values():
                    stream.given_up |= stream.number > self.goodbye
        else:
            require(kind in (frames.PRIORITY, _UNKNOWN_FRAME), f"frame of type {kind}")

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        self.window -= len(payload)
        require(self.window >= 0 or not payload, "more data than the connection's window")
        if self.leaving_after is not None and not self.client and number > self.leaving_after:
            return
        require(number in self.streams, f"data on stream {number}, which is idle")
        stream = self.streams[number]
        if stream.sent_reset:
            return
        require(
            not stream.got_end and not stream.got_reset, f"data on stream {number} after its end"
        )
        stream.window -= len(payload)
        allowed = stream.window >= 0 or not payload
        require(allowed, f"more data than the window of stream {number}")
        stream.got += frames.strip_padding(flags, payload)
        stream.got_end = bool(flags & frames.END_STREAM)

    def _take_block_part(self, flags: int) -> None:
        if not flags & frames.END_HEADERS:
            return
        number, self._block_stream = self._block_stream, 0
        try:
            decoded = self._decoder.decode(self._block)
        except hpack.HPACKError as error:
            raise Broken(f"header block of stream {number}: {error!r}") from error
        headers = {str(name): str(value) for name, value in decoded}
        stream = self.streams.get(number)
        if stream is None:
            require(not self.client, f"headers on stream {number}, which is idle")
            require(bool(number & 1), f"a client's stream {number}")
            if self.leaving_after is not None:
                return
            require(number > max(self.streams, default=0), f"stream {number} opened late")
            busy = sum(not one.closed for one in self.streams.values())
            require(busy < self.in_force[STREAMS], f"{busy} streams and one more")
            stream = self.streams[number] = self._new(number)
        elif stream.sent_reset or stream.given_up:
            return
        else:
            require(
                not stream.got_end and not stream.got_reset, f"headers on {number} after its end"
            )
            require(not stream.headers or self._block_ends, f"trailers of {number} without its end")
        stream.headers.append(headers)
        stream.got_end = self._block_ends
        if len(stream.headers) == 1:
            self.on_headers(stream)

    def _take_settings(self, payload: bytes) -> None:
        for identifier, value in frames.parse_settings(payload):
            if identifier == WINDOW:
                for stream in self.streams.values():
                    stream.send_window += value - self._theirs[WINDOW]
            self._theirs[identifier] = value
            if identifier == TABLE:
                self._tables.append(min(value, self._largest_table))
        self.octets += frames.SETTINGS_ACK

    def _take_acknowledgement(self, payload: bytes) -> None:
        require(not payload, "SETTINGS acknowledged with a payload")
        require(bool(self._unacknowledged), "acknowledgement of no SETTINGS")
        for identifier, value in self._unacknowledged.popleft().items():
            if identifier == WINDOW:
                for stream in self.streams.values():
                    stream.window += value - self.in_force[WINDOW]
            elif identifier == TABLE:
                self._decoder.max_allowed_table_size = value
            self.in_force[identifier] = value

    def _take_window(self, number: int, increment: int) -> None:
        require(increment > 0, "WINDOW_UPDATE of nothing")
        if number == 0:
            self.send_window += increment
            require(self.send_window < 2**31, "the connection's window overflows")
            return
        require(number in self.streams, f"window for stream {number}, which is idle")
        stream = self.streams[number]
        stream.send_window += increment
        require(stream.send_window < 2**31, f"the window of stream {number} overflows")

    @property
    def can_open(self) -> bool:
        busy = sum(not one.closed for one in self.streams.values())
        return self.goodbye is None and busy < self._theirs[STREAMS]

    @property
    def owed(self) -> str:
        """What the peer has yet to acknowledge; empty when nothing."""
        if self._unacknowledged:
            return f"{len(self._unacknowledged)} SETTINGS"
        return f"{self._pings.total()} PINGs" if self._pings.total() else ""
