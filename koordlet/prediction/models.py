"""The models of one node: what its pods, their priority classes, the node and its system use.

A model is a histogram of CPU (cores) and one of memory (bytes). Each training adds one sample to
both: the 90th percentile of the use since the last training. docs/facts/koordlet.md, "Prediction".

Two rules differ from upstream's. A training that cannot read the node leaves out the node and the
system, and a class whose pods were not measured is left out as well: upstream adds a use of 0 in
both cases, which lets the peak decay although nothing is known. A class without pods does use
nothing, and is trained with 0.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np

from apis.qos import PriorityClass, priority_class_with_default
from hooks.subject import Pod
from koordlet.measurement.bulk import BulkMeasurements
from koordlet.measurement.series import Metric, Series
from koordlet.prediction.histogram import Buckets, Floats, Histograms, Rows

NODE: Final = "__node__"
SYSTEM: Final = "__node-sys__"
CPU_BUCKETS: Final = Buckets(0.025, 1.05, 1024.0, 12 * 3600.0)
MEMORY_BUCKETS: Final = Buckets(5.0 * 2**20, 1.05, 2.0**41, 24 * 3600.0)
"""Upstream's buckets and half-lives, in cores and in bytes."""


def class_key(priority: PriorityClass) -> str:
    """Return the key of the model of a priority class."""
    return f"__node-{priority.value}__"


CLASS_KEYS: Final = tuple(class_key(priority) for priority in PriorityClass)


def class_of(pod: Pod) -> PriorityClass:
    """Return the priority class that a pod counts in."""
    return priority_class_with_default(pod.labels, pod.priority, pod.kube_qos)


class Use(msgspec.Struct, frozen=True):
    """An amount of CPU and memory that was used."""

    cpu_cores: float = 0.0
    memory_bytes: float = 0.0


def samples(
    measurements: BulkMeasurements, pods: Sequence[Pod], *, interval_s: float
) -> dict[str, Use]:
    """Return what to train: model key -> the use since the last training.

    pods: of any phase. A pod without samples of both CPU and memory is left out.
    """
    cpu = _p90(measurements, Metric.POD_CPU, interval_s)
    memory = _p90(measurements, Metric.POD_MEMORY, interval_s)
    found: dict[str, Use] = {}
    by_class = {priority: [0.0, 0.0, 0] for priority in PriorityClass}
    unmeasured: set[PriorityClass] = set()
    for pod in pods:
        priority = class_of(pod)
        cores, used = cpu.get(pod.uid), memory.get(pod.uid)
        if cores is None or used is None:
            if pod.phase != "Pending" and not pod.ended:
                unmeasured.add(priority)
            continue
        found[pod.uid] = Use(cores, used)
        total = by_class[priority]
        total[0] += cores
        total[1] += used
        total[2] += 1
    for priority, (all_cores, all_used, count) in by_class.items():
        if count or priority not in unmeasured:
            found[class_key(priority)] = Use(all_cores, all_used)
    node = _of_node(measurements, interval_s)
    if node is not None:
        found[NODE] = node
        found[SYSTEM] = Use(
            max(node.cpu_cores - sum(total[0] for total in by_class.values()), 0.0),
            max(node.memory_bytes - sum(total[1] for total in by_class.values()), 0.0),
        )
    return found


def _p90(measurements: BulkMeasurements, metric: Metric, within_s: float) -> dict[str, float]:
    found = measurements.statistics(metric, within_s=within_s)
    return {of: p90 for (of, _), p90 in zip(found.keys, found.p90.tolist(), strict=True)}


def _of_node(measurements: BulkMeasurements, interval_s: float) -> Use | None:
    cpu = measurements.aggregate(Series(Metric.NODE_CPU), within_s=interval_s)
    memory = measurements.aggregate(Series(Metric.NODE_MEMORY), within_s=interval_s)
    if cpu is None or memory is None:
        return None
    return Use(cpu.p90, memory.p90)


class Saved(msgspec.Struct, frozen=True):
    """A model as it is kept: weights are relative to the reference times.

    samples: how many trainings it had. updated_s: of the last one, in seconds since the epoch.
    """

    key: str
    cpu: Floats
    cpu_reference_s: float
    memory: Floats
    memory_reference_s: float
    samples: int
    updated_s: float


