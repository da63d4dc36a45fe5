"""Whatever legal peers do, each of ours is a legal peer too, loses nothing and keeps nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.http2.client import ClientConnection, Ended, Message, Ponged
from runtime_proxy.http2.grpc import Status
from runtime_proxy.http2.refusal import Refusal
from tests.runtime_proxy.http2.peer import Peer
from tests.runtime_proxy.http2.worlds import PLAIN, World

_ENDED_WELL = [("grpc-status", "0")]


def cut(octets: bytes, rng: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(octets):
        size = rng.choice([1, 9, 500, 1 << 20])
        yield octets[at : at + size]
        at += size


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_lost_and_no_client_waits_in_any_world(seed: int) -> None:
    World(seed).run(steps=120)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_our_own_calls_end_once_and_right_with_any_legal_server(seed: int) -> None:
    rng = random.Random(seed)
    server = Peer(rng, client=False)
    connection = ClientConnection(max_message_bytes=1 << 20)
    asked: dict[int, bytes] = {}
    heard: dict[int, list[object]] = {}
    cancelled: set[int] = set()
    pings = 0
    disorder = rng.choice([0.0, 0.1])

    def turn() -> bool:
        moved = bool(connection.output or server.octets)
        to_server, connection.output = b"".join(connection.output), []
        for part in cut(to_server, rng):
            server.receive(part)
        for stream in server.streams.values():
            if stream.got_end and not stream.may_send and not stream.reset:
                server.answer(stream, [(":status", "200")], bytes(stream.got), _ENDED_WELL)
            moved |= server.send_some(stream)
        moved |= server.give_windows()
        to_client, server.octets = bytes(server.octets), bytearray()
        for part in cut(to_client, rng):
            connection.receive(part)
        for event in connection.events:
            if not isinstance(event, Ponged):
                heard[event.stream].append(event)
        connection.events.clear()
        return moved

    for _ in range(60):
        if len(asked) < 15 and rng.random() < 0.4 and connection.usable:
            message = rng.randbytes(rng.choice([0, 1, 900, server.largest_body // 2]))
            number = connection.call(b"/test.Service/Echo", message, timeout_s=None)
            asked[number], heard[number] = message, []
        if rng.random() < disorder and asked:
            victim = rng.choice(list(asked))
            if not heard[victim]:
                connection.cancel(victim)
                cancelled.add(victim)
        if rng.random() < disorder:
            connection.ping(b"%08d" % pings)
            pings += 1
        if rng.random() < disorder:
            rng.choice([server.change_settings, server.ping, server.chatter])()
        if rng.random() < disorder and server.streams:
            server.reset(rng.choice(list(server.streams.values())))
        if rng.random() < disorder / 10 and server.leaving_after is None:
            server.leave()
        turn()
    while turn():
        pass
    assert connection.open_calls == 0
    assert not server.owed
    for number, message in asked.items():
        if number in cancelled and not heard[number]:
            continue
        *messages, end = heard[number]
        assert isinstance(end, Ended)
        if end.status.code == 0:
            assert messages == [Message(number, message)]
        else:
            left = server.leaving_after is not None and number > server.leaving_after
            assert left or server.streams[number].sent_reset


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_legal_client_learns_that_the_runtime_is_away(seed: int) -> None:
    rng = random.Random(seed)
    client = Peer(rng, client=True)
    refusal = Refusal(Status.unavailable("away"))

    def turn() -> bool:
        moved = bool(client.octets or refusal.output)
        octets, client.octets = bytes(client.octets), bytearray()
        for part in cut(octets, rng):
            refusal.receive(part)
        told, refusal.output = b"".join(refusal.output), []
        for part in cut(told, rng):
            client.receive(part)
        return moved

    for number in range(1, 2 * rng.randrange(1, 12), 2):
        if client.can_open:
            client.open(number, [(":path", PLAIN)], rng.randbytes(rng.choice([0, 900, 60_000])))
        for stream in client.streams.values():
            client.send_some(stream)
        rng.choice([client.change_settings, client.ping, client.chatter, client.give_windows])()
        if rng.random() < 0.5:
            turn()
    while turn():
        pass
    refusal.leave()
    turn()
    assert client.goodbye == max(client.streams)
    assert not client.owed
    for stream in client.streams.values():
        assert stream.closed
        assert stream.headers[0]["grpc-status"] == "14"
