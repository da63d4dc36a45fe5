"""A runtime's NRI side: accepts plugins, registers them, sends them events, merges their answers.

`FakeRuntime` speaks one of the generations (`profiles`), reads as strictly as the Go
implementation (`wire`), and can be slow, deaf, hostile or dead (`Behaviour`). It keeps pods and
containers as a real one does, so a plugin that reconnects is told the truth by Synchronize.
Source: docs/facts/nri.md, "Registration" and "Failures".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf.message import Message

from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.fake_runtime.merge import Conflict, Owners, merge_adjustment, merge_resources
from tests.fake_runtime.profiles import Profile
from tests.fake_runtime.wire import MAX_MESSAGE, Broken, CallFailed, Trunk

RUNTIME = "nri.pkg.api.v1alpha1.Runtime"
UNKNOWN, UNIMPLEMENTED = 2, 12

EVENTS = {
    "RunPodSandbox": 1,
    "StopPodSandbox": 2,
    "RemovePodSandbox": 3,
    "CreateContainer": 4,
    "PostCreateContainer": 5,
    "StartContainer": 6,
    "PostStartContainer": 7,
    "UpdateContainer": 8,
    "PostUpdateContainer": 9,
    "StopContainer": 10,
    "RemoveContainer": 11,
    "UpdatePodSandbox": 12,
    "PostUpdatePodSandbox": 13,
}


@dataclass(slots=True)
class Behaviour:
    """How this runtime misbehaves, or how slow it is. The default is a healthy one."""

    configure_before_reply: bool = False
    register_reply_after_s: float = 0.0
    synchronize_after_s: float = 0.0
    never_configure: bool = False
    never_synchronize: bool = False
    never_accept: bool = False
    close_instead_of: str = ""  # "register-reply" or the name of an RPC
    cut_frame_of: str = ""  # an RPC whose request ends in the middle of a frame
    noise: bytes = b""  # before each message: frames of unknown ids, empty frames
    dribble: bool = False
    metadata: Sequence[tuple[str, str]] = ()
    config: str = ""
    request_timeout_s: float = 2.0
    registration_timeout_s: float = 5.0


class EventFailed(Exception):
    """A plugin's error or a conflict made the event, hence the CRI call, fail."""


class Recorded(NamedTuple):
    """One call of a plugin."""

    plugin: str
    method: str
    request: Message


class Created(NamedTuple):
    """What came of CreateContainer: the merged adjustment, the container with it applied."""

    adjust: nri.ContainerAdjustment
    container: nri.Container
    replies: dict[str, nri.CreateContainerResponse]


@dataclass(slots=True, eq=False)
class Plugin:
    """A connected plugin, as the adaptation keeps it."""

    trunk: Trunk
    name: str = ""
    index: str = ""
    nri_version: str = ""
    events: int = 0
    policy: nri.FailurePolicy = field(default_factory=nri.FailurePolicy)
    state_change_only: bool = False
    synchronize_updates: list[nri.ContainerUpdate] = field(default_factory=list)

    @property
    def full_name(self) -> str:
        return f"{self.index}-{self.name}"


