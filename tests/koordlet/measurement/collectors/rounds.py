"""Rounds for one collector: a clock that a test moves, and samples that others have stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from koordlet.measurement.collecting import Collector, Round, Targets
from koordlet.measurement.kernel_files import HostFiles, KernelFiles
from koordlet.measurement.series import Metric, Series
from linux.host import Host


@dataclass
class Stored:
    """The newest samples, as a test says."""

    samples: dict[Series, float] = field(default_factory=dict)

    def latest(self, series: Series, *, within_s: float) -> float | None:
        return self.latest_of(series.metric, within_s=within_s).get(series[1:])

    def latest_of(self, metric: Metric, *, within_s: float) -> Mapping[tuple[str, str], float]:
        return {
            (series.of, series.detail): value
            for series, value in self.samples.items()
            if series.metric is metric
        }


@dataclass
class Rounds:
    """Calls a collector, each time `step_s` later."""

    collector: Collector
    files: KernelFiles
    targets: Targets = field(default_factory=Targets)
    stored: Stored = field(default_factory=Stored)
    now: float = 1000.0
    problems: list[str] = field(default_factory=list)

    @classmethod
    def over(cls, collector: Collector, host: Host, targets: Targets | None = None) -> Rounds:
        return cls(collector, HostFiles(host), targets or Targets())

    def next(self, step_s: float | None = None) -> dict[Series, float]:
        """Return the samples of the next round, one interval later unless said otherwise."""
        self.now += self.collector.interval_s if step_s is None else step_s
        round_ = Round(
            now=self.now,
            targets=self.targets,
            files=self.files,
            measured=self.stored,
            clock=lambda: self.now,
        )
        try:
            return dict(self.collector.sample(round_))
        finally:
            self.problems = round_.problems
