"""The relay between a client and a server on h2, which raises on every error of its peer."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.settings

from runtime_proxy.http2 import frames
from runtime_proxy.http2.grpc import Status, add_prefix
from runtime_proxy.http2.held import RequestHeld
from runtime_proxy.http2.relay import Relay

HELD = b"/test.Service/Held"


PLAIN = b"/test.Service/Plain"


@dataclass
class Call:
    """What one call does. `becomes`: None unchanged, bytes a new body, Status a rejection."""

    path: bytes
    body: bytes
    becomes: bytes | Status | None = None
    answer: bytes = b"answer"
    # What came of it
    sent: int = 0
    server_got: bytearray = field(default_factory=bytearray)
    server_ended: bool = False
    client_got: bytearray = field(default_factory=bytearray)
    trailers: dict[str, str] = field(default_factory=dict)
    done: bool = False


class World:
    """A client, a relay and a server; `run` moves octets until every call has ended."""

    def __init__(
        self,
        calls: list[Call],
        *,
        seed: int = 0,
        server_window: int = 65_535,
        max_message_bytes: int = 1 << 24,
        answers_at_once: Callable[[bytes], bool] = lambda path: False,
    ) -> None:
        self.random = random.Random(seed)
        self.calls = calls
        self.answers_at_once = answers_at_once
        self.client = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self.server = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        )
        self.relay = Relay(
            intercepted=[HELD], max_message_bytes=max_message_bytes, clock=lambda: 0.0
        )
        self.by_stream: dict[int, Call] = {}
        self.undecided: deque[int] = deque()
        self.events: list[object] = []
        self.answering: deque[tuple[int, bytes]] = deque()
        self.client.initiate_connection()
        self.server.initiate_connection()
        self.server.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: server_window})
        if server_window < frames.DEFAULT_WINDOW:
            # h2 forgets to give back what it received before its window shrank.
            for _ in range(3):
                self._pump(self.client, self.relay.from_client)
                self._deliver()
                self._pump(self.server, self.relay.from_server)
                self._deliver()
        for number, call in enumerate(calls):
            stream = 2 * number + 1
            self.by_stream[stream] = call
            self.client.send_headers(
                stream,
                [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":path", call.path.decode()),
                    (":authority", "localhost"),
                    ("content-type", "application/grpc"),
                    ("grpc-timeout", f"{self.random.randrange(10**7)}u"),
                ],
                end_stream=False,
            )

    def run(self, *, patience: int = 4000) -> None:
        idle = 0
        while not all(call.done for call in self.calls):
            idle = 0 if self.step() else idle + 1
            assert idle < 50, "nothing moves and calls are open"
            patience -= 1
            assert patience > 0, "no end in sight"

    def step(self) -> bool:
        moved = self._client_sends()
        moved |= self._pump(self.client, self.relay.from_client)
        self._collect()
        moved |= self._deliver()
        if self.undecided and self.random.random() < 0.5:
            self.undecided.rotate(self.random.randrange(len(self.undecided)))
            self._decide(self.undecided.popleft())
            moved = True
        moved |= self._server_answers()
        moved |= self._pump(self.server, self.relay.from_server)
        self._collect()
        return self._deliver() or moved

    def _client_sends(self) -> bool:
        moved = False
        for stream, call in self.by_stream.items():
            left = len(call.body) - call.sent
            if call.done or call.sent < 0:
                continue
            window = min(
                self.client.local_flow_control_window(stream), self.client.max_outbound_frame_size
            )
            size = min(left, window, self.random.choice([1, 100, 10_000, 1 << 20]))
            if size <= 0 and left:
                continue
            part = call.body[call.sent : call.sent + size]
            call.sent += size
            end = call.sent == len(call.body)
            self.client.send_data(stream, part, end_stream=end)
            if end:
                call.sent = -1
            moved = True
        return moved

    def _pump(self, source: h2.connection.H2Connection, feed: Callable[[bytes], None]) -> bool:
        data = source.data_to_send()
        at = 0
        while at < len(data):
            size = self.random.choice([1, 7, 40, 1000, 1 << 20])
            feed(data[at : at + size])
            at += size
        return bool(data)

    def _collect(self) -> None:
        for event in self.relay.events:
            self.events.append(event)
            if isinstance(event, RequestHeld):
                self.undecided.append(event.stream)
        self.relay.events.clear()

    def _decide(self, stream: int) -> None:
        becomes = self.by_stream[stream].becomes
        if isinstance(becomes, Status):
            self.relay.reject(stream, becomes)
        else:
            self.relay.release(stream, becomes)

    def _deliver(self) -> bool:
        to_server = b"".join(self.relay.to_server)
        to_client = b"".join(self.relay.to_client)
        self.relay.to_server.clear()
        self.relay.to_client.clear()
        if to_server:
            for event in self.server.receive_data(to_server):
                self._server_event(event)
        if to_client:
            for event in self.client.receive_data(to_client):
                self._client_event(event)
        return bool(to_server or to_client)

    def _server_event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            headers = {str(name): str(value) for name, value in event.headers}
            if self.answers_at_once(headers[":path"].encode()):
                self.server.send_headers(
                    event.stream_id,
                    [(":status", "200"), ("grpc-status", "12")],
                    end_stream=True,
                )
        elif isinstance(event, h2.events.DataReceived):
            call = self.by_stream[event.stream_id]
            call.server_got += event.data
            self.server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamEnded):
            call = self.by_stream[event.stream_id]
            call.server_ended = True
            try:
                self.server.send_headers(
                    event.stream_id, [(":status", "200"), ("x-long", "v" * 300)]
                )
            except h2.exceptions.StreamClosedError:
                return
            self.answering.append((event.stream_id, call.answer))

    def _server_answers(self) -> bool:
        moved = False
        for _ in range(len(self.answering)):
            stream, left = self.answering.popleft()
            window = min(
                self.server.local_flow_control_window(stream), self.server.max_outbound_frame_size
            )
            part = left[:window]
            if part or not left:
                moved = True
                self.server.send_data(stream, part)
                left = left[len(part) :]
                if not left:
                    self.server.send_headers(stream, [("grpc-status", "0")], end_stream=True)
                    continue
            self.answering.append((stream, left))
        return moved

    def _client_event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.by_stream[event.stream_id].client_got += event.data
            self.client.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            self.by_stream[event.stream_id].trailers.update(
                {str(name): str(value) for name, value in event.headers}
            )
        elif isinstance(event, h2.events.StreamEnded):
            self.by_stream[event.stream_id].done = True


def message(size: int, seed: int = 1) -> bytes:
    return add_prefix(random.Random(seed).randbytes(size))
