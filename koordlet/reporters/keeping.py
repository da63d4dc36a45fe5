"""Keeps an object of this node as the machine is: NodeResourceTopology and Device.

The facts are gathered at a short interval. The API server is asked only when they have changed,
when one of the node's objects has changed, and now and then for changes that no event shows; it is
written to only where the object differs. So an idle node writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final, Protocol

import msgspec

from apis.errors import InputError, InputErrors
from koordlet.reporters.files import write_manifest
from koordlet.reporters.stored import Plain, StoredObject
from koordlet.sources.polling import SourceError
from kube.client import ApiError, Client, Unreachable
from kube.resources import NODES, Resource
from service.events import Events, Severity

_LOG = logging.getLogger("koordlet.reporters")

_RESYNC_S: Final = 300.0
"""How often the object is read although nothing is known to have changed. Chosen: what another
writer removed is back within five minutes; half of it doubles the requests of an idle node. A
twentieth more or less, so that nodes that started together do not stay together."""
_LONGEST_BACKOFF_S: Final = 60.0
"""Between two attempts while the API server is away. Chosen: as for other connections to it."""

_EXPECTED: Final = (OSError, ValueError, InputError, InputErrors, SourceError)
"""What reading the machine, kubelet or an annotation may raise; others are defects."""

_decode: Final = msgspec.json.Decoder(Plain).decode


class Kept(Protocol):
    """What one machine's facts mean for the object."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Bad input that another value stands in for."""
        ...

    @property
    def absent(self) -> bool:
        """Whether an object that does not exist shall stay so."""
        ...

    def create(self, name: str, node_uid: str) -> Plain:
        """Return the object to create, owned by its Node."""
        ...

    def merge(self, stored: Plain) -> Plain:
        """Return the stored object with what koordlet wants in it."""
        ...


Gather = Callable[[], Kept | None]
"""Reads the machine in a worker thread. The result of unchanged facts equals the last one. None:
there is nothing to report. An exception keeps the object as it is and is shown as the problem."""


class Keeper:
    """Keeps one object. Belongs to the event loop.

    directory: where the object is kept as a file; "" for nowhere.
    """

    def __init__(
        self,
        resource: Resource,
        name: str,
        gather: Gather,
        *,
        interval_s: float,
        workers: Executor,
        events: Events,
        directory: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem = ""
        """Why the object may not be as the machine is; empty when it is."""
        self.kind = resource.kind
        self._object = StoredObject(resource, name)
        self._resource = resource
        self._name = name
        self._gather = gather
        self._interval_s = interval_s
        self._workers = workers
        self._events = events
        self._directory = directory
        self._monotonic = monotonic
        self._wanted: Kept | None = None
        self._look_at = 0.0
        self._failed_rounds = 0
        self._reported: tuple[str, ...] = ()
        self._files = 0

    @property
    def writes(self) -> int:
        """How many patches and creations the server took, and how often the file was replaced."""
        return self._object.writes + self._files

    def look_again(self) -> None:
        """Read the object with the next round: it, or what it depends on, has changed."""
        self._look_at = 0.0

    async def run(self, client: Client | None) -> None:
        """Keep the object until cancelled. client: None on a node without an API server."""
        while True:
            pause_s = await self.round(client)
            await asyncio.sleep(pause_s)

    async def round(self, client: Client | None) -> float:
        """Compare once; return the seconds until the next time."""
        try:
            wanted = await asyncio.get_running_loop().run_in_executor(self._workers, self._gather)
            now = self._monotonic()
            if wanted is not None and (wanted != self._wanted or now >= self._look_at):
                self._report_problems(wanted)
                await self._write(client, wanted)
                self._wanted = wanted
                self._look_at = now + _RESYNC_S * random.uniform(0.95, 1.05)
        except (ApiError, Unreachable) as error:
            self._set_problem(str(error))
            self._look_at = 0.0
            self._failed_rounds = min(self._failed_rounds + 1, 10)
            pause = min(self._interval_s * 2.0**self._failed_rounds, _LONGEST_BACKOFF_S)
            return max(pause, self._interval_s) * random.uniform(0.5, 1.0)
        except Exception as error:  # noqa: BLE001 - the object stays as it is, and others are kept
            if not isinstance(error, _EXPECTED):
                _LOG.exception("the %s could not be computed", self._resource.kind)
                self._set_problem(f"{type(error).__name__}: {error}")
            else:
                self._set_problem(str(error))
            self._look_at = 0.0
        else:
            self._failed_rounds = 0
            self._set_problem("")
        return self._interval_s

    async def _write(self, client: Client | None, wanted: Kept) -> None:
        if client is not None:
            self._object.look_again()
            node_uid = ""
            if await self._object.read(client) is None:
                if wanted.absent:
                    return
                node_uid = await self._node_uid(client)

            def change(stored: Plain | None) -> Plain | None:
                if stored is not None:
                    return wanted.merge(stored)
                return wanted.merge(wanted.create(self._name, node_uid)) if node_uid else None

            await self._object.write(client, change)
        if self._directory and not wanted.absent:
            plain = wanted.merge(wanted.create(self._name, ""))
            plain["metadata"].pop("ownerReferences", None)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(
                self._workers, write_manifest, self._directory, self._resource, plain
            )
            self._files += 1

    async def _node_uid(self, client: Client) -> str:
        """Return the UID of the Node that shall own the object. Raises ApiError without a Node."""
        node: dict[str, Any] = await client.get(NODES, self._name, _decode)
        return str(node["metadata"]["uid"])

    def _report_problems(self, wanted: Kept) -> None:
        for problem in wanted.problems:
            if problem not in self._reported:
                self._events.add(
                    "bad-object", f"Node {self._name}", problem, severity=Severity.ERROR
                )
        self._reported = wanted.problems

    def _set_problem(self, problem: str) -> None:
        """Keep the state, and add an event when it changes."""
        if problem == self.problem:
            return
        before, self.problem = self.problem, problem
        kind = self._resource.kind
        if problem and not before:
            self._events.add(
                "report-failed", kind, f"{problem}; it stays as it is, and koordlet tries again"
            )
        elif not problem:
            self._events.add("report-back", kind, "reports are taken again", severity=Severity.INFO)
