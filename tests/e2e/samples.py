"""What koordlet measured, from the file that it leaves, beside the kernel's counters.

A sample of a rate, times its interval, is what a counter grew by in that interval. So what a
counter grew by between two moments lies between the sum of the intervals inside of them and the
sum of those that overlap them, however busy the machine is.
"""

from __future__ import annotations

import time
from pathlib import Path

from koordlet.measurement.saved import load
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store

_TABLES = ("node", "pods", "disks")
_KEPT_S = 600.0
_SECTOR = 512
_TICKS_PER_S = 100


class Samples:
    """The samples in a run directory's file of measurements, once the daemon has ended."""

    def __init__(self, run_dir: Path) -> None:
        self._now = time.monotonic()
        self._store = Store()
        for name in _TABLES:
            self._store.add_table(name, interval_s=1.0, retention_s=_KEPT_S)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        load(self._store, str(run_dir / "measurements"), boot=boot, now=self._now)

    def values(self, metric: Metric, of: str = "") -> list[float]:
        """All samples of a series, oldest first; none for a series that is not there."""
        window = self._store.window(Series(metric, of), self._now, _KEPT_S)
        return [] if window is None else [float(each) for each in window[1]]

    def objects(self, metric: Metric) -> set[str]:
        """What the metric has samples of."""
        found = self._store.windows(metric, self._now, _KEPT_S)
        return {of for keys, _, _ in found for of, _ in keys}

    def growth(self, metric: Metric, of: str, moments: tuple[float, float]) -> tuple[float, float]:
        """The least and the most that a rate's counter grew by between two moments.

        moments: of the monotonic clock.
        """
        window = self._store.window(Series(metric, of), self._now, _KEPT_S)
        least = most = 0.0
        if window is not None:
            times, values = (each.tolist() for each in window)
            first, last = moments
            for begin, end, rate in zip(times, times[1:], values[1:], strict=False):
                if begin >= first and end <= last:
                    least += (end - begin) * rate
                if begin <= last and end >= first:
                    most += (end - begin) * rate
        return least, most


def disk_bytes() -> dict[str, tuple[int, int]]:
    """Bytes read from and written to each block device since the boot."""
    rows = map(str.split, Path("/proc/diskstats").read_text().splitlines())
    return {row[2]: (int(row[5]) * _SECTOR, int(row[9]) * _SECTOR) for row in rows}


def cpu_seconds() -> float:
    """CPU time of the whole machine since the boot, without waiting and stolen time."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _, _, irq, softirq = map(int, words[1:8])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def memory_used() -> tuple[int, int]:
    """Bytes of the node's memory in use, without page cache and with it."""
    found = _meminfo()
    return found["MemTotal"] - found["MemAvailable"], found["MemTotal"] - found["MemFree"]


def memory_total() -> int:
    return _meminfo()["MemTotal"]


def _meminfo() -> dict[str, int]:
    """Bytes by name."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
