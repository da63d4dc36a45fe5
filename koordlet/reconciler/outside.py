"""Outside changes: writes by other programs to managed files, found with inotify."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from koordlet.executor.executor import Executor
from service.inotify import IN_MODIFY, Inotify

log = logging.getLogger(__name__)


class Changes(NamedTuple):
    """Writes by others. writes: their number. subjects: the files' subjects; "" if not known."""

    writes: int
    subjects: Collection[str]


class OutsideChanges:
    """See the module. Guarded by the reconciler's lock.

    here: maps a path of the host to a path of this process.
    """

    def __init__(self, executor: Executor, *, here: Callable[[str], str]) -> None:
        self._executor = executor
        self._here = here
        self._inotify: Inotify | None = None
        self._failed = False
        self._watched_for: object = None
        self._nodes_own: dict[str, str] = {}
        """This process's path of a directory -> the node's own path, where they differ."""

    def close(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable after a change."""
        return [] if self._inotify is None else [self._inotify.fileno()]

    def watch(self, wanted_for: object) -> None:
        """Watch the directories of all managed files.

        wanted_for: the snapshot of the desired values; a second call with the same does nothing.
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
        wanted = {self._here(directory): directory for directory in self._executor.directories()}
        for path in self._inotify.watched():
            if path not in wanted:
                self._inotify.remove(path)
        self._nodes_own = {}
        for path, directory in wanted.items():
            self._add(path, directory)

    def watch_more(self, directories: Iterable[str]) -> None:
        """Watch these directories too, if the others are watched."""
        for directory in directories if self._inotify is not None else ():
            self._add(self._here(directory), directory)

    def _add(self, path: str, directory: str) -> None:
        assert self._inotify is not None
        self._inotify.add(path, IN_MODIFY)
        if path != directory:
            self._nodes_own[path] = directory

    def changes(self, own: Collection[str] = ()) -> Changes:
        """Return the writes to managed files since the last call, except those to `own`."""
        events = self._inotify.events() if self._inotify is not None else ()
        count = 0
        subjects: set[str] = set()
        for event in events:
            directory, _, name = event.path.rpartition("/")
            path = f"{self._nodes_own.get(directory, directory)}/{name}"
            # An event without a path means that events were lost: any file may have changed.
            owner = self._executor.owner(path) if event.path else ""
            if owner is not None and path not in own:
                count += 1
                subjects.add(owner)
        return Changes(count, subjects)
