"""What becomes of an intercepted CRI call: hooks before it, the store and hooks behind it.

Each method is a small class around one held request. `decide` answers at once where nobody has to
be asked; the original bytes go on whenever no hook changed anything. The store learns of a change
only when the runtime has accepted it, and hooks of after-stages run beside the reply, never before.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from protos.cri.v1 import api_pb2 as cri
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from runtime_proxy import merge
from runtime_proxy.hook_server import HookError, HookServer, HookServers
from runtime_proxy.http2.grpc import (
    MESSAGE_PREFIX_SIZE,
    Code,
    MessageError,
    Status,
    add_prefix,
    parse_unary_body,
)
from runtime_proxy.http2.relay import RequestHeld
from runtime_proxy.model import (
    Container,
    Pod,
    changed_entries,
    container_request,
    pod_request,
    read_container,
    read_pod,
    read_resources,
)
from runtime_proxy.runtime import RuntimeAway
from runtime_proxy.server import Forward, InterceptedCall, Verdict
from runtime_proxy.stages import INTERCEPTED_PATHS, CriMethod, Stage
from runtime_proxy.store import Store

log = logging.getLogger(__name__)

# Of a caller's remaining time, what hooks may use; the rest is the runtime's.
_HOOK_SHARE = 0.5

_Request = TypeVar("_Request", bound=Message)
_Answer = TypeVar("_Answer", bound=Message)


@dataclass(slots=True)
class Skipped:
    """Intercepted calls that went on without hooks, by the reason."""

    unreadable: int = 0
    labelled: int = 0
    unknown_object: int = 0
    runtime_away: int = 0
    fault: int = 0


class Lookup(Protocol):
    """Objects from the store or, where it does not have them, from the runtime."""

    done: bool

    async def pod(self, identifier: str) -> Pod | None:
        """None if the runtime does not know it either. Raises RuntimeAway."""

    async def container(self, identifier: str) -> Container | None:
        """None if the runtime does not know it either. Raises RuntimeAway."""


@dataclass(slots=True)
class Hooks:
    """Asking hook servers, in order, each answer merged before the next one is asked."""

    servers: HookServers
    store: Store
    recovery: Lookup
    skip_label: tuple[str, str]
    max_message_bytes: int
    skipped: Skipped = field(default_factory=Skipped)
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def paths(self) -> Collection[bytes]:
        return INTERCEPTED_PATHS.keys()

    def open(self, request: RequestHeld) -> InterceptedCall:
        method = INTERCEPTED_PATHS[request.path]
        try:
            message = parse_unary_body(
                request.body, encoding=request.encoding, max_bytes=self.max_message_bytes
            )
            return _CALLS[method](self, request, message)
        except (MessageError, DecodeError) as error:
            # The runtime refuses it with its own words.
            self.skipped.unreadable += 1
            log.warning(
                "request goes on unread", extra={"method": method.value, "reason": str(error)}
            )
            return _Unread()

    def skips(self, pod: Pod) -> bool:
        key, value = self.skip_label
        if pod.labels.get(key) == value and key in pod.labels:
            self.skipped.labelled += 1
            return True
        return False

    async def ask_about_pod(
        self,
        stage: Stage,
        pod: Pod,
        budget: "Budget",
        take: Callable[[Pod, hook.PodSandboxHookResponse], Pod] = merge.answered_pod,
    ) -> Pod:
        """The pod as the hooks of this stage want it; `take` merges one answer.

        Raises Refused under policy Fail.
        """
        for server in self.servers.serving(stage):
            answer = await self._ask(
                server, stage, pod_request(pod), hook.PodSandboxHookResponse, budget
            )
            if answer is not None:
                pod = take(pod, answer)
        return pod

    async def ask_about_container(
        self, stage: Stage, container: Container, pod: Pod, budget: "Budget"
    ) -> Container:
        """The container as the hooks of this stage want it. Raises Refused under policy Fail."""
        for server in self.servers.serving(stage):
            answer = await self._ask(
                server,
                stage,
                container_request(container, pod),
                hook.ContainerResourceHookResponse,
                budget,
            )
            if answer is not None:
                container = merge.answered_container(container, answer)
        return container

    async def _ask(
        self,
        server: HookServer,
        stage: Stage,
        request: Message,
        kind: type[_Answer],
        budget: "Budget",
    ) -> _Answer | None:
        """One server's answer; None where it has none and its policy lets the call go on."""
        try:
            answer = await server.call(stage, request.SerializeToString(), budget_s=budget.left_s())
            return kind.FromString(answer) if answer is not None else None
        except HookError as error:
            reason = str(error)
        except DecodeError:
            reason = f"{server.registration.endpoint}: unreadable answer to {stage.value}"
        if server.registration.fail and stage.may_refuse:
            raise Refused(reason)
        log.warning(
            "hook gave no answer",
            extra={"server": server.name, "stage": stage.value, "reason": reason},
        )
        return None

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("hook behind a call failed", exc_info=error)

    async def settle(self, limit_s: float) -> None:
        """Wait for the hooks of after-stages that are still running."""
        if self._background:
            await asyncio.wait(self._background, timeout=limit_s)

    async def tell_of_container(self, stage: Stage, container: Container) -> None:
        """An after-stage of one container; nobody waits for the answer."""
        if not self.servers.serving(stage):
            return
        try:
            pod = await self.recovery.pod(container.pod_id)
        except RuntimeAway:
            pod = None
        if pod is None or self.skips(pod):
            return
        await self.ask_about_container(stage, container, pod, Budget(None))

    async def pod_stopped(self, pod: Pod, containers: list[Container]) -> None:
        """Tell of a stopped sandbox and of the containers that went down with it."""
        for container in containers:
            await self.tell_of_container(Stage.POST_STOP_CONTAINER, container)
        if self.servers.serving(Stage.POST_STOP_POD_SANDBOX) and not self.skips(pod):
            await self.ask_about_pod(Stage.POST_STOP_POD_SANDBOX, pod, Budget(None))

    def container_exited(self, identifier: str) -> None:
        """The runtime reports that a container ended, whoever ended it."""
        stopped = self.store.stop_container(identifier)
        if stopped is not None:
            self.in_background(self.tell_of_container(Stage.POST_STOP_CONTAINER, stopped))

    def sandbox_exited(self, identifier: str) -> None:
        stopped = self.store.stop_pod(identifier)
        if stopped is not None:
            containers = [
                c
                for c in list(self.store.containers_of(identifier))
                if self.store.stop_container(c.id) is not None
            ]
            self.in_background(self.pod_stopped(stopped, containers))


