"""One client connection and its own server connection, frame by frame and without I/O.

The idea: because one upstream connection carries the frames of exactly one downstream connection
in their order, header blocks, settings, pings, window updates and messages pass through unchanged,
and the two ends negotiate with each other. Only the *request messages* of intercepted methods are
held: their HEADERS have gone on (stream order and header compression demand it), their DATA waits
until `release` sends it, changed or not, or `reject` answers in the server's place.

The server's pings are answered here: grpc-go sends one with every call to measure its connection,
which ends at us, and a client that dies takes both connections with it. The client's pings go on,
because they ask whether the server lives.

This file is the table: what each kind of frame means in either direction. How frames are cut is in
`passage`, the life of calls in `calls`, windows in `flow` and `sending`, SETTINGS in `settings`.
"""

from collections.abc import Callable, Collection

from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.calls import Calls
from runtime_proxy.http2.flow import Flow
from runtime_proxy.http2.frames import HEADER_SIZE, ConnectionFault, ErrorCode
from runtime_proxy.http2.grpc import Status
from runtime_proxy.http2.held import Held, Phase
from runtime_proxy.http2.passage import Passage
from runtime_proxy.http2.settings import Settings

_PING_SIZE = 8
_PLAIN_HEADERS = frames.END_STREAM | frames.END_HEADERS
# What is kept of an answer: the ids that hooks need are in its first hundred octets.
_MAX_OBSERVED_ANSWER = 64 * 1024


def _ignore_call(path: bytes, started: float) -> None:
    """Default observer of finished calls."""


