"""Which pods ElasticQuota admits, and what it says to the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cluster.scheduler.cycle.events import POD, ClusterEvent, may_help
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.quotas.elastic_quota import (
    ELASTIC_QUOTA,
    ElasticQuotaAdmission,
    QuotaHint,
)
from cluster.scheduler.registrations import registrations
from cluster.scheduler.sources.cluster import pod_actions
from cluster.scheduler.tables.booking import Booking
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.quotas.table import Terminating
from cluster.scheduler.tables.shapes import PodShape
from tests.cluster.scheduler.making import make_pod
from tests.cluster.scheduler.quotas.making import PREFIX, Bed


def _shape(bed: Bed, requests: dict[str, str], *, quota: str = "a", firm: bool = False) -> PodShape:
    labels = {PREFIX + "name": quota}
    if firm:
        labels[PREFIX + "preemptible"] = "false"
    return bed.shapes.of(make_pod("p", requests=requests, labels=labels))


def _message(bed: Bed, shape: PodShape, **settings: Any) -> str | None:
    admission = ElasticQuotaAdmission(bed.table, **settings)
    refusal = admission.refusal(shape)
    bed.table.want("counted", shape)
    pod = PendingPod(key="default/p", uid="counted", priority=0, shape=shape, created=0.0)
    hint = QuotaHint({shape.scheduler_name: admission})
    assert hint(pod, None, None) is (refusal is None)
    bed.table.unwant("counted")
    return None if refusal is None else str(refusal)


def _use(bed: Bed, requests: dict[str, str], *, quota: str = "a", firm: bool = False) -> None:
    shape = _shape(bed, requests, quota=quota, firm=firm)
    uid = str(len(list(bed.table.pods(bed.table.quotas[quota]))))
    bed.table.place(Booking(f"default/{uid}", f"{quota}-{uid}", shape, "n0"))


def test_a_pod_passes_up_to_the_runtime_and_is_refused_beyond_it() -> None:
    bed = Bed("100")
    bed.quota("a", {"cpu": "4"}, {"cpu": "10", "memory": "40Gi"})
    _use(bed, {"cpu": "8", "memory": "8Gi"})
    assert _message(bed, _shape(bed, {"cpu": "2"})) is None
    assert _message(bed, _shape(bed, {"cpu": "2500m", "memory": "1Gi"})) == (
        "Insufficient quotas, quotaName: a, runtime: cpu:10,memory:9Gi, used: cpu:8,memory:8Gi, "
        "pod's request: cpu:2500m,memory:1Gi, exceedDimensions: [cpu]"
    )
    assert _message(bed, _shape(bed, {"cpu": "3", "memory": "33Gi"})) == (
        "Insufficient quotas, quotaName: a, runtime: cpu:10,memory:40Gi, used: cpu:8,memory:8Gi, "
        "pod's request: cpu:3,memory:33Gi, exceedDimensions: [cpu memory]"
    )


def test_a_resource_that_the_pod_does_not_request_does_not_hold_it_back() -> None:
    bed = Bed("100")
    bed.quota("a", {}, {"cpu": "10", "memory": "40Gi"})
    _use(bed, {"cpu": "10", "memory": "50Gi"})
    assert _message(bed, _shape(bed, {"example.com/x": "1"})) is None
    assert "exceedDimensions: [memory]" in str(_message(bed, _shape(bed, {"memory": "1"})))


def test_lent_room_is_used_until_it_is_wanted_back() -> None:
    bed = Bed("10")
    bed.quota("a", {"cpu": "5"}, {"cpu": "10"})
    bed.quota("b", {"cpu": "5"}, {"cpu": "10"})
    one = _shape(bed, {"cpu": "1"})
    for _ in range(7):
        assert _message(bed, one) is None
        _use(bed, {"cpu": "1"})
    bed.want("w", "b", "5")
    assert "runtime: cpu:5," in str(_message(bed, one))
    assert _message(bed, _shape(bed, {"cpu": "5"}, quota="b")) is None
    bed.table.unwant("w")
    assert _message(bed, one) is None


def test_the_maximum_is_the_limit_without_runtime_quota() -> None:
    bed = Bed("10")
    bed.quota("a", {"cpu": "1"}, {"cpu": "30"})
    shape = _shape(bed, {"cpu": "20"})
    assert _message(bed, shape) is not None
    assert _message(bed, shape, runtime=False) is None
    assert _message(bed, _shape(bed, {"cpu": "31"}), runtime=False) is not None


def test_pods_that_are_not_preemptible_fit_into_the_minimum_together() -> None:
    bed = Bed("100")
    bed.quota("a", {"cpu": "4"}, {"cpu": "20"})
    _use(bed, {"cpu": "10"})
    _use(bed, {"cpu": "3"}, firm=True)
    assert _message(bed, _shape(bed, {"cpu": "1"}, firm=True)) is None
    assert _message(bed, _shape(bed, {"cpu": "2"})) is None
    assert _message(bed, _shape(bed, {"cpu": "2"}, firm=True)) == (
        "Insufficient non-preemptible quotas, quotaName: a, min: cpu:4, nonPreemptibleUsed: cpu:3, "
        "pod's request: cpu:2, exceedDimensions: [cpu]"
    )


def test_the_quotas_above_need_room_too_where_they_are_checked() -> None:
    bed = Bed("100")
    bed.quota("top", {"cpu": "10"}, {"cpu": "10"}, labels={"is-parent": "true"})
    bed.quota("a", {"cpu": "5"}, {"cpu": "10"}, parent="top")
    bed.quota("b", {"cpu": "5"}, {"cpu": "10"}, parent="top")
    _use(bed, {"cpu": "8"})
    shape = _shape(bed, {"cpu": "4"}, quota="b")
    bed.table.want("w", shape)
    assert _message(bed, shape) is None
    refusal = ElasticQuotaAdmission(bed.table, parents=True).refusal(shape)
    assert refusal is not None
    assert refusal.resolvable
    assert _message(bed, shape, parents=True) == (
        "Insufficient quotas, quotaNameTopo: [top b], runtime: cpu:10, used: cpu:8, "
        "pod's request: cpu:4, exceedDimensions: [cpu]"
    )


def test_pods_of_a_quota_that_cannot_be_used_are_refused_with_the_reason() -> None:
    bed = Bed()
    bed.quota("a", {"cpu": "2"}, {"cpu": "1"})
    message = str(_message(bed, _shape(bed, {"cpu": "1"})))
    assert message.startswith("the quota cannot be used: ElasticQuota team/a: spec.min.cpu = '2'")


def test_a_refusal_names_the_plugin_and_whether_evictions_may_help() -> None:
    bed = Bed("10")
    bed.quota("a", {"cpu": "1"}, {"cpu": "10"})
    admission = ElasticQuotaAdmission(bed.table)
    with pytest.raises(Refusal) as refused:
        admission.check(_shape(bed, {"cpu": "11"}), None)  # type: ignore[arg-type]
    assert refused.value.plugin == "ElasticQuota"
    assert refused.value.resolvable
    firm = admission.refusal(_shape(bed, {"cpu": "2"}, firm=True))
    assert firm is not None
    assert not firm.resolvable


def test_a_trial_of_a_pod_changes_no_count() -> None:
    bed = Bed("10")
    bed.quota("a", {}, {"cpu": "10"})
    before = bed.table.quotas["a"].own.request.copy()
    assert _message(bed, _shape(bed, {"cpu": "9"})) is None
    assert _message(bed, _shape(bed, {"cpu": "11"})) is not None
    assert bed.table.quotas["a"].own.request == before


def test_a_pod_that_is_known_as_pending_is_not_counted_twice_during_its_trial() -> None:
    bed = Bed("10")
    bed.quota("a", {}, {"cpu": "10"})
    shape = _shape(bed, {"cpu": "4"})
    quota = bed.table.quotas["a"]
    belongs = bed.table.of(shape)
    with bed.table.counted(belongs):
        assert quota.own.request["cpu"] == 4000
    bed.table.want("p", shape)
    with bed.table.counted(belongs):
        assert quota.own.request["cpu"] == 4000
    _use(bed, {"cpu": "4"})
    bed.table.unwant("p")
    with bed.table.counted(belongs):
        assert quota.own.request["cpu"] == 8000


def test_the_hint_is_whether_the_pod_would_pass_now() -> None:
    bed = Bed("10")
    bed.quota("a", {}, {"cpu": "10"})
    _use(bed, {"cpu": "8"})
    shape = bed.shapes.of(
        make_pod("p", requests={"cpu": "4"}, labels={PREFIX + "name": "a"}, schedulerName="s")
    )
    bed.table.want("p", shape)
    pod = PendingPod(key="default/p", uid="p", priority=0, shape=shape, created=0.0)
    hint = QuotaHint({"s": ElasticQuotaAdmission(bed.table)})
    assert not hint(pod, None, None)
    bed.quota("a", {}, {"cpu": "12"})
    bed.set_cpu("12")
    assert hint(pod, None, None)


def test_a_pod_is_tried_when_another_begins_to_be_deleted_and_counts_no_more() -> None:
    bed = Bed("10", terminating=Terminating.NEVER)
    bed.quota("a", {}, {"cpu": "4"})
    booking = bed.place("1", "a", "4")
    shape = bed.shapes.of(
        make_pod("p", requests={"cpu": "4"}, labels={PREFIX + "name": "a"}, schedulerName="s")
    )
    bed.table.want("p", shape)
    pod = PendingPod(key="default/p", uid="p", priority=0, shape=shape, created=0.0)
    old = make_pod("1", node="n0")
    meta = msgspec.structs.replace(old.metadata, deletion_timestamp="2026-01-01T00:00:00Z")
    new = msgspec.structs.replace(old, metadata=meta)
    event = ClusterEvent(POD, pod_actions(old, new), old, new)
    table = registrations(QuotaHint({"s": ElasticQuotaAdmission(bed.table)}))
    interest = table.interest(event.kind, event.action)
    assert not may_help(pod, [ELASTIC_QUOTA], event, interest)
    bed.table.place(replace(booking, terminating=True))
    assert may_help(pod, [ELASTIC_QUOTA], event, interest)


def test_a_refusal_names_all_quotas_from_the_first_that_is_full() -> None:
    bed = Bed("100")
    for name, most, parent in (("top", "10", ""), ("mid", "20", "top"), ("low", "30", "mid")):
        labels = {"is-parent": "true"}
        bed.quota(name, {}, {"cpu": most}, parent=parent, labels=labels)
    bed.quota("a", {}, {"cpu": "40"}, parent="low")
    message = _message(bed, _shape(bed, {"cpu": "11"}), parents=True, runtime=False)
    assert message == (
        "Insufficient quotas, quotaNameTopo: [top mid low a], runtime: cpu:10, used: , "
        "pod's request: cpu:11, exceedDimensions: [cpu]"
    )
    assert _message(bed, _shape(bed, {"cpu": "10"}), parents=True, runtime=False) is None


def test_a_pod_of_a_scheduler_without_quotas_is_tried_at_each_change() -> None:
    bed = Bed("10")
    bed.quota("a", {}, {"cpu": "10"})
    shape = _shape(bed, {"cpu": "11"})
    pod = PendingPod(key="default/p", uid="p", priority=0, shape=shape, created=0.0)
    admission = ElasticQuotaAdmission(bed.table)
    assert QuotaHint({"another": admission})(pod, None, None)
    assert not QuotaHint({shape.scheduler_name: admission})(pod, None, None)
