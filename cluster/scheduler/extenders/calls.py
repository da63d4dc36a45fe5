"""Calls to one extender over HTTP or HTTPS."""

from __future__ import annotations

import base64
import ssl
import tempfile
from typing import Any, Final

import aiohttp

from apis.errors import InputError
from cluster.scheduler.configuration.extenders import Extender, ExtenderTLSConfig
from cluster.scheduler.extenders.wire import ExtenderError, Unanswered

_LONGEST_ANSWER: Final = 64 << 20
"""Bytes. An extender without a node cache of its own answers with whole nodes, which have about 10
KiB each: enough for 5,000."""
_PIECE: Final = 1 << 16
"""Bytes of one read of an answer. Chosen: about what a socket holds. Twice the value lets an answer
exceed the limit above by as much before it is given up."""


class ExtenderCalls:
    """Sends requests to one extender; use it as an async context manager."""

    def __init__(self, extender: Extender, *, obj: str, field: str) -> None:
        """obj, field: where the extender is configured. Raises InputError for TLS settings that
        cannot be used."""
        self.url = extender.url_prefix.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=float(extender.http_timeout))
        self._seconds = float(extender.http_timeout)
        tls = extender.tls_config or ExtenderTLSConfig()
        self._server_name = tls.server_name or None
        self._tls: ssl.SSLContext | None = None
        if self.url.startswith("https:"):
            try:
                self._tls = _context(tls, trusts_all=extender.enable_https)
            except (OSError, ValueError) as error:
                raise InputError(
                    obj=obj, field=f"{field}.tlsConfig", value=self.url, problem=str(error)
                ) from None
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Make connections possible, on the running loop."""
        self._session = aiohttp.ClientSession(timeout=self._timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, verb: str, body: bytes) -> bytes:
        """Return the body of the answer 200. Raises ExtenderError, Unanswered where none comes."""
        if self._session is None:
            raise ExtenderError("the scheduler is ending")
        url = f"{self.url}/{verb}"
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {"ssl": self._tls, "server_hostname": self._server_name}
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                url, data=body, headers=headers, allow_redirects=False, **options
            ) as answer:
                received = bytearray()
                async for piece in answer.content.iter_chunked(_PIECE):
                    received += piece
                    if len(received) > _LONGEST_ANSWER:
                        raise ExtenderError(f"the answer to {verb} is too long")
                if answer.status != 200:
                    raise ExtenderError(f"{verb} was answered with status {answer.status}")
                return bytes(received)
        except TimeoutError:
            raise Unanswered(f"{verb} was not answered within {self._seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"{verb}: {type(error).__name__}: {error}") from None


def _context(tls: ExtenderTLSConfig, *, trusts_all: bool) -> ssl.SSLContext:
    """Return TLS settings. Raises OSError or ValueError.

    trusts_all: the server's certificate is not verified where no CA is named; kube-scheduler's rule
    for enableHTTPS.
    """
    has_ca = bool(tls.ca_file or tls.ca_data)
    context = ssl.create_default_context(
        cafile=tls.ca_file if tls.ca_file and not tls.ca_data else None,
        cadata=base64.b64decode(tls.ca_data).decode() if tls.ca_data else None,
    )
    if tls.insecure or (trusts_all and not has_ca):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls.cert_data or tls.cert_file:
        # The ssl module reads keys from files only: a private folder, removed at once.
        with tempfile.TemporaryDirectory() as folder:
            cert = _file(folder, tls.cert_data, tls.cert_file)
            context.load_cert_chain(cert, _file(folder, tls.key_data, tls.key_file))
    return context


def _file(folder: str, data: str, path: str) -> str:
    """Return a file with base64 data, or the configured file where there is none."""
    if not data:
        return path
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:
        made.write(base64.b64decode(data))
    return made.name