class Refused(Exception):
    """A hook server under failure policy Fail gave no answer."""


class Budget:
    """How long hooks may take, out of the caller's own deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s * _HOOK_SHARE

    def left_s(self) -> float | None:
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())


class _Unread:
    def decide(self) -> Verdict:
        return Forward()

    def answered(self, body: bytes) -> None:
        """Nothing is known of this call."""

    def abandoned(self) -> None:
        """Nothing is known of this call."""


class _Call(Generic[_Request]):
    """The common part: asking under the caller's deadline, and never being worse than no proxy."""

    kind: type[_Request]
    before: Stage | None = None

    def __init__(self, hooks: Hooks, held: RequestHeld, message: bytes) -> None:
        self.hooks = hooks
        self.held = held
        self.request = self.kind.FromString(message)
        self.budget = Budget(held.timeout_s)

    def decide(self) -> Verdict | Awaitable[Verdict]:
        if self.needs_asking():
            return self._guarded()
        return self.unasked()

    def needs_asking(self) -> bool:
        return self.before is not None and bool(self.hooks.servers.serving(self.before))

    def unasked(self) -> Verdict:
        """The verdict where no hook server wants this stage."""
        return Forward()

    async def ask(self) -> bool:
        """Ask the hooks and put their changes into `request`; whether it changed."""
        raise AssertionError("a call without a before-stage is never asked about")

    async def _guarded(self) -> Verdict:
        try:
            changed = await self.ask()
        except Refused as refused:
            return Status(Code.UNKNOWN, f"hook server err: {refused}")
        except RuntimeAway:
            # Then the call itself finds it away, and says so in the runtime's words.
            self.hooks.skipped.runtime_away += 1
            return Forward()
        except Exception:
            # A fault of ours must not cost a pod: the request goes on as kubelet made it.
            self.hooks.skipped.fault += 1
            log.exception("hooks skipped", extra={"path": self.held.path.decode()})
            return Forward()
        return Forward(add_prefix(self.request.SerializeToString()) if changed else None)

    def answered(self, body: bytes) -> None:
        """Success is an answer with a message in it; an error carries none."""
        if len(body) < MESSAGE_PREFIX_SIZE:
            return
        try:
            self.succeeded(body[MESSAGE_PREFIX_SIZE:])
        except DecodeError as error:
            log.warning(
                "unreadable answer", extra={"path": self.held.path.decode(), "reason": str(error)}
            )

    def succeeded(self, answer: bytes) -> None:
        """The runtime did it."""

    def abandoned(self) -> None:
        """Nothing was stored yet, so nothing is taken back."""


