"""The proxy's own client against a strict server (h2): it keeps to what the server allows."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import h2.settings

from runtime_proxy.http2 import frames
from runtime_proxy.http2.client import ClientConnection, Ended
from runtime_proxy.http2.frames import ErrorCode


class Server:
    """Allows `limit` calls at a time."""

    def __init__(self, client: ClientConnection, limit: int) -> None:
        self.client = client
        self.machine = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.machine.initiate_connection()
        self.machine.update_settings({h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: limit})
        self.client.receive(self.machine.data_to_send())
        self.begun: list[int] = []
        self.ended: list[int] = []

    def exchange(self) -> None:
        output, self.client.output = b"".join(self.client.output), []
        for event in self.machine.receive_data(output):
            if isinstance(event, h2.events.RequestReceived):
                self.begun.append(event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.append(event.stream_id)
        self.client.receive(self.machine.data_to_send())

    def answer(self, stream: int) -> None:
        self.machine.send_headers(
            stream, [(":status", "200"), ("grpc-status", "0")], end_stream=True
        )
        self.client.receive(self.machine.data_to_send())


def test_calls_above_the_servers_limit_wait_their_turn() -> None:
    client = ClientConnection(max_message_bytes=1000)
    server = Server(client, 2)
    streams = [client.call(b"/s/m", b"x" * 10, timeout_s=5) for _ in range(5)]
    server.exchange()
    assert server.begun == streams[:2]
    server.answer(streams[0])
    server.exchange()
    assert server.begun == streams[:3]
    client.cancel(streams[3])
    client.cancel(streams[1])
    server.exchange()
    assert server.begun == [*streams[:3], streams[4]]
    server.answer(streams[2])
    server.answer(streams[4])
    assert [e.stream for e in client.events if isinstance(e, Ended)] == [
        streams[0],
        streams[2],
        streams[4],
    ]
    assert client.open_calls == 0


def test_a_call_that_waited_when_the_server_left_was_not_processed() -> None:
    client = ClientConnection(max_message_bytes=1000)
    server = Server(client, 1)
    first, second = (client.call(b"/s/m", b"x", timeout_s=5) for _ in range(2))
    server.exchange()
    client.receive(frames.goaway(frames.LARGEST_WINDOW, ErrorCode.NO_ERROR))
    (ended,) = [e for e in client.events if isinstance(e, Ended)]
    assert (ended.stream, ended.processed) == (second, False)
    server.answer(first)
    assert client.open_calls == 0
