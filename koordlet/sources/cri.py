"""The runtime's own lists over CRI: which sandboxes and containers exist, and where.

Works where NRI is off or too old, and beside NRI as a second source. Lists are cheap. Cgroup paths
are only in the verbose status, which is requested once for each id. gRPC is imported only here, so
a daemon without CRI does not load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import grpc
import msgspec

from hooks.observed import Container, ContainerState, Sandbox
from hooks.places import place_of
from hooks.requested import requested_of
from hooks.subject import NOTHING_REQUESTED, ContainerSubject, Requested, SandboxSubject, make_pod
from koordlet.configuration.config import Cri
from koordlet.sources.polling import SourceError
from linux import cgroup_paths
from linux.cgroup_paths import PathError
from protos.cri.v1 import api_pb2, api_pb2_grpc

_MAX_MESSAGE: Final = 64 << 20
"""Bytes of one response. Chosen: gRPC's default of 4 MiB is too small for the lists of a node with
large annotations; this is many times such a list. Twice the value allows twice the memory."""
_CONTAINER_NAME: Final = "io.kubernetes.container.name"
_MAX_INFO: Final = 4 << 20
"""Bytes of one verbose status that are parsed. Chosen: many times a container's specification."""
_MOST_SILENT: Final = 3
"""Requests about single ids that may time out in one fetch; the rest follows in the next fetch.
Chosen: with the default time-out of 5 s a fetch takes at most 15 s longer. Twice the value doubles
that."""


class _Cpu(msgspec.Struct):
    shares: int | None = None
    quota: int | None = None
    period: int | None = None
    cpus: str = ""
    mems: str = ""


class _Memory(msgspec.Struct):
    limit: int | None = None


class _Resources(msgspec.Struct):
    cpu: _Cpu = msgspec.field(default_factory=_Cpu)
    memory: _Memory = msgspec.field(default_factory=_Memory)


class _Linux(msgspec.Struct, rename="camel"):
    cgroups_path: str = ""
    resources: _Resources = msgspec.field(default_factory=_Resources)


class _Process(msgspec.Struct, rename="camel"):
    oom_score_adj: int | None = None


class _Spec(msgspec.Struct):
    linux: _Linux = msgspec.field(default_factory=_Linux)
    process: _Process = msgspec.field(default_factory=_Process)


class _SandboxLinux(msgspec.Struct):
    cgroup_parent: str = ""


class _SandboxConfig(msgspec.Struct):
    linux: _SandboxLinux = msgspec.field(default_factory=_SandboxLinux)


class _Info(msgspec.Struct, rename="camel"):
    """The part of the verbose status' JSON that is read; containerd and CRI-O use these names."""

    pid: int = 0
    config: _SandboxConfig | None = None
    runtime_spec: _Spec | None = None


_decode_info: Final = msgspec.json.Decoder(_Info).decode