class _RunPodSandbox(_Call[cri.RunPodSandboxRequest]):
    kind = cri.RunPodSandboxRequest
    before = Stage.PRE_RUN_POD_SANDBOX

    def __init__(self, hooks: Hooks, held: RequestHeld, message: bytes) -> None:
        super().__init__(hooks, held, message)
        self.pod = read_pod(self.request.config, self.request.runtime_handler)

    async def ask(self) -> bool:
        if self.hooks.skips(self.pod):
            return False
        assert self.before is not None
        answered = await self.hooks.ask_about_pod(self.before, self.pod, self.budget)
        changes = merge.pod_changes(self.pod, answered)
        self.pod = msgspec.structs.replace(answered, changes=changes)
        return merge.patch_sandbox_config(self.request.config, changes)

    def succeeded(self, answer: bytes) -> None:
        identifier = cri.RunPodSandboxResponse.FromString(answer).pod_sandbox_id
        if identifier:
            self.hooks.store.put_pod(msgspec.structs.replace(self.pod, id=identifier))


class _CreateContainer(_Call[cri.CreateContainerRequest]):
    kind = cri.CreateContainerRequest
    before = Stage.PRE_CREATE_CONTAINER

    def __init__(self, hooks: Hooks, held: RequestHeld, message: bytes) -> None:
        super().__init__(hooks, held, message)
        self.container = self._read("")

    def _read(self, cgroup_parent: str) -> Container:
        return read_container(
            self.request.pod_sandbox_id,
            self.request.config,
            cgroup_parent or self.request.sandbox_config.linux.cgroup_parent,
        )

    def needs_asking(self) -> bool:
        # What hooks changed in the sandbox holds for its containers, whether or not this stage
        # has a hook; a sandbox that is not in the store (yet) may have such changes too.
        pod = self.hooks.store.pod(self.request.pod_sandbox_id)
        return super().needs_asking() or (pod is None and not self.hooks.recovery.done)

    def unasked(self) -> Verdict:
        pod = self.hooks.store.pod(self.request.pod_sandbox_id)
        if pod is not None and self._adopt(pod):
            return Forward(add_prefix(self.request.SerializeToString()))
        return Forward()

    def _adopt(self, pod: Pod) -> bool:
        """Give the container its sandbox's changes; whether the request changed."""
        changed = (
            merge.patch_sandbox_config(self.request.sandbox_config, pod.changes)
            if (pod.changes.labels or pod.changes.annotations or pod.changes.cgroup_parent)
            else False
        )
        self.container = msgspec.structs.replace(
            self._read(pod.changes.cgroup_parent), pod_id=pod.id
        )
        return changed

    async def ask(self) -> bool:
        pod = await self.hooks.recovery.pod(self.request.pod_sandbox_id)
        if pod is None:
            self.hooks.skipped.unknown_object += 1
            return False
        changed = self._adopt(pod)
        if self.hooks.skips(pod):
            return changed
        assert self.before is not None
        before = self.container
        after = await self.hooks.ask_about_container(self.before, before, pod, self.budget)
        self.container = after
        return self._patch(before, after) or changed

    def _patch(self, before: Container, after: Container) -> bool:
        config = self.request.config
        changed = merge.patch_map(config.annotations, after.annotations)
        if merge.differs(before.resources, after.resources) and not config.HasField("windows"):
            assert before.resources is not None
            assert after.resources is not None
            merge.patch_resources(config.linux.resources, before.resources, after.resources)
            changed = True
        if after.cgroup_parent != before.cgroup_parent:
            self.request.sandbox_config.linux.cgroup_parent = after.cgroup_parent
            changed = True
        if after.envs != before.envs:
            old = [(env.key, env.value) for env in config.envs]
            merged = merge.merge_envs(old, before.envs, after.envs)
            if merged != old:
                del config.envs[:]
                config.envs.extend(cri.KeyValue(key=k, value=v) for k, v in merged)
                changed = True
        return changed

    def succeeded(self, answer: bytes) -> None:
        identifier = cri.CreateContainerResponse.FromString(answer).container_id
        if identifier:
            self.hooks.store.put_container(msgspec.structs.replace(self.container, id=identifier))


