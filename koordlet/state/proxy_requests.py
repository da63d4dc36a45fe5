"""What kubelet requested through the proxy, and what koordlet delivered in its place.

A container that the proxy is about to create has no id yet. So its request is kept by pod, name and
attempt, until a list of a runtime names the container or the proxy reports its end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from hooks.subject import Requested
from koordlet.state.requests_log import Remembered

_PREFIX: Final = "proxy"
_MOST: Final = 8192
"""Containers whose requests are kept. Chosen: many times what a node runs; a container beyond it
counts as created before a restart. Twice the value doubles the memory."""


class ProxyKey(NamedTuple):
    """A container before it has an id, too."""

    uid: str
    name: str
    attempt: int

    @property
    def log_id(self) -> str:
        """The container's id in the requests log; no runtime's id has a slash."""
        return f"{_PREFIX}/{self.uid}/{self.name}/{self.attempt}"


def _key_of(log_id: str) -> ProxyKey | None:
    parts = log_id.split("/")
    if len(parts) != 4 or parts[0] != _PREFIX or not parts[3].isdecimal():
        return None
    return ProxyKey(parts[1], parts[2], int(parts[3]))


class ProxyRequests:
    """The last request of each container and its answer. Belongs to the event loop."""

    def __init__(self, remembered: Mapping[str, Remembered]) -> None:
        """remembered: the requests log. Of its lines those count that came through the proxy; one
        without delivered values says that the container has ended."""
        self._kept: OrderedDict[ProxyKey, tuple[Requested, Requested]] = OrderedDict()
        self._newest: dict[tuple[str, str], ProxyKey] = {}
        """Pod and name -> the attempt that was noted last."""
        for log_id, one in remembered.items():
            key = _key_of(log_id)
            if key is not None and one.delivered is not None:
                self.note(key, one.requested, one.delivered)

    def note(self, key: ProxyKey, requested: Requested, delivered: Requested) -> None:
        """Keep a request, and the values of its answer."""
        self._kept[key] = requested, delivered
        self._kept.move_to_end(key)
        self._newest[key.uid, key.name] = key
        if len(self._kept) > _MOST:
            self.forget(next(iter(self._kept)))

    def get(self, key: ProxyKey) -> tuple[Requested, Requested] | None:
        """Return what was requested and delivered last; None for an unknown container."""
        return self._kept.get(key)

    def forget(self, key: ProxyKey) -> bool:
        """Forget a container that has ended; return whether it was known."""
        if self._newest.get((key.uid, key.name)) == key:
            del self._newest[key.uid, key.name]
        return self._kept.pop(key, None) is not None

    def of_pod(self, uid: str) -> list[ProxyKey]:
        """Return the known containers of a pod."""
        return [key for key in self._kept if key.uid == uid]

    def requested(self, uid: str, name: str, reported: Requested) -> Requested:
        """Return a container's reported values, with kubelet's in place of delivered ones.

        A value that was not delivered is kubelet's, as of a container that no hook saw created.
        """
        newest = self._newest.get((uid, name))
        return reported if newest is None else without_delivered(reported, *self._kept[newest])

    def remembered(self) -> Iterator[tuple[str, Remembered]]:
        """Return what the requests log keeps over a restart."""
        for key, (requested, delivered) in self._kept.items():
            yield key.log_id, Remembered(requested, hooked=True, delivered=delivered)


def without_delivered(reported: Requested, requested: Requested, delivered: Requested) -> Requested:
    """Return reported values, with the requested one in place of each that was delivered."""
    return Requested(
        *(
            getattr(requested, name) if value == getattr(delivered, name) else value
            for name in Requested.__struct_fields__
            for value in [getattr(reported, name)]
        )
    )
