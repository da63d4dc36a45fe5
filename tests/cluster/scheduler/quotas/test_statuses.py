"""What the status of a quota shows, and what is patched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest

from apis.quota import ElasticQuota
from cluster.scheduler.binding import quota_statuses
from cluster.scheduler.binding.quota_statuses import (
    QuotaStatuses,
    built_in_maxima,
    status_patch,
)
from cluster.scheduler.binding.quota_upkeep import QuotaUpkeep
from cluster.scheduler.configuration.koordinator_arguments import ElasticQuotaArgs
from cluster.scheduler.configuration.strict import Seconds
from cluster.scheduler.plugins.quotas.overuse import OveruseMonitor, Revoked
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.quotas.exposition import quota_lines
from cluster.scheduler.tables.quotas.figures import QuotaFigures, figures
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.quotas.tree import Sharing
from cluster.scheduler.tables.shapes import PodShape
from kube.cache import Change, Event
from kube.client import Client
from tests.cluster.fake_api import in_virtual_time
from tests.cluster.scheduler.quotas.making import PREFIX, Bed, make_quota


def _figures(bed: Bed, name: str = "a") -> QuotaFigures:
    found = figures(bed.table, name)
    assert found is not None
    return found


def _bed() -> Bed:
    bed = Bed("10")
    bed.quota("a", {"cpu": "2"}, {"cpu": "6", "memory": "8Gi"})
    bed.place("1", "a", "3")
    bed.want("2", "a", "5")
    return bed


def test_only_what_differs_is_patched() -> None:
    bed = _bed()
    shown = make_quota("a")
    patch = status_patch(shown, _figures(bed))
    assert patch["status"] == {"used": {"cpu": "3"}}
    annotations = {
        key.removeprefix(PREFIX): json.loads(text)
        for key, text in patch["metadata"]["annotations"].items()
    }
    assert annotations == {
        "runtime": {"cpu": "6", "memory": "0"},
        "request": {"cpu": "8"},
        "child-request": {"cpu": "8"},
    }
    meta = msgspec.structs.replace(shown.metadata, annotations=patch["metadata"]["annotations"])
    used = msgspec.convert({"used": {"cpu": "3"}}, dict)
    again = make_quota("a")
    again = msgspec.structs.replace(again, metadata=meta)
    assert status_patch(again, _figures(bed)) == {"status": used}


def test_zeros_and_notations_make_no_difference() -> None:
    bed = _bed()
    shown = make_quota(
        "a",
        annotations={
            "runtime": '{"cpu":"6000m"}',
            "request": '{"cpu":8,"memory":"0"}',
            "child-request": '{"cpu":"8"}',
            "non-preemptible-used": '{"cpu":"0"}',
        },
    )
    assert status_patch(shown, _figures(bed)) == {"status": {"used": {"cpu": "3"}}}


def test_an_annotation_that_cannot_be_read_is_replaced() -> None:
    bed = _bed()
    patch = status_patch(make_quota("a", annotations={"runtime": "{"}), _figures(bed))
    assert PREFIX + "runtime" in patch["metadata"]["annotations"]


def test_the_root_quota_shows_the_whole_tree() -> None:
    bed = _bed()
    root = _figures(bed, "koordinator-root-quota")
    assert root.runtime["cpu"] == 10_000
    assert root.used == {"cpu": 3000}
    assert root.child_request == {"cpu": 6000}


def test_gauges_show_all_quotas() -> None:
    bed = _bed()
    bed.quota("parent", {}, {"cpu": "9"}, labels={"is-parent": "true"})
    bed.quota("child", {}, {"cpu": "9"}, parent="parent")
    lines = list(quota_lines(bed.table))
    labels = 'name="a",resource="cpu",tree="",is_parent="false",parent="koordinator-root-quota"'
    assert f'scheduler_elastic_quota_spec{{{labels},field="min"}} 2000\n' in lines
    assert f'scheduler_elastic_quota_status{{{labels},field="used"}} 3000\n' in lines
    assert f'scheduler_elastic_quota_status{{{labels},field="runtime"}} 6000\n' in lines
    assert any('name="parent"' in line and 'is_parent="true"' in line for line in lines)


def test_gauges_show_every_field_of_a_tree_with_guarantees() -> None:
    bed = Bed("10", several_trees=True, sharing=Sharing(guarantee=True))
    bed.quota(
        "top",
        {"cpu": "4"},
        {"cpu": "9"},
        weight={"cpu": "3"},
        labels={"is-parent": "true", "is-root": "true", "tree-id": "t"},
        annotations={
            "total-resource": '{"cpu": "8"}',
            "unschedulable-resource": '{"cpu": "1"}',
        },
    )
    bed.quota("leaf", {"cpu": "2"}, {"cpu": "6"}, parent="top", labels={"tree-id": "t"})
    bed.place("1", "leaf", "3")
    bed.want("2", "leaf", "4")
    firm = bed.shape("leaf", "500m", labels={PREFIX + "preemptible": "false"})
    bed.table.place(Booking("default/3", "3", firm, "n0"))
    top = 'resource="cpu",tree="t",is_parent="true",parent="koordinator-root-quota"'
    leaf = 'resource="cpu",tree="t",is_parent="false",parent="top"'
    shown = {
        (name, labels, kind, field): amount
        for name, labels, kind, amounts in (
            ("top", top, "spec", {"min": 4000, "max": 9000, "sharedWeight": 3000}),
            ("leaf", leaf, "spec", {"min": 2000, "max": 6000, "sharedWeight": 6000}),
            (
                "top",
                top,
                "status",
                {
                    "used": 3500,
                    "runtime": 6000,
                    "request": 6000,
                    "child-request": 6000,
                    "guaranteed": 4000,
                    "allocated": 3500,
                    "non-preemptible-request": 500,
                    "non-preemptible-used": 500,
                    "unschedulable-resource": 1000,
                },
            ),
            (
                "leaf",
                leaf,
                "status",
                {
                    "used": 3500,
                    "runtime": 6000,
                    "request": 7500,
                    "child-request": 7500,
                    "guaranteed": 3500,
                    "allocated": 3500,
                    "non-preemptible-request": 500,
                    "non-preemptible-used": 500,
                },
            ),
        )
        for field, amount in amounts.items()
    }
    assert [line for line in quota_lines(bed.table) if 'name="koordinator-' not in line] == [
        line
        for kind, text in (
            ("spec", "What quotas say."),
            ("status", "What quotas request, use and may use."),
        )
        for gauge in (f"scheduler_elastic_quota_{kind}",)
        for line in (
            f"# HELP {gauge} {text}\n# TYPE {gauge} gauge\n",
            *(
                f'{gauge}{{name="{name}",{labels},field="{field}"}} {amount}\n'
                for (name, labels, of, field), amount in shown.items()
                if of == kind
            ),
        )
    ]


def test_a_quota_that_goes_while_gauges_are_read_is_left_out() -> None:
    bed = _bed()
    bed.quota("b", {"cpu": "1"}, {"cpu": "6"})
    lines = quota_lines(bed.table)
    begun = [next(lines), next(lines)]
    bed.table.delete_quota("team/a")
    rest = [*begun, *lines]
    assert not any('name="a"' in line for line in rest)
    assert any('name="b"' in line and 'field="min"' in line for line in rest)


class _Requests:
    """A client that answers each request with the object of `make_quota`."""

    def __init__(self) -> None:
        self.created: list[str] = []
        self.patched: list[str] = []

    async def create(self, resource: Any, body: bytes, *, namespace: str) -> None:
        self.created.append(f"{namespace}/{json.loads(body)['metadata']['name']}")

    async def patch(self, resource: Any, name: str, body: bytes, *, namespace: str) -> bytes:
        self.patched.append(f"{namespace}/{name}")
        return msgspec.json.encode({"metadata": {"name": name, "namespace": namespace}})


def _written(bed: Bed, *quotas: ElasticQuota) -> _Requests:
    """Return what is requested of the API server at first."""
    requests = _Requests()
    by_key: Mapping[str, ElasticQuota] = {
        f"{each.metadata.namespace}/{each.metadata.name}": each for each in quotas
    }
    statuses = QuotaStatuses(
        cast(Client, requests),
        bed.table,
        by_key,
        namespace="koordinator-system",
        built_in=built_in_maxima({}, {}),
    )

    async def run() -> None:
        task = asyncio.create_task(statuses.run())
        # More turns of the loop than all requests take; none of them waits.
        for _ in range(100):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    return requests


def test_a_quota_whose_figures_cannot_be_worked_out_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(table: QuotaTable, name: str) -> QuotaFigures | None:
        if name == "a":
            raise RecursionError
        return figures(table, name)

    monkeypatch.setattr(quota_statuses, "figures", failing)
    bed = _bed()
    bed.quota("b")
    bed.place("3", "b", "1")
    assert _written(bed, make_quota("a"), make_quota("b")).patched == ["team/b"]


def test_a_quota_that_was_edited_is_compared_again_though_no_figure_changed() -> None:
    bed, requests = _bed(), _Requests()
    quotas = {"team/a": make_quota("a"), "team/b": make_quota("b")}
    bed.quota("b")
    statuses = QuotaStatuses(
        cast(Client, requests),
        bed.table,
        quotas,
        namespace="koordinator-system",
        built_in=built_in_maxima({}, {}),
    )

    async def run() -> None:
        task = asyncio.create_task(statuses.run())
        await asyncio.sleep(100)
        once = list(requests.patched)
        assert once.count("team/a") == 1
        await asyncio.sleep(100)
        assert requests.patched == once
        quotas["team/a"] = edited = make_quota("a", annotations={"request": '{"cpu":"1"}'})
        statuses.seen(Event(Change.MODIFIED, make_quota("a"), edited))
        await asyncio.sleep(100)
        assert requests.patched == [*once, "team/a"]
        task.cancel()
        await asyncio.wait([task])

    in_virtual_time(run)


def test_looks_for_overuse_go_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = asyncio.Event()

    def failing(monitor: OveruseMonitor, now: float) -> tuple[Revoked, ...]:
        looked.set()
        raise RecursionError

    monkeypatch.setattr(OveruseMonitor, "look", failing)
    upkeep = QuotaUpkeep(
        cast(Client, _Requests()),
        Bed().table,
        {},
        ElasticQuotaArgs(monitor_all_quotas=True),
        record=lambda event: None,
        observe=lambda seconds: None,
    )

    async def run() -> None:
        task = asyncio.create_task(upkeep.run())
        await asyncio.wait_for(looked.wait(), 60)
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert upkeep.faults.count == 1


@pytest.mark.parametrize(("interval", "between_s"), [(30.0, 30.0), (0.001, 0.1)])
def test_overuse_is_looked_for_at_the_interval_of_the_arguments(
    monkeypatch: pytest.MonkeyPatch, interval: float, between_s: float
) -> None:
    """An interval near 0 would take all of the scheduler's time."""
    looks: list[float] = []

    def looking(monitor: OveruseMonitor, now: float) -> tuple[Revoked, ...]:
        looks.append(now)
        return ()

    monkeypatch.setattr(OveruseMonitor, "look", looking)
    upkeep = QuotaUpkeep(
        cast(Client, _Requests()),
        Bed().table,
        {},
        ElasticQuotaArgs(monitor_all_quotas=True, revoke_pod_interval=Seconds(interval)),
        record=lambda event: None,
        observe=lambda seconds: None,
    )

    async def run() -> None:
        task = asyncio.create_task(upkeep.run())
        await asyncio.sleep(100)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    in_virtual_time(run)
    assert len(looks) > 2
    assert all(b - a == pytest.approx(between_s) for a, b in pairwise(looks))


