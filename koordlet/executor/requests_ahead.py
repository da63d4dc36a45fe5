"""Requests of kubelet for running containers that the desired values do not follow yet.

A hook's reply has what koordlet decides from kubelet's new request, and the runtime writes it a
moment later. Until the executor has the container as of that reply, its desired values follow from
the former request, and a repair by them would undo what the runtime wrote. So the files of such a
container are neither judged nor written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class RequestsAhead:
    """See the module. Requests are numbered in their order. Any thread; does no I/O."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, int] = {}
        """A container's cgroup -> the number of the newest request for it."""

    def add(self, place: str, number: int) -> None:
        """Note a request, before the reply to it.

        place: the container's cgroup; "" where it is not known. The node's own files stand under
        that name, and no request concerns them.
        """
        if not place:
            return
        with self._lock:
            self._newest[place] = number

    def follow(self, number: int, places: Iterable[str] | None = None) -> None:
        """Note that desired values follow from all requests up to `number`.

        places: the cgroups of which this is so; None: all.
        """
        with self._lock:
            for place in tuple(self._newest) if places is None else places:
                if self._newest.get(place, number + 1) <= number:
                    del self._newest[place]

    def __bool__(self) -> bool:
        return bool(self._newest)

    def __contains__(self, place: object) -> bool:
        return place in self._newest
