"""Docker mode's connections on transports that only record: slow readers and early octets."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from runtime_proxy.docker.agent import _Upstream
from tests.runtime_proxy.docker.agent_bed import (
    ATTACH,
    GET,
    RAW,
    bed_in,
)
from tests.waiting import until


class Wire(asyncio.Transport):
    """Records what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reading = True
        self.closed = False
        self.ended = False
        self.high: int | None = None
        self.ends = socket.socketpair()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"socket": self.ends[0]}[name]

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def write(self, data: Any) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


def on_wires(folder: Path, test: Any) -> None:
    """Run a test with a connection, its client's wire, and dockerd's, which is not yet there."""

    async def main() -> None:
        bed = bed_in(folder)
        connection: Any = bed.agent.new_connection()
        client = Wire()
        connection.connection_made(client)
        test(connection, client, Wire())
        connection.close()
        await bed.agent.close()

    asyncio.run(main())


def test_a_reader_that_is_slow_slows_the_other_side(tmp_path: Path) -> None:
    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        connection.pause_writing()
        connection.resume_writing()
        upstream = _Upstream(connection)
        upstream.connection_made(dockerd)
        for writer, reader, protocol in (
            (client, dockerd, connection),
            (dockerd, client, upstream),
        ):
            pause, resume = protocol.pause_writing, protocol.resume_writing
            assert writer.high == 1024 * 1024
            pause()
            assert (reader.reading, writer.reading) == (False, True)
            resume()
            assert reader.reading
            # Its own loop ends what is closed: uvloop refuses to read on.
            pause()
            reader.closed = True
            resume()
            assert not reader.reading
            reader.closed, reader.reading = False, True

    on_wires(tmp_path, test)


def test_what_comes_before_dockerd_answers_the_dial_is_kept_up_to_a_limit(tmp_path: Path) -> None:
    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        head = b"POST /echo HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n"
        early = head + b"x" * (1024 * 1024 - len(head))
        connection.data_received(early[:5])
        connection.data_received(early[5:])
        connection.upstream_made(dockerd)
        assert (dockerd.written, dockerd.ended) == (early, False)
        connection.data_received(b"y")
        assert dockerd.written == early + b"y"
        assert (client.written, client.closed) == (b"", False)

    on_wires(tmp_path, test)


def test_more_than_the_limit_before_dockerd_answers_the_dial_ends_the_connection(
    tmp_path: Path,
) -> None:
    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        connection.data_received(GET + b"x" * (1024 * 1024 + 1 - len(GET)))
        assert client.closed
        connection.upstream_made(dockerd)
        assert dockerd.closed
        assert dockerd.written == b""

    on_wires(tmp_path, test)


@pytest.mark.parametrize("sent", [GET, b""])
def test_a_client_that_ends_before_dockerd_answers_the_dial_is_passed_on(
    tmp_path: Path, sent: bytes
) -> None:
    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        if sent:
            connection.data_received(sent)
        assert connection.eof_received()
        connection.upstream_made(dockerd)
        assert (dockerd.written, dockerd.ended) == (sent, True)

    on_wires(tmp_path, test)


@pytest.mark.parametrize("sent", [GET, b""])
def test_a_client_that_ends_before_the_dial_fails_is_answered_and_closed(
    tmp_path: Path, sent: bytes
) -> None:
    async def main() -> None:
        bed = bed_in(tmp_path)
        connection: Any = bed.agent.new_connection()
        client = Wire()
        connection.connection_made(client)
        if sent:
            connection.data_received(sent)
        assert connection.eof_received()
        await until(lambda: client.closed)
        assert client.written.startswith(b"HTTP/1.1 503 ") is bool(sent)

    asyncio.run(main())


def test_a_pipe_whose_ends_have_both_ended_is_closed(tmp_path: Path) -> None:
    """A protocol that returns False to its transport has it closed."""

    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        upstream = _Upstream(connection)
        upstream.connection_made(dockerd)
        connection.data_received(ATTACH)
        upstream.data_received(RAW)
        assert upstream.eof_received()
        assert client.ended
        assert not dockerd.ended
        assert not connection.eof_received()
        assert dockerd.ended
        assert not upstream.eof_received()

    on_wires(tmp_path, test)


@pytest.mark.parametrize("closing", ["client", "dockerd"])
def test_an_end_is_not_passed_on_to_a_side_that_closes(tmp_path: Path, closing: str) -> None:
    """The event loop refuses to write to it."""

    def test(connection: Any, client: Wire, dockerd: Wire) -> None:
        upstream = _Upstream(connection)
        upstream.connection_made(dockerd)
        connection.data_received(ATTACH)
        upstream.data_received(RAW)
        if closing == "client":
            client.closed = True
            upstream.eof_received()
        else:
            dockerd.closed = True
            connection.eof_received()
        assert not client.ended
        assert not dockerd.ended

    on_wires(tmp_path, test)
