"""What nodes use and will use: NodeMetric plus an estimate for every pod that it does not show yet.

A report is older than the newest pods, so for each pod that the report misses, or that started too
late for it, the estimate of what it will use is added (`delta`). A Reservation counts with what its
estimate exceeds those of the pods that use it by: its room is promised to pods that are to come.
One booking changes one row; a new report works its row out again. docs/facts/scheduler.md, "Load".
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
from apis.load_estimation import LoadEstimation, read_load_estimation
from apis.nodemetric import NodeMetric
from apis.qos import PriorityClass
from apis.usage_thresholds import UsageThresholds, parse_usage_thresholds
from cluster.scheduler.tables.amounts import LARGEST_AMOUNT, Amounts, Vector, amounts_of
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.load_report import Report, Window, read_report
from cluster.scheduler.tables.nodes import NodeTable
from cluster.scheduler.tables.shapes import PodShape

_DEFAULT_ESTIMATE: Final[Mapping[str, int]] = {CPU: 250, MEMORY: 200 * 1024 * 1024}
"""Estimate of a pod without request or limit: milli-cores, bytes. Upstream's."""
_BY_CLASS: Final[Mapping[PriorityClass, Mapping[str, str]]] = {
    PriorityClass.BATCH: {CPU: BATCH_CPU, MEMORY: BATCH_MEMORY},
    PriorityClass.MID: {CPU: MID_CPU, MEMORY: MID_MEMORY},
}


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What profiles may set apart: those with equal settings share one table.

    factors: percent of a pod's request or limit that it is expected to use, by resource.
    thresholds, prod_thresholds, aggregated_thresholds: percent of allocatable, by resource; a node
    may replace each by its annotation. filter_window, score_window: (percentile, seconds) of the
    usage that is looked at, or None for the average. expires_after: seconds after which a report
    counts no more. prod_includes_system: usage of koord-prod pods has that of the system in it.
    seconds_after_scheduled, seconds_after_initialized: how long a pod counts with its estimate
    although a report shows it; 0 for not at all. customized: annotations of a pod replace its
    factors and these seconds. reservations: Reservations count as load that is to come.
    """

    factors: Mapping[str, int] = field(default_factory=lambda: {CPU: 85, MEMORY: 70})
    weights: Mapping[str, int] = field(default_factory=lambda: {CPU: 1, MEMORY: 1})
    thresholds: Mapping[str, int] = field(default_factory=lambda: {CPU: 65, MEMORY: 95})
    prod_thresholds: Mapping[str, int] = field(default_factory=dict)
    aggregated_thresholds: Mapping[str, int] = field(default_factory=dict)
    filter_window: Window | None = None
    score_window: Window | None = None
    supported: tuple[str, ...] = ()
    expires_after: float = 180.0
    prod_includes_system: bool = False
    seconds_after_scheduled: float = 0.0
    seconds_after_initialized: float = 0.0
    customized: bool = False
    reservations: bool = True

    def resources(self) -> tuple[str, ...]:
        """Return the resources that are followed, sorted."""
        names = {CPU, MEMORY, *self.factors, *self.weights, *self.thresholds, *self.supported}
        return tuple(sorted(names | {*self.prod_thresholds, *self.aggregated_thresholds}))


_Own = tuple[LoadEstimation, tuple[InputError, ...]]


def _own_estimation(pod: PodShape) -> _Own:
    return read_load_estimation(pod.annotations, obj="Pod")


def estimation_problems(pod: PodShape, *, obj: str) -> tuple[InputError, ...]:
    """Return why annotations about the estimate of a pod are not in force. obj: names the pod."""
    return tuple(error.about(obj) for error in pod.derived(_own_estimation)[1])


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
    0 for none. aggregated: the limits are those of a percentile. by_prod: pods of class koord-prod
    are compared with prod_limits. reported: the node has a report with usage. expired: it has a
    report, with usage or without, that is too old.
    """

    def __init__(self, nodes: NodeTable, settings: LoadSettings) -> None:
        self.settings = settings
        self.resources = settings.resources()
        self._nodes = nodes
        self._width = len(self.resources)
        self._columns = {name: column for column, name in enumerate(self.resources)}
        self._reports: dict[int, Report] = {}
        self._bookings: dict[int, dict[str, tuple[Booking, LoadShare]]] = {}
        self._reservations: dict[int, set[str]] = {}
        """UIDs of the Reservations that have their booking on a row, if they count as load."""
        self._overrides: dict[int, UsageThresholds] = {}
        self._problems: dict[int, tuple[InputError, ...]] = {}
        nothing = np.zeros(self._width, dtype=np.int64)
        self._no_share = LoadShare(nothing, nothing, nothing, nothing)
        self._estimates: WeakKeyDictionary[PodShape, Vector] = WeakKeyDictionary()
        self._now = 0.0
        self.allocatable = self._new()
        self.base = self._new()
        self.score_base = self._new()
        self.delta = self._new()
        self.prod_usage = self._new()
        self.prod_delta = self._new()
        self.estimated = self._new()
        self.limits = self._new()
        self.prod_limits = self._new()
        none: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.aggregated, self.by_prod, self.reported, self.expired = none, none, none, none

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
        factors = dict(self.settings.factors)
        if self.settings.customized:
            factors |= pod.derived(_own_estimation)[0].factors
        for name, factor in factors.items():
            column = self._columns.get(name)
            if column is None:
                continue
            real = of_class.get(name, name)
            limit = pod.limits.get(real, 0)
            amount = max(limit, pod.requests.get(real, 0))
            if amount <= 0:
                result[column] = _DEFAULT_ESTIMATE.get(name, 0)
                continue
            estimate = min((2 * amount * factor + 100) // 200, LARGEST_AMOUNT)
            result[column] = min(estimate, limit) if limit > 0 else estimate
        return result

    def problems(self, row: int) -> tuple[InputError, ...]:
        """Return why annotations of a node are not in force."""
        return self._problems.get(row, ())

    @property
    def has_reservations(self) -> bool:
        """Whether a Reservation counts on any node."""
        return bool(self._reservations)

    def reserved(self, row: int, uid: str) -> LoadShare | None:
        """Return what a Reservation adds to a node; None if it does not count there."""
        if uid not in self._reservations.get(row, ()):
            return None
        return self._bookings[row][uid][1]

    def on(self, row: int) -> Iterator[tuple[Booking, LoadShare]]:
        """Yield the bookings on a node with what each adds."""
        yield from self._bookings.get(row, {}).values()

    # --- changing ------------------------------------------------------------------------------

    def set_node(self, row: int, node: Node) -> None:
        """Take a node's allocatable and its annotations. A bad annotation leaves the defaults."""
        self.reach(row + 1)
        ref = f"Node {node.metadata.name}"
        annotations = node.metadata.annotations
        problems = []
        amounts = dict(node.status.allocatable)
        try:
            if text := annotations.get(ANNOTATION_RAW_ALLOCATABLE):
                amounts |= parse_raw_allocatable(text, obj=ref)
        except InputError as error:
            problems.append(error)
        override = UsageThresholds()
        try:
            if text := annotations.get(ANNOTATION_USAGE_THRESHOLDS):
                override = parse_usage_thresholds(text, obj=ref)
        except InputError as error:
            problems.append(error)
        self._problems.pop(row, None)
        if problems:
            self._problems[row] = tuple(problems)
        allocatable = self._vector(amounts_of(amounts))
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
            self._problems.pop(row, None)
            self.allocatable[row] = 0
            self._work_out(row)

    def set_report(self, row: int, metric: NodeMetric | None) -> None:
        """Take a node's report; None: it has none any more."""
        self.reach(row + 1)
        if metric is None:
            self._reports.pop(row, None)
        else:
            self._reports[row] = read_report(metric, self._vector)
        self._work_out(row)

    def advance(self, now: float) -> bool:
        """Let time pass, to `now` seconds since 1970; return whether reports have expired."""
        self._now = now
        ended = False
        for row, report in self._reports.items():
            expired = self._is_expired(report)
            if expired != self.expired[row]:
                self.expired[row] = expired
                self._nodes.touch(row)
                ended = ended or expired
        return ended

    def place(self, booking: Booking, row: int) -> None:
        """Add the estimate of a booking."""
        self.reach(row + 1)
        if self.settings.reservations and _is_reservation(booking):
            self._reservations.setdefault(row, set()).add(booking.uid)
        share = self._share(booking, row)
        self._bookings.setdefault(row, {})[booking.uid] = (booking, share)
        self._add(row, share, 1)
        if booking.allocation.reservation:
            self._count_reservation(row, booking.allocation.reservation)

    def remove(self, booking: Booking, row: int) -> None:
        """Take back what `place` did."""
        of_row = self._bookings.get(row, {})
        known = of_row.pop(booking.uid, None)
        if known is None:
            return
        self._add(row, known[1], -1)
        if not of_row:
            del self._bookings[row]
        reservations = self._reservations.get(row)
        if reservations is not None:
            reservations.discard(booking.uid)
            if not reservations:
                del self._reservations[row]
        if booking.allocation.reservation:
            self._count_reservation(row, booking.allocation.reservation)

    def _count_reservation(self, row: int, uid: str) -> None:
        """Count a Reservation again, after a pod began or ceased to use it."""
        if uid in self._reservations.get(row, ()):
            booking, before = self._bookings[row][uid]
            share = self._share(booking, row)
            self._bookings[row][uid] = (booking, share)
            self._add(row, before, -1)
            self._add(row, share, 1)

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
        of_prod = override.prod_thresholds or settings.prod_thresholds
        self.prod_limits[row] = self._vector(of_prod)
        self.by_prod[row] = bool(of_prod)
        self.reported[row] = report is not None and report.usage is not None
        self.expired[row] = report is not None and self._is_expired(report)
        for column in (self.delta, self.prod_usage, self.prod_delta, self.estimated):
            column[row] = 0
        if report is not None and settings.prod_includes_system:
            self.prod_usage[row] = report.system
        for uid, (booking, _) in list(self._bookings.get(row, {}).items()):
            share = self._share(booking, row)
            self._bookings[row][uid] = (booking, share)
            self._add(row, share, 1)
        self.base[row] = self._usage(report, window if self.aggregated[row] else None)
        self.score_base[row] = self._usage(report, settings.score_window)
        self._nodes.touch(row)

    def _usage(self, report: Report | None, window: Window | None) -> Vector:
        if report is None or report.usage is None:
            return np.zeros(self._width, dtype=np.int64)
        if window is None:
            return report.usage
        return report.windows.get(window, report.usage)

    def _share(self, booking: Booking, row: int) -> LoadShare:
        """Return what a booking adds beside the report of its node."""
        nothing = self._no_share.delta
        report = self._reports.get(row)
        prod = booking.shape.priority_class is PriorityClass.PROD
        if _is_reservation(booking):
            if not self.settings.reservations:
                return self._no_share
            unused = self._unused(booking, row)
            return LoadShare(nothing, unused, unused if prod else nothing, unused)
        estimate = self.estimate(booking.shape)
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

    def _unused(self, reservation: Booking, row: int) -> Vector:
        """Return what the estimate of a Reservation exceeds those of the pods by that use it.

        They count by themselves, with their usage or their estimate.
        """
        unused = self.estimate(reservation.shape)
        for booking, _ in self._bookings.get(row, {}).values():
            if booking.allocation.reservation == reservation.uid:
                unused = unused - self.estimate(booking.shape)
        return np.maximum(0, unused)

    def _counts_until(self, booking: Booking) -> float | None:
        """Return until when a pod counts with its estimate although the report shows it."""
        after_initialized = self.settings.seconds_after_initialized
        after_scheduled = self.settings.seconds_after_scheduled
        if self.settings.customized:
            own = booking.shape.derived(_own_estimation)[0]
            if own.seconds_after_initialized is not None:
                after_initialized = own.seconds_after_initialized
            if own.seconds_after_scheduled is not None:
                after_scheduled = own.seconds_after_scheduled
        if after_initialized and booking.initialized:
            return booking.initialized + after_initialized
        if after_scheduled:
            return booking.start + after_scheduled
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

    def _is_expired(self, report: Report) -> bool:
        return self._now - report.updated >= self.settings.expires_after

    def _vector(self, amounts: Amounts) -> Vector:
        result = np.zeros(self._width, dtype=np.int64)
        for name, amount in amounts.items():
            column = self._columns.get(name)
            if column is not None:
                result[column] = min(amount, LARGEST_AMOUNT)
        return result

    # --- storage -------------------------------------------------------------------------------

    def _new(self) -> NDArray[np.int64]:
        return np.zeros((0, self._width), dtype=np.int64)

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


def _is_reservation(booking: Booking) -> bool:
    return ANNOTATION_RESERVE_POD in booking.shape.annotations
