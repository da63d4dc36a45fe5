"""A stand-in for kubelet's pod resources socket that adds what Koordinator's scheduler allocated.

Monitors such as the DCGM exporter ask kubelet which pod has which device. kubelet knows what device
plugins gave out, and nothing of the annotation `device-allocated`. This proxy passes every call on
to kubelet as bytes; to the answer of List it adds the devices of each pod's annotation, on the
pod's first container, as upstream does: the annotation does not say which container.

An allocation with SR-IOV functions counts with their bus addresses, another one with its id. A type
without a resource name (see `RESOURCES`) is left out. Facts: docs/facts/koordlet.md, "Pod
resources".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from apis.device import DeviceAllocation, parse_device_allocated
from apis.errors import InputError
from apis.keys import ANNOTATION_DEVICE_ALLOCATED
from hooks.subject import Pod
from protos.podresources.v1 import podresources_pb2 as messages
from service import unix
from service.events import Events, Severity

SERVICE: Final = "v1.PodResourcesLister"
SOCKET: Final = "kubelet.sock"
"""The name of kubelet's own socket, in a directory that a monitor mounts in the place of
kubelet's."""
_METHODS: Final = ("List", "GetAllocatableResources", "Get")
RESOURCES: Final = {"gpu": "nvidia.com/gpu", "rdma": "koordinator.sh/rdma"}
"""Device type -> the resource name in answers; upstream's."""
_MOST_BYTES: Final = 16 << 20
"""Of one message; kubelet's clients use this limit, and so does upstream."""
_PATIENCE_S: Final = 10.0
"""How long kubelet may take for a call without a deadline; upstream's time to connect."""
_RECONNECTING: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""kubelet is on this machine: gRPC's back-off of up to two minutes would outlast its restart."""
_STOP_GRACE_S: Final = 1.0
"""How long calls in progress may take at the end, as for the hook service."""


class PodResources:
    """The server. Belongs to the event loop.

    pods: returns the node's pods.
    """

    def __init__(
        self,
        directory: str,
        kubelet_socket: str,
        *,
        pods: Callable[[], Iterable[Pod]],
        events: Events,
    ) -> None:
        self._path = f"{directory}/{SOCKET}"
        self._kubelet_socket = kubelet_socket
        self._pods = pods
        self._events = events
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Serve the socket. Raises OSError if it cannot be served."""
        os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        unix.make_way(self._path)
        limits = [
            ("grpc.max_receive_message_length", _MOST_BYTES),
            ("grpc.max_send_message_length", _MOST_BYTES),
        ]
        server = grpc.aio.server(options=[*limits, ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._handlers()),)
        )
        try:
            with unix.owner_only():
                server.add_insecure_port(f"unix://{self._path}")
        except RuntimeError as error:
            raise OSError(f"{self._path}: {error}") from error
        self._channel = grpc.aio.insecure_channel(
            f"unix://{self._kubelet_socket}", options=[*limits, *_RECONNECTING]
        )
        await server.start()
        self._server = server

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
            self._server = None
            with suppress(OSError):
                os.unlink(self._path)
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    def _handlers(self) -> dict[str, Any]:
        # Without serializers, requests and answers are bytes.
        return {
            method: grpc.unary_unary_rpc_method_handler(self._handler(method))
            for method in _METHODS
        }

    def _handler(self, method: str) -> Callable[[bytes, Any], Any]:
        async def serve(request: bytes, context: Any) -> bytes:
            assert self._channel is not None
            call = self._channel.unary_unary(f"/{SERVICE}/{method}", None, None)
            left = context.time_remaining()
            try:
                answer: bytes = await call(request, timeout=_PATIENCE_S if left is None else left)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            if method != "List":
                return answer
            try:
                return with_allocations(answer, self._pods(), self._report)
            except DecodeError as error:
                await context.abort(
                    grpc.StatusCode.INTERNAL, f"kubelet's answer cannot be read: {error}"
                )
            raise AssertionError("abort has raised")

        return serve

    def _report(self, error: InputError) -> None:
        self._events.add("bad-input", error.obj, str(error), severity=Severity.WARNING)


def with_allocations(
    answer: bytes, pods: Iterable[Pod], report: Callable[[InputError], None]
) -> bytes:
    """Return kubelet's answer to List with the devices of the pods' annotations.

    A pod without a bad annotation is not harmed by another's, which is reported. Raises
    DecodeError for an answer that is none.
    """
    allocated = {
        (pod.namespace, pod.name): pod
        for pod in pods
        if ANNOTATION_DEVICE_ALLOCATED in pod.annotations
    }
    if not allocated:
        return answer
    response = messages.ListPodResourcesResponse.FromString(answer)
    for each in response.pod_resources:
        pod = allocated.get((each.namespace, each.name))
        if pod is None or not each.containers:
            continue
        try:
            text = pod.annotations[ANNOTATION_DEVICE_ALLOCATED]
            devices = parse_device_allocated(text, obj=pod.obj)
        except InputError as error:
            report(error)
            continue
        first = each.containers[0]
        for kind, name in RESOURCES.items():
            if ids := [one for device in devices.get(kind, ()) for one in _ids(device)]:
                first.devices.add(resource_name=name, device_ids=ids)
        first.devices.sort(key=lambda device: device.resource_name)
    return response.SerializeToString()


def _ids(device: DeviceAllocation) -> list[str]:
    """Return the bus addresses of the functions of a device, else its id."""
    functions = device.extension.vfs if device.extension is not None else ()
    if functions:
        return [function.bus_id for function in functions if function.bus_id]
    return [device.id] if device.id else []
