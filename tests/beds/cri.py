"""A small CRI client: the calls that a kubelet makes, synchronous, over a unix socket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from protos.cri.v1 import api_pb2 as cri
from tests.beds.errors import BedError

_Response = TypeVar("_Response", bound=Message)
_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ExecResult:
    stdout: str
    stderr: str
    exit_code: int


class Cri:
    """One connection to a runtime. Errors are grpc.RpcError, as the runtime sent them."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def call(
        self,
        method: str,
        request: Message,
        response: type[_Response],
        *,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> _Response:
        """One unary call; `method` is e.g. "RuntimeService/Version"."""
        invoke = self._channel.unary_unary(
            f"/runtime.v1.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return cast(_Response, invoke(request, timeout=timeout_s))

    def version(self) -> cri.VersionResponse:
        return self.call("RuntimeService/Version", cri.VersionRequest(), cri.VersionResponse)

    def has_image(self, name: str) -> bool:
        request = cri.ImageStatusRequest(image=cri.ImageSpec(image=name))
        return self.call("ImageService/ImageStatus", request, cri.ImageStatusResponse).HasField(
            "image"
        )

    def run_sandbox(self, config: cri.PodSandboxConfig) -> str:
        request = cri.RunPodSandboxRequest(config=config)
        response = self.call("RuntimeService/RunPodSandbox", request, cri.RunPodSandboxResponse)
        return response.pod_sandbox_id

    def create_container(
        self, sandbox_id: str, config: cri.ContainerConfig, sandbox: cri.PodSandboxConfig
    ) -> str:
        request = cri.CreateContainerRequest(
            pod_sandbox_id=sandbox_id, config=config, sandbox_config=sandbox
        )
        response = self.call("RuntimeService/CreateContainer", request, cri.CreateContainerResponse)
        return response.container_id

    def start_container(self, container_id: str) -> None:
        request = cri.StartContainerRequest(container_id=container_id)
        self.call("RuntimeService/StartContainer", request, cri.StartContainerResponse)

    def stop_container(self, container_id: str, *, grace_s: int = 0) -> None:
        request = cri.StopContainerRequest(container_id=container_id, timeout=grace_s)
        self.call("RuntimeService/StopContainer", request, cri.StopContainerResponse)

    def remove_container(self, container_id: str) -> None:
        request = cri.RemoveContainerRequest(container_id=container_id)
        self.call("RuntimeService/RemoveContainer", request, cri.RemoveContainerResponse)

    def update_resources(
        self,
        container_id: str,
        resources: cri.LinuxContainerResources,
        *,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """The call behind an in-place resize."""
        request = cri.UpdateContainerResourcesRequest(
            container_id=container_id, linux=resources, annotations=annotations or {}
        )
        self.call(
            "RuntimeService/UpdateContainerResources",
            request,
            cri.UpdateContainerResourcesResponse,
        )

    def container_status(self, container_id: str) -> cri.ContainerStatusResponse:
        request = cri.ContainerStatusRequest(container_id=container_id, verbose=True)
        return self.call("RuntimeService/ContainerStatus", request, cri.ContainerStatusResponse)

    def execute(self, container_id: str, command: Sequence[str]) -> ExecResult:
        request = cri.ExecSyncRequest(container_id=container_id, cmd=command, timeout=10)
        done = self.call("RuntimeService/ExecSync", request, cri.ExecSyncResponse)
        return ExecResult(
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
            done.exit_code,
        )

    def sandboxes(self) -> list[cri.PodSandbox]:
        request = cri.ListPodSandboxRequest()
        response = self.call("RuntimeService/ListPodSandbox", request, cri.ListPodSandboxResponse)
        return list(response.items)

    def containers(self) -> list[cri.Container]:
        request = cri.ListContainersRequest()
        response = self.call("RuntimeService/ListContainers", request, cri.ListContainersResponse)
        return list(response.containers)

    def remove_sandbox(self, sandbox_id: str) -> None:
        """Stop the sandbox and everything in it, at once, and remove it."""
        stop = cri.StopPodSandboxRequest(pod_sandbox_id=sandbox_id)
        self.call("RuntimeService/StopPodSandbox", stop, cri.StopPodSandboxResponse)
        remove = cri.RemovePodSandboxRequest(pod_sandbox_id=sandbox_id)
        self.call("RuntimeService/RemovePodSandbox", remove, cri.RemovePodSandboxResponse)


@contextmanager
def connected(socket: Path, *, timeout_s: float = 30.0) -> Iterator[Cri]:
    """A client once the runtime answers; BedError if it does not within `timeout_s`."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"unix://{socket}", options=options) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError as error:
            raise BedError(f"nothing serves CRI at {socket} after {timeout_s:.0f} s") from error
        yield Cri(channel)
