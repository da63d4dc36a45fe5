"""Training and reports in the daemon, with measurements that a test writes down."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from apis.qos import QoSClass
from hooks.facts import NodeMeta
from hooks.subject import HostAppSubject, Pod
from koordlet.daemon.reports.predicting import Predicting
from koordlet.daemon.reports.reporting import Reporting
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategy import NodeAmounts
from koordlet.reporters.node_metric import Policy
from kube.connection import Connection, ConnectionConfigError
from service.events import Events
from tests.koordlet.configured import configured
from tests.koordlet.daemon import bed
from tests.koordlet.measured import Measured
from tests.koordlet.prediction.pods import GIB, pod
from tests.waiting import until

DAY = 24 * 3600.0


class Bed:
    """A node with 16 cores and 64 GiB, and one pod that uses 2 cores and 4 GiB."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.measured: Measured | None = Measured(now=1000.0)
        self.use("a", 2.0, 4 * GIB)
        self.measured.constant(Series(Metric.NODE_CPU), 3.0)
        self.measured.constant(Series(Metric.NODE_MEMORY), 6 * GIB)
        young = pod("a", cpu_milli=8000, memory_bytes=16 * GIB)
        age = time.time() - 3 * DAY
        self.measured.constant(Series(Metric.SYSTEM_MEMORY), 2 * GIB)
        self.host_apps: list[HostAppSubject] = []
        self.pods: list[tuple[Pod, bool]] = [(_aged(young, age), False)]
        self.node = NodeMeta("n1")
        self.amounts = NodeAmounts(cpu_milli=16000, memory_bytes=64 * GIB)
        self.events = Events()
        self.gates: dict[str, bool] = {}
        self.kept: list[float] = []
        self.connect: Callable[[], Connection] | None = None
        config = configured(runDir=str(folder), **changes)
        workers = ThreadPoolExecutor(1)
        self.predicting = Predicting(
            config,
            measurements=lambda: self.measured,
            pods=lambda: self.pods,
            host_apps=lambda: self.host_apps,
            node=lambda: self.node,
            node_amounts=lambda: self.amounts,
            events=self.events,
            workers=workers,
        )
        self.reporting = Reporting(
            config,
            measurements=lambda: self.measured,
            pods=lambda: self.pods,
            host_apps=lambda: (),
            gpus=dict,
            topology=lambda: None,
            devices=lambda: None,
            gate=lambda name: self.gates.get(name, False),
            keep=self.kept.append,
            predicting=self.predicting,
            events=self.events,
            workers=workers,
            connect=self._connect,
        )

    def _connect(self) -> Connection:
        assert self.connect is not None
        return self.connect()

    def use(self, uid: str, cpu: float, memory: float) -> None:
        assert self.measured is not None
        self.measured.constant(Series(Metric.POD_CPU, uid), cpu)
        self.measured.constant(Series(Metric.POD_MEMORY, uid), memory)

    def train(self, times: int = 800) -> None:
        for _ in range(times):
            self.predicting.train()

    def reclaimable(self) -> dict[str, str]:
        found = self.reporting.build(Policy()).prod_reclaimable_metric
        assert found is not None
        return {name: str(amount) for name, amount in found.resource.resources.items()}


def _aged(pod_: Pod, created_at: float) -> Pod:
    return msgspec.structs.replace(pod_, created_at=created_at)


def test_samples_are_kept_as_long_as_the_report_averages_them(tmp_path: Path) -> None:
    made = Bed(tmp_path)
    made.reporting.build(Policy(aggregate_s=900.0))
    assert made.kept == [900.0]


def test_a_report_has_a_prediction_after_the_first_training(tmp_path: Path) -> None:
    made = Bed(tmp_path)
    status = made.reporting.build(Policy())
    assert status.prod_peak_metric is None
    assert made.reclaimable() == {}
    made.train()
    assert made.reclaimable() == {"cpu": "4633m", "memory": "9972462999"}
    assert made.reporting.build(Policy()).prod_peak_metric is not None


