"""One connection's requests and answers, octet by octet, without sockets."""

from __future__ import annotations

import re

import pytest

from runtime_proxy.docker.http1 import HttpFault, RequestHead
from runtime_proxy.docker.relay import Answered, DockerRelay, Held

GET = b"GET /version HTTP/1.1\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKS = b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
MIB = 1024 * 1024


def to_hold(head: RequestHead) -> bool:
    return head.target.startswith(b"/held")


def post(target: str, body: bytes, *fields: str) -> bytes:
    lines = [f"POST {target} HTTP/1.1", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def new(max_body_bytes: int = 1000) -> DockerRelay:
    return DockerRelay(wants=to_hold, max_body_bytes=max_body_bytes)


def to_dockerd(relay: DockerRelay) -> bytes:
    """Take what is to be sent to dockerd."""
    out, relay.to_server = b"".join(relay.to_server), []
    return out


def to_client(relay: DockerRelay) -> bytes:
    out, relay.to_client = b"".join(relay.to_client), []
    return out


def held(relay: DockerRelay) -> Held:
    (event,) = relay.events
    relay.events = []
    assert isinstance(event, Held)
    return event


SIZES = pytest.mark.parametrize("size", [1, 3, 7, 1000])


def in_parts(octets: bytes, size: int) -> list[bytes]:
    return [octets[at : at + size] for at in range(0, len(octets), size)]


@SIZES
@pytest.mark.parametrize(
    "request_octets",
    [
        GET,
        post("/x", b"abc", "Content-Length: 3"),
        post("/x", CHUNKS, "Transfer-Encoding: chunked"),
        post("/x", b"", "Content-Length: 0"),
    ],
    ids=["no body", "a length", "chunks", "length 0"],
)
@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" + OK,
    ],
    ids=["a length", "chunks", "no body", "after two preliminary ones"],
)
def test_octets_pass_unchanged_in_turn(size: int, request_octets: bytes, answer: bytes) -> None:
    relay = new()
    for _ in range(2):
        assert not relay.busy
        for part in in_parts(request_octets, size):
            relay.from_client(part)
            assert relay.busy
        assert to_dockerd(relay) == request_octets
        for part in in_parts(answer, size):
            assert relay.busy
            relay.from_server(part)
        assert to_client(relay) == answer
    assert not relay.busy
    assert relay.events == []
    assert not relay.closing


def test_a_body_goes_on_before_it_is_whole() -> None:
    relay = new()
    relay.from_client(post("/x", b"ab", "Content-Length: 5"))
    assert to_dockerd(relay).endswith(b"\r\n\r\nab")
    relay.from_client(b"c")
    assert to_dockerd(relay) == b"c"


def test_an_answer_goes_on_before_it_is_whole() -> None:
    relay = new()
    relay.from_client(GET)
    relay.from_server(OK[:-1])
    assert to_client(relay) == OK[:-1]
    relay.from_server(OK[-1:])
    assert to_client(relay) == OK[-1:]


def test_an_answer_to_head_has_no_body() -> None:
    relay = new()
    relay.from_client(GET.replace(b"GET", b"HEAD") + GET)
    to_dockerd(relay)
    relay.from_server(OK[:-2])
    assert to_dockerd(relay) == GET


