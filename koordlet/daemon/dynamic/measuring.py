"""The sampling thread of this daemon, and what others read of its measurements.

With `measuring.enabled: false` there is no such thread, and no strategy runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final, TypeVar

from hooks.facts import Settings
from hooks.subject import HostAppSubject
from koordlet.configuration.config import Config
from koordlet.daemon.dynamic.collectors import REPORTED, collectors, enabled, shown_intervals
from koordlet.daemon.dynamic.on_node import NodesTargets
from koordlet.exposition.collector_metrics import Latest
from koordlet.measurement.accelerators.nvml import Answer
from koordlet.measurement.collecting import Targets
from koordlet.measurement.collectors.gpu import GpuCollector
from koordlet.measurement.collectors.rdt import ResctrlCollector
from koordlet.measurement.kernel_files import HostFiles, KernelFiles, LocalFiles
from koordlet.measurement.sampler import Sampler, SamplerStatus, SavedFile
from koordlet.measurement.series import LATEST_PERIODS, Series
from koordlet.measurement.store import Store, View
from koordlet.reporters.node_metric import Gpu
from koordlet.state.merging import PodView
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.local import LocalHost

_LOG = logging.getLogger("koordlet")

SAVED: Final = "measurements"
"""The file of the samples, in the run directory."""
_REPORT_SPARE_S: Final = 30.0
"""Kept beyond a report's window. Chosen: a report that is built late misses nothing."""


_C = TypeVar("_C")


class Measuring:
    """See the module. The event loop starts and stops it; any thread reads."""

    def __init__(
        self,
        config: Config,
        host: Host,
        *,
        boot: str,
        layout: Callable[[], Layout | None],
        views: Callable[[], Collection[PodView]],
        host_apps: Callable[[], Sequence[HostAppSubject]],
        settings: Callable[[], Settings],
        after_round: Callable[[View], None],
        rest: Callable[[], bool],
        workers: Executor,
    ) -> None:
        """boot: the id of this boot. layout, views, host_apps, settings: return the newest values,
        the same object until they change. after_round: called in the sampling thread with the
        measurements of each round. rest: called in that thread during a round; waits while its
        work would delay an answer, and returns whether it waited.
        """
        self._config = config
        self._host = host
        self._boot = boot
        self._layout = layout
        self._views = views
        self._host_apps = host_apps
        self._settings = settings
        self._after_round = after_round
        self._rest = rest
        self._workers = workers
        self._targets = NodesTargets()
        self._sampler: Sampler | None = None

    async def start(self, *, cpus: int) -> None:
        """Start the sampling thread. cpus: of the machine."""
        config, host = self._config, self._host
        here: Callable[[str], str] = host.here if isinstance(host, LocalHost) else str
        files: KernelFiles = LocalFiles(here) if isinstance(host, LocalHost) else HostFiles(host)
        self._sampler = Sampler(
            store=Store(),
            collectors=collectors(config, host, here, cpus),
            files=files,
            targets=self._newest_targets,
            enabled=lambda collector: enabled(collector, config, self._settings()),
            after_round=self._after_round,
            rest=self._rest,
            saved_file=SavedFile(f"{config.run_dir}/{SAVED}", self._boot),
            tick_s=float(config.measuring.interval),
        )
        # In a worker thread: it reads the samples of the daemon's last run from the disk.
        await asyncio.get_running_loop().run_in_executor(self._workers, self._sampler.start)

    async def stop(self) -> bool:
        """End the sampling thread after the round in progress; False if it is stuck in a read."""
        if self._sampler is None:
            return True
        loop = asyncio.get_running_loop()
        ended = await loop.run_in_executor(None, self._sampler.stop)
        if not ended:
            _LOG.warning("the sampling thread is stuck in a read of the kernel; leaving it")
        return ended

    def _newest_targets(self) -> Targets:
        return self._targets.of(self._layout(), self._views(), self._host_apps())

    # --- any thread ----------------------------------------------------------------------------

    def view(self) -> View | None:
        """Return the measurements as of now; None while nothing is measured."""
        return None if self._sampler is None else self._sampler.store.view(time.monotonic())

    def status(self) -> SamplerStatus | None:
        """Return the thread's state; None while nothing is measured."""
        return None if self._sampler is None else self._sampler.status(time.monotonic())

    def latest(self) -> Latest | None:
        """Return what gives the newest samples of a metric, as far as they count as the latest;
        None while nothing is measured."""
        view, sampler = self.view(), self._sampler
        if view is None or sampler is None:
            return None
        own_s = shown_intervals(sampler.collectors, self._config)
        return lambda metric: view.latest_of(metric, within_s=LATEST_PERIODS * own_s[metric])

    def bandwidth_counts(self) -> Mapping[Series, int]:
        """Return the bytes that the classes' control groups have moved since they exist."""
        collector = self._collector(ResctrlCollector)
        return {} if collector is None else collector.counts

    def gpu_answer(self) -> Answer | None:
        """Return what NVML answered last; None without a GPU, or while nothing is measured."""
        collector = self._collector(GpuCollector)
        return None if collector is None else collector.latest

    def gpus(self) -> Mapping[str, Gpu]:
        """Return the GPUs of the node by UUID."""
        answer = self.gpu_answer()
        found = () if answer is None else (usage.gpu for usage in answer.gpus)
        return {gpu.uuid: Gpu(gpu.minor, gpu.memory_bytes, gpu.healthy) for gpu in found}

    def keep_for_reports(self, window_s: float) -> None:
        """Keep the samples of pods and others for as long as reports average them.

        window_s: what the NodeMetric's spec asks for; collectors keep their own retention at least.
        """
        if self._sampler is None:
            return
        for collector in self._sampler.collectors:
            if collector.name in REPORTED:
                self._sampler.store.keep(collector.name, window_s + _REPORT_SPARE_S)

    def _collector(self, kind: type[_C]) -> _C | None:
        collectors_of = () if self._sampler is None else self._sampler.collectors
        return next((each for each in collectors_of if isinstance(each, kind)), None)