class _StartContainer(_Call[cri.StartContainerRequest]):
    kind = cri.StartContainerRequest
    before = Stage.PRE_START_CONTAINER

    async def ask(self) -> bool:
        known = await _known_container(self.hooks, self.request.container_id)
        if known is None:
            return False
        container, pod = known
        assert self.before is not None
        after = await self.hooks.ask_about_container(self.before, container, pod, self.budget)
        # There is nothing in the request to change; what later hooks are told does change.
        self.hooks.store.put_container(after)
        return False

    def succeeded(self, answer: bytes) -> None:
        if self.hooks.servers.serving(Stage.POST_START_CONTAINER):
            self.hooks.in_background(self._tell())

    async def _tell(self) -> None:
        try:
            container = await self.hooks.recovery.container(self.request.container_id)
        except RuntimeAway:
            return
        if container is not None:
            await self.hooks.tell_of_container(Stage.POST_START_CONTAINER, container)


class _StopContainer(_Call[cri.StopContainerRequest]):
    kind = cri.StopContainerRequest

    def succeeded(self, answer: bytes) -> None:
        self.hooks.container_exited(self.request.container_id)


class _RemoveContainer(_Call[cri.RemoveContainerRequest]):
    kind = cri.RemoveContainerRequest

    def succeeded(self, answer: bytes) -> None:
        # Removing a running container stops it first.
        self.hooks.container_exited(self.request.container_id)
        self.hooks.store.drop_container(self.request.container_id)


class _UpdateContainerResources(_Call[cri.UpdateContainerResourcesRequest]):
    kind = cri.UpdateContainerResourcesRequest
    before = Stage.PRE_UPDATE_CONTAINER_RESOURCES

    def __init__(self, hooks: Hooks, held: RequestHeld, message: bytes) -> None:
        super().__init__(hooks, held, message)
        self.updated: Container | None = None
        known = hooks.store.container(self.request.container_id)
        if known is not None:
            self.updated = self._requested(known)

    def _requested(self, container: Container) -> Container:
        if not self.request.HasField("linux"):
            return container
        return msgspec.structs.replace(
            container,
            resources=merge.rule_u(container.resources, read_resources(self.request.linux)),
        )

    async def ask(self) -> bool:
        known = await _known_container(self.hooks, self.request.container_id)
        if known is None:
            return False
        container, pod = known
        before = self._requested(container)
        assert self.before is not None
        after = await self.hooks.ask_about_container(self.before, before, pod, self.budget)
        self.updated = after
        changed = merge.patch_map(
            self.request.annotations,
            changed_entries(before.annotations, after.annotations),
        )
        if merge.differs(before.resources, after.resources) and not self.request.HasField(
            "windows"
        ):
            assert before.resources is not None
            assert after.resources is not None
            merge.patch_resources(self.request.linux, before.resources, after.resources)
            changed = True
        return changed

    def succeeded(self, answer: bytes) -> None:
        if self.updated is not None:
            current = self.hooks.store.container(self.updated.id)
            if current is not None:
                self.hooks.store.put_container(
                    msgspec.structs.replace(self.updated, stopped=current.stopped)
                )


