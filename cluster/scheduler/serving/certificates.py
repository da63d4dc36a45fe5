"""TLS of the secure port: the certificate, and whose client certificates count."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from typing import Final

import msgspec

from cluster.flags import FlagError
from cluster.scheduler.configuration.flags import Settings
from kube.certificates import make_certificates
from kube.client import ApiError, Client, Unreachable
from kube.resources import CONFIG_MAPS
from kube.webhook import load_certificates

_log = logging.getLogger(__name__)

AUTHENTICATION_CONFIG: Final = ("kube-system", "extension-apiserver-authentication")
"""Where an API server publishes the CA of the client certificates that it accepts."""
_VERSIONS: Final = {
    "": ssl.TLSVersion.TLSv1_2,
    "VersionTLS12": ssl.TLSVersion.TLSv1_2,
    "VersionTLS13": ssl.TLSVersion.TLSv1_3,
}
"""Values of --tls-min-version. Older versions are not accepted: no client since 2008 needs one."""
_LOOK_S: Final = 60.0
"""Between two looks at the certificate's files; as kube-scheduler."""


class _ConfigMap(msgspec.Struct):
    data: dict[str, str] = msgspec.field(default_factory=dict)


class ServingTls:
    """The TLS settings of the port, with the certificate that the flags name, or one of its own."""

    def __init__(self, settings: Settings) -> None:
        """Raises FlagError for files that cannot be used."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        version = settings.text("tls-min-version")
        if version not in _VERSIONS:
            raise FlagError(
                f"--tls-min-version={version}: expected {' or '.join(v for v in _VERSIONS if v)}"
            )
        self.context.minimum_version = _VERSIONS[version]
        self._cert = settings.text("tls-cert-file")
        self._key = settings.text("tls-private-key-file")
        if bool(self._cert) != bool(self._key):
            raise FlagError("--tls-cert-file and --tls-private-key-file belong together")
        if self._cert:
            self._load()
            self._seen = self._stamps()
        else:
            names = ("localhost", "127.0.0.1", "::1", socket.gethostname())
            load_certificates(self.context, make_certificates(names))
        if path := settings.text("client-ca-file"):
            self._trust(path=path)

    async def look_up_client_ca(self, client: Client, *, tolerate: bool) -> None:
        """Accept the client certificates that the API server accepts.

        tolerate: without its CA, clients can still present tokens. Raises ApiError or Unreachable.
        """
        namespace, name = AUTHENTICATION_CONFIG
        try:
            path = CONFIG_MAPS.path(namespace=namespace, name=name)
            answer = await client.request("GET", path, tries=1)
            pem = msgspec.json.decode(answer, type=_ConfigMap).data.get("client-ca-file", "")
            if pem:
                self._trust(pem=pem)
        except (ApiError, Unreachable, FlagError, msgspec.DecodeError) as error:
            if not tolerate:
                raise
            _log.warning(
                "client certificates are not accepted: ConfigMap %s/%s: %s", namespace, name, error
            )

    async def follow_files(self) -> None:
        """Serve the files' certificate after they changed, until cancelled."""
        while self._cert:
            await asyncio.sleep(_LOOK_S)
            self.reload()

    def reload(self) -> None:
        """Take the files if they changed; a pair that cannot be used leaves the last one in force.

        Both are looked at, because they are seldom replaced in one step.
        """
        try:
            stamps = self._stamps()
            if stamps != self._seen:
                self._load()
                self._seen = stamps
        except (FlagError, OSError) as error:
            _log.warning("the former certificate stays in force: %s", error)

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        stats = [os.stat(path) for path in (self._cert, self._key)]
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)

    def _load(self) -> None:
        try:
            # A fresh context first: a failure must leave the one in use as it is.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
                context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise FlagError(
                f"--tls-cert-file={self._cert}, --tls-private-key-file={self._key}: {error}"
            ) from None

    def _trust(self, *, path: str = "", pem: str = "") -> None:
        try:
            self.context.load_verify_locations(cafile=path or None, cadata=pem or None)
        except (OSError, ssl.SSLError) as error:
            raise FlagError(f"--client-ca-file={path}: {error}") from None
        self.context.verify_mode = ssl.CERT_OPTIONAL


def _no_password() -> str:
    """Stand for the password of a key that has one; without this, OpenSSL asks the terminal."""
    return ""