def test_compat_cold_start_by_age_trusts_the_first_sample(tmp_path: Path) -> None:
    made = Bed(tmp_path)
    made.train(1)
    assert made.reclaimable() == {"cpu": "0", "memory": "0"}
    compatible = Bed(tmp_path, compat=["PredictionColdStartByAge"])
    compatible.train(1)
    assert compatible.reclaimable()["cpu"] == "4633m"


def test_compat_host_applications_of_batch_lessen_what_is_reclaimable(tmp_path: Path) -> None:
    """What the node uses beyond the pod, 1 core and 2 GiB, is the application's."""
    plain, compatible = Bed(tmp_path), Bed(tmp_path, compat=["PredictionHostAppsAreSystem"])
    for made in (plain, compatible):
        assert made.measured is not None
        made.host_apps = [HostAppSubject("yarn", QoSClass.BE, "hadoop-yarn", "koord-batch")]
        made.measured.constant(Series(Metric.HOST_APP_CPU, "yarn"), 1.0)
        made.measured.constant(Series(Metric.HOST_APP_MEMORY, "yarn"), 2 * GIB)
        made.measured.constant(Series(Metric.SYSTEM_MEMORY), 0.0)
        made.train()
    assert compatible.reclaimable() == {"cpu": "4633m", "memory": "9972462999"}
    # 8000 - (2001 + 25 + 25) x 1.1; 16 GiB - (4384414627 + 2 x 5242880) x 1.1, truncated
    assert plain.reclaimable() == {"cpu": "5744m", "memory": "12345478759"}


def test_compat_memory_peaks_within_a_minute_are_cut(tmp_path: Path) -> None:
    plain, compatible = Bed(tmp_path), Bed(tmp_path, compat=["PredictionCutsMemoryPeaks"])
    for made in (plain, compatible):
        assert made.measured is not None
        made.measured.values(Series(Metric.POD_MEMORY, "a"), [4.0 * GIB] * 58 + [8.0 * GIB] * 3)
        made.train()
    assert compatible.reclaimable()["memory"] == "9972462999"
    assert int(plain.reclaimable()["memory"]) < 9972462999 - 4 * GIB


def test_what_is_reclaimable_is_bounded_by_the_raw_allocatable_of_an_amplified_node(
    tmp_path: Path,
) -> None:
    made = Bed(tmp_path)
    made.amounts = NodeAmounts(16000, 64 * GIB, allocatable={"cpu": 32000, "memory": 64 * GIB})
    annotation = "node.koordinator.sh/raw-allocatable"
    made.node = NodeMeta("n1", annotations={annotation: '{"cpu":"4","memory":"8Gi"}'})
    made.train()
    amplified = made.reclaimable()
    # used by class at the peak: (2001 + 25 + 1035) x 1.1
    assert amplified["cpu"] == f"{4000 - 3367}m"
    made.node = NodeMeta("n1", annotations={annotation: '{"cpu":"four"}'})
    assert made.reclaimable()["cpu"] == "4633m"
    (event,) = made.events.latest()
    assert (event.kind, event.obj) == ("bad-object", "Node n1")
    assert "four" in event.message


def test_gauges_have_upstreams_names_and_labels(tmp_path: Path) -> None:
    made = Bed(tmp_path)
    assert made.reporting.gauges == []
    made.train()
    asyncio.run(made.reporting.node_metric.round(None))
    gauges = {(name, labels): value for name, labels, value in made.reporting.gauges}
    cpu = (("resource", "cpu"), ("unit", "core"))
    by_pod = (("predictor", "podReclaimablePredictor"), *cpu)
    assert gauges["node_predicted_resource_reclaimable", by_pod] == 5.799
    assert gauges["node_predicted_resource_peak", by_pod] == 2.201
    assert len(gauges) == 3 * 2 * 2
    made.gates = {"NodeMetricPromMetrics": True}
    gauges = {(name, labels): value for name, labels, value in made.reporting.gauges}
    assert gauges["node_metric_node_usage", cpu] == 3.0


