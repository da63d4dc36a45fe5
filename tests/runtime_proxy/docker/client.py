"""A client of dockerd's HTTP API over a Unix socket, with what dockershim asks of it."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

POD_LABELS = {
    "io.kubernetes.docker.type": "podsandbox",
    "app": "web",
    "annotation.note": "n",
}


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, *, timeout_s: float = 10) -> None:
        super().__init__("docker", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Docker:
    def __init__(self, path: Path, *, image: str = "i", timeout_s: float = 10) -> None:
        self.path = path
        self.image = image
        self.connection = UnixConnection(path, timeout_s=timeout_s)

    def ask(self, method: str, target: str, document: Any = None) -> tuple[int, bytes]:
        body = json.dumps(document) if document is not None else None
        self.connection.request(method, target, body, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def create(self, name: str, labels: dict[str, str], **fields: Any) -> str:
        document = {"Image": self.image, "Labels": labels, "HostConfig": {}, **fields}
        status, body = self.ask("POST", f"/v1.41/containers/create?name={name}", document)
        assert status == 201, body
        return str(json.loads(body)["Id"])

    def run_sandbox(self, **fields: Any) -> str:
        return self.create("k8s_POD_web-0_default_u-1_0", POD_LABELS, **fields)

    def create_container(self, sandbox: str, **fields: Any) -> str:
        labels = {"io.kubernetes.docker.type": "container", "io.kubernetes.sandbox.id": sandbox}
        return self.create("k8s_main_web-0_default_u-1_2", labels, **fields)
