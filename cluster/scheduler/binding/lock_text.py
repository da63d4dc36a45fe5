"""The lock of a node as text: `<RFC 3339 time>,<namespace>,<name of the pod>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from apis.meta import format_time, parse_time

LOCK_SECONDS: Final = 300.0
"""A lock that the plugin did not remove within this time is stale; the vendors' value."""
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Of a pod or a namespace: a DNS subdomain."""


@dataclass(frozen=True, slots=True)
class NodeLock:
    """A lock as it stands on a node.

    taken_s: when it was taken, seconds since 1970 by the clock of its holder. namespace, name: of
    the pod that it is held for; both "" in the older form, which has the time alone.
    """

    taken_s: float
    namespace: str = ""
    name: str = ""

    @property
    def pod(self) -> str:
        """Return namespace/name of the pod, "" if the lock does not name it."""
        return f"{self.namespace}/{self.name}" if self.name else ""


def lock_text(namespace: str, name: str, *, now_s: float) -> str:
    """Return the text of a lock that is taken now for a pod."""
    return f"{format_time(datetime.fromtimestamp(now_s, UTC))},{namespace},{name}"


def parse_lock(text: str) -> NodeLock | None:
    """Return the lock that an annotation says, None for a text that no lock has."""
    moment, *pod = text.split(",")
    if len(pod) not in (0, 2) or not all(map(_NAME.fullmatch, pod)):
        return None
    try:
        return NodeLock(parse_time(moment).timestamp(), *pod)
    except ValueError:
        return None
