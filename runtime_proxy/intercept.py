"""Runs hooks and keeps the store up to date around intercepted CRI calls.

Each method is a small class around one held request. `decide` answers at once where no hook has to
be asked; the original bytes go on whenever no hook changed anything. The store learns of a change
only when the runtime has accepted it, and hooks of after-stages run beside the reply, never before.
"""

import logging
from collections.abc import Awaitable, Collection
from typing import Any, Generic, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy import merge
from runtime_proxy.hooks import Budget, Hooks, Refused
from runtime_proxy.http2.grpc import (
    MESSAGE_PREFIX_SIZE,
    Code,
    MessageError,
    Status,
    add_prefix,
    parse_answer,
    parse_unary_body,
)
from runtime_proxy.http2.held import RequestHeld
from runtime_proxy.model import (
    Container,
    Pod,
    changed_entries,
    read_container,
    read_pod,
    read_resources,
)
from runtime_proxy.runtime import RuntimeAway
from runtime_proxy.server import Forward, InterceptedCall, Verdict
from runtime_proxy.stages import INTERCEPTED_PATHS, CriMethod, Stage

log = logging.getLogger(__name__)

# Answers that matter here are an id; this bounds what a compressed one may unfold into.
_MAX_ANSWER_BYTES = 1024 * 1024

_Request = TypeVar("_Request", bound=Message)


class CriInterceptor:
    """A `server.Interceptor` for CRI."""

    def __init__(self, hooks: Hooks, *, max_message_bytes: int) -> None:
        self._hooks = hooks
        self._max_message_bytes = max_message_bytes

    @property
    def paths(self) -> Collection[bytes]:
        return INTERCEPTED_PATHS.keys()

    def open(self, request: RequestHeld) -> InterceptedCall:
        method = INTERCEPTED_PATHS[request.path]
        try:
            message = parse_unary_body(
                request.body, encoding=request.encoding, max_bytes=self._max_message_bytes
            )
            return _CALLS[method](self._hooks, request, message)
        except (MessageError, DecodeError) as error:
            # The runtime refuses it with its own words.
            self._hooks.skipped.unreadable += 1
            log.warning(
                "request goes on unread", extra={"method": method.value, "reason": str(error)}
            )
            return _Unread()


class _Unread:
    def decide(self) -> Verdict:
        return Forward()

    def answered(self, body: bytes) -> None:
        """Nothing is known of this call."""

    def abandoned(self) -> None:
        """Nothing is known of this call."""


class _Call(Generic[_Request]):
    """The common part: asks within the caller's deadline. Our own faults let the call go on."""

    kind: type[_Request]
    before: Stage | None = None

    def __init__(self, hooks: Hooks, held: RequestHeld, message: bytes) -> None:
        self.hooks = hooks
        self.held = held
        self.request = self.kind.FromString(message)
        self.budget = Budget(held.timeout_s)

    def decide(self) -> Verdict | Awaitable[Verdict]:
        try:
            return self._guarded() if self.needs_asking() else self.unasked()
        except Exception:  # noqa: BLE001 - reported, and counted
            return self._after_our_fault()

    def needs_asking(self) -> bool:
        return self.before is not None and bool(self.hooks.servers.serving(self.before))

    def unasked(self) -> Verdict:
        """Return the verdict where no hook server wants this stage."""
        return Forward()

    async def ask(self) -> bool:
        """Ask the hooks, put their changes into `request`, and return whether it changed."""
        raise AssertionError("a call without a before-stage is never asked about")

    async def _guarded(self) -> Verdict:
        try:
            changed = await self.ask()
        except Refused as refused:
            return Status(Code.UNKNOWN, f"hook server err: {refused}")
        except RuntimeAway:
            # The call itself meets the same, and kubelet gets the usual error.
            self.hooks.skipped.runtime_away += 1
            return Forward()
        except Exception:  # noqa: BLE001 - reported, and counted
            return self._after_our_fault()
        return Forward(add_prefix(self.request.SerializeToString()) if changed else None)

    def answered(self, body: bytes) -> None:
        """Success is an answer with a message in it; an error carries none."""
        if len(body) < MESSAGE_PREFIX_SIZE:
            return
        try:
            self.succeeded(parse_answer(body, max_bytes=_MAX_ANSWER_BYTES))
        except (MessageError, DecodeError) as error:
            log.warning(
                "unreadable answer", extra={"path": self.held.path.decode(), "reason": str(error)}
            )
        except Exception:  # noqa: BLE001 - reported, and counted
            self._after_our_fault()

    def _after_our_fault(self) -> Verdict:
        """A fault of ours must not cost a pod: the request goes on as kubelet made it."""
        self.hooks.skipped.fault += 1
        log.exception("hooks skipped", extra={"path": self.held.path.decode()})
        return Forward()

    def succeeded(self, answer: bytes) -> None:
        """The runtime has done it."""

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
        # has a hook; a sandbox that is not in the store may have such changes too, from before a
        # restart or from a call that a predecessor brought to its end.
        return super().needs_asking() or self.hooks.store.pod(self.request.pod_sandbox_id) is None

    def unasked(self) -> Verdict:
        pod = self.hooks.store.pod(self.request.pod_sandbox_id)
        if pod is not None and self._adopt(pod):
            return Forward(add_prefix(self.request.SerializeToString()))
        return Forward()

    def _adopt(self, pod: Pod) -> bool:
        """Give the container its sandbox's changes, and return whether the request changed."""
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


