"""The overview of a node, and its history."""

from __future__ import annotations

from collections.abc import Mapping

from apis.keys import LABEL_QOS_CLASS
from apis.qos import KubeQoS
from hooks.subject import Pod, make_pod
from koordlet.exposition.overview import HISTORY_S, STEP_S, History, Plain, overview
from koordlet.measurement.series import Metric, Series


class Measured:
    """Samples by series; all are of this moment."""

    now = 100.0

    def __init__(self, samples: Mapping[Series, float]) -> None:
        self._samples = samples

    def latest(self, series: Series, *, within_s: float) -> float | None:
        return self._samples.get(series)

    def latest_of(self, metric: Metric, *, within_s: float) -> dict[tuple[str, str], float]:
        return {
            (series.of, series.detail): value
            for series, value in self._samples.items()
            if series.metric is metric
        }


def _pod(name: str, kube_qos: KubeQoS, *, priority: int | None = None, qos: str = "") -> Pod:
    return make_pod(
        namespace="default",
        name=name,
        uid=f"u-{name}",
        labels={LABEL_QOS_CLASS: qos} if qos else {},
        annotations={},
        kube_qos=kube_qos,
        priority=priority,
    )


_PODS = (
    _pod("db", KubeQoS.GUARANTEED, priority=9500, qos="LSR"),
    _pod("web", KubeQoS.BURSTABLE, priority=9000),
    _pod("batch", KubeQoS.BESTEFFORT, priority=5500, qos="BE"),
    _pod("new", KubeQoS.BESTEFFORT),  # not measured yet
)
_SAMPLES = {
    Series(Metric.NODE_CPU): 9.0,
    Series(Metric.SYSTEM_CPU): 1.0,
    Series(Metric.NODE_MEMORY): 2e9,
    Series(Metric.NODE_PSI, "", "cpu.some.avg10"): 7.5,
    Series(Metric.NODE_PSI, "", "cpu.some.avg300"): 1.5,
    Series(Metric.BE_CPU_USED): 2500.0,
    Series(Metric.BE_CPU_LIMIT): 3000.0,
    Series(Metric.POD_CPU, "u-db"): 2.0,
    Series(Metric.POD_CPU, "u-web"): 3.5,
    Series(Metric.POD_CPU, "u-batch"): 2.5,
    Series(Metric.POD_MEMORY, "u-web"): 1e9,
    Series(Metric.POD_CPU_THROTTLED, "u-web"): 0.5,
    Series(Metric.POD_PSI, "u-batch", "cpu.some.avg10"): 40.0,
}


def _look() -> Plain:
    return overview(
        Measured(_SAMPLES), _PODS, cpu_milli=16000, memory_bytes=64 << 30, interval_s=1.0
    )


def test_an_overview_has_node_classes_and_pods() -> None:
    shown = _look()
    assert shown["node"]["cpu"] == {"capacity": 16.0, "used": 9.0, "system": 1.0}
    assert shown["node"]["memory"] == {"capacity": 64 << 30, "used": 2e9, "system": None}
    assert shown["node"]["pressure"] == {"cpu.some.avg10": 7.5}
    assert shown["bestEffort"] == {"used": 2.5, "limit": 3.0, "request": None}
    by_class = {row["class"]: (row["pods"], row["cpu"]) for row in shown["classes"]}
    assert by_class == {
        "LSE": (0, 0), "LSR": (1, 2.0), "LS": (1, 3.5), "BE": (2, 2.5), "SYSTEM": (0, 0),
    }  # fmt: skip
    pods = {pod["name"]: pod for pod in shown["pods"]}
    assert (pods["web"]["throttled"], pods["web"]["memory"]) == (0.5, 1e9)
    assert pods["batch"]["pressure"] == {"cpu.some.avg10": 40.0}
    assert pods["new"]["cpu"] is None
    assert pods["db"]["priorityClass"] == "koord-prod"


def test_the_history_has_a_list_for_each_name_and_gaps_where_a_point_lacks_it() -> None:
    history = History()
    history.add(1000.0, _look(), {"be_suppress_cpu_cores{type=cpuset}": 3.0})
    history.add(1010.0, _look(), {})
    history.note(1011.0, "BECPUSuppress", "AdjustBEByNodeCPUUsage", "3 CPUs", "")
    plain = history.plain()
    assert plain["times"] == [1000.0, 1010.0]
    series = plain["series"]
    assert series["cpu.prod"] == [5.5, 5.5]
    assert series["cpu.BE"] == [2.5, 2.5]
    assert series["be_suppress_cpu_cores{type=cpuset}"] == [3.0, None]
    assert "cpu.LSE" not in series and "memory.system" not in series
    assert plain["notes"][0]["reason"] == "AdjustBEByNodeCPUUsage"


def test_points_come_at_their_step_and_are_bounded_to_an_hour() -> None:
    history = History()
    look = _look()
    wall = 0.0
    for _ in range(1000):
        wall += 1.0
        if history.due(wall):
            history.add(wall, look, {})
    assert len(history.plain()["times"]) == 100
    for _ in range(1000):
        wall += STEP_S
        history.add(wall, look, {})
    times = history.plain()["times"]
    assert times[-1] - times[0] <= HISTORY_S
    history.note(wall - 1, "seldom", "r", "first", "")
    history.note(wall + 3000, "seldom", "r", "last", "")
    for number in range(2000):
        history.note(wall + number, "often", "r", f"{number}", "")
    notes = history.plain()["notes"]
    # What notes much pushes out its own notes alone, and all stand in the order of their times.
    assert len(notes) == 502
    assert [notes[at]["message"] for at in (0, 1, 500, 501)] == ["first", "1500", "1999", "last"]


def test_a_clock_that_was_set_back_begins_a_new_history() -> None:
    history = History()
    history.add(5000.0, _look(), {})
    assert not history.due(5001.0)
    assert history.due(1000.0)
    history.add(1000.0, _look(), {})
    assert history.plain()["times"] == [1000.0]
