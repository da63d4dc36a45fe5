"""The hook service: what koord-runtime-proxy asks before and after CRI calls, from the one engine.

`runtime.v1alpha1.RuntimeHookService` over gRPC on a unix socket (runtime-proxy.md 2.6, 3.6). An
answer echoes the request and carries what the engine decided, because a proxy's merge rules take
what is left out for "empty". Answers come from memory; files are the reconciler's, which is woken.

While NRI protects new containers, answers only echo: containerd's plugins run behind the proxy, and
a quota must not be divided at both places.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import msgspec

from apis.cpuset import CpuSet
from hooks.decision import Decision
from hooks.engine import Engine
from hooks.places import directory_of, place_of
from hooks.requested import overlay, requested_of, value_in_request
from hooks.subject import ContainerSubject, Pod, Requested, make_pod
from koordlet.configuration.config import CONTAINER_STAGES, POD_STAGES
from koordlet.configuration.config import HookService as Settings
from koordlet.decisions.decider import Decider, Stage
from koordlet.events import Events, Severity
from koordlet.state import NodeState
from linux.cgroup_files import FILES, quota_in_period
from linux.cgroup_paths import Runtime
from linux.resources import Resource
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from service import unix
from service.files import replacing

SERVICE: Final = "runtime.v1alpha1.RuntimeHookService"
FILE: Final = "koordlet.json"
_MAX_MESSAGE_BYTES: Final = 16 << 20
_MAX_REMEMBERED: Final = 8192
_STOP_GRACE_S: Final = 1.0

# What we register for: the stages whose answers matter, and those that tell of an end.
_STAGES: Final = (
    "PreRunPodSandbox",
    "PreCreateContainer",
    "PreUpdateContainerResources",
    "PostStopContainer",
    "PostStopPodSandbox",
)

_NUMBERS: Final[Mapping[Resource, str]] = {
    Resource.CPU_SHARES: "cpu_shares",
    Resource.CPU_CFS_QUOTA: "cpu_quota",
    Resource.CPU_CFS_PERIOD: "cpu_period",
    Resource.MEMORY_LIMIT: "memory_limit_in_bytes",
    Resource.OOM_SCORE_ADJ: "oom_score_adj",
}
_SETS: Final[Mapping[Resource, str]] = {
    Resource.CPUSET_CPUS: "cpuset_cpus",
    Resource.CPUSET_MEMS: "cpuset_mems",
}

_Key = tuple[str, str, int]
"""Pod uid, container name, attempt: a container before and after it has an id."""


class Surroundings(Protocol):
    """What the service needs of the daemon."""

    @property
    def engine(self) -> Engine: ...

    @property
    def nri_protects(self) -> bool:
        """NRI decides about new containers: the proxy's calls need no second decision."""
        ...

    def proxy_called(self, uid: str) -> None:
        """Something happened to this pod: ask the sources and wake the reconciler."""
        ...

    def state_changed(self, reason: str) -> None:
        """The state changed: publish a snapshot and wake the reconciler, after the reply."""
        ...

    def superseded(self, container_id: str, resources: Collection[Resource]) -> None:
        """kubelet asked the runtime anew: what it was handed of these before is history."""
        ...


class _Memory(msgspec.Struct, frozen=True):
    """What kubelet asked for a container, and what it was answered."""

    asked: Requested
    answered: Requested


