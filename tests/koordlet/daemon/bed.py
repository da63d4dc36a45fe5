"""A whole node in memory: the daemon on a simulated kernel, with a fake runtime beside it."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from koordlet.configuration.config import Config
from koordlet.daemon.daemon import Daemon
from koordlet.node.kubepods_lock import KubepodsLock
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests import waiting
from tests.fake_runtime.adaptation import Created, FakeRuntime
from tests.fake_runtime.profiles import B
from tests.koordlet.builders import pod_manifest
from tests.koordlet.configured import configured
from tests.simulated import UBUNTU_24_04, Kubelet, Pod, Profile, SimulatedKernel
from tests.simulated.kubelet import Limits, shares_of

NODE = "n1"
ONE_CPU = Limits(cpu_request_milli=1000, cpu_limit_milli=1000)
SLO = {
    "apiVersion": "slo.koordinator.sh/v1alpha1",
    "kind": "NodeSLO",
    "metadata": {"name": NODE},
    "spec": {},
}


def node_object(ratio: str) -> dict[str, Any]:
    annotations = {"node.koordinator.sh/cpu-normalization-ratio": ratio}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": NODE, "annotations": annotations},
    }


class Node:
    """One node. Manifests are put with `put`; the daemon watches them."""

    def __init__(self, folder: Path, profile: Profile, changes: Mapping[str, Any]) -> None:
        self.folder = folder
        self.kernel = SimulatedKernel(profile)
        self.kubelet = Kubelet(self.kernel)
        self.runtime = FakeRuntime(str(folder / "nri.sock"), B)
        self.tree: dict[str, Any] = {
            "nodeName": NODE,
            "nri": {"socket": str(folder / "nri.sock"), "backoff": 0.1},
            "objectsDir": str(folder / "objects.d"),
            "runDir": str(folder / "run"),
            "featureGates": {"CPUNormalization": True},
            "http": {"address": ""},
            **changes,
        }
        self.listening = False
        self.lock: KubepodsLock | None = None
        self.daemon: Daemon = self.new_daemon()

    def config(self) -> Config:
        return configured(**self.tree)

    def new_daemon(self) -> Daemon:
        return Daemon(self.config(), reload=self.config, host=self.kernel, lock=self.lock)

    def put(self, *manifests: Mapping[str, Any]) -> None:
        for manifest in manifests:
            name = f"{manifest['kind']}-{manifest['metadata']['name']}.yaml"
            self.put_text(name, yaml.safe_dump(dict(manifest)))

    def put_text(self, name: str, text: str) -> None:
        path = self.folder / "objects.d" / name
        scratch = path.with_suffix(".tmp")
        scratch.write_text(text)
        scratch.rename(path)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Daemon]:
        """Run the daemon for the block, ready."""
        started = asyncio.Event()
        task = asyncio.ensure_future(self.daemon.run(started=started.set))
        waiting = asyncio.ensure_future(started.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED, timeout=10)
        waiting.cancel()
        try:
            if task.done():
                task.result()
            if self.listening:
                # The runtime sends events a moment after it took our answer to Synchronize.
                await self.runtime.synchronized()
            yield self.daemon
        finally:
            self.daemon.stop()
            await asyncio.wait_for(task, 15)

    async def run_pod(self, pod: Pod, *, annotations: Mapping[str, str] | None = None) -> None:
        """Tell the runtime's plugins of a pod's sandbox."""
        assert pod.sandbox is not None
        linux = nri.LinuxPodSandbox(cgroup_parent=f"/{pod.cgroup}")
        cpu = linux.pod_resources.cpu
        cpu.shares.value = shares_of(sum(one.cpu_request_milli for one in pod.limits))
        cpu.quota.value = sum(one.quota_us for one in pod.limits)
        cpu.period.value = 100_000
        await self.runtime.run_pod_sandbox(
            nri.PodSandbox(
                id=pod.sandbox.id,
                name=f"pod-{pod.uid[:4]}",
                uid=pod.uid,
                namespace="default",
                labels={"koordinator.sh/qosClass": "LS"},
                annotations=dict(annotations or {}),
                pid=1,
                linux=linux,
            )
        )

    async def create(self, pod: Pod, container_id: str, *, quota_us: int = 100_000) -> Created:
        """Ask the plugins about a container that kubelet wants."""
        assert pod.sandbox is not None
        message = nri.Container(id=container_id, pod_sandbox_id=pod.sandbox.id, name="main")
        message.linux.resources.cpu.shares.value = 1024
        message.linux.resources.cpu.quota.value = quota_us
        message.linux.resources.cpu.period.value = 100_000
        return await self.runtime.create_container(message)

    async def resize(self, container_id: str, quota_us: int) -> nri.LinuxResources:
        """kubelet asks for another quota; returns what the runtime makes of it."""
        asked = nri.LinuxResources()
        asked.cpu.quota.value = quota_us
        asked.cpu.period.value = 100_000
        return await self.runtime.update_container(container_id, asked)

    async def ask(self, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        """Ask the admin socket; returns (status, JSON or text)."""
        status, payload = await request(f"{self.folder}/run/admin.sock", method, target, body)
        try:
            return status, json.loads(payload)
        except ValueError:
            return status, payload.decode()


async def request(
    address: str | tuple[str, int], method: str, target: str, body: Any = None
) -> tuple[int, bytes]:
    """Send one HTTP request; returns (status, body)."""
    if isinstance(address, str):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        reader, writer = await asyncio.open_connection(*address)
    payload = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: koordlet\r\nConnection: close\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    first, _, rest = answer.partition(b"\r\n")
    return int(first.split()[1]), rest.partition(b"\r\n\r\n")[2]


@asynccontextmanager
async def node(
    profile: Profile = UBUNTU_24_04, *, runtime: bool = True, **changes: Any
) -> AsyncIterator[Node]:
    """A node whose daemon is not started yet. changes: top fields of the configuration."""
    # A short path: a Unix socket's has room for 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="koordlet-"))
    try:
        for name in ("objects.d", "run"):
            (folder / name).mkdir(mode=0o700)
        made = Node(folder, profile, changes)
        if not runtime:
            yield made
            return
        async with made.runtime.running():
            made.listening = True
            yield made
    finally:
        shutil.rmtree(folder)


async def until(what: str, condition: Callable[[], object], *, timeout_s: float = 10.0) -> None:
    """Wait for something that the daemon does by itself."""
    await waiting.until(condition, what, timeout_s=timeout_s)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def events(node_: Node, kind: str) -> list[str]:
    return [event.message for event in node_.daemon.parts.events.latest() if event.kind == kind]


def ls_manifest(uid: str) -> dict[str, Any]:
    """The manifest of a pod of one CPU."""
    resources = {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}}
    manifest = pod_manifest(
        uid=uid,
        spec={"containers": [{"name": "main", "resources": resources}]},
        status={"phase": "Running", "qosClass": "Burstable"},
    )
    manifest["metadata"]["labels"] = {"koordinator.sh/qosClass": "LS"}
    return manifest