class FakeRuntime:
    """Listens on a socket; `plugins` are those that are synchronized, in the order of events."""

    def __init__(
        self, socket_path: str, profile: Profile, behaviour: Behaviour | None = None
    ) -> None:
        self.socket_path = socket_path
        self.profile = profile
        self.behaviour = behaviour or Behaviour()
        self.pods: dict[str, nri.PodSandbox] = {}
        self.containers: dict[str, nri.Container] = {}
        self.plugins: list[Plugin] = []
        self.calls: list[Recorded] = []
        self.accepted = 0
        self.registrations = 0
        self.failures: list[str] = []
        self._trunks: list[Trunk] = []
        self._accepting: asyncio.Queue[Trunk] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------- life

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeRuntime]:
        """Listen for the block. Each start makes a new socket inode, as a real one does."""
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    async def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket_path)
        self._server = await asyncio.start_unix_server(self._connected, self.socket_path)
        self._tasks = [asyncio.ensure_future(self._accept_one_by_one())]

    async def stop(self) -> None:
        """Go down the way runtimes do: close the sockets, say nothing."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for trunk in self._trunks:
            trunk.close()
        self.plugins.clear()
        await asyncio.sleep(0)

    async def launch(self, plugin_end: socket.socket, runtime_end: socket.socket) -> None:
        """Take a plugin that this runtime started itself, over a socket pair."""
        reader, writer = await asyncio.open_unix_connection(sock=runtime_end)
        plugin_end.close()
        await self._connected(reader, writer)

    async def wait(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Return when `condition` holds; TimeoutError when it does not in time."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.02)

    async def synchronized(self, count: int = 1, timeout_s: float = 10.0) -> list[Plugin]:
        """Return the plugins when `count` of them are in the list of active ones."""
        await self.wait(lambda: len(self.plugins) >= count, timeout_s)
        return self.plugins

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        trunk = Trunk(reader, writer)
        trunk.metadata = self.behaviour.metadata
        trunk.noise = self.behaviour.noise
        trunk.dribble = self.behaviour.dribble
        trunk.largest_frame = self.profile.largest_frame
        self._trunks.append(trunk)
        self.accepted += 1
        self._accepting.put_nowait(trunk)
        self._changed.set()

    async def _accept_one_by_one(self) -> None:
        """Strictly serial: a silent plugin keeps the next one waiting."""
        while True:
            trunk = await self._accepting.get()
            if self.behaviour.never_accept:
                continue
            try:
                await self._admit(Plugin(trunk))
            except (Broken, CallFailed, TimeoutError, ConnectionError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                trunk.close(str(error))
            self._changed.set()

    # ---------------------------------------------------------------- registration

    async def _admit(self, plugin: Plugin) -> None:
        trunk = plugin.trunk
        trunk.start()
        async with asyncio.timeout(self.behaviour.registration_timeout_s):
            stream, request = await trunk.requests.get()
        register = nri.RegisterPluginRequest.FromString(request.payload)
        self.registrations += 1
        self._changed.set()
        if request.service != RUNTIME or request.method != "RegisterPlugin":
            raise Broken(f"expected RegisterPlugin, got {request.service}/{request.method}")
        problem = self._identity_problem(register)
        if problem:
            # Answered, abandoned, and not closed: that is the plugin's part.
            await trunk.respond(stream, b"", UNKNOWN, problem)
            self.failures.append(problem)
            return
        plugin.name, plugin.index = register.plugin_name, register.plugin_idx
        plugin.nri_version = register.NRI_version
        if self.behaviour.close_instead_of == "register-reply":
            trunk.close()
            return
        if self.behaviour.configure_before_reply:
            configured = asyncio.ensure_future(self._configure(plugin))
            await asyncio.sleep(0.02)
            await trunk.respond(stream, b"")
            await configured
        else:
            await asyncio.sleep(self.behaviour.register_reply_after_s)
            await trunk.respond(stream, b"")
            if self.behaviour.never_configure:
                return
            await self._configure(plugin)
        await asyncio.sleep(self.behaviour.synchronize_after_s)
        if self.behaviour.never_synchronize:
            return
        try:
            await self._synchronize(plugin)
        except (CallFailed, TimeoutError, Broken):
            if self.profile.closes_when_synchronize_fails:
                raise
            # A zombie: connected, and never in the list.
            self.failures.append("zombie")
            return
        self.plugins.append(plugin)
        self.plugins.sort(key=lambda active: active.index)
        self._tasks.append(asyncio.ensure_future(self._serve(plugin)))

    def _identity_problem(self, register: nri.RegisterPluginRequest) -> str:
        if not re.fullmatch(r"[0-9]{2}", register.plugin_idx):
            return f'invalid plugin index: "{register.plugin_idx}"'
        allowed = r"[a-zA-Z0-9_.+-]+" if self.profile.checks_name else r".+"
        if not re.fullmatch(allowed, register.plugin_name):
            return f'invalid plugin name: "{register.plugin_name}"'
        return ""

    async def _configure(self, plugin: Plugin) -> None:
        profile = self.profile
        request = nri.ConfigureRequest(
            config=self.behaviour.config,
            runtime_name=profile.runtime_name,
            runtime_version=profile.runtime_version,
        )
        if profile.tells_timeouts:
            request.registration_timeout = int(self.behaviour.registration_timeout_s * 1000)
            request.request_timeout = int(self.behaviour.request_timeout_s * 1000)
        if profile.tells_nri_version:
            request.NRI_version = f"v{profile.nri}"
        reply = nri.ConfigureResponse.FromString(await self._call(plugin, "Configure", request))
        extra = reply.events & ~profile.valid_mask
        if extra:
            raise Broken(f"invalid plugin events: {extra:#x}")
        plugin.events = reply.events or profile.valid_mask
        if profile.failure_policies:
            plugin.policy = reply.failure_policy

    async def _synchronize(self, plugin: Plugin) -> None:
        deadline = asyncio.get_running_loop().time() + self.behaviour.request_timeout_s
        pods, containers = list(self.pods.values()), list(self.containers.values())
        pods_at_once, containers_at_once = len(pods), len(containers)
        while True:
            slice_ = nri.SynchronizeRequest(
                pods=pods[:pods_at_once], containers=containers[:containers_at_once]
            )
            more = pods_at_once < len(pods) or containers_at_once < len(containers)
            if self.profile.splits_synchronize:
                slice_.more = more
            size = slice_.ByteSize() + 128
            if size > MAX_MESSAGE and self.profile.splits_synchronize:
                factor = min(MAX_MESSAGE / size, 0.9)
                pods_at_once = int(pods_at_once * factor)
                containers_at_once = int(containers_at_once * factor)
                if pods_at_once + containers_at_once < 8:
                    pods_at_once = containers_at_once = 4
                continue
            left_s = deadline - asyncio.get_running_loop().time()
            reply = nri.SynchronizeResponse.FromString(
                await self._call(plugin, "Synchronize", slice_, timeout_s=left_s)
            )
            if not slice_.more:
                plugin.synchronize_updates = list(reply.update)
                self._apply(plugin.synchronize_updates)
                return
            if not reply.more or reply.update:
                raise Broken("plugin does not handle split sync requests")
            pods, containers = pods[pods_at_once:], containers[containers_at_once:]

    async def _serve(self, plugin: Plugin) -> None:
        """Refuse what the plugin calls after registration: koordlet calls nothing then."""
        while not plugin.trunk.closed:
            stream, request = await plugin.trunk.requests.get()
            await plugin.trunk.respond(stream, b"", UNIMPLEMENTED, f"method {request.method}")

    # ---------------------------------------------------------------- events

    async def run_pod_sandbox(self, pod: nri.PodSandbox) -> None:
        self.pods[pod.id] = pod
        await self._tell("RunPodSandbox", pod, None)

    async def remove_pod_sandbox(self, pod_id: str) -> None:
        pod = self.pods.pop(pod_id)
        await self._tell("StopPodSandbox", pod, None)
        await self._tell("RemovePodSandbox", pod, None)

    async def create_container(self, container: nri.Container) -> Created:
        """Ask the plugins, merge, and keep the container as created.

        Raises EventFailed when a plugin answers with an error, or two claim one field.
        """
        pod = self.pods.get(container.pod_sandbox_id, nri.PodSandbox())
        request = nri.CreateContainerRequest(pod=pod, container=container)
        merged, owners = nri.ContainerAdjustment(), Owners(self.profile)
        replies: dict[str, nri.CreateContainerResponse] = {}
        updates: list[nri.ContainerUpdate] = []

        def take(plugin: Plugin, payload: bytes) -> None:
            reply = nri.CreateContainerResponse.FromString(payload)
            replies[plugin.full_name] = reply
            merge_adjustment(request, reply.adjust, merged, owners, plugin.full_name)
            for update in reply.update:
                if update.container_id == container.id:
                    raise Conflict(
                        f'plugin "{plugin.full_name}" asked update of "{container.id}"'
                        " during creation"
                    )
                updates.append(update)

        await self._each("CreateContainer", lambda: request, take)
        created = request.container
        created.state = nri.CONTAINER_CREATED
        self.containers[created.id] = created
        self._apply(updates)
        return Created(merged, created, replies)

    async def start_container(self, container_id: str) -> None:
        container = self.containers[container_id]
        await self._tell("StartContainer", self._pod_of(container), container)
        container.state, container.pid = nri.CONTAINER_RUNNING, 4242
        await self._tell("PostStartContainer", self._pod_of(container), container)

    async def update_container(
        self, container_id: str, resources: nri.LinuxResources
    ) -> nri.LinuxResources:
        """Return the resources that the container gets: the request's, as plugins changed it."""
        container = self.containers[container_id]
        asked = nri.LinuxResources()
        asked.CopyFrom(resources)
        for wrapper in (asked.cpu.shares, asked.cpu.quota, asked.cpu.period, asked.memory.limit):
            wrapper.SetInParent()  # always present, 0 for "not given"
        request = nri.UpdateContainerRequest(
            pod=self._pod_of(container), container=container, linux_resources=asked
        )
        owners = Owners(self.profile)
        others: list[nri.ContainerUpdate] = []

        def take(plugin: Plugin, payload: bytes) -> None:
            reply = nri.UpdateContainerResponse.FromString(payload)
            for update in reply.update:
                if update.container_id != container_id:
                    others.append(update)
                    continue
                merge_resources(
                    update.linux.resources,
                    [request.linux_resources],
                    lambda field_, key: owners.claim(container_id, field_, plugin.full_name, key),
                )

        await self._each("UpdateContainer", lambda: request, take)
        final = request.linux_resources
        self._apply(
            [
                *others,
                nri.ContainerUpdate(
                    container_id=container_id, linux=nri.LinuxContainerUpdate(resources=final)
                ),
            ]
        )
        await self._tell("PostUpdateContainer", self._pod_of(container), container)
        return final

    async def remove_container(self, container_id: str) -> None:
        container = self.containers.pop(container_id)
        container.state = nri.CONTAINER_STOPPED
        await self._tell("StopContainer", self._pod_of(container), container)
        await self._tell("RemoveContainer", self._pod_of(container), container)

    async def _tell(
        self, method: str, pod: nri.PodSandbox, container: nri.Container | None
    ) -> None:
        request = nri.StartContainerRequest(pod=pod, container=container)
        await self._each(method, lambda: request, lambda plugin, payload: None)

    async def _each(
        self,
        method: str,
        request: Callable[[], Message],
        take: Callable[[Plugin, bytes], None],
    ) -> None:
        """Call every plugin that subscribed, in order; the first error ends the chain."""
        self.plugins = [plugin for plugin in self.plugins if not plugin.trunk.closed]
        event = EVENTS[method]
        for plugin in list(self.plugins):
            if not plugin.events & (1 << (event - 1)):
                continue
            try:
                take(plugin, await self._event(plugin, method, event, request()))
            except CallFailed as error:
                raise EventFailed(str(error)) from error
            except Conflict as error:
                raise EventFailed(str(error)) from error
            except (TimeoutError, Broken) as error:
                # By default: cut off, and the event goes on as if the plugin had answered nothing.
                self.failures.append(f"{method}: {type(error).__name__} {error}")
                if not (isinstance(error, TimeoutError) and plugin.policy.keep_connected):
                    plugin.trunk.close(f"{method} failed")
                if plugin.policy.fail_request:
                    raise EventFailed(
                        f"plugin {plugin.full_name} failed to handle {method}"
                    ) from error

    async def _event(self, plugin: Plugin, method: str, event: int, request: Message) -> bytes:
        own_rpc = method in ("CreateContainer", "UpdateContainer", "StopContainer")
        if not own_rpc and not (self.profile.dedicated_events and not plugin.state_change_only):
            return await self._state_change(plugin, event, request)
        try:
            return await self._call(plugin, method, request)
        except CallFailed as error:
            if error.code != UNIMPLEMENTED or own_rpc:
                raise
            plugin.state_change_only = True
            return await self._state_change(plugin, event, request)

    async def _state_change(self, plugin: Plugin, event: int, request: Message) -> bytes:
        assert isinstance(request, nri.StartContainerRequest)
        change = nri.StateChangeEvent(
            event=event,  # type: ignore[arg-type]
            pod=request.pod,
            container=request.container if request.HasField("container") else None,
        )
        return await self._call(plugin, "StateChange", change)

    async def _call(
        self, plugin: Plugin, method: str, request: Message, timeout_s: float | None = None
    ) -> bytes:
        payload = request.SerializeToString()
        trunk = plugin.trunk
        if self.behaviour.close_instead_of == method:
            trunk.close()
        if self.behaviour.cut_frame_of == method:
            trunk.write_raw(b"\0\0\0\1\0\0\1\0half")
            await asyncio.sleep(0.02)
            trunk.close()
        self.calls.append(Recorded(plugin.full_name, method, request))
        self._changed.set()
        return await trunk.call(
            method, payload, self.behaviour.request_timeout_s if timeout_s is None else timeout_s
        )

    # ---------------------------------------------------------------- the store

    def _pod_of(self, container: nri.Container) -> nri.PodSandbox:
        return self.pods.get(container.pod_sandbox_id, nri.PodSandbox())

    def _apply(self, updates: Sequence[nri.ContainerUpdate]) -> None:
        """Change the stored specifications; 0 and "" leave a value, an unknown id is ignored."""
        for update in updates:
            container = self.containers.get(update.container_id)
            if container is None:
                continue
            source, target = update.linux.resources, container.linux.resources
            for name in ("shares", "quota", "period"):
                if getattr(source.cpu, name).value:
                    getattr(target.cpu, name).value = getattr(source.cpu, name).value
            if source.memory.limit.value:
                target.memory.limit.value = source.memory.limit.value
            target.cpu.cpus = source.cpu.cpus or target.cpu.cpus
            target.cpu.mems = source.cpu.mems or target.cpu.mems
            for key, value in source.unified.items():
                target.unified[key] = value
