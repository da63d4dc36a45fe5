"""The Pod objects that the sources list: the latest list of each, found by uid or by name."""

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
"""Pods of one list that are used. Chosen: many times what kubelet runs on a node (110 by default),
and few enough that a wrong list cannot exhaust the memory. Twice the value doubles that memory."""
_MAX_UPDATES: Final = 32768
"""Containers with an update that no list has confirmed; the bound of `RuntimeRecords`."""


class Source(StrEnum):
    """Where Pod objects come from, in order of precedence."""

    KUBELET = "kubelet"
    OBJECTS = "objects"
    KUBERNETES = "kubernetes"


class Changes(NamedTuple):
    """The pods that a new list changes: by uid, and by (namespace, name)."""

    uids: set[str]
    names: set[tuple[str, str]]


class PodObjects:
    """The lists. Belongs to the event loop."""

    def __init__(self) -> None:
        self._by_uid: dict[Source, dict[str, KnownPod]] = {source: {} for source in Source}
        self._by_name: dict[Source, dict[tuple[str, str], KnownPod]] = {
            source: {} for source in Source
        }
        self._updates: OrderedDict[str, tuple[Requested, Requested]] = OrderedDict()
        """Container id -> (what kubelet requested in an update, the specification at that time)."""
        self._cut: set[Source] = set()

    def copy(self) -> PodObjects:
        """Return the same lists; later changes are not shared."""
        made = PodObjects()
        # A new list replaces the former one, so these are never changed in place.
        made._by_uid = dict(self._by_uid)
        made._by_name = dict(self._by_name)
        made._updates = self._updates.copy()
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
                self._log_cut(source)
                break
        before, before_unnamed = self._by_uid[source], self._by_name[source]
        changed = {uid for uid in {*listed, *before} if listed.get(uid) != before.get(uid)}
        # An equal object stays the same object, so values derived from it stay valid.
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

    def find(self, uid: str, reported: Pod | None) -> KnownPod | None:
        """Return the pod's object from the first source that has it.

        reported: the pod as the runtime reported it, for manifests without a uid, which are found
            by name.
        """
        for source, known in self._by_uid.items():
            if found := known.get(uid):
                return found
            unnamed = self._by_name[source]
            if unnamed and reported is not None:
                found = unnamed.get((reported.namespace, reported.name))
                if found is not None:
                    return found
        return None

    def note_update(self, uid: str, name: str, container_id: str, update: Requested) -> None:
        """Record values that kubelet requested for a container before its list has them."""
        known = self.find(uid, None)
        specified = known.by_container.get(name, NOTHING_REQUESTED) if known else NOTHING_REQUESTED
        self._updates[container_id] = update, specified
        self._updates.move_to_end(container_id)
        if len(self._updates) > _MAX_UPDATES:
            self._updates.popitem(last=False)

    def requested(self, known: KnownPod, name: str, container_id: str) -> Requested:
        """Return what kubelet requests: an update counts until the specification changes."""
        specified = known.by_container.get(name, NOTHING_REQUESTED)
        update, before = self._updates.get(container_id, (NOTHING_REQUESTED, specified))
        return overlay(update, specified) if specified == before else specified

    def lists(self, source: Source, uid: str) -> bool:
        """Return whether the source's latest list has the pod."""
        return uid in self._by_uid[source]

    def uids(self) -> Iterator[str]:
        """Return every uid that any source knows."""
        for known in self._by_uid.values():
            yield from known

    def _log_cut(self, source: Source) -> None:
        if source not in self._cut:
            self._cut.add(source)
            _LOG.error("%s lists more than %d pods: the rest is ignored", source, MAX_PODS)
