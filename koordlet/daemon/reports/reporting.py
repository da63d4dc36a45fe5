"""Reports in the daemon: trains the prediction, and sends the node's reports to the API server.

Measurements, pods and the node are read as immutable values; training and building run in worker
threads. Each report has a loop of its own, and a report that fails neither ends the daemon nor
another report. A node without an API server keeps its reports as files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

from apis.annotations import parse_raw_allocatable
from apis.errors import InputError
from apis.keys import ANNOTATION_RAW_ALLOCATABLE, CPU, MEMORY
from apis.nodemetric import NodeMetricStatus, ResourceMap
from hooks.compat import COLD_START_BY_AGE_ONLY
from hooks.facts import NodeMeta
from hooks.subject import HostAppSubject, Pod
from koordlet.configuration.config import Config
from koordlet.events import Events
from koordlet.exposition import report_metrics
from koordlet.exposition.strategy_metrics import Gauge
from koordlet.measurement.bulk import BulkMeasurements
from koordlet.prediction.models import Models
from koordlet.prediction.peak import Both, Predictions, Settings, predict
from koordlet.prediction.training import Schedule, Trainer
from koordlet.qos.strategy import NodeAmounts
from koordlet.reporters.keeping import Gather, Keeper
from koordlet.reporters.node_metric import Gpu, Policy, amounts, measured, node_metric_status
from koordlet.reporters.node_metric_loop import NodeMetricReporter
from kube.client import Client
from kube.connection import Connection, load_connection, wait_for_connection
from kube.resources import DEVICES, NODE_RESOURCE_TOPOLOGIES
from service.repeats import Repeats

_T = TypeVar("_T")

_LOG = logging.getLogger("koordlet.reporters")

_RECONNECT_S: Final = 300.0
"""After reports have failed for so long the kubeconfig is read again: certificates and servers
change. Chosen: as for the objects of the API server."""
_LOOK_EVERY_S: Final = 5.0
"""Between two looks at whether reports are taken. Chosen: short beside `_RECONNECT_S`."""
_UNMEASURED_S: Final = 1.0
"""How often a training waits for the first measurements."""

PodsOf = Callable[[], Sequence[tuple[Pod, bool]]]
"""Returns the node's pods, each with whether its deletion has begun. Called by any thread."""


