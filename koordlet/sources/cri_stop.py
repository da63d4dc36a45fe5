"""Stops containers over CRI. Nothing blocks: gRPC's own threads wait for the runtime."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import grpc

from koordlet.sources.cri import runtime_channel
from protos.cri.v1 import api_pb2, api_pb2_grpc

_BEYOND_GRACE_S: Final = 5.0
"""How long the runtime may take beyond the grace: upstream's time limit of a call. A process in an
uninterruptible wait ends later; the runtime goes on by itself, and the pod is looked at again."""


class ContainerStopper:
    """Stops containers of one runtime; connects with the first call."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._channel: grpc.Channel | None = None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def stop(self, container_ids: Sequence[str], *, grace_s: float) -> str:
        """Stop the containers at the same time; return the errors, "" for success.

        grace_s: between SIGTERM and SIGKILL, rounded up to seconds. A container that the runtime
        does not have is stopped.
        """
        if self._channel is None:
            self._channel = runtime_channel(self._socket)
        stub: Any = api_pb2_grpc.RuntimeServiceStub(self._channel)
        problems = await asyncio.gather(
            *(self._stop(stub, container_id, math.ceil(grace_s)) for container_id in container_ids)
        )
        return "; ".join(problem for problem in problems if problem)

    async def _stop(self, stub: Any, container_id: str, grace_s: int) -> str:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ended.done():
                ended.set_result(None)

        def done(_: object) -> None:
            with suppress(RuntimeError):  # the loop ended before the call
                loop.call_soon_threadsafe(wake)

        request = api_pb2.StopContainerRequest(container_id=container_id, timeout=grace_s)
        call = stub.StopContainer.future(request, timeout=grace_s + _BEYOND_GRACE_S)
        call.add_done_callback(done)
        try:
            await ended
        finally:
            call.cancel()
        code = call.code()
        if code in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND):
            return ""
        return f"container {container_id[:12]}: {code.name}: {call.details()}"
