"""Kubelet's pod list: `GET /pods/` over https with the service account, or on the read-only port.

The certificate is verified against `caFile`. Without one, an unverified certificate is accepted
only from this machine's loopback address, since kubelet's certificate is self-signed as a rule.

Facts: docs/facts/koordlet.md, "Kubelet's pod list".
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from apis.core import Pod
from apis.decode import decode_object
from apis.errors import InputError, InputErrors
from koordlet.configuration.config import Kubelet
from koordlet.sources.kubelet_rights import refusal
from koordlet.sources.kubelet_settings import KubeletSettings, parse_settings
from koordlet.sources.polling import SourceError
from koordlet.state.podspec import KnownPod, known_pod
from service.histogram import Histogram

MAX_BYTES: Final = 64 << 20
"""Bytes of one list. Chosen: many times the list of a full node. Twice the value allows twice the
memory."""
PATH: Final = "/pods/"
CONFIG_PATH: Final = "/configz"
BOUNDS_S: Final = tuple(0.001 * 4**power for power in range(7))
"""Upstream's buckets of kubelet request durations: docs/facts/koordlet.md, "Metrics"."""
_MAX_TOKEN_BYTES: Final = 16384
"""Bytes of a token file that are read. Chosen: many times a service account token (about 1 KiB)."""


class _PodList(msgspec.Struct):
    items: list[msgspec.Raw] | None = None  # null where kubelet has no pod


_decode_list: Final = msgspec.json.Decoder(_PodList).decode


class KubeletClient:
    """Fetches kubelet's pods. Used by one worker thread at a time."""

    def __init__(self, config: Kubelet, bad_pod: Callable[[str, str], None]) -> None:
        """bad_pod: called with (object, problem) for each pod that cannot be read."""
        self._config = config
        self._bad_pod = bad_pod
        self.durations: dict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(BOUNDS_S))
        """Of requests that kubelet answered, in seconds, by path and status code."""

    def fetch(self) -> tuple[KnownPod, ...]:
        """Return kubelet's pods; raises SourceError."""
        try:
            status, body = self._get(PATH)
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(
                f"kubelet at {self._where}: {error}; is it running, and is kubelet.address right?"
            ) from error
        if status in (401, 403):
            raise SourceError(self._refusal(status, PATH, body))
        if status != 200:
            raise SourceError(f"kubelet at {self._where} answered {status}")
        return self.parse(body)

    def fetch_settings(self) -> KubeletSettings:
        """Return kubelet's configuration; raises SourceError. For any one worker thread."""
        try:
            status, body = self._get(CONFIG_PATH)
        except (OSError, http.client.HTTPException) as error:
            raise SourceError(f"kubelet at {self._where}: {error}") from error
        if status in (401, 403):
            raise SourceError(
                f"{self._refusal(status, CONFIG_PATH, body)}, or set"
                " reports.disableQueryKubeletConfig"
            )
        if status != 200:
            raise SourceError(f"kubelet at {self._where} answered {status} to {CONFIG_PATH}")
        try:
            return parse_settings(body)
        except ValueError as error:
            raise SourceError(f"kubelet at {self._where}: {error}") from error

    def parse(self, body: bytes) -> tuple[KnownPod, ...]:
        """Return the pods of a pod list; pods that cannot be decoded are reported and left out."""
        try:
            items = _decode_list(body).items or []
        except (msgspec.DecodeError, RecursionError) as error:
            raise SourceError(f"kubelet at {self._where}: not a pod list: {error}") from error
        found = []
        for number, raw in enumerate(items):
            obj = f"kubelet's pod {number + 1}"
            try:
                found.append(known_pod(decode_object(bytes(raw), Pod, obj=obj)))
            except (InputError, InputErrors) as error:
                self._bad_pod(obj, str(error))
            except Exception as error:  # noqa: BLE001 - a defect must cost the pod, not the list
                self._bad_pod(obj, f"{type(error).__name__}: {error}")
        return tuple(found)

    def _refusal(self, status: int, path: str, body: bytes) -> str:
        credential = self._config.token_file or self._config.client_cert_file
        return f"kubelet at {self._where} {refusal(status, path, body, credential)}"

    @property
    def _where(self) -> str:
        config = self._config
        port = config.read_only_port if config.read_only else config.port
        return f"{'http' if config.read_only else 'https'}://{config.address}:{port}"

    def _get(self, path: str) -> tuple[int, bytes]:
        started, config = time.monotonic(), self._config
        connection: http.client.HTTPConnection
        headers = {"Accept": "application/json", "User-Agent": "koordlet"}
        if config.read_only:
            connection = http.client.HTTPConnection(
                config.address, config.read_only_port, timeout=config.timeout
            )
        else:
            connection = http.client.HTTPSConnection(
                config.address, config.port, timeout=config.timeout, context=self._tls()
            )
            token = self._token()
            if token:
                headers["Authorization"] = f"Bearer {token}"
        try:
            connection.connect()
            with _ended_after(config.timeout, connection.sock):
                connection.request("GET", path, headers=headers)
                response = connection.getresponse()
                body = response.read(MAX_BYTES + 1)
        finally:
            connection.close()
        if len(body) > MAX_BYTES:
            raise SourceError(
                f"kubelet at {self._where}: more than {MAX_BYTES >> 20} MiB of {path}"
            )
        self.durations[path, str(response.status)].observe(time.monotonic() - started)
        return response.status, body

    def _token(self) -> str:
        """Return the token, read again each time: service account tokens rotate."""
        if not self._config.token_file:
            return ""
        try:
            with open(self._config.token_file, encoding="ascii") as file:
                return file.read(_MAX_TOKEN_BYTES).strip()
        except FileNotFoundError:
            if self._config.client_cert_file:
                return ""
            raise SourceError(
                f"no token at {self._config.token_file}: set kubelet.tokenFile,"
                " kubelet.clientCertFile, or kubelet.readOnly"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{self._config.token_file}: {error}") from error

    def _tls(self) -> ssl.SSLContext:
        config = self._config
        try:
            context = ssl.create_default_context(cafile=config.ca_file or None)
            if config.insecure_skip_tls_verify or (
                not config.ca_file and is_loopback(config.address)
            ):
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if config.client_cert_file:
                context.load_cert_chain(config.client_cert_file, config.client_key_file or None)
        except (OSError, ssl.SSLError) as error:
            raise SourceError(f"kubelet's TLS files: {error}") from error
        return context


@contextmanager
def _ended_after(seconds: float, channel: socket.socket) -> Iterator[None]:
    """Bound the whole use of a connection: the socket's own time-out restarts with each byte.

    Raises TimeoutError.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError(f"no whole answer within {seconds:g} s")


def is_loopback(address: str) -> bool:
    """Return whether an address is this machine's loopback."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
