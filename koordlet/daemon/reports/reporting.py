"""Reports in the daemon: sends the node's reports to the API server.

Measurements, pods and the node are read as immutable values; reports are built in worker threads.
Each report has a loop of its own, and a report that fails neither ends the daemon nor another
report. A node without an API server keeps its reports as files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from apis.nodemetric import NodeMetricStatus, ResourceMap
from hooks.subject import HostAppSubject
from koordlet.configuration.config import Config
from koordlet.daemon.reports.predicting import PodsOf, Predicting
from koordlet.exposition import report_metrics
from koordlet.exposition.strategy_metrics import Gauge
from koordlet.measurement.bulk import BulkMeasurements
from koordlet.prediction.peak import Both, Predictions
from koordlet.reporters.keeping import Gather, Keeper
from koordlet.reporters.node_metric import Gpu, Policy, amounts, node_metric_status
from koordlet.reporters.node_metric_loop import NodeMetricReporter
from kube.client import Client
from kube.connection import Connection, load_connection
from kube.reconnecting import stay_connected
from kube.resources import DEVICES, NODE_RESOURCE_TOPOLOGIES, Resource
from service.events import Events

_LOG = logging.getLogger("koordlet.reporters")


class Reporting:
    """All reports of one daemon. Belongs to the event loop, except where stated."""

    def __init__(
        self,
        config: Config,
        *,
        measurements: Callable[[], BulkMeasurements | None],
        pods: PodsOf,
        host_apps: Callable[[], Sequence[HostAppSubject]],
        gpus: Callable[[], Mapping[str, Gpu]],
        topology: Gather,
        devices: Gather,
        gate: Callable[[str], bool],
        keep: Callable[[float], None],
        predicting: Predicting,
        events: Events,
        workers: Executor,
        connect: Callable[[], Connection] | None = None,
    ) -> None:
        """The callables return the newest values, None while they are not known; any thread calls
        them. gpus: by UUID. topology, devices: gather what the NodeResourceTopology and
        the Device are computed from. gate: whether a feature gate is on. keep: keeps the
        measurements for so many seconds from now on."""
        self._config = config
        self._measurements = measurements
        self._pods = pods
        self._host_apps = host_apps
        self._gpus = gpus
        self._gate = gate
        self._keep = keep
        self._predicting = predicting
        self._events = events
        self._workers = workers
        kubeconfig = config.kubernetes.kubeconfig or None
        self._connect = connect or (lambda: load_connection(kubeconfig))
        directory = config.reports.directory
        if not directory and not config.kubernetes.wanted:
            directory = f"{config.run_dir}/reports"
        self.node_metric = NodeMetricReporter(
            config.node_name, self.build, workers=workers, events=events, directory=directory
        )
        self.keepers = (
            self._keeper(NODE_RESOURCE_TOPOLOGIES, topology, directory),
            self._keeper(DEVICES, devices, directory),
        )
        """The objects that are kept as the machine is."""
        self.predictions: Predictions | None = None
        """Of the last report; None before the first training."""
        self._last: NodeMetricStatus | None = None

    def _keeper(self, resource: Resource, gather: Gather, directory: str) -> Keeper:
        return Keeper(
            resource,
            self._config.node_name,
            gather,
            interval_s=float(self._config.reports.topology_interval),
            workers=self._workers,
            events=self._events,
            directory=directory,
        )

    # --- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Report until cancelled. Without measuring there is nothing to report from."""
        if not self._config.measuring.enabled:
            return
        if self._config.kubernetes.wanted:
            # The source of objects reads the same configuration, and reports a problem with it.
            await stay_connected(
                self._connect,
                self._report,
                answers=lambda: not self.node_metric.refused,
                user_agent="koordlet",
            )
        else:
            await self._report(None)

    async def _report(self, client: Client | None) -> None:
        """Run the loop of each report that is on."""
        loops: list[Coroutine[Any, Any, None]] = []
        if self._config.reports.node_metric:
            loops.append(self.node_metric.run(client))
        if self._config.reports.topology_interval > 0:
            loops += [keeper.run(client) for keeper in self.keepers]
        await asyncio.gather(*loops)

    def look_again(self) -> None:
        """Compare the objects soon: one of this node's objects has changed."""
        for keeper in self.keepers:
            keeper.look_again()

    # --- a report, in a worker thread ----------------------------------------------------------

    def build(self, policy: Policy) -> NodeMetricStatus:
        """Return the NodeMetric's status of this moment."""
        measurements = self._measurements()
        if measurements is None:
            raise RuntimeError("nothing was measured yet")
        self._keep(policy.aggregate_s)
        pods = self._pods()
        predicted = self._predicting.predict(measurements, pods, within_s=policy.aggregate_s)
        self.predictions = predicted
        self._last = node_metric_status(
            measurements,
            [pod for pod, _ in pods],
            self._host_apps(),
            policy,
            wall_s=time.time(),
            gpus=self._gpus(),
            reclaimable=None if predicted is None else _map(predicted.careful.reclaimable),
            peak=None if predicted is None else _map(predicted.careful.peak),
        )
        return self._last

    # --- for status and metrics ----------------------------------------------------------------

    @property
    def status(self) -> dict[str, Any]:
        """The state for `koordctl status`."""
        at = self.node_metric.last_at
        return {
            "nodeMetric": {
                "enabled": self._config.reports.node_metric,
                "reports": self.node_metric.reports,
                "intervalSeconds": self.node_metric.policy.report_interval_s,
                "ageSeconds": None if at is None else round(time.monotonic() - at, 1),
                "problem": self.node_metric.problem,
            },
            "objects": [
                {"kind": keeper.kind, "writes": keeper.writes, "problem": keeper.problem}
                for keeper in self.keepers
            ],
            "prediction": self._predicting.status,
        }

    @property
    def gauges(self) -> list[Gauge]:
        """The internal figures of the last report."""
        found = list(report_metrics.of_predictors(self.predictions))
        if self._gate("NodeMetricPromMetrics"):
            found += report_metrics.of_status(self._last)
        return found

    @property
    def external_gauges(self) -> list[Gauge]:
        """The external figures: what is reclaimable; none before the first report."""
        return [] if self._last is None else list(report_metrics.of_reclaimable(self.predictions))


def _map(both: Both) -> ResourceMap:
    return amounts(both.cpu_milli, both.memory_bytes)
