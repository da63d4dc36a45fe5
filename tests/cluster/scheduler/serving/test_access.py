"""Who may read the secure port: users, rights, and how often the API server is asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from cluster.scheduler.serving.access import Access, AccessSettings, User, reviewed_path, user_of
from kube.client import Client, Unreachable
from service.http_server import Peer, Request, Response

_TOKENS = {
    "good": ("prometheus", ["system:serviceaccounts"]),
    "root": ("admin", ["system:masters"]),
}


class _Server:
    """Answers reviews from a table, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.away = False

    async def request(self, method: str, path: str, *, body: bytes, tries: int) -> bytes:
        if self.away:
            raise Unreachable("no connection")
        review = json.loads(body)
        self.asked.append(review)
        spec = review["spec"]
        if review["kind"] == "TokenReview":
            known = _TOKENS.get(spec["token"])
            if known is None:
                return b'{"status":{"error":"unknown"}}'
            user = {"username": known[0], "groups": known[1], "uid": "7", "extra": {"a": ["b"]}}
            return json.dumps({"status": {"authenticated": True, "user": user}}).encode()
        path = spec["nonResourceAttributes"]["path"]
        return json.dumps({"status": {"allowed": (spec["user"], path) in _RIGHTS}}).encode()


_RIGHTS = {
    ("prometheus", "/metrics"),
    ("prometheus", "/apis/v1/nodes/n"),
    ("operator", "/configz"),
    ("operator", "/debug/apis/v1/nodes/n"),
}


class _Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _status(access: Access, request: Request) -> int:
    async def page(_: Request) -> Response:
        return Response(200, b"secret")

    async def ask() -> Response:
        return await access.guard(page)(request)

    response = asyncio.run(ask())
    assert (response.body == b"secret") == (response.status == 200)
    return response.status


def _request(path: str, token: str = "", certificate: dict[str, Any] | None = None) -> Request:
    authorization = f"Bearer {token}" if token else ""
    peer = Peer("10.0.0.1", certificate or {})
    return Request("GET", path, {}, b"", authorization=authorization, peer=peer)


def _access(server: _Server, clock: _Time | None = None) -> Access:
    client = cast(Client, server)
    return Access(AccessSettings(), tokens=client, rights=client, clock=clock or _Time())


_OPERATOR = {"subject": ((("organizationName", "ops"),), (("commonName", "operator"),))}


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (_request("/healthz"), 200),
        (_request("/healthz", "bad"), 200),
        (_request("/metrics"), 403),
        (_request("/metrics", "bad"), 401),
        (_request("/metrics", "good"), 200),
        (_request("/configz", "good"), 403),
        (_request("/configz", "root"), 200),
        (_request("/configz", certificate=_OPERATOR), 200),
        (_request("/metrics", "good", certificate=_OPERATOR), 403),
        (_request("/healthz/../metrics"), 403),
        (_request("/apis/v1/nodes/n", "good"), 403),
        (_request("/apis/v1/nodes/n", certificate=_OPERATOR), 200),
    ],
)
def test_the_api_server_decides_who_reads_a_page(request_: Request, status: int) -> None:
    assert _status(_access(_Server()), request_) == status


def test_reviews_name_the_user_and_are_kept_for_their_time() -> None:
    server, clock = _Server(), _Time()
    access = _access(server, clock)
    for _ in range(3):
        assert _status(access, _request("/metrics", "good")) == 200
    first, second = server.asked
    assert first == {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": "good"},
    }
    assert second["spec"] == {
        "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
        "user": "prometheus",
        "groups": ["system:serviceaccounts"],
        "uid": "7",
        "extra": {"a": ["b"]},
    }
    clock.now = 10.0
    assert _status(access, _request("/metrics", "good")) == 200
    assert len(server.asked) == 4


def test_a_refused_token_is_kept_too_and_a_thousand_others_do_not_fill_the_memory() -> None:
    server = _Server()
    access = _access(server)
    for _ in range(3):
        assert _status(access, _request("/metrics", "bad")) == 401
    assert len(server.asked) == 1

    async def flood() -> None:
        async def page(_: Request) -> Response:
            return Response(200, b"")

        guarded: Any = access.guard(page)
        for number in range(2000):
            await guarded(_request("/metrics", f"made-up-{number}"))

    asyncio.run(flood())
    assert len(access._users._answers) == 1024


def test_without_the_api_server_only_health_is_shown() -> None:
    server = _Server()
    server.away = True
    access = _access(server)
    assert _status(access, _request("/healthz")) == 200
    assert _status(access, _request("/metrics", "good")) == 503
    server.away = False
    assert _status(access, _request("/metrics", "good")) == 200


def test_a_certificate_without_a_name_is_no_user() -> None:
    assert user_of({}) is None
    assert user_of({"subject": ((("organizationName", "system:masters"),),)}) is None
    assert user_of(_OPERATOR) == User("operator", ("ops", "system:authenticated"))


@pytest.mark.parametrize(
    ("path", "reviewed"),
    [
        ("/apis", "/debug/apis"),
        ("/apis/v1/nodes/n", "/debug/apis/v1/nodes/n"),
        ("/apis2", "/apis2"),
        ("/metrics", "/metrics"),
    ],
)
def test_the_state_needs_another_right_than_the_api_servers_list_of_kinds(
    path: str, reviewed: str
) -> None:
    assert reviewed_path(path) == reviewed