class _StopPodSandbox(_Call[cri.StopPodSandboxRequest]):
    kind = cri.StopPodSandboxRequest

    def succeeded(self, answer: bytes) -> None:
        self.hooks.sandbox_exited(self.request.pod_sandbox_id)


class _RemovePodSandbox(_Call[cri.RemovePodSandboxRequest]):
    kind = cri.RemovePodSandboxRequest
    before = Stage.PRE_REMOVE_POD_SANDBOX

    async def ask(self) -> bool:
        pod = await self.hooks.recovery.pod(self.request.pod_sandbox_id)
        if pod is not None and not self.hooks.skips(pod):
            assert self.before is not None
            await self.hooks.ask_about_pod(self.before, pod, self.budget)
        return False

    def succeeded(self, answer: bytes) -> None:
        self.hooks.store.drop_pod(self.request.pod_sandbox_id)


class _UpdatePodSandboxResources(_Call[cri.UpdatePodSandboxResourcesRequest]):
    kind = cri.UpdatePodSandboxResourcesRequest
    before = Stage.PRE_UPDATE_POD_SANDBOX_RESOURCES

    def __init__(self, hooks: Hooks, held: RequestHeld, message: bytes) -> None:
        super().__init__(hooks, held, message)
        self.updated: Pod | None = None
        known = hooks.store.pod(self.request.pod_sandbox_id)
        if known is not None:
            self.updated = self._requested(known)

    def _requested(self, pod: Pod) -> Pod:
        """This call carries the whole of both values, unlike the update of a container."""
        has_overhead = self.request.HasField("overhead")
        has_resources = self.request.HasField("resources")
        return msgspec.structs.replace(
            pod,
            overhead=read_resources(self.request.overhead) if has_overhead else pod.overhead,
            resources=read_resources(self.request.resources) if has_resources else pod.resources,
        )

    async def ask(self) -> bool:
        pod = await self.hooks.recovery.pod(self.request.pod_sandbox_id)
        if pod is None:
            self.hooks.skipped.unknown_object += 1
            return False
        before = self._requested(pod)
        self.updated = before
        if self.hooks.skips(pod):
            return False
        assert self.before is not None
        after = await self.hooks.ask_about_pod(
            self.before, before, self.budget, merge.answered_pod_resources
        )
        self.updated = after
        if not merge.differs(before.resources, after.resources):
            return False
        assert before.resources is not None
        assert after.resources is not None
        merge.patch_resources(self.request.resources, before.resources, after.resources)
        return True

    def succeeded(self, answer: bytes) -> None:
        if self.updated is not None and self.hooks.store.pod(self.updated.id) is not None:
            self.hooks.store.put_pod(self.updated)


async def _known_container(hooks: Hooks, identifier: str) -> tuple[Container, Pod] | None:
    """The container and its pod, unless hooks do not apply to them."""
    container = await hooks.recovery.container(identifier)
    pod = await hooks.recovery.pod(container.pod_id) if container is not None else None
    if container is None or pod is None:
        hooks.skipped.unknown_object += 1
        return None
    return None if hooks.skips(pod) else (container, pod)


_CALLS: dict[CriMethod, type[_Call[Any]]] = {
    CriMethod.RUN_POD_SANDBOX: _RunPodSandbox,
    CriMethod.STOP_POD_SANDBOX: _StopPodSandbox,
    CriMethod.REMOVE_POD_SANDBOX: _RemovePodSandbox,
    CriMethod.UPDATE_POD_SANDBOX_RESOURCES: _UpdatePodSandboxResources,
    CriMethod.CREATE_CONTAINER: _CreateContainer,
    CriMethod.START_CONTAINER: _StartContainer,
    CriMethod.STOP_CONTAINER: _StopContainer,
    CriMethod.REMOVE_CONTAINER: _RemoveContainer,
    CriMethod.UPDATE_CONTAINER_RESOURCES: _UpdateContainerResources,
}
