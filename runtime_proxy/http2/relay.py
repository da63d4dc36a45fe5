"""One client connection and its own server connection, frame by frame and without I/O.

The idea: because one upstream connection carries the frames of exactly one downstream connection
in their order, header blocks, settings, pings, window updates and messages pass through unchanged,
and the two ends negotiate with each other. Only the *request messages* of intercepted methods are
held: their HEADERS have gone on (stream order and header compression demand it), their DATA waits
until `release` sends it, changed or not, or `reject` answers in the server's place.

The server's pings are answered here: grpc-go sends one with every call to measure its connection,
which ends at us, and a client that dies takes both connections with it. The client's pings go on,
because they ask whether the server lives.
"""

from collections import deque
from collections.abc import Callable, Collection

from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.frames import FRAME_HEADER, HEADER_SIZE, ConnectionFault, ErrorCode
from runtime_proxy.http2.grpc import MESSAGE_PREFIX_SIZE, Status, parse_timeout, status_headers
from runtime_proxy.http2.held import Abandoned, Answered, Event, Held, Phase, RequestHeld
from runtime_proxy.http2.sending import Sending

_PING_SIZE = 8
_PLAIN_HEADERS = frames.END_STREAM | frames.END_HEADERS
# Messages of the largest size that one client may have us hold at a time; kubelet has some KiB.
_MAX_HELD_MESSAGES = 4
# What is kept of an answer: the ids that hooks need are in its first hundred octets.
_MAX_OBSERVED_ANSWER = 64 * 1024
# Streams that ended while their client was sending: some of that may be under way yet.
_MAX_TURNED_AWAY = 64


def _ignore_call(path: bytes, started: float) -> None:
    """Default observer of finished calls."""