# -- held requests --------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize(
    ("request_octets", "body", "sent"),
    [
        (
            post("/held", b"abc", "Content-Length: 3", "X: y"),
            b"abc",
            post("/held", b"abc", "Content-Length: 3", "X: y"),
        ),
        (
            post("/held", CHUNKS, "Transfer-Encoding: chunked", "Trailer: t", "X: y"),
            b"abcde",
            post("/held", b"abcde", "X: y", "Content-Length: 5"),
        ),
        (
            post("/held", b"abc", "Content-Length: 3", "Expect: 100-continue", "X: y"),
            b"abc",
            post("/held", b"abc", "X: y", "Content-Length: 3"),
        ),
        (post("/held", b"", "X: y"), b"", post("/held", b"", "X: y", "Content-Length: 0")),
        (post("/held", b"", "Content-Length: 0"), b"", post("/held", b"", "Content-Length: 0")),
    ],
    ids=["a length", "chunks", "an expectation", "no body", "length 0"],
)
@pytest.mark.parametrize("change", [None, b"", b"changed"])
def test_a_held_request_is_sent_when_it_is_released(
    size: int, request_octets: bytes, body: bytes, sent: bytes, change: bytes | None
) -> None:
    """Its own octets, where nothing changed and one length says where they end."""
    relay = new()
    for part in in_parts(request_octets, size):
        assert relay.events == []
        relay.from_client(part)
    event = held(relay)
    assert (event.head.target, event.body) == (b"/held", body)
    assert to_dockerd(relay) == b""
    assert relay.holds_back
    relay.release(change)
    assert not relay.holds_back
    if change is not None:
        head, _, _ = sent.partition(b"\r\n\r\n")
        fields = [f for f in head.split(b"\r\n") if not f.startswith(b"Content-Length")]
        fields += [b"Content-Length: %d" % len(change)]
        sent = b"\r\n".join(fields) + b"\r\n\r\n" + change
    assert to_dockerd(relay) == sent
    relay.release(b"again")
    assert to_dockerd(relay) == b""
    relay.from_server(OK)
    assert relay.events == [Answered(200, b"ok")]


def test_a_client_that_waits_for_a_continue_gets_it_before_its_body() -> None:
    relay = new()
    expecting = post("/held", b"", "Content-Length: 3", "Expect: 100-Continue")
    relay.from_client(expecting)
    assert to_client(relay) == b"HTTP/1.1 100 Continue\r\n\r\n"
    relay.from_client(b"abc")
    assert to_client(relay) == b""
    assert held(relay).body == b"abc"


@pytest.mark.parametrize(
    "fields",
    [
        ("Content-Length: 0", "Expect: 100-continue"),
        ("Content-Length: 3",),
        ("Content-Length: 3", "Expect: something"),
    ],
)
def test_nothing_else_is_continued(fields: tuple[str, ...]) -> None:
    relay = new()
    relay.from_client(post("/held", b"", *fields))
    assert to_client(relay) == b""


def test_dockerd_continues_requests_that_are_not_held() -> None:
    relay = new()
    relay.from_client(post("/x", b"", "Content-Length: 3", "Expect: 100-continue"))
    assert to_client(relay) == b""
    assert b"Expect: 100-continue" in to_dockerd(relay)


