"""Which devices a pod gets through a reservation."""

from __future__ import annotations

from typing import Final

from apis.keys import CPU, EPHEMERAL_STORAGE, MEMORY
from cluster.scheduler.exact.devices.candidates import Limits
from cluster.scheduler.plugins.contract import Restored
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.tables import Tables

_OF_THE_NODE: Final = frozenset({CPU, MEMORY, EPHEMERAL_STORAGE})
"""Resources that no device has."""


def limits_within(
    devices: DeviceTable, tables: Tables, row: int, uid: str, restored: Restored | None
) -> Limits:
    """Return the limits of a pod that uses a reservation.

    Its devices come first. If it restricts a resource of devices, a pod gets nothing else of the
    types that it holds.
    """
    left = devices.remainder(row, uid)
    preferred = {type_: frozenset(minors) for type_, minors in left.items()}
    if restored is None or not restored.restricted(tables, uid) - _OF_THE_NODE:
        return Limits(preferred=preferred)
    return Limits(preferred=preferred, required=left)
