"""The API server as a source of this node's own objects: NodeSLO, Node, topology, Device.

Each is watched by its name, so a node costs the server four small watches. Objects are decoded like
those of the objects directory: a bad field affects only itself, the last good version stays, and
the problem names object, field and value. Pods come from kubelet and the runtime, which know them
first; `koordlet.sources.served_pods` reads them here too where that is configured.

While the server does not answer, the last objects stay in force. They are kept in the run
directory, so a restart in that time begins with them and not with defaults.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, Final

import msgspec

from apis.core import ObjectMeta
from apis.errors import printable
from koordlet.configuration.config import Kubernetes
from koordlet.sources.documents import PRESSURES
from koordlet.sources.objects import NodeObjects, Received
from koordlet.sources.served_pods import ServedPods
from kube.cache import Cache, Change, Event, wait_all_synced
from kube.client import Client
from kube.connection import Connection, load_connection
from kube.reconnecting import stay_connected
from kube.resources import DEVICES, NODE_RESOURCE_TOPOLOGIES, NODE_SLOS, NODES, Resource
from service.events import Events, Severity
from service.files import replacing

_LOG = logging.getLogger("koordlet.sources")

KEPT_FILE: Final = "api-objects.json"

_WATCHED: Final = (NODE_SLOS, NODES, NODE_RESOURCE_TOPOLOGIES, DEVICES)
_LARGEST_KEPT: Final = 16 << 20
"""Bytes of the kept file that are read. Four objects of at most 1.5 MiB each (etcd's limit) fit
twice; a larger file is not ours."""
_FIRST_BACKOFF_S: Final = 1.0
_LONGEST_BACKOFF_S: Final = 60.0
"""The first and the longest pause after a defect; each is twice the one before. Chosen: as for a
connection that cannot be made (`kube.connection`)."""
_LOOK_EVERY_S: Final = 5.0
_LOOK_EVERY_AT_FIRST_S: Final = 0.2
"""How often the state of the watches is read for `status` and events; at start more often, so that
the daemon does not wait. Twice the values: an event about a lost server is that much later."""


class _Meta(msgspec.Struct):
    metadata: ObjectMeta


class Manifest(msgspec.Struct, frozen=True):
    """An object as a tree, with the metadata that a cache needs."""

    metadata: ObjectMeta
    tree: Mapping[str, Any]


class ApiServer:
    """Watches this node's objects. `name`, `problem`, `failures`, `fetches`, `answered_at`: as in
    `Poller`.

    changed(objects): called on the event loop when the objects in force changed.
    pods: follows the node's pods over the same connection; None where they are not read here.
    """

    name = "kubernetes"

    def __init__(
        self,
        config: Kubernetes,
        node_name: str,
        run_dir: str,
        events: Events,
        workers: Executor,
        changed: Callable[[NodeObjects], None],
        *,
        pods: ServedPods | None = None,
        connect: Callable[[], Connection] | None = None,
    ) -> None:
        self._node_name = node_name
        self._path = f"{run_dir}/{KEPT_FILE}"
        self._kept = True
        self._events = events
        self._workers = workers
        self._changed = changed
        self._connect = connect or (lambda: load_connection(config.kubeconfig or None))
        self._received = Received(node_name)
        self._pods = pods
        self._caches: tuple[Cache[Manifest], ...] = ()
        self._answered_before: Mapping[str, float] = {}
        self._problem = "not connected yet"
        self._publish_scheduled = False
        self._published = False
        self._first = asyncio.Event()
        self._unkept = asyncio.Event()
        self.failures = 0
        self.objects = NodeObjects()

    @property
    def problem(self) -> str:
        return self._problem

    @property
    def fetches(self) -> int:
        """How many lists were read."""
        return sum(cache.lists for cache in self._all_caches())

    @property
    def answered_at(self) -> float | None:
        """When the server last answered for the kind that waits for an answer the longest.

        In seconds of the monotonic clock; None before the first answer. A kind that never had an
        answer does not count: a cluster may lack its type.
        """
        return min(self._answers_by_kind().values(), default=None)

    def _all_caches(self) -> Iterator[Cache[Any]]:
        """Return the caches of this connection, with that of the pods."""
        yield from self._caches
        if self._pods is not None and self._pods.cache is not None:
            yield self._pods.cache

    def _answers_by_kind(self) -> dict[str, float]:
        """Return when the server last answered for each kind, over this connection or before."""
        return {
            **self._answered_before,
            **{
                cache.resource.kind: cache.answered_at
                for cache in self._all_caches()
                if cache.answered_at is not None
            },
        }

    async def wait_first(self) -> None:
        """Return once the objects are known, from the server or from the kept file."""
        await self._first.wait()

    def read_kept(self) -> Mapping[str, Any]:
        """Return the kept objects, if the run directory still has them. Does I/O."""
        try:
            with open(self._path, "rb") as file:
                trees = json.loads(file.read(_LARGEST_KEPT))
            return {str(name): tree for name, tree in trees.items() if isinstance(tree, dict)}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            self._events.add(self.name, self._path, f"not used: {printable(str(error))}")
        return {}

    def take_kept(self, trees: Mapping[str, Any]) -> None:
        """Begin with the kept objects."""
        for name, tree in trees.items():
            self._received.put(name, tree)
        if trees:
            self._publish()

    async def run(self) -> None:
        """Watch the server's objects until cancelled."""
        pause = _FIRST_BACKOFF_S
        while True:
            try:
                await stay_connected(
                    self._connect,
                    self._follow,
                    answers=self._answers,
                    user_agent="koordlet",
                    refused=self._failed,
                )
            except Exception as error:  # noqa: BLE001 - a defect must not end the source for good
                _LOG.exception("source failed", extra={"source": self.name})
                self._failed(f"{type(error).__name__}: {error}")
            if self._caches and all(cache.synced for cache in self._caches):
                pause = _FIRST_BACKOFF_S
            # Spread, so that the daemons of all nodes do not come at once.
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, _LONGEST_BACKOFF_S)

    async def _follow(self, client: Client) -> None:
        """Watch the server's objects over one connection until cancelled."""
        self._answered_before = self._answers_by_kind()
        self._caches = tuple(self._cache(client, resource) for resource in _WATCHED)
        async with asyncio.TaskGroup() as group:
            for cache in self._caches:
                group.create_task(cache.run())
            group.create_task(self._keep_newest())
            group.create_task(self._look_after())
            if self._pods is not None:
                group.create_task(self._pods.follow(client))
            await wait_all_synced(*self._caches)
            self._take_lists()

    def _answers(self) -> bool:
        """Return whether the server answers the list of any kind."""
        return not all(cache.problem for cache in self._caches)

    def _take_lists(self) -> None:
        """Drop what the first lists of all kinds lack, except kinds whose list was refused."""
        there = {_name(cache.resource) for cache in self._caches if cache.items or cache.problem}
        for name in self._received.names:
            if name not in there:
                self._received.drop(name)
        if not self.failures:
            self._problem = ""
        self._publish()

    def _cache(self, client: Client, resource: Resource) -> Cache[Manifest]:
        cache: Cache[Manifest] = Cache(
            client,
            resource,
            Manifest,
            field_selector=f"metadata.name={self._node_name}",
            decode=lambda data: _manifest(resource, data),
        )
        cache.subscribe(lambda event: self._take(resource, event))
        return cache

    def _take(self, resource: Resource, event: Event[Manifest]) -> None:
        if event.change is Change.DELETED:
            self._received.drop(_name(resource))
        else:
            self._received.put(_name(resource), event.new.tree)
        # The first lists are published together: half of them would describe another node.
        if not self._publish_scheduled and all(cache.synced for cache in self._caches):
            self._publish_scheduled = True
            asyncio.get_running_loop().call_soon(self._publish)

    def _publish(self) -> None:
        self._publish_scheduled = False
        objects = self._received.objects()
        first, self._published = not self._published, True
        if objects == self.objects and not first:
            return
        self.objects = objects
        self._first.set()
        self._changed(objects)
        if self._caches:
            self._unkept.set()

    async def _keep_newest(self) -> None:
        """Write the objects in force, one write after the other, so that the newest is the last."""
        loop = asyncio.get_running_loop()
        while True:
            await self._unkept.wait()
            self._unkept.clear()
            data = json.dumps(self._received.trees).encode()
            await loop.run_in_executor(self._workers, self._keep, data)

    def _keep(self, data: bytes) -> None:
        """Replace the kept file as a whole. For a worker thread."""
        try:
            with replacing(self._path) as file:
                file.write(data)
        except OSError as error:
            if self._kept:
                _LOG.warning("the API server's objects cannot be kept for a restart: %s", error)
            self._kept = False
        else:
            self._kept = True

    async def _look_after(self) -> None:
        """Add events when the server stops and begins to answer."""
        while True:
            problems = [cache.problem for cache in self._caches if cache.problem]
            if self._pods is not None and self._pods.problem:
                problems.append(self._pods.problem)
            if problems:
                self._failed(problems[0])
            elif self._problem and all(cache.synced for cache in self._all_caches()):
                if self.failures:
                    self._events.add(
                        "source-back", self.name, "answers again", severity=Severity.INFO
                    )
                self._problem = ""
            await asyncio.sleep(_LOOK_EVERY_S if self._first.is_set() else _LOOK_EVERY_AT_FIRST_S)

    def _failed(self, problem: str) -> None:
        if problem == self._problem:
            return
        self.failures += 1
        self._problem = problem
        self._events.add(
            "source-failed",
            self.name,
            f"{printable(problem)}; the last objects stay in force, and koordlet tries again",
        )


