"""The relay between two strict HTTP/2 endpoints (h2), driven without sockets.

h2 raises on every protocol or flow control error of its peer, so a run that ends is a proof that
both ends saw correct HTTP/2.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.http2 import frames, hpack
from runtime_proxy.http2.frames import ConnectionFault, ErrorCode
from runtime_proxy.http2.grpc import Status, add_prefix, status_headers
from runtime_proxy.http2.held import Abandoned, Answered, RequestHeld
from runtime_proxy.http2.refusal import Refusal
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


sizes = st.sampled_from([0, 1, 2_000, 16_379, 16_380, 40_000, 65_530, 70_000, 200_000])
fates = st.one_of(
    st.none(), sizes.map(lambda size: message(size, 2)), st.just(Status(2, "hook server err: no"))
)
calls = st.builds(
    Call,
    path=st.sampled_from([HELD, PLAIN]),
    body=sizes.map(message),
    becomes=fates,
    answer=sizes.map(lambda size: message(size, 3)),
)


@settings(max_examples=30, deadline=None)
@given(
    calls=st.lists(calls, min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    window=st.sampled_from([1_000, 65_535, 300_000]),
)
def test_every_call_ends_right_whatever_is_held_changed_or_refused(
    calls: list[Call], seed: int, window: int
) -> None:
    # Hypothesis reuses drawn objects: a call's outcome must not leak into the next example.
    calls = [Call(c.path, c.body, c.becomes, c.answer) for c in calls]
    world = World(calls, seed=seed, server_window=window)
    world.run()
    for call in calls:
        if call.path == HELD and isinstance(call.becomes, Status):
            assert call.trailers["grpc-status"] == "2"
            assert call.trailers["grpc-message"] == "hook server err: no"
            assert not call.server_got
            assert not call.client_got
            continue
        changed = call.path == HELD and call.becomes is not None
        assert bytes(call.server_got) == (call.becomes if changed else call.body)
        assert call.server_ended
        assert call.client_got == call.answer
        assert call.trailers["grpc-status"] == "0"
    assert not world.relay.active


def test_a_slow_hook_does_not_starve_the_calls_beside_it() -> None:
    held = [Call(HELD, message(60_000)) for _ in range(4)]
    plain = Call(PLAIN, message(50_000))
    world = World([*held, plain], seed=3)
    world.random.random = lambda: 1.0  # type: ignore[method-assign]  # no decision ever
    for _ in range(300):
        world.step()
    assert plain.done
    assert not any(call.done for call in held)


def test_an_answer_that_comes_before_the_decision_ends_the_call() -> None:
    call = Call(HELD, message(100))
    world = World([call], answers_at_once=lambda path: True)
    world.random.random = lambda: 1.0  # type: ignore[method-assign]  # the hook is still thinking
    for _ in range(20):
        world.step()
    assert call.trailers["grpc-status"] == "12"
    assert [type(event) for event in world.events] in ([Abandoned], [RequestHeld, Abandoned])
    world.relay.release(1)
    assert not world.relay.to_server


def test_a_last_word_of_the_servers_does_not_overtake_a_refusal() -> None:
    call = Call(HELD, message(100), Status(2, "hook server err: no"))
    world = World([call])
    world.random.random = lambda: 1.0  # type: ignore[method-assign]
    for _ in range(10):
        world.step()
    # grpc-go's handler, woken by the reset, answers before the stream is cleaned up.
    world.server.send_headers(
        1, [(":status", "200"), ("grpc-status", "1"), ("x-new", "joins the table")], end_stream=True
    )
    last_word = world.server.data_to_send()
    world.relay.reject(1, Status(2, "hook server err: no"))
    world.relay.from_server(last_word)
    for _ in range(10):
        world.step()
    assert call.done
    assert call.trailers["grpc-status"] == "2"
    assert call.trailers["x-new"] == "joins the table"


def test_an_answered_call_tells_its_message() -> None:
    call = Call(HELD, message(10), answer=message(77))
    world = World([call])
    world.run()
    world.step()
    assert Answered(1, call.answer) in world.events


def test_a_message_above_the_limit_is_refused_with_the_runtimes_words() -> None:
    call = Call(HELD, message(70_000))
    world = World([call], max_message_bytes=65_536)
    world.run()
    assert call.trailers["grpc-status"] == "8"
    assert call.trailers["grpc-message"] == (
        "grpc: received message larger than max (70000 vs. 65536)"
    )


def test_a_cancelled_call_is_abandoned_and_the_server_told() -> None:
    call = Call(HELD, message(10))
    world = World([call])
    world.random.random = lambda: 1.0  # type: ignore[method-assign]
    for _ in range(10):
        world.step()
    world.client.reset_stream(1, error_code=8)
    seen: list[object] = []
    world._server_event = seen.append  # type: ignore[method-assign, assignment]
    for _ in range(5):
        world.step()
    assert any(isinstance(event, h2.events.StreamReset) for event in seen)
    assert Abandoned(1) in world.events


def test_after_draining_no_new_stream_reaches_the_server() -> None:
    first, second = Call(PLAIN, message(10)), Call(PLAIN, message(10))
    world = World([first])
    world.run()
    world.relay.drain()
    goodbye = b"".join(world.relay.to_client)
    assert goodbye[3] == frames.GOAWAY
    assert int.from_bytes(goodbye[9:13], "big") == 1
    world.relay.to_client.clear()
    world.by_stream[3] = second
    world.client.send_headers(
        3, [(":method", "POST"), (":scheme", "http"), (":path", "/x"), (":authority", "a")]
    )
    world.client.send_data(3, b"data", end_stream=True)
    world.relay.from_client(world.client.data_to_send())
    sent = b"".join(world.relay.to_server)
    while sent:
        assert sent[3] == frames.SETTINGS  # the acknowledgements of the first call's time
        sent = sent[frames.HEADER_SIZE + int.from_bytes(sent[:3], "big") :]
    assert not world.relay.active


def _settled_relay() -> Relay:
    relay = _relay()
    relay.from_server(frames.settings({}) + frames.SETTINGS_ACK)
    relay.to_client.clear()
    return relay


def test_a_ping_of_the_servers_is_answered_without_waking_the_client() -> None:
    relay = _settled_relay()
    relay.from_server(frames.ping(b"12345678"))
    assert relay.to_client == []
    assert relay.to_server == [frames.ping_ack(b"12345678")]


def test_a_ping_of_the_clients_asks_the_server_and_its_answer_comes_back() -> None:
    relay = _settled_relay()
    relay.from_client(frames.ping(b"12345678"))
    assert relay.to_server == [frames.ping(b"12345678")]
    relay.from_server(frames.ping_ack(b"12345678"))
    assert relay.to_client == [frames.ping_ack(b"12345678")]


def test_a_leaving_servers_ping_asks_the_client_whether_it_knows() -> None:
    relay = _settled_relay()
    leaving = frames.goaway(frames.LARGEST_WINDOW, ErrorCode.NO_ERROR) + frames.ping(b"goodbye!")
    relay.from_server(leaving)
    assert b"".join(relay.to_client) == leaving
    assert relay.to_server == []


def test_small_grants_wait_until_they_are_worth_waking_the_client() -> None:
    relay = _settled_relay()
    relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * 1_000))
    relay.from_server(frames.window_update(0, 1_000))
    assert relay.to_client == []
    for _ in range(4):
        relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * 4_000))
        relay.from_server(frames.window_update(0, 4_000))
    assert relay.to_client == [frames.window_update(0, 17_000)]


def test_a_client_without_window_gets_the_smallest_grant_at_once() -> None:
    relay = _settled_relay()
    for size in (16_384, 16_384, 16_384, 16_383):
        relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * size))
    relay.from_server(frames.window_update(0, 1))
    assert relay.to_client == [frames.window_update(0, 1)]


def test_what_was_owed_is_granted_when_the_client_spends_the_rest() -> None:
    relay = _settled_relay()
    relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * 10_000))
    relay.from_server(frames.window_update(0, 10_000))
    assert relay.to_client == []
    for size in (16_384, 16_384):
        relay.from_client(frames.frame(frames.DATA, 0, 1, b"x" * size))
    assert relay.to_client == [frames.window_update(0, 10_000)]


def _relay() -> Relay:
    relay = Relay(intercepted=[HELD], max_message_bytes=1 << 20, clock=lambda: 0.0)
    relay.from_client(_preface())
    relay.to_server.clear()
    return relay


def _opened(stream: int, path: bytes = HELD) -> bytes:
    block = hpack.encode([(b":method", b"POST"), (b":path", path)])
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block)


def _data(stream: int, body: bytes, flags: int = 0) -> bytes:
    return frames.data_frames(stream, body, max_frame_size=16_384, end=bool(flags))


def _answer(stream: int, flags: int = 0, block: bytes = b"\x88") -> bytes:
    return frames.frame(frames.HEADERS, frames.END_HEADERS | flags, stream, block)


def test_a_client_hears_the_servers_settings_before_anything_of_ours() -> None:
    relay = _relay()
    relay.from_client(_opened(1) + _data(1, message(200_000)[:16_384]))
    relay.drain()
    assert relay.to_client == []
    relay.from_server(frames.settings({}))
    heard = b"".join(relay.to_client)
    assert heard.startswith(frames.settings({}))
    assert frames.window_update(1, 200_005 - 65_535) in heard
    assert frames.goaway(1, ErrorCode.NO_ERROR, "draining") in heard


def test_what_comes_of_a_request_behind_its_answer_goes_nowhere() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(40_000)[:16_384]))
    relay.to_server.clear()
    relay.from_server(_answer(1, frames.END_STREAM))
    assert relay.to_server == [frames.rst_stream(1, ErrorCode.CANCEL)]
    assert relay.to_client[0] == _answer(1, frames.END_STREAM)
    assert frames.rst_stream(1, ErrorCode.NO_ERROR) in relay.to_client[1:]
    assert relay.events == [Abandoned(1)]
    relay.to_server.clear()
    relay.from_client(_data(1, message(40_000)[16_384:], frames.END_STREAM) + _opened(3, PLAIN))
    assert relay.to_server == [_opened(3, PLAIN)]


def test_data_that_waits_for_a_server_that_has_answered_is_let_go() -> None:
    relay = _settled_relay()
    grown = message(100_000)
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM) + _opened(3, PLAIN))
    relay.release(1, grown)
    relay.from_client(_data(3, b"x" * 9_000))
    relay.to_server.clear()
    relay.from_server(_answer(3, frames.END_STREAM))
    assert relay.to_server == [frames.rst_stream(3, ErrorCode.CANCEL)]
    relay.from_server(frames.window_update(0, 1 << 20) + frames.window_update(1, 1 << 20))
    assert b"".join(relay.to_server[1:]) == _data(1, grown[65_535:], frames.END_STREAM)


def test_an_end_that_comes_behind_an_answer_does_not_wait_for_window() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM) + _opened(3, PLAIN))
    relay.release(1, message(100_000))
    relay.from_server(_answer(3, frames.END_STREAM))
    relay.to_server.clear()
    relay.from_client(_data(3, b"x" * 9_000, frames.END_STREAM))
    assert relay.to_server == [frames.rst_stream(3, ErrorCode.CANCEL)]


def test_an_answer_that_has_begun_wins_against_a_refusal() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM))
    relay.from_server(_answer(1))
    relay.reject(1, Status(2, "hook server err: no"))
    relay.from_server(_answer(1, frames.END_STREAM) + frames.SETTINGS_ACK)
    assert b"".join(relay.to_client) == _answer(1) + _answer(1, frames.END_STREAM)
    assert relay.events[1:] == [Abandoned(1)]


@pytest.mark.parametrize(
    ("allowed", "servers_own", "said"),
    [
        ([16_384, 5_000], [16_384], hpack.table_size_update(5_000)),
        ([300], [], hpack.table_size_update(300)),
        # The server keeps less than the client allows: saying more would undo that.
        ([16_384, 300], [0], b""),
        ([300, 4096], [], hpack.table_size_update(300)),
    ],
)
def test_a_refusal_begins_with_the_table_that_the_client_has_come_to_allow(
    allowed: list[int], servers_own: list[int], said: bytes
) -> None:
    relay = _settled_relay()
    relay.from_client(frames.settings({frames.SETTING_HEADER_TABLE_SIZE: allowed[0]}))
    relay.from_server(frames.SETTINGS_ACK)
    if servers_own:
        relay.from_client(_opened(1, PLAIN))
        sizes = b"".join(map(hpack.table_size_update, servers_own))
        relay.from_server(_answer(1, frames.END_STREAM, sizes + b"\x88"))
    for size in allowed[1:]:
        relay.from_client(frames.settings({frames.SETTING_HEADER_TABLE_SIZE: size}))
        relay.from_server(frames.SETTINGS_ACK)
    relay.from_client(_opened(3) + _data(3, message(10), frames.END_STREAM))
    relay.reject(3, Status(2, "no"))
    relay.to_client.clear()
    relay.from_server(frames.SETTINGS_ACK)
    block = said + hpack.encode(status_headers(Status(2, "no"), trailers=False))
    assert relay.to_client == [_answer(3, frames.END_STREAM, block)]


def test_streams_that_a_leaving_server_never_looks_at_are_over() -> None:
    relay = _settled_relay()
    held = _data(3, message(10), frames.END_STREAM)
    relay.from_client(_opened(1, PLAIN) + _opened(3) + held)
    relay.from_server(frames.goaway(1, ErrorCode.NO_ERROR))
    relay.from_client(_opened(5) + _data(5, message(10)))
    assert list(relay.active) == [1]
    assert relay.events[1:] == [Abandoned(3)]


def test_half_a_held_message_leaves_the_window_to_the_streams_beside_it() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _opened(3, PLAIN) + _data(1, message(40_000)[:30_000]))
    relay.to_client.clear()
    relay.from_client(_data(3, b"x" * 32_768) + _data(3, b"x" * 2_767))
    assert relay.to_client == [frames.window_update(0, 30_000)]


def test_padding_that_is_left_out_is_given_back_to_its_stream() -> None:
    relay = _settled_relay()
    relay.from_client(_opened(1) + _data(1, message(10), frames.END_STREAM) + _opened(3, PLAIN))
    relay.release(1, message(100_000))
    padded = bytes((200,)) + b"x" * 9_000 + bytes(200)
    relay.from_client(frames.frame(frames.DATA, frames.PADDED, 3, padded))
    relay.to_client.clear()
    relay.from_server(frames.window_update(0, 40_000) + frames.window_update(1, 100_000))
    assert frames.window_update(3, 201) in relay.to_client


def test_an_error_text_of_many_frames_passes() -> None:
    relay = _relay()
    block = (
        frames.frame(frames.HEADERS, frames.END_STREAM, 1, b"x" * 16_384)
        + frames.frame(frames.CONTINUATION, 0, 1, b"x" * 16_384) * 60
        + frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"x")
    )
    for at in range(0, len(block), 100_000):
        relay.from_server(block[at : at + 100_000])
    assert b"".join(relay.to_client) == block


def test_frames_sent_before_a_smaller_limit_was_seen_pass() -> None:
    relay = _relay()
    relay.from_server(frames.settings({frames.SETTING_MAX_FRAME_SIZE: 40_000}))
    relay.from_server(frames.settings({frames.SETTING_MAX_FRAME_SIZE: 16_384}))
    relay.from_client(frames.settings({frames.SETTING_MAX_FRAME_SIZE: 40_000}))
    relay.from_client(frames.settings({frames.SETTING_MAX_FRAME_SIZE: 16_384}))
    large = frames.frame(frames.DATA, 0, 1, b"x" * 30_000)
    relay.from_client(large)
    relay.from_server(large)
    assert relay.to_server[-1].endswith(large)
    assert relay.to_client[-1].endswith(large)


def test_a_server_that_answers_before_it_was_sent_the_request_keeps_no_half_open_stream() -> None:
    call = Call(HELD, message(100))
    world = World([call], answers_at_once=lambda path: True)
    world.random.random = lambda: 1.0  # type: ignore[method-assign]
    for _ in range(20):
        world.step()
    assert call.done
    assert world.server.open_inbound_streams == 0


def test_half_messages_cannot_fill_the_memory() -> None:
    largest = 1 << 16
    relay = Relay(intercepted=[HELD], max_message_bytes=largest, clock=lambda: 0.0)
    relay.from_client(_preface())
    relay.from_server(frames.settings({}))
    block = hpack.encode([(b":method", b"POST"), (b":path", HELD)])

    def half(stream: int) -> None:
        relay.from_client(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, block))
        body = b"\0" + largest.to_bytes(4, "big") + b"x" * 48_000
        for at in range(0, len(body), 16_000):
            relay.from_client(frames.frame(frames.DATA, 0, stream, body[at : at + 16_000]))

    for stream in range(1, 400, 2):
        relay.to_server.clear()
        half(stream)
        if len(relay.to_server) > 1:
            break
    assert stream == 11
    assert frames.rst_stream(stream, ErrorCode.CANCEL) in relay.to_server
    relay.from_server(frames.SETTINGS_ACK * 2)
    assert b"octets of requests wait" in b"".join(relay.to_client)
    for ended in (1, 3):
        relay.from_client(frames.rst_stream(ended, ErrorCode.CANCEL))
    relay.to_server.clear()
    half(13)
    assert relay.to_server == [frames.frame(frames.HEADERS, frames.END_HEADERS, 13, block)]


def test_a_client_that_allows_no_header_table_reads_our_refusal() -> None:
    call = Call(HELD, message(100), Status(2, "hook server err: no"))
    world = World([call])
    world.random.random = lambda: 1.0  # type: ignore[method-assign]
    for _ in range(10):
        world.step()
    world.client.update_settings({h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0})
    for _ in range(10):
        world.step()
    world.relay.reject(1, Status(2, "hook server err: no"))
    for _ in range(10):
        world.step()
    assert call.trailers["grpc-status"] == "2"


def test_a_client_that_allows_no_header_table_is_told_that_the_runtime_is_away() -> None:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.local_settings = h2.settings.Settings(
        client=True, initial_values={h2.settings.SettingCodes.HEADER_TABLE_SIZE: 0}
    )
    client.initiate_connection()
    client.decoder.max_allowed_table_size = 0
    client.send_headers(
        1,
        [(":method", "POST"), (":path", "/a/b"), (":scheme", "http"), (":authority", "x")],
    )
    refusal = Refusal(Status.unavailable("away"))
    refusal.receive(client.data_to_send())
    events = client.receive_data(b"".join(refusal.output))
    assert any(isinstance(event, h2.events.ResponseReceived) for event in events)


def test_a_released_message_keeps_to_settings_that_the_client_has_acknowledged() -> None:
    relay = _relay()
    relay.from_server(frames.settings({frames.SETTING_INITIAL_WINDOW_SIZE: 100}))
    relay.from_client(frames.SETTINGS_ACK)
    block = hpack.encode([(b":method", b"POST"), (b":path", HELD)])
    body = message(300)
    relay.from_client(
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
        + frames.frame(frames.DATA, frames.END_STREAM, 1, body)
    )
    relay.from_server(frames.settings({frames.SETTING_INITIAL_WINDOW_SIZE: 1000}))
    relay.to_server.clear()
    relay.release(1)
    assert relay.to_server == [frames.frame(frames.DATA, 0, 1, body[:100])]
    relay.to_server.clear()
    relay.from_client(frames.SETTINGS_ACK)
    assert relay.to_server == [
        frames.SETTINGS_ACK,
        frames.frame(frames.DATA, frames.END_STREAM, 1, body[100:]),
    ]


def _preface() -> bytes:
    return frames.PREFACE + frames.settings({})


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
        (_preface() + frames.frame(frames.DATA, 0, 1, b"x" * 16_385), ErrorCode.FRAME_SIZE_ERROR),
        (_preface() + frames.frame(frames.CONTINUATION, 4, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (
            _preface()
            + frames.frame(frames.HEADERS, 0, 1, b"\x82")
            + frames.frame(frames.DATA, 0, 1, b""),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (_preface() + frames.frame(frames.HEADERS, 4, 2, b"\x82"), ErrorCode.PROTOCOL_ERROR),
        (_preface() + frames.frame(frames.HEADERS, 4, 1, b"\xff\x00"), ErrorCode.COMPRESSION_ERROR),
        (_preface() + frames.frame(frames.HEADERS, 4, 1, b"\x40\x7f"), ErrorCode.COMPRESSION_ERROR),
        (
            _preface() + frames.frame(frames.HEADERS, 4 | 8, 1, b"\xff\x82"),
            ErrorCode.PROTOCOL_ERROR,
        ),
        (_preface() + frames.settings({5: 1}), ErrorCode.PROTOCOL_ERROR),
        (_preface() + frames.frame(frames.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
        (
            _preface() + b"".join(frames.frame(frames.DATA, 0, 1, b"x" * 16_384) for _ in range(5)),
            ErrorCode.FLOW_CONTROL_ERROR,
        ),
        (
            _preface()
            + frames.frame(frames.HEADERS, 0, 1, b"")
            + b"".join(frames.frame(frames.CONTINUATION, 0, 1, b"\0" * 16_384) for _ in range(17)),
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
        (
            _preface()
            + frames.frame(frames.HEADERS, 0, 1, b"")
            + frames.frame(frames.CONTINUATION, 0, 1) * 100,
            ErrorCode.ENHANCE_YOUR_CALM,
        ),
    ],
    ids=[
        "http/1.1",
        "frame too big",
        "continuation alone",
        "frame in a header block",
        "even stream",
        "index beyond the table",
        "block cut short",
        "padding too long",
        "frame size setting",
        "settings cut short",
        "more data than the window",
        "endless header block",
        "header block of empty frames",
    ],
)
def test_a_client_that_breaks_the_protocol_is_told_how(octets: bytes, code: ErrorCode) -> None:
    relay = Relay(intercepted=[HELD], max_message_bytes=1 << 20, clock=lambda: 0.0)
    with pytest.raises(ConnectionFault) as fault:
        relay.from_client(octets)
    assert fault.value.code is code
    assert relay.fault_goodbye(fault.value)[3] == frames.GOAWAY


@settings(max_examples=200, deadline=None)
@given(garbage=st.binary(max_size=400), cut=st.integers(0, 400))
def test_no_octets_of_a_client_do_more_than_end_its_connection(garbage: bytes, cut: int) -> None:
    relay = Relay(intercepted=[HELD], max_message_bytes=1 << 20, clock=lambda: 0.0)
    try:
        relay.from_client(_preface() + garbage[:cut])
        relay.from_client(garbage[cut:])
        relay.from_server(garbage)
    except ConnectionFault:
        pass
