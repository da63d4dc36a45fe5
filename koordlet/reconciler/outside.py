"""Outside changes: somebody else wrote one of the files that something is wanted of (inotify)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from koordlet.executor.executor import Executor
from service.inotify import IN_MODIFY, Inotify

log = logging.getLogger(__name__)


class OutsideChanges:
    """See the module. Belongs to whoever holds the reconciler's lock.

    here: where this process finds a file of the host.
    """

    def __init__(self, executor: Executor, *, here: Callable[[str], str]) -> None:
        self._executor = executor
        self._here = here
        self._inotify: Inotify | None = None
        self._failed = False
        self._watched_for: object = None

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def descriptors(self) -> list[int]:
        """Return what can be read from when something changed."""
        return [] if self._inotify is None else [self._inotify.fileno()]

    def watch(self, wanted_for: object) -> None:
        """Watch the directories of all files that something is wanted of.

        wanted_for: the snapshot that they are wanted for; nothing is done for the same one again.
        """
        if self._failed or self._watched_for is wanted_for:
            return
        self._watched_for = wanted_for
        if self._inotify is None:
            try:
                self._inotify = Inotify()
            except OSError as error:
                log.warning("no watch for outside changes, the timer finds them: %s", error)
                self._failed = True
                return
        wanted = {self._here(directory) for directory in self._executor.directories()}
        for path in self._inotify.watched():
            if path not in wanted:
                self._inotify.remove(path)
        for path in wanted:
            self._inotify.add(path, IN_MODIFY)

    def count(self, own: frozenset[str] = frozenset()) -> int:
        """Count the writes to managed files since the last call, except those to `own`."""
        if self._inotify is None:
            return 0
        events = self._inotify.events()
        if not events:
            return 0
        ours = {self._here(path) for path in own}
        managed = {self._here(path) for path in self._executor.paths()}
        # An event without a path: some were lost, so anything may have changed.
        return sum(
            not event.path or (event.path in managed and event.path not in ours) for event in events
        )
