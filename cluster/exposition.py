"""Counters, gauges and histograms of one process, and their text for Prometheus, made in slices.

prometheus_client is not used for these: it appends `_total` to every counter, adds a `_created`
series to each, and blocks the event loop while it makes the whole text, 0.25 s for the series of
5,000 nodes on an idle machine. Here a counter keeps the name that it is given, and the label text
of a series is made once. The same text takes 0.025 s, and the caller of `Registry.slices` can do
other work between two slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from service.histogram import Histogram as Buckets

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""The text format 0.0.4 of Prometheus, which all scrapers since 2014 read."""

SLICE_LINES: Final = 2000
"""Measured: 2 ms a slice, as long as ten reviews; with twice the value a review waits 4 ms.
With a quarter of the value a busy manager took 5 s for the 40 slices of 5,000 nodes, since each
turn of its event loop was slow."""

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def number_text(value: float) -> str:
    """Return a number in the text format.

    Integers below 1e15 have no fraction: a float holds them exactly, and `.0` would be noise.
    """
    if math.isfinite(value):
        return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def label_text(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the labels of a series without the braces: `a="x",b="y"`."""
    return ",".join(
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True)
    )


def head_lines(name: str, text: str, kind: str = "gauge") -> str:
    """Return what stands before the series of a name. kind: counter, gauge or histogram."""
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def bucket_lines(name: str, labels: str, buckets: Buckets) -> Iterator[str]:
    """Yield the lines of one histogram. labels: as `label_text` returns them."""
    before = f"{labels}," if labels else ""
    for bound, count in buckets.cumulative():
        yield f'{name}_bucket{{{before}le="{bound}"}} {count}\n'
    braces = f"{{{labels}}}" if labels else ""
    yield f"{name}_sum{braces} {number_text(buckets.sum)}\n"
    yield f"{name}_count{braces} {buckets.count}\n"


class Series:
    """The value for one set of labels."""

    __slots__ = ("_head", "value")

    def __init__(self, name: str, labels: str) -> None:
        self._head = f"{name}{{{labels}}} " if labels else f"{name} "
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def lines(self) -> Iterator[str]:
        yield f"{self._head}{number_text(self.value)}\n"


class BucketSeries:
    """The buckets, sum and count for one set of labels."""

    __slots__ = ("_labels", "_name", "buckets")

    def __init__(self, name: str, labels: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._labels = labels
        self.buckets = Buckets(bounds)

    def observe(self, value: float) -> None:
        self.buckets.observe(value)

    def lines(self) -> Iterator[str]:
        return bucket_lines(self._name, self._labels, self.buckets)


S = TypeVar("S", Series, BucketSeries)


class Family(Generic[S]):
    """All series of one metric name."""

    def __init__(
        self, name: str, kind: str, text: str, labels: tuple[str, ...], make: Callable[[str], S]
    ) -> None:
        """kind: counter, gauge or histogram. make: creates a series from its label text."""
        self.name = name
        self.label_names = labels
        self.head = head_lines(name, text, kind)
        self._make: Callable[[str], S] = make
        self._series: dict[tuple[str, ...], S] = {}

    def labels(self, *values: str) -> S:
        """Return the series with these label values; the first call creates it."""
        found = self._series.get(values)
        if found is None:
            found = self._make(label_text(self.label_names, values))
            self._series[values] = found
        return found

    def remove(self, *values: str) -> None:
        """Drop a series if it exists."""
        self._series.pop(values, None)

    def __len__(self) -> int:
        return len(self._series)

    def __contains__(self, values: tuple[str, ...]) -> bool:
        return values in self._series

    def lines(self) -> Iterator[str]:
        """Yield the lines of the present series; series may be added and removed meanwhile."""
        yield self.head
        for series in tuple(self._series.values()):
            yield from series.lines()


class Registry:
    """The families of one process, in the order of their creation."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Iterator[str]]] = []

    def counter(self, name: str, text: str, *labels: str) -> Family[Series]:
        return self._add(Family(name, "counter", text, labels, lambda at: Series(name, at)))

    def gauge(self, name: str, text: str, *labels: str) -> Family[Series]:
        return self._add(Family(name, "gauge", text, labels, lambda at: Series(name, at)))

    def histogram(
        self, name: str, text: str, *labels: str, bounds: tuple[float, ...]
    ) -> Family[BucketSeries]:
        return self._add(
            Family(name, "histogram", text, labels, lambda at: BucketSeries(name, at, bounds))
        )

    def also(self, lines: Callable[[], Iterator[str]]) -> None:
        """Add a source of lines that is called for each exposition."""
        self._sources.append(lines)

    def _add(self, family: Family[S]) -> Family[S]:
        self._sources.append(family.lines)
        return family

    def slices(self, most: int = SLICE_LINES) -> Iterator[str]:
        """Yield the whole text in pieces of at most `most` items of `lines`."""
        piece: list[str] = []
        for source in self._sources:
            for line in source():
                piece.append(line)
                if len(piece) >= most:
                    yield "".join(piece)
                    piece.clear()
        yield "".join(piece)
