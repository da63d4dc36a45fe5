"""What cannot be used of objects, logged once and not with each event of the object."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

_log = logging.getLogger(__name__)

_MOST_LOGGED: Final = 10
"""Problems of one object; chosen: a Device with thousands of bad entries is found by the first."""


class Complaints:
    """The problems of the objects of one source, by what names an object in the log."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, ...]] = {}

    @property
    def held(self) -> Mapping[str, tuple[str, ...]]:
        return MappingProxyType(self._held)

    def set(self, obj: str, problems: Iterable[object]) -> None:
        """Take all problems of the present state of an object; log them if they are others than
        before."""
        texts = tuple(str(problem) for problem in problems)
        if not texts:
            self._held.pop(obj, None)
        elif self._held.get(obj) != texts:
            self._held[obj] = texts
            for text in texts[:_MOST_LOGGED]:
                _log.warning("%s", text)
            if len(texts) > _MOST_LOGGED:
                _log.warning("%s: %d more problems", obj, len(texts) - _MOST_LOGGED)

    def forget(self, obj: str) -> None:
        """Forget an object that is gone."""
        self._held.pop(obj, None)
