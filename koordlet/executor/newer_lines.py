"""Lines of the journal that a newer koordlet wrote and this one cannot read: after a downgrade.

They are carried along untouched, so that the newer one finds its originals when it comes back. What
this one does not know it does not write, so nothing of it has to be given back meanwhile.
"""

from __future__ import annotations

from typing import Final

import msgspec

from linux.resources import Resource

_KEPT: Final = frozenset({"record", "delivery", "handed"})
_RESOURCES: Final = frozenset(Resource)


class _About(msgspec.Struct):
    """What a line of any version says it is about."""

    resource: str
    place: str = ""
    container_id: str = ""
    key: str = ""


class NewerLines:
    """The lines, as they were read. kinds: the fields that a line of this version may have."""

    def __init__(self, kinds: frozenset[str]) -> None:
        self._kinds = kinds
        self._lines: dict[tuple[str, ...], bytes] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def lines(self) -> list[bytes]:
        return list(self._lines.values())

    def take(self, raw: bytes) -> bool:
        """Tell whether a newer version wrote this line, and carry it along if so."""
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            if len(fields) != 1:
                return False
            ((kind, value),) = fields.items()
            if kind not in self._kinds:
                self._lines[kind, raw.decode()] = raw
                return True
            if kind == "forget":
                place, resource, key = msgspec.json.decode(value, type=tuple[str, str, str])
                gone = "record", place, resource, key
            elif kind == "superseded":
                place, resource = msgspec.json.decode(value, type=tuple[str, str])
                gone = "handed", place, resource, ""
            elif kind in _KEPT:
                about = msgspec.json.decode(value, type=_About)
                resource = about.resource
                at = about.container_id if kind == "delivery" else about.place
                gone = kind, at, resource, about.key
            else:
                return False
        except (ValueError, RecursionError):
            return False
        if resource in _RESOURCES:
            return False
        self._lines.pop(gone, None)
        if kind in _KEPT:
            self._lines[gone] = raw
        return True

    def done_with(self, container_id: str) -> bool:
        """Drop the deliveries of a container that is gone; return whether there were any."""
        gone = [at for at in self._lines if at[:2] == ("delivery", container_id)]
        for at in gone:
            del self._lines[at]
        return bool(gone)
