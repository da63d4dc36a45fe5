"""A list/watch cache of one resource type, decoded into typed objects.

It lists in pages, watches from there, resumes a broken watch at the last resourceVersion, accepts
bookmarks, lists again when that version is too old (410), and backs off with jitter. One task, no
thread. An object that cannot be decoded is reported and left out; it harms no other object.

Readers look at `items`, query an index, or subscribe. A subscriber is a plain function that is
called with each change, after the cache and its indexes contain it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from apis.core import ObjectMeta
from apis.decode import json_decoder
from apis.errors import printable
from kube.client import ApiError, Client, Unreachable
from kube.deep_json import decode_deep
from kube.faults import Faults
from kube.pages import pages
from kube.resources import Resource

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 50
"""Objects of a list that are read before other tasks get their turn. Chosen: 3 ms with the pods of
a scheduler (60 us each). At twice the value a renewal of the lease waits twice as long."""
_FIRST_PAUSE: Final = 0.2
"""Seconds before the first retry, chosen; doubled with each failure in a row."""
_LONGEST_PAUSE: Final = 30.0
"""client-go's longest back-off of a watch."""
_SHORT_WATCH_SECONDS: Final = 1.0
"""A watch that ends this soon without an event counts as a failure, as in client-go."""
_ABSENT_AFTER_SECONDS: Final = 3.0
"""Chosen: a server that starts may answer "not found" for types that it has, for about a second.
A type that is really absent delays the start by this much."""
_WATCH_SECONDS: Final = (300, 600)
"""The server ends a watch after a random time between these, as client-go asks for."""


class HasMeta(Protocol):
    """An object of `apis` with metadata."""

    @property
    def metadata(self) -> ObjectMeta: ...


T = TypeVar("T", bound=HasMeta)
K = TypeVar("K", bound=Hashable)


class Change(Enum):
    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Event(Generic[T]):
    """One change. `old` is None for ADDED; for DELETED `new` is the last known state."""

    change: Change
    old: T | None
    new: T

    @property
    def key(self) -> str:
        return object_key(self.new)


def object_key(obj: HasMeta) -> str:
    """Return namespace/name, or the name of a cluster-scoped object."""
    meta = obj.metadata
    return f"{meta.namespace}/{meta.name}" if meta.namespace else meta.name


@dataclass(frozen=True, slots=True)
class Collection:
    """The objects that a cache reads. path: of the request that lists them. selectors: its query
    parameters that choose among them."""

    resource: Resource
    path: str
    selectors: Mapping[str, str] = field(default_factory=dict)


class _WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Named(msgspec.Struct, frozen=True, rename="camel"):
    """What identifies an object, and nothing that could keep it from being read."""

    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class _BareMeta(msgspec.Struct):
    metadata: _Named = _Named()


