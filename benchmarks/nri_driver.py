"""A runtime for measuring: one plugin, one blocking socket, nothing else in the way.

It registers whatever plugin dials (ours, or one on the official Go stub) and then times calls from
the first byte sent to the last byte of the reply. It writes frames the way Go peers do.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from protos.nri.v1alpha1 import nri_pb2 as nri
from protos.ttrpc import ttrpc_pb2 as ttrpc

PLUGIN = "nri.pkg.api.v1alpha1.Plugin"
_FIRST_FRAME = 4096
_LARGEST = 4194304


class Driver:
    """Listens at `path`; `accept` registers and configures the plugin that dials."""

    def __init__(self, path: str, *, version: str = "v2.1.9") -> None:
        self._version = version
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(4)
        self._trunk: socket.socket | None = None
        self._stream = -1
        self._events = 0

    def accept(self, timeout_s: float = 30.0) -> nri.ConfigureResponse:
        """Take the next plugin through registration and Configure."""
        self._listener.settimeout(timeout_s)
        self._trunk, _ = self._listener.accept()
        self._stream = -1
        stream, _ = self._message()
        self._send(2, struct.pack(">IIBB", 0, stream, 2, 0))
        reply, _ = self.call(
            "Configure",
            nri.ConfigureRequest(
                runtime_name="containerd",
                runtime_version=self._version,
                registration_timeout=5000,
                request_timeout=2000,
            ).SerializeToString(),
        )
        response = nri.ConfigureResponse.FromString(reply)
        self._events = response.events
        return response

    def synchronize(
        self, pods: Sequence[nri.PodSandbox], containers: Sequence[nri.Container]
    ) -> tuple[float, int, nri.SynchronizeResponse]:
        """Return (seconds inside the calls, number of slices, the last reply).

        Slices as the adaptation does: everything, then shrunk by the size that was refused.
        """
        whole = nri.SynchronizeRequest(pods=pods, containers=containers)
        pods_at_once, containers_at_once = len(pods), len(containers)
        size = whole.ByteSize() + 128
        while size > _LARGEST:
            factor = min(_LARGEST / size, 0.9)
            pods_at_once = int(pods_at_once * factor)
            containers_at_once = int(containers_at_once * factor)
            part = nri.SynchronizeRequest(
                pods=pods[:pods_at_once], containers=containers[:containers_at_once]
            )
            size = part.ByteSize() + 128
        payloads: list[bytes] = []
        more = True
        while more:
            part = nri.SynchronizeRequest(
                pods=pods[:pods_at_once], containers=containers[:containers_at_once]
            )
            pods, containers = pods[pods_at_once:], containers[containers_at_once:]
            part.more = more = bool(pods or containers)
            payloads.append(part.SerializeToString())
        seconds = 0.0
        for payload in payloads:
            reply, took = self.call("Synchronize", payload)
            seconds += took
            response = nri.SynchronizeResponse.FromString(reply)
            if response.more is (payload is payloads[-1]):
                raise RuntimeError("the plugin does not handle split sync requests")
        return seconds, len(payloads), response

    def tell(
        self, event: nri.Event, pod: nri.PodSandbox, container: nri.Container | None
    ) -> float | None:
        """Send a lifecycle event; return the seconds it took, None when it is not subscribed to."""
        if not self._events & (1 << (int(event) - 1)):
            return None
        change = nri.StateChangeEvent(event=event, pod=pod, container=container)
        return self.call("StateChange", change.SerializeToString())[1]

    def call(self, method: str, payload: bytes) -> tuple[bytes, float]:
        """Call the plugin; return its reply and the seconds that the call took."""
        self._stream += 2
        body = ttrpc.Request(
            service=PLUGIN, method=method, payload=payload, timeout_nano=2_000_000_000
        ).SerializeToString()
        message = struct.pack(">IIBB", len(body), self._stream, 1, 0) + body
        started = time.perf_counter()
        self._send(1, message)
        stream, envelope = self._message()
        took = time.perf_counter() - started
        if stream != self._stream:
            raise RuntimeError(f"a reply on stream {stream}, expected {self._stream}")
        response = ttrpc.Response.FromString(envelope)
        if response.status.code:
            raise RuntimeError(f"{method}: {response.status.code} {response.status.message}")
        return response.payload, took

    def drop(self) -> None:
        """Close the plugin's connection; it dials again."""
        if self._trunk is not None:
            self._trunk.close()
            self._trunk = None

    def close(self) -> None:
        if self._trunk is not None:
            self._trunk.close()
        self._listener.close()

    def _send(self, connection: int, message: bytes) -> None:
        assert self._trunk is not None
        first, rest = message[:_FIRST_FRAME], message[_FIRST_FRAME:]
        framed = struct.pack(">II", connection, len(first)) + first
        if rest:
            framed += struct.pack(">II", connection, len(rest)) + rest
        self._trunk.sendall(framed)

    def _message(self) -> tuple[int, bytes]:
        """The next ttRPC message of any connection; one is in flight at a time."""
        stream = b""
        while True:
            _, length = struct.unpack(">II", self._exactly(8))
            stream += self._exactly(length)
            if len(stream) >= 10:
                wanted, number, _, _ = struct.unpack_from(">IIBB", stream)
                if len(stream) >= 10 + wanted:
                    return number, stream[10:]

    def _exactly(self, count: int) -> bytes:
        assert self._trunk is not None
        taken = bytearray()
        while len(taken) < count:
            part = self._trunk.recv(count - len(taken))
            if not part:
                raise ConnectionError("the plugin closed the connection")
            taken += part
        return bytes(taken)
