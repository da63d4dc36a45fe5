"""A node whose daemon serves the hook service, and what a proxy sends to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from protos.runtimehook.v1alpha1 import api_pb2 as hook
from tests.koordlet.daemon.bed import SLO, Node, node, node_object
from tests.simulated.kubelet import Limits

ONE_CPU = Limits(cpu_request_milli=1000, cpu_limit_milli=1000)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 40))


@asynccontextmanager
async def serving(
    tmp_path: Path,
    *,
    failure_policy: str = "Ignore",
    disabled_stages: Sequence[str] = (),
    **changes: Any,
) -> AsyncIterator[Node]:
    """A node whose daemon serves hooks; NRI is off unless `changes` say otherwise."""
    settings = {
        "enabled": True,
        "socket": str(tmp_path / "koordlet.sock"),
        "hostEndpoint": str(tmp_path / "koordlet.sock"),
        "registrationDir": str(tmp_path / "hookserver.d"),
        "failurePolicy": failure_policy,
        "disabledStages": list(disabled_stages),
    }
    wanted = {"hookService": settings, "nri": {"enabled": False}, **changes}
    with_nri = bool(wanted["nri"].get("enabled", True))
    if with_nri:
        del wanted["nri"]
    async with node(runtime=with_nri, **wanted) as made:
        made.put(SLO, node_object("1.25"))
        yield made


class Proxy:
    """What a proxy sends. The container's limits are one CPU unless a call says otherwise."""

    def __init__(self, n: Node, channel: Any) -> None:
        self._channel = channel
        self.node = n
        self.pod = n.kubelet.add_pod(ONE_CPU)

    async def ask(self, stage: str, request: Any, kind: Any) -> Any:
        invoke = self._channel.unary_unary(
            f"/runtime.v1alpha1.RuntimeHookService/{stage}Hook",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=kind.FromString,
        )
        return await invoke(request, timeout=5)

    async def container(
        self,
        stage: str,
        *,
        id: str = "",  # noqa: A002
        name: str = "main",
        attempt: int = 0,
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        envs: dict[str, str] | None = None,
        **resources: Any,
    ) -> Any:
        values = {"cpu_period": 100_000, "cpu_quota": 100_000, "cpu_shares": 1024, **resources}
        request = hook.ContainerResourceHookRequest(
            pod_meta=hook.PodSandboxMetadata(name="web", uid=self.pod.uid, namespace="default"),
            container_meta=hook.ContainerMetadata(name=name, attempt=attempt, id=id),
            container_annotations={"a": "b"},
            container_resources=hook.LinuxContainerResources(**values),
            pod_labels=labels or {"koordinator.sh/qosClass": "LS"},
            pod_annotations=annotations,
            pod_cgroup_parent=f"/{self.pod.cgroup}",
            container_envs=envs or {"A": "1"},
        )
        return await self.ask(stage, request, hook.ContainerResourceHookResponse)


@asynccontextmanager
async def connected(n: Node, tmp_path: Path) -> AsyncIterator[Proxy]:
    async with grpc.aio.insecure_channel(f"unix://{tmp_path / 'koordlet.sock'}") as channel:
        yield Proxy(n, channel)
