"""Host ports in use, by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from apis.scheduling_pod import ContainerPort
from cluster.scheduler.tables.booking import Booking

ANY_ADDRESS: Final = "0.0.0.0"


def meet(ports: Iterable[ContainerPort], others: Iterable[ContainerPort]) -> bool:
    """Return whether one of these ports conflicts with one of the others on a node."""
    others = tuple(others)
    return any(
        (port.protocol, port.host_port) == (other.protocol, other.host_port)
        and _meet(port.host_ip or ANY_ADDRESS, other.host_ip or ANY_ADDRESS)
        for port in ports
        for other in others
    )


def _meet(address: str, other: str) -> bool:
    return ANY_ADDRESS in (address, other) or address == other


class PortTable:
    """Counts the pods that use (protocol, port, address) of a node."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, int], dict[str, Counter[int]]] = {}

    def place(self, booking: Booking, row: int) -> None:
        """Count the ports of a booking."""
        for port in booking.shape.ports:
            by_address = self._used.setdefault((port.protocol, port.host_port), {})
            by_address.setdefault(port.host_ip or ANY_ADDRESS, Counter())[row] += 1

    def remove(self, booking: Booking, row: int) -> None:
        """Take back what `place` did."""
        for port in booking.shape.ports:
            key = (port.protocol, port.host_port)
            address = port.host_ip or ANY_ADDRESS
            by_address = self._used[key]
            rows = by_address[address]
            rows[row] -= 1
            if not rows[row]:
                del rows[row]
            if not rows:
                del by_address[address]
            if not by_address:
                del self._used[key]

    def conflicts(
        self,
        ports: Iterable[ContainerPort],
        row: int,
        *,
        without: Iterable[Iterable[ContainerPort]] = (),
    ) -> bool:
        """Return whether one of these ports meets one in use on a node.

        without: ports of pods on the node that count as gone.
        """
        gone = Counter(
            (p.protocol, p.host_port, p.host_ip or ANY_ADDRESS) for q in without for p in q
        )
        for port in ports:
            key = (port.protocol, port.host_port)
            wanted = port.host_ip or ANY_ADDRESS
            for used, rows in self._used.get(key, {}).items():
                if _meet(used, wanted) and rows.get(row, 0) > gone[*key, used]:
                    return True
        return False

    def rows_in_conflict(self, protocol: str, port: int, address: str) -> Iterator[int]:
        """Yield the rows where a pod's port meets one in use; "0.0.0.0" or "" meets any address."""
        wanted = address or ANY_ADDRESS
        for used, rows in self._used.get((protocol, port), {}).items():
            if _meet(used, wanted):
                yield from rows
