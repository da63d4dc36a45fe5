"""When the secure port looks at its certificate and at the CA of its clients."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import cast

import pytest

from cluster.flags import FlagError
from cluster.scheduler.configuration.flags import parse
from cluster.scheduler.serving.certificates import ServingTls
from kube.certificates import make_certificates
from kube.client import ApiError, Client, Unreachable
from tests.cluster.fake_api import in_virtual_time
from tests.cluster.scheduler.serving.client_certificates import client_certificate


class _Api:
    """Publishes a CA, or fails. asked: the requests."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str, int]] = []

    async def request(self, method: str, path: str, *, tries: int) -> bytes:
        self.asked.append((method, path, tries))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer.encode()


def _published(ca: str) -> str:
    return json.dumps({"data": {"client-ca-file": ca}})


_FORBIDDEN = ApiError(status=403, reason="Forbidden", message="no", what="a ConfigMap")


@pytest.mark.parametrize(
    "answer", [_FORBIDDEN, Unreachable("away"), "not JSON", _published("no certificate")]
)
def test_a_look_up_that_fails_ends_the_start_unless_it_is_tolerated(
    answer: str | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    tls = ServingTls(parse([]))
    client = cast(Client, _Api(answer))
    expected = type(answer) if isinstance(answer, Exception) else (FlagError, ValueError)
    with pytest.raises(expected):
        asyncio.run(tls.look_up_client_ca(client, tolerate=False))
    assert caplog.text == ""
    asyncio.run(tls.look_up_client_ca(client, tolerate=True))
    assert "client certificates are not accepted: " in caplog.text
    asyncio.run(tls.renew_client_ca(client))
    assert "the former client CA stays in force: " in caplog.text
    assert tls.context.verify_mode is ssl.CERT_NONE


def test_without_a_published_ca_no_client_certificate_is_asked_for() -> None:
    for answer in ("{}", _published("")):
        tls, api = ServingTls(parse([])), _Api(answer)
        before = tls.current()
        asyncio.run(tls.look_up_client_ca(cast(Client, api), tolerate=False))
        assert tls.current() is before
        assert before.verify_mode is ssl.CERT_NONE
        path = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
        assert api.asked == [("GET", path, 1)]


def test_the_published_ca_is_looked_at_once_a_minute(tmp_path: Path) -> None:
    first, second = (
        client_certificate(tmp_path, name, "operator")[0].read_text() for name in ("a", "b")
    )
    tls, api = ServingTls(parse([])), _Api(_published(first))
    contexts: list[ssl.SSLContext] = []

    async def run() -> None:
        task = asyncio.create_task(tls.follow(cast(Client, api)))
        for seconds, answer in ((59, first), (2, first), (60, first), (60, second)):
            api.answer = _published(answer)
            await asyncio.sleep(seconds)
            contexts.append(tls.current())
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    in_virtual_time(run)
    assert len(api.asked) == 3
    none, one, same, other = contexts
    assert (none.verify_mode, one.verify_mode) == (ssl.CERT_NONE, ssl.CERT_OPTIONAL)
    # Settings in use are replaced only where something changed.
    assert same is one
    assert other is not one


def test_files_are_looked_at_once_a_minute_without_an_api_server(tmp_path: Path) -> None:
    cert, key, ca = (tmp_path / name for name in ("cert", "key", "ca"))

    def write(name: str) -> None:
        made = make_certificates([name])
        cert.write_bytes(made.cert)
        key.write_bytes(made.key)
        ca.write_text(client_certificate(tmp_path, name, "operator")[0].read_text())

    write("first")
    tls = ServingTls(
        parse([f"--tls-cert-file={cert}", f"--tls-private-key-file={key}",
               f"--client-ca-file={ca}"])
    )  # fmt: skip

    async def run() -> None:
        task = asyncio.create_task(tls.follow(None))
        first = tls.current()
        await asyncio.sleep(61)
        assert tls.current() is first
        write("second")
        await asyncio.sleep(60)
        assert tls.current() is not first
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    in_virtual_time(run)


@pytest.mark.parametrize(
    ("flags", "version"),
    [
        ([], ssl.TLSVersion.TLSv1_2),
        (["--tls-min-version="], ssl.TLSVersion.TLSv1_2),
        (["--tls-min-version=VersionTLS12"], ssl.TLSVersion.TLSv1_2),
        (["--tls-min-version=VersionTLS13"], ssl.TLSVersion.TLSv1_3),
    ],
)
def test_the_oldest_version_of_tls_is_that_of_the_flag(
    flags: list[str], version: ssl.TLSVersion
) -> None:
    assert ServingTls(parse(flags)).current().minimum_version is version


def test_a_client_ca_that_is_empty_or_missing_is_named_with_its_flag(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    with pytest.raises(FlagError, match=f"--client-ca-file={ca}: .*No such file"):
        ServingTls(parse([f"--client-ca-file={ca}"]))
    ca.write_text(" \n")
    with pytest.raises(FlagError, match=f"--client-ca-file={ca}: the file is empty"):
        ServingTls(parse([f"--client-ca-file={ca}"]))
