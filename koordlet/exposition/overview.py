"""What the node does now, for `koordctl top`, and over the last hour, for `koordctl report`.

Both are plain data, read from the measurements and the strategies' states; nothing is measured for
them alone. `docs/operations.md` lists the fields.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from apis.qos import (
    PriorityClass,
    QoSClass,
    priority_class_with_default,
    qos_class_with_default,
)
from hooks.subject import Pod
from koordlet.measurement.series import LATEST_PERIODS, Metric, Series

Plain = dict[str, Any]
Key = tuple[str, str]

_PRESSURES: Final = ("cpu.some.avg10", "mem.some.avg10", "mem.full.avg10", "io.some.avg10")
_PRESSURE_AGE_S: Final = 30.0
"""Pressure is read every 10 s; three times that, because two rounds may be late."""
_CLASSES: Final = (QoSClass.LSE, QoSClass.LSR, QoSClass.LS, QoSClass.BE, QoSClass.SYSTEM)

HISTORY_S: Final = 3600.0
"""How far back the history goes: the hour that `koordctl report` shows."""
STEP_S: Final = 10.0
"""Between two points of the history. Chosen: 360 points in an hour are as many as a chart has
pixels to show them; half of the value doubles the memory of 0.2 MB."""
_MOST_NOTES: Final = 500
"""Notes of each strategy in the history. Chosen: more than a person reads; an audit log has all."""


class Readable(Protocol):
    """The measurements as of one moment, metric by metric."""

    @property
    def now(self) -> float: ...
    def latest(self, series: Series, *, within_s: float) -> float | None: ...
    def latest_of(self, metric: Metric, *, within_s: float) -> Mapping[Key, float]: ...


def class_of(pod: Pod) -> QoSClass:
    """Return the pod's QoS class, by its label or else by its Kubernetes QoS class."""
    return qos_class_with_default(pod.labels, pod.kube_qos)


def overview(
    measured: Readable,
    pods: Iterable[Pod],
    *,
    cpu_milli: int,
    memory_bytes: int,
    interval_s: float,
) -> Plain:
    """Return usage of the node, of its QoS classes and of its pods, as of now.

    CPU in cores, memory in bytes, throttling as a ratio 0..1, pressure in percent. A value that was
    not measured lately is None. interval_s: between two samples.
    """
    fresh = LATEST_PERIODS * interval_s

    def latest(metric: Metric) -> float | None:
        return measured.latest(Series(metric), within_s=fresh)

    cpu = measured.latest_of(Metric.POD_CPU, within_s=fresh)
    memory = measured.latest_of(Metric.POD_MEMORY, within_s=fresh)
    throttled = measured.latest_of(Metric.POD_CPU_THROTTLED, within_s=fresh)
    pressure = measured.latest_of(Metric.POD_PSI, within_s=_PRESSURE_AGE_S)
    rows = [
        {
            "namespace": pod.namespace,
            "name": pod.name,
            "uid": pod.uid,
            "class": str(class_of(pod)),
            "priority": pod.priority,
            "priorityClass": str(
                priority_class_with_default(pod.labels, pod.priority, pod.kube_qos)
            ),
            "cpu": cpu.get((pod.uid, "")),
            "memory": memory.get((pod.uid, "")),
            "throttled": throttled.get((pod.uid, "")),
            "pressure": {
                name: value
                for name in _PRESSURES
                if (value := pressure.get((pod.uid, name))) is not None
            },
        }
        for pod in pods
    ]
    of_node = measured.latest_of(Metric.NODE_PSI, within_s=_PRESSURE_AGE_S)
    return {
        "node": {
            "cpu": {
                "capacity": cpu_milli / 1000,
                "used": latest(Metric.NODE_CPU),
                "system": latest(Metric.SYSTEM_CPU),
            },
            "memory": {
                "capacity": memory_bytes,
                "used": latest(Metric.NODE_MEMORY),
                "system": latest(Metric.SYSTEM_MEMORY),
            },
            "pressure": {
                name: value for name in _PRESSURES if (value := of_node.get(("", name))) is not None
            },
        },
        "bestEffort": {
            "used": _cores(latest(Metric.BE_CPU_USED)),
            "limit": _cores(latest(Metric.BE_CPU_LIMIT)),
            "request": _cores(latest(Metric.BE_CPU_REQUEST)),
        },
        "classes": [_class_row(each, rows) for each in _CLASSES],
        "pods": rows,
    }


def _cores(milli: float | None) -> float | None:
    return None if milli is None else milli / 1000


def _class_row(qos: QoSClass, rows: Sequence[Plain]) -> Plain:
    own = [row for row in rows if row["class"] == qos]
    return {
        "class": str(qos),
        "pods": len(own),
        "cpu": sum(row["cpu"] or 0.0 for row in own),
        "memory": sum(row["memory"] or 0.0 for row in own),
    }


class History:
    """The last hour, point by point, and what the strategies noted in it. For one thread at a time.

    A point has usage by class, of the node and its system, predictions, and the strategies' gauges,
    by names such as "cpu.LS", "predicted.cpu.prod" and "be_suppress_cpu_cores{type=cpuset}".
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, Mapping[str, float]]] = deque(
            maxlen=int(HISTORY_S / STEP_S)
        )
        self._notes: dict[str, deque[Plain]] = {}
        """By strategy: one that notes much does not push out what others noted."""

    def due(self, wall: float) -> bool:
        """Return whether a new point is due. A clock that was set back begins a new history."""
        if self._points and wall < self._points[-1][0]:
            self._points.clear()
        return not self._points or wall - self._points[-1][0] >= STEP_S

    def add(self, wall: float, shown: Plain, gauges: Mapping[str, float]) -> None:
        """Add a point from an overview. wall: seconds since the epoch. gauges: further series."""
        node = shown["node"]
        prod = [pod for pod in shown["pods"] if pod["priorityClass"] == PriorityClass.PROD]
        point: dict[str, float | None] = {
            "cpu.node": node["cpu"]["used"],
            "cpu.system": node["cpu"]["system"],
            "memory.node": node["memory"]["used"],
            "memory.system": node["memory"]["system"],
            "cpu.prod": sum(pod["cpu"] or 0.0 for pod in prod) if prod else None,
            "memory.prod": sum(pod["memory"] or 0.0 for pod in prod) if prod else None,
            "be.limit": shown["bestEffort"]["limit"],
            **{f"psi.{name}": value for name, value in node["pressure"].items()},
            **{f"cpu.{row['class']}": row["cpu"] for row in shown["classes"] if row["pods"]},
            **{f"memory.{row['class']}": row["memory"] for row in shown["classes"] if row["pods"]},
            **gauges,
        }
        self._points.append(
            (wall, {name: value for name, value in point.items() if value is not None})
        )

    def note(self, wall: float, strategy: str, reason: str, message: str, obj: str) -> None:
        """Add what a strategy noted."""
        of_strategy = self._notes.setdefault(strategy, deque(maxlen=_MOST_NOTES))
        of_strategy.append(
            {"at": wall, "strategy": strategy, "reason": reason, "message": message, "obj": obj}
        )

    def plain(self) -> Plain:
        """Return the history: for each name a list of values, None where a point lacks it."""
        points = list(self._points)
        notes = [note for of_strategy in tuple(self._notes.values()) for note in list(of_strategy)]
        names = sorted({name for _, values in points for name in values})
        return {
            "step_s": STEP_S,
            "times": [round(at, 1) for at, _ in points],
            "series": {name: [_short(values.get(name)) for _, values in points] for name in names},
            "notes": sorted(notes, key=lambda note: cast(float, note["at"])),
        }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
