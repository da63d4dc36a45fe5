"""The proxy as a process of its own, and hook servers for it: what the tests here start and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from protos.runtimehook.v1alpha1 import api_pb2 as hook
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 15.0
AS_MODULE = (sys.executable, "-m", "runtime_proxy.main")


@dataclass(slots=True)
class Proxy:
    """A running koord-runtime-proxy. `folder` holds its sockets, journal and registrations."""

    folder: Path
    backend: Path
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()
    program: Sequence[str] = AS_MODULE
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "proxy.sock"

    @property
    def hook_dir(self) -> Path:
        return self.folder / "hookserver.d"

    @property
    def log(self) -> Path:
        return self.folder / "proxy.log"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def command(self) -> list[str]:
        return [
            *self.program,
            f"--koord-runtimeproxy-endpoint={self.socket}",
            f"--remote-runtime-service-endpoint={self.backend}",
            f"--hook-server-dir={self.hook_dir}",
            f"--state-dir={self.folder / 'state'}",
            *(
                []
                if any(f.startswith("--http-address") for f in self.flags)
                else ["--http-address="]
            ),
            *self.flags,
        ]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT if self.program == AS_MODULE else self.folder,
                env={**os.environ, **self.environment},
                pass_fds=self.pass_fds,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        mark = self.log_text().count(" serving ")
        while self.log_text().count(" serving ") == mark:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the proxy did not start:\n{self.log_text()}")
            time.sleep(0.01)

    def log_text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for_log(self, text: str, *, timeout_s: float = 10.0) -> None:
        wait_until(lambda: text in self.log_text(), f"log line {text!r}", timeout_s=timeout_s)

    def successor(self) -> int:
        """The process id that a handover named in the log."""
        line = next(text for text in self.log_text().splitlines() if "handed over" in text)
        return int(line.rpartition("successor=")[2])

    def stop(self, how: signal.Signals = signal.SIGTERM, *, timeout_s: float = 15.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def resident_kib(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss) // 1024

    def open_sockets(self) -> int:
        """Count the sockets of the process, listening ones included."""
        found = 0
        for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
            # The process may close a descriptor between the listing and the look at it.
            with suppress(FileNotFoundError):
                found += os.readlink(descriptor).startswith("socket:")
        return found

    def register(
        self,
        endpoint: Path,
        stages: Sequence[str],
        *,
        policy: str = "Ignore",
        name: str = "koordlet.json",
    ) -> None:
        """Write a registration as koordlet does, and wait until the proxy has taken it."""
        self.hook_dir.mkdir(exist_ok=True)
        before = self.log_text().count("hook server is registered")
        (self.hook_dir / name).write_text(
            json.dumps(
                {
                    "remote-endpoint": str(endpoint),
                    "failure-policy": policy,
                    "runtime-hooks": list(stages),
                }
            )
        )
        if self.process is not None:
            wait_until(
                lambda: self.log_text().count("hook server is registered") > before,
                "registration to be taken",
            )


@contextmanager
def proxy(
    backend: Path,
    *,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    program: Sequence[str] = AS_MODULE,
) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory(prefix="koord-proxy-") as folder:
        running = Proxy(Path(folder), backend, flags, environment or {}, pass_fds, program)
        (running.folder / "hookserver.d").mkdir()
        running.start()
        try:
            yield running
        finally:
            if running.process is not None and running.process.poll() is None:
                running.process.kill()
                running.process.wait()


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


Answer = Callable[[Any], Any]

STAGES = (
    "PreRunPodSandbox",
    "PostStopPodSandbox",
    "PreCreateContainer",
    "PreStartContainer",
    "PostStartContainer",
    "PreUpdateContainerResources",
    "PostStopContainer",
    "PreRemoveRunPodSandbox",
    "PreUpdatePodSandboxResources",
)


def echo(request: Any) -> Any:
    """What upstream's koordlet answers when no plugin changes anything: everything it was told."""
    if isinstance(request, hook.PodSandboxHookRequest):
        return hook.PodSandboxHookResponse(
            labels=request.labels,
            annotations=request.annotations,
            cgroup_parent=request.cgroup_parent,
            resources=request.resources if request.HasField("resources") else None,
        )
    return hook.ContainerResourceHookResponse(
        container_annotations=request.container_annotations,
        container_resources=request.container_resources
        if request.HasField("container_resources")
        else None,
        pod_cgroup_parent=request.pod_cgroup_parent,
        container_envs=request.container_envs,
    )


class HookService:
    """A hook server on grpcio, as any third party would write one. `calls` is what it was asked."""

    def __init__(self, socket: Path, answers: Mapping[str, Answer]) -> None:
        self.socket = socket
        self.calls: list[tuple[str, Any]] = []
        self.answers = dict(answers)
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def asked(self, stage: str) -> list[Any]:
        with self._lock:
            return [request for name, request in self.calls if name == stage]

    def wait_for(self, stage: str, count: int = 1) -> list[Any]:
        wait_until(lambda: len(self.asked(stage)) >= count, f"{count} x {stage}")
        return self.asked(stage)

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        handlers = {
            f"{stage}Hook": grpc.unary_unary_rpc_method_handler(
                self._handler(stage),
                request_deserializer=(
                    hook.PodSandboxHookRequest
                    if "PodSandbox" in stage
                    else hook.ContainerResourceHookRequest
                ).FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for stage in self.answers
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("runtime.v1alpha1.RuntimeHookService", handlers),)
        )
        self._server.add_insecure_port(f"unix://{self.socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def _handler(self, stage: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            with self._lock:
                self.calls.append((stage, request))
            return self.answers[stage](request)

        return handle


def answering(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    """A hook that echoes and changes something."""

    def answer(request: Any) -> Any:
        echoed = echo(request)
        change(echoed)
        return echoed

    return answer


@contextmanager
def hook_service(
    socket: Path, answers: Mapping[str, Answer] | None = None
) -> Iterator[HookService]:
    """A server of every stage that echoes, except where `answers` says otherwise."""
    service = HookService(socket, {**dict.fromkeys(STAGES, echo), **(answers or {})})
    service.start()
    try:
        yield service
    finally:
        service.stop()


class HookProcess:
    """A hook server in a process of its own: it can be killed, stopped and upgraded."""

    _PROGRAM = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.runtime_proxy.processes import hook_service\n"
        "with hook_service(Path(sys.argv[1])):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", self._PROGRAM, str(self.socket)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            raise RuntimeError("the hook server did not start")
        return process

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            # Each thread stops when it next enters the kernel; until then it may answer a call.
            wait_until(self._stopped, "the hook server stops", every_s=0.001)

    def _stopped(self) -> bool:
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        return all(b") T " in (thread / "stat").read_bytes() for thread in threads)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self._process = self._start()


@contextmanager
def hook_process(socket: Path) -> Iterator[HookProcess]:
    process = HookProcess(socket)
    try:
        yield process
    finally:
        process.kill()
