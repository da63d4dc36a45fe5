"""The models of one node: what its pods, their priority classes, the node and its system use.

A model is a histogram of CPU (cores) and one of memory (bytes). Each training adds one sample to
both, of the use since the last training: the 90th percentile of CPU and the largest memory. A
shorter peak of CPU ends in throttling or waiting; one of memory ends in reclaim or an OOM kill.

    batch, free    = sum over the pods + sum over the host applications of the class
    other classes  = sum over the pods
    system, CPU    = max(node - pods - host applications of batch and free, 0)
    system, memory = largest value of the system's series + sum over the other host applications

The system's series is the node - pods - all host applications at each moment. CPU subtracts
percentiles, as upstream does. Memory does not subtract peaks: those of many pods need not fall
together, and their sum would hide the system.

Host applications of batch and free yield to mid pods. The others stay in the system: no pod's
request stands for them, and what they use must not be offered as mid resources.

Upstream's rules are in docs/facts/koordlet.md, "Prediction"; `Rules` names those that an operator
can bring back. Two more rules differ. A training that cannot read the node leaves out the node and
the system, and a class whose pods were not measured is left out as well: upstream adds a use of 0
in both cases, which lets the peak decay although nothing is known. A class without pods does use
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
from hooks.subject import HostAppSubject, Pod
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


class Rules(msgspec.Struct, frozen=True):
    """Which of upstream's rules of sampling are in force.

    host_apps_are_system: host applications of batch and free count as system too.
    cut_memory_peaks: memory counts with its 90th percentile, as CPU does.
    """

    host_apps_are_system: bool = False
    cut_memory_peaks: bool = False


OUR_RULES: Final = Rules()
_YIELDING: Final = {PriorityClass.BATCH.value, PriorityClass.FREE.value}
"""Classes of host applications that give way to mid pods."""


def samples(
    measurements: BulkMeasurements,
    pods: Sequence[Pod],
    host_apps: Sequence[HostAppSubject],
    *,
    interval_s: float,
    rules: Rules = OUR_RULES,
) -> dict[str, Use]:
    """Return what to train: model key -> the use since the last training.

    pods: of any phase. A pod or host application without samples of both CPU and memory is left
    out.
    """
    found: dict[str, Use] = {}
    by_class = {priority: [0.0, 0.0] for priority in PriorityClass}
    measured: set[PriorityClass] = set()
    unmeasured: set[PriorityClass] = set()
    of_pods = _uses(measurements, Metric.POD_CPU, Metric.POD_MEMORY, interval_s, rules)
    for pod in pods:
        priority = class_of(pod)
        use = of_pods.get(pod.uid)
        if use is None:
            if pod.phase != "Pending" and not pod.ended:
                unmeasured.add(priority)
            continue
        found[pod.uid] = use
        by_class[priority][0] += use.cpu_cores
        by_class[priority][1] += use.memory_bytes
        measured.add(priority)
    of_apps = _uses(measurements, Metric.HOST_APP_CPU, Metric.HOST_APP_MEMORY, interval_s, rules)
    others_bytes = 0.0
    for app in host_apps:
        use = of_apps.get(app.name, Use())
        if app.priority in _YIELDING and not rules.host_apps_are_system:
            total = by_class[PriorityClass(app.priority)]
            total[0] += use.cpu_cores
            total[1] += use.memory_bytes
        else:
            others_bytes += use.memory_bytes
    for priority, (cores, used) in by_class.items():
        if priority in measured or priority not in unmeasured:
            found[class_key(priority)] = Use(cores, used)
    node = _of_node(measurements, interval_s, rules)
    if node is None:
        return found
    found[NODE] = node
    cores = max(node.cpu_cores - sum(total[0] for total in by_class.values()), 0.0)
    if rules.cut_memory_peaks:
        used = max(node.memory_bytes - sum(total[1] for total in by_class.values()), 0.0)
        found[SYSTEM] = Use(cores, used)
    elif system := measurements.aggregate(Series(Metric.SYSTEM_MEMORY), within_s=interval_s):
        found[SYSTEM] = Use(cores, system.largest + others_bytes)
    return found


def _uses(
    measurements: BulkMeasurements, cpu: Metric, memory: Metric, within_s: float, rules: Rules
) -> dict[str, Use]:
    """Return the use of each object that has samples of both metrics."""
    cores = measurements.statistics(cpu, within_s=within_s)
    used = measurements.statistics(memory, within_s=within_s)
    peaks = used.p90 if rules.cut_memory_peaks else used.largest
    peak_of = {of: peak for (of, _), peak in zip(used.keys, peaks.tolist(), strict=True)}
    return {
        of: Use(p90, peak_of[of])
        for (of, _), p90 in zip(cores.keys, cores.p90.tolist(), strict=True)
        if of in peak_of
    }


def _of_node(measurements: BulkMeasurements, interval_s: float, rules: Rules) -> Use | None:
    cpu = measurements.aggregate(Series(Metric.NODE_CPU), within_s=interval_s)
    memory = measurements.aggregate(Series(Metric.NODE_MEMORY), within_s=interval_s)
    if cpu is None or memory is None:
        return None
    return Use(cpu.p90, memory.p90 if rules.cut_memory_peaks else memory.largest)


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
