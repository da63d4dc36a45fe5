"""Asks hooks about dockerd's create, start, stop, update and delete of Kubernetes' containers.

Where upstream's proxy behaves differently (docs/facts/runtime-proxy.md, "Docker"): zeros and empty
parents in answers do not overwrite what kubelet asked for; names with a retry suffix and containers
that are not Kubernetes' pass; a request for an unknown id goes to dockerd.
"""

import logging
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from runtime_proxy import merge
from runtime_proxy.docker import convert
from runtime_proxy.docker.engine import Engine
from runtime_proxy.docker.http1 import HttpFault, RequestHead
from runtime_proxy.hooks import Budget, Hooks, Refused
from runtime_proxy.model import Container, Pod
from runtime_proxy.runtime import RuntimeAway
from runtime_proxy.stages import Stage

log = logging.getLogger(__name__)

_PATH = re.compile(
    r"/(?:v[0-9.]+/)?containers/(?:(?P<create>create)|(?P<id>[A-Za-z0-9][A-Za-z0-9_.-]*)"
    r"(?:/(?P<action>start|stop|update))?)"
)


@dataclass(frozen=True, slots=True)
class Release:
    """Send the request on, with another body if one is given."""

    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Answer HTTP 500 with this text."""

    text: str


Verdict = Release | Refusal


@dataclass(frozen=True, slots=True)
class Route:
    """The action of a request, and the container that it names (or the name of a new one)."""

    action: str
    reference: str


def route(head: RequestHead) -> Route | None:
    """Return what hooks are asked about; None for other requests."""
    try:
        target = urlsplit(head.target.decode("ascii"))
    except (UnicodeDecodeError, ValueError):
        return None
    match = _PATH.fullmatch(unquote(target.path))
    if match is None:
        return None
    if match["create"]:
        if head.method != b"POST":
            return None
        name = parse_qs(target.query).get("name", [""])[0]
        return Route("create", name) if convert.parse_name(name) is not None else None
    if match["action"]:
        return Route(match["action"], match["id"]) if head.method == b"POST" else None
    return Route("delete", match["id"]) if head.method == b"DELETE" else None


class DockerHooks:
    def __init__(self, hooks: Hooks, engine: Engine) -> None:
        self.hooks = hooks
        self.engine = engine

    def wants(self, head: RequestHead) -> bool:
        return route(head) is not None

    def open(self, head: RequestHead, body: bytes) -> "DockerCall":
        found = route(head)
        if found is None:
            raise HttpFault("a request was held that is not for hooks")
        return _CALLS[found.action](self, found.reference, body)


class DockerCall:
    """One held request; `decide` comes first, then `answered` once dockerd has."""

    def __init__(self, owner: DockerHooks, reference: str, body: bytes) -> None:
        self.hooks = owner.hooks
        self.engine = owner.engine
        self.reference = reference
        self.body = body
        self.budget = Budget(None)

    async def decide(self) -> Verdict:
        try:
            return await self.ask()
        except Refused as refused:
            return Refusal(str(refused))
        except RuntimeAway:
            self.hooks.skipped.runtime_away += 1
        except Exception:
            # A fault of ours must not cost a pod: the request goes on as kubelet made it.
            self.hooks.skipped.fault += 1
            log.exception("hooks skipped")
        return Release()

    async def ask(self) -> Verdict:
        return Release()

    def answered(self, status: int, body: bytes) -> None:
        """Note dockerd's answer. Status 304 says that the container was in that state already."""
        if status in (200, 201, 204, 304):
            self.succeeded(body)

    def succeeded(self, body: bytes) -> None:
        """dockerd has done it."""

    def _document(self) -> dict[str, Any] | None:
        try:
            document = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            document = None
        if not isinstance(document, dict):
            self.hooks.skipped.unreadable += 1
            return None
        return document


