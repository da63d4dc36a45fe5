"""Admission over the wire: reviews in, answers out, and nothing that a caller can break."""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.errors import InputError
from kube.certificates import make_certificates
from kube.webhook import (
    ALLOWED,
    LARGE_REVIEW,
    LARGEST_REVIEW,
    AdmissionRequest,
    Handler,
    Verdict,
    WebhookServer,
    answer_review,
    denied,
)


def review(api_version: str = "admission.k8s.io/v1", **members: Any) -> bytes:
    request = {"uid": "u1", "operation": "CREATE", "kind": {"kind": "Pod"}, **members}
    return msgspec.json.encode(
        {"apiVersion": api_version, "kind": "AdmissionReview", "request": request}
    )


def answered(handler: Handler, body: bytes | None = None) -> Any:
    answer = answer_review(review() if body is None else body, handler)
    assert answer.status == 200
    return msgspec.json.decode(answer.body)


def test_an_answer_carries_the_uid_and_the_version_of_the_question() -> None:
    for version in ("admission.k8s.io/v1", "admission.k8s.io/v1beta1"):
        got = answered(lambda _: ALLOWED, review(version))
        assert got["apiVersion"] == version
        assert got["response"] == {"uid": "u1", "allowed": True}


def test_a_refusal_says_why() -> None:
    got = answered(lambda _: denied("no", code=400))["response"]
    assert (got["allowed"], got["status"]["message"], got["status"]["code"]) == (False, "no", 400)


def test_a_patch_is_base64_json() -> None:
    patch = ({"op": "add", "path": "/x", "value": 1},)
    got = answered(lambda _: Verdict(True, patch=patch))["response"]
    assert got["patchType"] == "JSONPatch"
    assert msgspec.json.decode(base64.b64decode(got["patch"])) == list(patch)


def fail(_: AdmissionRequest) -> Verdict:
    raise RuntimeError("secret detail")


def refuse(_: AdmissionRequest) -> Verdict:
    raise InputError(obj="Pod a/b", field="x", value="y", problem="expected z")


def test_a_failing_handler_fails_its_request_only_and_leaks_no_secrets() -> None:
    got = answered(fail)["response"]
    assert (got["allowed"], got["status"]["code"]) == (False, 500)
    assert "secret detail" not in got["status"]["message"]
    got = answered(refuse)["response"]
    assert got["status"]["message"] == "Pod a/b: x = 'y': expected z"
    assert got["status"]["code"] == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"request":{}}', b"[" * 100_000, b"\xff"])
def test_what_is_no_review_is_refused(body: bytes) -> None:
    assert answer_review(body, lambda _: ALLOWED).status == 400


@settings(max_examples=80)
@given(st.binary(max_size=60))
def test_any_bytes_are_answered(body: bytes) -> None:
    answer = answer_review(body, lambda _: ALLOWED)
    assert answer.status in (200, 400)
    msgspec.json.decode(answer.body)


def test_a_server_that_leaves_answers_and_ends_the_connection_itself() -> None:
    """The last answer says that the connection ends, so no review is sent into a closed one."""

    async def run() -> None:
        async with serving(lambda _: ALLOWED) as (server, trusting):
            address = f"https://127.0.0.1:{server.port}/judge"
            async with aiohttp.ClientSession() as session:

                async def ends() -> bool:
                    async with session.post(address, data=review(), ssl=trusting) as answer:
                        assert (await answer.json())["response"]["allowed"]
                        return answer.headers.get("Connection") == "close"

                assert not await ends()
                server.drain()
                assert await ends()
                assert await ends()

    asyncio.run(run())


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[WebhookServer, ssl.SSLContext]]:
    """Serve `handler` at /judge; yield the server and a TLS context of clients that trust it."""
    server = WebhookServer(
        host="127.0.0.1",
        port=0,
        certificates=make_certificates(("localhost",)),
        routes={"/judge": handler},
    )
    await server.start()
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    try:
        yield server, trusting
    finally:
        await server.stop()


def test_large_reviews_hold_up_no_small_one_and_only_so_many_wait() -> None:
    """16 large ones may wait for their thread; the 17th is refused at once."""
    released = threading.Event()
    large = review(object={"text": "x" * (LARGE_REVIEW + 1024)})

    def wait_if_large(request: AdmissionRequest) -> Verdict:
        if len(bytes(request.object)) > LARGE_REVIEW:
            assert released.wait(120), "the large reviews were never released"
        return ALLOWED

    async def run() -> None:
        async with serving(wait_if_large) as (server, trusting), aiohttp.ClientSession() as session:

            async def status(body: bytes) -> int:
                address = f"https://127.0.0.1:{server.port}/judge"
                async with session.post(address, data=body, ssl=trusting) as answer:
                    await answer.read()
                    return answer.status

            reviews = [asyncio.create_task(status(large)) for _ in range(17)]
            try:
                (refused,), others = await asyncio.wait(
                    reviews, return_when=asyncio.FIRST_COMPLETED
                )
                assert refused.result() == 503
                assert await status(review()) == 200
                assert not any(other.done() for other in others)
            finally:
                released.set()
            assert await asyncio.gather(*others) == [200] * 16
            assert await status(large) == 200

    asyncio.run(run())


def test_a_body_above_the_limit_is_refused_before_it_is_read() -> None:
    async def run() -> None:
        async with serving(lambda _: ALLOWED) as (server, trusting):

            async def first_line(announced: int, body: bytes = b"") -> bytes:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", server.port, ssl=trusting
                )
                head = f"POST /judge HTTP/1.1\r\nHost: a\r\nContent-Length: {announced}\r\n\r\n"
                writer.write(head.encode() + body)
                try:
                    return await reader.readline()
                finally:
                    writer.close()

            largest = review().ljust(LARGEST_REVIEW)
            assert (await first_line(len(largest), largest)).split()[1] == b"200"
            assert (await first_line(LARGEST_REVIEW + 1)).split()[1] == b"413"

    asyncio.run(run())