def test_external_gauges_show_what_is_reclaimable(tmp_path: Path) -> None:
    made = Bed(tmp_path)
    prod, cpu = ("priority", "koord-prod"), (("resource", "cpu"), ("unit", "core"))

    def gauges() -> dict[object, float]:
        return {(name, labels): value for name, labels, value in made.reporting.external_gauges}

    assert gauges() == {}
    asyncio.run(made.reporting.node_metric.round(None))
    assert gauges()["node_resource_priority_reclaimable_status", (prod,)] == 1
    assert gauges()["node_priority_resource_reclaimable", (prod, *cpu)] == 0
    made.train()
    asyncio.run(made.reporting.node_metric.round(None))
    assert gauges()["node_resource_priority_reclaimable_status", (prod,)] == 0
    assert gauges()["node_priority_resource_reclaimable", (prod, *cpu)] == 4.633


def test_a_training_that_fails_is_a_problem_and_the_next_one_is_made(tmp_path: Path) -> None:
    made = Bed(tmp_path)
    made.pods = [None]  # type: ignore[list-item]
    assert made.predicting.train()
    assert "TypeError" in made.predicting.problem
    made.pods = []
    made.train(1)
    assert (made.predicting.problem, made.predicting.trainer.trainings) == ("", 1)


def test_nothing_is_trained_before_the_first_measurements(tmp_path: Path) -> None:
    made = Bed(tmp_path)
    made.measured = None
    assert not made.predicting.train()
    asyncio.run(made.reporting.node_metric.round(None))
    assert "nothing was measured yet" in made.reporting.node_metric.problem


def test_a_bare_node_trains_reports_to_a_file_and_keeps_its_models(tmp_path: Path) -> None:
    made = Bed(tmp_path)
    path = tmp_path / "reports" / "nodemetric.json"

    async def test() -> None:
        task = asyncio.gather(made.predicting.run(), made.reporting.run())
        await until(path.exists, "the report")
        await until(lambda: made.predicting.trainer.trainings == 1, "the first training")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 20))
    status = json.loads(path.read_text())["status"]
    assert [each["name"] for each in status["podsMetric"]] == ["a"]
    assert made.reporting.status["nodeMetric"]["reports"] == 1
    made.predicting.close()
    again = Bed(tmp_path)
    assert again.predicting.trainer.load() == ()
    assert again.predicting.trainer.models.samples_of("a") == 1


def test_reports_wait_for_a_configuration_of_the_api_server(tmp_path: Path) -> None:
    made = Bed(tmp_path, kubernetes={"enabled": True})
    asked: list[None] = []

    def connect() -> Connection:
        asked.append(None)
        raise ConnectionConfigError("none here")

    made.connect = connect

    async def test() -> None:
        task = asyncio.ensure_future(made.reporting.run())
        await until(lambda: len(asked) >= 2, "the second attempt")
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), 20))
    assert not (tmp_path / "reports").exists()


def test_a_daemon_reports_what_it_measures_and_shows_it_in_status() -> None:
    async def test() -> None:
        async with bed.node() as node:
            async with node.running():
                path = node.folder / "run" / "reports" / "nodemetric.json"
                await until(path.exists, "the report", timeout_s=20)
                report = json.loads(path.read_text())
                assert report["metadata"]["name"] == bed.NODE
                usage = report["status"]["nodeMetric"]["nodeUsage"]["resources"]
                assert set(usage) == {"cpu", "memory"}
                _, status = await node.ask("GET", "/status")
                shown = status["reports"]["nodeMetric"]
                assert (shown["reports"], shown["problem"]) == (1, "")
                await until(lambda: node.daemon.parts.predicting.trainer.trainings, "a training")
            assert (node.folder / "run" / "prediction" / "models.log").exists()

    bed.run(test)