class HookAnswers:
    """The answers, without gRPC around them."""

    def __init__(self, state: NodeState, decider: Decider, surroundings: Surroundings) -> None:
        self._state = state
        self._decider = decider
        self._daemon = surroundings
        self._memory: OrderedDict[_Key, _Memory] = OrderedDict()

    def pod(self, stage: str, request: hook.PodSandboxHookRequest) -> hook.PodSandboxHookResponse:
        """Echo; a pod's own values are files of its cgroup, which the reconciler writes."""
        self._daemon.proxy_called(request.pod_meta.uid)
        answer = hook.PodSandboxHookResponse(
            labels=request.labels,
            annotations=request.annotations,
            cgroup_parent=request.cgroup_parent,
        )
        if request.HasField("resources"):
            answer.resources.CopyFrom(request.resources)
        return answer

    def container(
        self, stage: str, request: hook.ContainerResourceHookRequest
    ) -> hook.ContainerResourceHookResponse:
        self._daemon.proxy_called(request.pod_meta.uid)
        answer = hook.ContainerResourceHookResponse(
            container_annotations=request.container_annotations,
            pod_cgroup_parent=request.pod_cgroup_parent,
            container_envs=request.container_envs,
        )
        if request.HasField("container_resources"):
            answer.container_resources.CopyFrom(request.container_resources)
        key = (request.pod_meta.uid, request.container_meta.name, request.container_meta.attempt)
        if stage == "PostStopContainer":
            self._memory.pop(key, None)
        elif stage == "PreCreateContainer" and not self._daemon.nri_protects:
            asked = requested(request.container_resources)
            self._decide(key, request, asked, Stage.CREATE_CONTAINER, answer)
        elif stage == "PreUpdateContainerResources" and not self._daemon.nri_protects:
            asked = self._asked(key, request)
            self._daemon.superseded(request.container_meta.id, self._asked_anew(key, asked))
            self._decide(key, request, asked, Stage.UPDATE_CONTAINER, answer)
            # Or the reconciler would put back what kubelet asked for before.
            uid, name, _ = key
            self._state.update_through_proxy(uid, name, request.container_meta.id, asked)
            self._daemon.state_changed("update-container")
        return answer

    def _asked(self, key: _Key, request: hook.ContainerResourceHookRequest) -> Requested:
        """What kubelet asks for, out of what the proxy holds.

        The proxy tells the values in force under the new ones, and those in force are our own
        answers: what we answered and is told again was not asked for anew.
        """
        told = requested(request.container_resources)
        remembered = self._memory.get(key)
        if remembered is None:
            known = self._state.container(request.container_meta.id)
            # Before a restart of ours: the source that knows what kubelet asked has to say it.
            return told if known is None else overlay(Requested(cpus=told.cpus), known.requested)
        fields = {
            name: asked if value == answered else value
            for name in Requested.__struct_fields__
            for value, answered, asked in [
                (
                    getattr(told, name),
                    getattr(remembered.answered, name),
                    getattr(remembered.asked, name),
                )
            ]
        }
        return Requested(**fields)

    def _asked_anew(self, key: _Key, asked: Requested) -> list[Resource]:
        remembered = self._memory.get(key)
        before = Requested() if remembered is None else remembered.asked
        return [
            one for one in FILES if value_in_request(asked, one) != value_in_request(before, one)
        ]

    def _decide(
        self,
        key: _Key,
        request: hook.ContainerResourceHookRequest,
        asked: Requested,
        stage: Stage,
        answer: hook.ContainerResourceHookResponse,
    ) -> None:
        subject = self._subject(request, asked)
        decision = self._decider.decide(self._daemon.engine, subject, stage)
        carry(decision, answer)
        self._memory[key] = _Memory(asked, requested(answer.container_resources))
        self._memory.move_to_end(key)
        while len(self._memory) > _MAX_REMEMBERED:
            self._memory.popitem(last=False)

    def _subject(
        self, request: hook.ContainerResourceHookRequest, asked: Requested
    ) -> ContainerSubject:
        pod = self._state.pod(request.pod_meta.uid) or _pod(request)
        identifier = request.container_meta.id
        return ContainerSubject(
            pod=pod,
            name=request.container_meta.name,
            id=identifier,
            cgroup=directory_of("", pod.cgroup, identifier, Runtime.CONTAINERD),
            requested=asked,
        )


def _pod(request: hook.ContainerResourceHookRequest) -> Pod:
    directory, kube_qos = place_of(request.pod_cgroup_parent)
    return make_pod(
        namespace=request.pod_meta.namespace,
        name=request.pod_meta.name,
        uid=request.pod_meta.uid,
        labels=dict(request.pod_labels),
        annotations=dict(request.pod_annotations),
        kube_qos=kube_qos,
        cgroup=directory,
    )


