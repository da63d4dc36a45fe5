"""NRI events: numbers, bits of the subscription mask, and their text names.

Bit of event number n is 1 << (n - 1). A bit that the runtime does not know fails the registration;
a mask of 0 means "everything", which from NRI 0.10 on makes a plugin a validator whose silence
fails every creation. So a mask is always made here, never zero, never with the validator's bit.
Source: docs/facts/nri.md, "Events and masks".
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final

from apis.errors import InputError


class Event(IntEnum):
    """The events' numbers on the wire."""

    RUN_POD_SANDBOX = 1
    STOP_POD_SANDBOX = 2
    REMOVE_POD_SANDBOX = 3
    CREATE_CONTAINER = 4
    POST_CREATE_CONTAINER = 5
    START_CONTAINER = 6
    POST_START_CONTAINER = 7
    UPDATE_CONTAINER = 8
    POST_UPDATE_CONTAINER = 9
    STOP_CONTAINER = 10
    REMOVE_CONTAINER = 11
    UPDATE_POD_SANDBOX = 12
    POST_UPDATE_POD_SANDBOX = 13
    VALIDATE_CONTAINER_ADJUSTMENT = 14

    @property
    def bit(self) -> int:
        return 1 << (self - 1)

    @property
    def text(self) -> str:
        """The lower-case method name, as configuration files spell it."""
        return self.name.replace("_", "").lower()


VALID_MASK_BEFORE_0_10: Final = 0x07FF
"""The bits of the events 1 to 11, which every version has."""
VALID_MASK: Final = 0x3FFF
"""The bits of the events 1 to 14, since NRI 0.10. A bit above them fails the registration."""

SUBSCRIBED: Final = frozenset(
    {
        Event.RUN_POD_SANDBOX,
        Event.STOP_POD_SANDBOX,
        Event.REMOVE_POD_SANDBOX,
        Event.CREATE_CONTAINER,
        Event.POST_START_CONTAINER,
        Event.UPDATE_CONTAINER,
        Event.POST_UPDATE_CONTAINER,
        Event.STOP_CONTAINER,
        Event.REMOVE_CONTAINER,
        Event.POST_UPDATE_POD_SANDBOX,
    }
)
"""What we ask for. Each event costs a round trip under the runtime's node-wide lock, so the hooks
around start and creation that carry nothing new are left out."""

_BY_TEXT: Final = {event.text: event for event in Event}


def mask_of(events: Iterable[Event]) -> int:
    """Return the mask with one bit for each event."""
    mask = 0
    for event in events:
        mask |= event.bit
    return mask


def subscription(events: Iterable[Event], valid_mask: int) -> int:
    """Return the mask to answer Configure with: only valid bits, no validator, never zero."""
    mask = mask_of(events) & valid_mask & ~Event.VALIDATE_CONTAINER_ADJUSTMENT.bit
    return mask or mask_of(SUBSCRIBED) & valid_mask


def parse_events(text: str, *, obj: str) -> frozenset[Event]:
    """Parse a comma-separated list of event names, case ignored.

    "all", "pod" / "podsandbox" and "container" are groups. The validator is left out of groups.
    Raises InputError naming `obj` for a name that does not exist and for an empty list.
    """
    found: set[Event] = set()
    for word in text.split(","):
        name = word.strip().lower()
        if name in _BY_TEXT:
            found.add(_BY_TEXT[name])
        elif name in ("all", "pod", "podsandbox", "container"):
            part = {"all": "", "podsandbox": "pod"}.get(name, name)
            found |= {event for event in Event if part in event.text}
        else:
            raise InputError(
                obj=obj,
                field="events",
                value=word,
                problem="is not an NRI event",
                hint="names are like createcontainer; groups are all, pod, container",
            )
    return frozenset(found - {Event.VALIDATE_CONTAINER_ADJUSTMENT})
