"""The relay between two strict HTTP/2 endpoints (h2), driven without sockets.

h2 raises on every protocol or flow control error of its peer, so a run that ends is a proof that
both ends saw correct HTTP/2.
"""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.settings
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.http2 import frames
from runtime_proxy.http2.grpc import Status
from runtime_proxy.http2.held import Abandoned, Answered, RequestHeld
from runtime_proxy.http2.refusal import Refusal
from tests.runtime_proxy.http2.h2_ends import HELD, PLAIN, Call, World, message

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


def test_an_answered_call_carries_its_message() -> None:
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


def test_a_cancelled_call_is_abandoned_and_the_server_notified() -> None:
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


def test_a_server_that_answers_before_it_was_sent_the_request_keeps_no_half_open_stream() -> None:
    call = Call(HELD, message(100))
    world = World([call], answers_at_once=lambda path: True)
    world.random.random = lambda: 1.0  # type: ignore[method-assign]
    for _ in range(20):
        world.step()
    assert call.done
    assert world.server.open_inbound_streams == 0


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


def test_a_client_that_allows_no_header_table_learns_that_the_runtime_is_away() -> None:
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
