"""The text of /metrics: upstream's names, one series for each fact, made in slices."""

from __future__ import annotations

import asyncio
import math

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.exposition import CONTENT_TYPE, Registry, number_text
from cluster.manager.flags import parse
from cluster.manager.manager import Manager
from cluster.metrics import ManagerMetrics
from kube.client import Client
from kube.connection import Connection
from service.http_server import Request
from tests.beds.apiserver import eventually
from tests.ports import free_ports
from tests.waiting import until


def text(registry: Registry) -> str:
    return "".join(registry.slices())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((0, "0"), (1.0, "1"), (-3, "-3"), (0.5, "0.5"), (2**60, repr(float(2**60)))),
        *((math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")),
    ],
)
def test_numbers_are_written_in_the_text_format(value: float, expected: str) -> None:
    assert number_text(value) == expected


def test_a_family_is_read_back_as_it_was_counted() -> None:
    registry = Registry()
    runs = registry.counter("runs_total", "Runs.", "status", "reason")
    runs.labels("failed", 'a "b"\n\\c').inc()
    runs.labels("failed", 'a "b"\n\\c').inc(2)
    runs.labels("succeeded", "").inc()
    registry.gauge("leads", "Leads.").labels().set(1)
    took = registry.histogram("took", "Time.", "who", bounds=(1.0, 10.0))
    for value in (0.5, 1.0, 7, 100):
        took.labels("x").observe(value)
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text(registry))
        for sample in family.samples
    }
    assert found == {
        ("runs_total", ("reason", 'a "b"\n\\c'), ("status", "failed")): 3,
        ("runs_total", ("reason", ""), ("status", "succeeded")): 1,
        ("leads",): 1,
        ("took_bucket", ("le", "1"), ("who", "x")): 2,
        ("took_bucket", ("le", "10"), ("who", "x")): 3,
        ("took_bucket", ("le", "+Inf"), ("who", "x")): 4,
        ("took_sum", ("who", "x")): 108.5,
        ("took_count", ("who", "x")): 4,
    }


def test_a_removed_series_is_gone_and_starts_at_zero_again() -> None:
    registry = Registry()
    family = registry.gauge("offers", "Offers.", "node")
    family.labels("a").set(5)
    family.remove("a")
    family.remove("never there")
    assert "offers{" not in text(registry)
    assert family.labels("a").value == 0


def test_slices_are_bounded_and_nothing_is_lost_while_series_come_and_go() -> None:
    registry = Registry()
    family = registry.gauge("offers", "Offers.", "node")
    for number in range(1000):
        family.labels(f"n{number}").set(number)
    slices = []
    for each in registry.slices(100):
        slices.append(each)
        family.labels(f"new{len(slices)}").set(1)
        family.remove(f"n{len(slices)}")
    assert max(each.count("\n") for each in slices) <= 101  # the head has two lines
    whole = "".join(slices)
    assert all(f'offers{{node="n{number}"}} {number}\n' in whole for number in range(1000))


UPSTREAM = {
    "slo_controller_node_resource_reconcile_count": ("status", "reason"),
    "slo_controller_node_resource_run_plugin_status": ("plugin", "status", "reason"),
    "slo_controller_nodemetric_reconcile_count": ("status", "reason"),
    "slo_controller_nodemetric_spec_parse_count": ("status", "reason"),
    "slo_controller_nodeslo_reconcile_count": ("status", "reason"),
    "slo_controller_nodeslo_spec_parse_count": ("status", "reason"),
    "slo_controller_node_extended_resource_allocatable_internal": ("node", "resource", "unit"),
    "koord_manager_webhook_webhook_duration_milliseconds": (
        *("webhook_type", "object_type", "operation", "plugin_name", "status"),
    ),
    "koord_manager_webhook_quota_shared_weight": ("elasticquota_name", "resource_name"),
    "koord_manager_webhook_binding_admission_decisions_total": ("decision",),
    "koordinator_manager_is_leader": (),
}


