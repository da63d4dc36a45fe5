"""Objects that this process wrote and that its cache does not show yet.

A cache sees its own process's writes through the watch, milliseconds to seconds later. In between,
a controller would compare with, and patch, an outdated object.
"""

from __future__ import annotations

import time
from typing import Final, Generic, TypeVar

from kube.cache import Change, Event, HasMeta, object_key

T = TypeVar("T", bound=HasMeta)

BELIEVED_SECONDS: Final = 30.0
"""Chosen: a watch that lags more than this is broken, and the cache counts again. With twice the
time, an object that was deleted in between would be used for twice as long."""


class OwnWrites(Generic[T]):
    """The last object that was written under each key, until the cache has caught up with it."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[T, float]] = {}

    def __len__(self) -> int:
        return len(self._written)

    def note(self, stored: T) -> None:
        """Keep an object as the API server returned it after our write."""
        self._written[object_key(stored)] = (stored, time.monotonic())

    def forget(self, key: str) -> None:
        """Use the cache again; for an object that the API server does not have."""
        self._written.pop(key, None)

    def seen(self, event: Event[T]) -> None:
        """Apply an event of the cache; subscribe this before the readers of `latest`."""
        known = self._written.get(event.key)
        if known is None:
            return
        if not _older(event.new, known[0]) or (
            event.change is Change.DELETED and event.new.metadata.uid == known[0].metadata.uid
        ):
            del self._written[event.key]

    def latest(self, key: str, cached: T | None) -> T | None:
        """Return the newer of the cached object and the object written under that key."""
        known = self._written.get(key)
        if known is None:
            return cached
        written, at = known
        if time.monotonic() - at >= BELIEVED_SECONDS or (
            cached is not None and not _older(cached, written)
        ):
            del self._written[key]
            return cached
        return written


def _older(obj: HasMeta, than: HasMeta) -> bool:
    """Return whether `obj` is an older state.

    Resource versions are numbers that grow (documented since Kubernetes 1.35, and true with every
    etcd); a version that is not a number never counts as older.
    """
    ours, theirs = obj.metadata.resource_version, than.metadata.resource_version
    return ours.isdecimal() and theirs.isdecimal() and int(ours) < int(theirs)
