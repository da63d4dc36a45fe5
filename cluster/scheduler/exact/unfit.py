"""Why an exact allocation is impossible on a node."""

from __future__ import annotations

from typing import NamedTuple


class Unfit(NamedTuple):
    """reason: a phrase, as conditions and events show it."""

    reason: str
