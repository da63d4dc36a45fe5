"""Which requests hooks are asked about, and which answers never end."""

from __future__ import annotations

import pytest

from runtime_proxy.docker.endless import endless
from runtime_proxy.docker.http1 import parse_request
from runtime_proxy.docker.intercept import Route, route


@pytest.mark.parametrize("version", ["", "/v1.24", "/v1.99", "/v1", "/v1.41.0"])
def test_create_is_seen_under_every_version_that_dockerd_takes(version: str) -> None:
    target = f"{version}/containers/create?name=k8s_POD_p_n_u_0&name=other"
    head = parse_request(f"POST {target} HTTP/1.1\r\n\r\n".encode())
    assert route(head) == Route("create", "k8s_POD_p_n_u_0"), "dockerd takes the first name"


ID = "0123456789abcdef"
NAMED = "k8s_main_p_n_u_0"


@pytest.mark.parametrize(
    ("request_line", "found"),
    [
        (f"POST /containers/create?name={NAMED}", Route("create", NAMED)),
        (f"POST /containers/create?platform=x&name=%2F{NAMED}", Route("create", f"/{NAMED}")),
        ("POST /containers/create?name=web", None),
        ("POST /containers/create", None),
        (f"GET /containers/create?name={NAMED}", None),
        (f"DELETE /containers/create?name={NAMED}", None),
        (f"POST /containers/{ID}/start", Route("start", ID)),
        (f"POST /v1.41/containers/{ID}/stop?t=30", Route("stop", ID)),
        (f"POST /containers/{NAMED}/update", Route("update", NAMED)),
        ("POST /containers/a.b-c_D/start", Route("start", "a.b-c_D")),
        (f"GET /containers/{ID}/start", None),
        (f"DELETE /containers/{ID}/stop", None),
        (f"DELETE /containers/{ID}?force=1&v=1", Route("delete", ID)),
        (f"DELETE /v1.24/containers/{ID}", Route("delete", ID)),
        (f"GET /containers/{ID}", None),
        (f"POST /containers/{ID}", None),
        # Encoded, as a client may write it; what dockerd itself does not take passes.
        (f"POST /containers/{ID}/%73tart", Route("start", ID)),
        (f"POST /containers/{ID}/kill", None),
        (f"POST /containers/{ID}/start/", None),
        (f"POST /containers/{ID}/json/start", None),
        (f"POST /containers/-{ID}/start", None),
        ("POST /containers//start", None),
        (f"POST /x/containers/{ID}/start", None),
        (f"POST /vx/containers/{ID}/start", None),
        (f"POST containers/{ID}/start", None),
        (f"POST /images/{ID}/start", None),
        (f"POST /containers/{ID}/start\xff", None),
        ("POST //[/containers/a/start", None),
        # As a client of a proxy writes it.
        (f"POST http://docker/containers/{ID}/start", Route("start", ID)),
    ],
)
def test_requests_for_hooks_are_recognised_by_method_and_path(
    request_line: str, found: Route | None
) -> None:
    assert route(parse_request(f"{request_line} HTTP/1.1\r\n\r\n".encode("latin-1"))) == found


@pytest.mark.parametrize(
    "value", ["", "0", "no", "false", "none", "No", "FALSE", "+0+", "1", "yes", "x"]
)
def test_flags_are_read_as_dockerd_does(value: str) -> None:
    unset = value.strip("+").lower() in ("", "0", "no", "false", "none")
    for target, default in (("logs?follow", False), ("stats?stream", True)):
        head = parse_request(f"GET /containers/a/{target}={value} HTTP/1.1\r\n\r\n".encode())
        assert endless(head) is not unset
        head = parse_request(f"GET /containers/a/{target}x={value} HTTP/1.1\r\n\r\n".encode())
        assert endless(head) is default


@pytest.mark.parametrize(
    "request_line",
    [
        "POST /events",
        "HEAD /containers/a/stats",
        "GET /v1.41/containers/a/top",
        "GET /containers/a/b/logs?follow=1",
        "GET /x/events",
        "GET /events/x",
        "GET /events\xff",
        "GET /events?until=0",
    ],
)
def test_other_answers_end(request_line: str) -> None:
    assert not endless(parse_request(f"{request_line} HTTP/1.1\r\n\r\n".encode("latin-1")))


@pytest.mark.parametrize("query", ["", "?until", "?until=", "?since=5"])
def test_events_end_only_where_a_time_is_given(query: str) -> None:
    assert endless(parse_request(f"GET /events{query} HTTP/1.1\r\n\r\n".encode()))