class _Status(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


class Index(Generic[K, T]):
    """Objects by a key computed from them; one object may have several keys."""

    def __init__(self, keys_of: Callable[[T], Iterable[K]]) -> None:
        self._keys_of = keys_of
        self._members: dict[K, dict[str, T]] = {}

    def get(self, key: K) -> list[T]:
        return list(self._members.get(key, {}).values())

    def count(self, key: K) -> int:
        return len(self._members.get(key, {}))

    def change(self, key: str, old: T | None, new: T | None) -> None:
        for value in () if old is None else self._keys_of(old):
            members = self._members.get(value)
            if members is not None:
                members.pop(key, None)
                if not members:
                    del self._members[value]
        for value in () if new is None else self._keys_of(new):
            self._members.setdefault(value, {})[key] = new  # type: ignore[assignment]


class Cache(Generic[T]):
    """The objects of one resource type as of the last event. Run it with `run`."""

    def __init__(
        self,
        client: Client,
        resource: Resource,
        type_: type[T],
        *,
        namespace: str = "",
        label_selector: str = "",
        field_selector: str = "",
        shrink: Callable[[T], T] | None = None,
        decode: Callable[[bytes], T] | None = None,
    ) -> None:
        """shrink: drops what is not needed from each object before it is kept. decode: replaces
        the strict decoder of `type_`; raises msgspec.ValidationError."""
        self._client = client
        self._resource = resource
        self._path = resource.path(namespace=namespace)
        self._selectors = {
            name: value
            for name, value in (
                ("labelSelector", label_selector),
                ("fieldSelector", field_selector),
            )
            if value
        }
        self._decode = decode or json_decoder(type_)
        self._shrink = shrink
        self._items: dict[str, T] = {}
        self._indexes: list[Index[Any, T]] = []
        self._subscribers: list[Callable[[Event[T]], None]] = []
        self._synced = asyncio.Event()
        self._version = ""
        self._absent_since: float | None = None
        self.lists = 0
        """How often the whole list was read."""
        self.restarts = 0
        """How often a watch ended before its time."""
        self.faults = Faults(f"cache of {resource.plural}")
        self.answered_at: float | None = None
        """When the server last sent a list, accepted a watch, or sent a line of one, in seconds of
        the monotonic clock; None before. A server with a watch cache sends a bookmark about once a
        minute, so more than some minutes means that it is lost."""
        self.problem = ""
        """Why the cache does not follow the server at present; "" while it does."""
        self.forbidden_since: float | None = None
        """When the API server began to refuse reading for a missing right, in the loop's time; None
        while it does not. `problem` says which right."""
        self.undecodable: dict[str, str] = {}
        """Key -> why the object is left out."""

    @property
    def items(self) -> Mapping[str, T]:
        return MappingProxyType(self._items)

    @property
    def resource(self) -> Resource:
        return self._resource

    @property
    def collection(self) -> Collection:
        return Collection(self._resource, self._path, MappingProxyType(self._selectors))

    @property
    def synced(self) -> bool:
        """Whether the list was read once."""
        return self._synced.is_set()

    def get(self, name: str, *, namespace: str = "") -> T | None:
        return self._items.get(f"{namespace}/{name}" if namespace else name)

    def left_out(self, name: str, *, namespace: str = "") -> bool:
        """Return whether the object exists but cannot be decoded, so `get` does not return it."""
        return (f"{namespace}/{name}" if namespace else name) in self.undecodable

    async def wait_synced(self) -> None:
        await self._synced.wait()

    def index(self, keys_of: Callable[[T], Iterable[K]]) -> Index[K, T]:
        """Return an index that follows the cache from now on."""
        index: Index[K, T] = Index(keys_of)
        for key, item in self._items.items():
            index.change(key, None, item)
        self._indexes.append(index)
        return index

    def subscribe(self, subscriber: Callable[[Event[T]], None]) -> None:
        """Call `subscriber` with every object of the cache, then with every change."""
        for item in self._items.values():
            self._notify(subscriber, Event(Change.ADDED, None, item))
        self._subscribers.append(subscriber)

    def put(self, item: T) -> None:
        """Add or replace an object; for sources other than the API server."""
        key = object_key(item)
        self._apply(Change.MODIFIED if key in self._items else Change.ADDED, key, item)

    def drop(self, key: str) -> None:
        """Remove an object by its key; for sources other than the API server."""
        item = self._items.get(key)
        if item is not None:
            self._apply(Change.DELETED, key, item)

    def load(self, objects: Mapping[str, bytes]) -> None:
        """Take the whole list from elsewhere than the API server: the JSON of objects by key."""
        seen: dict[str, T] = {}
        undecodable: dict[str, str] = {}
        for key, raw in objects.items():
            item = self._read(msgspec.Raw(raw), undecodable, key=key)
            if item is not None:
                seen[object_key(item)] = item
        self._take_list(seen, undecodable)
        self._synced.set()

    async def run(self) -> None:
        """Follow the API server until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            try:
                if not self._version:
                    await self._list()
                    self._absent_since = None
                    self._note("")
                    pause = _FIRST_PAUSE
                await self._watch()
                pause = _FIRST_PAUSE
                continue
            except ApiError as error:
                self._note(str(error), forbidden=error.forbidden)
                if error.gone:
                    self._version = ""
                if error.not_found:
                    # The type is not installed (yet): it has no objects. Known objects stay: a
                    # server that starts answers the same for types that it has not looked up yet,
                    # and a server that removes a type deletes its objects one by one first.
                    self._version = ""
                    if self._is_absent():
                        self._synced.set()
                        pause = _LONGEST_PAUSE
                level = logging.INFO if error.gone else logging.WARNING
                _log.log(level, "%s: %s", self._resource.plural, error)
            except (Unreachable, msgspec.DecodeError) as error:
                self.restarts += 1
                self._note(str(error))
                _log.info("%s: %s", self._resource.plural, error)
            except RecursionError:
                self.restarts += 1
                self._note("an object is nested too deep to be read")
                _log.warning("%s: %s", self._resource.plural, self.problem)
            except Exception as error:  # noqa: BLE001 - the process lives on the other caches too
                # An event may have been applied in part: list again.
                self._version = ""
                self.restarts += 1
                self._note(f"{type(error).__name__}: {error}")
                self.faults.note("following the API server")
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _note(self, problem: str, *, forbidden: bool = False) -> None:
        """Note why the cache does not follow the server now, "" if it does.

        forbidden: whether a right is missing.
        """
        self.problem = problem
        if not forbidden:
            self.forbidden_since = None
        elif self.forbidden_since is None:
            self.forbidden_since = asyncio.get_running_loop().time()

    def _is_absent(self) -> bool:
        """Return whether "not found" means that the type is not installed.

        A server that has just started answers so too. If its types counted as absent, a controller
        would withdraw resources from every node.
        """
        now = asyncio.get_running_loop().time()
        if self._absent_since is None:
            self._absent_since = now
        return self.synced or now - self._absent_since >= _ABSENT_AFTER_SECONDS

    async def _list(self) -> None:
        """Read the whole list. The first time, objects are taken as they come; later, what is gone
        leaves before anything else changes."""
        self.lists += 1
        first = not self.synced
        seen: dict[str, T] = {}
        undecodable: dict[str, str] = {}
        async with aclosing(pages(self._client, self._path, self._selectors)) as listed:
            async for page in listed:
                for number, raw in enumerate(page.items, 1):
                    item = self._read(raw, undecodable)
                    if item is not None:
                        key = object_key(item)
                        seen[key] = item
                        if first:
                            self._take(key, item)
                    if not number % _AT_ONCE:
                        await asyncio.sleep(0)
                version = page.version
        self._take_list(seen, undecodable)
        self._version = version
        self.answered_at = time.monotonic()
        self._synced.set()

    def _take_list(self, seen: dict[str, T], undecodable: dict[str, str]) -> None:
        self.undecodable = undecodable
        for key in [key for key in self._items if key not in seen and key not in undecodable]:
            self._apply(Change.DELETED, key, self._items[key])
        for key, item in seen.items():
            self._take(key, item)

    def _take(self, key: str, item: T) -> None:
        """Take an object of a list."""
        known = self._items.get(key)
        if known is None:
            self._apply(Change.ADDED, key, item)
        elif known.metadata.resource_version != item.metadata.resource_version:
            self._apply(Change.MODIFIED, key, item)

    async def _watch(self) -> None:
        seconds = random.randint(*_WATCH_SECONDS)
        started = asyncio.get_running_loop().time()
        silent = True
        params = {
            **self._selectors,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(seconds),
        }
        async with self._client.stream(
            self._path, params=params, silence_seconds=seconds + 30
        ) as lines:
            self._note("")
            self.answered_at = time.monotonic()
            async for line in lines:
                silent = False
                self.answered_at = time.monotonic()
                self.take(line)
        if silent and asyncio.get_running_loop().time() - started < _SHORT_WATCH_SECONDS:
            # A proxy, or a server that shuts down, closes at once: retrying would be a storm.
            raise Unreachable(f"watch {self._path}: it ended at once, without an event")

    def take(self, line: bytes) -> None:
        """Apply one line of a watch: the JSON of an event."""
        event = decode_deep(line, _WatchEvent)
        if event.type == "BOOKMARK":
            meta = msgspec.json.decode(event.object, type=_BareMeta)
            self._version = meta.metadata.resource_version
            return
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            raise ApiError(
                status=status.code,
                reason=status.reason,
                message=status.message,
                what=f"watch {self._path}",
            )
        item = self._read(event.object, self.undecodable)
        if item is None:
            meta = decode_deep(event.object, _BareMeta)
            self._version = meta.metadata.resource_version
            if event.type == "DELETED":
                key = _bare_key(meta)
                del self.undecodable[key]
                if key in self._items:
                    self._apply(Change.DELETED, key, self._items[key])
            return
        self._version = item.metadata.resource_version
        key = object_key(item)
        self.undecodable.pop(key, None)
        if event.type == "DELETED":
            self._apply(Change.DELETED, key, item)
        else:
            self._apply(Change.MODIFIED if key in self._items else Change.ADDED, key, item)

    def _read(self, raw: msgspec.Raw, undecodable: dict[str, str], *, key: str = "") -> T | None:
        try:
            item = self._decode(bytes(raw))
        except (msgspec.ValidationError, RecursionError) as error:
            key = key or _bare_key(decode_deep(raw, _BareMeta))
            problem = str(error)
            if undecodable.get(key) != problem and self.undecodable.get(key) != problem:
                _log.warning(
                    "%s %s is left out: %s",
                    self._resource.kind,
                    printable(key),
                    printable(problem),
                )
            undecodable[key] = problem
            return None
        return self._shrink(item) if self._shrink is not None else item

    def _apply(self, change: Change, key: str, item: T) -> None:
        old = self._items.get(key)
        if change is Change.DELETED:
            if old is None:
                return
            del self._items[key]
        else:
            self._items[sys.intern(key)] = item
        for index in self._indexes:
            try:
                index.change(key, old, None if change is Change.DELETED else item)
            except Exception:  # noqa: BLE001 - one index must not stop the cache for the others
                self.faults.note("an index", about=key)
        event = Event(change, old, item)
        for subscriber in self._subscribers:
            self._notify(subscriber, event)

    def _notify(self, subscriber: Callable[[Event[T]], None], event: Event[T]) -> None:
        try:
            subscriber(event)
        except Exception:  # noqa: BLE001 - one subscriber must not stop the cache for the others
            self.faults.note("a subscriber", about=event.key)


def _bare_key(obj: _BareMeta) -> str:
    """As `object_key`."""
    meta = obj.metadata
    return f"{meta.namespace}/{meta.name}" if meta.namespace else meta.name


async def wait_all_synced(*caches: Cache[Any]) -> None:
    """Wait until every cache has read its list once."""
    for cache in caches:
        await cache.wait_synced()
