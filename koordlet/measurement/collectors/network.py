"""Bytes per second of the node's network interfaces.

The interfaces are those with a device behind them in the node's own network namespace; where there
is none, as on a node that is itself a container, all but the loopback. The virtual ones of pods,
bridges and tunnels carry the same bytes again.
Source: docs/facts/kernel.md, "Network interfaces".
"""

from __future__ import annotations

from typing import Final, NamedTuple

from koordlet.measurement.collecting import Round, Unavailable
from koordlet.measurement.counters import RateSeries
from koordlet.measurement.series import Metric, Series
from linux.host import Host
from linux.net_dev import parse_net_dev

_MOST_BYTES_S: Final = 1e12
"""A rate above it is a defect of a counter and no sample: 800 Gbit/s are 1e11."""


class _Interface(NamedTuple):
    """The series of one interface."""

    received: RateSeries
    sent: RateSeries


def _interface(name: str, interval_s: float) -> _Interface:
    return _Interface(
        RateSeries(Series(Metric.NODE_NETWORK_RECEIVE, name), interval_s, most=_MOST_BYTES_S),
        RateSeries(Series(Metric.NODE_NETWORK_SEND, name), interval_s, most=_MOST_BYTES_S),
    )


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
            interface.received.add(samples, found.received_bytes, at)
            interface.sent.add(samples, found.sent_bytes, at)
        return samples

    def close(self) -> None:
        self._names = frozenset()
        self._interfaces = {}

    def _follow(self, names: frozenset[str]) -> None:
        """Choose the interfaces; the counters of those known go on."""
        chosen = {name for name in names if self._has_device(name)} or names - {"lo"}
        self._interfaces = {
            name: self._interfaces.get(name) or _interface(name, self.interval_s)
            for name in sorted(chosen)
        }
        self._names = names

    def _has_device(self, name: str) -> bool:
        try:
            self._host.readlink(f"{self._sys_root}/class/net/{name}/device")
        except OSError:
            return False
        return True