def requested(resources: hook.LinuxContainerResources) -> Requested:
    """Return resources as canonical values."""
    return requested_of(
        shares=resources.cpu_shares,
        quota_us=resources.cpu_quota,
        period_us=resources.cpu_period,
        limit_bytes=resources.memory_limit_in_bytes,
        cpus=resources.cpuset_cpus,
        mems=resources.cpuset_mems,
        oom_score_adj=resources.oom_score_adj or None,
    )


def carry(decision: Decision, answer: hook.ContainerResourceHookResponse) -> None:
    """Put a decision into an answer. What the protocol has no field for is the reconciler's."""
    resources = answer.container_resources
    for (resource, key), outcome in decision.outcomes.items():
        value = outcome.value
        if resource is Resource.ENV and isinstance(value, str):
            answer.container_envs[key] = value
        elif resource in _NUMBERS and isinstance(value, int) and not key:
            if resource is Resource.CPU_CFS_QUOTA:
                value = quota_in_period(value, resources.cpu_period)
            setattr(resources, _NUMBERS[resource], value)
        elif resource in _SETS and isinstance(value, CpuSet) and not key:
            setattr(resources, _SETS[resource], str(value))


def registration(settings: Settings) -> bytes:
    """The registration file's content: tab indented, as upstream writes it."""
    stages = [stage for stage in _STAGES if stage not in settings.disabled_stages]
    document = {
        "remote-endpoint": settings.host_endpoint,
        "failure-policy": settings.failure_policy,
        "runtime-hooks": stages,
    }
    return json.dumps(document, indent="\t").encode() + b"\n"


class HookServer:
    """The socket and the registration file. `start` writes the file last, `stop` removes it first,
    so that a proxy is never sent to a socket that nobody serves."""

    def __init__(self, settings: Settings, answers: HookAnswers, events: Events) -> None:
        self._settings = settings
        self._answers = answers
        self._events = events
        self._server: grpc.aio.Server | None = None
        self._registered = False

    @property
    def file(self) -> str:
        return os.path.join(self._settings.registration_dir, FILE)

    async def start(self) -> None:
        """Raises OSError where the socket cannot be served."""
        path = self._settings.socket
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        unix.make_way(path)
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
            ]
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, self._handlers()),)
        )
        try:
            with unix.owner_only():
                server.add_insecure_port(f"unix://{path}")
        except RuntimeError as error:
            raise OSError(f"hookService.socket = {path!r}: {error}") from error
        await server.start()
        self._server = server
        self.register_if_missing()

    async def stop(self) -> None:
        if self._server is None:
            return
        with suppress(OSError):
            os.unlink(self.file)
        await self._server.stop(_STOP_GRACE_S)
        self._server = None
        with suppress(OSError):
            os.unlink(self._settings.socket)

    def register_if_missing(self) -> None:
        """Write the registration file, unless it was written; a failure is an event.

        Whole or not at all: a proxy may read the file at any moment.
        """
        if self._registered:
            return
        try:
            os.makedirs(self._settings.registration_dir, mode=0o755, exist_ok=True)
            with replacing(self.file, mode=0o644) as file:
                file.write(registration(self._settings))
        except OSError as error:
            self._events.add(
                "hook-registration",
                "hookService",
                f"hookService.registrationDir = {self._settings.registration_dir!r}: "
                f"{error.strerror}; koord-runtime-proxy will not call koordlet;"
                " tried again every minute",
                severity=Severity.ERROR,
            )
            return
        self._registered = True

    def _handlers(self) -> dict[str, Any]:
        handlers = {
            stage: (
                hook.PodSandboxHookRequest,
                lambda request, stage=stage: self._answers.pod(stage, request),
            )
            for stage in POD_STAGES
        } | {
            stage: (
                hook.ContainerResourceHookRequest,
                lambda request, stage=stage: self._answers.container(stage, request),
            )
            for stage in CONTAINER_STAGES
        }
        return {
            f"{stage}Hook": grpc.unary_unary_rpc_method_handler(
                _asynchronous(answer),
                request_deserializer=kind.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for stage, (kind, answer) in handlers.items()
        }


def _asynchronous(answer: Callable[[Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    """grpc.aio runs coroutines on the event loop, which owns the state; plain functions it would
    run in a thread."""

    async def handle(request: Any, context: Any) -> Any:
        return answer(request)

    return handle
