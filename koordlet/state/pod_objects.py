"""What Pod objects tell: the latest list of each source of them, found by uid or by name."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from hooks.requested import overlay
from hooks.subject import NOTHING_REQUESTED, Pod, Requested
from koordlet.state.podspec import KnownPod

_LOG = logging.getLogger("koordlet.state")

MAX_PODS: Final = 8192
_MAX_ASKED: Final = 32768
"""Containers with an update that no list confirmed; as many as `RuntimeRecords` has room for."""


class Source(StrEnum):
    """Who told of Pod objects, in order of precedence."""

    KUBELET = "kubelet"
    OBJECTS = "objects"


class Changes(NamedTuple):
    """Which pods a list tells something new of: by uid, and by (namespace, name)."""

    uids: set[str]
    names: set[tuple[str, str]]


class PodObjects:
    """The lists. Belongs to the event loop."""

    def __init__(self) -> None:
        self._by_uid: dict[Source, dict[str, KnownPod]] = {source: {} for source in Source}
        self._by_name: dict[Source, dict[tuple[str, str], KnownPod]] = {
            source: {} for source in Source
        }
        self._asked: OrderedDict[str, tuple[Requested, Requested]] = OrderedDict()
        """Container id -> (what kubelet asked the runtime for, the specification at that time)."""
        self._cut: set[Source] = set()

    def copy(self) -> PodObjects:
        """Return the same lists; what is taken later is not shared."""
        made = PodObjects()
        # A new list replaces the one before, so these are never changed in place.
        made._by_uid = dict(self._by_uid)
        made._by_name = dict(self._by_name)
        made._asked = self._asked.copy()
        return made

    def take(self, source: Source, pods: Iterable[KnownPod]) -> Changes:
        """Take a source's full list."""
        listed: dict[str, KnownPod] = {}
        unnamed: dict[tuple[str, str], KnownPod] = {}
        for known in pods:
            for uid in known.uids:
                listed[uid] = known
            if not known.uids:
                unnamed[known.name] = known
            if len(listed) + len(unnamed) > MAX_PODS:
                self._tell_cut(source)
                break
        before, before_unnamed = self._by_uid[source], self._by_name[source]
        changed = {uid for uid in {*listed, *before} if listed.get(uid) != before.get(uid)}
        # An object that did not change stays the same object, so what is derived stays too.
        self._by_uid[source] = {
            uid: listed[uid] if uid in changed else before[uid] for uid in listed
        }
        self._by_name[source] = unnamed
        return Changes(
            changed,
            {
                name
                for name in {*unnamed, *before_unnamed}
                if unnamed.get(name) != before_unnamed.get(name)
            },
        )

    def find(self, uid: str, told: Pod | None) -> KnownPod | None:
        """Return what the first source that knows the pod says of it.

        told: the pod as the runtime told of it: a manifest without a uid is found by its name.
        """
        for source, known in self._by_uid.items():
            if found := known.get(uid):
                return found
            unnamed = self._by_name[source]
            if unnamed and told is not None and (found := unnamed.get((told.namespace, told.name))):
                return found
        return None

    def ask(self, uid: str, name: str, container_id: str, asked: Requested) -> None:
        """Kubelet asked the runtime for new values of a container, before its list says so."""
        known = self.find(uid, None)
        specified = known.by_container.get(name, NOTHING_REQUESTED) if known else NOTHING_REQUESTED
        self._asked[container_id] = asked, specified
        self._asked.move_to_end(container_id)
        if len(self._asked) > _MAX_ASKED:
            self._asked.popitem(last=False)

    def requested(self, known: KnownPod, name: str, container_id: str) -> Requested:
        """Return what kubelet asks for: an update counts until the specification changes."""
        specified = known.by_container.get(name, NOTHING_REQUESTED)
        asked, before = self._asked.get(container_id, (NOTHING_REQUESTED, specified))
        return overlay(asked, specified) if specified == before else specified

    def lists(self, source: Source, uid: str) -> bool:
        """Tell whether the source's latest list has the pod."""
        return uid in self._by_uid[source]

    def uids(self) -> Iterator[str]:
        """Return every uid that any source knows."""
        for known in self._by_uid.values():
            yield from known

    def _tell_cut(self, source: Source) -> None:
        if source not in self._cut:
            self._cut.add(source)
            _LOG.error("%s lists more than %d pods: the rest is left out", source, MAX_PODS)
