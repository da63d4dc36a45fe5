"""What the proxy itself asks dockerd: its cgroup driver, and containers with their configuration.

One connection per question, JSON answers. The same contract as `recovery.Recovery`: a known object
comes from the store, an unknown one from the engine into the store.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from runtime_proxy.checkpoint import Recorded
from runtime_proxy.docker import convert
from runtime_proxy.docker.http1 import Body, HttpFault, parse_response, response_framing, split_head
from runtime_proxy.model import Container, Pod
from runtime_proxy.recovery import container_with_record, records_with, with_record
from runtime_proxy.runtime import RuntimeAway
from runtime_proxy.store import Store

log = logging.getLogger(__name__)

# Of one question to dockerd. Chosen, as for a CRI runtime: it takes milliseconds, on an overloaded
# node seconds. Twice the value: a call about an unknown container waits longer for a dockerd that
# hangs.
_TIMEOUT_S = 10.0
# Chosen: the list of containers has some KB for each, so thousands fit, and the shipped unit has
# memory for it. Twice the value: a runaway answer takes a third of that memory before it is
# refused.
_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class _EngineError(RuntimeAway):
    """dockerd answered, with an HTTP error."""


class Engine:
    def __init__(
        self,
        socket: str,
        store: Store,
        recorded: Recorded,
        reread: Callable[[], Recorded] = Recorded,
    ) -> None:
        """reread: the journal as it is by now, with what a predecessor added to it."""
        self._socket = socket
        self._store = store
        self._recorded = recorded
        self._reread = reread
        self._driver: str | None = None
        self.done = False

    async def driver(self) -> str:
        """`systemd` or `cgroupfs`, asked once. Raises RuntimeAway."""
        if self._driver is None:
            self._driver = convert.text(convert.table(await self._get("/info")).get("CgroupDriver"))
        return self._driver

    async def rebuild(self) -> None:
        """Every Kubernetes container that the engine lists, sandboxes first. Raises RuntimeAway."""
        births = self._store.births
        identifiers = await self._list()
        for identifier in identifiers:
            try:
                await self._adopt(identifier)
            except _EngineError as error:
                # One that dockerd itself cannot inspect must not keep the others unknown.
                log.warning("no status", extra={"id": identifier, "reason": str(error)})
        self._store.sweep(pods=identifiers, containers=identifiers, births=births)
        self._store.disown(self._recorded.identifiers - identifiers)
        self.done = True
        pods, containers = self._store.sizes
        log.info("recovered", extra={"pods": pods, "containers": containers})

    async def sweep(self) -> tuple[list[Pod], list[Container]]:
        """Drop what the engine no longer lists; what that was. Raises RuntimeAway."""
        births = self._store.births
        listed = await self._list()
        return self._store.sweep(pods=listed, containers=listed, births=births)

    async def pod(self, identifier: str) -> Pod | None:
        known = self._store.pod(identifier)
        if known is None and identifier:
            await self._adopt(identifier)
            known = self._store.pod(identifier)
        return known

    async def container(self, identifier: str) -> Container | None:
        known = self._store.container(identifier)
        if known is None and identifier:
            await self._adopt(identifier)
            known = self._store.container(identifier)
        return known

    async def resolve(self, reference: str) -> str:
        """The full id behind a name or a prefix of an id; the reference itself if unknown."""
        if self._store.pod(reference) is not None or self._store.container(reference) is not None:
            return reference
        return await self._adopt(reference) or reference

    async def _list(self) -> set[str]:
        listed = await self._get("/containers/json?all=1")
        found = set()
        for entry in listed if isinstance(listed, list) else ():
            entry = convert.table(entry)
            names = entry.get("Names")
            if isinstance(names, list) and any(
                convert.parse_name(name) for name in convert.names(names)
            ):
                found.add(convert.text(entry.get("Id")))
        return found

    async def _adopt(self, reference: str) -> str | None:
        """Look one container up and store it; its full id, or None if it is not Kubernetes'."""
        details = convert.table(await self._get(f"/containers/{reference}/json"))
        identifier = convert.text(details.get("Id"))
        name = convert.parse_name(convert.text(details.get("Name")))
        if name is None or not identifier:
            return None
        config = convert.table(details.get("Config"))
        host = convert.table(details.get("HostConfig"))
        driver = await self.driver()
        if convert.is_sandbox(config):
            if self._store.pod(identifier) is None:
                pod = convert.read_pod(identifier, name, config, host, driver)
                records = self._records_with(identifier)
                self._store.put_pod(with_record(pod, records.pods.get(identifier)))
        elif self._store.container(identifier) is None:
            container = convert.read_container(identifier, name, config, host, driver)
            records = self._records_with(identifier)
            self._store.put_container(
                container_with_record(container, records.containers.get(identifier))
            )
        return identifier

    def _records_with(self, identifier: str) -> Recorded:
        return records_with(identifier, self._recorded, self._reread, recovered=self.done)

    async def _get(self, target: str) -> Any:
        """The JSON answer, None where the engine knows no such thing. Raises RuntimeAway."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, body = await self._fetch(target)
        except TimeoutError as error:
            raise RuntimeAway(f"{target}: no answer within {_TIMEOUT_S:g} s") from error
        except (OSError, HttpFault) as error:
            raise RuntimeAway(f"{target}: {error}") from error
        if status == 404:
            return None
        if status != 200:
            raise _EngineError(f"{target}: HTTP {status}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RuntimeAway(f"{target}: not JSON: {error}") from error

    async def _fetch(self, target: str) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(
                f"GET {target} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n\r\n".encode()
            )
            buffer = b""
            parted = None
            while parted is None:
                part = await reader.read(1 << 16)
                if not part:
                    raise HttpFault("connection closed before an answer")
                buffer += part
                parted = split_head(buffer)
            head = parse_response(parted[0])
            body = Body(response_framing(head, b"GET"), keep=_MAX_ANSWER_BYTES)
            body.feed(parted[1])
            while not body.done and (part := await reader.read(1 << 16)):
                body.feed(part)
            if body.overflowed:
                raise HttpFault(f"answer above {_MAX_ANSWER_BYTES} octets")
            return head.status, bytes(body.content)
        finally:
            writer.close()