@dataclass(frozen=True, slots=True)
class _Model:
    row: int
    samples: int
    updated_s: float


class Models:
    """All models of a node. Any thread may use it."""

    def __init__(
        self,
        *,
        cpu_half_life_s: float = CPU_BUCKETS.half_life_s,
        memory_half_life_s: float = MEMORY_BUCKETS.half_life_s,
    ) -> None:
        self._cpu = Histograms(replace(CPU_BUCKETS, half_life_s=cpu_half_life_s))
        self._memory = Histograms(replace(MEMORY_BUCKETS, half_life_s=memory_half_life_s))
        self._models: dict[str, _Model] = {}
        self._free: list[int] = []
        self._latest_s = 0.0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._models)

    def train(self, uses: Mapping[str, Use], now_s: float) -> None:
        """Add a sample to each model; a model that is not there yet is made.

        now_s: seconds since the epoch. A clock that was set back gives samples the weight of the
        latest time so far: otherwise they would count almost nothing.
        """
        if not uses:
            return
        with self._lock:
            now_s = self._latest_s = max(now_s, self._latest_s)
            rows = np.empty(len(uses), np.intp)
            for index, key in enumerate(uses):
                known = self._models.get(key)
                row = self._new_row() if known is None else known.row
                count = 0 if known is None else known.samples
                self._models[key] = _Model(row, count + 1, now_s)
                rows[index] = row
            values = uses.values()
            self._cpu.add(rows, np.array([use.cpu_cores for use in values]), now_s)
            self._memory.add(rows, np.array([use.memory_bytes for use in values]), now_s)

    def peaks(
        self, keys: Sequence[str], *, cpu_fraction: float, memory_fraction: float
    ) -> dict[str, Use]:
        """Return the percentiles of the models that exist and hold samples, by key."""
        with self._lock:
            known = [key for key in keys if key in self._models]
            rows: Rows = np.array([self._models[key].row for key in known], np.intp)
            cpu = self._cpu.percentiles(rows, cpu_fraction)
            memory = self._memory.percentiles(rows, memory_fraction)
        return {
            key: Use(cores, used)
            for key, cores, used in zip(known, cpu.tolist(), memory.tolist(), strict=True)
            if cores > 0 and used > 0
        }

    def samples_of(self, key: str) -> int:
        """Return how many trainings a model had; 0 where there is none."""
        known = self._models.get(key)
        return 0 if known is None else known.samples

    def forget_older(self, than_s: float) -> tuple[str, ...]:
        """Drop models that were last trained before a time; return their keys."""
        with self._lock:
            old = tuple(key for key, model in self._models.items() if model.updated_s < than_s)
            for key in old:
                row = self._models.pop(key).row
                self._cpu.clear(row)
                self._memory.clear(row)
                self._free.append(row)
        return old

    def save(self) -> tuple[Saved, ...]:
        """Return all models, to be kept over a restart."""
        with self._lock:
            return tuple(
                Saved(
                    key=key,
                    cpu=self._cpu.weights(model.row),
                    cpu_reference_s=self._cpu.reference_s,
                    memory=self._memory.weights(model.row),
                    memory_reference_s=self._memory.reference_s,
                    samples=model.samples,
                    updated_s=model.updated_s,
                )
                for key, model in self._models.items()
            )

    def restore(self, saved: Saved, now_s: float) -> None:
        """Put a kept model in place of the model of that key.

        A model from the future, kept while the clock was wrong, counts as trained now.
        """
        ahead_s = max(saved.updated_s - now_s, 0.0)
        saved = msgspec.structs.replace(
            saved,
            updated_s=saved.updated_s - ahead_s,
            cpu_reference_s=saved.cpu_reference_s - ahead_s,
            memory_reference_s=saved.memory_reference_s - ahead_s,
        )
        with self._lock:
            known = self._models.get(saved.key)
            row = self._new_row() if known is None else known.row
            self._cpu.put(row, saved.cpu, saved.cpu_reference_s)
            self._memory.put(row, saved.memory, saved.memory_reference_s)
            self._models[saved.key] = _Model(row, saved.samples, saved.updated_s)
            self._latest_s = max(self._latest_s, saved.updated_s)

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        row = len(self._models)
        self._cpu.reserve(row + 1)
        self._memory.reserve(row + 1)
        return row
