"""Asks the runtime for sandboxes and containers, with what hooks need of them.

containerd's verbose status has the original configuration as JSON (docs/facts/runtime-proxy.md,
"What a runtime gives back"). From a runtime without it, some fields stay empty, and the journal
fills them.
"""

import base64
import binascii
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy.channel import Channel, RpcError
from runtime_proxy.http2.grpc import Code
from runtime_proxy.model import SCALAR_FIELDS, Container, Pod, Resources, read_meta, read_resources
from runtime_proxy.stages import CRI_PACKAGES

log = logging.getLogger(__name__)

# Until a new connection answers a ping. Chosen: a runtime that serves answers in milliseconds.
# Twice the value: a call about an unknown object waits longer for a runtime that accepts and hangs.
_CONNECT_TIMEOUT_S = 2.0
# Of one list or status. Chosen: they take milliseconds, on an overloaded node seconds. Twice the
# value: a comparison, and a call about an unknown object, wait longer for a runtime that hangs.
_CALL_TIMEOUT_S = 10.0
# Chosen: above every list that a runtime sends (containerd's default limit of a message is 16 MiB),
# because an incomplete list is of no use. Memory is taken as an answer arrives. Twice the value: a
# runtime's runaway answer exceeds the memory limit of the shipped unit before it is refused.
_MAX_ANSWER_BYTES = 256 * 1024 * 1024

_Answer = TypeVar("_Answer", bound=Message)


class RuntimeAway(Exception):
    """The runtime did not answer; the text says why."""


class Runtime:
    """A client of the runtime's CRI socket, speaking v1 or, where that is unknown, v1alpha2."""

    def __init__(self, socket: str) -> None:
        self._channel = Channel(socket, max_message_bytes=_MAX_ANSWER_BYTES)
        self._package = CRI_PACKAGES[0]
        self.version: cri.VersionResponse | None = None

    def close(self) -> None:
        self._channel.close()

    async def identify(self) -> cri.VersionResponse:
        """Ask which runtime this is, and settle on the CRI package that it speaks."""
        try:
            answer = await self._call("Version", cri.VersionRequest(), cri.VersionResponse)
        except RpcError as error:
            if error.status.code != Code.UNIMPLEMENTED:
                raise RuntimeAway(str(error)) from error
            self._package = CRI_PACKAGES[1]
            answer = await self._ask("Version", cri.VersionRequest(), cri.VersionResponse)
        self.version = answer
        return answer

    async def pods(self) -> list[cri.PodSandbox]:
        answer = await self._ask(
            "ListPodSandbox", cri.ListPodSandboxRequest(), cri.ListPodSandboxResponse
        )
        return list(answer.items)

    async def containers(self) -> list[cri.Container]:
        answer = await self._ask(
            "ListContainers", cri.ListContainersRequest(), cri.ListContainersResponse
        )
        return list(answer.containers)

    async def pod(self, identifier: str) -> Pod | None:
        """A sandbox by its id (or a prefix that the runtime takes for one); None if unknown."""
        request = cri.PodSandboxStatusRequest(pod_sandbox_id=identifier, verbose=True)
        try:
            answer = await self._call("PodSandboxStatus", request, cri.PodSandboxStatusResponse)
        except RpcError as error:
            _report_no_status(error, identifier)
            return None
        return read_pod_status(answer)

    async def container(self, identifier: str) -> Container | None:
        """A container by its id or prefix; None if unknown."""
        listed = await self._ask(
            "ListContainers",
            cri.ListContainersRequest(filter=cri.ContainerFilter(id=identifier)),
            cri.ListContainersResponse,
        )
        if len(listed.containers) != 1:
            return None
        return await self.listed_container(listed.containers[0])

    async def listed_container(self, listed: cri.Container) -> Container | None:
        request = cri.ContainerStatusRequest(container_id=listed.id, verbose=True)
        try:
            answer = await self._call("ContainerStatus", request, cri.ContainerStatusResponse)
        except RpcError as error:
            _report_no_status(error, listed.id)
            return None
        return read_container_status(listed, answer)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[cri.ContainerEventResponse]]:
        """Subscribe to the runtime's events, and yield them as they come.

        The subscription is sent before the context is entered, and events wait until they are
        read. Raises RuntimeAway, also where the events end with an error.
        """
        try:
            await self._channel.connect(_CONNECT_TIMEOUT_S)
            method = f"/{self._package}.RuntimeService/GetContainerEvents".encode()
            with self._channel.messages(method, b"") as bodies:
                yield (cri.ContainerEventResponse.FromString(body) async for body in bodies)
        except (RpcError, DecodeError) as error:
            raise RuntimeAway(str(error)) from error

    async def _ask(self, method: str, request: Message, kind: type[_Answer]) -> _Answer:
        """A call of which every failure means "no answer"."""
        try:
            return await self._call(method, request, kind)
        except RpcError as error:
            raise RuntimeAway(f"{method}: {error}") from error

    async def _call(self, method: str, request: Message, kind: type[_Answer]) -> _Answer:
        """Raises RpcError with the runtime's status, RuntimeAway if there was none in time."""
        await self._channel.connect(_CONNECT_TIMEOUT_S)
        path = f"/{self._package}.RuntimeService/{method}".encode()
        try:
            body = await self._channel.unary(
                path, request.SerializeToString(), timeout_s=_CALL_TIMEOUT_S
            )
            return kind.FromString(body)
        except TimeoutError as error:
            raise RuntimeAway(f"{method}: no answer within {_CALL_TIMEOUT_S:g} s") from error
        except DecodeError as error:
            raise RuntimeAway(f"{method}: unreadable answer") from error


