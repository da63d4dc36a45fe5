"""The samples of the last minutes, in rings of NumPy arrays, and the statistics over them.

A table has the series of one collector: a row for each series, a column for each round, and one
time for each column. A sample that is missing is NaN. The oldest column is overwritten, so the
number of columns is the retention. A row whose series has no sample any more is used for another:
that of a pod or another object soon after it has gone, so that memory depends on the pods that run
at a time, however fast they come and go.

One thread records; any thread reads through a `View`, which shows the samples up to its moment. The
lock is held while a column is written and while a window is copied, each well below a millisecond;
sorting is outside it. The rules of the statistics: docs/measurement.md, "Statistics".
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from koordlet.measurement.series import Aggregate, Metric, Series

Floats = NDArray[np.float64]
Key = tuple[str, str]
"""An object of a metric: `Series.of` and `Series.detail`."""

_SPARE: Final = 8
"""Columns beyond the retention: rounds that come a little early do not shorten a window."""
_FIRST_ROWS: Final = 16
"""Rows of a new table; it grows from there by half of what it has, so a third at most is unused."""
_MOST_ROWS: Final = 16_384
"""Chosen: rows of one table. 110 pods and 220 containers have 1,320 series of CPU, memory and
throttling, and 7,920 of pressure. Beyond it samples of further series are left out and counted."""
_MOST_COLUMNS: Final = 8192
"""Chosen: columns of one table, 2 h and 16 min at one second: 64 KiB a series."""
_EXPIRE_EVERY_S: Final = 30.0
"""How often rows without samples are looked for. Chosen: as long as an object counts as there
(`_GONE_S`). Half of it: a look at all rows, some milliseconds, twice as often."""
_GONE_ROUNDS: Final = 3
_GONE_S: Final = 30.0
"""Chosen: an object without a sample for as many rounds and as long has gone. A group that is there
is unreadable for a round at most; half a minute keeps what a slow reader of a gone pod asks for."""
PERCENTILES: Final = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one metric for all objects with a sample in the window; arrays of one length.

    keys: the objects, by `Series.of` and `Series.detail`. The other fields: see `Aggregate`.
    """

    keys: tuple[Key, ...]
    samples: NDArray[np.int64]
    span_s: Floats
    average: Floats
    p50: Floats
    p90: Floats
    p95: Floats
    p99: Floats
    largest: Floats
    latest: Floats