def test_the_series_that_upstream_has_carry_its_names_and_labels() -> None:
    metrics = ManagerMetrics()
    families = (
        *(metrics.node_resource, metrics.plugin, metrics.node_metric, metrics.node_metric_parse),
        *(metrics.node_slo, metrics.node_slo_parse, metrics.allocatable, metrics.webhook),
        *(metrics.quota_shared_weight, metrics.binding),
    )
    assert {each.name: each.label_names for each in families} | {
        "koordinator_manager_is_leader": ()
    } == UPSTREAM
    metrics.node_slo.labels("succeeded", "").inc()
    shown = text(metrics.registry)
    assert 'slo_controller_nodeslo_reconcile_count{status="succeeded",reason=""} 1\n' in shown
    assert "koordinator_manager_is_leader 0\n" in shown
    assert "_created" not in shown
    assert "process_resident_memory_bytes " in shown
    names = [line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE")]
    ours = {
        "koord_manager_slo_config_stale",
        "koord_manager_webhook_certificate_expiry_timestamp_seconds",
        "koord_manager_faults",
    }
    assert len(names) == len(set(names))
    assert {name for name in names if not name.startswith("process_")} == ours | set(UPSTREAM)


def test_the_buckets_of_admission_are_upstreams() -> None:
    metrics = ManagerMetrics()
    metrics.webhook.labels("mutate", "Pod", "CREATE", "p", "allowed").observe(0.5)
    lines = [line for line in text(metrics.registry).splitlines() if "_bucket{" in line]
    bounds = [line.partition('le="')[2].partition('"')[0] for line in lines]
    assert [float(each) for each in bounds[:-1]] == pytest.approx(
        [0.001 * 2**power for power in range(20)], rel=1e-4
    )
    assert bounds[-1] == "+Inf"
    assert [line.rpartition(" ")[2] for line in lines] == ["0"] * 9 + ["1"] * 12


def test_series_of_nodes_that_are_gone_end_after_five_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("cluster.metrics.time.monotonic", lambda: now)
    metrics = ManagerMetrics()
    metrics.set_allocatable("gone", "kubernetes.io/batch-cpu", "integer", 1)
    now += 200
    metrics.set_allocatable("here", "kubernetes.io/batch-cpu", "integer", 2)
    now += 99
    metrics.drop_stale()
    assert len(metrics.allocatable) == 2
    now += 2
    metrics.drop_stale()
    shown = text(metrics.registry)
    assert 'node="gone"' not in shown and 'node="here"' in shown
    metrics.drop_stale()


def test_other_work_goes_on_while_a_page_is_made_and_faults_are_on_it() -> None:
    async def run() -> tuple[int, str]:
        async with Client(Connection("http://localhost")) as client:
            one = Manager(client, parse(["--feature-gates=WebhookFramework=false"], {}))
            for number in range(10_000):
                one.metrics.set_allocatable(f"n{number}", "kubernetes.io/mid-cpu", "integer", 1)
            try:
                raise KeyError("x")
            except KeyError:
                one.controllers["nodeslo"].queue.faults.note("work")
            turns = 0

            async def others() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            task = asyncio.create_task(others())
            await asyncio.sleep(0)
            before = turns
            page = await one._exposition(Request("GET", "/metrics", {}, b""))
            task.cancel()
            return turns - before, page.body.decode()

    turns, shown = asyncio.run(run())
    assert turns >= 4
    assert 'koord_manager_faults{part="nodeslo"} 1\n' in shown
    assert 'koord_manager_faults{part="noderesource"} 0\n' in shown
    assert 'koord_manager_faults{part="cache of nodes"} 0\n' in shown


def test_exceptions_that_reach_the_event_loop_are_counted_and_do_not_end_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> int:
        async with Client(Connection("http://localhost")) as client:
            one = Manager(client, parse(["--feature-gates=WebhookFramework=false"], {}))
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(one._loop_failed)

            def broken() -> None:
                raise KeyError("a bug")

            loop.call_soon(broken)
            # What uvloop says of a TLS connection that was closed while idle.
            closed = RuntimeError("unable to perform operation on <x>; the handler is closed")
            loop.call_exception_handler({"message": "Fatal error", "exception": closed})
            loop.call_exception_handler({"message": "without an exception"})
            await asyncio.sleep(0.01)
            return one._faults.count

    assert asyncio.run(run()) == 2
    assert "manager: the event loop" in caplog.text and "a bug" in caplog.text
    assert "the handler is closed" not in caplog.text


def test_the_leader_exposes_that_it_leads_and_drops_old_series(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.manager.manager._SWEEP_SECONDS", 0.001)

    async def run() -> None:
        async with Client(Connection("http://localhost")) as client:
            one = Manager(client, parse(["--feature-gates=WebhookFramework=false"], {}))
            swept = 0

            def sweep() -> None:
                nonlocal swept
                swept += 1
                raise KeyError("a bug")

            monkeypatch.setattr(one.metrics, "drop_stale", sweep)
            assert (one.leading, one.metrics.is_leader.value) == (False, 0)
            task = asyncio.create_task(one._control())
            await until(lambda: swept >= 2)
            assert (one.leading, one.metrics.is_leader.value) == (True, 1)
            assert one._faults.count == swept  # and it goes on
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (one.leading, one.metrics.is_leader.value) == (False, 0)

    asyncio.run(run())
    assert "manager: dropping old series failed" in caplog.text


def test_pages_are_served_while_the_api_server_is_away() -> None:
    health, metrics = free_ports(2)
    flags = [
        f"--health-probe-addr=127.0.0.1:{health}",
        f"--metrics-addr=127.0.0.1:{metrics}",
        "--feature-gates=WebhookFramework=false",
    ]

    async def run() -> None:
        (nobody,) = free_ports(1)
        async with Client(Connection(f"http://127.0.0.1:{nobody}")) as client:
            stop = asyncio.Event()
            running = asyncio.create_task(Manager(client, parse(flags, {})).run(stop))
            async with aiohttp.ClientSession() as session:

                async def page(port: int, path: str) -> tuple[int, str, str]:
                    async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                        text = await answer.text()
                        return answer.status, text, answer.headers["Content-Type"]

                async def reached() -> bool:
                    try:
                        return (await page(health, "/healthz"))[:2] == (200, "ok")
                    except aiohttp.ClientConnectionError:
                        return False

                await eventually(reached)
                status, text, _ = await page(health, "/readyz")
                assert status == 503
                assert text.startswith("waiting for lists of nodes, pods, configmaps, ")
                for path in ("/metrics", "/internal-metrics", "/external-metrics", "/all-metrics"):
                    status, text, kind = await page(metrics, path)
                    assert (status, kind) == (200, CONTENT_TYPE)
                    assert "koordinator_manager_is_leader 0\n" in text
                assert (await page(metrics, "/healthz"))[0] == 404
            assert not running.done()
            stop.set()
            await asyncio.wait_for(running, 10)

    asyncio.run(run())
