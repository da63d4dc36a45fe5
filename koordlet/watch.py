"""Watching the directories of files that people edit: objects and site policies.

inotify tells at once; a slow poll stays as the net, for file systems without inotify and for
watches that could not be set. A change is acted on after a short silence, so that an editor's
several steps are one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from linux.inotify import IN_CREATE, IN_MODIFY, Inotify

_LOG = logging.getLogger("koordlet.watch")

_IN_CLOSE_WRITE: Final = 0x8
_IN_MOVED: Final = 0x40 | 0x80
_IN_DELETE: Final = 0x200
_IN_ATTRIB: Final = 0x4
_MASK: Final = IN_CREATE | IN_MODIFY | _IN_CLOSE_WRITE | _IN_MOVED | _IN_DELETE | _IN_ATTRIB
_SILENCE_S: Final = 0.02


class DirectoryWatch:
    """Calls `changed` on the event loop when something in the directory may have changed."""

    def __init__(self, path: str, changed: Callable[[], None], *, poll: float) -> None:
        """poll: seconds between looks without a notice."""
        self._path = path
        self._changed = changed
        self._poll = poll
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._next_poll: asyncio.TimerHandle | None = None
        self._inotify: Inotify | None = None
        try:
            self._inotify = Inotify()
        except OSError as error:
            _LOG.warning("no inotify, polling only: %s", error.strerror, extra={"path": path})
        else:
            self._loop.add_reader(self._inotify.fileno(), self._readable)
        self._poll_now()

    def close(self) -> None:
        for timer in (self._timer, self._next_poll):
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
        if self._inotify is None:
            return
        try:
            self._inotify.add(self._path, _MASK)
        except OSError as error:
            _LOG.debug("no watch: %s", error.strerror, extra={"path": self._path})