def _report_no_status(error: RpcError, identifier: str) -> None:
    """Log why an object has no status: it is left out, and harms no other object.

    Raises RuntimeAway where the error is not the object's.
    """
    if error.status.code in (Code.UNAVAILABLE, Code.CANCELLED, Code.DEADLINE_EXCEEDED):
        raise RuntimeAway(str(error)) from error
    if error.status.code != Code.NOT_FOUND:
        log.warning("no status", extra={"id": identifier, "reason": str(error)})


def read_pod_status(answer: cri.PodSandboxStatusResponse) -> Pod:
    status = answer.status
    config = _config(answer.info)
    linux = _table(config.get("linux"))
    return Pod(
        id=status.id,
        meta=read_meta(status.metadata),
        runtime_handler=status.runtime_handler,
        labels=dict(status.labels),
        annotations=dict(status.annotations),
        cgroup_parent=_text(linux.get("cgroup_parent")),
        overhead=_resources(linux.get("overhead")),
        resources=_resources(linux.get("resources")),
        stopped=status.state == cri.SANDBOX_NOTREADY,
    )


def read_container_status(listed: cri.Container, answer: cri.ContainerStatusResponse) -> Container:
    status = answer.status
    info = _info(answer.info)
    config = _table(info.get("config"))
    created = _resources(_table(config.get("linux")).get("resources"))
    current = (
        read_resources(status.resources.linux)
        if status.HasField("resources") and status.resources.HasField("linux")
        else None
    )
    return Container(
        id=status.id or listed.id,
        pod_id=listed.pod_sandbox_id,
        name=status.metadata.name,
        attempt=status.metadata.attempt,
        annotations=dict(status.annotations),
        resources=_current_over_created(current, created),
        envs=_envs(config, info),
        stopped=status.state == cri.CONTAINER_EXITED,
    )


def _current_over_created(current: Resources | None, created: Resources | None) -> Resources | None:
    """Merge the resources of the status over those that the container was created with."""
    if current is None or created is None:
        return current or created
    return msgspec.structs.replace(
        current,
        **{
            name: getattr(current, name) or getattr(created, name)
            for name in (*SCALAR_FIELDS, "hugepage_limits")
        },
        unified={**created.unified, **current.unified},
    )


def _info(info: Mapping[str, str]) -> dict[str, Any]:
    try:
        return _table(json.loads(info.get("info", "{}")))
    except (ValueError, RecursionError):
        return {}


def _config(info: Mapping[str, str]) -> dict[str, Any]:
    return _table(_info(info).get("config"))


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int:
    # protojson writes 64 bit numbers as text, encoding/json as numbers.
    if isinstance(value, str) and value.lstrip("-").isascii() and value.lstrip("-").isdigit():
        return int(value)
    return value if isinstance(value, int) else 0


def _resources(value: object) -> Resources | None:
    if not isinstance(value, dict):
        return None
    pages = value.get("hugepage_limits")
    return Resources(
        cpu_period=_number(value.get("cpu_period")),
        cpu_quota=_number(value.get("cpu_quota")),
        cpu_shares=_number(value.get("cpu_shares")),
        memory_limit_in_bytes=_number(value.get("memory_limit_in_bytes")),
        oom_score_adj=_number(value.get("oom_score_adj")),
        cpuset_cpus=_text(value.get("cpuset_cpus")),
        cpuset_mems=_text(value.get("cpuset_mems")),
        hugepage_limits=tuple(
            (_text(page.get("page_size")), _number(page.get("limit")))
            for page in (pages if isinstance(pages, list) else ())
            if isinstance(page, dict)
        ),
        unified={k: v for k, v in _table(value.get("unified")).items() if isinstance(v, str)},
        memory_swap_limit_in_bytes=_number(value.get("memory_swap_limit_in_bytes")),
    )


def _envs(config: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, str]:
    """The configured environment. Some runtimes' JSON has the values in base64, most as text.

    The process's environment is always text, so it shows which of the two a value is. A value that
    is neither cannot be sent to a hook and is left out.
    """
    process = _table(_table(info.get("runtimeSpec")).get("process")).get("env")
    actual = {e for e in process if isinstance(e, str)} if isinstance(process, list) else set()
    envs: dict[str, str] = {}
    configured = config.get("envs")
    for entry in configured if isinstance(configured, list) else ():
        key, value = _text(_table(entry).get("key")), _text(_table(entry).get("value"))
        if not key:
            continue
        if f"{key}={value}" in actual or not actual:
            envs[key] = value
            continue
        try:
            decoded = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            continue
        if f"{key}={decoded}" in actual:
            envs[key] = decoded
    return envs