class _Create(DockerCall):
    pod: Pod | None = None
    container: Container | None = None

    async def ask(self) -> Verdict:
        document = self._document()
        name = convert.parse_name(self.reference)
        if document is None or name is None:
            return Release()
        host = document.get("HostConfig")
        if not isinstance(host, dict):
            host = document["HostConfig"] = {}
        driver = await self.engine.driver()
        if convert.is_sandbox(document):
            self.pod = convert.read_pod("", name, document, host, driver)
            changed = await self._ask_for_sandbox(self.pod, host, driver)
        else:
            self.container = convert.read_container("", name, document, host, driver)
            changed = await self._ask_for_container(self.container, document, host, driver)
        return Release(msgspec.json.encode(document) if changed else None)

    async def _ask_for_sandbox(self, pod: Pod, host: dict[str, Any], driver: str) -> bool:
        if self.hooks.skips(pod):
            return False
        after = await self.hooks.ask_about_pod(
            Stage.PRE_RUN_POD_SANDBOX, pod, self.budget, merge.answered_docker_pod
        )
        self.pod = msgspec.structs.replace(after, changes=merge.pod_changes(pod, after))
        changed = _patch_parent(host, pod.cgroup_parent, after.cgroup_parent, driver)
        return _patch_resources(host, pod, after) or changed

    async def _ask_for_container(
        self, container: Container, document: dict[str, Any], host: dict[str, Any], driver: str
    ) -> bool:
        pod = await self.engine.pod(container.pod_id)
        if pod is None:
            self.hooks.skipped.unknown_object += 1
            return False
        before = msgspec.structs.replace(
            container, cgroup_parent=pod.changes.cgroup_parent or container.cgroup_parent
        )
        after = before
        if not self.hooks.skips(pod):
            after = await self.hooks.ask_about_container(
                Stage.PRE_CREATE_CONTAINER, before, pod, self.budget
            )
        self.container = after
        changed = _patch_parent(host, container.cgroup_parent, after.cgroup_parent, driver)
        changed = _patch_resources(host, before, after) or changed
        if after.envs != before.envs:
            document["Env"] = convert.merge_env(document.get("Env"), before.envs, after.envs)
            changed = True
        return changed

    def succeeded(self, body: bytes) -> None:
        try:
            identifier = convert.text(convert.table(msgspec.json.decode(body)).get("Id"))
        except msgspec.DecodeError:
            return
        if not identifier:
            return
        if self.pod is not None:
            self.hooks.store.put_pod(msgspec.structs.replace(self.pod, id=identifier))
        elif self.container is not None:
            self.hooks.store.put_container(msgspec.structs.replace(self.container, id=identifier))


def _patch_parent(host: dict[str, Any], before: str, after: str, driver: str) -> bool:
    if after == before:
        return False
    host["CgroupParent"] = convert.write_parent(after, driver)
    return True


def _patch_resources(host: dict[str, Any], before: Pod | Container, after: Pod | Container) -> bool:
    if before.resources is None or after.resources is None:
        return False
    return convert.patch_resources(host, before.resources, after.resources, convert.CREATABLE)


class _OfContainer(DockerCall):
    """A call about one container, found by id, name or prefix."""

    identifier = ""
    known: Container | None = None
    updated: Container | None = None

    async def find(self) -> tuple[Container, Pod] | None:
        self.identifier = await self.engine.resolve(self.reference)
        container = self.hooks.store.container(self.identifier)
        if container is None:
            return None
        pod = await self.engine.pod(container.pod_id)
        if pod is None:
            self.hooks.skipped.unknown_object += 1
            return None
        return None if self.hooks.skips(pod) else (container, pod)


class _Start(_OfContainer):
    async def ask(self) -> Verdict:
        found = await self.find()
        if found is not None:
            self.known, pod = found
            self.updated = await self.hooks.ask_about_container(
                Stage.PRE_START_CONTAINER, self.known, pod, self.budget
            )
        return Release()

    def succeeded(self, body: bytes) -> None:
        self.hooks.remember(self.known, self.updated)
        container = self.hooks.store.container(self.identifier)
        if container is not None:
            # A container that is started again can stop again, and each stop is reported.
            self.hooks.store.put_container(msgspec.structs.replace(container, stopped=False))
            self.hooks.in_background(
                container.pod_id,
                self.hooks.tell_of_container(Stage.POST_START_CONTAINER, container),
            )


class _Stop(_OfContainer):
    async def ask(self) -> Verdict:
        self.identifier = await self.engine.resolve(self.reference)
        return Release()

    def succeeded(self, body: bytes) -> None:
        if self.hooks.store.pod(self.identifier) is not None:
            self.hooks.sandbox_exited(self.identifier)
        else:
            self.hooks.container_exited(self.identifier)


class _Delete(_Stop):
    def succeeded(self, body: bytes) -> None:
        super().succeeded(body)
        self.hooks.store.drop_pod(self.identifier)
        self.hooks.store.drop_container(self.identifier)


class _Update(_OfContainer):
    async def ask(self) -> Verdict:
        document = self._document()
        found = await self.find()
        if document is None or found is None:
            return Release()
        self.known, pod = found
        before = msgspec.structs.replace(
            self.known,
            resources=merge.rule_u(self.known.resources, convert.read_resources(document)),
        )
        after = await self.hooks.ask_about_container(
            Stage.PRE_UPDATE_CONTAINER_RESOURCES, before, pod, self.budget
        )
        self.updated = after
        if before.resources is None or after.resources is None:
            return Release()
        changed = convert.patch_resources(
            document, before.resources, after.resources, convert.UPDATABLE
        )
        return Release(msgspec.json.encode(document) if changed else None)

    def succeeded(self, body: bytes) -> None:
        self.hooks.remember(self.known, self.updated)


_CALLS: dict[str, type[DockerCall]] = {
    "create": _Create,
    "start": _Start,
    "stop": _Stop,
    "delete": _Delete,
    "update": _Update,
}
