"""Trains the models once an interval, keeps them over restarts and drops those of pods that ended.

All methods do their work in the calling thread; the daemon calls them from a worker thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from hooks.subject import HostAppSubject, Pod
from koordlet.measurement.bulk import BulkMeasurements
from koordlet.prediction import checkpoints
from koordlet.prediction.models import OUR_RULES, Models, Rules, samples

_LOG = logging.getLogger("koordlet.prediction")


class Schedule(msgspec.Struct, frozen=True):
    """Seconds; defaults are upstream's.

    expiration_s: a model that was not trained for so long is dropped. checkpoint_s: between two
    writes of the file; a restart loses as much.
    """

    training_s: float = 60.0
    expiration_s: float = 1800.0
    checkpoint_s: float = 600.0


class Trainer:
    """The models of one daemon and their file. Its methods must not run at the same time.

    Time advances with the monotonic clock from the wall clock's reading at start, so that a wall
    clock that is set while the daemon runs changes no weight.
    """

    def __init__(
        self,
        models: Models,
        schedule: Schedule,
        directory: str,
        *,
        rules: Rules = OUR_RULES,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = models
        self.trainings = 0
        """How many trainings have added samples since the start."""
        self.problem = ""
        """Why the last checkpoint was not written; empty when it was."""
        self._schedule = schedule
        self._rules = rules
        self._directory = directory
        self._monotonic = monotonic
        self._offset_s = wall() - monotonic()
        self._started_s = self._now_s()
        self._saved_s = self._started_s

    def _now_s(self) -> float:
        return self._monotonic() + self._offset_s

    def load(self) -> tuple[str, ...]:
        """Restore the kept models; return what was left out, one sentence each."""
        loaded = checkpoints.read(self._directory)
        now_s = self._now_s()
        for saved in loaded.models:
            self.models.restore(saved, now_s)
        return loaded.problems

    def train(
        self,
        measurements: BulkMeasurements,
        pods: Sequence[Pod],
        host_apps: Sequence[HostAppSubject],
    ) -> None:
        """Add a sample to each model, and write the file if a checkpoint is due."""
        now_s = self._now_s()
        found = samples(
            measurements,
            pods,
            host_apps,
            interval_s=self._schedule.training_s,
            rules=self._rules,
        )
        self.models.train(found, now_s)
        self.trainings += 1
        # Kept models get as long after a start as others: the pods may be listed late.
        expired_s = now_s - self._schedule.expiration_s
        if expired_s >= self._started_s:
            self.models.forget_older(expired_s)
        if now_s - self._saved_s >= self._schedule.checkpoint_s:
            self.save()

    def save(self) -> None:
        """Write the file. A failure is logged once, kept in `problem`, and tried again."""
        self._saved_s = self._now_s()
        try:
            checkpoints.write(self._directory, self.models.save())
        except OSError as error:
            problem = f"{self._directory}: {error.strerror or error}"
            if problem != self.problem:
                _LOG.warning("prediction's models cannot be kept for a restart: %s", problem)
            self.problem = problem
        else:
            self.problem = ""
