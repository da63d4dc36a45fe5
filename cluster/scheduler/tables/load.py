"""What nodes use and will use: NodeMetric plus an estimate for every pod that it does not show yet.

A report is older than the newest pods, so for each pod that the report misses, or that started too
late for it, the estimate of what it will use is added (`delta`). One booking changes one row; a new
report works its row out again. docs/facts/scheduler.md, "Load".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from apis.annotations import parse_raw_allocatable
from apis.core import Node
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_RAW_ALLOCATABLE,
    ANNOTATION_RESERVE_POD,
    ANNOTATION_USAGE_THRESHOLDS,
    BATCH_CPU,
    BATCH_MEMORY,
    CPU,
    MEMORY,
    MID_CPU,
    MID_MEMORY,
)
from apis.meta import parse_duration, unix_seconds
from apis.nodemetric import NodeMetric, ResourceMap
from apis.qos import PriorityClass
from apis.usage_thresholds import UsageThresholds, parse_usage_thresholds
from cluster.scheduler.tables.amounts import LARGEST_AMOUNT, Amounts, Vector, amount_of
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.nodes import NodeTable
from cluster.scheduler.tables.shapes import PodShape

_DEFAULT_ESTIMATE: Final[Mapping[str, int]] = {CPU: 250, MEMORY: 200 * 1024 * 1024}
"""Estimate of a pod without request or limit: milli-cores, bytes. Upstream's."""
_DEFAULT_INTERVAL_S: Final = 60
_BY_CLASS: Final[Mapping[PriorityClass, Mapping[str, str]]] = {
    PriorityClass.BATCH: {CPU: BATCH_CPU, MEMORY: BATCH_MEMORY},
    PriorityClass.MID: {CPU: MID_CPU, MEMORY: MID_MEMORY},
}
_LONGEST: Final = 0
"""Duration that stands for the longest window of a report that has data."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What profiles may set apart: those with equal settings share one table.

    factors: percent of a pod's request or limit that it is expected to use, by resource.
    thresholds, prod_thresholds, aggregated_thresholds: percent of allocatable, by resource; a node
    may replace each by its annotation. filter_window, score_window: (percentile, seconds) of the
    usage that is looked at, or None for the average. expires_after: seconds after which a report
    counts no more.
    """

    factors: Mapping[str, int] = field(default_factory=lambda: {CPU: 85, MEMORY: 70})
    weights: Mapping[str, int] = field(default_factory=lambda: {CPU: 1, MEMORY: 1})
    thresholds: Mapping[str, int] = field(default_factory=lambda: {CPU: 65, MEMORY: 95})
    prod_thresholds: Mapping[str, int] = field(default_factory=dict)
    aggregated_thresholds: Mapping[str, int] = field(default_factory=dict)
    filter_window: tuple[str, int] | None = None
    score_window: tuple[str, int] | None = None
    supported: tuple[str, ...] = ()
    expires_after: float = 180.0
    prod_includes_system: bool = False
    seconds_after_scheduled: float = 0.0
    seconds_after_initialized: float = 0.0

    def resources(self) -> tuple[str, ...]:
        """Return the resources that are followed, sorted."""
        names = {CPU, MEMORY, *self.factors, *self.weights, *self.thresholds, *self.supported}
        return tuple(sorted(names | {*self.prod_thresholds, *self.aggregated_thresholds}))


@dataclass(frozen=True, slots=True, eq=False)
class _Report:
    """A NodeMetric as vectors. usage: None if the report has no usage of the node."""

    updated: float
    interval: float
    usage: Vector | None
    windows: Mapping[tuple[str, int], Vector]
    system: Vector
    pods: Mapping[str, Vector]
    prod_pods: frozenset[str]


class LoadShare(NamedTuple):
    """What one booking adds to its row."""

    prod_usage: Vector
    delta: Vector
    prod_delta: Vector
    estimated: Vector


