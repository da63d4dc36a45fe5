"""dockerd's HTTP API on a unix socket, as far as the proxy and its clients need it.

It keeps what it was sent, octets included, and has the difficult answers: chunked streams without
end, upgraded and raw attach connections, early errors.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    def document(self) -> Any:
        return json.loads(self.body)


class FakeDockerd:
    def __init__(self, path: Path, driver: str = "cgroupfs") -> None:
        self.path = path
        self.driver = driver
        self.requests: list[Request] = []
        self.containers: dict[str, dict[str, Any]] = {}
        self.broken: set[str] = set()
        self.say = threading.Event()
        self._ids = itertools.count(1)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(32)
        self._open: list[socket.socket] = []

    def asked(self, suffix: str) -> list[Request]:
        return [r for r in self.requests if r.path.endswith(suffix)]

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        self.say.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        reader = connection.makefile("rb")
        with suppress(OSError, ValueError):
            while line := reader.readline():
                method, target, _ = line.decode().split()
                headers: dict[str, str] = {}
                while (field := reader.readline().strip()) != b"":
                    name, _, value = field.decode().partition(":")
                    headers[name.lower()] = value.strip()
                if headers.get("transfer-encoding") == "chunked":
                    body = b""
                    while size := int(reader.readline(), 16):
                        body += reader.read(size)
                        reader.readline()
                    reader.readline()
                else:
                    body = reader.read(int(headers.get("content-length", 0)))
                parts = urlsplit(target)
                request = Request(method, parts.path, parse_qs(parts.query), headers, body)
                self.requests.append(request)
                if not self._answer(connection, reader, request):
                    break
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _answer(self, connection: socket.socket, reader: Any, request: Request) -> bool:
        path = request.path
        if path.startswith("/v1."):
            path = path[path.index("/", 1) :]

        def reply(status: str, document: Any = None) -> bool:
            body = json.dumps(document).encode() if document is not None else b""
            length = "" if status.startswith(("204", "304")) else f"Content-Length: {len(body)}\r\n"
            connection.sendall(f"HTTP/1.1 {status}\r\n{length}X-Own: yes\r\n\r\n".encode() + body)
            return True

        if path == "/info":
            return reply("200 OK", {"CgroupDriver": self.driver})
        if path == "/echo":
            return reply("200 OK", {"size": len(request.body), "headers": request.headers})
        if path == "/nonsense":
            connection.sendall(b"220 mail ready\r\n\r\n")
            return True
        if path == "/containers/create":
            document = request.document()
            if document.get("Image") == "missing":
                return reply("404 Not Found", {"message": "No such image"})
            identifier = f"{next(self._ids):02x}".ljust(64, "a")
            self.containers[identifier] = {
                "Id": identifier,
                "Name": "/" + request.query["name"][0],
                "Config": {k: v for k, v in document.items() if k != "HostConfig"},
                "HostConfig": document.get("HostConfig", {}),
            }
            return reply("201 Created", {"Id": identifier, "Warnings": []})
        if path == "/containers/json":
            return reply(
                "200 OK",
                [{"Id": c["Id"], "Names": [c["Name"]]} for c in self.containers.values()],
            )
        if path == "/events":
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for number in range(3):
                part = json.dumps({"event": number}).encode()
                connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
                if not self.say.wait(10):
                    return False
                self.say.clear()
            connection.sendall(b"0\r\n\r\n")
            return True
        if path.endswith("/attach"):
            if headers_upgrade(request):
                connection.sendall(
                    b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
                )
            else:
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n"
                )
            while part := reader.read1(65_536):
                connection.sendall(part.upper())
            connection.sendall(b"<end of input>")
            return False
        return self._answer_about_container(path, request, reply)

    def _answer_about_container(self, path: str, request: Request, reply: Any) -> bool:
        words = path.strip("/").split("/")
        known = [
            c
            for i, c in self.containers.items()
            if len(words) > 1 and (i.startswith(words[1]) or c["Name"] == "/" + words[1])
        ]
        if words[0] != "containers" or len(known) != 1:
            return bool(reply("404 Not Found", {"message": f"No such container: {words[-1]}"}))
        (container,) = known
        action = words[2] if len(words) > 2 else ""
        if action == "json" and container["Id"] in self.broken:
            return bool(reply("500 Internal Server Error", {"message": "layer does not exist"}))
        if action == "json":
            return bool(reply("200 OK", container))
        if action == "update":
            container["HostConfig"].update(request.document())
            return bool(reply("200 OK", {"Warnings": []}))
        if request.method == "DELETE":
            del self.containers[container["Id"]]
        return bool(reply("204 No Content"))


def headers_upgrade(request: Request) -> bool:
    return request.headers.get("upgrade") == "tcp"


@contextmanager
def fake_dockerd(folder: Path, driver: str = "cgroupfs") -> Iterator[FakeDockerd]:
    daemon = FakeDockerd(folder / "docker.sock", driver)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()
