"""The life of calls, and of the request messages that are held.

A held request goes RECEIVING -> DECIDING -> SENDING -> WAITING, and then its answer passes. Where
`reject` ends it instead, it is REJECTING until the server has confirmed that it saw the reset. A
stream whose call has ended while its client may still be sending is ENDED: what comes on it is
dropped, until the client has ended or reset it.

Each `RequestHeld` is followed by exactly one `Answered` or `Abandoned`; the octets of a body are
kept while it is RECEIVING or DECIDING, here, and while it is SENDING, in `Sending`.
"""

from collections.abc import Callable

from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.flow import Flow
from runtime_proxy.http2.frames import HEADER_SIZE, ConnectionFault, ErrorCode
from runtime_proxy.http2.grpc import MESSAGE_PREFIX_SIZE, Status, parse_timeout, status_headers
from runtime_proxy.http2.held import Abandoned, Answered, Event, Held, Phase, RequestHeld
from runtime_proxy.http2.settings import Settings

# Messages of the largest size that one client may have us hold at a time; kubelet has some KiB.
_MAX_HELD_MESSAGES = 4
# Streams that ended while their client was sending: some of that may be under way yet. Chosen: more
# calls than kubelet has at a time. Twice the value: some KiB more for a client that never stops.
_MAX_TURNED_AWAY = 64


