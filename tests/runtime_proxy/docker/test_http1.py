"""Where HTTP/1.1 messages end, and what is refused because two readers might disagree."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.docker.http1 import (
    Body,
    Framing,
    HttpFault,
    parse_request,
    parse_response,
    request_framing,
    response_framing,
    split_head,
    with_body,
)
from runtime_proxy.docker.relay import Answered, DockerRelay, Held


@pytest.mark.parametrize(
    ("fields", "framing"),
    [
        (b"", Framing()),
        (b"Content-Length: 5\r\n", Framing(length=5)),
        (b"content-length: 5\r\nContent-Length: 5\r\n", Framing(length=5)),
        (b"Transfer-Encoding: Chunked\r\n", Framing(chunked=True)),
    ],
)
def test_a_requests_length_is_found(fields: bytes, framing: Framing) -> None:
    head = parse_request(b"POST /x HTTP/1.1\r\n" + fields + b"\r\n")
    assert request_framing(head) == framing


@pytest.mark.parametrize(
    "octets",
    [
        b"POST /x HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /x HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /x HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n",
        b"POST /x HTTP/1.1\r\nContent-Length: +5\r\n\r\n",
        b"POST /x HTTP/1.1\r\nContent-Length : 5\r\n\r\n",
        b"POST /x HTTP/1.1\r\n Folded: x\r\n\r\n",
        b"POST /x HTTP/1.1\r\nA: b\rContent-Length: 5\r\n\r\n",
        b"POST /x HTTP/1.1\r\r\nContent-Length: 5\r\n\r\n",
        b"POST  /x HTTP/1.1\r\n\r\n",
        b"POST /x HTTP/2.0\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_an_ambiguous_request_is_refused(octets: bytes) -> None:
    with pytest.raises(HttpFault):
        request_framing(parse_request(octets))


@pytest.mark.parametrize(
    ("octets", "method", "framing"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"GET", Framing(length=3)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n", b"HEAD", Framing()),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"POST", Framing()),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", b"POST", Framing()),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"POST", Framing(until_close=True)),
    ],
)
def test_an_answers_length_is_found(octets: bytes, method: bytes, framing: Framing) -> None:
    assert response_framing(parse_response(octets), method) == framing


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\nT: x\r\n\r\n"


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(st.binary(min_size=1, max_size=50), max_size=5), cuts=st.lists(st.integers(1, 9))
)
def test_a_chunked_body_ends_where_it_ends_however_it_arrives(
    parts: list[bytes], cuts: list[int]
) -> None:
    data = chunked(parts)
    rest = data + b"NEXT"
    body = Body(Framing(chunked=True), keep=1000)
    at = 0
    for cut in [*cuts, *([50] * len(rest))]:
        if body.done:
            break
        at += body.feed(rest[at : at + cut])
    assert body.done
    assert rest[at:] == b"NEXT"
    assert bytes(body.content) == b"".join(parts)


@pytest.mark.parametrize(
    "data", [b"zz\r\n", b"5\nhello", b"2\r\nabc\r\n", b"f" * 20 + b"\r\n", b"1" * 5000]
)
def test_a_broken_chunk_is_a_fault(data: bytes) -> None:
    with pytest.raises(HttpFault):
        Body(Framing(chunked=True)).feed(data)


def test_a_head_without_end_is_a_fault() -> None:
    with pytest.raises(HttpFault):
        split_head(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200_000)


def test_a_head_that_dockerd_takes_is_taken() -> None:
    octets = b"POST /build HTTP/1.1\r\nX-Registry-Config: " + b"e" * 900_000 + b"\r\n\r\n"
    assert split_head(octets) == (octets, b"")


def test_another_body_gets_its_own_length() -> None:
    head = parse_request(
        b"POST /x HTTP/1.1\r\nHost: d\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    )
    assert with_body(head, b"abc") == (
        b"POST /x HTTP/1.1\r\nHost: d\r\nContent-Length: 3\r\n\r\nabc"
    )


@settings(max_examples=200, deadline=None)
@given(garbage=st.binary(max_size=300))
def test_no_octets_do_more_than_end_the_connection(garbage: bytes) -> None:
    relay = DockerRelay(wants=lambda head: True, max_body_bytes=1000)
    try:
        relay.from_client(garbage)
        relay.from_server(garbage)
    except HttpFault:
        assert not relay.to_server


def test_pipelined_requests_follow_each_other() -> None:
    relay = DockerRelay(wants=lambda head: head.target == b"/held", max_body_bytes=1000)
    held = b"POST /held HTTP/1.1\r\nContent-Length: 2\r\n\r\nab"
    relay.from_client(held + b"GET /next HTTP/1.1\r\n\r\n")
    assert relay.to_server == []
    (event,) = relay.events
    assert isinstance(event, Held)
    assert event.body == b"ab"
    relay.events.clear()
    relay.release()
    assert b"".join(relay.to_server) == held
    relay.to_server.clear()
    relay.from_server(b"HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\nbody")
    assert relay.events == [Answered(201, b"body")]
    assert b"".join(relay.to_server) == b"GET /next HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/events", True),
        ("/v1.41/events?filters=%7B%7D", True),
        ("/v1.41/events?since=1&until=2", False),
        ("/containers/a/logs?stdout=1", False),
        ("/containers/a/logs?stdout=1&follow=1", True),
        ("/v1.41/containers/a/logs?follow=False", False),
        ("/containers/a/stats", True),
        ("/containers/a/stats?stream=0", False),
        ("/containers/a/json", False),
        ("/containers/a/attach/ws?stream=1", False),
        ("//[", False),
    ],
)
def test_streams_without_an_end_are_known_by_their_requests(target: str, expected: bool) -> None:
    relay = DockerRelay(wants=lambda head: False, max_body_bytes=1000)
    relay.from_client(f"GET {target} HTTP/1.1\r\n\r\n".encode())
    assert relay.endless is expected
    relay.from_server(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    assert not relay.endless


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("empty", [b"\n", b"\r\n"])
@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_a_head_may_end_its_lines_in_bare_line_feeds(end: bytes, empty: bytes, cut: int) -> None:
    """Go's net/http takes both, so dockerd does."""
    head = end.join([b"POST /x HTTP/1.1", b"Content-Length: 3", b"A: b"]) + end + empty
    assert split_head(head[: min(cut, len(head) - 1)]) is None
    parted = split_head(head + b"abc\n\n")
    assert parted == (head, b"abc\n\n")
    read = parse_request(parted[0])
    assert (read.method, read.target) == (b"POST", b"/x")
    assert read.fields == ((b"content-length", b"3"), (b"a", b"b"))
    assert request_framing(read) == Framing(length=3)
    assert with_body(read, b"longer") == (
        b"POST /x HTTP/1.1\r\nA: b\r\nContent-Length: 6\r\n\r\nlonger"
    )


