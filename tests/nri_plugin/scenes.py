"""What the transport's tests share: a handler that remembers, pods and containers, a plugin."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path

from hooks.claim import Claim
from hooks.decision import Decision, Fault, Outcome, ResourceKey
from hooks.observed import Container, Sandbox
from linux.resources import Resource, Value
from nri_plugin.capabilities import RuntimeProfile
from nri_plugin.options import Options
from nri_plugin.supervisor import Supervisor
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.fake_runtime.adaptation import Behaviour, FakeRuntime
from tests.fake_runtime.profiles import Profile

Values = dict[ResourceKey, Value]

PARENT = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1111_2222.slice"


def decision(values: Values, *, faults: tuple[Fault, ...] = ()) -> Decision:
    return Decision(
        outcomes={
            (resource, key): Outcome(
                value=value,
                winner=Claim(
                    resource=resource,
                    key=key,
                    value=value,
                    policy="test",
                    reason="a test asks for it",
                    source="test",
                ),
            )
            for (resource, key), value in values.items()
        },
        faults=faults,
    )


class RecordingHandler:
    """Decides `wanted` for every container, remembers what it was told, in order."""

    def __init__(self, wanted: Values | None = None) -> None:
        self.wanted = wanted
        self.told: list[tuple[str, str]] = []
        self.containers: list[Container] = []
        self.sandboxes: list[Sandbox] = []
        self.lacking: dict[str, tuple[ResourceKey, ...]] = {}
        self.faults: tuple[Fault, ...] = ()
        self.taken_at: list[int | None] = []
        self.runtime: RuntimeProfile | None = None
        self.groups: Collection[str] = ()
        self.replies = 0
        self.disturb: Callable[[str], None] = lambda method: None

    def resctrl_groups(self) -> Collection[str]:
        return self.groups

    def methods(self) -> list[str]:
        return [method for method, _ in self.told]

    def _note(self, method: str, subject: str) -> None:
        self.told.append((method, subject))
        self.disturb(method)

    def configured(self, runtime: RuntimeProfile) -> None:
        self.runtime = runtime
        self._note("configured", "")

    def now(self) -> int:
        return len(self.told)

    def synchronize(
        self,
        sandboxes: Sequence[Sandbox],
        containers: Sequence[Container],
        *,
        taken_at: int | None = None,
    ) -> Iterable[tuple[str, Decision]]:
        self.taken_at.append(taken_at)
        self.sandboxes, self.containers = list(sandboxes), list(containers)
        self._note("synchronize", "")
        for container in containers:
            if self.wanted is not None:
                yield container.subject.id, decision(self.wanted)

    def list_overdue(self, reason: str) -> None:
        self._note("list_overdue", reason)

    def unrepairable(self, container: Container, lacks: Sequence[ResourceKey]) -> None:
        self.lacking[container.subject.id] = tuple(lacks)

    def run_sandbox(self, sandbox: Sandbox) -> None:
        self.sandboxes.append(sandbox)
        self._note("run_sandbox", sandbox.subject.id)

    def update_sandbox(self, sandbox: Sandbox) -> None:
        self._note("update_sandbox", sandbox.subject.id)

    def stop_sandbox(self, sandbox: Sandbox) -> None:
        self._note("stop_sandbox", sandbox.subject.id)

    def remove_sandbox(self, sandbox: Sandbox) -> None:
        self._note("remove_sandbox", sandbox.subject.id)

    def create_container(self, container: Container) -> Decision | None:
        self.containers.append(container)
        self._note("create_container", container.subject.id)
        return self._decision()

    def start_container(self, container: Container) -> None:
        self._note("start_container", container.subject.id)

    def update_container(self, container: Container) -> Decision | None:
        self.containers.append(container)
        self._note("update_container", container.subject.id)
        return self._decision()

    def _decision(self) -> Decision | None:
        return None if self.wanted is None else decision(self.wanted, faults=self.faults)

    def reply_written(self) -> None:
        self.replies += 1

    def container_updated(self, container: Container) -> None:
        self._note("container_updated", container.subject.id)

    def stop_container(self, container: Container) -> None:
        self._note("stop_container", container.subject.id)

    def remove_container(self, container: Container) -> None:
        self._note("remove_container", container.subject.id)

    def disconnected(self, reason: str) -> None:
        self._note("disconnected", reason)


def pod(pod_id: str = "p", *, uid: str = "1111-2222", parent: str = PARENT) -> nri.PodSandbox:
    return nri.PodSandbox(
        id=pod_id,
        name="web",
        uid=uid,
        namespace="default",
        labels={"koordinator.sh/qosClass": "LS"},
        annotations={"note": "x"},
        linux=nri.LinuxPodSandbox(cgroup_parent=parent),
    )


def container(
    container_id: str = "c", pod_id: str = "p", *, env: Iterable[str] = ("A=1",), shares: int = 512
) -> nri.Container:
    message = nri.Container(id=container_id, pod_sandbox_id=pod_id, name="main", env=env)
    message.linux.resources.cpu.shares.value = shares
    message.linux.resources.cpu.quota.value = 100000
    message.linux.resources.cpu.period.value = 100000
    return message


def options(folder: Path, **changes: object) -> Options:
    given: dict[str, object] = {
        "run_dir": str(folder),
        "socket": str(folder / "nri.sock"),
        "first_backoff_s": 0.02,
        "longest_backoff_s": 0.1,
        "socket_poll_s": 0.01,
        **changes,
    }
    return Options(**given)  # type: ignore[arg-type]


def beside(socket: str, name: str) -> str:
    """Return another way to a runtime's socket, in a folder of its own.

    Daemons that dial one socket keep each other out. A plugin that is not ours would not, and this
    way one of ours can play it.
    """
    folder = Path(socket).parent / name
    folder.mkdir()
    other = folder / "nri.sock"
    os.link(socket, other)
    return str(other)


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[Supervisor]:
    """Run a supervisor for the block; a failure of its own fails the test."""
    task = asyncio.ensure_future(supervisor.run())
    try:
        yield supervisor
    finally:
        supervisor.stop()
        await asyncio.wait_for(task, 10)


class Scene:
    """A fake runtime with one plugin, synchronized."""

    def __init__(
        self,
        folder: Path,
        profile: Profile,
        behaviour: Behaviour | None = None,
        wanted: Values | None = None,
        **changes: object,
    ) -> None:
        self.runtime = FakeRuntime(str(folder / "nri.sock"), profile, behaviour)
        self.handler = RecordingHandler(wanted)
        self.options = options(folder, **changes)

    async def __aenter__(self) -> Scene:
        await self.runtime.start()
        self.supervisor = Supervisor(self.options, self.handler)
        self._running = running(self.supervisor)
        await self._running.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._running.__aexit__(None, None, None)
        await self.runtime.stop()

    async def synchronized(self) -> Scene:
        await self.runtime.synchronized()
        await asyncio.wait_for(self.supervisor.wait_synced(), 10)
        return self


SHARES = (Resource.CPU_SHARES, "")
QUOTA = (Resource.CPU_CFS_QUOTA, "")
CPUS = (Resource.CPUSET_CPUS, "")
MEMORY = (Resource.MEMORY_LIMIT, "")