class Table:
    """A ring of one collector's samples. All access is under the store's lock."""

    def __init__(self, name: str, interval_s: float, retention_s: float) -> None:
        if not (interval_s > 0 and retention_s >= interval_s):
            raise ValueError(
                f"table {name}: interval {interval_s} s, retention {retention_s} s: the interval "
                "must be positive, and the retention at least as long"
            )
        self.name = name
        self.interval_s = interval_s
        self.retention_s = retention_s
        self.asked_s = 0.0
        self._own_s = retention_s
        columns = _columns(retention_s, interval_s)
        self.times: Floats = np.full(columns, -np.inf)
        self.values: Floats = np.full((_FIRST_ROWS, columns), np.nan)
        self.last_seen: Floats = np.full(_FIRST_ROWS, -np.inf)
        self.rows: dict[Series, int] = {}
        self.free = list(range(_FIRST_ROWS - 1, -1, -1))
        self.next_column = 0
        self.newest = -math.inf
        self.left_out = 0
        self._rows_of: dict[Metric, dict[Key, int]] = {}
        """The rows of each metric that `objects_of` was asked for."""
        self._by_metric: dict[Metric, tuple[tuple[Key, ...], NDArray[np.intp]]] = {}
        """What `objects_of` returned, until the objects change."""
        self._expired_at = -math.inf

    def keep(self, asked_s: float) -> None:
        """Keep samples for as long as a reader asks, and for the table's own retention at least.

        Samples that are there stay, if they fit.
        """
        self.asked_s = asked_s
        self.retention_s = max(self._own_s, asked_s)
        columns = _columns(self.retention_s, self.interval_s)
        if columns == len(self.times):
            return
        # The oldest first; columns without a round yet are older than all others.
        kept = np.argsort(self.times, kind="stable")[-columns:]
        times, values = self.times[kept], self.values[:, kept]
        self.times = np.full(columns, -np.inf)
        self.values = np.full((len(values), columns), np.nan)
        self.times[: len(kept)], self.values[:, : len(kept)] = times, values
        self.next_column = len(kept) % columns

    def record(self, now: float, samples: Mapping[Series, float]) -> None:
        """Add one column. `now` must be later than the newest column's time."""
        if not now > self.newest:
            raise ValueError(f"table {self.name}: time {now} is not after {self.newest}")
        self._expire(now)
        rows = list(map(self.rows.get, samples))
        if None in rows:
            rows = [
                self._row(series) if row is None else row
                for series, row in zip(samples, rows, strict=True)
            ]
        at: NDArray[np.intp] = np.array(rows, dtype=np.intp)
        values: Floats = np.fromiter(samples.values(), np.float64, len(samples))
        # No metric is negative or infinite; what is would come of a defect and is left out.
        good = (at >= 0) & (values >= 0) & (values < np.inf)
        if not good.all():
            self.left_out += int((~good).sum())
            at, values = at[good], values[good]
        column = self.next_column
        self.values[:, column] = np.nan
        self.values[at, column] = values
        self.last_seen[at] = now
        self.times[column] = now
        self.newest = now
        self.next_column = (column + 1) % len(self.times)

    def _row(self, series: Series) -> int:
        row = self.rows.get(series)
        if row is not None:
            return row
        if not self.free:
            have = len(self.last_seen)
            if have >= _MOST_ROWS:
                return -1
            self._grow(min(have + have // 2, _MOST_ROWS))
        row = self.free.pop()
        self.rows[series] = row
        if (of_metric := self._rows_of.get(series.metric)) is not None:
            of_metric[series[1:]] = row
            self._by_metric.pop(series.metric, None)
        return row

    def _grow(self, rows: int) -> None:
        have = len(self.last_seen)
        values = np.full((rows, len(self.times)), np.nan)
        values[:have] = self.values
        last_seen = np.full(rows, -np.inf)
        last_seen[:have] = self.last_seen
        self.values, self.last_seen = values, last_seen
        self.free.extend(range(rows - 1, have - 1, -1))

    def _expire(self, now: float) -> None:
        """Free the rows of objects that have gone, and of series older than the retention."""
        if now - self._expired_at < min(_EXPIRE_EVERY_S, self.retention_s):
            return
        self._expired_at = now
        oldest = now - self.retention_s
        # The last rounds by their number: a collector that paused has seen nothing go. -inf before
        # there were as many rounds.
        rounds = self.times[(self.next_column - _GONE_ROUNDS) % len(self.times)]
        present = max(oldest, min(rounds, now - _GONE_S))
        gone = [
            (series, row)
            for series, row in self.rows.items()
            if self.last_seen[row] < (present if series.of else oldest)
        ]
        for series, row in gone:
            del self.rows[series]
            self.values[row] = np.nan
            self.last_seen[row] = -np.inf
            self.free.append(row)
            if (of_metric := self._rows_of.get(series.metric)) is not None:
                del of_metric[series[1:]]
                self._by_metric.pop(series.metric, None)

    def objects_of(self, metric: Metric) -> tuple[tuple[Key, ...], NDArray[np.intp]]:
        """Return the objects of a metric and their rows."""
        found = self._by_metric.get(metric)
        if found is None:
            of_metric = self._rows_of.get(metric)
            if of_metric is None:
                of_metric = {s[1:]: row for s, row in self.rows.items() if s.metric is metric}
                self._rows_of[metric] = of_metric
            rows: NDArray[np.intp] = np.fromiter(of_metric.values(), np.intp, len(of_metric))
            found = self._by_metric[metric] = tuple(of_metric), rows
        return found

    def columns(self, now: float, within_s: float) -> NDArray[np.intp]:
        """Return the columns of the window [now - within_s, now], oldest first."""
        chosen = np.flatnonzero((self.times >= now - within_s) & (self.times <= now))
        if len(chosen) and chosen[0] == 0 and chosen[-1] == len(self.times) - 1:
            # The window may cross the ring's end.
            return chosen[np.argsort(self.times[chosen])]
        return chosen

    def newest_of(self, rows: NDArray[np.intp], now: float, within_s: float) -> Floats:
        """Return the newest sample of each row in the window [now - within_s, now]; NaN for none.

        As a rule nearly all are in the newest column; the window of the others alone is searched.
        """
        if now >= self.newest >= now - within_s:
            newest: Floats = self.values[rows, self.next_column - 1]
        else:
            newest = np.full(len(rows), np.nan)
        late = np.flatnonzero(np.isnan(newest))
        if len(late):
            values = self.values[np.ix_(rows[late], self.columns(now, within_s))]
            present = ~np.isnan(values)
            have = np.flatnonzero(present.any(axis=1))
            if len(have):
                newest[late[have]] = values[have, _last(present[have])]
        return newest

    def restore(
        self, times: Floats, series: Sequence[Series], values: Floats, *, now: float
    ) -> int:
        """Fill an empty table; returns the number of series that it has then.

        times: (columns,), ascending, in the past. values: (series, columns). Samples older than the
        retention are left out, and series that have no other. Where the interval was shorter before
        and not all rounds fit, every second, third, ... round stays, so that windows stay whole.
        """
        if self.rows or self.newest > -math.inf:
            raise ValueError(f"table {self.name} has samples already")
        young = np.flatnonzero((times <= now) & (times >= now - self.retention_s))
        if not len(young):
            return 0
        young = young[:: -math.ceil(len(young) / len(self.times))][::-1]
        times, values = times[young], values[:, young]
        count = len(times)
        self.times[:count] = times
        for one, row_values in zip(series, values, strict=True):
            kept = np.where((row_values >= 0) & (row_values < np.inf), row_values, np.nan)
            present = np.flatnonzero(~np.isnan(kept))
            if len(present) and (row := self._row(one)) >= 0:
                self.values[row, :count] = kept
                self.last_seen[row] = times[present[-1]]
        self.newest = float(times[-1])
        self.next_column = count % len(self.times)
        return len(self.rows)


def _columns(retention_s: float, interval_s: float) -> int:
    return min(math.ceil(retention_s / interval_s) + _SPARE, _MOST_COLUMNS)


class Store:
    """All tables. One thread records, any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {}

    def add_table(self, name: str, *, interval_s: float, retention_s: float) -> None:
        """Make a table. Raises ValueError for a name that is taken and for bad durations."""
        table = Table(name, interval_s, retention_s)
        with self._lock:
            if name in self._tables:
                raise ValueError(f"table {name} exists already")
            self._tables[name] = table

    def keep(self, table: str, asked_s: float) -> None:
        """Keep a table's samples for as long as a reader asks; see `Table.keep`."""
        with self._lock:
            self._tables[table].keep(asked_s)

    def asked_s(self, table: str) -> float:
        """Return for how long a reader asked to keep a table's samples, 0 without one."""
        with self._lock:
            return self._tables[table].asked_s

    def record(self, table: str, now: float, samples: Mapping[Series, float]) -> None:
        """Store one round of a table. Raises ValueError unless `now` is later than the last."""
        with self._lock:
            self._tables[table].record(now, samples)

    def restore(
        self, table: str, times: Floats, series: Sequence[Series], values: Floats, *, now: float
    ) -> int:
        """Fill an empty table, see `Table.restore`; 0 if there is no table of that name."""
        with self._lock:
            known = self._tables.get(table)
            return 0 if known is None else known.restore(times, series, values, now=now)

    def tables(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._tables)

    def content(
        self, table: str, *, now: float
    ) -> tuple[Floats, tuple[Series, ...], NDArray[np.float32]]:
        """Return the samples of a table: times (columns,), series, values (series, columns).

        Values have 24 significant bits, enough for all statistics and half as large.
        """
        with self._lock:
            known = self._tables[table]
            columns = known.columns(now, known.retention_s)
            series = tuple(known.rows)
            rows = np.array(list(known.rows.values()), dtype=np.intp)
            values = known.values[np.ix_(rows, columns)].astype(np.float32)
            return known.times[columns], series, values

    def view(self, now: float) -> View:
        """Return the samples as of `now`."""
        return View(self, now)

    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return each table's series, bytes, and samples that were left out."""
        with self._lock:
            return {
                name: (len(table.rows), table.values.nbytes, table.left_out)
                for name, table in self._tables.items()
            }

    # --- windows, for views ---------------------------------------------------------------------

    def window(self, series: Series, now: float, within_s: float) -> tuple[Floats, Floats] | None:
        """Return times and values of one series, oldest first, without missing ones."""
        with self._lock:
            for table in self._tables.values():
                row = table.rows.get(series)
                if row is not None:
                    columns = table.columns(now, within_s)
                    values, times = table.values[row, columns], table.times[columns]
                    break
            else:
                return None
        present = ~np.isnan(values)
        return times[present], values[present]

    def newest(self, series: Series, now: float, within_s: float) -> float | None:
        """Return the newest sample of one series in the window."""
        with self._lock:
            for table in self._tables.values():
                row = table.rows.get(series)
                if row is None:
                    continue
                # The newest column is the usual answer; others only after a gap.
                if now >= table.newest >= now - within_s:
                    value = table.values.item(row, table.next_column - 1)
                    if value == value:
                        return value
                if table.last_seen[row] < now - within_s:
                    return None
                values = table.values[row, table.columns(now, within_s)]
                break
            else:
                return None
        present = np.flatnonzero(~np.isnan(values))
        return float(values[present[-1]]) if len(present) else None

    def newest_of(
        self, metric: Metric, now: float, within_s: float
    ) -> Iterable[tuple[tuple[Key, ...], Floats]]:
        """Return objects and their newest samples in the window, NaN for none, of each table."""
        with self._lock:
            return [
                (keys, table.newest_of(rows, now, within_s))
                for table in self._tables.values()
                for keys, rows in (table.objects_of(metric),)
                if keys
            ]

    def windows(
        self, metric: Metric, now: float, within_s: float
    ) -> Iterable[tuple[tuple[Key, ...], Floats, Floats]]:
        """Return objects, times (columns,) and values (objects, columns) of each table."""
        found = []
        with self._lock:
            for table in self._tables.values():
                keys, rows = table.objects_of(metric)
                if keys:
                    columns = table.columns(now, within_s)
                    values = table.values[np.ix_(rows, columns)]
                    found.append((keys, table.times[columns], values))
        return found


class View:
    """The samples up to one moment. The `Measurements` of strategies, with reads of all objects."""

    def __init__(self, store: Store, now: float) -> None:
        self._store = store
        self._now = now

    @property
    def now(self) -> float:
        return self._now

    def latest(self, series: Series, *, within_s: float) -> float | None:
        return self._store.newest(series, self._now, within_s)

    def average(self, series: Series, *, within_s: float) -> float | None:
        window = self._store.window(series, self._now, within_s)
        if window is None or not len(window[1]):
            return None
        return float(window[1].mean())

    def aggregate(self, series: Series, *, within_s: float) -> Aggregate | None:
        window = self._store.window(series, self._now, within_s)
        if window is None or not len(window[1]):
            return None
        times, values = window
        ordered = np.sort(values)
        p50, p90, p95, p99 = (float(ordered[_index(len(ordered), p)]) for p in PERCENTILES)
        return Aggregate(
            samples=len(values),
            span_s=float(times[-1] - times[0]),
            average=float(values.mean()),
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
            largest=float(ordered[-1]),
            latest=float(values[-1]),
        )

    def latest_of(self, metric: Metric, *, within_s: float) -> dict[Key, float]:
        """Return the newest sample of each object of a metric."""
        result: dict[Key, float] = {}
        for keys, newest in self._store.newest_of(metric, self._now, within_s):
            if np.isnan(newest).any():
                result.update(
                    (key, value)
                    for key, value in zip(keys, newest.tolist(), strict=True)
                    if value == value
                )
            else:
                result.update(zip(keys, newest.tolist(), strict=True))
        return result

    def averages(self, metric: Metric, *, within_s: float) -> dict[Key, float]:
        """Return the mean of each object of a metric that has a sample in the window."""
        result: dict[Key, float] = {}
        for keys, _, values in self._store.windows(metric, self._now, within_s):
            present = ~np.isnan(values)
            counts = present.sum(axis=1)
            have = np.flatnonzero(counts)
            means = np.where(present[have], values[have], 0.0).sum(axis=1) / counts[have]
            result.update(
                zip((keys[index] for index in have.tolist()), means.tolist(), strict=True)
            )
        return result

    def statistics(self, metric: Metric, *, within_s: float) -> Statistics:
        """Return all statistics of a metric, for each object that has a sample in the window."""
        keys: list[Key] = []
        parts: list[Floats] = []
        for names, times, values in self._store.windows(metric, self._now, within_s):
            have = np.flatnonzero((~np.isnan(values)).any(axis=1))
            if len(have):
                keys.extend(names[index] for index in have.tolist())
                parts.append(_statistics(times, values[have]))
        whole = np.concatenate(parts, axis=1) if parts else np.empty((9, 0))
        return Statistics(tuple(keys), whole[0].astype(np.int64), *whole[1:])


def _index(count: int, percentile: float) -> int:
    """Return the index of a percentile among `count` values in ascending order.

    The product has single precision, as upstream's.
    """
    return max(int(np.float32(count) * np.float32(percentile)) - 1, 0)


def _last(present: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the last column with a sample of each row; every row has one."""
    last: NDArray[np.intp] = present.shape[1] - 1 - np.argmax(present[:, ::-1], axis=1)
    return last


def _statistics(times: Floats, values: Floats) -> Floats:
    """Return the fields of `Statistics` after `keys`, as rows. Every row has a sample."""
    present = ~np.isnan(values)
    counts = present.sum(axis=1)
    lines = np.arange(len(values))
    ordered = np.sort(values, axis=1)  # NaN comes last
    last = _last(present)
    result = [
        counts.astype(np.float64),
        times[last] - times[np.argmax(present, axis=1)],
        np.where(present, values, 0.0).sum(axis=1) / counts,
    ]
    for percentile in PERCENTILES:
        product = counts.astype(np.float32) * np.float32(percentile)
        result.append(ordered[lines, np.maximum(product.astype(np.intp) - 1, 0)])
    result.append(ordered[lines, counts - 1])
    result.append(values[lines, last])
    return np.stack(result)