_GONE: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""The errors of a runtime that does not answer at all, as opposed to an error about one id."""

_UNKNOWN: Final = _Info()
"""For an id whose status could not be read."""

RuntimeList = tuple[tuple[Sandbox, ...], tuple[Container, ...]]


def runtime_channel(socket: str) -> grpc.Channel:
    """Return a channel to the runtime; it connects with the first call."""
    return grpc.insecure_channel(
        f"unix://{socket}",
        options=[
            ("grpc.max_receive_message_length", _MAX_MESSAGE),
            ("grpc.enable_http_proxy", 0),
        ],
    )


class CriClient:
    """Lists the runtime's sandboxes and containers. Used by one worker thread at a time."""

    def __init__(self, config: Cri, unreadable: Callable[[str, str], None]) -> None:
        """unreadable: called with (object, problem) for a listed id whose status is refused."""
        self._config = config
        self._unreadable = unreadable
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self._sandbox_info: dict[str, _Info] = {}
        self._container_info: dict[str, _Info] = {}
        self._refused: frozenset[str] = frozenset()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def fetch(self) -> RuntimeList:
        """Return all ready sandboxes and all created or running containers; raises SourceError."""
        try:
            return self._fetch()
        except grpc.RpcError as error:
            self.close()
            code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
            detail = error.details() if isinstance(error, grpc.Call) else str(error)
            raise SourceError(
                f"CRI at {self._config.socket}: {code}: {detail}; is cri.socket right?"
            ) from error

    def _fetch(self) -> RuntimeList:
        stub = self._connect()
        wait = float(self._config.timeout)
        sandboxes = stub.ListPodSandbox(api_pb2.ListPodSandboxRequest(), timeout=wait).items
        containers = stub.ListContainers(api_pb2.ListContainersRequest(), timeout=wait).containers
        ready = [one for one in sandboxes if one.state == api_pb2.SANDBOX_READY]
        live = [
            one
            for one in containers
            if one.state in (api_pb2.CONTAINER_CREATED, api_pb2.CONTAINER_RUNNING)
        ]
        self._learn(ready, live, wait)
        by_id = {one.id: self._sandbox(one) for one in ready}
        return tuple(by_id.values()), tuple(
            self._container(one, by_id[one.pod_sandbox_id])
            for one in live
            if one.pod_sandbox_id in by_id
        )

    def _connect(self) -> Any:
        if self._channel is None:
            self._channel = runtime_channel(self._config.socket)
            self._stub = api_pb2_grpc.RuntimeServiceStub(self._channel)
        return self._stub

    def _learn(self, sandboxes: Iterable[Any], containers: Sequence[Any], wait: float) -> None:
        """Request the status of new ids, and forget ids that are gone.

        The runtime may have to query a sandbox's shim. A shim that hangs must not delay the others
        for long.
        """
        sandbox_info: dict[str, _Info] = {}
        container_info: dict[str, _Info] = {}
        new: list[tuple[Any, dict[str, _Info], Any, Any]] = []
        for one in sandboxes:
            if (known := self._sandbox_info.get(one.id)) is not None:
                sandbox_info[one.id] = known
            else:
                status = api_pb2.PodSandboxStatusRequest(pod_sandbox_id=one.id, verbose=True)
                new.append((one, sandbox_info, self._stub.PodSandboxStatus, status))
        for one in containers:
            known = self._container_info.get(one.id)
            # A created container has no process yet: its status is requested again once it runs.
            if known is not None and (known.pid or one.state == api_pb2.CONTAINER_CREATED):
                container_info[one.id] = known
            else:
                request = api_pb2.ContainerStatusRequest(container_id=one.id, verbose=True)
                new.append((one, container_info, self._stub.ContainerStatus, request))
        self._sandbox_info, self._container_info = sandbox_info, container_info
        # Ids whose status was refused last time come last, so that all others have their turn.
        new.sort(key=lambda each: each[0].id in self._refused)
        refused: set[str] = set()
        silent = 0
        for one, found, method, request in new:
            if silent >= _MOST_SILENT:
                break
            try:
                found[one.id] = self._status(method, request, wait)
            except grpc.RpcError as error:
                if not isinstance(error, grpc.Call) or error.code() in _GONE:
                    raise
                refused.add(one.id)
                silent += error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                self._unreadable(
                    f"CRI {one.metadata.name} {one.id}",
                    f"its status cannot be read: {error.code().name}: {error.details()}; tried"
                    " again with the next list; until then its cgroup comes from other sources",
                )
        self._refused = frozenset(refused)

    def _status(self, method: Any, request: Any, wait: float) -> _Info:
        try:
            info = method(request, timeout=wait).info.get("info", "")
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND:
                return _Info()  # it ended between the list and this request
            raise
        if len(info) > _MAX_INFO:
            return _Info()
        try:
            return _decode_info(info) if info else _Info()
        except (msgspec.DecodeError, RecursionError):
            return _Info()

    def _sandbox(self, one: Any) -> Sandbox:
        info = self._sandbox_info.get(one.id, _UNKNOWN)
        parent = info.config.linux.cgroup_parent if info.config else ""
        own = _directory(info.runtime_spec.linux.cgroups_path if info.runtime_spec else "")
        cgroup, kube_qos = place_of(parent or cgroup_paths.parent_of(own))
        pod = make_pod(
            namespace=one.metadata.namespace,
            name=one.metadata.name,
            uid=one.metadata.uid,
            labels=dict(one.labels),
            annotations=dict(one.annotations),
            kube_qos=kube_qos,
            cgroup=cgroup,
            runtime_handler=one.runtime_handler,
        )
        # A ready sandbox runs, even if the runtime shows no process for it.
        return Sandbox(SandboxSubject(pod=pod, id=one.id, cgroup=own), pid=info.pid or 1)

    def _container(self, one: Any, sandbox: Sandbox) -> Container:
        info = self._container_info.get(one.id, _UNKNOWN)
        spec = info.runtime_spec
        running = one.state == api_pb2.CONTAINER_RUNNING
        return Container(
            subject=ContainerSubject(
                pod=sandbox.subject.pod,
                name=one.metadata.name or one.labels.get(_CONTAINER_NAME, ""),
                id=one.id,
                cgroup=_directory(spec.linux.cgroups_path if spec else ""),
            ),
            sandbox_id=one.pod_sandbox_id,
            current=_values(spec) if spec else NOTHING_REQUESTED,
            state=ContainerState.RUNNING if running else ContainerState.CREATED,
            pid=info.pid,
        )


def _directory(cgroups_path: str) -> str:
    try:
        return cgroup_paths.of_runtime_path(cgroups_path) if cgroups_path else ""
    except PathError:
        return ""


def _values(spec: _Spec) -> Requested:
    cpu = spec.linux.resources.cpu
    return requested_of(
        shares=cpu.shares,
        quota_us=cpu.quota,
        period_us=cpu.period,
        limit_bytes=spec.linux.resources.memory.limit,
        cpus=cpu.cpus,
        mems=cpu.mems,
        oom_score_adj=spec.process.oom_score_adj,
    )
