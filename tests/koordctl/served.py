"""An API server, or a scheduler, that answers each path with what the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml


@dataclass
class Served:
    """url: of the server. asked: the paths so far. agents: the User-Agent headers so far."""

    url: str
    asked: list[str] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)

    def kubeconfig(self, folder: Path, *, context: str = "here") -> str:
        """Write a kubeconfig whose current context is another server that does not answer, unless
        `context` is "here"."""
        clusters = {"here": self.url, "nowhere": "http://127.0.0.1:1"}
        path = folder / "kubeconfig"
        tree = {
            "kind": "Config",
            "apiVersion": "v1",
            "current-context": context,
            "clusters": [{"name": n, "cluster": {"server": u}} for n, u in clusters.items()],
            "users": [{"name": "me", "user": {}}],
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": "me"}} for name in clusters
            ],
        }
        path.write_text(yaml.safe_dump(tree))
        return str(path)


@contextmanager
def serving(answers: Mapping[str, Any]) -> Iterator[Served]:
    """Serve on loopback. answers: by path, without the query; an int is a refusal of this status.

    A path that is not there is answered with 404.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            served.agents.add(self.headers.get("User-Agent", ""))
            found = answers.get(self.path.partition("?")[0], 404)
            code = found if isinstance(found, int) else 200
            refusal = {"kind": "Status", "code": code, "reason": "No", "message": f"said {code}"}
            body = json.dumps(refusal if isinstance(found, int) else found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Served(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
