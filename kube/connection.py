"""The connection to an API server: address, TLS, credentials.

The `kubernetes` package reads the configuration and authenticates (kubeconfig, in-cluster, exec
plugins, token refresh). It is imported here only, and late, because it costs a second and 20 MB.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

_REFRESH_SECONDS = 30.0
"""Chosen: kubelet replaces a token long before it ends. Exec plugins are called this often."""

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
"""Between two attempts to read how to reach the API server. Chosen: a kubeconfig that was mended is
used within a minute and a half. Twice the value doubles that."""


@dataclass(slots=True)
class Connection:
    """One API server. authorization: returns the value of the header; it may block."""

    server: str
    tls: ssl.SSLContext | None = None
    authorization: Callable[[], str | None] = field(default=lambda: None)
    _header: str | None = field(default=None, init=False)
    _asked_at: float = field(default=float("-inf"), init=False)

    async def header(self) -> str | None:
        """Return the Authorization header; it is renewed every half minute, in a thread."""
        now = time.monotonic()
        if now - self._asked_at > _REFRESH_SECONDS:
            self._header = await asyncio.to_thread(self.authorization)
            self._asked_at = now
        return self._header

    def forget_credentials(self) -> None:
        """Renew the credentials at the next request; for an answer with status 401."""
        self._asked_at = float("-inf")


def token_connection(
    server: str, *, token: str | None = None, ca_file: str | None = None
) -> Connection:
    """Return a connection with a fixed bearer token; for tests and simple setups."""
    tls = ssl.create_default_context(cafile=ca_file) if server.startswith("https") else None
    return Connection(server, tls, lambda: f"Bearer {token}" if token else None)


_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


def watchful_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket that closes within a minute if the other end has disappeared.

    A watch may be silent for minutes. Without this, a server that lost its power, or a load
    balancer that dropped the connection, would leave the cache with old objects for as long.
    """
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    watch_socket(made)
    return made


def watch_socket(made: socket.socket) -> None:
    """Have a socket close within a minute if the other end has disappeared."""
    for level, option, value in _KEEPALIVE:
        made.setsockopt(level, option, value)


def load_connection(
    kubeconfig: str | None = None, *, context: str | None = None, master: str | None = None
) -> Connection:
    """Return the connection that a kubeconfig, or the pod that we run in, describes.

    kubeconfig: a path; None tries the pod's service account first, then $KUBECONFIG and
    ~/.kube/config. master: overrides the server's address.
    Raises ConnectionConfigError with what to do next.
    """
    from kubernetes import client, config

    settings = client.Configuration()
    try:
        if kubeconfig is None and _in_cluster():
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            if kubeconfig is not None:
                _check_there_is_one(kubeconfig)
            config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, context=context, client_configuration=settings
            )
        server = (master or settings.host).rstrip("/")
        return Connection(server, _tls(settings, server), _authorization(settings))
    except Exception as error:
        # The package lets errors of YAML, base64, TLS and its own code through; a file that is
        # being rewritten must not end a daemon.
        raise ConnectionConfigError(
            f"no usable configuration for the API server: {_in_words(error)} "
            "(pass --kubeconfig, or run in a pod with a service account)"
        ) from error


async def wait_for_connection(
    connect: Callable[[], Connection], refused: Callable[[str], None] = lambda why: None
) -> Connection:
    """Return what `connect` returns; called again, later and later, while it raises
    ConnectionConfigError: the kubeconfig may not be written yet. refused: called with its text."""
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await asyncio.to_thread(connect)
        except ConnectionConfigError as error:
            refused(str(error))
            # Spread, so that the daemons of all nodes do not come at once.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


class ConnectionConfigError(RuntimeError):
    """There is no usable configuration for an API server."""


def _check_there_is_one(kubeconfig: str) -> None:
    """Raise FileNotFoundError if there is none of the files of a path, or of a list of paths.

    The package does not say which file it looked for.
    """
    if not any(Path(each).expanduser().exists() for each in kubeconfig.split(os.pathsep)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), kubeconfig)


def _in_words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"its certificates cannot be read: {error}"
    if type(error).__name__ == "ConfigException" or isinstance(error, OSError):
        return str(error)
    return f"not a kubeconfig: {type(error).__name__}: {' '.join(str(error).split())}"


def _in_cluster() -> bool:
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()


def _tls(settings: Any, server: str) -> ssl.SSLContext | None:
    if not server.startswith("https"):
        return None
    tls = ssl.create_default_context(cafile=settings.ssl_ca_cert or None)
    if settings.verify_ssl is False:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    if settings.cert_file:
        tls.load_cert_chain(settings.cert_file, settings.key_file)
    return tls


def _authorization(settings: Any) -> Callable[[], str | None]:
    def ask() -> str | None:
        # Runs the refresh hook: re-reads the service account's token or runs the exec plugin.
        # Releases of the package file the token under different names; its own answer is stable.
        for setting in settings.auth_settings().values():
            if setting["in"] == "header" and setting["key"].lower() == "authorization":
                value = setting["value"]
                return str(value) if value else None
        if settings.username:
            return str(settings.get_basic_auth_token())
        return None

    return ask