class Relay:
    """Feed `from_client` and `from_server`; take and clear `to_client`, `to_server` and `events`.

    A `ConnectionFault` from either feed ends both connections; the peer at fault is owed the
    GOAWAY that `fault_goodbye` builds.
    """

    def __init__(
        self,
        *,
        intercepted: Collection[bytes],
        max_message_bytes: int,
        clock: Callable[[], float],
        on_finished: Callable[[bytes, float], None] = _ignore_call,
    ) -> None:
        self._to_server = Passage(
            {
                frames.DATA: self._client_data,
                frames.HEADERS: self._client_headers,
                frames.RST_STREAM: self._client_reset,
                frames.SETTINGS: self._client_settings,
                frames.CONTINUATION: self._client_continuation,
            },
            max_block=frames.MAX_CLIENT_BLOCK,
        )
        self._to_client = Passage(
            {
                frames.DATA: self._server_data,
                frames.HEADERS: self._server_headers,
                frames.RST_STREAM: self._server_reset,
                frames.SETTINGS: self._server_settings,
                frames.PUSH_PROMISE: self._server_promise,
                frames.PING: self._server_ping,
                frames.GOAWAY: self._server_goaway,
                frames.WINDOW_UPDATE: self._server_grant,
            },
            max_block=frames.MAX_SERVER_BLOCK,
        )
        self._held: dict[int, Held] = {}
        self._decoder = hpack.Decoder()
        self._flow = Flow(to_client=self._to_client, to_server=self._to_server, held=self._held)
        self._sending = self._flow.sending
        self._settings = Settings(self._flow, self._held, self._decoder)
        self._calls = Calls(
            self._flow,
            self._settings,
            self._held,
            intercepted=frozenset(intercepted),
            max_message_bytes=max_message_bytes,
            clock=clock,
            on_finished=on_finished,
        )
        self.to_client = self._to_client.out
        self.to_server = self._to_server.out
        self.events = self._calls.events
        self.active = self._calls.active
        self.last_stream = 0

        self._preface: bytes | None = b""
        self._confirmed = False
        self._drain_limit: int | None = None
        self._server_leaving = False
        # Above it the server looks at no stream.
        self._server_limit = frames.STREAM_MASK

    def from_client(self, data: bytes) -> None:
        self._to_server.feed(data if self._preface is None else self._without_preface(data))
        if self._confirmed:
            self._confirmed = False
            self._flow.pump()
        elif self._sending.owing:
            self._flow.settle()

    def from_server(self, data: bytes) -> None:
        self._to_client.feed(data)
        # Grants may have opened the way for waiting data; frames to the client stay in order
        # because everything that this adds belongs behind what was just forwarded.
        for held in self._held.values():
            self._calls.let_finish(held)
        self._flow.pump()

    def release(self, stream: int, body: bytes | None = None) -> None:
        """Send the held request on: as it came, or with `body` (prefix included) in its place."""
        self._calls.release(stream, body)

    def reject(self, stream: int, status: Status) -> None:
        """Answer a held request in the server's place; the server's handler never sees a message.

        The answer goes out when the server has confirmed, by acknowledging empty settings, that it
        has seen the reset: after that no frame of its own can follow the end of the stream. (A ping
        would do as well, but grpc-go ends connections that ping more often than it likes.)
        """
        self._calls.reject(stream, status)

    def drain(self) -> None:
        """Tell the client to open no more streams here; the ones it has go on to their end."""
        if self._drain_limit is None:
            self._drain_limit = self.last_stream
            self._to_server.rule_others(self._client_other)
            self._flow.tell_client(frames.goaway(self.last_stream, ErrorCode.NO_ERROR, "draining"))

    def fault_goodbye(self, fault: ConnectionFault) -> bytes:
        return frames.goaway(self.last_stream, fault.code, fault.reason)

    def _without_preface(self, data: bytes) -> bytes:
        seen = (self._preface or b"") + data
        if not frames.PREFACE.startswith(seen[: len(frames.PREFACE)]):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        if len(seen) < len(frames.PREFACE):
            self._preface = seen
            return b""
        self._preface = None
        self._to_server.put(frames.PREFACE)
        return seen[len(frames.PREFACE) :]

    # -- the client's frames ---------------------------------------------------------------------

    def _client_data(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        sending = self._sending
        length = end - at - HEADER_SIZE
        sending.client_window -= length
        if sending.client_window < 0:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window"
            )
        held = self._held.get(stream)
        if (
            held is None
            and not sending.queue
            and length <= sending.server_window
            and self._drain_limit is None
        ):
            sending.server_window -= length
            return True
        frame = buffer[at:end]
        if held is not None:
            self._calls.receive(held, flags, frame)
        elif self._drain_limit is not None and stream > self._drain_limit:
            pass
        elif stream in self.active or stream > self._server_limit:
            sending.enqueue_frame(stream, frame)
        else:
            # Its end must not wait: the client takes the stream for closed and opens another.
            self._calls.give_up(stream, client_ended=bool(flags & frames.END_STREAM))
        self._flow.pump()
        return False

    def _client_headers(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        """They go on, except for streams that come after our GOAWAY."""
        headers = self._decoder.decode(frames.header_block(buffer, at, end))
        if stream == 0 or not stream & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream}")
        if stream <= self.last_stream:
            held = self._held.get(stream)
            if self._sending.has(stream) or (held is not None and held.waits_for_us):
                # No gRPC client sends trailers, and header blocks cannot wait for data.
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "trailers in a held request")
            return True
        if self._drain_limit is not None:
            return False
        self.last_stream = stream
        if stream <= self._server_limit:
            self._calls.begin(stream, headers, ended=bool(flags & frames.END_STREAM))
        return True

    def _client_reset(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        if self._drain_limit is not None and stream > self._drain_limit:
            return False
        return self._calls.client_reset(stream)

    def _client_settings(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        if flags & frames.ACK:
            self._confirmed |= self._settings.client_acknowledges()
        else:
            self._settings.client_told(buffer[at + HEADER_SIZE : end])
        return True

    def _client_continuation(
        self, stream: int, flags: int, buffer: bytes, at: int, end: int
    ) -> bool:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")

    def _client_other(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        """Return whether the server knows the stream: new ones are not passed on in a drain."""
        return self._drain_limit is None or stream <= self._drain_limit

    # -- the server's frames ---------------------------------------------------------------------

    def _server_data(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        held = self._held.get(stream)
        if held is not None and len(held.answer) < _MAX_OBSERVED_ANSWER:
            held.answer += frames.strip_padding(flags, buffer[at + HEADER_SIZE : end])
        if flags & frames.END_STREAM:
            self._calls.server_ended(stream)
        return True

    def _server_headers(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        table = self._settings.client_table
        # The first octet shows whether it sets the table's size; padding and priority hide it.
        first = at + HEADER_SIZE
        if flags | frames.END_STREAM != _PLAIN_HEADERS or first == end or buffer[first] >> 5 == 1:
            table.follow(frames.header_block(buffer, at, end))
        else:
            table.follow(b"")
        held = self._held.get(stream)
        if held is not None and held.phase is Phase.REJECTING and not held.answer_started:
            # The handler noticed the reset and still got a word in. Its block must reach the
            # client (header compression), its end of stream must not.
            held.answer_started = True
            self._to_client.put(frames.without_end_of_stream(buffer[at:end]))
            return False
        if flags & frames.END_STREAM:
            self._calls.server_ended(stream)
        elif held is not None:
            held.answer_started = True
        return True

    def _server_promise(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        return True

    def _server_reset(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        held = self._held.get(stream)
        if held is not None and held.phase is Phase.REJECTING:
            # The echo of our own reset must not reach the client before its answer does.
            return False
        self._calls.server_ended(stream, reset=True)
        return True

    def _server_settings(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        if not flags & frames.ACK:
            self._flow.server_known = True
            self._settings.server_told(buffer[at + HEADER_SIZE : end])
            return True
        rejected = self._settings.server_acknowledges()
        if rejected:
            self._calls.answer_rejection(rejected)
        return not rejected

    def _server_ping(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        payload = buffer[at + HEADER_SIZE : end]
        if len(payload) != _PING_SIZE or flags & frames.ACK or self._server_leaving:
            return True
        self._to_server.put(frames.ping_ack(payload))
        return False

    def _server_goaway(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        # The ping that follows asks whether the client knows, before streams are counted.
        self._server_leaving = True
        self._server_limit = frames.parse_uint31(buffer[at + HEADER_SIZE : end])
        for unseen in [one for one in self.active if one > self._server_limit]:
            self._calls.server_ended(unseen, reset=True)
        return True

    def _server_grant(self, stream: int, flags: int, buffer: bytes, at: int, end: int) -> bool:
        increment = frames.parse_uint31(buffer[at + HEADER_SIZE : end])
        if stream == 0:
            # What the client is granted is settled when all of the server's frames are read.
            self._sending.server_window += increment
            return False
        held = self._held.get(stream)
        if held is None:
            return True
        held.server_window += increment
        return False