def test_a_chunks_size_must_not_end_in_a_bare_line_feed() -> None:
    with pytest.raises(HttpFault, match="carriage return"):
        Body(Framing(chunked=True)).feed(b"3\nabc\r\n0\r\n\r\n")


# -- limits and their texts -----------------------------------------------------------------------

MIB = 1024 * 1024


@pytest.mark.parametrize("whole", [True, False])
def test_a_head_has_at_most_a_mebibyte(whole: bool) -> None:
    end = b"\r\n\r\n" if whole else b""
    octets = b"GET / HTTP/1.1\r\nA: ".ljust(MIB - len(end), b"x") + end
    assert split_head(octets + b"\r\nbody" * whole) == ((octets, b"\r\nbody") if whole else None)
    with pytest.raises(HttpFault, match=r"^head larger than 1048576 octets$"):
        split_head(b"X" + octets)


def line_of(size: int) -> bytes:
    """Return a chunk's first line of so many octets, its end included."""
    return b"1;".ljust(size - 2, b"x") + b"\r\n"


@pytest.mark.parametrize("cut", [0, 1, 2000, 4096])
def test_a_chunks_first_line_has_at_most_4_kib(cut: int) -> None:
    body = Body(Framing(chunked=True), keep=10)
    for part in (line_of(4096)[:cut], line_of(4096)[cut:], b"a\r\n"):
        assert body.feed(part) == len(part)
    assert body.content == b"a"
    with pytest.raises(HttpFault, match=r"^chunk line too long$"):
        for part in (line_of(4097)[:cut], line_of(4097)[cut:]):
            body.feed(part)