class Relay:
    """Feed `from_client` and `from_server`; then take `to_client`, `to_server` and `events`.

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
        self.to_client: list[bytes] = []
        self.to_server: list[bytes] = []
        self.events: list[Event] = []
        # Streams that wait for the server's last word: (path, start by `clock`).
        self.active: dict[int, tuple[bytes, float]] = {}
        self.last_stream = 0

        self._intercepted = frozenset(intercepted)
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._on_finished = on_finished

        self._preface_seen = False
        self._client_rest = b""
        self._server_rest = b""
        self._decoder = hpack.Decoder()
        self._held: dict[int, Held] = {}
        self._held_octets = 0
        self._sending = Sending()
        self._drain_limit: int | None = None
        # Whose SETTINGS the server has yet to acknowledge: a rejected stream, or 0 for the client
        # with the header tables that it allows, in order.
        self._unacknowledged: deque[tuple[int, list[int]]] = deque()
        self._client_table = hpack.ReceiversTable()

        # Frames of ours for the client that must come behind what the server has sent: its settings
        # before all else.
        self._behind: list[bytes] = []
        self._server_known = False
        self._server_leaving = False
        # Above it the server looks at no stream.
        self._server_limit = frames.STREAM_MASK
        # Settings of the server's that the client has yet to acknowledge: the server may hold us to
        # the old ones until then.
        self._unconfirmed: deque[list[tuple[int, int]]] = deque()
        self._initial_window = frames.DEFAULT_WINDOW
        self._confirmed_window = frames.DEFAULT_WINDOW
        # The largest frames that either end ever said it takes: a smaller limit binds the other end
        # only when it has seen it, and whoever set it enforces it.
        self._client_max_frame = frames.DEFAULT_MAX_FRAME_SIZE
        self._server_max_frame = frames.DEFAULT_MAX_FRAME_SIZE

    # -- bytes in --------------------------------------------------------------------------------

    def from_client(self, data: bytes) -> None:
        buffer = self._client_rest + data if self._client_rest else data
        at = 0
        if not self._preface_seen:
            preface = frames.PREFACE
            if not preface.startswith(buffer[: len(preface)]):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
            if len(buffer) < len(preface):
                self._client_rest = buffer
                return
            self._preface_seen = True
            self.to_server.append(preface)
            at = len(preface)
        run = at  # start of the frames that go on as they are
        size = len(buffer)
        held_streams = self._held
        sending = self._sending
        confirmed = False
        while size - at >= HEADER_SIZE:
            high, low, kind, flags, stream = FRAME_HEADER.unpack_from(buffer, at)
            length = high << 8 | low
            if length > self._server_max_frame:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} octets")
            end = at + HEADER_SIZE + length
            if end > size:
                break
            stream &= frames.STREAM_MASK
            forward = True
            if kind == frames.DATA:
                sending.client_window -= length
                if sending.client_window < 0:
                    raise ConnectionFault(
                        ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window"
                    )
                if (
                    stream not in held_streams
                    and not sending.queue
                    and length <= sending.server_window
                    and self._drain_limit is None
                ):
                    sending.server_window -= length
                else:
                    forward = False
                    if run < at:
                        self.to_server.append(buffer[run:at])
                    self._client_data(stream, flags, buffer[at:end])
            elif kind == frames.HEADERS:
                block_end = frames.header_block_end(
                    buffer, at, self._server_max_frame, frames.MAX_CLIENT_BLOCK
                )
                if block_end == 0:
                    break
                headers = self._decoder.decode(frames.header_block(buffer, at, block_end))
                end = block_end
                forward = self._client_headers(stream, flags, headers)
                if not forward and run < at:
                    self.to_server.append(buffer[run:at])
            elif kind == frames.RST_STREAM:
                forward = self._client_reset(stream)
                if not forward and run < at:
                    self.to_server.append(buffer[run:at])
            elif kind == frames.SETTINGS:
                if flags & frames.ACK:
                    confirmed = self._confirm() or confirmed
                else:
                    self._client_settings(buffer[at + HEADER_SIZE : end])
            elif kind == frames.CONTINUATION:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
            elif self._drain_limit is not None and stream > self._drain_limit:
                forward = False
                if run < at:
                    self.to_server.append(buffer[run:at])
            if not forward:
                run = end
            at = end
        if run < at:
            self.to_server.append(buffer if run == 0 and at == size else buffer[run:at])
        self._client_rest = buffer[at:] if at < size else b""
        if confirmed:
            self._pump()
        elif sending.owing:
            self._settle()

    def from_server(self, data: bytes) -> None:
        buffer = self._server_rest + data if self._server_rest else data
        at = run = 0
        size = len(buffer)
        held_streams = self._held
        while size - at >= HEADER_SIZE:
            high, low, kind, flags, stream = FRAME_HEADER.unpack_from(buffer, at)
            length = high << 8 | low
            if length > self._client_max_frame:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} octets")
            end = at + HEADER_SIZE + length
            if end > size:
                break
            stream &= frames.STREAM_MASK
            forward = True
            if kind == frames.DATA:
                held = held_streams.get(stream)
                if held is not None and len(held.answer) < _MAX_OBSERVED_ANSWER:
                    held.answer += frames.strip_padding(flags, buffer[at + HEADER_SIZE : end])
                if flags & frames.END_STREAM:
                    self._finish(stream)
            elif kind == frames.HEADERS or kind == frames.PUSH_PROMISE:
                block_end = frames.header_block_end(
                    buffer, at, self._client_max_frame, frames.MAX_SERVER_BLOCK
                )
                if block_end == 0:
                    break
                end = block_end
                if kind == frames.HEADERS:
                    # The first octet tells whether it sets the table's size; padding hides it.
                    if flags & ~_PLAIN_HEADERS or not length or buffer[at + HEADER_SIZE] >> 5 == 1:
                        self._client_table.follow(frames.header_block(buffer, at, block_end))
                    else:
                        self._client_table.follow(b"")
                    held = held_streams.get(stream)
                    if (
                        held is not None
                        and held.phase is Phase.REJECTING
                        and not held.answer_started
                    ):
                        # The handler noticed the reset and still got a word in. Its block must
                        # reach the client (header compression), its end of stream must not.
                        held.answer_started = True
                        if run < at:
                            self.to_client.append(buffer[run:at])
                        self.to_client.append(frames.without_end_of_stream(buffer[at:end]))
                        run = end
                    elif flags & frames.END_STREAM:
                        self._finish(stream)
                    elif held is not None:
                        held.answer_started = True
            elif kind == frames.WINDOW_UPDATE:
                forward = self._server_grant(
                    stream, frames.parse_uint31(buffer[at + HEADER_SIZE : end])
                )
            elif kind == frames.PING:
                if length == _PING_SIZE and not flags & frames.ACK and not self._server_leaving:
                    forward = False
                    self.to_server.append(frames.ping_ack(buffer[at + HEADER_SIZE : end]))
            elif kind == frames.GOAWAY:
                # The ping that follows asks whether the client knows, before streams are counted.
                self._server_leaving = True
                self._server_limit = frames.parse_uint31(buffer[at + HEADER_SIZE : end])
                for unseen in [one for one in self.active if one > self._server_limit]:
                    self._finish(unseen, reset=True)
            elif kind == frames.RST_STREAM:
                held = held_streams.get(stream)
                # The echo of our own reset must not reach the client before its answer does.
                if held is not None and held.phase is Phase.REJECTING:
                    forward = False
                else:
                    self._finish(stream, reset=True)
            elif kind == frames.SETTINGS:
                if not flags & frames.ACK:
                    self._server_settings(buffer[at + HEADER_SIZE : end])
                elif self._unacknowledged:
                    rejected, tables = self._unacknowledged.popleft()
                    if rejected:
                        forward = False
                        if run < at:
                            self.to_client.append(buffer[run:at])
                            run = at
                        self._answer_rejection(rejected)
                    self._client_table.allow(tables)
            if not forward:
                if run < at:
                    self.to_client.append(buffer[run:at])
                run = end
            at = end
        if run < at:
            self.to_client.append(buffer if run == 0 and at == size else buffer[run:at])
        self._server_rest = buffer[at:] if at < size else b""
        # Grants may have opened the way for waiting data; frames to the client stay in order
        # because everything that this adds belongs behind what was just forwarded.
        for held in held_streams.values():
            self._let_finish(held)
        self._pump()

    def _tell_client(self, frame: bytes) -> None:
        (self.to_client if self._server_known else self._behind).append(frame)

    # -- decisions about held requests -------------------------------------------------------------

    def release(self, stream: int, body: bytes | None = None) -> None:
        """Send the held request on: as it came, or with `body` (prefix included) in its place."""
        held = self._held.get(stream)
        if held is None or held.phase is not Phase.DECIDING:
            return
        payload = bytes(held.body) if body is None else body
        self._drop_body(held)
        self._sending.enqueue_message(held, payload)
        self._pump()

    def reject(self, stream: int, status: Status) -> None:
        """Answer a held request in the server's place; the server's handler never sees a message.

        The answer goes out when the server has confirmed, by acknowledging empty settings, that it
        has seen the reset: after that no frame of its own can follow the end of the stream. (A ping
        would do as well, but grpc-go ends connections that ping more often than it likes.)
        """
        held = self._held.get(stream)
        if held is None or not held.waits_for_us:
            return
        self._sending.uncount(held)
        self._drop_body(held)
        held.phase = Phase.REJECTING
        held.rejection = status
        self._unacknowledged.append((stream, []))
        self.to_server.append(frames.rst_stream(stream, ErrorCode.CANCEL))
        self.to_server.append(frames.settings({}))
        self._settle()

    def _drop_body(self, held: Held) -> None:
        self._held_octets -= len(held.body)
        held.body = bytearray()

    def drain(self) -> None:
        """Tell the client to open no more streams here; the ones it has go on to their end."""
        if self._drain_limit is None:
            self._drain_limit = self.last_stream
            self._tell_client(frames.goaway(self.last_stream, ErrorCode.NO_ERROR, "draining"))

    def fault_goodbye(self, fault: ConnectionFault) -> bytes:
        return frames.goaway(self.last_stream, fault.code, fault.reason)

    # -- the client's frames -----------------------------------------------------------------------

    def _client_settings(self, payload: bytes) -> None:
        tables: list[int] = []
        for identifier, value in frames.parse_settings(payload):
            if identifier == frames.SETTING_MAX_FRAME_SIZE:
                self._client_max_frame = max(self._client_max_frame, value)
            elif identifier == frames.SETTING_HEADER_TABLE_SIZE:
                tables.append(value)
        self._unacknowledged.append((0, tables))

    def _client_headers(self, stream: int, flags: int, headers: list[hpack.Header]) -> bool:
        """Whether the block goes on. It does, except for streams that come after our GOAWAY."""
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
        if stream > self._server_limit:
            return True
        path = b""
        for name, value in headers:
            if name == b":path":
                path = value
                break
        self.active[stream] = (path, self._clock())
        if path in self._intercepted and not flags & frames.END_STREAM:
            fields = dict(headers)
            self._held[stream] = Held(
                stream=stream,
                path=path,
                timeout_s=parse_timeout(fields.get(b"grpc-timeout")),
                encoding=fields.get(b"grpc-encoding", b"identity"),
                client_window=self._initial_window,
                server_window=self._confirmed_window,
            )
            self._let_finish(self._held[stream])
        return True

    def _client_data(self, stream: int, flags: int, frame: bytes) -> None:
        """DATA that cannot simply go on: held, behind a queue, or after our GOAWAY."""
        held = self._held.get(stream)
        if held is not None:
            self._hold(held, flags, frame)
        elif self._drain_limit is not None and stream > self._drain_limit:
            pass
        elif stream in self.active or stream > self._server_limit:
            self._sending.enqueue_frame(stream, frame)
        else:
            # Its end must not wait: the client takes the stream for closed and opens another.
            self._give_up(stream, client_ended=bool(flags & frames.END_STREAM))
        self._pump()

    def _hold(self, held: Held, flags: int, frame: bytes) -> None:
        flow = len(frame) - HEADER_SIZE
        if held.phase is Phase.REJECTING or held.phase is Phase.ENDED:
            if flags & frames.END_STREAM:
                held.client_ended = True
                if held.phase is Phase.ENDED:
                    del self._held[held.stream]
            return
        if held.phase is not Phase.RECEIVING:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "data after the end of a stream")
        held.client_window -= flow
        held.received_flow += flow
        if held.counted:
            self._sending.queued += flow
        part = frames.strip_padding(flags, frame[HEADER_SIZE:])
        held.body += part
        self._held_octets += len(part)
        largest = max(len(held.body), held.body_size) - MESSAGE_PREFIX_SIZE
        if largest > self._max_message_bytes:
            self.reject(
                held.stream,
                Status.resource_exhausted(
                    f"grpc: received message larger than max ({largest} vs. "
                    f"{self._max_message_bytes})"
                ),
            )
            return
        if self._held_octets > _MAX_HELD_MESSAGES * self._max_message_bytes:
            self.reject(
                held.stream,
                Status.resource_exhausted(
                    f"{self._held_octets} octets of requests wait on this connection already"
                ),
            )
            return
        if flags & frames.END_STREAM:
            held.client_ended = True
            held.phase = Phase.DECIDING
            self.events.append(
                RequestHeld(held.stream, held.path, bytes(held.body), held.timeout_s, held.encoding)
            )
        else:
            self._let_finish(held)

    def _let_finish(self, held: Held) -> None:
        """Grant the stream the window that the rest of its message needs: the server cannot."""
        missing = held.body_size - len(held.body)
        if held.phase is Phase.RECEIVING and missing > held.client_window:
            grant = missing - held.client_window
            held.client_window += grant
            self._tell_client(frames.window_update(held.stream, grant))

    def _client_reset(self, stream: int) -> bool:
        if self._drain_limit is not None and stream > self._drain_limit:
            return False
        held = self._held.pop(stream, None)
        self._sending.forget(stream)
        self._end_of_call(stream)
        if held is not None and held.phase is not Phase.ENDED:
            self._sending.uncount(held)
            self._drop_body(held)
            self.events.append(Abandoned(stream))
        self._settle()
        # The server was reset already when a rejection began, or when it answered too early.
        return held is None or held.phase not in (Phase.REJECTING, Phase.ENDED)

    # -- the server's frames -----------------------------------------------------------------------

    def _server_grant(self, stream: int, increment: int) -> bool:
        if stream == 0:
            # What the client sees of it is settled when all of the server's frames are read.
            self._sending.server_window += increment
            return False
        held = self._held.get(stream)
        if held is None:
            return True
        held.server_window += increment
        return False

    def _server_settings(self, payload: bytes) -> None:
        """What holds for the client from here on; for us it does once the client has said so."""
        self._server_known = True
        pairs = frames.parse_settings(payload)
        self._unconfirmed.append(pairs)
        for identifier, value in pairs:
            if identifier == frames.SETTING_INITIAL_WINDOW_SIZE:
                for held in self._held.values():
                    held.client_window += value - self._initial_window
                self._initial_window = value
            elif identifier == frames.SETTING_MAX_FRAME_SIZE:
                self._server_max_frame = max(self._server_max_frame, value)
            elif identifier == frames.SETTING_HEADER_TABLE_SIZE:
                self._decoder.set_limit(value)

    def _confirm(self) -> bool:
        """The client acknowledges the server's settings; whether the server told any."""
        if not self._unconfirmed:
            return False
        for identifier, value in self._unconfirmed.popleft():
            if identifier == frames.SETTING_INITIAL_WINDOW_SIZE:
                for held in self._held.values():
                    held.server_window += value - self._confirmed_window
                self._confirmed_window = value
            elif identifier == frames.SETTING_MAX_FRAME_SIZE:
                self._sending.max_frame_size = value
        return True

    def _finish(self, stream: int, *, reset: bool = False) -> None:
        """The server has said its last word on a stream."""
        self._end_of_call(stream)
        held = self._held.pop(stream, None)
        if held is None:
            if self._sending.queue and self._sending.has(stream):
                ended = self._sending.forget(stream)
                if not reset:
                    self._give_up(stream, client_ended=ended)
            return
        if held.phase is Phase.ENDED:
            return
        if held.phase is Phase.WAITING and not reset:
            self.events.append(Answered(stream, bytes(held.answer)))
            return
        if held.phase in (Phase.RECEIVING, Phase.DECIDING, Phase.SENDING) and not reset:
            # The server will never see from us that the client has ended its side.
            self.to_server.append(frames.rst_stream(stream, ErrorCode.CANCEL))
        self._sending.uncount(held)
        self._sending.forget(stream)
        self._drop_body(held)
        self.events.append(Abandoned(stream))
        if not reset:
            self._turn_away(held)

    def _give_up(self, stream: int, *, client_ended: bool) -> None:
        """The server has answered; what it has not got of the request would come too late."""
        self.to_server.append(frames.rst_stream(stream, ErrorCode.CANCEL))
        self._turn_away(Held(stream, b"", None, b"", 0, 0, client_ended=client_ended))

    def _turn_away(self, held: Held) -> None:
        """The call has ended: what its client still sends of it goes nowhere, and may stop."""
        if held.client_ended:
            return
        held.phase = Phase.ENDED
        self._held[held.stream] = held
        self._behind.append(frames.rst_stream(held.stream, ErrorCode.NO_ERROR))
        ended = [one.stream for one in self._held.values() if one.phase is Phase.ENDED]
        if len(ended) > _MAX_TURNED_AWAY:
            del self._held[ended[0]]

    def _answer_rejection(self, stream: int) -> None:
        held = self._held.get(stream)
        if held is None or held.phase is not Phase.REJECTING or held.rejection is None:
            return
        del self._held[stream]
        self._end_of_call(stream)
        block = self._client_table.update() + hpack.encode(
            status_headers(held.rejection, trailers=held.answer_started)
        )
        self.to_client.append(
            frames.frame(frames.HEADERS, frames.END_STREAM | frames.END_HEADERS, stream, block)
        )
        self.events.append(Abandoned(stream))
        self._turn_away(held)

    def _end_of_call(self, stream: int) -> None:
        call = self.active.pop(stream, None)
        if call is not None:
            self._on_finished(*call)

    def _pump(self) -> None:
        """Send what may go by now."""
        if self._sending.queue:
            self.to_server += self._sending.pump()
            for stream, octets in self._sending.take_stripped():
                self._tell_client(frames.window_update(stream, octets))
        self._settle()

    def _settle(self) -> None:
        """Give the client the window that it is owed."""
        if granted := self._sending.grant(self._held.values()):
            self._tell_client(frames.window_update(0, granted))
        if self._behind and self._server_known:
            self.to_client += self._behind
            self._behind.clear()