class LoadTable:
    """Columns by row and by resource of `LoadSettings.resources`.

    allocatable: the node's, before amplification. base, score_base: usage that the filter and the
    score start from. delta, prod_delta: estimates that the report lacks. prod_usage: of pods of
    class koord-prod. estimated: estimates of all pods. limits, prod_limits: thresholds in percent,
    0 for none. reported: the node has a report with usage. expired: it is too old.
    """

    def __init__(self, nodes: NodeTable, settings: LoadSettings) -> None:
        self.settings = settings
        self.resources = settings.resources()
        self._nodes = nodes
        self._width = len(self.resources)
        self._columns = {name: column for column, name in enumerate(self.resources)}
        self._reports: dict[int, _Report] = {}
        self._bookings: dict[int, dict[str, tuple[Booking, LoadShare]]] = {}
        self._overrides: dict[int, UsageThresholds] = {}
        nothing = np.zeros(self._width, dtype=np.int64)
        self._no_share = LoadShare(nothing, nothing, nothing, nothing)
        self._estimates: WeakKeyDictionary[PodShape, Vector] = WeakKeyDictionary()
        self._now = 0.0
        self.problems: dict[str, InputError] = {}
        """Node name -> why an annotation of it is not in force."""
        self.allocatable = self._new(0)
        self.base = self._new(0)
        self.score_base = self._new(0)
        self.delta = self._new(0)
        self.prod_usage = self._new(0)
        self.prod_delta = self._new(0)
        self.estimated = self._new(0)
        self.limits = self._new(0)
        self.prod_limits = self._new(0)
        self.aggregated = np.zeros(0, dtype=np.bool_)
        self.reported = np.zeros(0, dtype=np.bool_)
        self.expired = np.zeros(0, dtype=np.bool_)

    # --- reading -------------------------------------------------------------------------------

    def estimate(self, pod: PodShape) -> Vector:
        """Return what a pod is expected to use.

        round(max(limit, request) * factor / 100), at most the limit; the default of 250 milli-cores
        and 200 MiB for a pod that requests nothing. Batch and mid pods are read from their own
        resources.
        """
        known = self._estimates.get(pod)
        if known is None:
            known = self._estimates[pod] = self._estimate(pod)
        return known

    def _estimate(self, pod: PodShape) -> Vector:
        result = np.zeros(self._width, dtype=np.int64)
        of_class = _BY_CLASS.get(pod.priority_class, {})
        for name, factor in self.settings.factors.items():
            real = of_class.get(name, name)
            limit = pod.limits.get(real, 0)
            amount = max(limit, pod.requests.get(real, 0))
            if amount == 0:
                result[self._columns[name]] = _DEFAULT_ESTIMATE.get(name, 0)
                continue
            estimate = (2 * amount * factor + 100) // 200
            result[self._columns[name]] = min(estimate, limit) if limit else estimate
        return result

    def on(self, row: int) -> Iterator[tuple[Booking, LoadShare]]:
        """Yield the bookings on a node with what each adds."""
        yield from self._bookings.get(row, {}).values()

    # --- changing ------------------------------------------------------------------------------

    def set_node(self, row: int, node: Node) -> None:
        """Take a node's allocatable and its annotations. A bad annotation leaves the defaults."""
        self.reach(row + 1)
        name = node.metadata.name
        annotations = node.metadata.annotations
        self.problems.pop(name, None)
        amounts = dict(node.status.allocatable)
        try:
            if text := annotations.get(ANNOTATION_RAW_ALLOCATABLE):
                amounts |= parse_raw_allocatable(text, obj=f"Node {name}")
        except InputError as error:
            self.problems[name] = error
        override = UsageThresholds()
        try:
            if text := annotations.get(ANNOTATION_USAGE_THRESHOLDS):
                override = parse_usage_thresholds(text, obj=f"Node {name}")
        except InputError as error:
            self.problems[name] = error
        allocatable = self._vector({n: amount_of(n, q) for n, q in amounts.items()})
        changed = (allocatable != self.allocatable[row]).any()
        if changed or self._overrides.get(row) != override:
            self.allocatable[row] = allocatable
            self._overrides[row] = override
            self._work_out(row)

    def forget_node(self, row: int) -> None:
        """Forget a node whose bookings are removed already."""
        if row < len(self.reported):
            self._reports.pop(row, None)
            self._overrides.pop(row, None)
            self.allocatable[row] = 0
            self._work_out(row)

    def set_report(self, row: int, metric: NodeMetric | None) -> None:
        """Take a node's report; None: it has none any more."""
        self.reach(row + 1)
        if metric is None:
            self._reports.pop(row, None)
        else:
            self._reports[row] = self._report(metric)
        self._work_out(row)

    def advance(self, now: float) -> None:
        """Let time pass, to `now` seconds since 1970: reports expire."""
        self._now = now
        for row, report in self._reports.items():
            expired = self._is_expired(report)
            if expired != self.expired[row]:
                self.expired[row] = expired
                self._nodes.touch(row)

    def place(self, booking: Booking, row: int) -> None:
        """Add the estimate of a booking."""
        if ANNOTATION_RESERVE_POD in booking.shape.annotations:
            return
        self.reach(row + 1)
        share = self._share(booking, self._reports.get(row))
        self._bookings.setdefault(row, {})[booking.uid] = (booking, share)
        self._add(row, share, 1)

    def remove(self, booking: Booking, row: int) -> None:
        """Take back what `place` did."""
        of_row = self._bookings.get(row, {})
        known = of_row.pop(booking.uid, None)
        if known is not None:
            self._add(row, known[1], -1)
        if not of_row:
            self._bookings.pop(row, None)

    # --- how a row is worked out ---------------------------------------------------------------

    def _work_out(self, row: int) -> None:
        report = self._reports.get(row)
        override = self._overrides.get(row, UsageThresholds())
        settings = self.settings
        aggregated = settings.aggregated_thresholds
        window = settings.filter_window
        if override.aggregated is not None:
            aggregated, window = override.aggregated, override.window
        limits = override.thresholds or settings.thresholds
        self.aggregated[row] = bool(aggregated) and window is not None
        self.limits[row] = self._vector(aggregated if self.aggregated[row] else limits)
        self.prod_limits[row] = self._vector(override.prod_thresholds or settings.prod_thresholds)
        self.reported[row] = report is not None and report.usage is not None
        self.expired[row] = report is not None and self._is_expired(report)
        for column in (self.delta, self.prod_usage, self.prod_delta, self.estimated):
            column[row] = 0
        if report is not None and settings.prod_includes_system:
            self.prod_usage[row] = report.system
        for uid, (booking, _) in list(self._bookings.get(row, {}).items()):
            share = self._share(booking, report)
            self._bookings[row][uid] = (booking, share)
            self._add(row, share, 1)
        self.base[row] = self._usage(report, window if self.aggregated[row] else None)
        self.score_base[row] = self._usage(report, settings.score_window)
        self._nodes.touch(row)

    def _usage(self, report: _Report | None, window: tuple[str, int] | None) -> Vector:
        if report is None or report.usage is None:
            return np.zeros(self._width, dtype=np.int64)
        if window is None:
            return report.usage
        return report.windows.get(window, report.usage)

    def _share(self, booking: Booking, report: _Report | None) -> LoadShare:
        """Return what a booking adds beside `report`."""
        nothing = self._no_share.delta
        estimate = self.estimate(booking.shape)
        prod = booking.shape.priority_class is PriorityClass.PROD
        if report is None:
            return LoadShare(nothing, estimate, estimate if prod else nothing, estimate)
        usage = report.pods.get(booking.key)
        shown_as_prod = prod and booking.key in report.prod_pods and usage is not None
        prod_usage = usage if shown_as_prod and usage is not None else nothing
        late = self._counts_until(booking)
        missing = (
            usage is None
            or report.updated - report.interval < booking.start
            or (late is not None and late > report.updated)
        )
        delta = nothing
        if missing:
            delta = estimate if usage is None else np.maximum(0, estimate - usage)
        prod_delta = nothing
        if prod and not shown_as_prod:
            prod_delta = estimate
        elif prod and missing:
            prod_delta = delta
        return LoadShare(prod_usage, delta, prod_delta, estimate)

    def _counts_until(self, booking: Booking) -> float | None:
        """Return until when a pod counts with its estimate although the report shows it."""
        settings = self.settings
        if settings.seconds_after_initialized and booking.initialized:
            return booking.initialized + settings.seconds_after_initialized
        if settings.seconds_after_scheduled:
            return booking.start + settings.seconds_after_scheduled
        return None

    def _add(self, row: int, share: LoadShare, sign: int) -> None:
        add = np.add if sign > 0 else np.subtract
        for column, amounts in (
            (self.prod_usage, share.prod_usage),
            (self.delta, share.delta),
            (self.prod_delta, share.prod_delta),
            (self.estimated, share.estimated),
        ):
            if amounts is not self._no_share.delta:
                of_row = column[row]
                add(of_row, amounts, out=of_row)

    def _is_expired(self, report: _Report) -> bool:
        return self._now - report.updated >= self.settings.expires_after

    def _report(self, metric: NodeMetric) -> _Report:
        status = metric.status
        policy = metric.spec.metric_collect_policy
        interval = policy.report_interval_seconds if policy else None
        windows: dict[tuple[str, int], Vector] = {}
        longest: dict[str, int] = {}
        info = status.node_metric
        for window in info.aggregated_node_usages if info else ():
            seconds = _seconds(window.duration)
            for percentile, usage in window.usage.items():
                if not usage.resources:
                    continue
                vector = self._usage_vector(usage)
                windows[percentile, seconds] = vector
                if seconds >= longest.get(percentile, 0):
                    longest[percentile] = seconds
                    windows[percentile, _LONGEST] = vector
        pods = {f"{pod.namespace}/{pod.name}": pod for pod in status.pods_metric}
        return _Report(
            updated=unix_seconds(status.update_time),
            interval=float(interval or _DEFAULT_INTERVAL_S),
            usage=self._usage_vector(info.node_usage) if info else None,
            windows=windows,
            system=self._usage_vector(info.system_usage) if info else self._vector({}),
            pods={key: self._usage_vector(pod.pod_usage) for key, pod in pods.items()},
            prod_pods=frozenset(
                key for key, pod in pods.items() if pod.priority == PriorityClass.PROD
            ),
        )

    def _usage_vector(self, usage: ResourceMap) -> Vector:
        """Return reported amounts; negative ones count as 0."""
        amounts = {name: amount_of(name, q) for name, q in usage.resources.items()}
        return np.maximum(0, self._vector(amounts))

    def _vector(self, amounts: Amounts) -> Vector:
        result = np.zeros(self._width, dtype=np.int64)
        for name, amount in amounts.items():
            column = self._columns.get(name)
            if column is not None:
                result[column] = min(amount, LARGEST_AMOUNT)
        return result

    # --- storage -------------------------------------------------------------------------------

    def _new(self, length: int) -> NDArray[np.int64]:
        return np.zeros((length, self._width), dtype=np.int64)

    def reach(self, rows: int) -> None:
        """Make the columns long enough for this count of rows; new ones hold nothing back."""
        length = len(self.reported)
        if rows <= length:
            return
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                grown = np.zeros((2 * rows + 64, *column.shape[1:]), dtype=column.dtype)
                grown[:length] = column
                setattr(self, name, grown)


def _seconds(duration: str) -> int:
    try:
        return parse_duration(duration) // 1_000_000_000
    except ValueError:
        return 0