@pytest.mark.parametrize("lines", [[4000, 4000, 4000, 4000, 384], [4000, 4000, 4000, 4000, 385]])
def test_trailers_have_at_most_16_kib(lines: list[int]) -> None:
    body = Body(Framing(chunked=True))
    trailers = b"".join(b"x" * size + b"\r\n" for size in lines) + b"\r\n"
    if sum(lines) == 16_384:
        body.feed(b"0\r\n" + trailers)
        assert body.done
    else:
        with pytest.raises(HttpFault, match=r"^trailers too long$"):
            body.feed(b"0\r\n" + trailers)


def test_a_chunks_size_has_at_most_15_digits() -> None:
    body = Body(Framing(chunked=True))
    assert body.feed(b"0" * 14 + b"1 \t;a=b\r\nx\r\n" + b"fFfFfFfFfFfFfFf\r\nmore") > 15
    with pytest.raises(HttpFault, match=r"^bad chunk size b'0000000000000001'$"):
        Body(Framing(chunked=True)).feed(b"0" * 15 + b"1\r\n")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\r\n", "bad chunk size b''"),
        (b"5 5\r\n", "bad chunk size b'5 5'"),
        (b"x" * 30 + b"\r\n", f"bad chunk size b'{'x' * 20}'"),
        (b"5;\n", "chunk line without carriage return"),
        (b"1\r\nab\r\n", "chunk longer than its size"),
        (b"1\r\na\n", "chunk line without carriage return"),
        (b"0\r\n\n", "chunk line without carriage return"),
    ],
)
@pytest.mark.parametrize("size", [1, 100])
def test_a_broken_chunk_is_named(data: bytes, fault: str, size: int) -> None:
    body = Body(Framing(chunked=True))
    with pytest.raises(HttpFault, match=f"^{re.escape(fault)}$"):
        for at in range(0, len(data), size):
            body.feed(data[at : at + size])


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_body_takes_its_own_octets_and_no_more(size: int) -> None:
    for framing, octets, content in (
        (Framing(), b"", b""),
        (Framing(length=5), b"abcde", b"abcde"),
        (Framing(chunked=True), b"2\r\nab\r\n03\r\ncde\r\n0\r\nT: 1\r\nU: 2\r\n\r\n", b"abcde"),
    ):
        body = Body(framing, keep=5)
        data = octets + b"NEXT"
        at = 0
        while not body.done:
            used = body.feed(data[at : at + size])
            assert used > 0
            at += used
        assert (at, bytes(body.content), body.overflowed) == (len(octets), content, False)
        assert body.feed(b"more") == 0
        assert body.content == content


def test_a_body_that_the_connection_ends_is_never_done() -> None:
    body = Body(Framing(until_close=True), keep=3)
    assert body.feed(b"ab") == 2
    assert body.feed(b"c") == 1
    assert (bytes(body.content), body.overflowed) == (b"abc", False)
    assert body.feed(b"de") == 2
    assert (bytes(body.content), body.overflowed, body.done) == (b"abc", True, False)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_what_does_not_fit_is_left_out(size: int) -> None:
    body = Body(Framing(length=8), keep=5)
    for at in range(0, 8, size):
        body.feed(b"abcdefgh"[at : at + size])
    assert (bytes(body.content), body.overflowed, body.done) == (b"abcde", True, True)
    assert not Body(Framing(length=0)).overflowed


@pytest.mark.parametrize(
    ("octets", "fault"),
    [
        (b"GET / HTTP/1.1\r\nA: b\0c\r\n\r\n", r"bad header line b'A: b\x00c'"),
        (b"GET / HTTP/1.1\r\n: b\r\n\r\n", "bad header line b': b'"),
        (b"GET / HTTP/1.1\r\n" + b"n" * 50 + b"\r\n\r\n", f"bad header line b'{'n' * 40}'"),
        (b"GET / HTTP/1.1\r\r\n\r\n", "carriage return inside the first line"),
        (b"GET / HTTP/1.1 x\r\n\r\n", "bad request line b'GET / HTTP/1.1 x'"),
        (b"G(T / HTTP/1.1\r\n\r\n", "bad request line b'G(T / HTTP/1.1'"),
        (b"GET / HTTP/1.2\r\n\r\n", "bad request line b'GET / HTTP/1.2'"),
        (b"GET / HTTP/1.10\r\n\r\n", "bad request line b'GET / HTTP/1.10'"),
        (b"x" * 70 + b"\r\n\r\n", f"bad request line b'{'x' * 60}'"),
    ],
)
def test_a_broken_request_is_named(octets: bytes, fault: str) -> None:
    with pytest.raises(HttpFault, match=f"^{re.escape(fault)}$"):
        parse_request(octets)


