"""Queries to a running daemon: HTTP over its admin socket."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from apis.errors import printable

SOCKET = "admin.sock"
_TIMEOUT_S = 30.0
"""Chosen: far above the slowest answer, a plan. With twice the value a person waits a minute."""


class Unreachable(Exception):
    """No daemon answers at the socket; the message says what to do."""


class Silent(Unreachable):
    """A daemon accepts the connection, but does not answer in time."""


class Refused(Exception):
    """The daemon answered with an error; the message is the daemon's."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("koordlet", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel.settimeout(self.timeout)
        try:
            channel.connect(self._path)
        except BaseException:
            channel.close()
            raise
        self.sock = channel


class Client:
    """The daemon whose run directory is `run_dir`."""

    def __init__(self, run_dir: str) -> None:
        self._path = f"{run_dir.rstrip('/')}/{SOCKET}"
        self._silent = ""

    @property
    def socket_path(self) -> str:
        return self._path

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return the JSON answer; raises Unreachable or Refused."""
        return self._request("GET", f"{path}?{urlencode(query)}" if query else path)

    def post(self, path: str, body: Any) -> Any:
        """Send JSON and return the JSON answer."""
        return self._request("POST", path, json.dumps(body, ensure_ascii=False).encode())

    def _request(self, method: str, target: str, body: bytes | None = None) -> Any:
        if self._silent:
            raise Silent(self._silent)
        connection = _UnixConnection(self._path)
        try:
            connection.request(method, target, body=body)
            response = connection.getresponse()
            answer = response.read()
        except PermissionError:
            raise Unreachable(f"{self._path}: permission denied; run koordctl as root") from None
        except FileNotFoundError:
            raise Unreachable(
                f"no daemon: {self._path} does not exist; start koordlet, or name its"
                " directory with --run-dir"
            ) from None
        except TimeoutError:
            # A command with several queries waits only for the first.
            self._silent = (
                f"{self._path}: no answer within {_TIMEOUT_S:g} s; see journalctl -u koordlet"
            )
            raise Silent(self._silent) from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(
                f"{self._path}: {printable(str(error).strip())}; is koordlet running?"
            ) from None
        finally:
            connection.close()
        try:
            value = json.loads(answer)
        except ValueError:
            raise Refused(printable(answer.decode(errors="replace").strip())) from None
        if response.status != 200:
            message = value.get("error") if isinstance(value, dict) else None
            raise Refused(message or f"{self._path}: HTTP {response.status}")
        return value