def _name(resource: Resource) -> str:
    return f"{resource.kind} of the API server"


def _manifest(resource: Resource, data: bytes) -> Manifest:
    """Parse an object, without parts that are not read here or that change by themselves."""
    tree = msgspec.json.decode(data, type=dict[str, Any])
    metadata = msgspec.convert(tree, _Meta, strict=False).metadata
    tree["kind"], tree["apiVersion"] = resource.kind, resource.api_version
    for unread in ("managedFields", "resourceVersion", "generation"):
        tree["metadata"].pop(unread, None)
    if resource is NODES:
        status = tree.get("status")
        read = _node_status(status) if isinstance(status, dict) else {}
        tree = {key: value for key, value in tree.items() if key not in ("spec", "status")}
        if read:
            tree["status"] = read
    elif resource is not DEVICES:
        tree.pop("status", None)
    return Manifest(metadata, tree)


def _node_status(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is read of a Node's status, without the times of kubelet's heartbeats."""
    read = {
        name: status[name] for name in ("allocatable", "capacity") if status.get(name) is not None
    }
    conditions = status.get("conditions")
    pressures = [
        {"type": each["type"], "status": "True"}
        for each in (conditions if isinstance(conditions, list) else ())
        if isinstance(each, dict) and each.get("type") in PRESSURES and each.get("status") == "True"
    ]
    return {**read, "conditions": pressures} if pressures else read