@pytest.mark.parametrize(
    "first",
    [
        b"HTTP/1.1",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 99 X",
        b"HTTP/1.1 099 X",
        b"HTTP/1.1 20 X",
        b"HTTP/1.1 2000 X",
        b"HTTP/1.1 2OO X",
        b"x" * 61,
    ],
)
def test_a_broken_answer_is_named(first: bytes) -> None:
    with pytest.raises(HttpFault, match=f"^{re.escape(f'bad status line {first[:60]!r}')}$"):
        parse_response(first + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b"HTTP/1.1 200 OK", 200),
        (b"HTTP/1.0 404 Not at all found", 404),
        (b"HTTP/1.1 500 ", 500),
        (b"HTTP/1.1 999", 999),
    ],
)
def test_an_answers_status_is_read(first: bytes, status: int) -> None:
    octets = first + b"\r\nA:  b \t\r\nAA: c: d\r\nA: last\r\nE:\r\n\r\n"
    head = parse_response(octets)
    assert (head.octets, head.first_line, head.status) == (octets, first, status)
    assert head.fields == ((b"a", b"b"), (b"aa", b"c: d"), (b"a", b"last"), (b"e", b""))
    assert [head.get(name) for name in (b"a", b"e", b"none")] == [b"last", b"", None]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (["Content-Length: 1", "Content-Length: 2"], "two different content lengths"),
        (["Content-Length: -1"], "bad content length b'-1'"),
        (["Content-Length:"], "bad content length b''"),
        (["Content-Length: " + "1" * 19], f"bad content length b'{'1' * 19}'"),
        (["Content-Length: " + "x" * 21], f"bad content length b'{'x' * 20}'"),
        (
            ["Transfer-Encoding: chunked", "Content-Length: 1"],
            "transfer coding b'chunked' beside a length or not only chunked",
        ),
        (
            ["Transfer-Encoding: " + "g" * 41],
            f"transfer coding b'{'g' * 40}' beside a length or not only chunked",
        ),
        (
            ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
            "transfer coding b'chunked' beside a length or not only chunked",
        ),
    ],
)
def test_an_ambiguous_length_is_named(fields: list[str], fault: str) -> None:
    octets = "\r\n".join(["HTTP/1.1 200 OK", *fields, "", ""]).encode()
    with pytest.raises(HttpFault, match=f"^{re.escape(fault)}$"):
        response_framing(parse_response(octets), b"GET")


@pytest.mark.parametrize("status", [100, 199, 204, 304])
def test_some_answers_never_have_a_body(status: int) -> None:
    octets = b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\n" % status
    assert response_framing(parse_response(octets), b"GET") == Framing()


@pytest.mark.parametrize("status", [200, 203, 205, 303, 305])
def test_all_others_have_one(status: int) -> None:
    octets = b"HTTP/1.1 %d X\r\nContent-Length: 5\r\n\r\n" % status
    assert response_framing(parse_response(octets), b"GET") == Framing(length=5)
    octets = b"HTTP/1.1 %d X\r\nTransfer-Encoding: CHUNKED\r\n\r\n" % status
    assert response_framing(parse_response(octets), b"GET") == Framing(chunked=True)


def test_the_longest_length_that_is_read() -> None:
    octets = b"POST / HTTP/1.1\r\nContent-Length: %s\r\n\r\n" % (b"9" * 18)
    assert request_framing(parse_request(octets)) == Framing(length=10**18 - 1)


def test_another_body_leaves_out_the_fields_of_the_first_alone() -> None:
    head = parse_request(
        b"POST /x HTTP/1.0\r\nTRANSFER-encoding: chunked\r\nHost: a:b\r\n"
        b"Trailer: T\r\nexpect: 100-continue\r\nX-Expect: kept\r\ncontent-LENGTH: 1\r\n\r\n"
    )
    assert with_body(head, b"") == (
        b"POST /x HTTP/1.0\r\nHost: a:b\r\nX-Expect: kept\r\nContent-Length: 0\r\n\r\n"
    )