class Reporting:
    """All reports of one daemon. Belongs to the event loop, except where stated."""

    def __init__(
        self,
        config: Config,
        *,
        measurements: Callable[[], BulkMeasurements | None],
        pods: PodsOf,
        host_apps: Callable[[], Sequence[HostAppSubject]],
        node: Callable[[], NodeMeta | None],
        node_amounts: Callable[[], NodeAmounts | None],
        gpus: Callable[[], Mapping[str, Gpu]],
        topology: Gather,
        devices: Gather,
        gate: Callable[[str], bool],
        keep: Callable[[float], None],
        events: Events,
        workers: Executor,
        connect: Callable[[], Connection] | None = None,
    ) -> None:
        """The callables return the newest values, None while they are not known; any thread calls
        them. gpus: by UUID. topology, devices: gather what the NodeResourceTopology and
        the Device are computed from. gate: whether a feature gate is on. keep: keeps the
        measurements for so many seconds from now on."""
        prediction = config.prediction
        self._config = config
        self._measurements = measurements
        self._pods = pods
        self._host_apps = host_apps
        self._node = node
        self._node_amounts = node_amounts
        self._gpus = gpus
        self._gate = gate
        self._keep = keep
        self._events = events
        self._workers = workers
        kubeconfig = config.kubernetes.kubeconfig or None
        self._connect = connect or (lambda: load_connection(kubeconfig))
        self._settings = Settings(
            safety_margin_percent=prediction.safety_margin_percent,
            cold_start_s=float(prediction.cold_start),
            training_s=float(prediction.training_interval),
            by_age_only=COLD_START_BY_AGE_ONLY in config.compat,
        )
        self.trainer = Trainer(
            Models(
                cpu_half_life_s=float(prediction.cpu_half_life),
                memory_half_life_s=float(prediction.memory_half_life),
            ),
            Schedule(
                training_s=float(prediction.training_interval),
                expiration_s=float(prediction.model_expiration),
                checkpoint_s=float(prediction.checkpoint_interval),
            ),
            config.prediction_directory,
        )
        directory = config.reports.directory
        if not directory and not config.kubernetes.wanted:
            directory = f"{config.run_dir}/reports"
        self.node_metric = NodeMetricReporter(
            config.node_name, self.build, workers=workers, events=events, directory=directory
        )
        self.keepers = tuple(
            Keeper(
                resource,
                config.node_name,
                gather,
                interval_s=float(config.reports.topology_interval),
                workers=workers,
                events=events,
                directory=directory,
            )
            for resource, gather in ((NODE_RESOURCE_TOPOLOGIES, topology), (DEVICES, devices))
        )
        """The objects that are kept as the machine is."""
        self.predictions: Predictions | None = None
        """Of the last report; None before the first training."""
        self._last: NodeMetricStatus | None = None
        self._training_problem = ""
        self._repeats = Repeats()

    # --- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train and report until cancelled. Without measuring there is nothing to report from."""
        if not self._config.measuring.enabled:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._train_forever())
            if self._config.kubernetes.wanted:
                group.create_task(self._report_to_server())
            else:
                await self._report(None)

    def close(self) -> None:
        """Keep the models for the next start. Blocks on the disk."""
        if self.trainer.trainings:
            self.trainer.save()

    async def _train_forever(self) -> None:
        for problem in await self._in_worker(self.trainer.load):
            self._events.add("prediction", "checkpoints", problem)
        while True:
            trained = await self._in_worker(self.train)
            await asyncio.sleep(
                float(self._config.prediction.training_interval) if trained else _UNMEASURED_S
            )

    async def _report_to_server(self) -> None:
        while True:
            # The source of objects reads the same configuration, and reports a problem with it.
            connection = await wait_for_connection(self._connect)
            async with Client(connection, user_agent="koordlet") as client:
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._report(client))
                        group.create_task(self._look_after())
                except* _AwayForLong:
                    _LOG.info("reports fail; reading how to reach the API server again")

    async def _report(self, client: Client | None) -> None:
        """Run the loop of each report that is on."""
        loops: list[Coroutine[Any, Any, None]] = []
        if self._config.reports.node_metric:
            loops.append(self.node_metric.run(client))
        if self._config.reports.topology_interval > 0:
            loops += [keeper.run(client) for keeper in self.keepers]
        await asyncio.gather(*loops)

    async def _look_after(self) -> None:
        """Raise _AwayForLong when the API server has refused all reports for long."""
        good_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if not self.node_metric.refused:
                good_at = time.monotonic()
            elif time.monotonic() - good_at > _RECONNECT_S:
                raise _AwayForLong

    def look_again(self) -> None:
        """Compare the objects soon: one of this node's objects has changed."""
        for keeper in self.keepers:
            keeper.look_again()

    # --- the worker threads --------------------------------------------------------------------

    def train(self) -> bool:
        """Add a sample to the models; return whether there were measurements. Raises nothing."""
        try:
            measurements = self._measurements()
            if measurements is None:
                return False
            self.trainer.train(measurements, [pod for pod, _ in self._pods()])
        except Exception as error:  # noqa: BLE001 - the next training is made all the same
            self._training_problem = f"{type(error).__name__}: {error}"
            if (left_out := self._repeats.due(type(error).__name__)) is not None:
                _LOG.error(
                    "a training of the prediction failed",
                    exc_info=error,
                    extra={"same_failure_not_logged": left_out} if left_out else None,
                )
        else:
            self._training_problem = ""
        return True

    def build(self, policy: Policy) -> NodeMetricStatus:
        """Return the NodeMetric's status of this moment."""
        measurements = self._measurements()
        if measurements is None:
            raise RuntimeError("nothing was measured yet")
        self._keep(policy.aggregate_s)
        pods = self._pods()
        predicted = self._predict(measurements, pods, policy)
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

    def _predict(
        self, measurements: BulkMeasurements, pods: Sequence[tuple[Pod, bool]], policy: Policy
    ) -> Predictions | None:
        allocatable = self._allocatable()
        if not self.trainer.trainings or allocatable is None:
            return None
        return predict(
            self.trainer.models,
            pods,
            allocatable=allocatable,
            settings=self._settings,
            wall_s=time.time(),
            measured=measured(measurements, within_s=policy.aggregate_s),
        )

    def _allocatable(self) -> Both | None:
        """Return what pods may request: before amplification, else the machine's capacity."""
        amounts_of_node = self._node_amounts()
        if amounts_of_node is None:
            return None
        known = {**amounts_of_node.allocatable, **self._raw_allocatable()}
        return Both(
            known.get(CPU, amounts_of_node.cpu_milli),
            known.get(MEMORY, amounts_of_node.memory_bytes),
        )

    def _raw_allocatable(self) -> dict[str, int]:
        """Return what kubelet reported before the Node was amplified; nothing where it was not."""
        node = self._node()
        text = None if node is None else node.annotations.get(ANNOTATION_RAW_ALLOCATABLE)
        if node is None or not text:
            return {}
        try:
            resources = parse_raw_allocatable(text, obj=f"Node {node.name}")
        except InputError as error:
            self._events.add("bad-object", error.obj, str(error))
            return {}
        found = {}
        if CPU in resources:
            found[CPU] = resources[CPU].milli_value()
        if MEMORY in resources:
            found[MEMORY] = resources[MEMORY].value()
        return found

    # --- for status and metrics ----------------------------------------------------------------

    @property
    def problem(self) -> str:
        """What keeps the reports or the prediction from working; "" for nothing."""
        problems = [self.node_metric.problem, *(keeper.problem for keeper in self.keepers)]
        return next(filter(None, [*problems, self._training_problem, self.trainer.problem]), "")

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
            "prediction": {
                "models": len(self.trainer.models),
                "trainings": self.trainer.trainings,
                "problem": self._training_problem or self.trainer.problem,
            },
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

    async def _in_worker(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)


class _AwayForLong(Exception):
    """No report was taken for `_RECONNECT_S`."""


def _map(both: Both) -> ResourceMap:
    return amounts(both.cpu_milli, both.memory_bytes)