class Calls:
    """`active` are the streams that wait for the server's last word: (path, start by `clock`)."""

    def __init__(
        self,
        flow: Flow,
        settings: Settings,
        held: dict[int, Held],
        *,
        intercepted: frozenset[bytes],
        max_message_bytes: int,
        clock: Callable[[], float],
        on_finished: Callable[[bytes, float], None],
    ) -> None:
        self.active: dict[int, tuple[bytes, float]] = {}
        self.events: list[Event] = []
        self.held = held
        self.held_octets = 0
        self._flow = flow
        self._sending = flow.sending
        self._settings = settings
        self._intercepted = intercepted
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._on_finished = on_finished

    # -- the request -----------------------------------------------------------------------------

    def begin(self, stream: int, headers: list[hpack.Header], *, ended: bool) -> None:
        path = b""
        for name, value in headers:
            if name == b":path":
                path = value
                break
        self.active[stream] = (path, self._clock())
        if path in self._intercepted and not ended:
            fields = dict(headers)
            held = self.held[stream] = Held(
                stream=stream,
                path=path,
                timeout_s=parse_timeout(fields.get(b"grpc-timeout")),
                encoding=fields.get(b"grpc-encoding", b"identity"),
                client_window=self._settings.initial_window,
                server_window=self._settings.confirmed_window,
            )
            self.let_finish(held)

    def receive(self, held: Held, flags: int, frame: bytes) -> None:
        """A DATA frame of a stream in `held`."""
        flow = len(frame) - HEADER_SIZE
        if held.phase is Phase.REJECTING or held.phase is Phase.ENDED:
            if flags & frames.END_STREAM:
                held.client_ended = True
                if held.phase is Phase.ENDED:
                    del self.held[held.stream]
            return
        if held.phase is not Phase.RECEIVING:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "data after the end of a stream")
        held.client_window -= flow
        held.received_flow += flow
        if held.counted:
            self._sending.queued += flow
        part = frames.strip_padding(flags, frame[HEADER_SIZE:])
        held.body += part
        self.held_octets += len(part)
        if too_much := self._too_much(held):
            self.reject(held.stream, Status.resource_exhausted(too_much))
        elif flags & frames.END_STREAM:
            held.client_ended = True
            held.phase = Phase.DECIDING
            self.events.append(
                RequestHeld(held.stream, held.path, bytes(held.body), held.timeout_s, held.encoding)
            )
        else:
            self.let_finish(held)

    def _too_much(self, held: Held) -> str:
        """Why the request cannot be held; empty where it can."""
        limit = self._max_message_bytes
        largest = max(len(held.body), held.body_size) - MESSAGE_PREFIX_SIZE
        if largest > limit:
            return f"grpc: received message larger than max ({largest} vs. {limit})"
        if self.held_octets > _MAX_HELD_MESSAGES * limit:
            return f"{self.held_octets} octets of requests wait on this connection already"
        return ""

    def let_finish(self, held: Held) -> None:
        """Grant the stream the window that the rest of its message needs: the server cannot."""
        missing = held.body_size - len(held.body)
        if held.phase is Phase.RECEIVING and missing > held.client_window:
            grant = missing - held.client_window
            held.client_window += grant
            self._flow.tell_client(frames.window_update(held.stream, grant))

    # -- the decision ----------------------------------------------------------------------------

    def release(self, stream: int, body: bytes | None) -> None:
        held = self.held.get(stream)
        if held is None or held.phase is not Phase.DECIDING:
            return
        payload = bytes(held.body) if body is None else body
        self._drop_body(held)
        self._sending.enqueue_message(held, payload)
        self._flow.pump()

    def reject(self, stream: int, status: Status) -> None:
        held = self.held.get(stream)
        if held is None or not held.waits_for_us:
            return
        self._sending.uncount(held)
        self._drop_body(held)
        held.phase = Phase.REJECTING
        held.rejection = status
        self._flow.to_server.put(frames.rst_stream(stream, ErrorCode.CANCEL))
        self._settings.probe(stream)
        self._flow.settle()

    def answer_rejection(self, stream: int) -> None:
        """The server has seen the reset: no frame of its own can follow our end of the stream."""
        held = self.held.get(stream)
        if held is None or held.phase is not Phase.REJECTING or held.rejection is None:
            return
        del self.held[stream]
        self._end(stream)
        block = self._settings.client_table.update() + hpack.encode(
            status_headers(held.rejection, trailers=held.answer_started)
        )
        self._flow.to_client.put(
            frames.frame(frames.HEADERS, frames.END_STREAM | frames.END_HEADERS, stream, block)
        )
        self.events.append(Abandoned(stream))
        self._turn_away(held)

    def _drop_body(self, held: Held) -> None:
        self.held_octets -= len(held.body)
        held.body = bytearray()

    # -- the end ---------------------------------------------------------------------------------

    def client_reset(self, stream: int) -> bool:
        """End a call that the client has reset. Return whether to pass the reset on."""
        held = self.held.pop(stream, None)
        self._sending.forget(stream)
        self._end(stream)
        if held is not None and held.phase is not Phase.ENDED:
            self._sending.uncount(held)
            self._drop_body(held)
            self.events.append(Abandoned(stream))
        self._flow.settle()
        # The server was reset already when a rejection began, or when it answered too early.
        return held is None or held.phase not in (Phase.REJECTING, Phase.ENDED)

    def server_ended(self, stream: int, *, reset: bool = False) -> None:
        """The server has said its last word on a stream."""
        self._end(stream)
        held = self.held.pop(stream, None)
        if held is None:
            if self._sending.queue and self._sending.has(stream):
                ended = self._sending.forget(stream)
                if not reset:
                    self.give_up(stream, client_ended=ended)
            return
        if held.phase is Phase.ENDED:
            return
        if held.phase is Phase.WAITING and not reset:
            self.events.append(Answered(stream, bytes(held.answer)))
            return
        if held.phase in (Phase.RECEIVING, Phase.DECIDING, Phase.SENDING) and not reset:
            # The server will never see from us that the client has ended its side.
            self._flow.to_server.put(frames.rst_stream(stream, ErrorCode.CANCEL))
        self._sending.uncount(held)
        self._sending.forget(stream)
        self._drop_body(held)
        self.events.append(Abandoned(stream))
        if not reset:
            self._turn_away(held)

    def give_up(self, stream: int, *, client_ended: bool) -> None:
        """The server has answered; what it has not got of the request would come too late."""
        self._flow.to_server.put(frames.rst_stream(stream, ErrorCode.CANCEL))
        self._turn_away(Held(stream, b"", None, b"", 0, 0, client_ended=client_ended))

    def _turn_away(self, held: Held) -> None:
        """Drop what the client still sends of an ended call, and ask it to stop."""
        if held.client_ended:
            return
        held.phase = Phase.ENDED
        self.held[held.stream] = held
        self._flow.tell_client_behind(frames.rst_stream(held.stream, ErrorCode.NO_ERROR))
        ended = [one.stream for one in self.held.values() if one.phase is Phase.ENDED]
        if len(ended) > _MAX_TURNED_AWAY:
            del self.held[ended[0]]

    def _end(self, stream: int) -> None:
        call = self.active.pop(stream, None)
        if call is not None:
            self._on_finished(*call)