class _OfContainer(_Call[_Request]):
    """A call that changes what is known of a container: the store learns of the change."""

    known: Container | None = None
    updated: Container | None = None


class _StartContainer(_OfContainer[cri.StartContainerRequest]):
    kind = cri.StartContainerRequest
    before = Stage.PRE_START_CONTAINER

    async def ask(self) -> bool:
        known = await _known_container(self.hooks, self.request.container_id)
        if known is None:
            return False
        self.known, pod = known
        assert self.before is not None
        # The request has nothing to change. Later hooks are sent what this one answered.
        self.updated = await self.hooks.ask_about_container(
            self.before, self.known, pod, self.budget
        )
        return False

    def succeeded(self, answer: bytes) -> None:
        self.hooks.remember(self.known, self.updated)
        if self.hooks.servers.serving(Stage.POST_START_CONTAINER):
            known = self.hooks.store.container(self.request.container_id)
            if known is not None and known.stopped:
                # The event of its end came before this answer, and a start must not follow an end.
                return
            pod_id = known.pod_id if known is not None else self.request.container_id
            self.hooks.in_background(pod_id, self._tell())

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
        self.hooks.container_exited(self.hooks.store.container_id(self.request.container_id))


class _RemoveContainer(_Call[cri.RemoveContainerRequest]):
    kind = cri.RemoveContainerRequest

    def succeeded(self, answer: bytes) -> None:
        identifier = self.hooks.store.container_id(self.request.container_id)
        # Removing a running container stops it first.
        self.hooks.container_exited(identifier)
        self.hooks.store.drop_container(identifier)


class _UpdateContainerResources(_OfContainer[cri.UpdateContainerResourcesRequest]):
    kind = cri.UpdateContainerResourcesRequest
    before = Stage.PRE_UPDATE_CONTAINER_RESOURCES

    def __init__(self, hooks: Hooks, held: RequestHeld, message: bytes) -> None:
        super().__init__(hooks, held, message)
        self.known = hooks.store.container(hooks.store.container_id(self.request.container_id))
        if self.known is not None:
            self.updated = self._requested(self.known)

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
        self.known, pod = known
        before = self._requested(self.known)
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
        self.hooks.remember(self.known, self.updated)


class _StopPodSandbox(_Call[cri.StopPodSandboxRequest]):
    kind = cri.StopPodSandboxRequest

    def succeeded(self, answer: bytes) -> None:
        self.hooks.sandbox_exited(self.hooks.store.pod_id(self.request.pod_sandbox_id))


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
        identifier = self.hooks.store.pod_id(self.request.pod_sandbox_id)
        # Removing a running sandbox stops it first.
        self.hooks.sandbox_exited(identifier)
        self.hooks.store.drop_pod(identifier)


class _UpdatePodSandboxResources(_Call[cri.UpdatePodSandboxResourcesRequest]):
    kind = cri.UpdatePodSandboxResourcesRequest
    before = Stage.PRE_UPDATE_POD_SANDBOX_RESOURCES

    def __init__(self, hooks: Hooks, held: RequestHeld, message: bytes) -> None:
        super().__init__(hooks, held, message)
        self.updated: Pod | None = None
        self.known = hooks.store.pod(hooks.store.pod_id(self.request.pod_sandbox_id))
        if self.known is not None:
            self.updated = self._requested(self.known)

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
        self.known, self.updated = pod, before
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
        if self.known is None or self.updated is None:
            return
        current = self.hooks.store.pod(self.known.id)
        if current is not None:
            self.hooks.store.put_pod(merge.carry_over(current, self.known, self.updated))


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
