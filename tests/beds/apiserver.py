"""A real kube-apiserver with its etcd, on loopback, thrown away afterwards.

The programs are found by tests.beds.kubernetes.
Users of the bed: `admin` (system:masters) and any that a test adds by name, with no rights but
what RBAC gives them.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from kube.client import Client
from kube.connection import Connection
from tests.beds.kubernetes import API_SERVER, programs
from tests.ports import free_ports

USERS = ("admin", "koord-manager", "koord-scheduler", "koordlet", "nobody")


@dataclass
class ApiServer:
    """A running API server. `stop_*` and `start_*` take its parts down and up again."""

    folder: Path
    tokens: dict[str, str]
    etcd_port: int
    etcd_peer_port: int
    port: int
    etcd_flags: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def connection(self, user: str = "admin") -> Connection:
        """Return a connection as `user`, trusting the server's own certificate."""
        tls = ssl.create_default_context(cafile=str(self.folder / "certs" / "apiserver.crt"))
        tls.check_hostname = False
        return Connection(self.url, tls, lambda: f"Bearer {self.tokens[user]}")

    def client(self, user: str = "admin", *, qps: float = 0) -> Client:
        return Client(self.connection(user), user_agent=f"test-{user}", qps=qps)

    def kubeconfig(self, user: str = "admin") -> str:
        """Return the text of a kubeconfig for `user`, for programs of their own."""
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        return kubeconfig(cluster, user, self.tokens[user])

    def start_etcd(self) -> None:
        client = f"http://127.0.0.1:{self.etcd_port}"
        peer = f"http://127.0.0.1:{self.etcd_peer_port}"
        self._spawn(
            "etcd",
            "--name=bed",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=bed={peer}",
            "--unsafe-no-fsync",
            *self.etcd_flags,
        )
        self._wait(f"{client}/health", "etcd")

    def start_apiserver(self) -> None:
        flags = [
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--secure-port={self.port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--cert-dir={self.folder / 'certs'}",
            f"--service-account-key-file={self.folder / 'sa.pub'}",
            f"--service-account-signing-key-file={self.folder / 'sa.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
            "--max-requests-inflight=800",
            "--max-mutating-requests-inflight=400",
            *self.flags,
        ]
        if "v1.20" in self._version() or "v1.19" in self._version():
            flags.append("--insecure-port=0")
        self._spawn("kube-apiserver", *flags)
        self._wait(f"{self.url}/readyz", "kube-apiserver", token=self.tokens["admin"])

    def stop(self, name: str, *, how: signal.Signals = signal.SIGTERM) -> None:
        """End one of "etcd" and "kube-apiserver" and wait for its end."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def compact_etcd(self) -> None:
        """Forget all revisions but the newest, so that old watches cannot resume."""
        base = f"http://127.0.0.1:{self.etcd_port}/v3/kv"
        with urllib.request.urlopen(f"{base}/range", data=b'{"key":"AA=="}', timeout=10) as answer:
            revision = json.load(answer)["header"]["revision"]
        body = json.dumps({"revision": revision, "physical": True}).encode()
        urllib.request.urlopen(f"{base}/compaction", data=body, timeout=30).close()

    def _version(self) -> str:
        shown = subprocess.run(
            [programs(*API_SERVER) / "kube-apiserver", "--version"],
            capture_output=True,
            text=True,
            check=True,
        )
        return shown.stdout

    def _spawn(self, name: str, *flags: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        try:
            self.processes[name] = subprocess.Popen(
                [programs(*API_SERVER) / name, *flags],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            log.close()

    def _wait(self, url: str, name: str, *, token: str = "", seconds: float = 90) -> None:
        trusting = ssl._create_unverified_context() if url.startswith("https") else None
        request = urllib.request.Request(url)
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        deadline = time.monotonic() + seconds
        while True:
            process = self.processes[name]
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} did not become ready:\n{tail}")
            try:
                with urllib.request.urlopen(request, timeout=2, context=trusting) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)


def kubeconfig(cluster: Mapping[str, Any], user: str, token: str) -> str:
    """Return the text of a kubeconfig with one cluster and one user."""
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bed",
            "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": user}}],
            "clusters": [{"name": "bed", "cluster": dict(cluster)}],
            "users": [{"name": user, "user": {"token": token}}],
        }
    )


@contextmanager
def api_server(
    *, etcd_flags: tuple[str, ...] = (), flags: tuple[str, ...] = ()
) -> Iterator[ApiServer]:
    """Run a fresh API server; everything it was and wrote is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="koord-apiserver-"))
    tokens = {user: secrets.token_hex(16) for user in USERS}
    groups = {"admin": "system:masters", "koordlet": "koordlets"}
    (folder / "tokens.csv").write_text(
        "".join(
            f'{token},{user},{user},"{groups.get(user, "users")}"\n'
            for user, token in tokens.items()
        )
    )
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (folder / "sa.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    (folder / "sa.pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    etcd_port, peer_port, port = free_ports(3)
    server = ApiServer(folder, tokens, etcd_port, peer_port, port, etcd_flags, flags)
    try:
        server.start_etcd()
        server.start_apiserver()
        yield server
    finally:
        # In order the API server would wait for watches that are still open.
        server.stop("kube-apiserver", how=signal.SIGKILL)
        server.stop("etcd", how=signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


async def eventually(check: Callable[[], Any], *, seconds: float = 15, every: float = 0.05) -> Any:
    """Return the first true result of `check` (plain or async); fail with the last one."""
    deadline = time.monotonic() + seconds
    while True:
        result = check()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return result
        assert time.monotonic() < deadline, f"not within {seconds} s: {result!r}"
        await asyncio.sleep(every)
