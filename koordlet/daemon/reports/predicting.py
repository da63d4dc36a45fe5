"""Trains the prediction, and predicts for reports what pods will use.

Training needs measurements. It goes on while reports fail, so that a report has a prediction once
the API server can be reached again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Final

from apis.errors import InputError
from apis.keys import CPU, MEMORY
from hooks.compat import (
    COLD_START_BY_AGE_ONLY,
    PREDICTION_CUTS_MEMORY_PEAKS,
    PREDICTION_HOST_APPS_ARE_SYSTEM,
)
from hooks.facts import NodeMeta
from hooks.subject import HostAppSubject, Pod
from koordlet.configuration.config import Config
from koordlet.measurement.bulk import BulkMeasurements
from koordlet.prediction.models import Models, Rules
from koordlet.prediction.peak import Both, Predictions, Settings, predict
from koordlet.prediction.training import Schedule, Trainer
from koordlet.qos.strategy import NodeAmounts
from koordlet.reporters.allocatable import raw_allocatable
from koordlet.reporters.node_metric import measured
from service.events import Events
from service.repeats import Repeats

_LOG = logging.getLogger("koordlet.reporters")

_UNMEASURED_S: Final = 1.0
"""How often a training waits for the first measurements."""

PodsOf = Callable[[], Sequence[tuple[Pod, bool]]]
"""Returns the node's pods, each with whether its deletion has begun. Called by any thread."""


class Predicting:
    """The prediction of one daemon. `run` belongs to the event loop, the rest to worker threads."""

    def __init__(
        self,
        config: Config,
        *,
        measurements: Callable[[], BulkMeasurements | None],
        pods: PodsOf,
        host_apps: Callable[[], Sequence[HostAppSubject]],
        node: Callable[[], NodeMeta | None],
        node_amounts: Callable[[], NodeAmounts | None],
        events: Events,
        workers: Executor,
    ) -> None:
        """The callables return the newest values, None while they are not known; any thread calls
        them."""
        self._enabled = config.measuring.enabled
        self._interval_s = float(config.prediction.training_interval)
        self._measurements = measurements
        self._pods = pods
        self._host_apps = host_apps
        self._node = node
        self._node_amounts = node_amounts
        self._events = events
        self._workers = workers
        self._settings = _settings(config)
        self.trainer = _trainer(config)
        self._problem = ""
        self._repeats = Repeats()

    async def run(self) -> None:
        """Load the models and train them until cancelled; do nothing without measuring."""
        if not self._enabled:
            return
        loop = asyncio.get_running_loop()
        for problem in await loop.run_in_executor(self._workers, self.trainer.load):
            self._events.add("prediction", "checkpoints", problem)
        while True:
            trained = await loop.run_in_executor(self._workers, self.train)
            await asyncio.sleep(self._interval_s if trained else _UNMEASURED_S)

    def close(self) -> None:
        """Keep the models for the next start. Blocks on the disk."""
        if self.trainer.trainings:
            self.trainer.save()

    def train(self) -> bool:
        """Add a sample to the models; return whether there were measurements. Raises nothing."""
        try:
            measurements = self._measurements()
            if measurements is None:
                return False
            pods = [pod for pod, _ in self._pods()]
            self.trainer.train(measurements, pods, self._host_apps())
        except Exception as error:  # noqa: BLE001 - the next training is made all the same
            self._problem = f"{type(error).__name__}: {error}"
            if (left_out := self._repeats.due(type(error).__name__)) is not None:
                _LOG.error(
                    "a training of the prediction failed",
                    exc_info=error,
                    extra={"same_failure_not_logged": left_out} if left_out else None,
                )
        else:
            self._problem = ""
        return True

    def predict(
        self,
        measurements: BulkMeasurements,
        pods: Sequence[tuple[Pod, bool]],
        *,
        within_s: float,
    ) -> Predictions | None:
        """Return what the models predict; None before the first training.

        pods: each with whether its deletion has begun. within_s: the report's window in seconds;
        pods without samples in it count as not measured.
        """
        allocatable = self._allocatable()
        if not self.trainer.trainings or allocatable is None:
            return None
        return predict(
            self.trainer.models,
            pods,
            allocatable=allocatable,
            settings=self._settings,
            wall_s=time.time(),
            measured=measured(measurements, within_s=within_s),
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
        if node is None:
            return {}
        try:
            return raw_allocatable(node)
        except InputError as error:
            self._events.add("bad-object", error.obj, str(error))
            return {}

    @property
    def problem(self) -> str:
        """What keeps the prediction from working; "" for nothing."""
        return self._problem or self.trainer.problem

    @property
    def status(self) -> dict[str, Any]:
        """The state for `koordctl status`."""
        return {
            "models": len(self.trainer.models),
            "trainings": self.trainer.trainings,
            "problem": self.problem,
        }


def _settings(config: Config) -> Settings:
    prediction = config.prediction
    return Settings(
        safety_margin_percent=prediction.safety_margin_percent,
        cold_start_s=float(prediction.cold_start),
        training_s=float(prediction.training_interval),
        by_age_only=COLD_START_BY_AGE_ONLY in config.compat,
    )


def _trainer(config: Config) -> Trainer:
    prediction = config.prediction
    return Trainer(
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
        rules=Rules(
            host_apps_are_system=PREDICTION_HOST_APPS_ARE_SYSTEM in config.compat,
            cut_memory_peaks=PREDICTION_CUTS_MEMORY_PEAKS in config.compat,
        ),
    )
