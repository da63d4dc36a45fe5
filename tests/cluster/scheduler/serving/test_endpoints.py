"""The two ports of a scheduler: pages, certificates, and clients that mean no good."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cluster.flags import FlagError
from cluster.scheduler.configuration.flags import parse
from cluster.scheduler.configuration.reading import default_configuration
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving.access import AccessSettings
from cluster.scheduler.serving.certificates import ServingTls
from cluster.scheduler.serving.endpoints import (
    Endpoints,
    access_settings,
    batched,
    is_this_machine,
)
from kube.certificates import make_certificates
from kube.connection import Connection
from kube.kept_client import KeptClient
from service import open_files
from service.http_server import MAX_CONNECTIONS, Peer, Request, Response
from tests.cluster.scheduler.making import make_pod
from tests.cluster.scheduler.serving.client_certificates import client_certificate
from tests.ports import free_ports


@asynccontextmanager
async def _serving(*flags: str) -> AsyncIterator[tuple[Endpoints, int, int]]:
    """Serve a process without an API server; yield the endpoints with both ports."""
    plain, secure = free_ports(2)
    nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
    process = SchedulerProcess(nowhere, default_configuration(), seed=1)
    settings = parse(
        [f"--port={plain}", f"--secure-port={secure}", "--authentication-skip-lookup=true", *flags]
    )
    async with AsyncExitStack() as stack:
        endpoints = Endpoints(process, settings)
        await endpoints.start(stack)
        yield endpoints, plain, secure


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _ask(
    port: int,
    path: str,
    *,
    tls: ssl.SSLContext | None = None,
    method: str = "GET",
    body: bytes = b"",
    headers: str = "",
) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{length}{headers}\r\n"
    writer.write(request.encode() + body)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


def _play(scenario: Callable[[Endpoints, int, int], Awaitable[None]], *flags: str) -> None:
    async def run() -> None:
        async with _serving(*flags) as (endpoints, plain, secure):
            await scenario(endpoints, plain, secure)

    asyncio.run(run())


def test_both_ports_show_health_and_the_plain_one_everything_to_this_machine() -> None:
    async def scenario(_: Endpoints, plain: int, secure: int) -> None:
        for port, tls in ((plain, None), (secure, _trusting())):
            for path in ("/healthz", "/livez", "/readyz"):
                assert await _ask(port, path, tls=tls) == (200, b"ok")
        status, body = await _ask(plain, "/metrics")
        assert status == 200
        assert b'scheduler_pending_pods{queue="active"} 0' in body
        assert await _ask(plain, "/readyz/shutdown") == (200, b"ok")
        status, body = await _ask(plain, "/readyz?verbose")
        assert b"[+]sched-handler-sync ok" in body
        status, body = await _ask(plain, "/metrics/slis")
        assert b'kubernetes_healthcheck{name="ping",type="livez"} 1' in body
        # Only the leader knows pods.
        assert await _ask(plain, "/metrics/resources") == (200, b"")
        status, body = await _ask(plain, "/configz")
        assert status == 200
        (profile,) = json.loads(body)["componentconfig"]["profiles"]
        assert profile["schedulerName"] == "default-scheduler"
        assert (await _ask(plain, "/apis/v1/nodes/n"))[0] == 503
        assert (await _ask(plain, "/nothing"))[0] == 404
        # Without an API server nobody can be checked.
        assert (await _ask(secure, "/metrics", tls=_trusting()))[0] == 503
        assert (await _ask(secure, "/nothing", tls=_trusting()))[0] == 503

    _play(scenario)


@pytest.mark.parametrize(
    ("peer", "flags", "status"),
    [
        ("127.0.0.1", (), 200),
        ("::1", (), 200),
        ("::ffff:127.0.0.1", (), 200),
        ("10.1.2.3", (), 403),
        ("::ffff:10.1.2.3", (), 403),
        ("fe80::1%eth0", (), 403),
        ("", (), 403),
        ("10.1.2.3", ("--address=0.0.0.0",), 200),
    ],
)
def test_other_machines_see_the_state_only_if_the_address_is_given(
    peer: str, flags: tuple[str, ...], status: int
) -> None:
    async def scenario(endpoints: Endpoints, plain: int, secure: int) -> None:
        assert endpoints.plain is not None

        async def ask(path: str) -> Response:
            request = Request("GET", path, {}, b"", peer=Peer(peer))
            handler = endpoints.plain.route(request) if endpoints.plain else None
            assert handler is not None
            return await handler(request)

        assert (await ask("/configz")).status == status
        # The paths of `OPTIONS *` and `GET http://host`.
        for path in ("*", ""):
            assert (await ask(path)).status == (404 if status == 200 else status), path
        assert (await ask("/apis/v1/nodes/n")).status == (503 if status == 200 else status)
        assert (await ask("/metrics/resources")).status == status
        for path in ("/readyz", "/readyz/shutdown", "/metrics", "/metrics/slis"):
            assert (await ask(path)).status == 200, path
        assert (await ask("/metrics")).status == 200

    _play(scenario, *flags)


def test_the_leader_shows_what_pods_request_and_is_not_ready_before_it_read_them() -> None:
    async def scenario(endpoints: Endpoints, plain: int, secure: int) -> None:
        process = endpoints._process
        process.pods._items["default/a"] = make_pod("a", requests={"cpu": "1"})
        process.leading = True
        status, body = await _ask(plain, "/metrics/resources")
        assert status == 200
        assert b'kube_pod_resource_request{namespace="default",pod="a",' in body
        status, body = await _ask(plain, "/readyz")
        assert status == 503
        assert b"sched-handler-sync failed: reading the cluster" in body
        process.ready = True
        assert (await _ask(plain, "/readyz"))[0] == 200
        process.ready, process.stopping = False, True
        status, body = await _ask(plain, "/readyz")
        assert status == 503
        assert b"shutdown failed" in body

    _play(scenario)


def test_the_log_level_can_be_set() -> None:
    async def scenario(_: Endpoints, plain: int, secure: int) -> None:
        before = logging.getLogger().level
        try:
            path = "/debug/flags/v"
            assert (await _ask(plain, path, method="PUT", body=b"5"))[0] == 200
            assert logging.getLogger().level == logging.DEBUG
            assert (await _ask(plain, path, method="PUT", body=b"2"))[0] == 200
            assert logging.getLogger().level == logging.INFO
            assert (await _ask(plain, path, method="PUT", body=b"much"))[0] == 400
            assert (await _ask(plain, path, method="PUT", body=b"9" * 65))[0] == 413
            assert (await _ask(plain, path))[0] == 405
        finally:
            logging.getLogger().setLevel(before)

    _play(scenario)


def test_a_port_of_0_is_not_served() -> None:
    async def run() -> None:
        nowhere = KeptClient(Connection("http://127.0.0.1:1", None, lambda: None))
        process = SchedulerProcess(nowhere, default_configuration(), seed=1)
        async with AsyncExitStack() as stack:
            endpoints = Endpoints(process, parse(["--port=0", "--secure-port=0"]))
            await endpoints.start(stack)
            assert endpoints.plain is None
            assert endpoints.secure is None

    asyncio.run(run())


# --- hostile clients -----------------------------------------------------------------------------


def test_a_thousand_connections_keep_no_probe_out() -> None:
    # Both ends are in this process.
    open_files.raise_limit()

    async def scenario(endpoints: Endpoints, plain: int, secure: int) -> None:
        for port, server, tls in (
            (plain, endpoints.plain, None),
            (secure, endpoints.secure, _trusting()),
        ):
            assert server is not None
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1000)]
            # The first 200 begin a request that never ends.
            for _, writer in held[:200]:
                writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
            assert await _ask(port, "/healthz", tls=tls) == (200, b"ok")
            assert len(server.connections) <= MAX_CONNECTIONS
            for _, writer in held:
                writer.close()

    _play(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /metrics HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + b"\x00" * 200,
        b"\x80" * 5000,
        b"",
    ],
)
def test_what_is_no_tls_ends_its_own_connection_alone(data: bytes) -> None:
    async def scenario(_: Endpoints, plain: int, secure: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", secure)
        writer.write(data)
        writer.write_eof()
        answer = b""
        with suppress(ConnectionResetError):
            answer = await asyncio.wait_for(reader.read(), 30)
        assert b"HTTP" not in answer
        writer.close()
        assert await _ask(secure, "/healthz", tls=_trusting()) == (200, b"ok")

    _play(scenario)


def test_an_old_tls_version_and_a_strangers_certificate_are_refused(tmp_path: Path) -> None:
    ca, _, _ = client_certificate(tmp_path, "ours", "operator")
    _, cert, key = client_certificate(tmp_path, "theirs", "system:admin")

    async def scenario(_: Endpoints, plain: int, secure: int) -> None:
        old = _trusting()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await _ask(secure, "/healthz", tls=old)
        stranger = _trusting()
        stranger.load_cert_chain(cert, key)
        # TLS 1.3 tells the client after the handshake: it gets no answer.
        with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
            await _ask(secure, "/healthz", tls=stranger)
        assert await _ask(secure, "/healthz", tls=_trusting()) == (200, b"ok")

    _play(scenario, "--tls-min-version=VersionTLS13", f"--client-ca-file={ca}")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"PUT /debug/flags/v HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /apis/v1/nodes/%00%ff/../.. HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_a_hostile_request_is_answered_with_an_error(request_: bytes) -> None:
    async def scenario(_: Endpoints, plain: int, secure: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", plain)
        writer.write(request_)
        status = await asyncio.wait_for(reader.readline(), 30)
        assert status.split()[1][:1] in (b"4", b"5"), status
        writer.close()
        assert await _ask(plain, "/healthz") == (200, b"ok")

    _play(scenario)


# --- certificates --------------------------------------------------------------------------------


def _write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    made = make_certificates([name])
    cert, key = folder / "tls.crt", folder / "tls.key"
    cert.write_bytes(made.cert)
    key.write_bytes(made.key)
    return cert, key


def test_a_client_certificate_names_the_user(tmp_path: Path) -> None:
    ca, cert, key = client_certificate(tmp_path, "ca", "operator")

    async def scenario(endpoints: Endpoints, plain: int, secure: int) -> None:
        seen: list[Request] = []
        server = endpoints.secure
        assert server is not None

        async def page(request: Request) -> Response:
            seen.append(request)
            return Response(200, b"")

        server._routes = {("GET", "/seen"): page}
        context = _trusting()
        context.load_cert_chain(cert, key)
        await _ask(secure, "/seen", tls=context, headers="Authorization: Bearer t\r\n")
        await _ask(secure, "/seen", tls=_trusting())
        first, second = seen
        assert first.peer.certificate["subject"] == ((("commonName", "operator"),),)
        assert first.authorization == "Bearer t"
        assert first.peer.address == "127.0.0.1"
        assert second.peer.certificate == {}
        assert second.authorization == ""

    _play(scenario, f"--client-ca-file={ca}")


def test_replaced_files_are_served_and_broken_ones_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = _write_pair(tmp_path, "first")
    flags = (f"--tls-cert-file={cert}", f"--tls-private-key-file={key}")

    async def subject_of(port: int) -> str:
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        certificate = x509.load_pem_x509_certificate(pem.encode())
        return certificate.subject.rfc4514_string()

    async def scenario(endpoints: Endpoints, plain: int, secure: int) -> None:
        tls = endpoints._tls
        assert tls is not None
        assert await subject_of(secure) == "CN=first"
        _write_pair(tmp_path, "second")
        tls.reload()
        assert await subject_of(secure) == "CN=second"
        cert.write_text("broken")
        tls.reload()
        assert await subject_of(secure) == "CN=second"
        assert "the former certificate stays in force" in caplog.text
        cert.unlink()
        tls.reload()
        _write_pair(tmp_path, "third")
        tls.reload()
        assert await subject_of(secure) == "CN=third"

    _play(scenario, *flags)


async def _is_trusted(port: int, cert: Path, key: Path) -> bool:
    """Return whether a port accepts connections with a client certificate."""
    context = _trusting()
    context.load_cert_chain(cert, key)
    try:
        return (await _ask(port, "/healthz", tls=context))[0] == 200
    except (OSError, IndexError):
        # The end of the handshake, or a connection that was closed before an answer.
        return False


def test_a_replaced_client_ca_counts_and_the_former_one_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, *former = client_certificate(tmp_path, "former", "operator")
    new_ca, *new = client_certificate(tmp_path, "new", "operator")
    ca = tmp_path / "former.ca"

    async def scenario(endpoints: Endpoints, plain: int, secure: int) -> None:
        tls = endpoints._tls
        assert tls is not None
        for broken in ("no certificate", "", "\u00e9\u00e9"):
            before = ca.read_text()
            ca.write_text(broken)
            tls.reload()
            assert "the former client CA stays in force: --client-ca-file=" in caplog.text
            caplog.clear()
            ca.write_text(before)
            assert await _is_trusted(secure, *former)
            assert not await _is_trusted(secure, *new)
        ca.write_text("# Comment: \u00e9\n" + new_ca.read_text())
        tls.reload()
        assert await _is_trusted(secure, *new)
        assert not await _is_trusted(secure, *former)

    _play(scenario, f"--client-ca-file={ca}")


def test_the_published_client_ca_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, *of_first = client_certificate(tmp_path, "first", "operator")
    second, *of_second = client_certificate(tmp_path, "second", "operator")
    published = [first.read_text(), "broken", "\u00e9", second.read_text()]

    class _Publishing(KeptClient):
        async def request(self, *_: object, **__: object) -> bytes:
            return json.dumps({"data": {"client-ca-file": published[0]}}).encode()

    async def scenario(endpoints: Endpoints, plain: int, secure: int) -> None:
        tls = endpoints._tls
        assert tls is not None
        client = _Publishing(Connection("http://127.0.0.1:1", None, lambda: None))
        await tls.look_up_client_ca(client, tolerate=False)
        assert await _is_trusted(secure, *of_first)
        assert not await _is_trusted(secure, *of_second)
        for _ in ("broken", "no ASCII"):
            published.pop(0)
            await tls.renew_client_ca(client)
            assert "the former client CA stays in force: ConfigMap kube-system/" in caplog.text
            caplog.clear()
            assert await _is_trusted(secure, *of_first)
        published.pop(0)
        await tls.renew_client_ca(client)
        assert await _is_trusted(secure, *of_second)
        assert not await _is_trusted(secure, *of_first)

    _play(scenario)


def test_certificates_that_cannot_be_used_end_the_start(tmp_path: Path) -> None:
    cert, key = _write_pair(tmp_path, "name")
    other = tmp_path / "other.key"
    other.write_bytes(make_certificates(["other"]).key)
    encrypted = tmp_path / "encrypted.key"
    secret = ec.generate_private_key(ec.SECP256R1())
    encrypted.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    absent = tmp_path / "absent"
    for flags, named in (
        ([f"--tls-cert-file={cert}"], "belong together"),
        ([f"--tls-cert-file={cert}", f"--tls-private-key-file={absent}"], "absent"),
        ([f"--tls-cert-file={cert}", f"--tls-private-key-file={other}"], "other.key"),
        ([f"--tls-cert-file={cert}", f"--tls-private-key-file={encrypted}"], "encrypted.key"),
        ([f"--client-ca-file={absent}"], "--client-ca-file"),
        ([f"--client-ca-file={key}"], "--client-ca-file"),
        (["--tls-min-version=VersionTLS10"], "VersionTLS12 or VersionTLS13"),
    ):
        with pytest.raises(FlagError, match=named):
            ServingTls(parse(flags))


@pytest.mark.parametrize("flag", ["port", "secure-port"])
def test_a_port_that_is_taken_is_named_with_its_flag(flag: str) -> None:
    async def run(port: int) -> None:
        with pytest.raises(FlagError, match=rf"--{flag}={port}: .*0\.0\.0\.0: Address already in"):
            async with _serving(f"--{flag}={port}"):
                pass

    with socket.create_server(("0.0.0.0", 0)) as taken:
        asyncio.run(run(taken.getsockname()[1]))


def test_the_addresses_of_the_ports_are_known() -> None:
    async def scenario(endpoints: Endpoints, plain: int, secure: int) -> None:
        assert endpoints.addresses == [f"http://127.0.0.1:{plain}", f"https://[::1]:{secure}"]

    _play(scenario, "--address=127.0.0.1", "--bind-address=::1")


def test_the_checks_of_the_health_pages_have_kube_schedulers_names() -> None:
    shown: dict[str, list[str]] = {}

    async def scenario(endpoints: Endpoints, plain: int, secure: int) -> None:
        endpoints._process.ready = True
        for page in ("healthz", "livez", "readyz"):
            found = endpoints.health.page(Request("GET", f"/{page}", {"verbose": ""}, b""))
            assert found is not None and found.status == 200
            shown[page] = found.body.decode().splitlines()

    _play(scenario)
    assert shown == {
        "healthz": ["[+]leaderElection ok", "healthz check passed"],
        "livez": ["[+]ping ok", "livez check passed"],
        "readyz": [
            *(f"[+]{name} ok" for name in ("leaderElection", "shutdown", "rights")),
            "[+]sched-handler-sync ok",
            "readyz check passed",
        ],
    }


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("", False),
    ],
)
def test_this_machine_is_whoever_uses_a_loopback_address(address: str, here: bool) -> None:
    assert is_this_machine(Peer(address, {})) is here


def test_access_to_the_secure_port_follows_the_flags() -> None:
    assert access_settings(
        parse(
            [
                "--authorization-always-allow-paths=/healthz,/x/*",
                "--authentication-token-webhook-cache-ttl=1s",
                "--authorization-webhook-cache-authorized-ttl=2s",
                "--authorization-webhook-cache-unauthorized-ttl=3s",
            ]
        )
    ) == AccessSettings(("/healthz", "/x/*"), token_s=1.0, allowed_s=2.0, denied_s=3.0)
    assert access_settings(parse([])) == AccessSettings()


def test_lines_are_sent_in_pieces_of_a_bounded_size() -> None:
    assert list(batched(map(str, range(5)), 2)) == [["0", "1"], ["2", "3"], ["4"]]
    assert list(batched([], 2)) == []