@pytest.mark.parametrize("fields", ["Content-Length: {}", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("size", [5, 6])
def test_a_held_body_has_a_limit(fields: str, size: int) -> None:
    relay = new(max_body_bytes=5)
    body = b"x" * size
    if "chunked" in fields:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (size, body)
    relay.from_client(post("/held", body, fields.format(size)))
    if size == 5:
        assert held(relay).body == b"x" * 5
        return
    assert relay.closing
    assert to_client(relay) == (
        b"HTTP/1.1 413 Content Too Large\r\nContent-Type: text/plain; charset=utf-8\r\n"
        b"Content-Length: 25\r\nConnection: close\r\n\r\nrequest body is too large"
    )
    relay.from_client(b"x" * 10 + GET)
    relay.release()
    assert (relay.events, to_dockerd(relay), relay.busy) == ([], b"", False)


def test_other_bodies_have_no_limit() -> None:
    relay = new(max_body_bytes=5)
    octets = post("/x", b"x" * 6, "Content-Length: 6")
    relay.from_client(octets)
    assert to_dockerd(relay) == octets
    assert not relay.closing


def test_a_refusal_ends_the_connection() -> None:
    relay = new()
    relay.from_client(post("/held", b"abc", "Content-Length: 3") + GET)
    relay.refuse(500, "Internal Server Error", "no, näher")
    assert (
        to_client(relay)
        == (
            "HTTP/1.1 500 Internal Server Error\r\nContent-Type: text/plain; charset=utf-8\r\n"
            "Content-Length: 10\r\nConnection: close\r\n\r\nno, näher"
        ).encode()
    )
    assert relay.closing
    relay.release()
    relay.from_client(GET)
    relay.from_server(OK)
    assert (to_dockerd(relay), to_client(relay)) == (b"", b"")


def test_of_the_answer_to_a_held_request_the_first_64_kib_are_kept() -> None:
    relay = new()
    relay.from_client(post("/held", b"", "Content-Length: 0"))
    relay.events.clear()
    relay.release()
    body = b"x" * 70_000
    answer = b"HTTP/1.1 500 Error\r\nContent-Length: 70000\r\n\r\n" + body
    relay.from_server(answer)
    assert relay.events == [Answered(500, body[:65_536])]
    assert to_client(relay) == answer


def test_answers_to_other_requests_are_not_kept() -> None:
    relay = new()
    relay.from_client(post("/held", b"", "Content-Length: 0"))
    relay.release()
    relay.from_server(OK)
    relay.events.clear()
    relay.from_client(GET)
    relay.from_server(OK)
    assert relay.events == []


# -- order ----------------------------------------------------------------------------------------


def test_an_answer_without_a_request_is_a_fault() -> None:
    relay = new()
    with pytest.raises(HttpFault, match=r"^dockerd answers without a request$"):
        relay.from_server(OK)
    relay = new()
    relay.from_client(GET)
    relay.from_server(OK)
    with pytest.raises(HttpFault, match=r"^dockerd answers without a request$"):
        relay.from_server(b"more")


def test_an_answer_that_does_not_wait_for_the_whole_request_is_the_last_one() -> None:
    """Both sides could not agree any more on where the next request begins."""
    relay = new()
    relay.from_client(post("/x", b"a", "Content-Length: 5"))
    to_dockerd(relay)
    relay.from_server(OK)
    assert to_client(relay) == OK
    assert relay.closing
    assert not relay.busy
    relay.from_client(b"bcde" + GET)
    relay.from_server(OK)
    assert (to_dockerd(relay), to_client(relay)) == (b"", b"")


@pytest.mark.parametrize("target", ["/x", "/held"])
def test_what_a_client_sends_ahead_waits_up_to_a_limit(target: str) -> None:
    relay = new()
    relay.from_client(post(target, b"abc", "Content-Length: 3"))
    to_dockerd(relay)
    relay.from_client(GET + b"x" * (MIB - len(GET)))
    assert to_dockerd(relay) == b""
    assert relay.holds_back
    with pytest.raises(HttpFault, match=r"^too much sent ahead of an answer$"):
        relay.from_client(b"x")


# -- pipes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "request_octets"),
    [
        (b"HTTP/1.1 101 UPGRADED\r\nUpgrade: tcp\r\n\r\n", post("/x", b"", "Upgrade: tcp")),
        (b"HTTP/1.1 200 OK\r\n\r\n", GET.replace(b"version", b"events")),
    ],
    ids=["an upgrade", "an answer that the connection ends"],
)
def test_a_connection_becomes_a_pipe(answer: bytes, request_octets: bytes) -> None:
    relay = new()
    relay.from_client(request_octets + b"sent ahead")
    assert to_dockerd(relay) == request_octets
    relay.from_server(answer[:-1])
    assert not relay.piped
    relay.from_server(answer[-1:] + b"at once")
    assert relay.piped
    assert to_client(relay) == answer + b"at once"
    assert to_dockerd(relay) == b"sent ahead"
    assert relay.endless is (b"events" in request_octets)
    for octets in (GET, b"\0" * 3):
        relay.from_client(octets)
        assert to_dockerd(relay) == octets
        relay.from_server(octets)
        assert to_client(relay) == octets
    assert relay.busy
    assert not relay.holds_back
    assert relay.events == []


def test_a_stream_is_endless_once_it_is_asked_for() -> None:
    relay = new()
    events = GET.replace(b"version", b"events").replace(
        b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n"
    )
    relay.from_client(events)
    assert not relay.endless, "the client is still sending"
    relay.from_client(b"x")
    assert relay.endless


@pytest.mark.parametrize(
    ("octets", "fault"),
    [
        (b"GET / HTTP/3\r\n\r\n", "bad request line b'GET / HTTP/3'"),
        (b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", "bad content length b'x'"),
        (
            b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5x\r\n",
            "bad chunk size b'5x'",
        ),
    ],
)
def test_a_broken_request_is_a_fault(octets: bytes, fault: str) -> None:
    with pytest.raises(HttpFault, match=f"^{re.escape(fault)}$"):
        new().from_client(octets)
