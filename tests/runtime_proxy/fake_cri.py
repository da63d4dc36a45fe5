"""A CRI runtime in memory, on grpcio: enough of containerd for the proxy's process tests.

It keeps what it was given, as containerd does: the configuration comes back in the verbose status,
updates change the status, and every request is kept for a test to look at. A second service,
`test.Bytes`, answers in the ways that a transparent proxy must carry.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from protos.cri.v1 import api_pb2 as cri

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.so_reuseport", 0),
]
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 64 * 1024),
    ("grpc.absolute_max_metadata_size", 128 * 1024),
    # What kubelet waits between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 3000),
    ("grpc.use_local_subchannel_pool", 1),
]


@contextmanager
def connected(socket: Path) -> Iterator[Any]:
    """A channel of bytes; Any, because grpc's type stubs insist on serializers."""
    with grpc.insecure_channel(f"unix://{socket}", options=CHANNEL_OPTIONS) as channel:
        yield channel


class FakeCri:
    def __init__(self, socket: Path, package: str = "runtime.v1") -> None:
        self.socket = socket
        self.package = package
        self.requests: list[tuple[str, Any]] = []
        self.sandboxes: dict[str, cri.RunPodSandboxRequest] = {}
        self.containers: dict[str, cri.CreateContainerRequest] = {}
        self.updated: dict[str, cri.LinuxContainerResources] = {}
        self.fail: dict[str, grpc.StatusCode] = {}
        self.hanging = threading.Event()
        self.cancelled = threading.Event()
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def asked(self, method: str) -> list[Any]:
        with self._lock:
            return [request for name, request in self.requests if name == method]

    # -- CRI --------------------------------------------------------------------------------------

    def Version(self, request: Any) -> Any:  # noqa: N802 - CRI's own names
        return cri.VersionResponse(
            version="0.1.0",
            runtime_name="fake",
            runtime_version="1.0",
            runtime_api_version="v1",
        )

    def RunPodSandbox(self, request: Any) -> Any:  # noqa: N802
        identifier = f"sandbox{next(self._ids)}"
        self.sandboxes[identifier] = request
        return cri.RunPodSandboxResponse(pod_sandbox_id=identifier)

    def StopPodSandbox(self, request: Any) -> Any:  # noqa: N802
        return cri.StopPodSandboxResponse()

    def RemovePodSandbox(self, request: Any) -> Any:  # noqa: N802
        self.sandboxes.pop(request.pod_sandbox_id, None)
        return cri.RemovePodSandboxResponse()

    def UpdatePodSandboxResources(self, request: Any) -> Any:  # noqa: N802
        return cri.UpdatePodSandboxResourcesResponse()

    def CreateContainer(self, request: Any) -> Any:  # noqa: N802
        identifier = f"container{next(self._ids)}"
        self.containers[identifier] = request
        return cri.CreateContainerResponse(container_id=identifier)

    def StartContainer(self, request: Any) -> Any:  # noqa: N802
        return cri.StartContainerResponse()

    def StopContainer(self, request: Any) -> Any:  # noqa: N802
        return cri.StopContainerResponse()

    def RemoveContainer(self, request: Any) -> Any:  # noqa: N802
        self.containers.pop(request.container_id, None)
        return cri.RemoveContainerResponse()

    def UpdateContainerResources(self, request: Any) -> Any:  # noqa: N802
        self.updated[request.container_id] = request.linux
        return cri.UpdateContainerResourcesResponse()

    def ListPodSandbox(self, request: Any) -> Any:  # noqa: N802
        return cri.ListPodSandboxResponse(
            items=[
                cri.PodSandbox(id=i, metadata=r.config.metadata) for i, r in self.sandboxes.items()
            ]
        )

    def ListContainers(self, request: Any) -> Any:  # noqa: N802
        return cri.ListContainersResponse(
            containers=[
                cri.Container(id=i, pod_sandbox_id=r.pod_sandbox_id, metadata=r.config.metadata)
                for i, r in self.containers.items()
                if not request.filter.id or i == request.filter.id
            ]
        )

    def PodSandboxStatus(self, request: Any) -> Any:  # noqa: N802
        kept = self.sandboxes[request.pod_sandbox_id]
        linux = kept.config.linux
        return cri.PodSandboxStatusResponse(
            status=cri.PodSandboxStatus(
                id=request.pod_sandbox_id,
                metadata=kept.config.metadata,
                labels=kept.config.labels,
                annotations=kept.config.annotations,
                runtime_handler=kept.runtime_handler,
            ),
            info={"info": json.dumps({"config": {"linux": {"cgroup_parent": linux.cgroup_parent}}})}
            if request.verbose
            else {},
        )

    def ContainerStatus(self, request: Any) -> Any:  # noqa: N802
        kept = self.containers[request.container_id]
        resources = cri.LinuxContainerResources()
        resources.CopyFrom(kept.config.linux.resources)
        update = self.updated.get(request.container_id)
        if update is not None:
            resources.MergeFrom(update)
        info = {
            "config": {
                "envs": [
                    {"key": e.key, "value": e.value.decode(errors="replace")}
                    for e in kept.config.envs
                ]
            },
            "runtimeSpec": {
                "process": {
                    "env": [f"{e.key}={e.value.decode(errors='replace')}" for e in kept.config.envs]
                }
            },
        }
        return cri.ContainerStatusResponse(
            status=cri.ContainerStatus(
                id=request.container_id,
                metadata=kept.config.metadata,
                state=cri.CONTAINER_RUNNING,
                annotations=kept.config.annotations,
                resources=cri.ContainerResources(linux=resources),
            ),
            info={"info": json.dumps(info)},
        )

    def _handle(self, method: str) -> Any:
        kind = getattr(cri, f"{method}Request")

        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            with self._lock:
                self.requests.append((method, request))
                if method in self.fail:
                    context.abort(self.fail[method], f"{method} refused by the test")
                try:
                    return getattr(self, method)(request)
                except KeyError:
                    context.abort(grpc.StatusCode.NOT_FOUND, "not found")

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=kind.FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )

    # -- test.Bytes -------------------------------------------------------------------------------

    def _bytes_handlers(self) -> dict[str, Any]:
        def echo(request: bytes, context: grpc.ServicerContext) -> bytes:
            sent = dict(context.invocation_metadata())
            context.send_initial_metadata((("x-head", str(sent.get("x-test", ""))),))
            context.set_trailing_metadata(
                (("x-tail", "z" * 20_000), ("x-raw-bin", bytes(range(256))))
            )
            return request

        def repeat(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            count, size = map(int, request.split())
            for number in range(count):
                yield number.to_bytes(4, "big") + b"r" * size

        def collect(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            return b",".join(str(len(request)).encode() for request in requests)

        def converse(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            for request in requests:
                yield request[::-1]

        def fail(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.set_trailing_metadata((("grpc-status-details-bin", b"\x08\x05\x12\x01x"),))
            context.abort(grpc.StatusCode.NOT_FOUND, "kein Gefäß: 100% " + "x" * 3000)

        def hang(request: bytes, context: grpc.ServicerContext) -> bytes:
            context.add_callback(self.cancelled.set)
            self.hanging.set()
            self.cancelled.wait(20)
            return b""

        def remaining(request: bytes, context: grpc.ServicerContext) -> bytes:
            return str(context.time_remaining()).encode()

        def watch(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            ended = threading.Event()
            context.add_callback(ended.set)
            while not ended.wait(0.05):
                yield b"event"

        return {
            "Watch": grpc.unary_stream_rpc_method_handler(watch),
            "Echo": grpc.unary_unary_rpc_method_handler(echo),
            "Repeat": grpc.unary_stream_rpc_method_handler(repeat),
            "Collect": grpc.stream_unary_rpc_method_handler(collect),
            "Converse": grpc.stream_stream_rpc_method_handler(converse),
            "Fail": grpc.unary_unary_rpc_method_handler(fail),
            "Hang": grpc.unary_unary_rpc_method_handler(hang),
            "Remaining": grpc.unary_unary_rpc_method_handler(remaining),
        }

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=SERVER_OPTIONS)
        methods = [name for name in dir(self) if name[0].isupper()]
        octets = self._bytes_handlers()
        service = {m: self._handle(m) for m in methods} | {"GetContainerEvents": octets["Watch"]}
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(f"{self.package}.RuntimeService", service),
                grpc.method_handlers_generic_handler("test.Bytes", octets),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", octets),
                grpc.method_handlers_generic_handler(
                    "containerd.services.events.v1.Events", {"Subscribe": octets["Watch"]}
                ),
            )
        )
        self._server.add_insecure_port(f"unix://{self.socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def wait_quiet(self) -> None:
        """Long enough for what should not come to come."""
        time.sleep(0.2)


@contextmanager
def fake_cri(folder: Path, package: str = "runtime.v1") -> Iterator[FakeCri]:
    runtime = FakeCri(folder / "runtime.sock", package)
    runtime.start()
    try:
        yield runtime
    finally:
        runtime.stop()
