"""Reports to an API server that has faults and other writers, and to a file without one."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from apis.nodemetric import NodeMetricStatus
from koordlet.measurement.series import Metric, Series
from koordlet.reporters.node_metric import Policy, node_metric_status
from koordlet.reporters.node_metric_loop import NodeMetricReporter
from kube.client import Client
from service.events import Events
from tests.koordlet.measured import Measured
from tests.koordlet.reporters.bed import Objects, Plain, with_server

PATH = "/apis/slo.koordinator.sh/v1alpha1/nodemetrics/n1"


class Node:
    """A node whose CPU use a test sets, and its reporter."""

    def __init__(self, directory: str = "") -> None:
        self.cpu: float | None = 1.0
        self.now = 1000.0
        self.policies: list[Policy] = []
        self.events = Events()
        self.fault: Exception | None = None
        self.reporter = NodeMetricReporter(
            "n1",
            self.build,
            workers=ThreadPoolExecutor(1),
            events=self.events,
            directory=directory,
            monotonic=lambda: self.now,
        )

    def build(self, policy: Policy) -> NodeMetricStatus:
        self.policies.append(policy)
        self.now += 1
        if self.fault is not None:
            raise self.fault
        made = Measured(now=1000.0)
        if self.cpu is not None:
            made.constant(Series(Metric.NODE_CPU), self.cpu)
            made.constant(Series(Metric.NODE_MEMORY), 2**30)
        return node_metric_status(made, (), (), policy, wall_s=1_700_000_000 + self.now)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.latest()]


def node_metric(**policy: object) -> Plain:
    return {"metadata": {"name": "n1"}, "spec": {"metricCollectPolicy": policy}}


def cpu_of(server: Objects) -> object:
    usage = server.objects[PATH]["status"]["nodeMetric"]["nodeUsage"]
    return usage["resources"]["cpu"]


def test_a_report_costs_one_patch_with_what_has_changed() -> None:
    async def test(server: Objects, client: Client) -> None:
        server.put(PATH, node_metric(reportIntervalSeconds=120))
        node = Node()
        pause = await node.reporter.round(client)
        assert 114 <= pause <= 126
        assert cpu_of(server) == "1"
        server.requests.clear()
        node.cpu, node.now = 2.0, 1060.0
        await node.reporter.round(client)
        assert cpu_of(server) == "2"
        ((method, path, body),) = server.requests
        assert (method, path) == ("PATCH", f"{PATH}/status")
        assert set(body) == {"metadata", "status"}
        assert set(body["status"]) == {"updateTime", "nodeMetric"}
        assert set(body["status"]["nodeMetric"]) == {"nodeUsage", "aggregatedNodeUsages"}
        assert node.reporter.reports == 2

    with_server(test)


def test_a_spec_that_changed_between_two_reports_counts_for_the_next_one() -> None:
    async def test(server: Objects, client: Client) -> None:
        server.put(PATH, node_metric())
        node = Node()
        await node.reporter.round(client)
        stored = server.objects[PATH]
        server.put(PATH, {**stored, **node_metric(reportIntervalSeconds=40)})
        node.cpu = 3.0
        pause = await node.reporter.round(client)
        assert 38 <= pause <= 42
        assert node.policies[-1].report_interval_s == 40
        assert cpu_of(server) == "3"

    with_server(test)


def test_a_write_by_another_client_in_the_middle_is_not_overwritten() -> None:
    async def test(server: Objects, client: Client) -> None:
        server.put(PATH, node_metric())
        node = Node()
        await node.reporter.round(client)

        def other_writer() -> None:
            stored = server.objects[PATH]
            labels = {"labels": {"team": "a"}}
            server.put(PATH, {**stored, "metadata": {**stored["metadata"], **labels}})

        server.before_patch = other_writer
        node.cpu = 4.0
        await node.reporter.round(client)
        assert cpu_of(server) == "4"
        assert server.objects[PATH]["metadata"]["labels"] == {"team": "a"}

    with_server(test)


def test_koordlet_does_not_create_the_object_and_waits_for_it() -> None:
    async def test(server: Objects, client: Client) -> None:
        node = Node()
        assert await node.reporter.round(client) == 10
        assert PATH not in server.objects
        assert "koord-manager creates it" in node.reporter.problem
        assert node.policies == []
        server.put(PATH, node_metric())
        await node.reporter.round(client)
        assert (cpu_of(server), node.reporter.problem) == ("1", "")
        assert node.kinds() == ["report-failed", "report-back"]
        del server.objects[PATH]
        await node.reporter.round(client)
        assert "was deleted" in node.reporter.problem
        assert PATH not in server.objects

    with_server(test)


def test_an_object_that_was_made_again_gets_a_whole_report() -> None:
    async def test(server: Objects, client: Client) -> None:
        server.put(PATH, node_metric())
        node = Node()
        await node.reporter.round(client)
        whole = server.objects[PATH]["status"]
        server.put(PATH, node_metric())
        await node.reporter.round(client)
        again = server.objects[PATH]["status"]
        assert {**again, "updateTime": ""} == {**whole, "updateTime": ""}

    with_server(test)


def test_a_server_that_is_away_costs_rounds_and_no_queue() -> None:
    async def test(server: Objects, client: Client) -> None:
        server.put(PATH, node_metric())
        node = Node()
        await node.reporter.round(client)
        server.refusals = [503] * 5
        pauses = [await node.reporter.round(client) for _ in range(5)]
        assert pauses[0] <= 5
        assert all(pause <= 60 for pause in pauses)
        assert pauses[4] > pauses[0]
        assert "503" in node.reporter.problem
        server.requests.clear()
        node.cpu = 7.0
        await node.reporter.round(client)
        assert cpu_of(server) == "7"
        assert len(server.named("PATCH")) == 1
        assert node.kinds() == ["report-failed", "report-back"]

    with_server(test)


def test_a_report_that_cannot_be_made_is_a_problem_and_later_ones_are_sent() -> None:
    async def test(server: Objects, client: Client) -> None:
        server.put(PATH, node_metric())
        node = Node()
        node.fault = RuntimeError("no such ring")
        await node.reporter.round(client)
        assert node.reporter.problem == "RuntimeError: no such ring"
        node.fault = None
        await node.reporter.round(client)
        assert (cpu_of(server), node.reporter.problem) == ("1", "")

    with_server(test)


def test_the_first_report_waits_for_samples_of_the_node_up_to_one_interval() -> None:
    async def test(server: Objects, client: Client) -> None:
        server.put(PATH, {**node_metric(), "status": {"updateTime": "before"}})
        node = Node()
        node.cpu = None
        assert await node.reporter.round(client) == 1.0
        assert server.objects[PATH]["status"] == {"updateTime": "before"}
        node.now += 61
        await node.reporter.round(client)
        assert server.objects[PATH]["status"]["nodeMetric"]["nodeUsage"] == {}

    with_server(test)


def test_a_bad_field_of_the_spec_is_named_and_the_others_hold() -> None:
    async def test(server: Objects, client: Client) -> None:
        server.put(PATH, node_metric(reportIntervalSeconds=40, aggregateDurationSeconds="long"))
        node = Node()
        await node.reporter.round(client)
        assert node.policies == [Policy(report_interval_s=40.0)]
        (event,) = [event for event in node.events.latest() if event.kind == "bad-object"]
        assert event.obj == "NodeMetric n1"
        assert "aggregateDurationSeconds" in event.message
        assert "long" in event.message

    with_server(test)


def test_without_an_api_server_the_report_is_a_file(tmp_path: Path) -> None:
    node = Node(str(tmp_path / "reports"))
    pause = asyncio.run(node.reporter.round(None))
    assert 57 <= pause <= 63
    manifest = json.loads((tmp_path / "reports" / "nodemetric.json").read_text())
    assert (manifest["kind"], manifest["metadata"]) == ("NodeMetric", {"name": "n1"})
    assert manifest["status"]["nodeMetric"]["nodeUsage"]["resources"]["cpu"] == "1"
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["nodemetric.json"]


def test_a_directory_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("")
    node = Node(str(tmp_path / "reports"))
    asyncio.run(node.reporter.round(None))
    assert "FileExistsError" in node.reporter.problem


@pytest.mark.parametrize("code", [401, 403, 500])
def test_a_refusal_of_any_kind_is_shown_with_its_status(code: int) -> None:
    async def test(server: Objects, client: Client) -> None:
        server.put(PATH, node_metric())
        server.refusals = [code] * 4
        node = Node()
        await node.reporter.round(client)
        assert str(code) in node.reporter.problem

    with_server(test)
