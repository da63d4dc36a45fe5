"""Where HTTP/1.1 messages end, and what is refused because two readers might disagree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_proxy.docker import convert
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
from runtime_proxy.docker.intercept import Route, route
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


@pytest.mark.parametrize("version", ["", "/v1.24", "/v1.99", "/v1", "/v1.41.0"])
def test_create_is_seen_under_every_version_that_dockerd_takes(version: str) -> None:
    target = f"{version}/containers/create?name=k8s_POD_p_n_u_0&name=other"
    head = parse_request(f"POST {target} HTTP/1.1\r\n\r\n".encode())
    assert route(head) == Route("create", "k8s_POD_p_n_u_0"), "dockerd takes the first name"


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


# -- names, parents, environments -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (
            "k8s_POD_web-0_default_uid_0",
            convert.KubernetesName("POD", "web-0", "default", "uid", 0),
        ),
        ("/k8s_main_p_n_u_3", convert.KubernetesName("main", "p", "n", "u", 3)),
        ("k8s_main_p_n_u_3_a1b2", convert.KubernetesName("main", "p", "n", "u", 3)),
        ("k8s_main_p_n_u_x", convert.KubernetesName("main", "p", "n", "u", 0)),
        ("other_main_p_n_u_3", None),
        ("web", None),
        ("", None),
    ],
)
def test_names_of_kubernetes_are_told_from_others(
    name: str, found: convert.KubernetesName | None
) -> None:
    assert convert.parse_name(name) == found


@pytest.mark.parametrize(
    ("parent", "path"),
    [
        (
            "kubepods-besteffort-pod7712555c_ce62.slice",
            "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod7712555c_ce62.slice",
        ),
        ("kubepods-podX.slice", "/kubepods.slice/kubepods-podX.slice"),
        ("", "/"),
    ],
)
def test_a_slice_becomes_a_path_and_comes_back(parent: str, path: str) -> None:
    assert convert.read_parent({"CgroupParent": parent}, "systemd") == path
    assert convert.write_parent(path, "systemd") == parent
    assert convert.read_parent({"CgroupParent": "/kubepods/x"}, "cgroupfs") == "/kubepods/x"


def test_an_environment_keeps_order_and_what_it_does_not_know() -> None:
    env = ["A=1", "FROM_HOST", "B=2", "A=3"]
    before = {"A": "3", "B": "2"}
    assert convert.merge_env(env, before, {"A": "9", "N": "x"}) == [
        "A=1",
        "FROM_HOST",
        "A=9",
        "N=x",
    ]
    assert convert.merge_env(env, before, before) == env


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
