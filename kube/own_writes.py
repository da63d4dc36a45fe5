"""What this process wrote and its own cache has not shown yet.

A cache follows its own process's writes by a watch, some milliseconds to seconds late. In between a
controller would compare with, and patch, an object that is not the stored one any more.
"""

from __future__ import annotations

import time
from typing import Final, Generic, TypeVar

from kube.cache import Change, Event, HasMeta, object_key

T = TypeVar("T", bound=HasMeta)

BELIEVED_SECONDS: Final = 30.0
"""Chosen: a watch that is later than this is a broken one, and the cache is then believed again.
A longer time keeps an object that was deleted in the meantime alive for that much longer."""


class OwnWrites(Generic[T]):
    """The last object that was written under each key, until the cache has caught up with it."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[T, float]] = {}

    def __len__(self) -> int:
        return len(self._written)

    def note(self, stored: T) -> None:
        """Remember an object as the API server answered it to our write."""
        self._written[object_key(stored)] = (stored, time.monotonic())

    def forget(self, key: str) -> None:
        """Believe the cache again; for an object that the API server says is not there."""
        self._written.pop(key, None)

    def seen(self, event: Event[T]) -> None:
        """Take an event of the cache; subscribe this before what looks at `latest`."""
        known = self._written.get(event.key)
        if known is None:
            return
        if not _older(event.new, known[0]) or (
            event.change is Change.DELETED and event.new.metadata.uid == known[0].metadata.uid
        ):
            del self._written[event.key]

    def latest(self, key: str, cached: T | None) -> T | None:
        """Return the newer one of the cached object and what was written under that key."""
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
    """Return whether `obj` is an older state. Kubernetes' resource versions are numbers that grow
    (said so since 1.35, and true of every etcd); one that is no number is not called older."""
    ours, theirs = obj.metadata.resource_version, than.metadata.resource_version
    return ours.isdecimal() and theirs.isdecimal() and int(ours) < int(theirs)
