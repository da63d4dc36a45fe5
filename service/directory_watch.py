"""Watching the directories of files that people edit: objects, site policies, registrations.

inotify reports a change at once; a slow poll is the net for file systems without inotify and for
watches that could not be set. A change is acted on after a short silence, so that an editor's
several steps are one. A watch belongs to a directory and not to its name: one that is moved away,
replaced or created later is looked up by its name.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final

from service.inotify import IN_CREATE, IN_MODIFY, Inotify

_LOG = logging.getLogger(__name__)

_IN_CLOSE_WRITE: Final = 0x8
_IN_MOVED: Final = 0x40 | 0x80
_IN_DELETE: Final = 0x200
_IN_ATTRIB: Final = 0x4
_IN_SELF: Final = 0x400 | 0x800  # the directory itself is deleted or moved
_MASK: Final = (
    IN_CREATE | IN_MODIFY | _IN_CLOSE_WRITE | _IN_MOVED | _IN_DELETE | _IN_ATTRIB | _IN_SELF
)
_SILENCE_S: Final = 0.02
"""Quiet time after which a burst of events counts as over; chosen: tools replace a file within some
milliseconds, and a reader does not notice twice as much."""
_MISSING_LOOK_S: Final = 1.0
"""Seconds between looks for a missing directory; chosen: one stat a second costs nothing."""


class DirectoryWatch:
    """Calls `changed` on the event loop when something in the directory may have changed."""

    def __init__(
        self,
        path: str,
        changed: Callable[[], None],
        *,
        poll: float,
        missing_look_s: float = _MISSING_LOOK_S,
    ) -> None:
        """poll: seconds between looks without a notice. missing_look_s: between looks for a
        directory that is not there."""
        self._path = path
        self._changed = changed
        self._poll = poll
        self._missing_look_s = min(missing_look_s, poll)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._next_poll: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._armed: tuple[int, int] | None = None
        self._inotify: Inotify | None = None
        try:
            self._inotify = Inotify()
        except OSError as error:
            _LOG.warning("no inotify, polling only: %s", error.strerror, extra={"path": path})
        else:
            self._loop.add_reader(self._inotify.fileno(), self._readable)
        self._poll_now()

    def close(self) -> None:
        for timer in (self._timer, self._next_poll, self._next_look):
            if timer is not None:
                timer.cancel()
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _readable(self) -> None:
        assert self._inotify is not None
        try:
            happened = bool(self._inotify.events())
        except OSError as error:
            _LOG.warning("inotify failed: %s", error.strerror, extra={"path": self._path})
            happened = True
        if happened and self._timer is None:
            self._timer = self._loop.call_later(_SILENCE_S, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._arm()
        self._changed()

    def _poll_now(self) -> None:
        """Look without a notice, and set the watch again if the directory was replaced."""
        self._arm()
        self._next_poll = self._loop.call_later(self._poll, self._poll_fire)

    def _poll_fire(self) -> None:
        self._poll_now()
        self._changed()

    def _arm(self) -> None:
        """Watch the directory that has the name now; look for it soon again if none has."""
        if self._inotify is None:
            return
        try:
            status = os.stat(self._path)
            identity = (status.st_dev, status.st_ino)
            # A new directory may have the old one's number; the watch ended with the old one.
            if identity != self._armed or self._path not in self._inotify:
                self._inotify.remove(self._path)
                self._armed = identity if self._inotify.add(self._path, _MASK) else None
        except FileNotFoundError:
            if self._next_look is None:
                self._next_look = self._loop.call_later(self._missing_look_s, self._look)
        except OSError as error:
            _LOG.debug("no watch: %s", error.strerror, extra={"path": self._path})

    def _look(self) -> None:
        self._next_look = None
        if os.path.exists(self._path):
            self._fire()
        else:
            self._arm()
