"""The hook service, which koord-runtime-proxy calls before and after CRI calls.

`runtime.v1alpha1.RuntimeHookService` over gRPC on a Unix socket: docs/facts/runtime-proxy.md. An
answer repeats the request and adds what the engine decided, because a proxy takes omitted fields as
empty. Answers are made from memory; the reconciler writes files, and is triggered.

While NRI protects new containers, answers only repeat the request: the runtime calls its NRI
plugins after the proxy, and a quota must not be divided twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import DecodeError

from apis.cpuset import CpuSet
from hooks.decision import Decision
from hooks.engine import Engine
from hooks.places import directory_of, place_of
from hooks.requested import overlay, requested_of, value_in_request
from hooks.stage import Stage
from hooks.subject import NOTHING_REQUESTED, ContainerSubject, Pod, Requested, make_pod
from koordlet.configuration.config import CONTAINER_STAGES, POD_STAGES
from koordlet.configuration.config import HookService as Settings
from koordlet.decisions.decider import Decider
from koordlet.state import NodeState
from koordlet.state.proxy_requests import ProxyKey, without_delivered
from koordlet.state.requests_log import RequestsLog
from linux.cgroup_files import FILES, quota_in_period
from linux.cgroup_paths import Runtime
from linux.resources import Resource
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from service import unix
from service.events import Events, Severity
from service.files import replacing
from service.scheduling import keep_interpreter

SERVICE: Final = "runtime.v1alpha1.RuntimeHookService"
FILE: Final = "koordlet.json"
_MAX_MESSAGE_BYTES: Final = 16 << 20
"""Bytes of one request. kubelet's CRI messages have at most 16 MiB, and a hook's is made of one."""
_STOP_GRACE_S: Final = 1.0
"""How long calls in progress may take at the end: answers take milliseconds. Twice the value delays
an end only where a call hangs."""

_STAGES: Final = (
    "PreRunPodSandbox",
    "PreCreateContainer",
    "PreUpdateContainerResources",
    "PostStopContainer",
    "PostStopPodSandbox",
)
"""The registered stages: those whose answers matter, and those that report an end."""

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
_FIELDS: Final[Mapping[Resource, str]] = {
    Resource.CPU_SHARES: "cpu_shares",
    Resource.CPU_CFS_QUOTA: "cfs_quota_us",
    Resource.CPU_CFS_PERIOD: "cfs_period_us",
    Resource.MEMORY_LIMIT: "memory_limit_bytes",
    Resource.OOM_SCORE_ADJ: "oom_score_adj",
    Resource.CPUSET_CPUS: "cpus",
    Resource.CPUSET_MEMS: "mems",
}
"""The fields of `Requested`."""


class Surroundings(Protocol):
    """What the service needs of the daemon."""

    @property
    def engine(self) -> Engine: ...

    @property
    def nri_protects(self) -> bool:
        """Whether NRI decides about new containers, so that the proxy's calls must not."""
        ...

    def proxy_called(self, uid: str) -> None:
        """The proxy reported a change of this pod: fetch from the polled sources soon."""
        ...

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` on the event loop once the proxy has had the time to receive the reply."""
        ...

    def state_changed(self, reason: str) -> None:
        """The state changed: have a pass run after the reply."""
        ...

    def requested(self, cgroup: str) -> None:
        """Kubelet requests other values of a running container, which the state has already.

        Until the reconciler has them too, it leaves the container's files alone.
        """
        ...

    def our_quotas_us(self, cgroup: str) -> Collection[int]:
        """Return the newest quotas of koordlet's that a container had, in the group's period."""
        ...

    def superseded(self, container_id: str, resources: Collection[Resource]) -> None:
        """kubelet requested other values: earlier deliveries of these resources do not count."""
        ...


class Refused(Exception):
    """The call must fail: a policy could not claim, and the failure policy is Fail."""


class HookAnswers:
    """The answers, without gRPC around them."""

    def __init__(
        self,
        state: NodeState,
        decider: Decider,
        surroundings: Surroundings,
        requests: RequestsLog,
        *,
        failure_policy: str = "Ignore",
    ) -> None:
        """failure_policy: Fail or Ignore, what becomes of a call for which a policy failed."""
        self._fails = failure_policy == "Fail"
        self._state = state
        self._decider = decider
        self._daemon = surroundings
        self._requests = requests

    def pod(self, stage: str, request: hook.PodSandboxHookRequest) -> hook.PodSandboxHookResponse:
        """Repeat the request: a pod's own values are files, which the reconciler writes."""
        self._daemon.proxy_called(request.pod_meta.uid)
        if stage == "PostStopPodSandbox":
            for key in self._state.proxy_requests.of_pod(request.pod_meta.uid):
                self._forget(key)
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
        key = ProxyKey(
            request.pod_meta.uid, request.container_meta.name, request.container_meta.attempt
        )
        if stage == "PostStopContainer":
            self._forget(key)
        elif stage == "PreCreateContainer" and not self._daemon.nri_protects:
            requested = requested_values(request.container_resources)
            self._decide(key, request, requested, Stage.CREATE_CONTAINER, answer)
        elif stage == "PreUpdateContainerResources" and not self._daemon.nri_protects:
            requested = self._requested(key, request)
            _give_back(requested, answer.container_resources)
            changed = self._changed_resources(key, requested)
            self._decide(key, request, requested, Stage.UPDATE_CONTAINER, answer)
            self._daemon.superseded(request.container_meta.id, changed)
            # Without this, the reconciler would restore what kubelet requested before.
            container_id = request.container_meta.id
            cgroup = self._state.update_through_proxy(key.uid, key.name, container_id, requested)
            self._daemon.requested(cgroup)
            self._daemon.state_changed("update-container")
        return answer

    def _requested(self, key: ProxyKey, request: hook.ContainerResourceHookRequest) -> Requested:
        """Return what kubelet requests in an update.

        The proxy's message overlays kubelet's values on those in force, which may be delivered
        ones. So a value that equals the delivered one was not requested now.
        """
        reported = requested_values(request.container_resources)
        kept = self._state.proxy_requests.get(key)
        if kept is None:
            known = self._state.container_of(request.pod_meta.uid, request.container_meta.id)
            return reported if known is None else self._requested_of(known, reported)
        return without_delivered(reported, *kept)

    def _requested_of(self, known: ContainerSubject, reported: Requested) -> Requested:
        """Return what kubelet requests of a container whose creation no hook saw.

        The ratio may have changed since a value was delivered, and the journal has former quotas.
        """
        delivered = self._as_delivered(known, reported.cfs_period_us or 0)
        quota_us = reported.cfs_quota_us
        ours = quota_us == delivered.cfs_quota_us or quota_us in self._daemon.our_quotas_us(
            known.cgroup
        )
        kubelets = known.requested if ours else reported
        return msgspec.structs.replace(
            without_delivered(reported, known.requested, delivered),
            cfs_quota_us=kubelets.cfs_quota_us,
            cfs_period_us=kubelets.cfs_period_us,
        )

    def _as_delivered(self, known: ContainerSubject, period_us: int) -> Requested:
        """Return what would be delivered for a container whose creation no hook saw.

        The state knows what kubelet requested, and the same is delivered for it as ever. period_us:
        of the quotas that the proxy reports; 0 is the kernel's default.
        """
        answer = hook.ContainerResourceHookResponse()
        answer.container_resources.cpu_period = period_us
        carry(self._decider.decide(self._daemon.engine, known, Stage.UPDATE_CONTAINER), answer)
        return overlay(requested_values(answer.container_resources), known.requested)

    def _changed_resources(self, key: ProxyKey, requested: Requested) -> list[Resource]:
        kept = self._state.proxy_requests.get(key)
        before = NOTHING_REQUESTED if kept is None else kept[0]
        return [
            resource
            for resource in FILES
            if value_in_request(requested, resource) != value_in_request(before, resource)
        ]

    def _decide(
        self,
        key: ProxyKey,
        request: hook.ContainerResourceHookRequest,
        requested: Requested,
        stage: Stage,
        answer: hook.ContainerResourceHookResponse,
    ) -> None:
        subject = self._subject(request, requested)
        decision = self._decider.decide(self._daemon.engine, subject, stage)
        if decision.faults and self._fails:
            raise Refused(
                "; ".join(f"policy {each.policy}: {each.message}" for each in decision.faults)
            )
        carry(decision, answer)
        delivered = requested_values(answer.container_resources)
        self._state.proxy_requests.note(key, requested, delivered)
        # A kill right after the reply must not lose which values are ours.
        self._requests.keep(key.log_id, requested, hooked=True, delivered=delivered)
        self._daemon.later(self._requests.write)

    def _forget(self, key: ProxyKey) -> None:
        if self._state.proxy_requests.forget(key):
            self._requests.keep(key.log_id, NOTHING_REQUESTED, hooked=True)
            self._daemon.later(self._requests.write)

    def _subject(
        self, request: hook.ContainerResourceHookRequest, requested: Requested
    ) -> ContainerSubject:
        pod = self._state.pod(request.pod_meta.uid) or _pod(request)
        identifier = request.container_meta.id
        return ContainerSubject(
            pod=pod,
            name=request.container_meta.name,
            id=identifier,
            cgroup=directory_of("", pod.cgroup, identifier, Runtime.CONTAINERD),
            requested=requested,
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


def requested_values(resources: hook.LinuxContainerResources) -> Requested:
    """Return the message's resources as canonical values."""
    return requested_of(
        shares=resources.cpu_shares,
        quota_us=resources.cpu_quota,
        period_us=resources.cpu_period,
        limit_bytes=resources.memory_limit_in_bytes,
        cpus=resources.cpuset_cpus,
        mems=resources.cpuset_mems,
        oom_score_adj=resources.oom_score_adj or None,
    )


def _give_back(requested: Requested, answered: hook.LinuxContainerResources) -> None:
    """Put kubelet's values in place of delivered ones, of which some may be claimed no more.

    A number that kubelet never requested stays as it is: the protocol has no way to withdraw it.
    """
    reported = requested_values(answered)
    for resource, name in {**_NUMBERS, **_SETS}.items():
        field = _FIELDS[resource]
        value = getattr(requested, field)
        if value != getattr(reported, field) and (value is not None or resource in _SETS):
            setattr(answered, name, str(value or "") if resource in _SETS else value)


def carry(decision: Decision, answer: hook.ContainerResourceHookResponse) -> None:
    """Put a decision into an answer, except values for which the protocol has no field."""
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
    """Return the content of the registration file: tab-indented JSON, as upstream writes it."""
    stages = [stage for stage in _STAGES if stage not in settings.disabled_stages]
    document = {
        "remote-endpoint": settings.host_endpoint,
        "failure-policy": settings.failure_policy,
        "runtime-hooks": stages,
    }
    return json.dumps(document, indent="\t").encode() + b"\n"


class HookServer:
    """The socket and the registration file.

    `start` writes the file last and `stop` removes it first, so that it never names a socket that
    is not served.
    """

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
        """Serve the socket, then register. Raises OSError if the socket cannot be served."""
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
        """Write the registration file as a whole, unless it was written; a failure is an event."""
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
                _asynchronous(kind, answer),
                response_serializer=lambda message: message.SerializeToString(),
            )
            for stage, (kind, answer) in handlers.items()
        }


def _asynchronous(
    kind: Any, answer: Callable[[Any], Any]
) -> Callable[[bytes, Any], Awaitable[Any]]:
    """Return a coroutine function that parses a message of this kind and answers it.

    grpc.aio runs plain functions in a thread, and the event loop owns the state. It would log a
    message that cannot be parsed with a traceback.
    """

    async def handle(request: bytes, context: Any) -> Any:
        try:
            with keep_interpreter():
                return answer(kind.FromString(request))
        except Refused as refused:
            await context.abort(grpc.StatusCode.UNKNOWN, str(refused))
        except DecodeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return handle
