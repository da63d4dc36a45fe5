"""Generated worlds around the relay: a client and a server that do whatever HTTP/2 allows.

A seed decides everything: settings, windows, padding, when who sends, resets, leaves or changes
its mind, how octets are cut, what becomes of held requests. First disorder, then both ends work off
what is open; what must hold is in `World.settle` and in `peer.Peer.receive`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from runtime_proxy.http2.grpc import Status, add_prefix
from runtime_proxy.http2.held import Abandoned, Answered, Phase, RequestHeld
from runtime_proxy.http2.relay import Relay
from tests.runtime_proxy.http2.peer import Headers, Peer, Stream

HELD = "/test.Service/Held"
PLAIN = "/test.Service/Plain"
REFUSED = Status(2, "hook server err: no")
_ANSWERED: Headers = [("grpc-status", "0"), ("x-time", "1")]


@dataclass
class Call:
    path: str
    body: bytes
    encoding: str
    becomes: bytes | Status | None
    """What the hooks make of it, if it is held: None leaves it alone."""
    answer: bytes
    early: str
    """The server answers before it has the request: "", "end" or "reset"."""
    told: list[str] = field(default_factory=list)

    @property
    def expected(self) -> bytes:
        changed = self.path == HELD and isinstance(self.becomes, bytes)
        return self.becomes if changed and isinstance(self.becomes, bytes) else self.body


class World:
    def __init__(self, seed: int) -> None:
        self.random = rng = random.Random(seed)
        self.client = Peer(rng, client=True)
        self.server = Peer(rng, client=False)
        self.max_message_bytes = rng.choice([1 << 16, 1 << 20])
        self.relay = Relay(
            intercepted=[HELD.encode()],
            max_message_bytes=self.max_message_bytes,
            clock=lambda: 0.0,
        )
        self.calls: dict[int, Call] = {}
        self.undecided: list[int] = []
        self.server.on_headers = self._request
        self.draining = False
        self._disorder = rng.choice([0.0, 0.01, 0.1])
        self._eagerness = rng.choice([0.05, 0.5, 1.0])
        # Octets under way: (relay to client, relay to server).
        self._pipes = {"client": bytearray(), "server": bytearray()}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
        self.settle()

    # -- disorder --------------------------------------------------------------------------------

    def _step(self) -> None:
        rng = self.random
        for peer in (self.client, self.server):
            if rng.random() < 0.7 and peer.streams:
                peer.send_some(rng.choice(list(peer.streams.values())))
            if rng.random() < self._eagerness:
                peer.give_windows()
            if rng.random() < self._disorder:
                rng.choice([peer.change_settings, peer.ping, peer.chatter])()
            if rng.random() < self._disorder and peer.streams:
                peer.reset(rng.choice(list(peer.streams.values())))
        if rng.random() < 0.2 and len(self.calls) < 20:
            self._open()
        if rng.random() < 0.2:
            self._decide()
        if rng.random() < self._disorder / 20:
            self.relay.drain()
            self.draining = True
        if rng.random() < self._disorder / 20 and self.server.leaving_after is None:
            self.server.leave()
        for _ in range(4):
            self._move(rng.choice([1, 5, 100, 20_000, 1 << 20]))

    def _open(self) -> None:
        rng = self.random
        if not self.client.can_open:
            return
        path = rng.choice([HELD, PLAIN])
        body = add_prefix(rng.randbytes(self._size(self.client)))
        if rng.random() < 0.2:
            body = b"\1" + body[1:]
        call = Call(
            path=path,
            body=body,
            encoding=rng.choice(["", "gzip"]),
            becomes=rng.choice(
                [None, None, add_prefix(rng.randbytes(self._size(self.client))), REFUSED]
            ),
            answer=add_prefix(rng.randbytes(self._size(self.server))),
            early=rng.choice(["", "", "", "", "", "end", "reset", "answer"]),
        )
        number = 2 * len(self.calls) + 1
        self.calls[number] = call
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("x-trace", f"{rng.randrange(5)}" * rng.choice([1, 50, 3000])),
        ]
        if call.encoding:
            headers.append(("grpc-encoding", call.encoding))
        stream = self.client.open(number, headers, body)
        assert stream.unsent

    def _size(self, sender: Peer) -> int:
        receiver = self.server if sender is self.client else self.client
        sizes = [0, 1, 900, 16_379, 40_000, 65_530, 70_000, 200_000]
        return self.random.choice([size for size in sizes if size < receiver.largest_body])

    def _request(self, stream: Stream) -> None:
        call = self.calls[stream.number]
        if call.early == "end":
            self.server.answer_at_once(stream, [(":status", "200"), ("grpc-status", "12")])
        elif call.early == "reset":
            self.server.reset(stream)
        elif call.early == "answer":
            self._answer(stream)

    def _answer(self, stream: Stream) -> None:
        call = self.calls[stream.number]
        headers = [(":status", "200"), ("x-seen", f"{self.random.randrange(3)}" * 40)]
        self.server.answer(stream, headers, call.answer, _ANSWERED)

    def _decide(self) -> bool:
        if not self.undecided:
            return False
        number = self.undecided.pop(self.random.randrange(len(self.undecided)))
        becomes = self.calls[number].becomes
        if isinstance(becomes, Status):
            self.relay.reject(number, becomes)
        else:
            self.relay.release(number, becomes)
        return True

    # -- octets ----------------------------------------------------------------------------------

    def _move(self, most: int) -> bool:
        """Some octets of every kind that is under way; whether there were any."""
        moved = False
        for peer, feed in (
            (self.client, self.relay.from_client),
            (self.server, self.relay.from_server),
        ):
            if part := bytes(peer.octets[:most]):
                del peer.octets[:most]
                feed(part)
                moved = True
        self._hear()
        held = self.relay._calls.held_octets + self.relay._sending.queued
        assert held <= 6 * self.max_message_bytes + self.server.largest_window, "memory grows"
        for name, peer, chunks in (
            ("client", self.client, self.relay.to_client),
            ("server", self.server, self.relay.to_server),
        ):
            pipe = self._pipes[name]
            pipe += b"".join(chunks)
            chunks.clear()
            if part := bytes(pipe[:most]):
                del pipe[:most]
                peer.receive(part)
                moved = True
        for stream in self.server.streams.values():
            if stream.got_end and not stream.may_send and not stream.reset:
                self._answer(stream)
                moved = True
        return moved

    def _hear(self) -> None:
        for event in self.relay.events:
            call = self.calls[event.stream]
            assert call.path == HELD
            assert not {"answered", "abandoned"} & set(call.told), "told of a call after its end"
            if isinstance(event, RequestHeld):
                assert "held" not in call.told
                assert event.body == call.body
                assert event.encoding.decode() == (call.encoding or "identity")
                call.told.append("held")
                self.undecided.append(event.stream)
            elif isinstance(event, Answered):
                assert "held" in call.told
                sent = bytes(self.server.streams[event.stream].sent)
                assert sent.startswith(event.body)
                assert len(event.body) >= min(len(sent), 1 << 16)
                call.told.append("answered")
            else:
                assert isinstance(event, Abandoned)
                call.told.append("abandoned")
        self.relay.events.clear()

    # -- order -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everybody does his duty until nothing moves; then everything has to be in order."""
        for _ in range(200_000):
            moved = self._decide()
            for peer in (self.client, self.server):
                for stream in peer.streams.values():
                    moved |= peer.send_some(stream)
                moved |= peer.give_windows()
            if not self._move(1 << 20) and not moved:
                break
        else:
            raise AssertionError("no end in sight")
        for number, call in self.calls.items():
            self._check(number, call)
        assert not self.client.owed, f"the client waits for {self.client.owed}"
        assert not self.server.owed, f"the server waits for {self.server.owed}"
        relay = self.relay
        assert relay.active == {}
        # A stream that was turned away is known until its client has heard of it.
        assert {held.phase for held in relay._held.values()} <= {Phase.ENDED}
        assert relay._calls.held_octets == 0
        assert not relay._sending.queue
        assert relay._sending.queued == 0
        # Of the windows only what is too little to tell of is kept back.
        assert self.client.send_window >= self.server.window * 3 // 4

    def _check(self, number: int, call: Call) -> None:
        ours = self.client.streams[number]
        theirs = self.server.streams.get(number)
        refused_entry = ours.given_up or (self.draining and theirs is None)
        if theirs is None:
            assert refused_entry or ours.sent_reset, f"stream {number} never arrived"
            return
        assert ours.closed, f"the client waits for stream {number}"
        assert theirs.closed or ours.given_up, f"the server waits for stream {number}"
        got, sent = bytes(theirs.got), bytes(theirs.sent)
        assert sent.startswith(bytes(ours.got))
        assert call.expected.startswith(got)
        if ours.reset or theirs.sent_reset or call.early:
            return
        if call.path == HELD and self._refused(call):
            assert ours.headers[-1]["grpc-status"] in ("2", "8")
            assert not ours.got
            return
        assert got == call.expected
        assert theirs.got_end
        assert bytes(ours.got) == sent == call.answer
        assert ours.headers[-1]["grpc-status"] == "0"
        if call.path == HELD:
            assert call.told == ["held", "answered"]

    def _refused(self, call: Call) -> bool:
        return call.told == ["abandoned"] or isinstance(call.becomes, Status)
