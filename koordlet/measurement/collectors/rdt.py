"""Cache occupancy and memory bandwidth of the QoS classes, from resctrl's monitoring.

The kernel counts bytes since a group exists; the series are rates. A value that the hardware does
not have now is missing, and so is a class without a group. Files: docs/facts/kernel.md, "resctrl".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from koordlet.measurement.collecting import Round, Unavailable
from koordlet.measurement.counters import RateSeries
from koordlet.measurement.series import Metric, Series
from linux.host import Host
from linux.resctrl import MOUNT
from linux.resctrl_groups import group_path
from linux.resctrl_monitor import monitored, read_group_counters

GROUPS: Final = ("LSR", "LS", "BE")
"""Upstream's names of the classes' control groups."""
_MOST_BYTES_S: Final = 1e13
"""A rate above it is a defect of a counter and no sample: memory of a socket reaches 1e12."""


class ResctrlCollector:
    """Cache occupancy in bytes and memory bandwidth in bytes per second of LSR, LS and BE."""

    name = "resctrl"
    gate = "ResctrlCollector"

    def __init__(
        self, host: Host, *, mount: str = MOUNT, interval_s: float = 10.0,
        retention_s: float = 630.0,
    ) -> None:  # fmt: skip
        """interval_s: upstream's resctrl-collector-interval. retention_s: chosen, ten minutes."""
        self.interval_s = interval_s
        self.retention_s = retention_s
        self._host = host
        self._mount = mount
        self._inodes: dict[str, int] = {}
        self._rates: dict[Series, RateSeries] = {}
        self._counts: dict[Series, int] = {}

    @property
    def counts(self) -> Mapping[Series, int]:
        """The bytes that the kernel has counted, by series of bandwidth, as of the last round;
        upstream's metric shows them. A new value each round. Any thread."""
        return self._counts

    def sample(self, round_: Round) -> dict[Series, float]:
        if not monitored(self._host, self._mount):
            raise Unavailable(f"{self._mount} is not mounted, or this machine has no monitoring")
        samples: dict[Series, float] = {}
        counts: dict[Series, int] = {}
        for group in GROUPS:
            self._sample_group(round_, group, samples, counts)
        self._counts = counts
        if all(inode < 0 for inode in self._inodes.values()):
            round_.problem(f"{self._mount} has none of the control groups {', '.join(GROUPS)}")
        return samples

    def close(self) -> None:
        self._inodes = {}
        self._rates = {}
        self._counts = {}

    def _sample_group(
        self, round_: Round, group: str, samples: dict[Series, float], counts: dict[Series, int]
    ) -> None:
        try:
            inode = self._host.inode(group_path(group, self._mount))
        except OSError:
            inode = -1
        if self._inodes.get(group) != inode:
            # Another group of the same name counts from its own beginning.
            self._inodes[group] = inode
            for series in [known for known in self._rates if known.of == group]:
                del self._rates[series]
        counters = read_group_counters(self._host, group, self._mount)
        at = round_.clock()
        for domain, found in (counters or {}).items():
            if found.occupancy_bytes is not None:
                samples[Series(Metric.RESCTRL_LLC, group, str(domain))] = found.occupancy_bytes
            for file, count in found.bandwidth_bytes.items():
                series = Series(Metric.RESCTRL_BANDWIDTH, group, f"{domain}/{file}")
                counts[series] = count
                if series not in self._rates:
                    self._rates[series] = RateSeries(series, self.interval_s, most=_MOST_BYTES_S)
                self._rates[series].add(samples, count, at)
