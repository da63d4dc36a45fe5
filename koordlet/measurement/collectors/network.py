"""Bytes per second of the node's network interfaces.

The interfaces are those with a device behind them in the node's own network namespace; where there
is none, as on a node that is itself a container, all but the loopback. The virtual ones of pods,
bridges and tunnels carry the same bytes again.
Source: docs/facts/kernel.md, "Network interfaces".
"""

from __future__ import annotations

from typing import Final

from koordlet.measurement.collecting import Round, Unavailable
from koordlet.measurement.counters import Rate, within
from koordlet.measurement.series import Metric, Series
from linux.host import Host
from linux.net_dev import parse_net_dev

_MOST_BYTES_S: Final = 1e12
"""A rate above it is a defect of a counter and no sample: 800 Gbit/s are 1e11."""


class _Interface:
    """The series of one interface and its counters."""

    __slots__ = ("receive", "received", "send", "sent")

    def __init__(self, name: str, interval_s: float) -> None:
        self.receive = Series(Metric.NODE_NETWORK_RECEIVE, name)
        self.send = Series(Metric.NODE_NETWORK_SEND, name)
        self.received, self.sent = Rate(interval_s), Rate(interval_s)


class NetworkCollector:
    """Bytes per second, received and sent, of each interface.

    A counter that went back, because it wrapped at 32 bits or its interface was made again, gives
    no sample for one round: what passed cannot be known from it.
    """

    name = "network"
    gate = None

    def __init__(
        self, host: Host, *, sys_root: str = "/sys", interval_s: float = 1.0,
        retention_s: float = 330.0,
    ) -> None:  # fmt: skip
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._host = host
        self._sys_root = sys_root
        self._names: frozenset[str] = frozenset()
        self._interfaces: dict[str, _Interface] = {}

    def sample(self, round_: Round) -> dict[Series, float]:
        try:
            counters = parse_net_dev(self._host.read("/proc/1/net/dev"))
        except FileNotFoundError:
            raise Unavailable("this kernel has no network interfaces") from None
        at = round_.clock()
        if counters.keys() != self._names:
            self._follow(frozenset(counters))
        samples: dict[Series, float] = {}
        for name, interface in self._interfaces.items():
            found = counters[name]
            for series, rate, value in (
                (interface.receive, interface.received, found.received_bytes),
                (interface.send, interface.sent, found.sent_bytes),
            ):
                known = within(rate.per_second(value, at), _MOST_BYTES_S)
                if known is not None:
                    samples[series] = known
        return samples

    def close(self) -> None:
        self._names = frozenset()
        self._interfaces = {}

    def _follow(self, names: frozenset[str]) -> None:
        """Choose the interfaces; the counters of those known go on."""
        chosen = {name for name in names if self._has_device(name)} or names - {"lo"}
        self._interfaces = {
            name: self._interfaces.get(name) or _Interface(name, self.interval_s)
            for name in sorted(chosen)
        }
        self._names = names

    def _has_device(self, name: str) -> bool:
        try:
            self._host.readlink(f"{self._sys_root}/class/net/{name}/device")
        except OSError:
            return False
        return True
