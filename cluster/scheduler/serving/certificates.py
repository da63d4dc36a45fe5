"""TLS of the secure port: the certificate, and whose client certificates count."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Final

import msgspec

from cluster.flags import FlagError
from cluster.scheduler.configuration.flags import Settings
from kube.certificates import make_certificates
from kube.client import ApiError, Client, Unreachable
from kube.resources import CONFIG_MAPS
from kube.webhook import load_pair

_log = logging.getLogger(__name__)

AUTHENTICATION_CONFIG: Final = ("kube-system", "extension-apiserver-authentication")
"""Where an API server publishes the CA of the client certificates that it accepts."""
_PUBLISHED: Final = "ConfigMap " + "/".join(AUTHENTICATION_CONFIG)
_VERSIONS: Final = {
    "": ssl.TLSVersion.TLSv1_2,
    "VersionTLS12": ssl.TLSVersion.TLSv1_2,
    "VersionTLS13": ssl.TLSVersion.TLSv1_3,
}
"""Values of --tls-min-version. Older versions are not accepted: no client since 2008 needs one."""
_LOOK_S: Final = 60.0
"""Between two looks at the certificate and the client CA; as kube-scheduler at its files."""


class _ConfigMap(msgspec.Struct):
    data: dict[str, str] = msgspec.field(default_factory=dict)


class ServingTls:
    """The TLS settings of the port, with the certificate that the flags name, or one of its own.

    What is read again makes new settings, for the connections from then on: settings in use can be
    given a further CA, but none can be taken away.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises FlagError for files that cannot be used."""
        version = settings.text("tls-min-version")
        if version not in _VERSIONS:
            raise FlagError(
                f"--tls-min-version={version}: expected {' or '.join(v for v in _VERSIONS if v)}"
            )
        self._version = _VERSIONS[version]
        self._cert = settings.text("tls-cert-file")
        self._key = settings.text("tls-private-key-file")
        self._ca_file = settings.text("client-ca-file")
        if bool(self._cert) != bool(self._key):
            raise FlagError("--tls-cert-file and --tls-private-key-file belong together")
        if self._cert:
            self._pair = self._read_pair()
        else:
            names = ("localhost", "127.0.0.1", "::1", socket.gethostname())
            made = make_certificates(names)
            self._pair = (made.cert, made.key)
        self._ca = self._read_ca() if self._ca_file else ""
        self.context = self._made(self._pair, self._ca)

    def current(self) -> ssl.SSLContext:
        """Return the settings for a new connection."""
        return self.context

    async def look_up_client_ca(self, client: Client, *, tolerate: bool) -> None:
        """Accept the client certificates that the API server accepts.

        tolerate: without its CA, clients can still present tokens. Raises ApiError or Unreachable.
        """
        try:
            await self._take_published_ca(client)
        except (ApiError, Unreachable, FlagError, msgspec.DecodeError) as error:
            if not tolerate:
                raise
            _log.warning("client certificates are not accepted: %s", error)

    async def follow(self, client: Client | None) -> None:
        """Serve what changed of the certificate and the client CA, until cancelled.

        client: reads the CA that the API server publishes, if that is the one in force.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            self.reload()
            if client is not None:
                await self.renew_client_ca(client)

    def reload(self) -> None:
        """Take the files that changed; those that cannot be used leave the last ones in force."""
        if self._cert:
            try:
                pair = self._read_pair()
                if pair != self._pair:
                    self._take(pair, self._ca)
            except FlagError as error:
                _log.warning("the former certificate stays in force: %s", error)
        if self._ca_file:
            try:
                ca = self._read_ca()
                if ca != self._ca:
                    self._take(self._pair, ca)
            except FlagError as error:
                _log.warning("the former client CA stays in force: %s", error)

    async def renew_client_ca(self, client: Client) -> None:
        """Take the CA that the API server publishes, if it changed."""
        try:
            await self._take_published_ca(client)
        except (ApiError, Unreachable, FlagError, msgspec.DecodeError) as error:
            _log.warning("the former client CA stays in force: %s", error)

    async def _take_published_ca(self, client: Client) -> None:
        namespace, name = AUTHENTICATION_CONFIG
        path = CONFIG_MAPS.path(namespace=namespace, name=name)
        answer = await client.request("GET", path, tries=1)
        pem = msgspec.json.decode(answer, type=_ConfigMap).data.get("client-ca-file", "")
        if pem and pem != self._ca:
            self._take(self._pair, pem)

    def _take(self, pair: tuple[bytes, bytes], ca: str) -> None:
        self.context = self._made(pair, ca)
        self._pair, self._ca = pair, ca

    def _made(self, pair: tuple[bytes, bytes], ca: str) -> ssl.SSLContext:
        """Return settings with a certificate and its key, and a client CA unless it is ""."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._version
        try:
            load_pair(context, *pair)
        except (OSError, ssl.SSLError) as error:
            raise FlagError(
                f"--tls-cert-file={self._cert}, --tls-private-key-file={self._key}: {error}"
            ) from None
        if ca:
            try:
                # Beside the certificates there may be comments in any language.
                context.load_verify_locations(cadata=ca.encode("ascii", "ignore").decode())
            # ValueError: the text has no ASCII character at all.
            except (ssl.SSLError, ValueError) as error:
                raise FlagError(f"{self._ca_source}: {error}") from None
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    @property
    def _ca_source(self) -> str:
        return f"--client-ca-file={self._ca_file}" if self._ca_file else _PUBLISHED

    def _read_pair(self) -> tuple[bytes, bytes]:
        try:
            return Path(self._cert).read_bytes(), Path(self._key).read_bytes()
        except OSError as error:
            raise FlagError(
                f"--tls-cert-file={self._cert}, --tls-private-key-file={self._key}: {error}"
            ) from None

    def _read_ca(self) -> str:
        try:
            ca = Path(self._ca_file).read_text(errors="replace")
        except OSError as error:
            raise FlagError(f"{self._ca_source}: {error}") from None
        if not ca.strip():
            raise FlagError(f"{self._ca_source}: the file is empty")
        return ca
