"""Calls to an extender: what becomes of slow, broken and hostile ones."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
from aiohttp import test_utils, web

from apis.errors import InputError
from cluster.scheduler.configuration.extenders import Extender, ExtenderTLSConfig
from cluster.scheduler.configuration.strict import Seconds
from cluster.scheduler.extenders import calls
from cluster.scheduler.extenders.calls import ExtenderCalls
from cluster.scheduler.extenders.wire import ExtenderError
from kube.certificates import Certificates, make_certificates
from kube.webhook import load_certificates
from tests.cluster.scheduler.extenders.serving import Serving, serving
from tests.cluster.scheduler.serving.client_certificates import client_certificate
from tests.ports import free_port


def _calls(url: str, **members: Any) -> ExtenderCalls:
    extender = Extender(url_prefix=url, **{"http_timeout": Seconds(20), **members})
    return ExtenderCalls(extender, obj="extenders", field="extenders[0]")


async def _call(url: str, **members: Any) -> bytes:
    made = _calls(url, **members)
    made.open()
    try:
        return await made.call("filter", b"{}")
    finally:
        await made.close()


def _server_context(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificates(context, certificates)
    return context


def test_an_answer_comes_back_as_it_is() -> None:
    async def run() -> None:
        async with serving({"filter": lambda _: "{ }"}) as extender:
            assert await _call(f"{extender.url}/") == b"{ }"
            assert extender.asked == [("filter", {})]

    asyncio.run(run())


@pytest.mark.parametrize("status", [201, 302, 404, 500])
def test_only_200_is_an_answer(status: int) -> None:
    async def run() -> None:
        async with serving({"filter": lambda _: {}}) as extender:
            extender.status = status
            with pytest.raises(ExtenderError, match=f"status {status}"):
                await _call(extender.url)

    asyncio.run(run())


def test_a_request_is_json_and_follows_no_redirection() -> None:
    seen: list[tuple[str, str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.method, request.path, request.content_type))
        if request.path != "/moved/filter":
            return web.Response(status=307, headers={"Location": "/moved/filter"})
        return web.Response(text="{}")

    async def run() -> None:
        server = test_utils.TestServer(web.Application())
        server.app.router.add_route("*", "/{tail:.*}", answer)
        async with server:
            with pytest.raises(ExtenderError, match="status 307"):
                await _call(str(server.make_url("/x")))

    asyncio.run(run())
    assert seen == [("POST", "/x/filter", "application/json")]


def test_an_extender_is_not_called_before_and_after_the_scheduler_runs() -> None:
    async def run() -> None:
        async with serving({"filter": lambda _: {}}) as extender:
            made = _calls(extender.url)
            await made.close()
            with pytest.raises(ExtenderError, match="the scheduler is ending"):
                await made.call("filter", b"{}")
            made.open()
            assert await made.call("filter", b"{}") == b"{}"
            for _ in range(2):
                await made.close()
                with pytest.raises(ExtenderError, match="the scheduler is ending"):
                    await made.call("filter", b"{}")
            assert len(extender.asked) == 1

    asyncio.run(run())


def test_a_slow_extender_costs_its_time_limit() -> None:
    async def run() -> None:
        async with serving({"filter": lambda _: {}}) as extender:
            extender.open.clear()
            with pytest.raises(ExtenderError, match=r"not answered within 0\.2 s"):
                await _call(extender.url, http_timeout=Seconds(0.2))

    asyncio.run(run())


def test_an_answer_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_LONGEST_ANSWER", 100_000)

    async def run() -> None:
        async with serving({"filter": lambda _: "x" * 200_000}) as extender:
            with pytest.raises(ExtenderError, match="too long"):
                await _call(extender.url)

    asyncio.run(run())


def test_an_extender_that_is_away_and_one_that_speaks_no_http() -> None:
    async def run() -> None:
        with pytest.raises(ExtenderError, match="filter: ClientConnector"):
            await _call(f"http://127.0.0.1:{free_port()}")

        async def nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ExtenderError, match="filter: "):
            await _call(f"http://127.0.0.1:{port}")
        server.close()

    asyncio.run(run())


def test_https_verifies_by_the_configured_ca(tmp_path: Path) -> None:
    certificates, others = make_certificates(["127.0.0.1"]), make_certificates(["127.0.0.1"])
    ca = base64.b64encode(certificates.ca_cert).decode()
    wrong = base64.b64encode(others.ca_cert).decode()
    right_file, wrong_file = tmp_path / "right", tmp_path / "wrong"
    right_file.write_bytes(certificates.ca_cert)
    wrong_file.write_bytes(others.ca_cert)

    async def run() -> None:
        tls = _server_context(certificates)
        async with serving({"filter": lambda _: {}}, tls=tls) as extender:
            await _trusted(extender)

    async def _trusted(extender: Serving) -> None:
        assert await _call(extender.url, tls_config=ExtenderTLSConfig(ca_data=ca)) == b"{}"
        in_file = ExtenderTLSConfig(ca_file=str(right_file))
        assert await _call(extender.url, tls_config=in_file) == b"{}"
        both = ExtenderTLSConfig(ca_data=ca, ca_file=str(wrong_file))
        assert await _call(extender.url, tls_config=both) == b"{}"
        for config in (ExtenderTLSConfig(ca_data=wrong), ExtenderTLSConfig(), None):
            with pytest.raises(ExtenderError, match="certificate"):
                await _call(extender.url, tls_config=config)
        named = ExtenderTLSConfig(ca_data=ca, server_name="elsewhere")
        with pytest.raises(ExtenderError, match="certificate"):
            await _call(extender.url, tls_config=named)
        insecure = ExtenderTLSConfig(insecure=True)
        assert await _call(extender.url, tls_config=insecure) == b"{}"
        # kube-scheduler's rule: enableHTTPS without a CA verifies nothing.
        assert await _call(extender.url, enable_https=True) == b"{}"
        for config in (
            ExtenderTLSConfig(ca_data=wrong),
            ExtenderTLSConfig(ca_file=str(wrong_file)),
        ):
            with pytest.raises(ExtenderError, match="certificate"):
                await _call(extender.url, enable_https=True, tls_config=config)

    asyncio.run(run())


def test_a_client_certificate_is_presented(tmp_path: Path) -> None:
    ca, cert, key = client_certificate(tmp_path, "ca", "scheduler")
    tls = _server_context(make_certificates(["127.0.0.1"]))
    tls.load_verify_locations(ca)
    tls.verify_mode = ssl.CERT_REQUIRED

    def encoded(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    async def run() -> None:
        async with serving({"filter": lambda _: {}}, tls=tls) as extender:
            with pytest.raises(ExtenderError):
                await _call(extender.url, tls_config=ExtenderTLSConfig(insecure=True))
            for config in (
                ExtenderTLSConfig(insecure=True, cert_file=str(cert), key_file=str(key)),
                ExtenderTLSConfig(insecure=True, cert_data=encoded(cert), key_data=encoded(key)),
            ):
                assert await _call(extender.url, tls_config=config) == b"{}"

    asyncio.run(run())


@pytest.mark.parametrize(
    "config",
    [
        ExtenderTLSConfig(ca_file="/nowhere"),
        ExtenderTLSConfig(ca_data=base64.b64encode(b"no certificate").decode()),
        ExtenderTLSConfig(cert_file="/nowhere", key_file="/nowhere"),
    ],
)
def test_files_that_cannot_be_used_are_named(config: ExtenderTLSConfig) -> None:
    with pytest.raises(InputError) as raised:
        _calls("https://example.com", tls_config=config)
    assert raised.value.field == "extenders[0].tlsConfig"