@pytest.mark.parametrize(
    ("all_quotas", "runtime_quota", "watched"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_overuse_is_watched_only_where_quotas_are_monitored_and_shared_at_run_time(
    all_quotas: bool, runtime_quota: bool, watched: bool
) -> None:
    """The runtime falls while pods run, when others want their share; the maximum does not."""
    upkeep = QuotaUpkeep(
        cast(Client, _Requests()),
        Bed().table,
        {},
        ElasticQuotaArgs(monitor_all_quotas=all_quotas, enable_runtime_quota=runtime_quota),
        record=lambda event: None,
        observe=lambda seconds: None,
    )
    assert (upkeep.monitor is not None) is watched


def test_a_built_in_name_in_another_namespace_is_no_built_in_quota() -> None:
    bed = _bed()
    bed.place("3", "", "1")
    names = ["koordinator-root-quota", "koordinator-default-quota", "koordinator-system-quota"]
    foreign = [make_quota(name, namespace="team") for name in names]
    own = make_quota("koordinator-default-quota", namespace="koordinator-system")
    requests = _written(bed, *foreign, own, make_quota("a"))
    assert sorted(requests.created) == [
        "koordinator-system/koordinator-root-quota",
        "koordinator-system/koordinator-system-quota",
    ]
    assert sorted(requests.patched) == ["koordinator-system/koordinator-default-quota", "team/a"]


def test_minimums_are_shown_as_they_count_now() -> None:
    for scale, expected in ((True, {"cpu": 5000}), (False, {"cpu": 20000})):
        bed = Bed("10", sharing=Sharing(scale=scale))
        for name in ("a", "b"):
            bed.quota(name, {"cpu": "20"}, {"cpu": "30"})
        assert _figures(bed).scaled_least == expected
    # The default quota divides nothing with others.
    bed = Bed("10")
    built_in = {"namespace": "koordinator-system"}
    assert not bed.quota("koordinator-default-quota", {"cpu": "20"}, {"cpu": "30"}, **built_in)
    assert _figures(bed, "koordinator-default-quota").scaled_least == {"cpu": 20000}


def test_figures_tell_a_quotas_own_pods_from_those_below_and_firm_ones_from_others() -> None:
    bed = Bed("10", sharing=Sharing(guarantee=True))
    bed.quota("top", {"cpu": "4"}, {"cpu": "9"}, weight={"cpu": "3"})
    bed.quota("leaf", {"cpu": "2"}, {"cpu": "6"}, parent="top", lends=False)

    def firm(quota: str, cpu: str) -> PodShape:
        return bed.shape(quota, cpu, labels={PREFIX + "preemptible": "false"})

    bed.place("1", "leaf", "3")
    bed.want("2", "leaf", "4")
    bed.table.place(Booking("default/3", "3", firm("leaf", "500m"), "n0"))
    bed.table.want("4", firm("leaf", "250m"))
    bed.table.place(Booking("default/5", "5", firm("top", "125m"), "n0"))

    def cpu(amount: int) -> dict[str, int]:
        return {"cpu": amount}

    assert _figures(bed, "leaf") == QuotaFigures(
        name="leaf",
        parent="top",
        is_parent=False,
        tree="",
        lends=False,
        least=cpu(2000),
        most=cpu(6000),
        weight=cpu(6000),
        scaled_least=cpu(2000),
        runtime=cpu(6000),
        request=cpu(7750),
        child_request=cpu(7750),
        used=cpu(3500),
        firm_request=cpu(750),
        firm_used=cpu(500),
        own_request=cpu(7750),
        own_used=cpu(3500),
        own_firm_request=cpu(750),
        own_firm_used=cpu(500),
        allocated=cpu(3500),
        guaranteed=cpu(3500),
        unschedulable={},
    )
    assert _figures(bed, "top") == QuotaFigures(
        name="top",
        parent="koordinator-root-quota",
        is_parent=True,
        tree="",
        lends=True,
        least=cpu(4000),
        most=cpu(9000),
        weight=cpu(3000),
        scaled_least=cpu(4000),
        # The request of the quota below counts up to its maximum.
        runtime=cpu(6125),
        request=cpu(6125),
        child_request=cpu(6125),
        used=cpu(3625),
        firm_request=cpu(875),
        firm_used=cpu(625),
        own_request=cpu(125),
        own_used=cpu(125),
        own_firm_request=cpu(125),
        own_firm_used=cpu(125),
        allocated=cpu(3625),
        guaranteed=cpu(4000),
        unschedulable={},
    )
